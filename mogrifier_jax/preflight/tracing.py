"""What is known before a program is compiled: tasks without their text, and counts of FLOPs.

An abstract task has the shapes and shardings of streams on chips that are not here; `estimates.py`
compiles with them what `tasks.py` would feed. Corpora of known size need not be there at all.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax.data import corpora, streams, tasks


class Size(NamedTuple):
    """What decides the shapes of a stream."""

    vocabulary: int
    unit: str
    tokens: int  # Of the training text,
    lines: int  # and its lines.
    valid_tokens: int
    valid_lines: int


SIZES = {
    "ptb": Size(10_001, "word", 929_589, 42_068, 73_760, 3_370),
    "ptb_char": Size(51, "character", 5_017_483, 42_069, 393_043, 3_371),
    "wikitext2": Size(33_279, "word", 2_088_628, 36_718, 217_646, 3_760),
    "enwik8": Size(206, "byte", 90_000_001, 1_017_183, 5_000_001, 54_258),
    "mwc": Size(300, "character", 10_000_000, 100_000, 500_000, 5_000),
}
ASSUMED = {"mwc": "the size of the corpus is assumed: 10M characters of 300 kinds"}


def make_task(section: Mapping[str, Any], mesh: Mesh) -> tasks.Task:
    """The task of `config.data` with an abstract stream; it can be traced, not run."""
    if section["name"] in tasks.GENERATED:  # On the device: there is no stream.
        return tasks.make_task(jax.random.key(0), mesh, **section)
    size = find_size(section)
    batch_size, window = section["batch_size"], section["window"]
    episodic = section.get("episodic", False)

    def leaf(*shape, dtype=jnp.int32, axes=()):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    shared = dict(
        tokens=leaf(size.tokens, dtype=_smallest_dtype(size.vocabulary)),
        key=leaf(dtype=jax.eval_shape(jax.random.key, 0).dtype),
        eos=leaf(),
    )
    stream: Any
    if episodic:
        stream = streams.LineStream(bounds=leaf(size.lines + 1), **shared)
        train_lines = functools.partial(streams.train_lines, batch_size=batch_size, window=window)
        batch_at = tasks.spread(train_lines, mesh)
    else:
        stripes = leaf(batch_size, axes=["data"])
        stream = streams.TrainStream(
            line_starts=leaf(size.lines), stripes=stripes, bases=stripes, **shared
        )
        batch_at = functools.partial(streams.train_window, window=window)
    vocabulary: Any = range(size.vocabulary)  # Only its length is asked for.

    def plan(split, num_stripes):
        tokens, lines = size.tokens, size.lines
        if split == "valid":
            tokens, lines = size.valid_tokens, size.valid_lines
        text = dict(shared, tokens=leaf(tokens, dtype=shared["tokens"].dtype))
        evaluated: Any
        if episodic:
            evaluated = streams.LineStream(bounds=leaf(lines + 1), **text)
            cut = functools.partial(streams.eval_lines, batch_size=num_stripes, window=window)
            return tasks.Plan(evaluated, cut, -(-lines // num_stripes), num_stripes, carries=False)
        stripes = num_stripes + -num_stripes % mesh.shape["data"]
        ends = leaf(stripes, axes=["data"])
        evaluated = streams.EvalStream(text["tokens"], begins=ends, ends=ends, eos=text["eos"])
        cut = functools.partial(streams.eval_window, window=window)
        # Stripes are taken to be equally long; real ones end with a line.
        return tasks.Plan(evaluated, cut, -(-tokens // num_stripes // window), stripes, True)

    return tasks.Task(
        vocabulary,
        size.unit,
        carries=not episodic,
        stream=stream,
        batch_at=batch_at,
        plan=plan,
        num_lines=lambda split: 1 << 30 if episodic else size.valid_lines,
        summary=(),
    )


def find_size(section: Mapping[str, Any]) -> Size:
    """From the table, or of the corpus itself, which is then read."""
    if section["name"] in SIZES:
        return SIZES[section["name"]]
    corpus = corpora.load_corpus(section["name"], **tasks.corpus_options(section))
    splits = (corpus.train, corpus.valid)
    counts = (count for split in splits for count in (len(split.tokens), len(split.line_starts)))
    return Size(len(corpus.vocabulary), corpus.unit, *counts)


def _smallest_dtype(vocab_size: int) -> Any:
    """As `Vocabulary.dtype`."""
    return np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.int32


def count_flops(jaxpr: jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr) -> int:
    """Matmul and convolution FLOPs of a traced function, loops and recomputation included.

    The count is exact, and the same on every backend: compilers rewrite matmuls.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [count_flops(sub) for sub in _subjaxprs(params)]
        if name == "dot_general":
            total += _dot_general(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        elif name == "scan":
            total += params["length"] * sum(inner)
        elif name == "shard_map":
            total += params["mesh"].size * sum(inner)  # The body is one shard's work.
        elif name == "cond" and params.get("branches_platforms"):
            total += min(inner)  # The same result on each platform; the work it needs anywhere.
        elif name == "cond":
            total += max(inner)
        elif name == "while" and any(inner):
            raise ValueError("a while loop with matmuls has no static FLOP count; use lax.scan")
        else:
            total += sum(inner)
    return total


def _subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Every jaxpr held by an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                yield item


def _dot_general(equation: jax.extend.core.JaxprEqn) -> int:
    """Twice the products: every output element sums over the contracted axes."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = _shape(equation.invars[0]), _shape(equation.outvars[0])
    return 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)


def _convolution(equation: jax.extend.core.JaxprEqn) -> int:
    """Twice the output size times the window and its input features."""
    numbers = equation.params["dimension_numbers"]
    kernel, out = _shape(equation.invars[1]), _shape(equation.outvars[0])
    return 2 * math.prod(out) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape

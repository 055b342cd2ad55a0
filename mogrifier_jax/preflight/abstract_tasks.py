"""Tasks without their text: the shapes and shardings of streams on chips that are not here.

`estimates.py` compiles with them what `tasks.py` would feed. Corpora of known size need not be
there at all.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
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

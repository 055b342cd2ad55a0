"""Tasks with shapes instead of data, which preflight compiles for chips that are not present.

The shapes of a stream follow from the size of the corpus, so a corpus in SIZES is not read.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax.data import corpora, line_examples, placement, streams, tasks, vocabularies


class Size(NamedTuple):
    """The sizes of a corpus, which determine the shapes of its streams."""

    vocabulary: int
    unit: str
    train: tuple[int, int]  # Tokens and lines.
    valid: tuple[int, int]


SIZES = {
    "ptb": Size(10_001, "word", (929_589, 42_068), (73_760, 3_370)),
    "ptb_char": Size(51, "character", (5_017_483, 42_069), (393_043, 3_371)),
    "wikitext2": Size(33_279, "word", (2_088_628, 36_718), (217_646, 3_760)),
    "enwik8": Size(206, "byte", (90_000_001, 1_017_183), (5_000_001, 54_258)),
    "text8": Size(29, "byte", (90_000_900, 900), (5_000_050, 50)),
    "mwc": Size(300, "character", (10_000_000, 100_000), (500_000, 5_000)),
}
# Notes on the sizes in the table that are not known.
ASSUMED = {"mwc": "the size of the corpus is assumed: 10M characters of 300 kinds"}


def make_abstract_task(section: Mapping[str, Any], mesh: Mesh) -> tasks.Task:
    """The task that `config.data` describes, on a mesh of abstract devices.

    Its stream has shapes, dtypes and shardings only, so it can be traced but not run.
    """
    if section["name"] in tasks.GENERATED:  # Examples are generated, so there is no stream.
        return tasks.make_task(jax.random.key(0), mesh, **section)
    size = _find_size(section)
    batch_size, window = section["batch_size"], section["window"]
    vocabulary: Any = range(size.vocabulary)  # Only its length is read.

    def abstract(*shape: int, dtype: Any = jnp.int32, axes: tuple[str, ...] = ()) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    key, eos = abstract(dtype=jax.eval_shape(jax.random.key, 0).dtype), abstract()

    def read(split: str) -> tuple[Any, int]:
        tokens, num_lines = size.valid if split == "valid" else size.train
        return abstract(tokens, dtype=vocabularies.smallest_dtype(size.vocabulary)), num_lines

    def read_lines(split: str) -> line_examples.LineStream:
        tokens, num_lines = read(split)
        return line_examples.LineStream(tokens, abstract(num_lines + 1), key, eos)

    def plan_lines(split: str, num_stripes: int) -> tasks.Plan:
        stream = read_lines(split)
        batch_at = functools.partial(
            line_examples.eval_lines, batch_size=num_stripes, window=window
        )
        count = -(-(stream.bounds.shape[0] - 1) // num_stripes)
        return tasks.Plan(stream, batch_at, count, num_stripes, carries=False, mesh=mesh)

    def plan_stripes(split: str, num_stripes: int) -> tasks.Plan:
        tokens, _ = read(split)
        ends = abstract(placement.round_up_batch(num_stripes, mesh), axes=("data",))
        stream = streams.EvalStream(tokens, begins=ends, ends=ends, eos=eos)
        batch_at = functools.partial(streams.eval_window, window=window)
        # Stripes are taken to be equally long; real ones end with a line.
        count = -(-tokens.shape[0] // num_stripes // window)
        return tasks.Plan(stream, batch_at, count, ends.shape[0], carries=True, mesh=mesh)

    if section.get("episodic", False):
        train_lines = functools.partial(
            line_examples.train_lines, batch_size=batch_size, window=window
        )
        return tasks.Task(
            vocabulary,
            size.unit,
            carries=False,
            stream=read_lines("train"),
            batch_at=placement.split_batch(train_lines, mesh),
            plan=plan_lines,
        )
    (tokens, num_lines), stripes = read("train"), abstract(batch_size, axes=("data",))
    return tasks.Task(
        vocabulary,
        size.unit,
        carries=True,
        stream=streams.TrainStream(tokens, abstract(num_lines), stripes, stripes, key, eos),
        batch_at=functools.partial(streams.train_window, window=window),
        plan=plan_stripes,
        num_lines=lambda split: size.valid[1],
    )


def _find_size(section: Mapping[str, Any]) -> Size:
    """The size from the table, or from the corpus itself, which is then read."""
    if section["name"] in SIZES:
        return SIZES[section["name"]]
    options = {key: value for key, value in section.items() if key not in tasks.READING}
    corpus = corpora.load_corpus(section["name"], **options)
    train, valid = ((len(s.tokens), len(s.line_starts)) for s in (corpus.train, corpus.valid))
    return Size(len(corpus.vocabulary), corpus.unit, train, valid)

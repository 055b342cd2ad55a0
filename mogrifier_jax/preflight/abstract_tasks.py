"""Tasks without their text: the shapes and shardings of streams on chips that are not here.

`preflight.py` compiles with them what `tasks.py` would feed. Corpora of known size need not be
there at all.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax.data import corpora, episodes, streams, tasks


class Size(NamedTuple):
    """What decides the shapes of a stream."""

    vocabulary: int
    unit: str
    tokens: int  # Of the training text,
    lines: int  # and its lines.


SIZES = {
    "ptb": Size(10_001, "word", 929_589, 42_068),
    "ptb_char": Size(51, "character", 5_017_483, 42_069),
    "wikitext2": Size(33_279, "word", 2_088_628, 36_718),
    "enwik8": Size(206, "byte", 90_000_001, 1_017_183),
    "mwc": Size(300, "character", 10_000_000, 100_000),
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
        stream = episodes.LineStream(bounds=leaf(size.lines + 1), **shared)
        train_lines = functools.partial(episodes.train_lines, batch_size=batch_size, window=window)
        batch_at = tasks.spread(train_lines, mesh)
    else:
        stripes = leaf(batch_size, axes=["data"])
        stream = streams.TrainStream(
            line_starts=leaf(size.lines), stripes=stripes, bases=stripes, **shared
        )
        batch_at = functools.partial(streams.train_window, window=window)
    vocabulary: Any = range(size.vocabulary)  # Only its length is asked for.
    plan: Any = None
    return tasks.Task(
        vocabulary,
        size.unit,
        carries=not episodic,
        stream=stream,
        batch_at=batch_at,
        plan=plan,
        num_lines=lambda split: size.lines,
        summary=(),
    )


def find_size(section: Mapping[str, Any]) -> Size:
    """From the table, or of the corpus itself, which is then read."""
    if section["name"] in SIZES:
        return SIZES[section["name"]]
    corpus = corpora.load_corpus(section["name"], **tasks.corpus_options(section))
    train = corpus.train
    return Size(len(corpus.vocabulary), corpus.unit, len(train.tokens), len(train.line_starts))


def _smallest_dtype(vocab_size: int) -> Any:
    """As `Vocabulary.dtype`."""
    return np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.int32

"""Lines of a text as independent examples: batches are pure functions of an index.

Letters: B lines (the batch), T window, N lines of the split. No state is carried from one batch to
the next. In training the lines are shuffled anew in each epoch (`permutations.py`), and in
evaluation they come in the order of the text.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mogrifier_jax import errors
from mogrifier_jax.data import permutations, placement, streams, vocabularies


class LineStream(NamedTuple):
    """Every line of a split as an example."""

    tokens: jax.Array  # [total], the smallest dtype that holds V.
    bounds: jax.Array  # [N + 1] int32: line n is tokens[bounds[n]:bounds[n + 1]], eos included.
    key: jax.Array  # Of the order in training.
    eos: jax.Array  # [] int32.


def make_line_stream(
    split: vocabularies.EncodedSplit, key: jax.Array, eos_id: int, mesh: Mesh | None = None
) -> LineStream:
    """Puts a split on every device."""
    if not len(split.tokens):
        raise errors.UsageError("a split without lines has no examples; give it some text")
    bounds = np.append(split.line_starts, len(split.tokens)).astype(np.int32)
    return placement.place_stream(
        LineStream, mesh, tokens=split.tokens, bounds=bounds, key=key, eos=np.int32(eos_id)
    )


def limit_window(split: vocabularies.EncodedSplit, window: int) -> int:
    """The length of the longest line with its eos, or `window` if that is shorter."""
    return min(window, int(np.diff(split.line_starts, append=len(split.tokens)).max()))


def train_lines(
    stream: LineStream, index: jax.Array | int, *, batch_size: int, window: int
) -> streams.Window:
    """The training batch at this index, in shuffled order, for any number of epochs."""
    num_lines = stream.bounds.shape[0] - 1
    examples = permutations.shuffled_examples(stream.key, index, batch_size, num_lines)
    return _take_lines(stream, examples, window)


def eval_lines(
    stream: LineStream, index: jax.Array | int, *, batch_size: int, window: int
) -> streams.Window:
    """The batch at this index in the order of the text; rows after the last line have length 0."""
    return _take_lines(stream, index * batch_size + jnp.arange(batch_size), window)


def _take_lines(stream: LineStream, examples: jax.Array, window: int) -> streams.Window:
    """Lines [B], with eos before the inputs and after the targets; long lines are cut to T - 1."""
    last = stream.bounds.shape[0] - 2
    present = examples <= last
    examples = jnp.minimum(examples, last)
    begins = stream.bounds[examples]
    lengths = jnp.where(present, jnp.minimum(stream.bounds[examples + 1] - begins, window), 0)
    steps = jnp.arange(window)[None]
    tokens = stream.tokens.at[begins[:, None] + steps].get(mode="clip").astype(jnp.int32)
    shifted = jnp.concatenate(
        [jnp.broadcast_to(stream.eos, (len(examples), 1)), tokens[:, :-1]], axis=1
    )
    targets = jnp.where(steps == lengths[:, None] - 1, stream.eos, tokens)
    valid = steps < lengths[:, None]
    return streams.Window(jnp.where(valid, shifted, 0), jnp.where(valid, targets, 0), lengths)

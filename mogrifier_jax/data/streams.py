"""Cuts a text into stripes, and these into windows, each a pure function of its index.

A stripe is a row of the batch. The model carries its state along it from window to window. In
training each stripe reads the whole text again and again, T tokens per window. In evaluation the
stripes divide the text, so that every token is read once. The position in the text follows from the
index of a window, so the index is all that a run has to save. `vocabularies.py` makes the ids, and
`placement.py` puts them on the devices.

Letters: B stripes (the batch), T window, N lines, K passes that meet in one window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mogrifier_jax import errors
from mogrifier_jax.data import index_arithmetic, placement, vocabularies

MAX_JITTER = 100  # Lines, to either side of a stripe's base.
MAX_TOKENS = 2**31 - 2**20  # Positions are int32, with room for one window.


class Window(NamedTuple):
    """The tokens that a model reads and predicts; `lengths` is None if every row is full."""

    inputs: jax.Array  # [B, T] int32.
    targets: jax.Array  # [B, T] int32.
    lengths: jax.Array | None = None  # [B] int32; entries past the length are zero padding.


class TrainStream(NamedTuple):
    """Endless stripes, each of which reads the whole text again and again."""

    tokens: jax.Array  # [total], the smallest dtype that holds V.
    line_starts: jax.Array  # [N] int32.
    stripes: jax.Array  # [B] int32: 0 to B - 1, so that each shard knows which stripes it has.
    bases: jax.Array  # [B] int32: the line near which each pass of a stripe starts.
    key: jax.Array  # For the jitter.
    eos: jax.Array  # [] int32.


class EvalStream(NamedTuple):
    """Consecutive stripes that together contain every token of a split once."""

    tokens: jax.Array  # [total].
    begins: jax.Array  # [B] int32: the first token of each stripe.
    ends: jax.Array  # [B] int32: one past the last token of each stripe.
    eos: jax.Array  # [] int32.


def make_train_stream(
    split: vocabularies.EncodedSplit,
    batch_size: int,
    key: jax.Array,
    eos_id: int,
    mesh: Mesh | None = None,
) -> TrainStream:
    """B stripes whose bases are equally many lines apart; the base of the first is random."""
    _check_split(split)
    num_lines = len(split.line_starts)
    if not 1 <= batch_size <= num_lines:
        raise errors.UsageError(
            f"batch_size {batch_size} does not fit a training text of {num_lines} lines: each "
            f"stripe starts at a line of its own; take 1 to {num_lines}, or a text with more lines"
        )
    base_key, jitter_key = jax.random.split(key)
    base = int(jax.random.randint(base_key, (), 0, num_lines))
    stripes = np.arange(batch_size)
    bases = (base + stripes * num_lines // batch_size) % num_lines
    return placement.place_stream(
        TrainStream,
        mesh,
        tokens=split.tokens,
        line_starts=split.line_starts.astype(np.int32),
        stripes=stripes.astype(np.int32),
        bases=bases.astype(np.int32),
        key=jitter_key,
        eos=np.int32(eos_id),
    )


def train_window(stream: TrainStream, index: jax.Array | int, *, window: int) -> Window:
    """The window at this index: B rows of T tokens, always full."""
    total = stream.tokens.shape[0]
    passes, offset = index_arithmetic.divmod_product(index, window, total)
    # The first input is the token before the first target, which may belong to the previous pass.
    passes = jnp.where(offset > 0, passes, passes - 1)
    offset = jnp.where(offset > 0, offset, total) - 1
    steps = offset + jnp.arange(window + 1)
    num_passes = (total - 1 + window) // total + 1
    firsts = _first_tokens(stream, passes + jnp.arange(num_passes, dtype=jnp.uint32))  # [B, K]
    firsts = firsts.at[:, steps // total].get(mode="promise_in_bounds")  # [B, T + 1]
    positions = firsts - (total - steps % total)[None]  # Unlike the sum, this stays below 2^31.
    positions = jnp.where(positions < 0, positions + total, positions)
    tokens = stream.tokens.at[positions].get(mode="promise_in_bounds").astype(jnp.int32)
    first_input = jnp.where(jnp.asarray(index) == 0, stream.eos, tokens[:, 0])
    inputs = jnp.concatenate([first_input[:, None], tokens[:, 1:-1]], axis=1)
    return Window(inputs, tokens[:, 1:])


def draw_jitter(key: jax.Array, stripe: jax.Array, pass_number: jax.Array) -> jax.Array:
    """The distance in lines from a stripe's base to the start of one of its passes."""
    key = jax.random.fold_in(jax.random.fold_in(key, stripe), pass_number)
    # Uniform to within 2^-24, which saves the second draw that `randint` makes.
    return (jax.random.bits(key) % (2 * MAX_JITTER + 1)).astype(jnp.int32) - MAX_JITTER


def keep_state(
    key: jax.Array, index: jax.Array | int, batch_size: int, probability: jax.Array | float
) -> jax.Array:
    """Which stripes [B] keep their carry before this window; before the first window all do.

    Args:
      probability: the probability of dropping the carry.
    """
    dropped = jax.random.bernoulli(jax.random.fold_in(key, index), probability, (batch_size,))
    return ~dropped | (jnp.asarray(index) == 0)


def make_eval_stream(
    split: vocabularies.EncodedSplit, num_stripes: int, eos_id: int, mesh: Mesh | None = None
) -> EvalStream:
    """Divides a split into stripes of whole lines; empty stripes fill up the mesh axis "data"."""
    begins, ends = _eval_stripes(split, num_stripes)
    padding = -len(begins) % (mesh.shape["data"] if mesh else 1)
    return placement.place_stream(
        EvalStream,
        mesh,
        tokens=split.tokens,
        begins=np.pad(begins, (0, padding)).astype(np.int32),
        ends=np.pad(ends, (0, padding)).astype(np.int32),
        eos=np.int32(eos_id),
    )


def eval_window(stream: EvalStream, index: jax.Array | int, *, window: int) -> Window:
    """The window at this index; `lengths` is how many of its tokens each stripe still has."""
    begins, ends = stream.begins[:, None], stream.ends[:, None]
    positions = begins + jnp.asarray(index, jnp.int32) * window + jnp.arange(-1, window)[None]
    tokens = stream.tokens.at[positions].get(mode="clip").astype(jnp.int32)
    tokens = jnp.where(positions < begins, stream.eos, tokens)
    valid = positions[:, 1:] < ends
    inputs = jnp.where(valid, tokens[:, :-1], 0)
    targets = jnp.where(valid, tokens[:, 1:], 0)
    return Window(inputs, targets, valid.sum(axis=1, dtype=jnp.int32))


def num_windows(split: vocabularies.EncodedSplit, num_stripes: int, *, window: int) -> int:
    """How many windows of T tokens the longest evaluation stripe needs."""
    begins, ends = _eval_stripes(split, num_stripes)
    return -(-int((ends - begins).max()) // window)


def _first_tokens(stream: TrainStream, passes: jax.Array) -> jax.Array:
    """Where these passes [K] of every stripe start in the text, [B, K]."""

    def first_token(stripe: jax.Array, base: jax.Array, pass_number: jax.Array) -> jax.Array:
        jitter = draw_jitter(stream.key, stripe, pass_number)
        line = (base + jitter) % stream.line_starts.shape[0]
        return stream.line_starts.at[line].get(mode="promise_in_bounds")

    over_passes = jax.vmap(first_token, in_axes=(None, None, 0))
    return jax.vmap(over_passes, in_axes=(0, 0, None))(stream.stripes, stream.bases, passes)


def _eval_stripes(
    split: vocabularies.EncodedSplit, num_stripes: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first token and the end of every stripe that has lines, [B] each."""
    _check_split(split)
    if num_stripes < 1:
        raise errors.UsageError(f"{num_stripes} evaluation stripes: take at least one")
    num_lines = len(split.line_starts)
    lines = np.unique(np.arange(num_stripes + 1) * num_lines // num_stripes)
    bounds = np.append(split.line_starts, len(split.tokens))[lines]
    return bounds[:-1], bounds[1:]


def _check_split(split: vocabularies.EncodedSplit) -> None:
    if not 0 < len(split.tokens) <= MAX_TOKENS:
        raise errors.UsageError(
            f"a split of {len(split.tokens)} tokens cannot be read: it must have 1 to {MAX_TOKENS}"
        )

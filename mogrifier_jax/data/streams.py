"""Streams of windows: pure functions of an index, for use inside a jitted step.

Letters: B stripes (the batch), T window, N lines, K passes that meet in one window. The ids of
a split lie on every device and the stripes over the mesh axis "data". All training stripes
consume T tokens a window, so the window index alone is the position that a run saves.
`vocabulary.py` makes the ids; `episodes.py` is for examples that stand alone.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax import errors
from mogrifier_jax.data import vocabulary

MAX_JITTER = 100  # Lines, to either side of a stripe's base.
MAX_TOKENS = 2**31 - 2**20  # Positions are int32, with room for one window.


class Window(NamedTuple):
    """What a model reads and predicts; `lengths` is None when every row is full."""

    inputs: jax.Array  # [B, T] int32.
    targets: jax.Array  # [B, T] int32.
    lengths: jax.Array | None = None  # [B] int32; beyond them both hold id 0.


class TrainStream(NamedTuple):
    """Endless stripes, each through the whole text again and again."""

    tokens: jax.Array  # [total], the smallest dtype that holds V.
    line_starts: jax.Array  # [N] int32.
    stripes: jax.Array  # [B] int32: 0 to B - 1, kept so that stripes may be taken apart.
    bases: jax.Array  # [B] int32: the line that each stripe's passes start around.
    key: jax.Array  # For the jitter.
    eos: jax.Array  # [] int32.


class EvalStream(NamedTuple):
    """Every token of a split once, in consecutive stripes."""

    tokens: jax.Array  # [total].
    begins: jax.Array  # [B] int32: the first token of each stripe,
    ends: jax.Array  # [B] int32: and the one behind its last.
    eos: jax.Array  # [] int32.


Stream = TypeVar("Stream")


def make_train_stream(
    split: vocabulary.EncodedSplit,
    batch_size: int,
    key: jax.Array,
    eos_id: int,
    mesh: Mesh | None = None,
) -> TrainStream:
    """Lays B stripes around the text, at equal numbers of lines from a random one."""
    _check(split)
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
    return place(
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
    turn, offset = divmod_product(index, window, total)
    # One token earlier, as each input is the target before it.
    turn, offset = jnp.where(offset > 0, turn, turn - 1), jnp.where(offset > 0, offset, total) - 1
    steps = offset + jnp.arange(window + 1)
    num_turns = (total - 1 + window) // total + 1
    firsts = _first_tokens(stream, turn + jnp.arange(num_turns, dtype=jnp.uint32))  # [B, K]
    firsts = firsts.at[:, steps // total].get(mode="promise_in_bounds")  # [B, T + 1]
    places = firsts - (total - steps % total)[None]  # The sum could pass 2^31, this cannot.
    places = jnp.where(places < 0, places + total, places)
    tokens = stream.tokens.at[places].get(mode="promise_in_bounds").astype(jnp.int32)
    first_input = jnp.where(jnp.asarray(index) == 0, stream.eos, tokens[:, 0])
    inputs = jnp.concatenate([first_input[:, None], tokens[:, 1:-1]], axis=1)
    return Window(inputs, tokens[:, 1:])


def draw_jitter(key: jax.Array, stripe: jax.Array, turn: jax.Array) -> jax.Array:
    """By how many lines a stripe's pass starts away from the stripe's base."""
    key = jax.random.fold_in(jax.random.fold_in(key, stripe), turn)
    # Uniform to within 2^-24; `randint` would draw twice to do better.
    return (jax.random.bits(key) % (2 * MAX_JITTER + 1)).astype(jnp.int32) - MAX_JITTER


def keep_state(
    key: jax.Array, index: jax.Array | int, batch_size: int, probability: jax.Array | float
) -> jax.Array:
    """Which stripes [B] keep their carry before this window; all do before the first."""
    dropped = jax.random.bernoulli(jax.random.fold_in(key, index), probability, (batch_size,))
    return ~dropped | (jnp.asarray(index) == 0)


def make_eval_stream(
    split: vocabulary.EncodedSplit,
    num_stripes: int,
    eos_id: int,
    mesh: Mesh | None = None,
) -> EvalStream:
    """Cuts a split into stripes of whole lines; empty ones fill up the mesh axis "data"."""
    begins, ends = _eval_stripes(split, num_stripes)
    padding = -len(begins) % (mesh.shape["data"] if mesh else 1)
    return place(
        EvalStream,
        mesh,
        tokens=split.tokens,
        begins=np.pad(begins, (0, padding)).astype(np.int32),
        ends=np.pad(ends, (0, padding)).astype(np.int32),
        eos=np.int32(eos_id),
    )


def eval_window(stream: EvalStream, index: jax.Array | int, *, window: int) -> Window:
    """The window at this index, with the lengths that are left in each stripe."""
    begins, ends = stream.begins[:, None], stream.ends[:, None]
    places = begins + jnp.asarray(index, jnp.int32) * window + jnp.arange(-1, window)[None]
    tokens = stream.tokens.at[places].get(mode="clip").astype(jnp.int32)
    tokens = jnp.where(places < begins, stream.eos, tokens)
    valid = places[:, 1:] < ends
    inputs = jnp.where(valid, tokens[:, :-1], 0)
    targets = jnp.where(valid, tokens[:, 1:], 0)
    return Window(inputs, targets, valid.sum(axis=1, dtype=jnp.int32))


def num_windows(split: vocabulary.EncodedSplit, num_stripes: int, *, window: int) -> int:
    """How many windows of T hold the longest evaluation stripe."""
    begins, ends = _eval_stripes(split, num_stripes)
    return -(-int((ends - begins).max()) // window)


def place(stream_type: type[Stream], mesh: Mesh | None, **arrays) -> Stream:
    """Puts stripes over the mesh axis "data", the rest on every device; each process its own."""
    if mesh is None:
        return stream_type(**jax.tree.map(jnp.asarray, arrays))
    over_data, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    per_stripe = {"stripes", "bases", "begins", "ends"}
    return stream_type(
        **{k: _put(a, over_data if k in per_stripe else everywhere) for k, a in arrays.items()}
    )


def _put(leaf, sharding: NamedSharding) -> jax.Array:
    """Makes a global array from what every process holds whole, without any communication."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _put(np.asarray(jax.random.key_data(leaf)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    leaf = np.asarray(leaf)
    if len(sharding.spec) and leaf.shape[0] % sharding.mesh.shape["data"]:
        raise errors.UsageError(
            f"batch_size {leaf.shape[0]} is not a multiple of the data axis "
            f"({sharding.mesh.shape['data']}); change either"
        )
    return jax.make_array_from_callback(leaf.shape, sharding, lambda part: leaf[part])


def _first_tokens(stream: TrainStream, turns: jax.Array) -> jax.Array:
    """Where each stripe's passes [K] start in the text, [B, K]."""

    def first_token(stripe, base, turn):
        line = (base + draw_jitter(stream.key, stripe, turn)) % stream.line_starts.shape[0]
        return stream.line_starts.at[line].get(mode="promise_in_bounds")

    over_turns = jax.vmap(first_token, in_axes=(None, None, 0))
    return jax.vmap(over_turns, in_axes=(0, 0, None))(stream.stripes, stream.bases, turns)


def divmod_product(index: jax.Array | int, factor: int, modulus: int):
    """divmod(index * factor, modulus) without the product, which may pass 2^31.

    The index is taken in digits of eight bits, whose shares come from tables. The quotient is
    uint32 (and wraps), the remainder int32.
    """
    index = jnp.asarray(index, jnp.uint32)
    quotient = remainder = jnp.zeros_like(index)
    for shift in range(0, 32, 8):
        shares = [divmod((digit << shift) * factor, modulus) for digit in range(256)]
        digits = (index >> shift) & 255
        quotient += jnp.asarray([q % 2**32 for q, _ in shares], jnp.uint32)[digits]
        remainder += jnp.asarray([r for _, r in shares], jnp.uint32)[digits]
        carry = remainder >= modulus
        remainder = jnp.where(carry, remainder - np.uint32(modulus), remainder)
        quotient += carry.astype(jnp.uint32)
    return quotient, remainder.astype(jnp.int32)


def _eval_stripes(split: vocabulary.EncodedSplit, num_stripes: int):
    """First token and end of every stripe that has lines, [B] each."""
    _check(split)
    if num_stripes < 1:
        raise errors.UsageError(f"{num_stripes} evaluation stripes: take at least one")
    num_lines = len(split.line_starts)
    lines = np.unique(np.arange(num_stripes + 1) * num_lines // num_stripes)
    bounds = np.append(split.line_starts, len(split.tokens))[lines]
    return bounds[:-1], bounds[1:]


def _check(split: vocabulary.EncodedSplit) -> None:
    if not 0 < len(split.tokens) <= MAX_TOKENS:
        raise errors.UsageError(
            f"a split of {len(split.tokens)} tokens cannot be read: it must have 1 to {MAX_TOKENS}"
        )

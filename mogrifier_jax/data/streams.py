"""Windows of a text, and batches of examples that stand alone, as pure functions of an index.

Letters: B stripes (the batch), T window, N lines or examples, K passes that meet in one window, R
rounds of the shuffle. Every device has all ids of a split. The mesh axis "data" splits the stripes.
`corpora.py` makes the ids.

The stripes of a text carry state. In training each stripe reads T tokens a window. Examples (lines,
or the reverse copy task) stand alone. Training reads all of them in a new order in each epoch. A
batch may have the end of one epoch and the beginning of the next. The order is a permutation with a
key, which is computed for each example by itself. The index is the whole position in either, so it
is all that a run saves.
"""

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax import errors
from mogrifier_jax.data import corpora

MAX_JITTER = 100  # Lines, to either side of a stripe's base.
MAX_TOKENS = 2**31 - 2**20  # Positions are int32, with room for one window.
NUM_ROUNDS = 96  # Of the shuffle: several times log2(N) for any N in use.
SPLITS = ("train", "valid", "test")


class Window(NamedTuple):
    """The tokens that a model reads and predicts; `lengths` is None if every row is full."""

    inputs: jax.Array  # [B, T] int32.
    targets: jax.Array  # [B, T] int32.
    lengths: jax.Array | None = None  # [B] int32; beyond them both hold id 0.


class TrainStream(NamedTuple):
    """Stripes without end; each reads the whole text again and again."""

    tokens: jax.Array  # [total], the smallest dtype that holds V.
    line_starts: jax.Array  # [N] int32.
    stripes: jax.Array  # [B] int32: 0 to B - 1; each part of a split batch needs its own.
    bases: jax.Array  # [B] int32: the line near which each pass of a stripe starts.
    key: jax.Array  # For the jitter.
    eos: jax.Array  # [] int32.


class EvalStream(NamedTuple):
    """Consecutive stripes that have every token of a split once."""

    tokens: jax.Array  # [total].
    begins: jax.Array  # [B] int32: the first token of each stripe.
    ends: jax.Array  # [B] int32: the token after the last one of each stripe.
    eos: jax.Array  # [] int32.


Stream = TypeVar("Stream")


def make_train_stream(
    split: corpora.EncodedSplit,
    batch_size: int,
    key: jax.Array,
    eos_id: int,
    mesh: Mesh | None = None,
) -> TrainStream:
    """Starts B stripes at equal distances of lines; the line of the first is random."""
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
    # One token earlier, because each input is the target before it. It may be in the pass before.
    turn = jnp.where(offset > 0, turn, turn - 1)
    offset = jnp.where(offset > 0, offset, total) - 1
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
    """The distance in lines from a stripe's base to the start of one of its passes."""
    key = jax.random.fold_in(jax.random.fold_in(key, stripe), turn)
    # Uniform to within 2^-24; `randint` would draw twice to do better.
    return (jax.random.bits(key) % (2 * MAX_JITTER + 1)).astype(jnp.int32) - MAX_JITTER


def keep_state(
    key: jax.Array, index: jax.Array | int, batch_size: int, probability: jax.Array | float
) -> jax.Array:
    """Which stripes [B] keep their carry before this window; before the first one, all do."""
    dropped = jax.random.bernoulli(jax.random.fold_in(key, index), probability, (batch_size,))
    return ~dropped | (jnp.asarray(index) == 0)


def make_eval_stream(
    split: corpora.EncodedSplit, num_stripes: int, eos_id: int, mesh: Mesh | None = None
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


def num_windows(split: corpora.EncodedSplit, num_stripes: int, *, window: int) -> int:
    """How many windows of T hold the longest evaluation stripe."""
    begins, ends = _eval_stripes(split, num_stripes)
    return -(-int((ends - begins).max()) // window)


def place(stream_type: type[Stream], mesh: Mesh | None, **arrays) -> Stream:
    """Splits stripes over the mesh axis "data", and puts the rest on every device."""
    if mesh is None:
        return stream_type(**jax.tree.map(jnp.asarray, arrays))
    over_data = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    per_stripe = {"stripes", "bases", "begins", "ends"}
    placed = {
        name: _put(array, over_data if name in per_stripe else everywhere)
        for name, array in arrays.items()
    }
    return stream_type(**placed)


def _put(leaf, sharding: NamedSharding) -> jax.Array:
    """Makes a global array of an array that every process has whole; no process sends data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _put(np.asarray(jax.random.key_data(leaf)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda part: leaf[part])


def _first_tokens(stream: TrainStream, turns: jax.Array) -> jax.Array:
    """Where each stripe's passes [K] start in the text, [B, K]."""

    def first_token(stripe, base, turn):
        line = (base + draw_jitter(stream.key, stripe, turn)) % stream.line_starts.shape[0]
        return stream.line_starts.at[line].get(mode="promise_in_bounds")

    over_turns = jax.vmap(first_token, in_axes=(None, None, 0))
    return jax.vmap(over_turns, in_axes=(0, 0, None))(stream.stripes, stream.bases, turns)


def divmod_product(index: jax.Array | int, factor: int, modulus: int):
    """divmod(index * factor, modulus) without the product, which may be above 2^31.

    The index has four digits of eight bits. Tables have the quotient and the remainder of each
    digit. The quotient is uint32 and wraps around. The remainder is int32.
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


def _eval_stripes(split: corpora.EncodedSplit, num_stripes: int):
    """The first token and the end of every stripe that has lines, [B] each."""
    _check(split)
    if num_stripes < 1:
        raise errors.UsageError(f"{num_stripes} evaluation stripes: take at least one")
    num_lines = len(split.line_starts)
    lines = np.unique(np.arange(num_stripes + 1) * num_lines // num_stripes)
    bounds = np.append(split.line_starts, len(split.tokens))[lines]
    return bounds[:-1], bounds[1:]


def _check(split: corpora.EncodedSplit) -> None:
    if not 0 < len(split.tokens) <= MAX_TOKENS:
        raise errors.UsageError(
            f"a split of {len(split.tokens)} tokens cannot be read: it must have 1 to {MAX_TOKENS}"
        )


class LineStream(NamedTuple):
    """Every line of a split as an example."""

    tokens: jax.Array  # [total], the smallest dtype that holds V.
    bounds: jax.Array  # [N + 1] int32: line n is tokens[bounds[n]:bounds[n + 1]], eos included.
    key: jax.Array  # For the order.
    eos: jax.Array  # [] int32.


class CopyBatch(NamedTuple):
    """The encoder reads `sources`, the decoder reads `inputs` and predicts `targets`."""

    sources: jax.Array  # [B, length + 1] int32, eos last.
    inputs: jax.Array  # [B, length + 1] int32, eos first.
    targets: jax.Array  # [B, length + 1] int32, eos last.
    lengths: jax.Array  # [B] int32: length + 1, or 0 after the last example of a split.


@dataclasses.dataclass(frozen=True)
class ReverseCopy:
    """The task to repeat random words backwards; it is static under jit."""

    length: int
    vocab_size: int = 1000
    num_train: int = 500_000
    num_valid: int = 10_000
    num_test: int = 10_000
    seed: int = 1

    def __post_init__(self):
        for field in ("length", "vocab_size", "num_train", "num_valid", "num_test"):
            if getattr(self, field) < 1:
                raise errors.UsageError(
                    f"reverse copy {field} {getattr(self, field)} must be at least 1"
                )

    def num_examples(self, split: str) -> int:
        """How many examples a split has."""
        return {"train": self.num_train, "valid": self.num_valid, "test": self.num_test}[split]

    def make_vocabulary(self) -> corpora.Vocabulary:
        """The words 0, 1, ... with "|", eos and `<UNK>`; random words have the ids below V."""
        words = [str(i) for i in range(self.vocab_size)]
        return corpora.Vocabulary.from_tokens([*words, "|"], "word")


def make_line_stream(
    split: corpora.EncodedSplit, key: jax.Array, eos_id: int, mesh: Mesh | None = None
) -> LineStream:
    """Puts a split on every device."""
    if not len(split.tokens):
        raise errors.UsageError("a split without lines has no examples; give it some text")
    bounds = np.append(split.line_starts, len(split.tokens)).astype(np.int32)
    return place(
        LineStream, mesh, tokens=split.tokens, bounds=bounds, key=key, eos=np.int32(eos_id)
    )


def limit_window(split: corpora.EncodedSplit, window: int) -> int:
    """The window that the longest line with its eos needs, at most T."""
    return min(window, int(np.diff(split.line_starts, append=len(split.tokens)).max()))


def train_lines(
    stream: LineStream, index: jax.Array | int, *, batch_size: int, window: int
) -> Window:
    """The training batch at this index, in shuffled order without end."""
    examples = shuffled(stream.key, index, batch_size, stream.bounds.shape[0] - 1)
    return _take_lines(stream, examples, window)


def eval_lines(
    stream: LineStream, index: jax.Array | int, *, batch_size: int, window: int
) -> Window:
    """The batch at this index in the order of the file; rows after the last line have length 0."""
    return _take_lines(stream, index * batch_size + jnp.arange(batch_size), window)


def train_copies(task: ReverseCopy, index: jax.Array | int, *, batch_size: int) -> CopyBatch:
    """The training batch at this index, in shuffled order without end."""
    key = jax.random.fold_in(jax.random.key(task.seed), len(SPLITS))
    examples = shuffled(key, index, batch_size, task.num_train)
    return make_copies(task, "train", examples)


def eval_copies(
    task: ReverseCopy, split: str, index: jax.Array | int, *, batch_size: int
) -> CopyBatch:
    """The batch at this index in order; rows after the last example have length 0."""
    return make_copies(task, split, index * batch_size + jnp.arange(batch_size))


def make_copies(task: ReverseCopy, split: str, examples: jax.Array) -> CopyBatch:
    """These examples [B] of a split; seed, split and number decide all of an example."""
    split_key = jax.random.fold_in(jax.random.key(task.seed), SPLITS.index(split))

    def make_source(example):
        key = jax.random.fold_in(split_key, example)
        # Uniform to within V / 2^32; `randint` would draw twice to do better.
        return (jax.random.bits(key, (task.length,)) % task.vocab_size).astype(jnp.int32)

    source = jax.vmap(make_source)(examples)
    target = source[:, ::-1]
    eos = jnp.full((len(examples), 1), task.vocab_size + 2)  # Behind `<UNK>` and "|".
    lengths = jnp.where(examples < task.num_examples(split), task.length + 1, 0)
    return CopyBatch(
        sources=jnp.concatenate([source, eos], axis=1),
        inputs=jnp.concatenate([eos, target], axis=1),
        targets=jnp.concatenate([target, eos], axis=1),
        lengths=lengths,
    )


def shuffled(
    key: jax.Array, index: jax.Array | int, batch_size: int, num_examples: int
) -> jax.Array:
    """The examples [B] of the batch at this index; each epoch has N examples in a new order."""
    epoch, offset = divmod_product(index, batch_size, num_examples)
    steps = offset + jnp.arange(batch_size)
    num_epochs = (num_examples - 1 + batch_size - 1) // num_examples + 1
    epochs = epoch + jnp.arange(num_epochs, dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, epochs)
    return _permute(keys, steps // num_examples, steps % num_examples, num_examples)


def _permute(keys: jax.Array, which: jax.Array, x: jax.Array, size: int) -> jax.Array:
    """Maps each x [B] below `size` by the permutation of keys[which] (keys [K], which [B]).

    This is the swap-or-not shuffle (Hoang, Morris, Rogaway 2012). In each round x and its mirror
    image c - x change places or not. One bit decides, which is the same for both. The shuffle
    works for any size, and needs no sort, no table and no loop of unknown length.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, (2, NUM_ROUNDS)))(keys)  # [K, 2, R]
    centres = (bits[:, 0] % np.uint32(size)).astype(jnp.int32)
    salts = bits[:, 1]

    def swap_or_not(i, x):
        mirror = centres[which, i] - x
        mirror = jnp.where(mirror < 0, mirror + size, mirror)
        swap = mix(jnp.maximum(x, mirror).astype(jnp.uint32) ^ salts[which, i]) >> 31
        return jnp.where(swap == 1, mirror, x)

    return jax.lax.fori_loop(0, NUM_ROUNDS, swap_or_not, x, unroll=4)


def mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: one to one; an input bit changes about half the output."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _take_lines(stream: LineStream, examples: jax.Array, window: int) -> Window:
    """Lines [B] with eos before the inputs and after the targets; at most T - 1 tokens and eos."""
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
    return Window(jnp.where(valid, shifted, 0), jnp.where(valid, targets, 0), lengths)

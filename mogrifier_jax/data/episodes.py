"""Episodes: examples that stand alone, and the reverse copy task.

Letters: B batch, T window, N examples, R rounds of the shuffle, K epochs that meet in one
batch. Training goes through all examples in a new order each epoch, batches running across the
ends of epochs; the order is a keyed permutation computed entry by entry, so the batch index
alone is the position. `streams.py` has the streams that carry state.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.data import streams, vocabulary

NUM_ROUNDS = 96  # Of the shuffle: several times log2(N) for any N in use.
SPLITS = ("train", "valid", "test")


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
    lengths: jax.Array  # [B] int32: length + 1, or 0 behind the last example of a split.


@dataclasses.dataclass(frozen=True)
class ReverseCopy:
    """The task: say a sequence of random words backwards. Static under jit."""

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

    def make_vocabulary(self) -> vocabulary.Vocabulary:
        """The words 0, 1, ... with "|", eos and `<UNK>`; random words have the ids below V."""
        words = [str(i) for i in range(self.vocab_size)]
        return vocabulary.Vocabulary.from_tokens([*words, "|"], "word")


def make_line_stream(
    split: vocabulary.EncodedSplit,
    key: jax.Array,
    eos_id: int,
    mesh: jax.sharding.Mesh | None = None,
) -> LineStream:
    """Puts a split on every device."""
    if not len(split.tokens):
        raise errors.UsageError("a split without lines has no examples; give it some text")
    bounds = np.append(split.line_starts, len(split.tokens)).astype(np.int32)
    return streams.place(
        LineStream, mesh, tokens=split.tokens, bounds=bounds, key=key, eos=np.int32(eos_id)
    )


def limit_window(split: vocabulary.EncodedSplit, window: int) -> int:
    """The window that is needed: the longest line with its eos, or T if that is less."""
    return min(window, int(np.diff(split.line_starts, append=len(split.tokens)).max()))


def train_lines(
    stream: LineStream, index: jax.Array | int, *, batch_size: int, window: int
) -> streams.Window:
    """The training batch at this index, in shuffled order without end."""
    examples = shuffled(stream.key, index, batch_size, stream.bounds.shape[0] - 1)
    return _take_lines(stream, examples, window)


def eval_lines(
    stream: LineStream, index: jax.Array | int, *, batch_size: int, window: int
) -> streams.Window:
    """The batch at this index in the order of the file; length 0 behind the last line."""
    examples = index * batch_size + jnp.arange(batch_size)
    return _take_lines(stream, examples, window)


def num_batches(num_examples: int, batch_size: int) -> int:
    """How many batches hold every example once."""
    return -(-num_examples // batch_size)


def train_copies(task: ReverseCopy, index: jax.Array | int, *, batch_size: int) -> CopyBatch:
    """The training batch at this index, in shuffled order without end."""
    key = jax.random.fold_in(jax.random.key(task.seed), len(SPLITS))
    examples = shuffled(key, index, batch_size, task.num_train)
    return make_copies(task, "train", examples)


def eval_copies(
    task: ReverseCopy, split: str, index: jax.Array | int, *, batch_size: int
) -> CopyBatch:
    """The batch at this index in order; length 0 behind the last example."""
    return make_copies(task, split, index * batch_size + jnp.arange(batch_size))


def make_copies(task: ReverseCopy, split: str, examples: jax.Array) -> CopyBatch:
    """These examples [B] of a split: functions of (seed, split, example) alone."""
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
    """The examples [B] of the batch at this index when epochs of N follow each other."""
    epoch, offset = streams.divmod_product(index, batch_size, num_examples)
    steps = offset + jnp.arange(batch_size)
    num_epochs = (num_examples - 1 + batch_size - 1) // num_examples + 1
    epochs = epoch + jnp.arange(num_epochs, dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, epochs)
    return _permute(keys, steps // num_examples, steps % num_examples, num_examples)


def _permute(keys: jax.Array, which: jax.Array, x: jax.Array, size: int) -> jax.Array:
    """Maps each x [B] below `size` by the permutation of keys[which] (keys [K], which [B]).

    The swap-or-not shuffle (Hoang, Morris, Rogaway 2012): in each round x and its mirror image
    c - x change places or not, by one bit that both compute alike. It suits any size, without a
    sort, a table or a loop of unknown length.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, (2, NUM_ROUNDS)))(keys)  # [K, 2, R]
    centres = (bits[:, 0] % np.uint32(size)).astype(jnp.int32)
    salts = bits[:, 1]

    def swap_or_not(i, x):
        mirror = centres[which, i] - x
        mirror = jnp.where(mirror < 0, mirror + size, mirror)
        swap = _mix(jnp.maximum(x, mirror).astype(jnp.uint32) ^ salts[which, i]) >> 31
        return jnp.where(swap == 1, mirror, x)

    return jax.lax.fori_loop(0, NUM_ROUNDS, swap_or_not, x, unroll=4)


def _mix(x: jax.Array) -> jax.Array:
    """Spreads every bit of a uint32 over all of them (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _take_lines(stream: LineStream, examples: jax.Array, window: int) -> streams.Window:
    """Lines [B] as inputs eos + tokens and targets tokens + eos; cut to T - 1 tokens and eos."""
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

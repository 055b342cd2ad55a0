"""The reverse copy task: an encoder reads random words, and a decoder repeats them backwards.

Letters: B examples (the batch), V words. Examples are generated inside the jitted step. Each is a
pure function of the seed, the split and the number of the example.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mogrifier_jax import errors
from mogrifier_jax.data import corpora, permutations, vocabularies


class CopyBatch(NamedTuple):
    """The encoder reads `sources`; the decoder reads `inputs` and predicts `targets`."""

    sources: jax.Array  # [B, length + 1] int32, eos last.
    inputs: jax.Array  # [B, length + 1] int32, eos first.
    targets: jax.Array  # [B, length + 1] int32, eos last.
    lengths: jax.Array  # [B] int32: length + 1, or 0 after the last example of a split.


@dataclasses.dataclass(frozen=True)
class ReverseCopy:
    """The sizes of the task; hashable, so that it can be static under jit."""

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

    def make_vocabulary(self) -> vocabularies.Vocabulary:
        """The words "0", "1", ... with "|", eos and `<UNK>`.

        Examples use the ids below V. The word of an id need not be the number of the id.
        """
        words = [str(i) for i in range(self.vocab_size)]
        return vocabularies.Vocabulary.from_tokens([*words, "|"], "word")


def train_copies(task: ReverseCopy, index: jax.Array | int, *, batch_size: int) -> CopyBatch:
    """The training batch at this index, in shuffled order, for any number of epochs."""
    key = jax.random.fold_in(jax.random.key(task.seed), len(corpora.SPLITS))
    examples = permutations.shuffled_examples(key, index, batch_size, task.num_train)
    return make_copies(task, "train", examples)


def eval_copies(
    task: ReverseCopy, split: str, index: jax.Array | int, *, batch_size: int
) -> CopyBatch:
    """The batch at this index in order; rows after the last example have length 0."""
    return make_copies(task, split, index * batch_size + jnp.arange(batch_size))


def make_copies(task: ReverseCopy, split: str, examples: jax.Array) -> CopyBatch:
    """The examples of a split that have these numbers [B]."""
    split_key = jax.random.fold_in(jax.random.key(task.seed), corpora.SPLITS.index(split))

    def make_source(example: jax.Array) -> jax.Array:
        key = jax.random.fold_in(split_key, example)
        # Uniform to within V / 2^32, which saves the second draw that `randint` makes.
        return (jax.random.bits(key, (task.length,)) % task.vocab_size).astype(jnp.int32)

    source = jax.vmap(make_source)(examples)
    target = source[:, ::-1]
    eos = jnp.full((len(examples), 1), task.vocab_size + 2)  # After `<UNK>` and "|".
    lengths = jnp.where(examples < task.num_examples(split), task.length + 1, 0)
    return CopyBatch(
        sources=jnp.concatenate([source, eos], axis=1),
        inputs=jnp.concatenate([eos, target], axis=1),
        targets=jnp.concatenate([target, eos], axis=1),
        lengths=lengths,
    )

"""Reverse copies: what the decoder must say, and what an example depends on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.data import reverse_copy


def spell(vocab, row, length):
    return " ".join(vocab.tokens[i] for i in np.asarray(row)[:length])


def test_reverse_copies_read_forwards_and_say_backwards():
    task = reverse_copy.ReverseCopy(length=6)
    vocab = task.make_vocabulary()
    assert len(vocab) == 1003 and {"|", "▼", "<UNK>", "0", "999"} <= set(vocab.tokens)
    batch = jax.jit(reverse_copy.train_copies, static_argnums=0, static_argnames="batch_size")(
        task, 3, batch_size=50
    )
    for source, inputs, targets in zip(*map(np.asarray, batch[:3]), strict=True):
        words = spell(vocab, source, 7).split()
        assert words[-1] == "▼" and all(word.isdigit() for word in words[:-1])
        backwards = words[-2::-1]
        assert spell(vocab, inputs, 7).split() == ["▼", *backwards]
        assert spell(vocab, targets, 7).split() == [*backwards, "▼"]
    assert batch.lengths.tolist() == [7] * 50
    assert np.any(batch.sources[:, :6] != batch.targets[:, :6])
    assert batch.sources.dtype == np.int32


@pytest.mark.slow
def test_copies_are_functions_of_seed_split_and_number():
    task = reverse_copy.ReverseCopy(length=5, num_train=40, num_valid=10, num_test=10)
    make = jax.jit(reverse_copy.make_copies, static_argnums=(0, 1))
    whole = np.asarray(make(task, "train", jnp.arange(40)).sources)
    np.testing.assert_array_equal(make(task, "train", jnp.array([7, 39])).sources, whole[[7, 39]])
    for other in [(dataclasses.replace(task, seed=2), "train"), (task, "valid")]:
        assert not np.any(np.all(make(*other, jnp.arange(40)).sources == whole, axis=1))
    # An epoch of training has all 40, in another order.
    train = jax.jit(reverse_copy.train_copies, static_argnums=0, static_argnames="batch_size")
    batches = np.concatenate([train(task, i, batch_size=8).sources for i in range(5)])
    assert sorted(batches.tolist()) == sorted(whole.tolist())
    assert batches.tolist() != whole.tolist()
    last = reverse_copy.eval_copies(task, "valid", 1, batch_size=8)
    assert last.lengths.tolist() == [6, 6, 0, 0, 0, 0, 0, 0]


def test_copied_words_are_uniform():
    task = reverse_copy.ReverseCopy(length=20, vocab_size=10)
    words = np.asarray(reverse_copy.make_copies(task, "train", jnp.arange(5000)).sources)[:, :-1]
    counts = np.bincount(words.reshape(-1), minlength=10)
    assert counts.shape == (10,)
    assert np.abs(counts - 10_000).max() < 5 * 95  # 100,000 words, deviation 95.


def test_an_impossible_task_is_refused():
    with pytest.raises(errors.UsageError, match="length 0 must be at least 1"):
        reverse_copy.ReverseCopy(length=0)

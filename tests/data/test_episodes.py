"""Episodes: every example once an epoch in an order of its own; reverse copies to the letter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.data import corpora, streams
from tests import quick

LINES = ["a b c", "", "d", "e f g h i j", "a a"]


@pytest.fixture(scope="module")
def corpus():
    text = "\n".join(LINES) + "\n"
    vocab = corpora.Vocabulary.from_text(text, "word")
    return vocab, vocab.encode_split(text)


def read_order(seed, num_examples, batch_size, num_batches):
    read = quick.jit_optimised(streams.shuffled, static_argnums=(2, 3))
    key = jax.random.key(seed)
    return np.concatenate([read(key, i, batch_size, num_examples) for i in range(num_batches)])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "batch_size"), [(1, 3), (2, 7), (37, 64), (1000, 7), (4099, 64)])
def test_every_epoch_has_every_example_once_across_batches(size, batch_size):
    num_epochs = 4
    order = read_order(0, size, batch_size, -(-num_epochs * size // batch_size))
    epochs = order[: num_epochs * size].reshape(num_epochs, size)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
    if size > 30:  # Controls: not in order, and another order each epoch and seed.
        other = read_order(1, size, batch_size, -(-size // batch_size))[:size]
        for a, b in [(epochs[0], np.arange(size)), (epochs[0], epochs[1]), (epochs[0], other)]:
            assert np.mean(a == b) < 0.2


@pytest.mark.slow
def test_the_order_looks_random():
    size = 1000
    epochs = read_order(3, size, size, 400).reshape(400, size)
    # How often an example comes in each tenth of an epoch: 40 of 400, deviation 6.
    tenths = np.stack(
        [np.bincount(np.argsort(e)[:50] // 100 * 50 + np.arange(50), minlength=500) for e in epochs]
    ).sum(axis=0)
    assert np.abs(tenths - 40).max() < 5 * 6
    # Neighbours are apart as often as chance has it: 1 pair an epoch is (n, n + 1).
    assert 0.7 < np.mean(np.sum(np.diff(epochs, axis=1) == 1, axis=1)) < 1.3
    assert np.abs(np.corrcoef(epochs[:40])[~np.eye(40, dtype=bool)]).max() < 5 / np.sqrt(size)


@pytest.mark.slow
def test_half_a_million_examples_are_a_permutation():
    keys = jax.random.key(0)[None]
    permute = quick.jit_optimised(streams._permute, static_argnums=3)
    size = 500_000
    order = permute(keys, jnp.zeros(size, jnp.int32), jnp.arange(size), size)
    assert np.bincount(order, minlength=size).tolist() == [1] * size


def spell(vocab, row, length):
    return " ".join(vocab.tokens[i] for i in np.asarray(row)[:length])


def test_lines_are_examples_of_their_own(corpus):
    vocab, split = corpus
    stream = streams.make_line_stream(split, jax.random.key(0), vocab.eos_id)
    first = streams.eval_lines(stream, 0, batch_size=3, window=7)
    assert first.lengths.tolist() == [4, 1, 2]
    rows = [spell(vocab, *r) for r in zip(first.inputs, first.lengths, strict=True)]
    assert rows == ["▼ a b c", "▼", "▼ d"]
    rows = [spell(vocab, *r) for r in zip(first.targets, first.lengths, strict=True)]
    assert rows == ["a b c ▼", "▼", "d ▼"]
    assert not np.any(first.targets[1:, 2:]) and not np.any(first.inputs[1:, 2:])
    second = streams.eval_lines(stream, 1, batch_size=3, window=7)
    assert second.lengths.tolist() == [7, 3, 0]  # Behind the last line there is nothing.
    assert not np.any(second.inputs[2]) and not np.any(second.targets[2])


@pytest.mark.slow
def test_long_lines_are_cut_before_eos(corpus):
    vocab, split = corpus
    stream = streams.make_line_stream(split, jax.random.key(0), vocab.eos_id)
    batch = streams.eval_lines(stream, 0, batch_size=5, window=4)
    assert spell(vocab, batch.inputs[3], 4) == "▼ e f g"
    assert spell(vocab, batch.targets[3], 4) == "e f g ▼"
    assert batch.lengths.tolist() == [4, 1, 2, 4, 3]
    assert (streams.limit_window(split, 100), streams.limit_window(split, 4)) == (7, 4)


@pytest.mark.slow
def test_training_lines_follow_the_shuffled_order(corpus):
    vocab, split = corpus
    key = jax.random.key(7)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    stream = streams.make_line_stream(split, key, vocab.eos_id, mesh)
    read = jax.jit(functools.partial(streams.train_lines, batch_size=4, window=7))
    order = read_order(7, 5, 4, 5).reshape(5, 4)
    in_order = streams.eval_lines(stream, 0, batch_size=5, window=7)
    for index in range(5):
        batch = read(stream, index)
        for name in streams.Window._fields:
            expected = np.asarray(getattr(in_order, name))[order[index]]
            np.testing.assert_array_equal(getattr(batch, name), expected)
    assert order.reshape(-1)[:5].tolist() != [0, 1, 2, 3, 4]


def test_a_split_without_lines_is_refused():
    empty = corpora.EncodedSplit(np.empty(0, np.uint8), np.empty(0, np.int64))
    with pytest.raises(errors.UsageError, match="lines"):
        streams.make_line_stream(empty, jax.random.key(0), 0)


def test_reverse_copies_read_forwards_and_say_backwards():
    task = streams.ReverseCopy(length=6)
    vocab = task.make_vocabulary()
    assert len(vocab) == 1003 and {"|", "▼", "<UNK>", "0", "999"} <= set(vocab.tokens)
    batch = jax.jit(streams.train_copies, static_argnums=0, static_argnames="batch_size")(
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
    task = streams.ReverseCopy(length=5, num_train=40, num_valid=10, num_test=10)
    make = jax.jit(streams.make_copies, static_argnums=(0, 1))
    whole = np.asarray(make(task, "train", jnp.arange(40)).sources)
    np.testing.assert_array_equal(make(task, "train", jnp.array([7, 39])).sources, whole[[7, 39]])
    for other in [(dataclasses.replace(task, seed=2), "train"), (task, "valid")]:
        assert not np.any(np.all(make(*other, jnp.arange(40)).sources == whole, axis=1))
    # An epoch of training has all 40, in another order.
    train = jax.jit(streams.train_copies, static_argnums=0, static_argnames="batch_size")
    batches = np.concatenate([train(task, i, batch_size=8).sources for i in range(5)])
    assert sorted(batches.tolist()) == sorted(whole.tolist())
    assert batches.tolist() != whole.tolist()
    last = streams.eval_copies(task, "valid", 1, batch_size=8)
    assert last.lengths.tolist() == [6, 6, 0, 0, 0, 0, 0, 0]


def test_copied_words_are_uniform():
    task = streams.ReverseCopy(length=20, vocab_size=10)
    words = np.asarray(streams.make_copies(task, "train", jnp.arange(5000)).sources)[:, :-1]
    counts = np.bincount(words.reshape(-1), minlength=10)
    assert counts.shape == (10,)
    assert np.abs(counts - 10_000).max() < 5 * 95  # 100,000 words, deviation 95.


def test_an_impossible_task_is_refused():
    with pytest.raises(errors.UsageError, match="length 0 must be at least 1"):
        streams.ReverseCopy(length=0)

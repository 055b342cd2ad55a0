"""Lines as examples: each starts after eos, ends in eos, and is trained on in shuffled order."""

import functools

import jax
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.data import line_examples, permutations, streams, vocabularies

LINES = ["a b c", "", "d", "e f g h i j", "a a"]


@pytest.fixture(scope="module")
def corpus():
    text = "\n".join(LINES) + "\n"
    vocab = vocabularies.Vocabulary.from_text(text, "word")
    return vocab, vocab.encode_split(text)


def spell(vocab, row, length):
    return " ".join(vocab.tokens[i] for i in np.asarray(row)[:length])


def test_lines_are_examples_of_their_own(corpus):
    vocab, split = corpus
    stream = line_examples.make_line_stream(split, jax.random.key(0), vocab.eos_id)
    first = line_examples.eval_lines(stream, 0, batch_size=3, window=7)
    assert first.lengths.tolist() == [4, 1, 2]
    rows = [spell(vocab, *r) for r in zip(first.inputs, first.lengths, strict=True)]
    assert rows == ["▼ a b c", "▼", "▼ d"]
    rows = [spell(vocab, *r) for r in zip(first.targets, first.lengths, strict=True)]
    assert rows == ["a b c ▼", "▼", "d ▼"]
    assert not np.any(first.targets[1:, 2:]) and not np.any(first.inputs[1:, 2:])
    second = line_examples.eval_lines(stream, 1, batch_size=3, window=7)
    assert second.lengths.tolist() == [7, 3, 0]  # Behind the last line there is nothing.
    assert not np.any(second.inputs[2]) and not np.any(second.targets[2])


@pytest.mark.slow
def test_long_lines_are_cut_before_eos(corpus):
    vocab, split = corpus
    stream = line_examples.make_line_stream(split, jax.random.key(0), vocab.eos_id)
    batch = line_examples.eval_lines(stream, 0, batch_size=5, window=4)
    assert spell(vocab, batch.inputs[3], 4) == "▼ e f g"
    assert spell(vocab, batch.targets[3], 4) == "e f g ▼"
    assert batch.lengths.tolist() == [4, 1, 2, 4, 3]
    assert (line_examples.limit_window(split, 100), line_examples.limit_window(split, 4)) == (7, 4)


@pytest.mark.slow
def test_training_lines_follow_the_shuffled_order(corpus):
    vocab, split = corpus
    key = jax.random.key(7)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    stream = line_examples.make_line_stream(split, key, vocab.eos_id, mesh)
    read = jax.jit(functools.partial(line_examples.train_lines, batch_size=4, window=7))
    order = np.stack([permutations.shuffled_examples(key, i, 4, 5) for i in range(5)])
    in_order = line_examples.eval_lines(stream, 0, batch_size=5, window=7)
    for index in range(5):
        batch = read(stream, index)
        for name in streams.Window._fields:
            expected = np.asarray(getattr(in_order, name))[order[index]]
            np.testing.assert_array_equal(getattr(batch, name), expected)
    assert order.reshape(-1)[:5].tolist() != [0, 1, 2, 3, 4]


def test_a_split_without_lines_is_refused():
    empty = vocabularies.EncodedSplit(np.empty(0, np.uint8), np.empty(0, np.int64))
    with pytest.raises(errors.UsageError, match="lines"):
        line_examples.make_line_stream(empty, jax.random.key(0), 0)

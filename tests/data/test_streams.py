"""Streams: against a simulation that appends line after line, as the stripes are defined."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mogrifier_jax import errors
from mogrifier_jax.data import streams, vocabularies

EOS = 9


def make_split(seed, num_lines, longest=6):
    rng = np.random.default_rng(seed)
    lines = [[*rng.integers(0, EOS, rng.integers(0, longest + 1)), EOS] for _ in range(num_lines)]
    starts = np.cumsum([0, *map(len, lines)])[:-1]
    return lines, vocabularies.EncodedSplit(np.concatenate(lines).astype(np.uint8), starts)


def read_lines(lines, base, draw):
    """One training stripe: pass after pass through all lines, each from a jittered start."""
    for turn in itertools.count():
        start = (base + draw(turn)) % len(lines)
        for k in range(len(lines)):
            yield lines[(start + k) % len(lines)]


def take_windows(lines, window, num_windows):
    """A stripe's buffer: starts as eos, takes lines as needed, keeps the last target."""
    buffer, windows = [EOS], []
    for _ in range(num_windows):
        while len(buffer) < window + 1:
            line = next(lines, None)
            if line is None:
                break
            buffer.extend(line)
        n = min(window, len(buffer) - 1)
        padding = [0] * (window - n)
        windows.append(([*buffer[:n], *padding], [*buffer[1 : n + 1], *padding], n))
        buffer = buffer[n:]
    return windows


def simulate_train(lines, base, batch_size, draw, window, num_windows):
    stripes = []
    for i in range(batch_size):
        first = base + i * len(lines) // batch_size
        stripe = read_lines(lines, first, functools.partial(draw, i))
        stripes.append(take_windows(stripe, window, num_windows))
    inputs, targets, _ = zip(*[zip(*stripe, strict=True) for stripe in stripes], strict=True)
    return np.swapaxes(inputs, 0, 1), np.swapaxes(targets, 0, 1)  # [windows, B, T]


def read_windows(stream, window, indices):
    take = functools.partial(streams.train_window, window=window)
    return jax.jit(jax.vmap(take, in_axes=(None, 0)))(stream, jnp.asarray(indices))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_lines", "batch_size", "window", "num_windows"),
    [
        (250, 8, 16, 300),  # Several passes, jitter on both sides of both ends.
        (30, 7, 5, 100),  # Fewer lines than the jitter reaches.
        (3, 3, 100, 4),  # Many passes in one window.
        (1, 1, 7, 10),
        (40, 4, 1, 300),
    ],
)
def test_training_windows_equal_the_simulation(num_lines, batch_size, window, num_windows):
    lines, split = make_split(num_lines, num_lines)
    stream = streams.make_train_stream(split, batch_size, jax.random.key(num_lines), EOS)
    base = int(stream.bases[0])
    num_turns = window * num_windows // len(split.tokens) + 2
    stripes, turns = jnp.arange(batch_size), jnp.arange(num_turns)
    draw_all = jax.vmap(jax.vmap(streams.draw_jitter, (None, None, 0)), (None, 0, None))
    draws = np.asarray(jax.jit(draw_all)(stream.key, stripes, turns))
    assert num_turns >= 3

    expected = simulate_train(
        lines, base, batch_size, lambda i, turn: draws[i, turn], window, num_windows
    )
    windows = read_windows(stream, window, np.arange(num_windows))
    np.testing.assert_array_equal(windows.inputs, expected[0])
    np.testing.assert_array_equal(windows.targets, expected[1])
    assert windows.lengths is None
    if num_lines > 1:  # Control: the simulation without jitter is another stream,
        calm = simulate_train(lines, base, batch_size, lambda i, turn: 0, window, num_windows)
        assert np.any(calm[1] != windows.targets)
        # and starts before the first and behind the last line did occur.
        starts = np.asarray(stream.bases)[:, None] + draws
        assert starts.min() < 0 and starts.max() >= num_lines


def test_all_stripes_start_at_equal_numbers_of_lines():
    _, split = make_split(0, 103)
    bases = np.asarray(streams.make_train_stream(split, 10, jax.random.key(3), EOS).bases)
    np.testing.assert_array_equal((bases - bases[0]) % 103, [i * 103 // 10 for i in range(10)])
    others = {
        int(streams.make_train_stream(split, 10, jax.random.key(k), EOS).bases[0]) for k in range(9)
    }
    assert len(others) > 5


def test_jitter_is_uniform_from_minus_to_plus_100_and_drawn_for_each_stripe_and_pass():
    draw = jax.vmap(jax.vmap(streams.draw_jitter, (None, None, 0)), (None, 0, None))
    draws = np.asarray(jax.jit(draw)(jax.random.key(0), jnp.arange(200), jnp.arange(500)))
    values, counts = np.unique(draws, return_counts=True)
    np.testing.assert_array_equal(values, np.arange(-100, 101))
    # 100,000 draws over 201 values: a standard deviation of 22.3 around 497.5.
    assert np.abs(counts - draws.size / 201).max() < 5 * 22.3
    assert np.abs(np.corrcoef(draws[:20])[~np.eye(20, dtype=bool)]).max() < 0.25


def test_any_order_of_reading_gives_the_same_windows():
    _, split = make_split(1, 50)
    stream = streams.make_train_stream(split, 4, jax.random.key(1), EOS)
    windows = read_windows(stream, 8, np.arange(30))
    backwards = read_windows(stream, 8, np.arange(30)[::-1])
    np.testing.assert_array_equal(windows.targets, backwards.targets[::-1])
    np.testing.assert_array_equal(windows.inputs[1:, :, 0], windows.targets[:-1, :, -1])
    assert np.any(windows.targets[0] != backwards.targets[0])


def test_a_window_far_into_training_equals_its_definition():
    _, split = make_split(2, 1000, longest=30)
    total, window, index = len(split.tokens), 500, 2**31 - 5
    stream = streams.make_train_stream(split, 3, jax.random.key(2), EOS)
    (targets,) = read_windows(stream, window, [index]).targets
    for i in range(3):
        for t in (0, 1, 250, 499):
            turn, offset = divmod(index * window + t, total)
            jitter = streams.draw_jitter(stream.key, i, np.uint32(turn))
            start = split.line_starts[(int(stream.bases[i]) + int(jitter)) % 1000]
            assert int(targets[i, t]) == split.tokens[(start + offset) % total]


def collectives(compiled):
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return [name for name in names if name in compiled.as_text()]


@pytest.mark.slow
def test_each_device_computes_its_own_stripes_without_communication(mesh):
    _, split = make_split(3, 400)
    _, valid = make_split(4, 90)
    alone = streams.make_train_stream(split, 8, jax.random.key(5), EOS)
    stream = streams.make_train_stream(split, 8, jax.random.key(5), EOS, mesh)
    eval_alone = streams.make_eval_stream(valid, 10, EOS)
    eval_stream = streams.make_eval_stream(valid, 10, EOS, mesh)
    assert eval_stream.begins.shape == (12,)  # Filled up to a multiple of four.
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def read(stream, eval_stream, index):
        window = streams.train_window(stream, index, window=16)
        kept = streams.keep_state(stream.key, index, 8, 0.3)
        return window, streams.eval_window(eval_stream, index, window=16), kept

    compiled = jax.jit(read, out_shardings=rows).lower(stream, eval_stream, 3).compile()
    assert collectives(compiled) == []
    total = jax.jit(lambda s: streams.train_window(s, 3, window=16).targets.sum())
    assert collectives(total.lower(stream).compile()) == ["all-reduce"]  # Control.

    window, eval_window, kept = compiled(stream, eval_stream, 3)
    assert window.targets.sharding.shard_shape((8, 16)) == (2, 16)
    expected, eval_expected, kept_expected = jax.jit(read)(alone, eval_alone, 3)
    jax.tree.map(np.testing.assert_array_equal, (window, kept), (expected, kept_expected))
    for got, want in zip(eval_window, eval_expected, strict=True):
        np.testing.assert_array_equal(got[:10], want)
        assert not np.any(got[10:])


@pytest.mark.slow
def test_stripes_may_be_taken_apart():
    _, split = make_split(6, 200)
    stream = streams.make_train_stream(split, 6, jax.random.key(0), EOS)
    read = jax.jit(functools.partial(streams.train_window, window=12))
    some = stream._replace(stripes=stream.stripes[4:], bases=stream.bases[4:])
    whole = read(stream, 40).targets
    np.testing.assert_array_equal(read(some, 40).targets, whole[4:])
    assert np.any(whole[4:] != whole[:2])


def test_trials_may_be_vectorised():
    _, split = make_split(7, 200)
    trials = [streams.make_train_stream(split, 4, jax.random.key(k), EOS) for k in range(3)]
    stacked = trials[0]._replace(
        bases=jnp.stack([t.bases for t in trials]), key=jnp.stack([t.key for t in trials])
    )
    axes = streams.TrainStream(None, None, None, 0, 0, None)
    read = functools.partial(streams.train_window, window=10)
    windows = jax.jit(jax.vmap(read, in_axes=(axes, None)))(stacked, 99)
    read = jax.jit(read)
    for i, trial in enumerate(trials):
        expected = read(trial, 99)
        np.testing.assert_array_equal(windows.targets[i], expected.targets)
    assert np.any(windows.targets[0] != windows.targets[1])


def test_ten_line_example():
    vocab = vocabularies.Vocabulary.from_tokens([f"w{i}" for i in range(10)], "word")
    split = vocab.encode_split("".join(f"w{i}\n" for i in range(10)))
    stream = streams.make_eval_stream(split, 3, vocab.eos_id)

    def spell(row, length=4):
        return " ".join(vocab.tokens[i] for i in row[:length])

    assert streams.num_windows(split, 3, window=4) == 2
    first = streams.eval_window(stream, 0, window=4)
    assert [spell(row) for row in first.targets] == ["w0 ▼ w1 ▼", "w3 ▼ w4 ▼", "w6 ▼ w7 ▼"]
    assert [spell(row) for row in first.inputs] == ["▼ w0 ▼ w1", "▼ w3 ▼ w4", "▼ w6 ▼ w7"]
    assert first.lengths.tolist() == [4, 4, 4]
    second = streams.eval_window(stream, 1, window=4)
    rows = [spell(*pair) for pair in zip(second.targets, second.lengths, strict=True)]
    assert rows == ["w2 ▼", "w5 ▼", "w8 ▼ w9 ▼"]
    assert second.lengths.tolist() == [2, 2, 4]
    assert second.targets[0, 2:].tolist() == second.inputs[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize(("num_lines", "num_stripes"), [(40, 1), (40, 7), (5, 9), (1, 64)])
def test_evaluation_windows_equal_the_simulation(num_lines, num_stripes):
    lines, split = make_split(num_lines, num_lines)
    window, n = 6, num_lines
    num_windows = streams.num_windows(split, num_stripes, window=window)
    stripes = [lines[i * n // num_stripes : (i + 1) * n // num_stripes] for i in range(num_stripes)]
    expected = [take_windows(iter(s), window, num_windows + 1) for s in stripes if s]
    stream = streams.make_eval_stream(split, num_stripes, EOS)
    assert stream.begins.shape == (min(num_lines, num_stripes),)
    read = jax.jit(functools.partial(streams.eval_window, window=window))
    targets = []
    for index in range(num_windows + 1):
        inputs, targets_, lengths = read(stream, index)
        inputs, targets_, lengths = map(np.asarray, (inputs, targets_, lengths))
        for i, stripe in enumerate(expected):
            assert (inputs[i].tolist(), targets_[i].tolist(), int(lengths[i])) == stripe[index]
            targets.extend(targets_[i, : lengths[i]].tolist())
    assert not lengths.any()  # The window behind the last one, and
    assert read(stream, num_windows - 1).lengths.any()  # the last.
    assert sorted(targets) == sorted(split.tokens.tolist())


def test_states_are_dropped_at_random_but_never_before_the_first_window():
    keep = jax.jit(streams.keep_state, static_argnums=2)
    key = jax.random.key(0)
    assert keep(key, 0, 1000, 1.0).all() and not keep(key, 1, 1000, 1.0).any()
    assert keep(key, 1, 1000, 0.0).all()
    kept = np.stack([keep(key, index, 1000, 0.01) for index in range(1, 101)])
    assert 0.009 < 1 - kept.mean() < 0.011  # 100,000 draws: a standard deviation of 0.0003.
    np.testing.assert_array_equal(kept[5], keep(key, 6, 1000, 0.01))
    assert np.any(kept[5] != kept[6]) and np.any(kept[5] != keep(jax.random.key(1), 6, 1000, 0.01))


def test_bad_requests_are_refused():
    _, split = make_split(0, 20)
    key = jax.random.key(0)
    for batch_size in (0, 21):
        with pytest.raises(errors.UsageError, match=f"batch_size {batch_size} .* 20 lines"):
            streams.make_train_stream(split, batch_size, key, EOS)
    with pytest.raises(errors.UsageError, match="at least one"):
        streams.make_eval_stream(split, 0, EOS)
    empty = vocabularies.EncodedSplit(np.empty(0, np.uint8), np.empty(0, np.int64))
    with pytest.raises(errors.UsageError, match="0 tokens"):
        streams.make_train_stream(empty, 1, key, EOS)

"""Averages against NumPy means of the trajectory, under jit and vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.training import averaging

KINDS = ["none", "triggered", "two_tailed"]


def weights(n):
    rng = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32), "b": jnp.float32(i)}
        for i in range(n)
    ]


def assert_mean_of(got, trajectory):
    for name in ("w", "b"):
        expected = np.mean([np.asarray(p[name], np.float64) for p in trajectory], axis=0)
        np.testing.assert_allclose(got[name], expected, rtol=1e-6, atol=1e-6)


def test_triggered_average_is_the_mean_since_the_start():
    average = averaging.make_averaging("triggered")
    update = jax.jit(average.update)
    trajectory = weights(9)
    state = average.init(trajectory[0])
    for params in trajectory[:4]:
        state = update(state, params)
        assert_mean_of(average.value(state, params), [params])  # Raw before the start.
    state = average.start(state)
    assert_mean_of(average.value(state, params), [params])  # Still empty.
    for n, params in enumerate(trajectory[4:], start=5):
        state = update(state, params)
        assert_mean_of(average.value(state, params), trajectory[4:n])
    assert update._cache_size() == 1  # Starting did not recompile.
    with pytest.raises(AssertionError):
        assert_mean_of(average.value(state, params), trajectory)
    state = average.start(state)  # Never restarts.
    assert_mean_of(average.value(state, params), trajectory[4:])
    (candidate,) = average.candidates(state, params)
    assert_mean_of(candidate, trajectory[4:])


def test_triggered_average_ignores_nan_before_the_start():
    average = averaging.make_averaging("triggered")
    params = weights(1)[0]
    bad = jax.tree.map(lambda x: x * jnp.nan, params)
    state = average.update(average.init(params), bad)
    state = average.update(average.start(state), params)
    assert_mean_of(average.value(state, params), [params])


def test_two_tailed_averages_by_hand():
    average = averaging.make_averaging("two_tailed")
    update, after = jax.jit(average.update), jax.jit(average.after_evaluation)
    t = weights(12)
    state = average.init(t[0])
    short, long = average.candidates(state, t[0])  # Untrained: both are the raw weights.
    assert_mean_of(short, t[:1])
    assert_mean_of(long, t[:1])
    state = after(state, 3.0, 3.0)
    # [turn's steps, xe of short and long, tails that were evaluated, tail that is used]
    table = [
        (t[0:3], (2.0, 2.0), (t[0:3], t[0:3]), t[0:3]),  # A tie: long = short = 0..2, short empty.
        (t[3:6], (2.1, 1.9), (t[3:6], t[0:6]), t[0:6]),  # Long is better: both go on.
        (t[6:9], (1.7, 1.8), (t[3:9], t[0:9]), t[3:9]),  # Short is better: it becomes the long.
        (t[9:12], (1.9, 1.6), (t[9:12], t[3:12]), t[3:12]),
    ]
    for steps, xes, (short_tail, long_tail), used in table:
        for params in steps:
            state = update(state, params)
        short, long = average.candidates(state, params)
        assert_mean_of(short, short_tail)
        assert_mean_of(long, long_tail)
        state = after(state, *xes)
        assert_mean_of(average.value(state, params), used)
    assert update._cache_size() == after._cache_size() == 1


def test_two_tailed_does_not_switch_to_nan():
    average = averaging.make_averaging("two_tailed")
    t = weights(4)
    state = average.update(average.init(t[0]), t[0])
    state = average.after_evaluation(state, 2.0, 2.0)
    state = average.update(state, t[1])
    state = average.after_evaluation(state, jnp.nan, 2.0)
    assert_mean_of(average.value(state, t[1]), t[:2])


class WatchedTails:
    """The algorithm as a person writes it, with the iterates of both tails as lists."""

    def __init__(self, patience):
        self.patience, self.short, self.long = patience, [], []
        self.short_history, self.long_history = [], []
        self.steps, self.used = 0, "long"

    def step(self, params):
        self.short, self.long = [*self.short, params], [*self.long, params]
        self.steps += 1

    def stagnates(self, history):
        best = int(np.argmin(history))  # The first, so equal values are no improvement.
        return len(history) - 1 - best >= self.patience

    def evaluate(self, fs, fl, f1):
        self.short_history.append(fs)
        self.long_history.append(fl)
        if fs <= fl or self.stagnates(self.long_history):
            fl, self.long, self.short = fs, self.short, []
            self.long_history, self.short_history = [fs], []
        elif self.stagnates(self.short_history):
            self.short, self.short_history = [], []
        self.used = "long"
        if len(self.long) > 1 and f1 <= fl:
            self.used = "raw"
            if len(self.long) == self.steps:
                self.short, self.long = [], []
                self.short_history, self.long_history = [], []
        self.steps = 0


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_watched_tails_equal_the_algorithm_with_lists(patience):
    average = averaging.make_averaging("two_tailed", patience)
    update, after = jax.jit(average.update), jax.jit(average.after_evaluation)
    trajectory, rng, seen = weights(120), np.random.default_rng(patience), set()
    state, expected = average.init(trajectory[0]), WatchedTails(patience)
    for turn in range(40):
        for params in trajectory[3 * turn : 3 * turn + 3]:
            state = update(state, params)
            expected.step(params)
        short, long, raw = average.candidates(state, params)
        assert_mean_of(short, expected.short)
        assert_mean_of(long, expected.long)
        assert raw is params
        xes = rng.integers(0, 12, 3) / 4 + [1.0, 0.0, 1.0]  # Some are equal.
        lengths = len(expected.short), len(expected.long)
        state = after(state, *xes.astype(np.float32))
        expected.evaluate(*np.float32(xes))
        assert (int(state.short.n), int(state.long.n)) == (len(expected.short), len(expected.long))
        assert bool(state.raw) == (expected.used == "raw")
        used = [params] if expected.used == "raw" or not expected.long else expected.long
        assert_mean_of(average.value(state, params), used)
        if not expected.long:
            seen.add("both begin again")
        elif len(expected.long) != lengths[1]:
            seen.add("switch" if xes[0] <= xes[1] else "the long tail stagnates")
        elif not expected.short:
            seen.add("the short tail stagnates")
        seen.add(expected.used)
    assert seen >= {"switch", "the long tail stagnates", "the short tail stagnates"}
    assert seen >= {"both begin again", "raw", "long"}
    assert update._cache_size() == after._cache_size() == 1


def test_without_stagnation_and_with_worse_raw_weights_watched_tails_are_the_two_tails():
    t, states = weights(12), []
    for patience in (None, 100):
        average = averaging.make_averaging("two_tailed", patience)
        state = average.init(t[0])
        for turn, (short, long) in enumerate([(2.0, 2.0), (2.1, 1.9), (1.7, 1.8), (1.9, 1.6)]):
            for params in t[3 * turn : 3 * turn + 3]:
                state = average.update(state, params)
            state = average.after_evaluation(state, short, long, *[9.0] * (patience is not None))
        states.append(state)
    for tail in ("short", "long"):
        one, other = (getattr(state, tail) for state in states)
        assert one.n == other.n
        np.testing.assert_array_equal(one.mean["w"], other.mean["w"])


def test_stagnation_belongs_to_two_tails():
    with pytest.raises(errors.UsageError, match=r"stagnating_evaluations 3 is for .* two_tailed"):
        averaging.make_averaging("triggered", 3)


@pytest.mark.parametrize("kind, copies", [("none", 0), ("triggered", 1), ("two_tailed", 2)])
def test_memory(kind, copies):
    params = weights(1)[0]
    state = averaging.make_averaging(kind).init(params)
    arrays = [x.size for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
    assert sum(arrays) == copies * 7


def turn(average, state, params, start, xe):
    """One turn of any kind: the calls of a training loop."""
    candidates = average.candidates(state, params)
    state = average.after_evaluation(state, *[xe * (i + 1) for i in range(len(candidates))])
    started = average.start(state)
    state = jax.tree.map(lambda a, b: jnp.where(start, a, b), started, state)
    return average.update(state, params)


@pytest.mark.parametrize("kind", [*KINDS, "watched"])
def test_stacked_states_equal_single_ones(kind):
    """Trials with different decisions run side by side under one vmap."""
    arguments = ("two_tailed", 1) if kind == "watched" else (kind,)
    average = averaging.make_averaging(*arguments)
    starts, xes = jnp.array([True, False, True]), jnp.array([1.0, 2.0, -1.0])
    trajectories = [weights(5)[i : i + 3] for i in range(3)]
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    stacked = jax.vmap(average.init)(stack([t[0] for t in trajectories]))
    singles = [average.init(t[0]) for t in trajectories]
    many = jax.jit(jax.vmap(lambda s, p, start, xe: turn(average, s, p, start, xe)))
    for step in range(3):
        params = [t[step] for t in trajectories]
        stacked = many(stacked, stack(params), starts, xes)
        singles = [
            turn(average, s, p, a, xe)
            for s, p, a, xe in zip(singles, params, starts, xes, strict=True)
        ]
    got = jax.vmap(average.value)(stacked, stack(params))
    expected = stack([average.value(s, p) for s, p in zip(singles, params, strict=True)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
    averaged = not np.allclose(got["w"][0], params[0]["w"])
    assert averaged == (kind != "none")


def test_none_is_the_raw_weights():
    average = averaging.make_averaging("none")
    params = weights(1)[0]
    state = average.start(average.update(average.init(params), params))
    assert state == () and average.value(state, params) is params
    assert average.candidates(state, params) == (params,)
    assert average.after_evaluation(state, 1.0) == ()

"""Scores in order without dropout: every token once, with the state carried along."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax.training import scoring


@pytest.fixture(scope="module")
def one_stream(small):
    return scoring.Deterministic(small.model, small.task.plan("valid", 1), chunk=5)


def test_windows_of_one_stream_score_as_the_whole_text(small, one_stream):
    assert one_stream.plan.num_windows > 2 * 5  # Several dispatches, the last one not full.
    assert one_stream.plan.num_windows % 5
    score = one_stream.sums(small.params, [1.0])
    assert score.count == len(small.tokens)
    np.testing.assert_allclose(score.total, small.direct().sum(), rtol=1e-6)
    # A state that started anew with each stripe gives another sum.
    stripes = scoring.Deterministic(small.model, small.task.plan("valid", 8)).sums(
        small.params, [1.0]
    )
    assert stripes.count == score.count
    assert abs(stripes.total / score.total - 1) > 1e-4


def test_several_temperatures_in_one_pass_equal_a_pass_for_each(small, one_stream):
    temperatures = (1.06, 0.9, 0.5)
    search = scoring.Deterministic(small.model, one_stream.plan, chunk=5)
    together = search.sums(small.params, temperatures, max_windows=7)
    alone = [one_stream.sums(small.params, [t], max_windows=7) for t in temperatures]
    assert {together.count, *(each.count for each in alone)} == {6 * 7}
    totals = np.concatenate([each.total for each in alone])
    np.testing.assert_allclose(together.total, totals, rtol=1e-6)
    assert min(abs(np.diff(totals))) > 1e-4 * totals[0]


def test_the_first_windows_are_scored_alone(small, one_stream):
    direct = small.direct()
    for windows in (1, 5, 7):
        score = one_stream.sums(small.params, [1.0], max_windows=windows)
        assert score.count == 6 * windows
        np.testing.assert_allclose(score.total, direct[: 6 * windows].sum(), rtol=1e-6)


def test_scores_without_compilation(small, one_stream):
    compiled = one_stream.sums(small.params, [0.9], max_windows=1)
    with jax.disable_jit():
        plain = one_stream.sums(small.params, [0.9], max_windows=1)
    np.testing.assert_allclose(plain.total, compiled.total, rtol=1e-6)


def test_one_program_serves_all_dispatches_and_temperatures(small, one_stream):
    warm, cold = (one_stream.sums(small.params, [scale]).total for scale in (0.9, 1.1))
    assert warm != cold
    tokens = one_stream(small.params, 0.9)
    np.testing.assert_array_equal(tokens.tokens, small.tokens)
    np.testing.assert_allclose(tokens.nats.sum(dtype=np.float64), warm[0], rtol=1e-6)
    assert one_stream._sum._cache_size() == one_stream._score._cache_size() == 1


def test_means_of_parts_combine_to_the_mean_of_all():
    a = scoring.Sum(jnp.array([1.0, 2.0]), jnp.array([1, 2]))
    b = scoring.Sum(jnp.array([6.0, 0.0]), jnp.array([1, 0]))
    assert jax.tree.map(jnp.add, a, b).mean() == 9 / 4
    assert (a.mean() + b.mean()) / 2 != 9 / 4
    total = jax.jit(lambda x: jax.tree.map(jnp.sum, x))(a)
    assert isinstance(total, scoring.Sum) and total.mean() == 1.0
    # Float32 would lose the ones.
    many = scoring.Sum(np.float32([2**25, 1, 1, 1, 1]), np.int32([1] * 5))
    assert many.mean() == (2.0**25 + 4) / 5
    assert math.isnan(scoring.Sum(0.0, 0).mean())

"""Optimizers against float64 NumPy, with controls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mogrifier_jax import errors
from mogrifier_jax.training import optimizers

SHAPES = {"kernel": (3, 4), "bias": (4,)}


def trees(n, scale=1.0):
    """n trees of float64 values."""
    rng = np.random.default_rng(0)
    return [{k: scale * rng.normal(size=s) for k, s in SHAPES.items()} for _ in range(n)]


def as_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def norm(tree):
    return np.sqrt(sum(np.sum(x**2) for x in tree.values()))


def run(optimizer, params, gradients, learning_rate=0.01, l2_penalty=0.0):
    """Params after one step per gradient, through the jitted train-step sequence."""

    @jax.jit
    def step(params, state, gradient, learning_rate, l2_penalty):
        gradient = optimizers.add_l2(gradient, params, l2_penalty)
        direction, state = optimizer.update(gradient, state, params)
        return optimizers.descend(params, direction, learning_rate), state

    params = as_float32(params)
    state = optimizer.init(params)
    for gradient in as_float32(gradients):
        params, state = step(params, state, gradient, learning_rate, l2_penalty)
    return params


def reference_adam(params, gradients, *, b1, b2, eps, clip, learning_rate, l2_penalty):
    """lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps) in float64."""
    m = {k: np.zeros(s) for k, s in SHAPES.items()}
    v = {k: np.zeros(s) for k, s in SHAPES.items()}
    for t, gradient in enumerate(gradients, start=1):
        g = {k: gradient[k] + l2_penalty * params[k] for k in SHAPES}
        factor = clip / max(norm(g), clip) if clip else 1.0
        for k in SHAPES:
            m[k] = b1 * m[k] + (1 - b1) * factor * g[k]
            v[k] = b2 * v[k] + (1 - b2) * (factor * g[k]) ** 2
        scale = learning_rate * np.sqrt(1 - b2**t) / (1 - b1**t)
        params = {k: params[k] - scale * m[k] / (np.sqrt(v[k]) + eps) for k in SHAPES}
    return params


def difference(a, b):
    return max(np.max(np.abs(np.asarray(a[k], np.float64) - b[k])) for k in SHAPES)


@pytest.mark.parametrize("b1", [0.0, 0.9])
@pytest.mark.parametrize("clip", [0.5, None])
def test_adam_equals_the_formula(b1, clip):
    params, *gradients = trees(6)
    settings = dict(b1=b1, b2=0.999, eps=1e-3)  # An eps that matters.
    got = run(
        optimizers.make_optimizer("adam", **settings, clip_norm=clip), params, gradients, 0.01, 0.1
    )
    expected = reference_adam(
        params, gradients, **settings, clip=clip, learning_rate=0.01, l2_penalty=0.1
    )
    assert difference(got, expected) < 3e-7
    # Control: eps after bias correction, optax's form, is somewhere else.
    chain = [optax.clip_by_global_norm(clip)] if clip else []
    other = run(optax.chain(*chain, optax.scale_by_adam(**settings)), params, gradients, 0.01, 0.1)
    assert difference(other, expected) > 1e-5


def reference_radam(params, gradients, *, b1, b2, eps, learning_rate):
    """arXiv:1908.03265 in float64: the rectified step once the variance is tractable."""
    m = {k: np.zeros(s) for k, s in SHAPES.items()}
    v = {k: np.zeros(s) for k, s in SHAPES.items()}
    most = 2 / (1 - b2) - 1
    for t, gradient in enumerate(gradients, start=1):
        length = most - 2 * t * b2**t / (1 - b2**t)
        for k in SHAPES:
            m[k] = b1 * m[k] + (1 - b1) * gradient[k]
            v[k] = b2 * v[k] + (1 - b2) * gradient[k] ** 2
            step = m[k] / (1 - b1**t)
            if length > 5:
                top, bottom = (length - 4) * (length - 2) * most, (most - 4) * (most - 2) * length
                step = np.sqrt(top / bottom) * step / (np.sqrt(v[k] / (1 - b2**t)) + eps)
            params = {**params, k: params[k] - learning_rate * step}
    return params


@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_radam_equals_the_formula(b1):
    params, *gradients = trees(20)
    settings = dict(b1=b1, b2=0.9, eps=1e-3)
    optimizer = optimizers.make_optimizer("radam", **settings, clip_norm=None)
    got = run(optimizer, params, gradients, 0.01)
    expected = reference_radam(params, gradients, **settings, learning_rate=0.01)
    assert difference(got, expected) < 1e-6
    adam = run(
        optimizers.make_optimizer("adam", **settings, clip_norm=None), params, gradients, 0.01
    )
    assert difference(adam, expected) > 1e-3


def test_first_step_of_adam_is_exact_in_float32():
    """Bias correction at b2 = 0.999 loses digits when 1 - b2^t is formed by subtraction."""
    params, gradient = as_float32(trees(2))
    adam = optimizers.scale_by_adam_eps_hat(eps=0.0)
    direction, _ = adam.update(gradient, adam.init(params))
    for k in SHAPES:
        np.testing.assert_allclose(direction[k], np.sign(gradient[k]), rtol=3e-7)
    naive = np.sqrt(np.float32(1) - np.float32(0.999)) / np.sqrt(0.001)
    assert abs(naive - 1) > 5e-6


def test_adam_without_first_moment_keeps_none():
    params = as_float32(trees(1)[0])
    size = sum(np.prod(s) for s in SHAPES.values())

    def stored(b1):
        state = optimizers.scale_by_adam_eps_hat(b1=b1).init(params)
        return sum(x.size for x in jax.tree.leaves(state)) - 1

    assert stored(0.0) == size and stored(0.9) == 2 * size


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_clipping_only_shortens(scale):
    gradient = trees(1, scale)[0]
    got, _ = optimizers.clip_by_global_norm(0.5).update(as_float32(gradient), optax.EmptyState())
    expected = 0.5 / max(norm(gradient), 0.5)
    assert (expected < 1) == (scale == 1.0)
    for k in SHAPES:
        np.testing.assert_allclose(got[k], expected * gradient[k], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])  # The last overflows in the norm only.
def test_norm_that_is_not_finite_makes_everything_nan(bad):
    gradient = as_float32(trees(1)[0])
    clip = optimizers.clip_by_global_norm(10.0)
    got, _ = clip.update(gradient | {"bias": gradient["bias"].at[0].set(bad)}, optax.EmptyState())
    assert all(np.all(np.isnan(x)) for x in got.values())
    good, _ = clip.update(gradient, optax.EmptyState())
    assert all(np.all(np.isfinite(x)) for x in good.values())


@pytest.mark.parametrize("off", [None, 0.0, -1.0])
def test_clipping_can_be_off(off):
    params, gradient = trees(2, 100.0)
    got = run(optimizers.make_optimizer("sgd", clip_norm=off), params, [gradient])
    unclipped = {k: params[k] - 0.01 * gradient[k] for k in SHAPES}
    assert difference(got, unclipped) < 1e-4
    clipped = run(optimizers.make_optimizer("sgd", clip_norm=10.0), params, [gradient])
    assert difference(clipped, unclipped) > 1e-2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_the_formula(momentum):
    params, *gradients = trees(4)
    got = run(
        optimizers.make_optimizer("sgd", momentum=momentum, clip_norm=None), params, gradients
    )
    for k in SHAPES:
        velocity, expected = 0.0, params[k]
        for gradient in gradients:
            velocity = momentum * velocity + gradient[k]
            expected = expected - 0.01 * velocity
        np.testing.assert_allclose(got[k], expected, rtol=1e-5, atol=1e-6)


def test_rmsprop_has_no_bias_correction():
    params, gradient = trees(2)
    optimizer = optimizers.make_optimizer("rmsprop", b2=0.99, clip_norm=None)
    direction, _ = optimizer.update(as_float32(gradient), optimizer.init(as_float32(params)))
    for k in SHAPES:
        expected = gradient[k] / np.sqrt(0.01 * gradient[k] ** 2 + 1e-8)
        np.testing.assert_allclose(direction[k], expected, rtol=1e-5)
        assert np.median(np.abs(direction[k])) > 5  # Adam would say 1.


def test_l2_is_the_gradient_of_half_the_squared_norm():
    params, gradient = as_float32(trees(2))
    got = optimizers.add_l2(gradient, params, jnp.float32(0.3))
    penalty = jax.grad(lambda p: 0.3 / 2 * sum(jnp.sum(x**2) for x in p.values()))(params)
    for k in SHAPES:
        np.testing.assert_allclose(got[k], gradient[k] + penalty[k], rtol=1e-6)


def test_rates_are_traced():
    optimizer = optimizers.make_optimizer()
    params, gradient = as_float32(trees(2))
    traces = []

    @jax.jit
    def step(params, state, learning_rate, l2_penalty):
        traces.append(None)
        direction, state = optimizer.update(optimizers.add_l2(gradient, params, l2_penalty), state)
        return optimizers.descend(params, direction, learning_rate), state

    state = optimizer.init(params)
    slow, _ = step(params, state, 0.001, 1e-5)
    fast, _ = step(params, state, 0.1, 1e-3)
    assert len(traces) == 1
    assert difference(slow, jax.tree.map(np.asarray, fast)) > 0.05


def test_momentum_without_a_meaning_is_refused():
    with pytest.raises(errors.UsageError, match=r"momentum 0.9.*set b1"):
        optimizers.make_optimizer(momentum=0.9)

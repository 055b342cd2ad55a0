"""Optimizers: optax transformations that clip gradients and turn them into a direction.

The learning rate and the L2 penalty are traced, so that trials can differ in them and share a
program. Neither is part of a transformation: `add_l2` comes before it, and `descend` after it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mogrifier_jax import errors


class AdamState(NamedTuple):
    """Steps taken, first moment (an empty tuple when b1 is 0) and second moment."""

    steps: jax.Array
    mu: optax.Updates
    nu: optax.Updates


def _one_minus_power(b: float, t: jax.Array) -> jax.Array:
    """1 - b^t without the cancellation that costs float32 digits at b = 0.999, t = 1."""
    return -jnp.expm1(t.astype(jnp.float32) * (math.log(b) if b > 0 else -math.inf))


def scale_by_adam_eps_hat(
    b1: float = 0.0, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Adam with eps added to the uncorrected sqrt(v): "epsilon hat" of arXiv:1412.6980, section 2.

    optax.scale_by_adam adds eps after bias correction instead. With b1 = 0 no first moment is kept.
    """

    def init(params: optax.Params) -> AdamState:
        mu = optax.tree.zeros_like(params) if b1 else ()
        return AdamState(jnp.zeros([], jnp.int32), mu, optax.tree.zeros_like(params))

    def update(
        gradients: optax.Updates, state: AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdamState]:
        del params
        steps = state.steps + 1
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.nu, gradients)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, gradients) if b1 else ()
        scale = jnp.sqrt(_one_minus_power(b2, steps)) / _one_minus_power(b1, steps)
        direction = jax.tree.map(
            lambda m, v: scale * m / (jnp.sqrt(v) + eps), mu if b1 else gradients, nu
        )
        return direction, AdamState(steps, mu, nu)

    return optax.GradientTransformation(init, update)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by c / max(norm, c); a norm that is not finite makes them all NaN.

    NaN everywhere is intended, because the run then stops instead of continuing from a broken step.
    """

    def update(
        gradients: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        norm = optax.tree.norm(gradients)
        factor = jnp.where(jnp.isfinite(norm), max_norm / jnp.maximum(norm, max_norm), jnp.nan)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _sgd(momentum: float, **_: float) -> optax.GradientTransformation:
    return optax.trace(momentum) if momentum else optax.identity()


def _rmsprop(b2: float, eps: float, momentum: float, **_: float) -> optax.GradientTransformation:
    # Unlike Adam with b1 = 0 there is no bias correction: early steps are long.
    return optax.chain(optax.scale_by_rms(decay=b2, eps=eps), _sgd(momentum))


def _radam(b1: float, b2: float, eps: float, **_: float) -> optax.GradientTransformation:
    # Here eps is added to the square root of the bias-corrected second moment, unlike in our Adam.
    return optax.scale_by_radam(b1, b2, eps)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": lambda b1, b2, eps, momentum: scale_by_adam_eps_hat(b1, b2, eps),
    "radam": _radam,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
}


def make_optimizer(
    name: str = "adam",
    *,
    b1: float = 0.0,
    b2: float = 0.999,
    eps: float = 1e-8,
    clip_norm: float | None = 10.0,
    momentum: float = 0.0,
) -> optax.GradientTransformation:
    """Clipping (none when clip_norm is None or <= 0), then the direction of the named optimizer.

    b2 is also the decay of rmsprop; momentum belongs to sgd and rmsprop.
    """
    if name in ("adam", "radam") and momentum:
        raise errors.UsageError(f"optimizer.momentum {momentum} does nothing in {name}: set b1")
    direction = OPTIMIZERS[name](b1=b1, b2=b2, eps=eps, momentum=momentum)
    if clip_norm is None or clip_norm <= 0:
        return direction
    return optax.chain(clip_by_global_norm(clip_norm), direction)


def add_l2(
    gradients: optax.Params, params: optax.Params, l2_penalty: float | jax.Array
) -> optax.Params:
    """Adds the gradient of l2_penalty / 2 * sum(params^2), biases and embeddings included."""
    return jax.tree.map(lambda g, p: g + l2_penalty * p, gradients, params)


def descend(
    params: optax.Params, direction: optax.Params, learning_rate: float | jax.Array
) -> optax.Params:
    """One step against the direction."""
    return jax.tree.map(lambda p, d: p - learning_rate * d, params, direction)

"""Dropout: its rates, its masks, and the operation itself.

Rates may be traced, so that changing one does not recompile. A rate of None leaves the operation
out of the program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from mogrifier_jax import errors

# A number, or a traced one.
Rate = float | Float[Array, ""]


class Dropout(NamedTuple):
    """The probabilities of dropping an element; None means no dropout."""

    input: Rate | None = None  # Of the embedded tokens.
    inter_layer: Rate | None = None  # Of the input of each layer after the first.
    state: Rate | None = None  # Of the previous h that the gates read.
    output: Rate | None = None  # Of the output of the stack.
    downprojected: Rate | None = None  # Of the softmax's projection of that output.
    cell_output: Rate | None = None  # Of the output of each layer, before layers are added up.


NO_DROPOUT = Dropout()


def drop(rate: Rate, x: Float[Array, "*S"], key: Array) -> Float[Array, "*S"]:
    """Inverted dropout with a rate that may be traced."""
    keep = keep_mask(rate, x.shape, key)
    return jnp.where(keep, x * keep_scale(rate, x.dtype), jnp.zeros_like(x))


def keep_mask(rate: Rate, shape: tuple[int, ...], key: Array) -> Bool[Array, "..."]:
    """True with probability 1 - rate."""
    errors.check(
        not isinstance(rate, int | float) or 0 <= rate < 1,
        f"dropout rate {rate} must be at least 0 and below 1; use None for no dropout",
    )
    return jax.random.bernoulli(key, 1 - jnp.asarray(rate, jnp.float32), shape)


def keep_scale(rate: Rate, dtype: DTypeLike) -> Float[Array, ""]:
    """The factor 1 / (1 - rate) for the elements that are kept."""
    return (1 / (1 - jnp.asarray(rate, jnp.float32))).astype(dtype)


def state_mask(rate: Rate, shape: tuple[int, ...], key: Array) -> dict[str, Array]:
    """The mask and the scale of state dropout, as `RNN.window` takes them."""
    return {"keep": keep_mask(rate, shape, key), "scale": keep_scale(rate, jnp.float32)}

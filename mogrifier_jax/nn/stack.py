"""Stack: the recurrent layers of a model over a window, and the dropout around them.

Axes: B batch, T time, E embedding, H hidden. Dropout rates are values, not switches: they may
be traced, and `None` takes the operation away.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mogrifier_jax.nn import cells, layers

Dtype = Any
check = layers.check


class Dropout(NamedTuple):
    """Probabilities of dropping; None where there is no dropout at all."""

    input: Any = None  # On embedded tokens.
    inter_layer: Any = None  # On what one layer hands to the next.
    state: Any = None  # On the previous h as the gates read it.
    output: Any = None  # On the summed output of the layers.
    downprojected: Any = None  # Once more after a projection or mixture.


NO_DROPOUT = Dropout()


def dropout(rate: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Inverted dropout with a rate that may be traced."""
    keep = keep_mask(rate, x.shape, key)
    return jnp.where(keep, x * keep_scale(rate, x.dtype), jnp.zeros_like(x))


def keep_mask(rate: Any, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """True with probability 1 - rate."""
    check(
        not isinstance(rate, int | float) or 0 <= rate < 1,
        f"dropout rate {rate} must be at least 0 and below 1; use None for no dropout",
    )
    return jax.random.bernoulli(key, 1 - jnp.asarray(rate, jnp.float32), shape)


def keep_scale(rate: Any, dtype: Dtype) -> jax.Array:
    """What makes up for the dropped: 1 / (1 - rate)."""
    return (1 / (1 - jnp.asarray(rate, jnp.float32))).astype(dtype)


def zero_carry(module: Any, batch_size: int) -> tuple[Any, ...]:
    """A zero carry for each layer of a stack or model."""
    make = layers.find_cell(module.cell)
    cell = make(module.hidden_size, dtype=module.dtype, parent=None)
    return (cell.initialize_carry(None, (batch_size, module.hidden_size)),) * module.num_layers


class Stack(nn.Module):
    """Layers of one cell over a window, combined as `output` says."""

    num_layers: int
    hidden_size: int
    cell: str = "mogrifier_lstm"
    cell_options: Any = ()  # A mapping, splatted into the cell.
    output: str = "sum"  # "sum" of all layers, "residual" connections or the "last" layer.
    state_mask: str = "window"  # State dropout: one mask for the "window" or for each "step".
    trainable_initial_state: bool = False
    fast: bool = True
    remat_window: int | None = None
    unroll: int = 1
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        """Checks the options and makes the layers."""
        check(self.num_layers >= 1, f"num_layers {self.num_layers} must be at least 1")
        check(
            self.output in ("sum", "residual", "last"),
            f"output {self.output!r} is not known; use 'sum', 'residual' or 'last'",
        )
        check(
            self.state_mask in ("window", "step"),
            f"state_mask {self.state_mask!r} is not known; use 'window' or 'step'",
        )
        make = functools.partial(layers.find_cell(self.cell), **dict(self.cell_options))
        self.layers = [
            layers.Layer(
                make(self.hidden_size, dtype=self.dtype, parent=None),
                fast=self.fast,
                remat_window=self.remat_window,
                unroll=self.unroll,
            )
            for _ in range(self.num_layers)
        ]
        if self.trainable_initial_state:
            self.initial_state = self.param("initial_state", self.init_initial_state)

    def init_initial_state(self, key: jax.Array) -> tuple[Any, ...]:
        """Zeros, to be trained."""
        del key
        return jax.tree.map(lambda a: cells.widen(a[0]), zero_carry(self, 1))

    def initial_carry(self, batch_size: int) -> tuple[Any, ...]:
        """What a sequence starts from: zeros, or the trained initial state."""
        zeros = zero_carry(self, batch_size)
        if not self.trainable_initial_state:
            return zeros
        return jax.tree.map(lambda v, z: cells.stretch(v, z), self.initial_state, zeros)

    def __call__(
        self,
        carry: tuple[Any, ...],
        xs: jax.Array,
        valid: jax.Array | None = None,
        rates: Dropout = NO_DROPOUT,
    ) -> tuple[tuple[Any, ...], jax.Array]:
        """(carry, xs [T, B, E]) to (carry, outputs [T, B, H])."""
        self.check_carry(carry)
        carries: list[Any] = []
        total: Any = None
        for index, layer in enumerate(self.layers):
            if index and rates.inter_layer is not None:
                xs = dropout(rates.inter_layer, xs, self.make_rng("dropout"))
            mask = self.draw_state_mask(rates.state, xs.shape)
            last, hs = layer(carry[index], xs, **mask, valid=valid)
            carries.append(last)
            if self.output == "residual" and index:
                hs = total + hs
            total = total + hs if self.output == "sum" and index else hs
            xs = hs
        return tuple(carries), total

    def check_carry(self, carry: Any) -> None:
        """One carry for each layer; the layers look at them more closely."""
        check(
            isinstance(carry, tuple | list) and len(carry) == self.num_layers,
            f"carry {jax.tree.structure(carry)} must be a tuple of {self.num_layers}, one for "
            "each layer; make one with zero_carry(batch_size)",
        )

    def draw_state_mask(self, rate: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """One mask for each layer, drawn outside the recurrence."""
        if rate is None:
            return {}
        steps = shape[:1] if self.state_mask == "step" else ()
        mask_shape = (*steps, shape[1], self.hidden_size)
        keep = keep_mask(rate, mask_shape, self.make_rng("dropout"))
        return {"keep": keep, "scale": keep_scale(rate, jnp.float32)}

    def gates(self, carry: tuple[Any, ...], xs: jax.Array) -> tuple[Any, list[cells.Gates]]:
        """Every gate of every layer, [T, B, ...] each."""
        self.check_carry(carry)
        carries: list[Any] = []
        found: list[cells.Gates] = []
        total: Any = None
        for index, layer in enumerate(self.layers):
            last, hs, gates = layer.gates(carry[index], xs)
            carries.append(last)
            found.append(gates)
            xs = total + hs if self.output == "residual" and index else hs
            total = xs
        return tuple(carries), found

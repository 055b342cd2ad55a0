"""Stack: the recurrent layers of a model, with dropout between them.

Axes: B batch, T time, E embedding, H hidden.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, dropout, layers, model_options, rnn

check = errors.check
# One for each layer.
Carries = tuple[cells.State, ...]


def zero_carry(module: Any, batch_size: int) -> Carries:
    """A zero carry for each layer of a stack or model."""
    make = layers.find_cell(module.cell)
    cell = make(module.hidden_size, dtype=module.dtype, parent=None)
    carry = cell.initialize_carry(None, (batch_size, module.hidden_size))
    return (cell.to_state(carry, module.dtype),) * module.num_layers


class Stack(nn.Module):
    """Layers of the same cell; `output` says how their outputs are combined."""

    num_layers: int
    hidden_size: int
    cell: str = "mogrifier_lstm"
    cell_options: layers.Options = ()
    output: str = "sum"  # "sum" of all layers, "residual" connections or the "last" layer.
    state_mask: str = "window"  # One mask of the state dropout for the "window" or each "step".
    trainable_initial_state: bool = False
    fast: bool = True
    remat_window: int | None = None
    unroll: int = 1
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        """Checks the options and makes the layers."""
        model_options.check(self, "num_layers", "output", "state_mask")
        make = functools.partial(layers.find_cell(self.cell), **dict(self.cell_options))
        self.layers = [
            rnn.RNN(
                make(self.hidden_size, dtype=self.dtype, parent=None),
                fast=self.fast,
                remat_window=self.remat_window,
                unroll=self.unroll,
            )
            for _ in range(self.num_layers)
        ]
        if self.trainable_initial_state:
            self.initial_state = self.param("initial_state", self.init_initial_state)

    def init_initial_state(self, key: Array) -> Carries:
        """Zeros, to be trained."""
        del key
        return jax.tree.map(lambda a: cells.widen(a[0]), zero_carry(self, 1))

    def initial_carry(self, batch_size: int) -> Carries:
        """The carry that a sequence starts from: zeros, or the trained initial state."""
        zeros = zero_carry(self, batch_size)
        if not self.trainable_initial_state:
            return zeros
        return jax.tree.map(lambda v, z: cells.stretch(v, z), self.initial_state, zeros)

    def __call__(
        self,
        carry: Carries | None,
        xs: Float[Array, "T B E"],
        valid: Bool[Array, "T B"] | None = None,
        rates: dropout.Dropout = dropout.NO_DROPOUT,
    ) -> tuple[Carries, Float[Array, "T B H"]]:
        """From the inputs of the first layer to the carry and the outputs of the stack."""

        def run(
            layer: rnn.RNN, carry: cells.State, xs: Float[Array, "T B D"]
        ) -> tuple[cells.State, Float[Array, "T B H"]]:
            mask = {}
            if rates.state is not None:
                steps = xs.shape[:1] if self.state_mask == "step" else ()
                shape = (*steps, xs.shape[1], self.hidden_size)
                mask = dropout.state_mask(rates.state, shape, self.make_rng("dropout"))
            return layer.window(carry, xs, **mask, valid=valid, train=self.has_rng("dropout"))

        carry, total, _ = self.run_layers(run, carry, xs, rates)
        return carry, total

    def gates(
        self, carry: Carries | None, xs: Float[Array, "T B E"]
    ) -> tuple[Carries, list[cells.Gates]]:
        """Returns the carry, and every gate of every layer, [T, B, ...]."""
        carry, _, gates_of_layers = self.run_layers(rnn.RNN.gates, carry, xs)
        return carry, [gates for (gates,) in gates_of_layers]

    def run_layers(
        self,
        run: Callable[..., tuple[Any, ...]],
        carry: Carries | None,
        xs: Float[Array, "T B E"],
        rates: dropout.Dropout = dropout.NO_DROPOUT,
    ) -> tuple[Carries, Float[Array, "T B H"], list[list[Any]]]:
        """Calls `run(layer, carry, xs)` for each layer, with dropout of its inputs and outputs.

        Returns the carry, the output of the stack, and what `run` returns after carry and hs. A
        carry of None is the initial one.
        """
        carry = self.initial_carry(xs.shape[1]) if carry is None else carry
        check(
            isinstance(carry, tuple | list) and len(carry) == self.num_layers,
            f"carry {jax.tree.structure(carry)} must be a tuple of {self.num_layers}, one for "
            "each layer; make one with zero_carry(batch_size)",
        )
        carries, others = [], []
        total = xs  # Of the layers before; the first one does not read it.
        for index, layer in enumerate(self.layers):
            if index and rates.inter_layer is not None:
                xs = dropout.drop(rates.inter_layer, xs, self.make_rng("dropout"))
            last, hs, *other = run(layer, carry[index], xs)
            if rates.cell_output is not None:
                hs = dropout.drop(rates.cell_output, hs, self.make_rng("dropout"))
            carries.append(last)
            others.append(other)
            xs = total + hs if self.output == "residual" and index else hs
            total = total + xs if self.output == "sum" and index else xs
        return tuple(carries), total, others

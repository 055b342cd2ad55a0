"""Flax's own LSTM in a model of ours, that `recurrence.py` measures beside it.

Axes: T time, B batch, H hidden.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from mogrifier_jax.nn import cells, dropout, models, softmax


class Stack(nn.Module):
    """Layers of `RNN` with `OptimizedLSTMCell`, of `flax.linen` or of `flax.nnx`."""

    num_layers: int
    hidden_size: int
    api: str  # "linen" or "nnx".

    def setup(self) -> None:
        """Makes the layers, or the parameters of those that are made anew in each call."""
        if self.api == "linen":
            cell = nn.OptimizedLSTMCell(self.hidden_size, parent=None)
            options = dict(time_major=True, return_carry=True)
            self.layers = [nn.RNN(cell.clone(), **options) for _ in range(self.num_layers)]
        else:
            self.weights = [
                self.param(f"layer_{i}", self.init_layer) for i in range(self.num_layers)
            ]

    def make(self, key: jax.Array) -> nnx.RNN:
        """A layer of nnx."""
        rngs = nnx.Rngs(key)
        cell = nnx.OptimizedLSTMCell(self.hidden_size, self.hidden_size, rngs=rngs)
        return nnx.RNN(cell, time_major=True, return_carry=True, rngs=rngs)

    def init_layer(self, key: jax.Array) -> dict[str, Any]:
        """The parameters of such a layer."""
        return nnx.to_pure_dict(nnx.state(self.make(key), nnx.Param))

    def initial_carry(self, batch_size: int) -> tuple[cells.LSTMCarry, ...]:
        """Zeros."""
        zeros = jnp.zeros((batch_size, self.hidden_size))
        return (cells.LSTMCarry(zeros, zeros),) * self.num_layers

    def __call__(self, carry, xs, valid=None, rates=dropout.NO_DROPOUT):
        """(carry, xs [T, B, H]) to (carry, outputs [T, B, H])."""
        del valid, rates
        ends = []
        for index, start in enumerate(carry or self.initial_carry(xs.shape[1])):
            if self.api == "linen":
                layer = self.layers[index]
            else:
                layer = self.make(jax.random.key(0))
                nnx.update(layer, self.weights[index])
            end, xs = layer(xs, initial_carry=tuple(start))
            ends.append(cells.LSTMCarry(*end))
        return tuple(ends), xs


class LanguageModel(models.LanguageModel):
    """Ours but for the layers."""

    api: str = "linen"

    def setup(self) -> None:
        """Makes the parts."""
        shape = (self.vocab_size, self.embedding_size)
        self.embedding = self.param("embedding", softmax.normal_by_fan(shape[1]), shape)
        self.stack = Stack(self.num_layers, self.hidden_size, self.api)
        self.softmax = softmax.Softmax(
            *(self.vocab_size, self.hidden_size, self.embedding_size, self.mixture_components),
            *(self.tied_embeddings, self.max_logits, self.dtype),
        )

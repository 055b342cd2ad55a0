"""Runs Flax cells that have no counterpart here step by step, with resets of the carry.

It works for linen and NNX, whose scans have the same arguments. Without resets, Flax's own RNNs run
such cells.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import recurrent

from mogrifier_jax import errors


@dataclasses.dataclass
class Run:
    """One call of an RNN; the fields are the arguments of `nn.RNN.__call__`."""

    inputs: jax.Array  # [..., T, features...], or [T, ..., features...].
    resets: jax.Array | None  # [..., T], or [T, ...].
    num_feature_axes: int
    seq_lengths: jax.Array | None = None
    return_carry: bool = False
    time_major: bool = False
    reverse: bool = False
    keep_order: bool = False

    def __post_init__(self) -> None:
        shape = self.inputs.shape[: self.inputs.ndim - self.num_feature_axes]
        if self.resets is not None:
            self.resets = read_resets(self.resets, shape)
        if self.seq_lengths is not None:
            check_lengths(self.seq_lengths, shape[1:] if self.time_major else shape[:-1])
        self.time_axis = 0 if self.time_major else len(shape) - 1
        self.num_batch_axes = len(shape) - 1

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """The axes of the inputs that are neither time nor features."""
        return tuple(a for a in range(self.num_batch_axes + 1) if a != self.time_axis)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of the input of one step."""
        shape = self.inputs.shape
        return (*shape[: self.time_axis], *shape[self.time_axis + 1 :])

    def __call__(self, scan: Callable[..., Any], cell: Any, start: Any, carry: Any) -> Any:
        """Runs the cell.

        Args:
          scan: `nn.scan` or the scan of NNX, with all its arguments except those for axes.
          start: the carry after a reset.
          carry: the carry before the first step.
        """
        keeps_carries = self.return_carry and self.seq_lengths is not None
        assert self.resets is not None
        inputs, resets = self.inputs, self.resets
        if self.reverse:
            inputs, resets = self.flip(inputs), self.flip(resets)

        def step(cell: Any, carry: Any, inputs: Any) -> Any:
            x, reset = inputs
            carry, y = cell(jax.tree.map(lambda new, old: select(reset, new, old), start, carry), x)
            return carry, (carry, y) if keeps_carries else y

        run = scan(step, in_axes=self.time_axis, out_axes=self.axes_of_results(keeps_carries))
        carry, outputs = run(cell, carry, (inputs, resets))
        if keeps_carries:
            carries, outputs = outputs
            carry = jax.tree.map(self.take_last, carries)
        if self.reverse and self.keep_order:
            outputs = self.flip(outputs)
        return (carry, outputs) if self.return_carry else outputs

    def axes_of_results(self, keeps_carries: bool) -> Any:
        """The time axis of the outputs; carries have theirs in front."""
        return (0, self.time_axis) if keeps_carries else self.time_axis

    def flip(self, sequence: jax.Array) -> jax.Array:
        """Reverses a sequence in time, up to its length."""
        return recurrent.flip_sequences(
            sequence, self.seq_lengths, self.num_batch_axes, self.time_major
        )

    def take_last(self, carries: jax.Array) -> jax.Array:
        """The carry at the end of each sequence, from those of all steps [T, ...]."""
        lengths = jnp.asarray(self.seq_lengths)
        steps = carries.shape[0]
        index = jnp.where(lengths == 0, steps, jnp.minimum(lengths, steps)) - 1
        index = index.reshape(1, *index.shape, *[1] * (carries.ndim - 1 - index.ndim))
        return jnp.take_along_axis(carries, index, 0)[0]


def check_lengths(lengths: Any, batch: Sequence[int | Any]) -> None:
    """Refuses lengths that are not one for each sequence of the batch."""
    errors.check(
        lengths.shape == tuple(batch),
        f"seq_lengths of shape {lengths.shape} and dtype {lengths.dtype} must be one integer for "
        f"each sequence, here {tuple(batch)}",
    )


def match_structure(carry: Any, like: Any) -> Any:
    """A carry of the same parts with the structure of another, as (c, h) for an `LSTMCarry`."""
    leaves, structure = jax.tree.leaves(carry), jax.tree.structure(like)
    return (
        jax.tree.unflatten(structure, leaves)
        if len(jax.tree.leaves(like)) == len(leaves)
        else carry
    )


def select(mask: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` for the rows of the batch where the mask is true."""
    return jnp.where(mask.reshape(*mask.shape, *[1] * (old.ndim - mask.ndim)), new, old)


def read_resets(resets: Any, shape: tuple[int, ...]) -> jax.Array:
    """Refuses resets of another shape than the batch and the time; returns them as booleans."""
    given = getattr(resets, "shape", None)
    errors.check(
        given == tuple(shape),
        f"resets {errors.show(resets) if given is None else f'of shape {given}'} must be an array "
        f"of one flag for each step of each sequence, here {tuple(shape)}",
    )
    return jnp.asarray(resets) != 0

"""RNN, which runs one cell over sequences, with lengths, masks and resets of the carry.

Axes: B batch, T time, D input features, H hidden. `RNN` replaces `nn.RNN` and uses the fast scan of
`windows.py`. The layers of a model (`stack.py`) are RNNs.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import recurrent
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, PyTree, Real, Shaped

from mogrifier_jax import errors
from mogrifier_jax.nn import (
    cells,
    dropout,
    from_flax,
    layers,
    meshes,
    model_options,
    recurrence,
    step_by_step,
    taps,
    windows,
)
from mogrifier_jax.nn.step_by_step import read_resets

check = errors.check


class RNN(nn.RNN):
    """`nn.RNN` with a fast backward pass; arguments, parameters and results are the same.

    >>> rnn = RNN(layers.MogrifierLSTMCell(features=8, rounds=5, rank=3))
    >>> init = jax.jit(rnn.init_with_output)
    >>> ys, variables = init(jax.random.key(0), jnp.ones((2, 7, 4)))  # [batch, time, features]
    >>> ys.shape
    (2, 7, 8)

    Flax's own LSTM, GRU and simple cell are fast too, with their own parameters. Other cells run
    step by step.

    Args:
      cell: a cell of this package or of Flax. What follows it up to `split_rngs` is as in `nn.RNN`.
      fast: False runs a plain scan, which forward-mode derivatives need.
      remat_window: saves memory: the carry is kept only once in this many steps, and what lies
        between is computed again in the backward pass.
      state_dropout: the rate at which units of the h that the gates read are dropped, the same
        units at every step. It draws from the rng "dropout".
      deterministic: whether masks are left out; needed only if there are any.
    """

    fast: bool = True
    remat_window: int | None = None
    state_dropout: float = 0.0
    deterministic: bool | None = None

    def __call__(
        self,
        inputs: Real[Array, "..."],
        *,
        initial_carry: layers.CarryLike | None = None,
        init_key: Array | None = None,
        seq_lengths: Integer[ArrayLike, "*B"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
        resets: Shaped[ArrayLike, "..."] | None = None,
    ) -> Any:
        """Runs the cell over sequences, with the arguments of `nn.RNN` and two more.

        Args:
          inputs: [..., time, features], or [time, ..., features] if `time_major`.
          deterministic: True leaves all masks out.
          resets: [..., time], or [time, ...] if `time_major`: the steps that start from
            `cell.initialize_carry` instead of the carry of the step before, such as the first steps
            of episodes. No gradient passes through them. In reverse, the step before is the one
            after it in time. Booleans or numbers; all but zeros are resets.

        Returns:
          the outputs [..., time, hidden]; (carry, outputs) if `return_carry`.
        """
        seq_lengths = check_sequences(self.cell, inputs, seq_lengths)
        if not layers.has_standard_step(type(self.cell), layers.Cell):
            given = dict(
                initial_carry=initial_carry,
                init_key=init_key,
                seq_lengths=seq_lengths,
                return_carry=return_carry,
                time_major=time_major,
                reverse=reverse,
                keep_order=keep_order,
                deterministic=deterministic,
                resets=resets,
            )
            return from_flax.run(self, self.run_step_by_step, inputs, given)
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order

        check(inputs.ndim >= 2, f"inputs {inputs.shape} must be [..., time, features]")
        time_axis = 0 if time_major else inputs.ndim - 2
        xs = jnp.moveaxis(inputs, time_axis, 0)
        steps, *batch, size = xs.shape
        start = carry = initial_carry
        if carry is None or resets is not None:
            init_key = jax.random.key(0) if init_key is None else init_key
            start = self.cell.initialize_carry(init_key, (*batch, size))
            carry = start if carry is None else carry
        self.cell.check_carry(carry, (*batch, size))
        lengths = None if seq_lengths is None else jnp.asarray(seq_lengths)
        if lengths is not None:
            step_by_step.check_lengths(lengths, batch)
        if resets is not None:
            resets = jnp.moveaxis(read_resets(resets, inputs.shape[:-1]), time_axis, 0)
        weights = self.cell.weights(size)
        rows = math.prod(batch)  # The recurrence needs one batch axis.
        masks = self.draw_masks(steps, rows) if self.draws(deterministic) else {}

        def compute(
            weights: cells.Params,
            xs: Real[Array, "T *B D"],
            carry: layers.CarryLike,
            start: layers.CarryLike,
            lengths: Integer[Array, "*B"] | None,
            resets: Bool[Array, "T *B"] | None,
            masks: recurrence.Arrays,
        ) -> tuple[layers.CarryLike, Float[Array, "..."]]:
            xs = xs.reshape(steps, rows, size)
            start, carry = jax.tree.map(lambda a: a.reshape(rows, a.shape[-1]), (start, carry))
            lengths = None if lengths is None else lengths.reshape(rows)
            resets = None if resets is None else resets.reshape(steps, rows)
            flip = functools.partial(
                recurrent.flip_sequences, seq_lengths=lengths, num_batch_dims=1, time_major=True
            )
            last = None
            if return_carry and lengths is not None and steps != 0:
                last = _marks_of_last(lengths, steps)
            if reverse:
                xs, resets = flip(xs), None if resets is None else flip(resets)
            state, ys = self.run_window(weights, carry, xs, masks, last, resets, start)
            ys = flip(ys) if reverse and keep_order else ys
            ys = jnp.moveaxis(ys.reshape(steps, *batch, ys.shape[-1]), 0, time_axis)
            carry = self.cell.to_carry(state)
            return jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), carry), ys

        def specs(of_xs: tuple[Any, ...]) -> Any:
            of_steps, *of_batch, _ = of_xs
            of_ys = [*of_batch, None]
            of_ys.insert(time_axis, of_steps)
            parts = [PartitionSpec(*of_batch, None)] * len(self.cell.state_type._fields)
            return self.cell.to_carry(self.cell.state_type(*parts)), PartitionSpec(*of_ys)

        operands = (weights, xs, carry, start, lengths, resets, masks)
        carry, ys = meshes.run_automatically(compute, operands, specs, like=xs)
        return (carry, ys) if return_carry else ys

    def run_step_by_step(
        self,
        inputs: Real[Array, "..."],
        resets: Any = None,
        initial_carry: PyTree[Array] = None,
        init_key: Array | None = None,
        **given: Any,
    ) -> Any:
        """Runs any cell as `nn.RNN` does, with the same keywords, and resets."""
        names = ("return_carry", "time_major", "reverse", "keep_order")
        given |= {name: getattr(self, name) for name in names if given.get(name) is None}
        run = step_by_step.Run(inputs, resets, self.cell.num_feature_axes, **given)
        init_key = jax.random.key(0) if init_key is None else init_key
        start = self.cell.initialize_carry(init_key, run.input_shape)
        carry = start
        if initial_carry is not None:
            carry = step_by_step.match_structure(initial_carry, start)
        start, carry = meshes.shard_carry((start, carry), inputs, run.batch_axes)
        if resets is None:
            return super().__call__(inputs, initial_carry=carry, **given)
        options = ("unroll", "variable_axes", "variable_broadcast", "variable_carry", "split_rngs")
        scan = functools.partial(nn.scan, **{name: getattr(self, name) for name in options})
        return run(scan, self.cell, start, carry)

    @nn.nowrap
    def draws(self, deterministic: bool | None) -> bool:
        """Whether masks are drawn; `deterministic` must be given only if there are any."""
        has_masks = bool(self.state_dropout or getattr(self.cell, "masks", None))
        return has_masks and not nn.merge_param("deterministic", self.deterministic, deterministic)

    def draw_masks(self, steps: int, rows: int) -> recurrence.Arrays:
        """The masks of state dropout and of the cell, as `window` takes them."""
        masks: recurrence.Arrays = {}
        if self.state_dropout:
            shape = (rows, self.cell.features)
            masks |= dropout.state_mask(self.state_dropout, shape, self.make_rng("dropout"))
        return masks | self.draw_masks_of_cell(steps, rows)

    def draw_masks_of_cell(self, steps: int, rows: int) -> recurrence.Arrays:
        """The masks that the cell itself needs in training."""
        shape = (steps, rows, self.cell.features)
        return {
            name: jax.random.bernoulli(self.make_rng("dropout"), rate, shape)
            for name, rate in self.cell.masks.items()
        }

    def window(
        self,
        carry: layers.CarryLike,
        xs: Real[Array, "T B D"],
        keep: Bool[Array, "*T B H"] | None = None,
        scale: cells.Scale | None = None,
        valid: Bool[Array, "T B"] | None = None,
        train: bool = False,
    ) -> tuple[cells.State, Float[Array, "T B H"]]:
        """From (carry, xs) to (state, hs), with masks that the caller draws.

        `keep` is the mask of the state dropout: [B, H] for all steps, or [T, B, H] with a mask for
        each step. `valid` is false after an example's end. There the output is zero and the
        state does not change. In training the masks of the cell are drawn here.
        """
        self.check_shapes(carry, xs, keep, scale, valid)
        weights = self.cell.weights(xs.shape[-1])
        given = {"keep": keep, "scale": scale, "valid": valid}
        masks = {name: mask for name, mask in given.items() if mask is not None}
        if train:
            masks |= self.draw_masks_of_cell(*xs.shape[:2])
        state, hs = self.run_window(weights, carry, xs, masks)
        if valid is not None:
            hs = jnp.where(valid[..., None], hs, jnp.zeros_like(hs))
        return state, hs

    def run_window(
        self,
        weights: cells.Params,
        carry: layers.CarryLike,
        xs: Real[Array, "T B D"],
        masks: recurrence.Arrays,
        last: Bool[Array, "T B"] | None = None,
        resets: Bool[Array, "T B"] | None = None,
        start: layers.CarryLike | None = None,
    ) -> tuple[cells.State, Float[Array, "T B H"]]:
        """The last state and hs of a window.

        `last` marks the step of each row whose state is returned instead. `resets` marks the steps
        that read the carry `start`.
        """
        model_options.check(self, "remat_window", "unroll")
        dtype = self.cell.computation_dtype(xs, weights)
        xs, state = xs.astype(dtype), self.cell.to_state(carry, dtype)
        masks = masks if last is None else masks | {"last": last}
        scanned = {n: m for n, m in masks.items() if m.ndim == 3 or n in ("valid", "last")}
        constant = {name: mask for name, mask in masks.items() if name not in scanned}
        marked = None
        if resets is not None:
            marked = recurrence.Resets(resets, self.cell.to_state(start, dtype))
        if last is not None and isinstance(state, cells.LSTMCarry):
            state = _Marked(*state, end=state.c)  # type: ignore[assignment]
        run = self.run_fast if self.fast and xs.shape[0] != 0 else self.run_plainly
        operands = (weights, state, xs, recurrence.Masks(scanned, constant), marked)
        end: Any
        end, hs = run(*meshes.vary_alike(operands), dtype)
        if last is not None:
            h = jnp.where(last[..., None], hs, jnp.zeros_like(hs)).sum(0)
            end = cells.LSTMCarry(end.end, h) if isinstance(end, _Marked) else cells.Carry(h)
        return end, hs

    def run_fast(
        self,
        weights: cells.Params,
        state: recurrence.State,
        xs: Float[Array, "T B D"],
        masks: recurrence.Masks,
        resets: recurrence.Resets | None,
        dtype: np.dtype,
    ) -> tuple[recurrence.State, Float[Array, "T B H"]]:
        """Runs the scan of `windows.py`."""
        weights, input_map = cells.split_input_projection(weights)
        try:
            return windows.scan(
                functools.partial(_step, self.cell.cell),
                weights,
                state,
                xs,
                masks,
                resets,
                dtype=dtype,
                input_map=input_map,
                remat_window=self.remat_window,
                unroll=self.unroll,
            )
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            raise errors.UsageError(
                "forward-mode derivatives (jvp, jacfwd, linearize) do not pass through the fast "
                "recurrence; set fast=False, or use reverse mode (grad, vjp, jacrev)"
            ) from error

    def run_plainly(
        self,
        weights: cells.Params,
        state: recurrence.State,
        xs: Float[Array, "T B D"],
        masks: recurrence.Masks,
        resets: recurrence.Resets | None,
        dtype: np.dtype,
    ) -> tuple[recurrence.State, Float[Array, "T B H"]]:
        """Runs a plain scan, which is the reference for the fast one."""

        def body(
            state: recurrence.State, inputs: Any
        ) -> tuple[recurrence.State, Float[Array, "B H"]]:
            x, scanned, marks = inputs
            state = state if resets is None else resets.restart(state, marks)
            params = taps.cast_matrices(weights, dtype)
            state = _step(self.cell.cell, params, state, x, **scanned, **masks.constant)
            return state, state.h

        unroll = self.unroll if isinstance(xs.shape[0], int) else 1  # As in `windows.scan`.
        inputs = (xs, masks.scanned, resets and resets.marks)
        return jax.lax.scan(body, state, inputs, unroll=unroll)

    def gates(
        self, carry: layers.CarryLike, xs: Float[Array, "T B D"]
    ) -> tuple[cells.State, Float[Array, "T B H"], cells.Gates]:
        """As `window` without masks; also returns every gate at every step, [T, B, ...]."""
        self.check_shapes(carry, xs)
        weights = self.cell.weights(xs.shape[-1])
        dtype = self.cell.computation_dtype(xs, weights)
        params = taps.cast_matrices(weights, dtype)

        def body(
            state: cells.State, x: Float[Array, "B D"]
        ) -> tuple[cells.State, tuple[Float[Array, "B H"], cells.Gates]]:
            state, gates = self.cell.cell(params, state, x)
            return state, (state.h, gates)

        state = self.cell.to_state(carry, dtype)
        state, (hs, gates) = jax.lax.scan(body, state, xs.astype(dtype))
        return state, hs, gates

    def check_shapes(
        self,
        carry: layers.CarryLike,
        xs: Real[Array, "..."],
        keep: Array | None = None,
        scale: Array | None = None,
        valid: Array | None = None,
    ) -> None:
        """Refuses arguments of a window that do not fit together."""
        check(xs.ndim == 3, f"xs of shape {xs.shape} must be [time, batch, features]")
        self.cell.check_carry(carry, xs.shape[1:])
        check(
            (keep is None) == (scale is None),
            "keep and scale belong together: give 1 / (1 - rate) with the mask, or neither",
        )
        if keep is not None:
            mask = (*xs.shape[:2], self.cell.features)
            check(
                keep.shape in (mask, mask[1:]),
                f"keep of shape {keep.shape} must be {mask}, or {mask[1:]} for all steps alike",
            )
        if valid is not None:
            check(
                valid.shape == xs.shape[:2],
                f"valid of shape {valid.shape} must be [time, batch], here {xs.shape[:2]}",
            )


class _Marked(NamedTuple):
    """The carry of an LSTM, and the c of the step that is marked as the last one."""

    c: Float[Array, "B H"]
    h: Float[Array, "B H"]
    end: Float[Array, "B H"]


def _step(
    cell: Callable[..., tuple[Any, cells.Gates]],
    params: cells.Params,
    state: recurrence.State,
    x: cells.Input,
    valid: Bool[Array, "B"] | None = None,
    last: Bool[Array, "B"] | None = None,
    **masks: Array,
) -> recurrence.State:
    """One step of a function of `cells.py`, which may be the last one or be padding."""
    before = state
    if isinstance(state, _Marked):
        before = cells.LSTMCarry(state.c, state.h)
    after, _ = cell(params, before, x, **masks)
    if isinstance(state, _Marked):
        assert last is not None  # They come together.
        return _Marked(after.c, after.h, jnp.where(last[:, None], after.c, state.end))
    if valid is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(valid[:, None], new, old), after, before)


def _marks_of_last(lengths: Integer[Array, "B"], steps: int) -> Bool[Array, "T B"]:
    """Marks the last step of each sequence; as in Flax, step T for an empty sequence."""
    index = jnp.minimum(lengths, steps) - 1
    index = jnp.where(index < 0, index + steps, index)
    return jnp.arange(steps)[:, None] == index[None, :]


def check_sequences(
    cell: object, inputs: object, seq_lengths: object, api: str = "linen"
) -> Integer[Array, "..."] | None:
    """Refuses what an RNN of linen or NNX cannot run; returns the lengths as int32."""
    check_cell(cell, api)
    check(
        hasattr(cell, "initialize_carry") and hasattr(inputs, "ndim"),
        f"RNN cannot run a {type(cell).__name__} over a {type(inputs).__name__}; give it a cell, "
        "and an array [..., time, features]",
    )
    check(not jnp.iscomplexobj(inputs), "inputs are complex; give real numbers")
    return None if seq_lengths is None else _read_lengths(seq_lengths)


def check_cell(cell: object, api: str) -> None:
    """Refuses a class in place of a cell, and a cell of the other one of Flax's two interfaces."""
    if inspect.isclass(cell):
        arguments = "64" if api == "linen" else "32, 64, rngs=rngs"
        raise errors.UsageError(
            f"RNN needs a cell and was given the class {cell.__name__}; make one, as in "
            f"RNN({cell.__name__}({arguments}))"
        )
    other, prefix = ("nnx", "") if api == "linen" else ("linen", "nnx.")
    check(
        not any(base.__module__.startswith(f"flax.{other}.") for base in type(cell).__mro__),
        f"{type(cell).__name__} is a cell of {other}, and mogrifier_jax.{prefix}RNN runs cells of "
        f"{api}; give it the cell of {api}, or use mogrifier_jax.{'' if prefix else 'nnx.'}RNN",
    )


def _read_lengths(seq_lengths: Any) -> Integer[Array, "..."]:
    """Lengths of any integer dtype as int32: a narrow or unsigned one would wrap around."""
    lengths, message = seq_lengths, "must be an array of one integer for each sequence"
    try:
        if not isinstance(lengths, jax.core.Tracer) and getattr(
            lengths, "is_fully_addressable", True
        ):
            lengths = np.asarray(lengths)
    except (TypeError, ValueError):  # Such as a list with traced values.
        with contextlib.suppress(TypeError, ValueError):
            lengths = jnp.asarray(lengths)
    dtype = getattr(lengths, "dtype", np.dtype(object))
    check(jnp.issubdtype(dtype, jnp.integer), f"seq_lengths {errors.show(seq_lengths)} {message}")
    longest = 2**31 - 1  # A length beyond it is longer than any sequence, and stays so.
    if isinstance(lengths, np.ndarray):
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        check(
            not (signed and (lengths.astype(np.int64) < 0).any()),
            f"seq_lengths {errors.show(seq_lengths)} must not be negative; give 0 for an empty "
            "sequence",
        )
        lengths = np.minimum(lengths.astype(np.uint64), np.uint64(longest))
    elif jnp.iinfo(dtype).max > longest:
        lengths = jnp.minimum(lengths, longest)
    return jnp.asarray(lengths.astype(np.int32))

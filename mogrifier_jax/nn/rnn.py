"""RNN, which runs one cell over sequences.

Axes: B batch, T time, D input features, H hidden. `RNN` replaces `nn.RNN` and uses the fast scan of
`windows.py`. `stack.py` makes the layers of a model of it.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import recurrent

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, dropout, from_flax, layers, recurrence, taps, windows

check = errors.check


class RNN(nn.RNN):
    """`nn.RNN` with a fast backward pass; arguments, parameters and results are the same.

    >>> rnn = RNN(layers.MogrifierLSTMCell(hidden_size=8, rounds=5, rank=3))
    >>> init = jax.jit(rnn.init_with_output)
    >>> ys, variables = init(jax.random.key(0), jnp.ones((2, 7, 4)))  # [batch, time, features]
    >>> ys.shape
    (2, 7, 8)

    `fast=False` runs a plain scan, which forward-mode derivatives need. `remat_window` saves
    memory: it keeps the carry only once in this many steps, and computes the rest again.
    `state_dropout` drops units of the h that the gates read, the same units at every step. It
    draws from the rng "dropout". Flax's own LSTM, GRU and simple cell are fast too, with their own
    parameters. Other cells run step by step.
    """

    fast: bool = True
    remat_window: int | None = None
    state_dropout: float = 0.0
    deterministic: bool | None = None

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Any = None,
        init_key: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
    ) -> Any:
        """Takes the arguments of `nn.RNN`; `deterministic` turns all masks off."""
        seq_lengths = check_sequences(self.cell, inputs, seq_lengths)
        if not isinstance(self.cell, layers.Cell):
            given = dict(
                initial_carry=initial_carry,
                init_key=init_key,
                seq_lengths=seq_lengths,
                return_carry=return_carry,
                time_major=time_major,
                reverse=reverse,
                keep_order=keep_order,
                deterministic=deterministic,
            )
            return from_flax.run(self, super().__call__, inputs, given)
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order

        check(inputs.ndim >= 2, f"inputs {inputs.shape} must be [..., time, features]")
        time_axis = 0 if time_major else inputs.ndim - 2
        xs = jnp.moveaxis(inputs, time_axis, 0)
        batch = xs.shape[1:-1]
        carry = initial_carry
        if carry is None:
            carry = self.cell.initialize_carry(init_key, (*batch, xs.shape[-1]))
        self.cell.check_carry(carry, (*batch, xs.shape[-1]))
        lengths = None if seq_lengths is None else jnp.asarray(seq_lengths)
        if lengths is not None:
            check(
                lengths.shape == batch,
                f"seq_lengths of shape {lengths.shape} and dtype {lengths.dtype} must be one "
                f"integer for each sequence, here {batch}",
            )
        train = self.draws(deterministic)
        mask = self.draw_state_mask(batch) if train else {}
        if len(batch) != 1:  # The recurrence needs one batch axis.
            rows = math.prod(batch)
            xs = xs.reshape(xs.shape[0], rows, xs.shape[-1])
            carry = jax.tree.map(lambda a: a.reshape(rows, a.shape[-1]), carry)
            mask = {name: m if m.ndim == 0 else m.reshape(rows, -1) for name, m in mask.items()}
            lengths = None if lengths is None else lengths.reshape(rows)
        flip = functools.partial(
            recurrent.flip_sequences, seq_lengths=lengths, num_batch_dims=1, time_major=True
        )
        last = None
        if return_carry and lengths is not None and len(xs):
            last = _marks_of_last(lengths, xs.shape[0])
        xs = flip(xs) if reverse else xs
        carry, ys = self.window(carry, xs, **mask, last=last, train=train)
        ys = flip(ys) if reverse and keep_order else ys
        ys = jnp.moveaxis(ys.reshape(ys.shape[0], *batch, ys.shape[-1]), 0, time_axis)
        if not return_carry:
            return ys
        return jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), carry), ys

    @nn.nowrap
    def draws(self, deterministic: bool | None) -> bool:
        """Whether masks are drawn; `deterministic` must be given only if there are any."""
        wanted = bool(self.state_dropout or getattr(self.cell, "masks", None))
        return wanted and not nn.merge_param("deterministic", self.deterministic, deterministic)

    def draw_state_mask(self, batch: tuple[int, ...]) -> dict[str, jax.Array]:
        """The mask and scale of state dropout, if there is any."""
        if self.state_dropout == 0:
            return {}
        shape = (*batch, self.cell.hidden_size)
        return dropout.state_mask(self.state_dropout, shape, self.make_rng("dropout"))

    def window(
        self,
        carry: cells.State,
        xs: jax.Array,
        keep: jax.Array | None = None,
        scale: jax.Array | None = None,
        valid: jax.Array | None = None,
        last: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[cells.State, jax.Array]:
        """From (carry, xs [T, B, D]) to (carry, hs [T, B, H]), with masks that the caller draws.

        `keep` is the mask of the state dropout: [B, H] for all steps, or [T, B, H] with a mask for
        each step. `valid` [T, B] is false after an example's end. There the output is zero and the
        state does not change. `last` [T, B] marks the step whose carry is returned. In training the
        masks of the cell are drawn here.
        """
        self.check_shapes(carry, xs, keep, scale, valid)
        xs = xs.astype(self.cell.dtype)
        given = {"keep": keep, "scale": scale, "valid": valid, "last": last}
        shape = (*xs.shape[:2], self.cell.hidden_size)
        for name, rate in self.cell.masks.items() if train else ():
            given[name] = jax.random.bernoulli(self.make_rng("dropout"), rate, shape)
        drawn = {name: mask for name, mask in given.items() if mask is not None}
        scanned = {n: m for n, m in drawn.items() if m.ndim == 3 or n in ("valid", "last")}
        constant = {name: mask for name, mask in drawn.items() if name not in scanned}
        state: Any = carry
        if last is not None and isinstance(carry, cells.LSTMCarry):
            state = _Marked(*carry, end=carry.c)
        run = self.run_fast if self.fast and len(xs) else self.run_plainly
        end, hs = run(state, xs, recurrence.Masks(scanned, constant))
        if valid is not None:
            hs = jnp.where(valid[..., None], hs, jnp.zeros_like(hs))
        if last is not None:
            h = jnp.where(last[..., None], hs, jnp.zeros_like(hs)).sum(0)
            end = cells.LSTMCarry(end.end, h) if isinstance(end, _Marked) else cells.Carry(h)
        return end, hs

    def run_fast(
        self, carry: cells.State, xs: jax.Array, masks: recurrence.Masks
    ) -> tuple[cells.State, jax.Array]:
        """Runs the scan of `windows.py`."""
        weights, input_map = cells.split_input_projection(self.cell.weights(xs.shape[-1]))
        try:
            return windows.scan(
                functools.partial(_step, self.cell.cell),
                weights,
                carry,
                xs,
                masks,
                dtype=self.cell.dtype,
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
        self, carry: cells.State, xs: jax.Array, masks: recurrence.Masks
    ) -> tuple[cells.State, jax.Array]:
        """Runs a plain scan, which is the reference for the fast one."""
        weights = self.cell.weights(xs.shape[-1])

        def body(carry: cells.State, inputs: Any) -> tuple[cells.State, jax.Array]:
            x, scanned = inputs
            params = taps.cast_matrices(weights, self.cell.dtype)
            carry = _step(self.cell.cell, params, carry, x, **scanned, **masks.constant)
            return carry, carry.h

        return jax.lax.scan(body, carry, (xs, masks.scanned), unroll=self.unroll)

    def gates(
        self, carry: cells.State, xs: jax.Array
    ) -> tuple[cells.State, jax.Array, cells.Gates]:
        """As `window` without masks; also returns every gate at every step, [T, B, ...]."""
        self.check_shapes(carry, xs)
        xs = xs.astype(self.cell.dtype)
        weights = taps.cast_matrices(self.cell.weights(xs.shape[-1]), self.cell.dtype)

        def body(carry: cells.State, x: jax.Array) -> tuple[cells.State, Any]:
            carry, gates = self.cell.cell(weights, carry, x)
            return carry, (carry.h, gates)

        carry, (hs, gates) = jax.lax.scan(body, carry, xs)
        return carry, hs, gates

    def check_shapes(
        self,
        carry: cells.State,
        xs: jax.Array,
        keep: jax.Array | None = None,
        scale: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> None:
        """Refuses arguments of a window that do not fit together."""
        for name, value in (("remat_window", self.remat_window), ("unroll", self.unroll)):
            whole = value is None or (isinstance(value, int) and value >= 1)
            check(whole, f"{name} {value!r} must be a whole number, at least 1")
        check(xs.ndim == 3, f"xs of shape {xs.shape} must be [time, batch, features]")
        self.cell.check_carry(carry, xs.shape[1:])
        check(
            (keep is None) == (scale is None),
            "keep and scale belong together: give 1 / (1 - rate) with the mask, or neither",
        )
        if keep is not None:
            mask = (*xs.shape[:2], self.cell.hidden_size)
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

    c: jax.Array
    h: jax.Array
    end: jax.Array


def _step(
    cell: Callable[..., Any],
    params: cells.Params,
    carry: cells.State,
    x: jax.Array,
    valid: jax.Array | None = None,
    last: jax.Array | None = None,
    **masks: jax.Array,
) -> Any:
    """One step of a function of `cells.py`; after an example's end the state does not change."""
    if isinstance(carry, _Marked):
        assert last is not None  # They come together.
        after, _ = cell(params, cells.LSTMCarry(carry.c, carry.h), x, **masks)
        return _Marked(after.c, after.h, jnp.where(last[:, None], after.c, carry.end))
    after, _ = cell(params, carry, x, **masks)
    if valid is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(valid[:, None], new, old), after, carry)


def _marks_of_last(lengths: jax.Array, steps: int) -> jax.Array:
    """Marks the last step of each sequence, [T, B]; as in Flax, step T for an empty sequence."""
    index = jnp.minimum(lengths, steps) - 1
    index = jnp.where(index < 0, index + steps, index)
    return jnp.arange(steps)[:, None] == index[None, :]


def check_sequences(cell: Any, inputs: Any, seq_lengths: Any) -> jax.Array | None:
    """Refuses what an RNN of linen or NNX cannot run; returns the lengths as int32."""
    check(
        hasattr(cell, "initialize_carry") and hasattr(inputs, "ndim"),
        f"RNN cannot run a {type(cell).__name__} over a {type(inputs).__name__}; give it a cell, "
        "and an array [..., time, features]",
    )
    check(not jnp.iscomplexobj(inputs), "inputs are complex; give real numbers")
    return None if seq_lengths is None else _read_lengths(seq_lengths)


def _read_lengths(seq_lengths: Any) -> jax.Array:
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
    check(jnp.issubdtype(dtype, jnp.integer), f"seq_lengths {seq_lengths!r} {message}")
    longest = 2**31 - 1  # A length beyond it is longer than any sequence, and stays so.
    if isinstance(lengths, np.ndarray):
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        check(
            not (signed and (lengths.astype(np.int64) < 0).any()),
            f"seq_lengths {seq_lengths!r} must not be negative; give 0 for an empty sequence",
        )
        lengths = np.minimum(lengths.astype(np.uint64), np.uint64(longest))
    elif jnp.iinfo(dtype).max > longest:
        lengths = jnp.minimum(lengths, longest)
    return jnp.asarray(lengths.astype(np.int32))

"""RNN, which runs one cell over sequences, and Stack, the recurrent layers of a model.

Axes: B batch, T time, D input features, E embedding, H hidden. `RNN` replaces `nn.RNN` and uses
the fast scan of `recurrence.py`. The dropout rates of a stack are numbers that may be traced. A
rate of None means that the operation is left out.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import recurrent

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, from_flax, layers, recurrence, taps

Dtype = Any
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
        layers.check_sequences(self.cell, inputs, seq_lengths)
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
        return state_mask(self.state_dropout, shape, self.make_rng("dropout"))

    def window(
        self,
        carry: Any,
        xs: jax.Array,
        keep: jax.Array | None = None,
        scale: jax.Array | None = None,
        valid: jax.Array | None = None,
        last: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[Any, jax.Array]:
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
        masks = {name: mask for name, mask in given.items() if mask is not None}
        scanned = {n: m for n, m in masks.items() if m.ndim == 3 or n in ("valid", "last")}
        constant = {name: mask for name, mask in masks.items() if name not in scanned}
        if last is not None and isinstance(carry, cells.LSTMCarry):
            carry = _Marked(*carry, end=carry.c)
        run = self.run_fast if self.fast and len(xs) else self.run_plainly
        carry, hs = run(carry, xs, scanned, constant)
        if valid is not None:
            hs = jnp.where(valid[..., None], hs, jnp.zeros_like(hs))
        if last is not None:
            h = jnp.where(last[..., None], hs, jnp.zeros_like(hs)).sum(0)
            carry = cells.LSTMCarry(carry.end, h) if isinstance(carry, _Marked) else cells.Carry(h)
        return carry, hs

    def run_fast(self, carry, xs, scanned, constant):
        """Runs the scan of `recurrence.py`."""
        weights, inputs = cells.hoist(self.cell.weights(xs.shape[-1]))
        options: Any = dict(inputs=inputs, remat_window=self.remat_window, unroll=self.unroll)
        step = functools.partial(_step, self.cell.cell)
        try:
            return recurrence.scan(
                step, weights, carry, xs, scanned, constant, dtype=self.cell.dtype, **options
            )
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            raise errors.UsageError(
                "forward-mode derivatives (jvp, jacfwd, linearize) do not pass through the fast "
                "recurrence; set fast=False, or use reverse mode (grad, vjp, jacrev)"
            ) from error

    def run_plainly(self, carry, xs, scanned, constant):
        """Runs a plain scan, which is the reference for the fast one."""
        weights = self.cell.weights(xs.shape[-1])

        def body(carry, inputs):
            x, extras = inputs
            params = taps.Taps(weights, self.cell.dtype).cast
            carry = _step(self.cell.cell, params, carry, x, **extras, **constant)
            return carry, carry.h

        return jax.lax.scan(body, carry, (xs, scanned), unroll=self.unroll)

    def gates(self, carry: Any, xs: jax.Array) -> tuple[Any, jax.Array, cells.Gates]:
        """As `window` without masks; also returns every gate at every step, [T, B, ...]."""
        self.check_shapes(carry, xs)
        xs = xs.astype(self.cell.dtype)
        weights = taps.Taps(self.cell.weights(xs.shape[-1]), self.cell.dtype).cast

        def body(carry, x):
            carry, gates = self.cell.cell(weights, carry, x)
            return carry, (carry.h, gates)

        carry, (hs, gates) = jax.lax.scan(body, carry, xs)
        return carry, hs, gates

    def check_shapes(self, carry, xs, keep=None, scale=None, valid=None) -> None:
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


def _step(cell, params, carry, x, valid=None, last=None, **mask):
    """One step of a function of `cells.py`; after an example's end the state does not change."""
    if isinstance(carry, _Marked):
        after, _ = cell(params, cells.LSTMCarry(carry.c, carry.h), x, **mask)
        return _Marked(*after, end=jnp.where(last[:, None], after.c, carry.end))
    after, _ = cell(params, carry, x, **mask)
    if valid is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(valid[:, None], new, old), after, carry)


def _marks_of_last(lengths: jax.Array, steps: int) -> jax.Array:
    """Marks the last step of each sequence, [T, B]; as in Flax, step T for an empty sequence."""
    index = jnp.minimum(lengths, steps) - 1
    index = jnp.where(index < 0, index + steps, index)
    return jnp.arange(steps)[:, None] == index[None, :]


class Dropout(NamedTuple):
    """The probabilities of dropping an element; None means no dropout."""

    input: Any = None  # Of the embedded tokens.
    inter_layer: Any = None  # Of the input of each layer after the first.
    state: Any = None  # Of the previous h that the gates read.
    output: Any = None  # Of the output of the stack.
    downprojected: Any = None  # Of the softmax's projection of that output.
    cell_output: Any = None  # Of the output of each layer, before layers are added up.


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
    """The factor 1 / (1 - rate) for the elements that are kept."""
    return (1 / (1 - jnp.asarray(rate, jnp.float32))).astype(dtype)


def state_mask(rate: Any, shape: tuple[int, ...], key: jax.Array) -> dict[str, jax.Array]:
    """The mask and the scale of state dropout, as `RNN.window` takes them."""
    return {"keep": keep_mask(rate, shape, key), "scale": keep_scale(rate, jnp.float32)}


def zero_carry(module: Any, batch_size: int) -> tuple[Any, ...]:
    """A zero carry for each layer of a stack or model."""
    make = layers.find_cell(module.cell)
    cell = make(module.hidden_size, dtype=module.dtype, parent=None)
    return (cell.initialize_carry(None, (batch_size, module.hidden_size)),) * module.num_layers


class Stack(nn.Module):
    """Runs layers of the same cell over a window; `output` says how they are combined."""

    num_layers: int
    hidden_size: int
    cell: str = "mogrifier_lstm"
    cell_options: Any = ()  # A mapping: the options of the cell.
    output: str = "sum"  # "sum" of all layers, "residual" connections or the "last" layer.
    state_mask: str = "window"  # One mask of the state dropout for the "window" or each "step".
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
            RNN(
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
        """The carry that a sequence starts from: zeros, or the trained initial state."""
        zeros = zero_carry(self, batch_size)
        if not self.trainable_initial_state:
            return zeros
        return jax.tree.map(lambda v, z: cells.stretch(v, z), self.initial_state, zeros)

    def __call__(
        self,
        carry: tuple[Any, ...] | None,
        xs: jax.Array,
        valid: jax.Array | None = None,
        rates: Dropout = NO_DROPOUT,
    ) -> tuple[tuple[Any, ...], jax.Array]:
        """From (carry, xs [T, B, E]) to (carry, outputs [T, B, H])."""

        def run(layer, carry, xs):
            mask = {}
            if rates.state is not None:
                steps = xs.shape[:1] if self.state_mask == "step" else ()
                shape = (*steps, xs.shape[1], self.hidden_size)
                mask = state_mask(rates.state, shape, self.make_rng("dropout"))
            return layer.window(carry, xs, **mask, valid=valid, train=self.has_rng("dropout"))

        carry, total, _ = self.run_layers(run, carry, xs, rates)
        return carry, total

    def gates(self, carry: tuple[Any, ...] | None, xs: jax.Array) -> tuple[Any, list[cells.Gates]]:
        """Returns the carry, and every gate of every layer, [T, B, ...]."""
        carry, _, found = self.run_layers(RNN.gates, carry, xs)
        return carry, [gates for (gates,) in found]

    def run_layers(self, run, carry, xs, rates=NO_DROPOUT):
        """Calls `run(layer, carry, xs)` for each layer, with dropout of what it reads and returns.

        Returns the carry, the output of the stack, and what `run` returns beside carry and hs.
        Without a carry it starts from the initial one.
        """
        carry = self.initial_carry(xs.shape[1]) if carry is None else carry
        check(
            isinstance(carry, tuple | list) and len(carry) == self.num_layers,
            f"carry {jax.tree.structure(carry)} must be a tuple of {self.num_layers}, one for "
            "each layer; make one with zero_carry(batch_size)",
        )
        carries, others, total = [], [], None
        for index, layer in enumerate(self.layers):
            if index and rates.inter_layer is not None:
                xs = dropout(rates.inter_layer, xs, self.make_rng("dropout"))
            last, hs, *other = run(layer, carry[index], xs)
            if rates.cell_output is not None:
                hs = dropout(rates.cell_output, hs, self.make_rng("dropout"))
            carries.append(last)
            others.append(other)
            xs = total + hs if self.output == "residual" and index else hs
            total = total + xs if self.output == "sum" and index else xs
        return tuple(carries), total, others

"""Runs a cell over a window for `RNN`: plans it, splits it into chunks, calls the recurrence.

Axes: T time, B batch, D input features, H hidden features. `recurrence.py` has the algorithm,
`plans.py` the plans.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mogrifier_jax.nn import cells, plans, recurrence, taps


def scan(
    step: recurrence.Step,
    params: cells.Params,
    carry: recurrence.State,
    xs: Float[Array, "T B D"],
    masks: recurrence.Masks,
    resets: recurrence.Resets | None = None,
    *,
    dtype: DTypeLike,
    input_map: cells.Params | None = None,
    remat_window: int | None = None,
    unroll: int = 1,
) -> tuple[recurrence.State, Float[Array, "T B H"]]:
    """Runs `step` over the leading axis of xs and scanned masks; returns (carry, hs).

    Args:
      params: a tree in the storage dtype. Leaves with two or more axes are matrices; the step uses
        them only in `cells.project` and `cells.affine`. A `bias` belongs to the matrix beside it.
      dtype: the dtype of the matmuls.
      input_map: {"input", "bias"}, a map to apply to x before the step, or None.
      remat_window: store the carry only once in this many steps, and recompute what lies between.
      unroll: how many steps of a loop are compiled one after the other.

    In a program with a symbolic time axis, which `jax.export` may make, `remat_window` and `unroll`
    have no effect, because nothing can be said about how they divide the time.
    """
    if not isinstance(xs.shape[0], int):
        remat_window, unroll = None, 1
    steps = xs.shape[0]
    run = functools.partial(_run_window, step, jnp.dtype(dtype), unroll)
    if remat_window is None or remat_window >= steps:
        return run(params, input_map, carry, xs, masks, resets)

    @jax.checkpoint
    def run_chunk(
        carry: recurrence.State, chunk: tuple[Float[Array, "T B D"], recurrence.Arrays, Any]
    ) -> tuple[recurrence.State, Float[Array, "T B H"]]:
        xs, scanned, marks = chunk
        of_chunk = resets and resets._replace(marks=marks)
        return run(params, input_map, carry, xs, masks._replace(scanned=scanned), of_chunk)

    sequences = (xs, masks.scanned, resets and resets.marks)
    whole = steps - steps % remat_window
    chunks = jax.tree.map(
        lambda a: a[:whole].reshape(whole // remat_window, remat_window, *a.shape[1:]),
        sequences,
    )
    carry, hs = jax.lax.scan(run_chunk, carry, chunks)
    hs = hs.reshape(whole, *hs.shape[2:])
    if whole < steps:
        rest = jax.tree.map(lambda a: a[whole:], sequences)
        carry, rest_of_hs = run_chunk(carry, rest)
        hs = jnp.concatenate([hs, rest_of_hs])
    return carry, hs


def _run_window(
    step: recurrence.Step, dtype: np.dtype, unroll: int, *operands: Any
) -> tuple[recurrence.State, Float[Array, "T B H"]]:
    """Runs a window by its plan; operands are (params, input_map, carry, xs, masks, resets)."""
    params, input_map, carry, xs, _, resets = operands
    maps = taps.Taps(params, dtype)
    sizes = plans.Sizes(
        dtype=dtype,
        steps=xs.shape[0],
        rows=xs.shape[1],
        large_outputs=sum(
            math.prod(matrices[0].shape[1:])
            for name, matrices in maps.maps.items()
            if not maps.is_thin(name)
        ),
        num_maps=len(maps.maps),
        maps_read_inputs=maps.read_inputs,
        projects_inputs=input_map is not None,
        carry_parts_alike=len(carry) > 1 and len({(a.shape, a.dtype) for a in carry}) == 1,
        resets=resets is not None,
        one_device=plans.on_one_device(operands),
    )

    def run(plan: plans.Plan, *operands: Any) -> tuple[recurrence.State, Float[Array, "T B H"]]:
        setting = recurrence.Setting(step, dtype, unroll, plan)
        if plan.rows_from_one > 1:
            return _run_with_padded_rows(setting, *operands)
        return recurrence.scan(setting, *operands)

    return plans.follow(lambda platform: plans.make_plan(platform, sizes), run, *operands)


def _run_with_padded_rows(
    setting: recurrence.Setting,
    params: cells.Params,
    input_map: cells.Params | None,
    carry: recurrence.State,
    xs: Float[Array, "T B D"],
    masks: recurrence.Masks,
    resets: recurrence.Resets | None,
) -> tuple[recurrence.State, Float[Array, "T B H"]]:
    """Runs a window whose rows are each followed by rows of zeros, and drops their results."""
    factor = setting.plan.rows_from_one

    def pad(a: Array, axis: int) -> Array:
        if a.ndim <= axis:  # One number for all rows.
            return a
        # New rows go beside each row, so that each row stays on its device.
        widths = [(0, 0)] * (a.ndim + 1)
        widths[axis + 1] = (0, factor - 1)
        a = jnp.pad(jnp.expand_dims(a, axis + 1), widths)
        return a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])

    pad_rows, pad_rows_of_steps = (functools.partial(pad, axis=axis) for axis in (0, 1))
    padded_masks = recurrence.Masks(
        scanned=jax.tree.map(pad_rows_of_steps, masks.scanned),
        constant=jax.tree.map(pad_rows, masks.constant),
    )
    padded_resets = resets and recurrence.Resets(
        marks=pad_rows_of_steps(resets.marks),
        start=jax.tree.map(pad_rows, resets.start),
    )
    carry, hs = recurrence.scan(
        setting,
        params,
        input_map,
        jax.tree.map(pad_rows, carry),
        pad_rows_of_steps(xs),
        padded_masks,
        padded_resets,
    )
    return jax.tree.map(lambda a: a[::factor], carry), hs[:, ::factor]

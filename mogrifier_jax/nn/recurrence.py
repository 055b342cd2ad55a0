"""The fast recurrence: a scan that stores states and matmul outputs for its backward pass.

Axes: T time, B batch, D input features, H hidden features.

A step computes s_t = f(s_{t-1}, z_t), where z_t is the input x_t or its projection. It multiplies
by matrices W in linear maps y = u W. The gradient of a plain `lax.scan` adds u_t^T dy_t to an array
of the size of W at every step. Here the backward loop returns only dy_t, and one matmul over
[T * B] after it gives

    dW = sum_t u_t^T dy_t.

Forward, the loop stores s_{t-1} and the outputs y_t of all maps with one matrix. Backward, taps
(`taps.py`) return these outputs where the cell would multiply, so no large matmul runs twice, and
the derivative of the step with respect to them is dy_t. The outputs of maps with two thin factors
are computed again, which is cheap, because storing them at every step is not.

This works for any step that multiplies by its matrices in `cells.project` and `cells.affine` only.
`windows.py` calls it. What a platform wants done differently is in the plan of a window
(`plans.py`); the default plan is the algorithm as it is described here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from mogrifier_jax.nn import cells, loops, plans, taps

# The carry: a named tuple of arrays, of which h is the output.
State: TypeAlias = PyTree[Float[Array, "B H"]]
# step(params, carry, x, **masks) -> carry
Step = Callable[..., State]
Arrays = dict[str, Array]


class Masks(NamedTuple):
    """Keyword arguments of the step, such as dropout masks, which get no gradient."""

    scanned: Arrays  # [T, ...], one for each step.
    constant: Arrays  # The same for all steps.


class Resets(NamedTuple):
    """Steps that read a given state instead of the state before; no gradient passes through."""

    marks: Bool[Array, "T B"]
    start: cells.State

    def restart(self, state: Any, marks: Bool[Array, "B"]) -> Any:
        """The state that a step with these marks reads."""
        return _replace_rows(state, marks, self.start)

    def cut(self, d_state: Any, marks: Bool[Array, "B"]) -> Any:
        """The gradient of the state before a step, given that of the state that the step reads."""
        return _replace_rows(d_state, marks, jax.tree.map(jnp.zeros_like, self.start))


def _replace_rows(state: Any, marks: Bool[Array, "B"], new: cells.State) -> Any:
    """Replaces the marked rows of the parts of a state that the new one has."""
    parts = {
        name: jnp.where(marks[:, None], part, getattr(state, name))
        for name, part in new._asdict().items()
    }
    return state._replace(**parts)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is static in a window."""

    step: Step
    dtype: np.dtype  # Of the matmuls.
    unroll: int
    plan: plans.Plan


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(
    setting: Setting,
    params: cells.Params,
    input_map: cells.Params | None,
    carry: State,
    xs: Float[Array, "T B D"],
    masks: Masks,
    resets: Resets | None = None,
) -> tuple[State, Float[Array, "T B H"]]:
    """Runs the step over the leading axis of xs; returns (carry, hs).

    If no gradient is asked for, this is a plain scan. `input_map` projects x, if it is not None.
    """
    weights = taps.cast_matrices(params, setting.dtype)
    project_all, project_one = _projections(setting, input_map)

    def body(carry: State, inputs: Any) -> tuple[State, Float[Array, "B H"]]:
        x, scanned, marks = inputs
        carry = carry if resets is None else resets.restart(carry, marks)
        carry = setting.step(weights, carry, project_one(x), **scanned, **masks.constant)
        return carry, carry.h

    inputs = (project_all(xs), masks.scanned, resets and resets.marks)
    return jax.lax.scan(body, carry, inputs, unroll=setting.unroll)


class _StepInputs(NamedTuple):
    """What a step reads; in `_Saved`, what all steps read, with T as the first axis."""

    carry: State
    z: Float[Array, "..."]
    scanned: Arrays


class _Saved(NamedTuple):
    """What the forward pass keeps for the backward pass."""

    params: cells.Params
    input_map: cells.Params | None
    xs: Float[Array, "T B D"]
    step_inputs: _StepInputs
    constant: Arrays
    resets: Resets | None
    outputs: Arrays  # y_t of the maps with one matrix, by name. See `compute` for addends.


def _forward(
    setting: Setting,
    params: cells.Params,
    input_map: cells.Params | None,
    carry: State,
    xs: Float[Array, "T B D"],
    masks: Masks,
    resets: Resets | None = None,
) -> tuple[tuple[State, Float[Array, "T B H"]], _Saved]:
    plan = setting.plan
    maps = taps.Taps(params, setting.dtype, plan.operands_forward)
    step = _TappedStep(setting, maps, masks.constant)
    project_all, project_one = _projections(setting, input_map)
    zs, matrices = project_all(xs), maps.maps
    if plan.factor_product_bytes:
        matrices = maps.multiply_factors(plan.factor_product_bytes, plan.product_alignment)
    elif plan.output_alignment > 1:
        matrices = maps.pad_outputs(plan.output_alignment)
    if plan.inner_alignment > 1:
        matrices = maps.pad_inner(matrices, plan.inner_alignment)

    def body(carry: State, inputs: Any) -> tuple[State, Any]:
        x, scanned, marks = inputs
        carry = carry if resets is None else resets.restart(carry, marks)
        z, outputs = project_one(x), {}

        def compute(name: str, u: Array, addend: Array | None) -> Array:
            y = maps.apply(name, u, matrices)
            total = y if addend is None else y + addend
            if not maps.is_thin(name):
                outputs[name] = total if plan.project_inputs_in_step else y
            return total

        after = step.run(compute, _StepInputs(carry, z, scanned))
        stored = jnp.stack(carry) if plan.stack_carries else carry
        projected = z if plan.project_inputs_in_step else None
        return after, (stored, outputs, projected, None if resets is None else after.h)

    loop = loops.make(pack=plan.pack_results)
    inputs = (zs, masks.scanned, resets and resets.marks)
    last, (carries, outputs, projected, hs) = loop(body, carry, inputs, unroll=setting.unroll)
    if plan.project_inputs_in_step:
        zs = projected
    if plan.stack_carries:
        carries = type(last)(*(carries[:, i] for i in range(len(last))))
    if resets is None:
        hs = jnp.concatenate([carries.h[1:], last.h[None]])
    step_inputs = _StepInputs(carries, zs, masks.scanned)
    return (last, hs), _Saved(params, input_map, xs, step_inputs, masks.constant, resets, outputs)


def _backward(
    setting: Setting, saved: _Saved, cotangents: tuple[State, Float[Array, "T B H"]]
) -> tuple[cells.Params, cells.Params | None, State, Float[Array, "T B D"], None, None]:
    plan = setting.plan
    d_last, d_hs = cotangents
    maps = taps.Taps(saved.params, setting.dtype, plan.operands_backward)
    step = _TappedStep(setting, maps, saved.constant)
    # u_t and y_t of all maps and steps at once.
    us, ys = jax.vmap(step.inputs_and_outputs)(saved.step_inputs, saved.outputs)
    transposed = transposed_in_loop = maps.transpose()
    if plan.factor_product_bytes:
        transposed_in_loop = maps.multiply_factors(
            plan.factor_product_bytes, plan.product_alignment, transposed=True
        )
    if plan.inner_alignment > 1:
        transposed_in_loop = maps.pad_inner(
            transposed_in_loop, plan.inner_alignment, transposed=True
        )
    written_once: list[str] = []

    def body(state: Any, inputs: Any) -> tuple[Any, Any]:
        d_carry, d_vectors = state
        (d_h, carry, scanned, marks), outputs = inputs
        outputs = dict(outputs)
        step_inputs = _StepInputs(carry, outputs.pop("z"), scanned)
        if plan.stack_carries:
            step_inputs = step_inputs._replace(carry=type(d_carry)(*step_inputs.carry))
        if plan.recompute_thin_outputs:
            _, outputs = step.inputs_and_outputs(step_inputs, outputs)
        d_carry = d_carry._replace(h=d_carry.h + d_h)
        d_carry, d_z, d_outputs, d_vectors_now = step.pull_back(
            d_carry, step_inputs, outputs, transposed_in_loop
        )
        if saved.resets is not None:
            d_carry = saved.resets.cut(d_carry, marks)
        if plan.project_inputs_in_step:
            # If z is the addend of an output, both have the same gradient. It is written once.
            written_once[:] = [name for name in d_outputs if d_outputs[name] is d_z]
        d_vectors = jax.tree.map(jnp.add, d_vectors, d_vectors_now)
        d_outputs = d_outputs if written_once else {"z": d_z, **d_outputs}
        return (d_carry, d_vectors), (None, d_outputs)

    loop = loops.make(
        pack=plan.pack_results,
        chunk=plan.backward_chunk,
        overwrite=plan.overwrite_outputs,
    )
    step_inputs: Any = saved.step_inputs
    if plan.stack_carries:
        step_inputs = step_inputs._replace(carry=jnp.stack(step_inputs.carry, 1))
    outputs = saved.outputs if plan.recompute_thin_outputs else ys
    state = (d_last, jax.tree.map(jnp.zeros_like, maps.vectors_of_rows(d_hs.shape[1])))
    carries, zs, scanned = step_inputs
    inputs = ((d_hs, carries, scanned, saved.resets and saved.resets.marks), {"z": zs, **outputs})
    (d_carry, d_vectors), (_, d_ys) = loop(body, state, inputs, reverse=True, unroll=setting.unroll)
    d_zs = d_ys[written_once[0]] if written_once else d_ys.pop("z")
    d_vectors = {name: cells.widen(v).sum(0) for name, v in d_vectors.items()}
    d_params = maps.gradients(us, d_ys, d_vectors, transposed, plan)
    d_input_map, d_xs = _input_gradients(setting, saved, d_zs)
    return d_params, d_input_map, d_carry, d_xs, None, None


scan.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _TappedStep:
    """The step of a window, with taps in place of its linear maps."""

    setting: Setting
    maps: taps.Taps
    constant: Arrays

    def run(
        self, output_of: taps.OutputOf, inputs: _StepInputs, vectors: Arrays | None = None
    ) -> State:
        """The carry after a step whose maps have the outputs that `output_of` returns."""
        params = self.maps.put(output_of, vectors)
        return self.setting.step(params, inputs.carry, inputs.z, **inputs.scanned, **self.constant)

    def inputs_and_outputs(
        self, step_inputs: _StepInputs, outputs: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The u and y of all maps of a step; y is computed where it is not saved in `outputs`."""
        inputs, outputs = {}, dict(outputs)
        includes_addend = self.setting.plan.project_inputs_in_step

        def read_or_compute(name: str, u: Array, addend: Array | None) -> Array:
            inputs[name] = u.astype(self.maps.operand_dtype)
            if name not in outputs:
                y = self.maps.apply(name, u, self.maps.maps)
                outputs[name] = y if addend is None or not includes_addend else y + addend
            # Later maps of the step may read what this sum becomes.
            return outputs[name] if addend is None or includes_addend else outputs[name] + addend

        self.run(read_or_compute, step_inputs)
        return inputs, outputs

    def pull_back(
        self,
        d_carry: State,
        step_inputs: _StepInputs,
        outputs: Arrays,
        transposed: dict[str, taps.Matrices],
    ) -> tuple[State, Float[Array, "..."], Arrays, Arrays]:
        """From the gradient of the carry after a step to those of carry, z, outputs and vectors.

        The vectors are given once for each row, so that no step sums gradients over rows and
        devices.
        """
        includes_addend = self.setting.plan.project_inputs_in_step

        def replay(carry: State, z: Float[Array, "..."], outputs: Arrays, vectors: Arrays) -> State:
            def read_saved(name: str, u: Array, addend: Array | None) -> Array:
                y = taps.saved_output(u, outputs[name], transposed[name])
                if addend is None:
                    return y
                return taps.saved_sum(y, addend) if includes_addend else y + addend

            return self.run(read_saved, _StepInputs(carry, z, step_inputs.scanned), vectors)

        vectors = self.maps.vectors_of_rows(d_carry.h.shape[0])
        _, pull = jax.vjp(replay, step_inputs.carry, step_inputs.z, outputs, vectors)
        d_carry, d_z, d_outputs, d_vectors = pull(d_carry)
        d_outputs = {name: d.astype(self.maps.operand_dtype) for name, d in d_outputs.items()}
        return d_carry, d_z, d_outputs, d_vectors


def _projections(
    setting: Setting, input_map: cells.Params | None
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Returns a function of all xs before the loop, and a function of x in each step.

    One of them applies the input map, and the other one returns its argument.
    """

    def identity(x: Array) -> Array:
        return x

    if input_map is None:
        return identity, identity
    kernel, bias = input_map["input"].astype(setting.dtype), input_map.get("bias")

    def project(x: Float[Array, "*B D"]) -> Float[Array, "..."]:
        return cells.project(x, kernel, bias).astype(setting.dtype)

    return (identity, project) if setting.plan.project_inputs_in_step else (project, identity)


def _input_gradients(
    setting: Setting, saved: _Saved, d_zs: Float[Array, "T B *Z"]
) -> tuple[cells.Params | None, Float[Array, "T B D"]]:
    """The gradients of the input map and of xs, from those of zs."""
    if saved.input_map is None:
        return None, d_zs
    matrix = saved.input_map["input"]
    d_matrix = taps.sum_of_products(saved.xs, d_zs, setting.plan.flatten_rows)
    d_input_map = {"input": d_matrix.astype(matrix.dtype)}
    if "bias" in saved.input_map:
        d_bias = taps.sum_leading(d_zs, 2)
        d_input_map["bias"] = d_bias.astype(saved.input_map["bias"].dtype)
    transposed = taps.transpose(matrix.astype(setting.dtype))
    return d_input_map, jnp.tensordot(d_zs, transposed, axes=matrix.ndim - 1)

"""The scan over a window, with a fast backward pass.

Axes: T time, B batch, H hidden features.

The gradient of a plain `lax.scan` adds an array of the size of the weights at every step. Here
the backward scan returns only the gradient at the output of each linear map. After the scan, one
matmul over [T * B] gives each weight gradient. This works for any step that multiplies by its
matrices in `cells.project` and `cells.affine`. There a tap (`taps.py`) can replace a linear map.
In the backward pass the tap returns the output that the map had in the forward pass.

The forward pass keeps the carry before each step and the outputs of the large maps. So no large
matmul runs twice. The outputs of maps with two thin factors are computed again, for all time steps
at once. That is cheap, and to store them at every step is not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mogrifier_jax.nn import cells, taps

# TPUs round float32 operands of a matmul to bfloat16. So the operands are stored in bfloat16.
TPU_OPERAND = jnp.dtype("bfloat16")
# The backward pass of float32 on TPUs depends on how many bytes of outputs a device stores. Between
# these two numbers it runs in chunks of at most TPU_CHUNK time steps. A chunk fits into the fast
# memory of the chip. Without chunks XLA keeps some arrays of the whole window there, and leaves no
# room for the arrays of a single step. Of larger windows it keeps only the parts of the carry
# there. So these are stored as one array, which is too large for that memory.
TPU_CHUNKED = (2**26, 2**27)
TPU_CHUNK = 16
# TPUs do not use their matrix units for a single row. These take as long for eight rows as for one.
TPU_ROWS = 8

# step(params, carry, x, **extras) -> carry; its h is the output.
Step = Callable[..., Any]


def scan(
    step: Step,
    params: Any,
    carry: Any,
    xs: jax.Array,
    scanned: dict[str, jax.Array],
    constant: dict[str, jax.Array],
    *,
    dtype: jnp.dtype,
    inputs: cells.Params | None = None,
    remat_window: int | None = None,
    unroll: int = 1,
) -> tuple[Any, jax.Array]:
    """Runs `step` over the leading axis of xs and `scanned`; returns (carry, hs [T, B, H]).

    Args:
      params: a tree in the storage dtype. Leaves with two or more axes are matrices; the step uses
        them only in `cells.project` and `cells.affine`. A `bias` belongs to the matrix beside it.
      scanned, constant: keywords of the step, such as masks. They get no gradient.
      dtype: the dtype of the matmuls.
      inputs: {"input", "bias"}, a map to apply to x before the step, or None.
      remat_window: keep the carry only once in this many steps, and compute the rest again.
    """
    run = functools.partial(_scan, step, jnp.dtype(dtype), unroll)
    if (factor := _padding(xs.shape[1])) > 1:
        run = functools.partial(_pad_on_tpus, run, factor)
    steps = xs.shape[0]
    if remat_window is None or remat_window >= steps:
        return run((params, inputs), carry, xs, scanned, constant)

    chunk = jax.checkpoint(lambda carry, part: run((params, inputs), carry, *part, constant))
    whole = steps - steps % remat_window
    parts = jax.tree.map(
        lambda a: a[:whole].reshape(whole // remat_window, remat_window, *a.shape[1:]),
        (xs, scanned),
    )
    carry, hs = jax.lax.scan(chunk, carry, parts)
    hs = hs.reshape(whole, *hs.shape[2:])
    if whole < steps:
        carry, rest = chunk(carry, jax.tree.map(lambda a: a[whole:], (xs, scanned)))
        hs = jnp.concatenate([hs, rest])
    return carry, hs


def _padding(batch):
    """How many rows to make of one: more than one if each device of the mesh has a single row."""
    return TPU_ROWS if batch == taps.shards() else 1


def _pad_on_tpus(run, factor, params, *arguments):
    def padded(params, carry, xs, scanned, constant):
        def pad(a, axis):
            if a.ndim <= axis:  # One number for all rows.
                return a
            # New rows go beside each row, so that each row stays on its device.
            widths = [(0, 0)] * (a.ndim + 1)
            widths[axis + 1] = (0, factor - 1)
            a = jnp.pad(jnp.expand_dims(a, axis + 1), widths)
            return a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])

        rows, times = (functools.partial(pad, axis=axis) for axis in (0, 1))
        carry, constant = jax.tree.map(rows, (carry, constant))
        carry, hs = run(params, carry, *jax.tree.map(times, (xs, scanned)), constant)
        return jax.tree.map(lambda a: a[::factor], carry), hs[:, ::factor]

    return jax.lax.platform_dependent(params, *arguments, tpu=padded, default=run)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(step, dtype, unroll, params, *arguments):
    run = functools.partial(_run, step, dtype, unroll)
    ways = {} if params[1] is None else {"cpu": functools.partial(run, stepwise=True)}
    return jax.lax.platform_dependent(params, *arguments, **ways, default=run)


def _run(step, dtype, unroll, params, carry, xs, scanned, constant, stepwise=False):
    params, inputs = params
    params = taps.Taps(params, dtype).cast
    before, within = _projections(inputs, dtype, stepwise)

    def body(carry, inputs):
        x, extras = inputs
        carry = step(params, carry, within(x), **extras, **constant)
        return carry, carry.h

    return jax.lax.scan(body, carry, (before(xs), scanned), unroll=unroll)


def _projections(inputs, dtype, stepwise):
    """Returns two functions of x: one to apply before the loop, and one to apply in each step.

    One of them projects x. One matmul over all time steps is fast, but on CPUs it takes longer to
    write and read its result than it saves (docs/performance.md). So there it is `stepwise`.
    """

    def nothing(x):
        return x

    def project(x):
        return cells.project(x, inputs["input"].astype(dtype), inputs.get("bias")).astype(dtype)

    if inputs is None:
        return nothing, nothing
    return (nothing, project) if stepwise else (project, nothing)


def _forward(step, dtype, unroll, params, *arguments):
    push = functools.partial(_push, step, dtype, unroll)
    ways = {} if params[1] is None else {"cpu": functools.partial(push, stepwise=True)}
    reads_inputs = taps.Taps(params[0], dtype).read_inputs

    def push_on_tpus(*arguments):
        _, like = jax.eval_shape(push, *arguments)
        return push(
            *arguments,
            operand=TPU_OPERAND,
            loop=taps.scan_into_empty,
            again=reads_inputs and _stored(like) > TPU_CHUNKED[0],
            stacked=reads_inputs and _stacked_on_tpus(like),
        )

    if rounded_on_tpus(dtype):
        ways["tpu"] = push_on_tpus
    if reads_inputs:
        ways["cuda"] = functools.partial(push, joined=True)
    found, saved = jax.lax.platform_dependent(params, *arguments, **ways, default=push)
    return found, (params[1], arguments[1], saved)


def _push(
    step,
    dtype,
    unroll,
    params,
    carry,
    xs,
    scanned,
    constant,
    operand=None,
    loop=jax.lax.scan,
    again=False,
    joined=False,
    stacked=False,
    stepwise=False,
):
    """The forward pass, with what the backward pass needs. `_pull` explains the options."""
    params, inputs = params
    made = taps.Taps(params, operand or dtype, dtype, cast_late=again)
    before, within = _projections(inputs, dtype, stepwise)
    xs = before(xs)
    maps = jax.lax.optimization_barrier(made.products()) if joined else made.maps

    def body(carry, inputs):
        x, extras = inputs
        x, outputs = within(x), {}

        def compute(name, x, addend):
            y = made.apply(name, x, maps)
            total = y if addend is None else y + addend
            if not made.is_thin(name):
                outputs[name] = total if stepwise else y
            return total

        after = step(made.replace(compute), carry, x, **extras, **constant)
        kept = jnp.stack(carry) if stacked else carry
        return after, (kept, outputs, x if stepwise else None)

    def body_with_one_write(carry, inputs):
        after, kept = body(carry, inputs)
        return after, taps.join(kept)

    loop = functools.partial(loop, init=carry, xs=(xs, scanned), unroll=unroll)
    _, like = jax.eval_shape(lambda: loop(body)) if joined else (None, ())
    if len({leaf.dtype for leaf in jax.tree.leaves(like)}) == 1:
        last, kept = loop(body_with_one_write)
        carries, outputs, zs = taps.part(kept, like)
    else:
        last, (carries, outputs, zs) = loop(body)
    xs = zs if stepwise else xs
    if stacked:
        carries = type(last)(*(carries[:, i] for i in range(len(last))))
    hs = jnp.concatenate([carries.h[1:], last.h[None]])
    return (last, hs), (params, xs, scanned, constant, carries, outputs)


def _backward(step, dtype, unroll, saved, cotangents):
    inputs, xs, saved = saved
    pull = functools.partial(_pull, step, dtype, unroll)
    # Here `_forward` ran `stepwise`, so the stored outputs include x.
    ways = {} if inputs is None else {"cpu": functools.partial(pull, summed=True)}
    ways |= _pulls_of_chips(pull, dtype, saved)
    found = jax.lax.platform_dependent(saved, cotangents, **ways, default=pull)
    d_params, d_carry, d_xs = found
    d_inputs = None
    if inputs is not None:
        matrix = inputs["input"]
        d_inputs = {"input": taps.sum_of_products(xs, d_xs).astype(matrix.dtype)}
        if "bias" in inputs:
            d_inputs["bias"] = cells.sum_leading(d_xs, 2).astype(inputs["bias"].dtype)
        d_xs = jnp.tensordot(d_xs, taps.transpose(matrix.astype(dtype)), axes=matrix.ndim - 1)
    return (d_params, d_inputs), d_carry, d_xs, None, None


def _pulls_of_chips(pull, dtype, saved):
    """The backward passes of the accelerators that need another one than the default."""
    ways = {}
    # They are not faster if `cells.hoist` has left a single map of h in the step.
    made = taps.Taps(saved[0], dtype)
    if made.read_inputs:
        ways["cuda"] = functools.partial(pull, joined=True)
    if rounded_on_tpus(dtype) and made.read_inputs:
        stored = _stored(saved)
        least, most = TPU_CHUNKED
        ways["tpu"] = functools.partial(
            pull,
            operand=TPU_OPERAND,
            loop=taps.scan_into_empty if stored <= least else jax.lax.scan,
            chunk=TPU_CHUNK if least < stored <= most else None,
            again=stored > least,
            stacked=_stacked_on_tpus(saved),
        )
    elif rounded_on_tpus(dtype) and len(made.maps) > 1:
        ways["tpu"] = functools.partial(pull, operand=TPU_OPERAND, loop=taps.scan_into_empty)
    return ways


def _stored(saved):
    """Bytes of maps' outputs that a device stores."""
    return (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved[-1])) // taps.shards()
    )


def _stacked_on_tpus(saved):
    """Whether the parts of a carry are stored as one array there."""
    carries = saved[-2]
    alike = len({(leaf.shape, leaf.dtype) for leaf in carries}) == 1
    return alike and len(carries) > 1 and _stored(saved) > TPU_CHUNKED[1]


def rounded_on_tpus(dtype):
    """Whether a TPU rounds the operands of a matmul: float32 at JAX's default precision."""
    asked = jax.config.jax_default_matmul_precision
    return dtype == jnp.float32 and asked in (None, "default", "fastest", "bfloat16")


def _pull(
    step,
    dtype,
    unroll,
    saved,
    cotangents,
    operand=None,
    loop=jax.lax.scan,
    chunk=None,
    again=False,
    joined=False,
    stacked=False,
    summed=False,
):
    """The backward pass.

    Args:
      operand: the dtype in which operands of matmuls are stored; `dtype` if None.
      loop: `lax.scan`, or a function with the same arguments and results.
      chunk: run the loop in chunks of at most this many time steps.
      again: the window is large. Each step computes its outputs of thin maps again, which are
        otherwise computed for all steps before the loop, and operands are cast late.
      joined: a step writes its gradients as one array, and multiplies by the product of thin
        factors. On GPUs each write and each matmul is at least one kernel, which takes longer to
        start than to run.
      stacked: the parts of the carry are stored as one array. TPU_CHUNKED says why.
      summed: the stored outputs include the addend, which is x. It is set where each step
        projects x. For float32 on TPUs it would be slower.
    """
    params, xs, scanned, constant, carries, outputs = saved
    d_last, d_hs = cotangents
    operand = operand or dtype
    made = taps.Taps(params, operand, dtype, cast_late=again)

    def ends_of_maps(carry, x, extras, outputs):
        """The inputs and the outputs of all linear maps of a step."""
        inputs, outputs = {}, dict(outputs)

        def recall(name, x, addend):
            inputs[name] = x.astype(operand)
            if name not in outputs:
                y = made.apply(name, x, made.maps)
                outputs[name] = y if addend is None or not summed else y + addend
            # Later maps of the step may read what this sum becomes.
            return outputs[name] if addend is None or summed else outputs[name] + addend

        step(made.replace(recall), carry, x, **extras, **constant)
        return inputs, outputs

    inputs, all_outputs = jax.vmap(ends_of_maps)(carries, xs, scanned, outputs)
    if not again:
        outputs = all_outputs
    # The barrier makes XLA transpose the matrices once, before the loop.
    transposed = jax.lax.optimization_barrier(jax.tree.map(taps.transpose, made.maps))
    in_loop = transposed
    if joined:
        in_loop = jax.lax.optimization_barrier(made.products(transposed=True))

    def vectors_of_rows():
        """The vectors once for each row. So no step has to sum gradients over rows and devices."""
        rows = d_hs.shape[1]
        return {n: jnp.broadcast_to(v, (rows, *v.shape)) for n, v in made.vectors.items()}

    def body(state, inputs):
        d_carry, d_vectors = state
        d_h, carry, x, extras, outputs = inputs
        carry = type(d_carry)(*carry) if stacked else carry
        if again:
            _, outputs = ends_of_maps(carry, x, extras, outputs)

        def replay(carry, x, outputs, vectors):
            def recall(name, x, addend):
                y = taps.recall(x, outputs[name], in_loop[name])
                if addend is None:
                    return y
                return taps.recall_sum(y, addend) if summed else y + addend

            return step(made.replace(recall, vectors), carry, x, **extras, **constant)

        _, pull = jax.vjp(replay, carry, x, outputs, vectors_of_rows())
        d_carry = d_carry._replace(h=d_carry.h + d_h)
        d_carry, d_x, d_outputs, d_vectors_here = pull(d_carry)
        d_vectors = jax.tree.map(jnp.add, d_vectors, d_vectors_here)
        d_outputs = {name: d_output.astype(operand) for name, d_output in d_outputs.items()}
        # If x is the addend of an output, both have the same gradient. It is written once.
        same[:] = [name for name, d_output in d_outputs.items() if summed and d_output is d_x]
        written = (None if same else d_x, d_outputs)
        return (d_carry, d_vectors), taps.join(written) if joined else written

    same: list[str] = []
    carries = jnp.stack(carries, 1) if stacked else carries
    state = (d_last, jax.tree.map(jnp.zeros_like, vectors_of_rows()))
    loop = functools.partial(loop, body, reverse=True, unroll=unroll)
    if chunk is not None:
        loop = functools.partial(taps.scan_in_chunks, loop, chunk)
    (d_carry, d_vectors), written = loop(state, (d_hs, carries, xs, scanned, outputs))
    d_xs, d_outputs = taps.part(written, (xs, all_outputs)) if joined else written
    d_xs = d_outputs[same[0]] if same else d_xs
    d_vectors = {name: cells.widen(v).sum(0) for name, v in d_vectors.items()}
    return made.gradients(inputs, d_outputs, d_vectors, transposed), d_carry, d_xs


_scan.defvjp(_forward, _backward)

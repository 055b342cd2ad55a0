"""The scan over a window, with a backward pass that is fast.

Axes: T time, B batch, I and O the two sides of a matrix.

Differentiating a plain `lax.scan` adds a weight-sized array at every step. Here the
backward scan emits only the gradient at the output of each linear map, and each weight
gradient is one matmul over [T * B] after the scan. It works for any step whose matrices are
multiplied in `cells.project` and `cells.affine`: there a map may be replaced by a tap, which
recalls the map's output on the way back. So the cells know nothing of all this.

Kept from the forward pass are the carries that went into each step and the outputs of the
large maps. Products of two thin factors are cheap to compute again, for all time steps in one
go; storing their outputs at every step is what costs. No large matmul runs twice.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mogrifier_jax.nn import cells, taps

# TPUs multiply float32 operands as bfloat16, so they are held in it.
TPU_OPERAND = jnp.dtype("bfloat16")
# How the way back of float32 is worked off there depends on the bytes of outputs that a device
# stores. Between these two numbers it goes in chunks of at most so many time steps, each of which
# fits into the chip's fast memory. Of a whole window XLA would keep some arrays there, and then
# there is no room for what a single step computes. Larger windows it leaves where they are, except
# for those of a carry's parts. So these are stored as one array, which is too large for it.
TPU_CHUNKED = (2**26, 2**27)
TPU_CHUNK = 16
# A loop that writes more bytes fills its memory with zeros first: see `_scan_into_empty`.
TPU_EMPTY = 2**27
# A single row would not be given to a TPU's matrix units, which take eight in the same time.
TPU_ROWS = 8

# step(params, carry, x, **extras) -> carry, whose h is the output.
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
      params: tree in storage dtype. Leaves with two or more axes are matrices, used in
        `cells.project` and nowhere else; a `bias` belongs to the matrix beside it.
      scanned, constant: masks and the like, passed to the step by keyword, without gradient.
      dtype: what the matmuls run in.
      inputs: {"input", "bias"}, a map that x goes through on its way to the step, if any.
      remat_window: keep only the carry every so many steps, and compute the rest again.
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
    """Rows to make of one: more than one if each device of the mesh has a single one."""
    return TPU_ROWS if batch == _shards() else 1


def _shards():
    """Parts that the batch is cut into, if the mesh is known where this is traced."""
    return jax.sharding.get_abstract_mesh().shape.get("data", 1)


def _pad_on_tpus(run, factor, params, *arguments):
    def padded(params, carry, xs, scanned, constant):
        def pad(a, axis):
            if a.ndim <= axis:  # A number for all rows.
                return a
            # Beside each row, so that it stays on its device.
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
    """What is done with x before the loop and within it.

    One matmul over all time steps is the quickest. But on CPUs it costs more to write its result
    and to read it again (docs/performance.md).
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
    if rounded_on_tpus(dtype):
        _, like = jax.eval_shape(push, params, *arguments)
        stacked = reads_inputs and _stacked_on_tpus(like)
        ways["tpu"] = functools.partial(
            push, operand=TPU_OPERAND, loop=_scan_into_empty, stacked=stacked
        )
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
    joined=False,
    stacked=False,
    stepwise=False,
):
    """The way forth, with what the way back needs; options are those of `_pull`."""
    params, inputs = params
    made = taps.Taps(params, operand or dtype, dtype)
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
        return after, _join(kept)

    loop = functools.partial(loop, init=carry, xs=(xs, scanned), unroll=unroll)
    _, like = jax.eval_shape(lambda: loop(body)) if joined else (None, ())
    if len({leaf.dtype for leaf in jax.tree.leaves(like)}) == 1:
        last, kept = loop(body_with_one_write)
        carries, outputs, zs = _part(kept, like)
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
    # As `_forward` has stored it.
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
    """The ways back of accelerators that differ from the usual one."""
    ways = {}
    # Where `cells.hoist` has left a single map of h in a step, none of these pays.
    made = taps.Taps(saved[0], dtype)
    if made.read_inputs:
        ways["cuda"] = functools.partial(pull, joined=True)
    if rounded_on_tpus(dtype) and made.read_inputs:
        stored = _stored(saved)
        least, most = TPU_CHUNKED
        ways["tpu"] = functools.partial(
            pull,
            operand=TPU_OPERAND,
            loop=_scan_into_empty if stored <= least else jax.lax.scan,
            chunk=TPU_CHUNK if least < stored <= most else None,
            again=stored > least,
            stacked=_stacked_on_tpus(saved),
        )
    elif rounded_on_tpus(dtype) and len(made.maps) > 1:
        ways["tpu"] = functools.partial(pull, operand=TPU_OPERAND, loop=_scan_into_empty)
    return ways


def _stored(saved):
    """Bytes of maps' outputs that a device stores."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved[-1])) // _shards()


def _stacked_on_tpus(saved):
    """Whether the parts of a carry are stored as one array there."""
    carries = saved[-2]
    alike = len({(leaf.shape, leaf.dtype) for leaf in carries}) == 1
    return alike and len(carries) > 1 and _stored(saved) > TPU_CHUNKED[1]


def rounded_on_tpus(dtype):
    """Whether a TPU rounds what it multiplies: float32, at JAX's default precision."""
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
    """The way back.

    Args:
      operand: dtype of what goes into matmuls, if it is held in another one than `dtype`.
      loop: `lax.scan` or one like it.
      chunk: time steps that a loop of its own works off, at most.
      again: whether outputs of thin maps are computed again in the loop, and not for all time
        steps before it.
      joined: whether a step writes its gradients as one array, and multiplies by the product of
        thin factors. On GPUs each write and each matmul is a kernel of its own, or several, and
        takes longer to start than to run.
      stacked: whether the parts of the carry are one array, as `TPU_CHUNKED` says.
      summed: whether x is in the stored outputs that it is added to, as where it is projected
        step by step. In float32 on a TPU that would cost.
    """
    params, xs, scanned, constant, carries, outputs = saved
    d_last, d_hs = cotangents
    operand = operand or dtype
    made = taps.Taps(params, operand, dtype)

    def ends_of_maps(carry, x, extras, outputs):
        """What goes into every linear map of a step and what comes out of it."""
        inputs, outputs = {}, dict(outputs)

        def recall(name, x, addend):
            inputs[name] = x.astype(operand)
            if name not in outputs:
                y = made.apply(name, x, made.maps)
                outputs[name] = y if addend is None or not summed else y + addend
            return outputs[name]

        step(made.replace(recall), carry, x, **extras, **constant)
        return inputs, outputs

    inputs, all_outputs = jax.vmap(ends_of_maps)(carries, xs, scanned, outputs)
    if not again:
        outputs = all_outputs
    # Materialised once, so that the matmuls of the loop read their matrix as it lies.
    transposed = jax.lax.optimization_barrier(jax.tree.map(taps.transpose, made.maps))
    in_loop = transposed
    if joined:
        in_loop = jax.lax.optimization_barrier(made.products(transposed=True))

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

        _, pull = jax.vjp(replay, carry, x, outputs, made.vectors)
        d_carry = d_carry._replace(h=d_carry.h + d_h)
        d_carry, d_x, d_outputs, d_vectors_here = pull(d_carry)
        d_vectors = jax.tree.map(jnp.add, d_vectors, d_vectors_here)
        d_outputs = {name: d_output.astype(operand) for name, d_output in d_outputs.items()}
        # Where x is added to an output, their gradients are the same, and are written once.
        same[:] = [name for name, d_output in d_outputs.items() if summed and d_output is d_x]
        written = (None if same else d_x, d_outputs)
        return (d_carry, d_vectors), _join(written) if joined else written

    same: list[str] = []
    carries = jnp.stack(carries, 1) if stacked else carries
    state = (d_last, jax.tree.map(jnp.zeros_like, made.vectors))
    loop = functools.partial(loop, body, reverse=True, unroll=unroll)
    if chunk is not None:
        loop = functools.partial(_scan_in_chunks, loop, chunk)
    (d_carry, d_vectors), written = loop(state, (d_hs, carries, xs, scanned, outputs))
    d_xs, d_outputs = _part(written, (xs, all_outputs)) if joined else written
    d_xs = d_outputs[same[0]] if same else d_xs
    return made.gradients(inputs, d_outputs, d_vectors, transposed), d_carry, d_xs


_scan.defvjp(_forward, _backward)


def _scan_into_empty(body, init, xs, reverse=False, unroll=1):
    """`lax.scan`, whose results go into memory that is not filled with zeros first.

    Not if they are large: XLA allocates them long before the loop, perhaps in the fast memory.
    """
    _, like = jax.eval_shape(lambda: jax.lax.scan(body, init, xs))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    if size // _shards() > TPU_EMPTY:
        return jax.lax.scan(body, init, xs, reverse=reverse, unroll=unroll)

    def turn(carried, x):
        state, index, results = carried
        state, result = body(state, x)
        write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        results = jax.tree.map(write, results, result)
        return (state, index + (-1 if reverse else 1), results), None

    steps = jax.tree.leaves(xs)[0].shape[0]
    start = jnp.asarray(steps - 1 if reverse else 0, jnp.int32)
    results = jax.tree.map(lambda a: jax.lax.empty(a.shape, a.dtype), like)
    carried, _ = jax.lax.scan(turn, (init, start, results), xs, reverse=reverse, unroll=unroll)
    return carried[0], carried[2]


def _scan_in_chunks(loop, most, state, xs):
    """Runs a backward loop chunk by chunk, of the largest length up to `most` that divides T."""
    steps = jax.tree.leaves(xs)[0].shape[0]
    length = max(n for n in range(1, most + 1) if steps % n == 0)
    chunks = jax.tree.map(lambda a: a.reshape(steps // length, length, *a.shape[1:]), xs)
    state, ys = jax.lax.scan(loop, state, chunks, reverse=True)
    return state, jax.tree.map(lambda a: a.reshape(steps, *a.shape[2:]), ys)


def _join(tree):
    """Arrays [B, ...] as one [B, N]."""
    return jnp.concatenate([a.reshape(len(a), -1) for a in jax.tree.leaves(tree)], 1)


def _part(joined, like):
    """The [T, B, N] of all that `_join` made, as the tree that it was."""
    leaves, treedef = jax.tree.flatten(like)
    ends = list(itertools.accumulate(math.prod(leaf.shape[2:]) for leaf in leaves))
    parts = jnp.split(joined, ends[:-1], 2)
    return treedef.unflatten(
        part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
    )

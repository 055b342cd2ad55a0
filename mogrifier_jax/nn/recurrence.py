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

from mogrifier_jax.nn import cells

# TPUs multiply float32 operands as bfloat16, so the way back holds them in it; and it is worked off
# in chunks of at most so many time steps. What a chunk reads and writes fits into the chip's fast
# memory. Of a whole window XLA keeps some arrays there, and then there is no room for what a
# single step computes. Neither pays where all is bfloat16, nor if fewer bytes are stored, nor where
# `cells.hoist` has left only maps of h in a step.
TPU_OPERAND = jnp.dtype("bfloat16")
TPU_CHUNK = 16
TPU_LARGE = 2**26
# On GPUs a matmul of two thin factors takes four kernels to start, one by their product two. A
# product of at most so many bytes is read in less time than that.
CUDA_PRODUCT = 2**24
CUDA_ALIGNMENT = 128
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
    shards = jax.sharding.get_abstract_mesh().shape.get("data", 1)
    return TPU_ROWS if batch == shards else 1


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
    params = Taps(params, dtype).cast
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
    if rounded_on_tpus(dtype):
        ways["tpu"] = functools.partial(push, operand=TPU_OPERAND)
    if Taps(params[0], dtype).read_inputs:
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
    joined=False,
    stepwise=False,
):
    """The way forth, with what the way back needs; `operand` and `joined` as in `_pull`."""
    params, inputs = params
    taps = Taps(params, operand or dtype, dtype)
    before, within = _projections(inputs, dtype, stepwise)
    xs = before(xs)
    maps = jax.lax.optimization_barrier(taps.products()) if joined else taps.maps

    def body(carry, inputs):
        x, extras = inputs
        x, outputs = within(x), {}

        def compute(name, x, addend):
            y = taps.apply(name, x, maps)
            y = y if addend is None else y + addend
            if not taps.is_thin(name):
                outputs[name] = y
            return y

        after = step(taps.replace(compute), carry, x, **extras, **constant)
        return after, (carry, outputs, x if stepwise else None)

    def body_with_one_write(carry, inputs):
        after, kept = body(carry, inputs)
        return after, _join(kept)

    loop = functools.partial(jax.lax.scan, init=carry, xs=(xs, scanned), unroll=unroll)
    _, like = jax.eval_shape(lambda: loop(body)) if joined else (None, ())
    if len({leaf.dtype for leaf in jax.tree.leaves(like)}) == 1:
        last, kept = loop(body_with_one_write)
        carries, outputs, zs = _part(kept, like)
    else:
        last, (carries, outputs, zs) = loop(body)
    xs = zs if stepwise else xs
    hs = jnp.concatenate([carries.h[1:], last.h[None]])
    return (last, hs), (params, xs, scanned, constant, carries, outputs)


def _backward(step, dtype, unroll, saved, cotangents):
    inputs, xs, saved = saved
    d_params, d_carry, d_xs = _choose_pull(step, dtype, unroll, saved, cotangents)
    d_inputs = None
    if inputs is not None:
        matrix = inputs["input"]
        d_inputs = {"input": _sum_of_products(xs, d_xs).astype(matrix.dtype)}
        if "bias" in inputs:
            d_inputs["bias"] = cells.sum_leading(d_xs, 2).astype(inputs["bias"].dtype)
        d_xs = jnp.tensordot(d_xs, _transpose(matrix.astype(dtype)), axes=matrix.ndim - 1)
    return (d_params, d_inputs), d_carry, d_xs, None, None


def _choose_pull(step, dtype, unroll, saved, cotangents):
    pull = functools.partial(_pull, step, dtype, unroll)
    params, *_, outputs = saved
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(outputs))
    if not Taps(params, dtype).read_inputs:  # A step writes little, and neither way pays.
        return pull(saved, cotangents)
    ways = {"cuda": functools.partial(pull, joined=True)}
    if stored >= TPU_LARGE and rounded_on_tpus(dtype):
        ways["tpu"] = functools.partial(pull, operand=TPU_OPERAND, chunk=TPU_CHUNK)
    return jax.lax.platform_dependent(saved, cotangents, **ways, default=pull)


def rounded_on_tpus(dtype):
    """Whether a TPU rounds what it multiplies: float32, at JAX's default precision."""
    asked = jax.config.jax_default_matmul_precision
    return dtype == jnp.float32 and asked in (None, "default", "fastest", "bfloat16")


def _pull(step, dtype, unroll, saved, cotangents, operand=None, chunk=None, joined=False):
    """The way back.

    Args:
      operand: dtype of what goes into matmuls, if it is held in another one than `dtype`.
      chunk: time steps that a loop of its own works off, at most. Outputs of thin maps are
        then computed again in that loop, and not for all time steps before it.
      joined: whether a step writes its gradients as one array, and multiplies by the product of
        thin factors. On GPUs each write and each matmul is a kernel of its own, or several, and
        takes longer to start than to run.
    """
    params, xs, scanned, constant, carries, outputs = saved
    d_last, d_hs = cotangents
    operand = operand or dtype
    taps = Taps(params, operand, dtype)

    def ends_of_maps(carry, x, extras, outputs):
        """What goes into every linear map of a step and what comes out of it."""
        inputs, outputs = {}, dict(outputs)

        def recall(name, x, addend):
            inputs[name] = x.astype(operand)
            if name not in outputs:
                y = taps.apply(name, x, taps.maps)
                outputs[name] = y if addend is None else y + addend
            return outputs[name]

        step(taps.replace(recall), carry, x, **extras, **constant)
        return inputs, outputs

    inputs, all_outputs = jax.vmap(ends_of_maps)(carries, xs, scanned, outputs)
    if chunk is None:
        outputs = all_outputs
    # Materialised once, so that the matmuls of the loop read their matrix as it lies.
    transposed = jax.lax.optimization_barrier(jax.tree.map(_transpose, taps.maps))
    in_loop = transposed
    if joined:
        in_loop = jax.lax.optimization_barrier(taps.products(transpose=True))

    def body(state, inputs):
        d_carry, d_vectors = state
        d_h, carry, x, extras, outputs = inputs
        if chunk is not None:
            _, outputs = ends_of_maps(carry, x, extras, outputs)

        def replay(carry, x, outputs, vectors):
            def recall(name, x, addend):
                y = _recall(x, outputs[name], in_loop[name])
                return y if addend is None else _recall_sum(y, addend)

            return step(taps.replace(recall, vectors), carry, x, **extras, **constant)

        _, pull = jax.vjp(replay, carry, x, outputs, taps.vectors)
        d_carry = d_carry._replace(h=d_carry.h + d_h)
        d_carry, d_x, d_outputs, d_vectors_here = pull(d_carry)
        d_vectors = jax.tree.map(jnp.add, d_vectors, d_vectors_here)
        d_outputs = {name: d_output.astype(operand) for name, d_output in d_outputs.items()}
        # Where x is added to an output, their gradients are the same, and are written once.
        same[:] = [name for name, d_output in d_outputs.items() if d_output is d_x]
        written = (None if same else d_x, d_outputs)
        return (d_carry, d_vectors), _join(written) if joined else written

    same: list[str] = []
    state = (d_last, jax.tree.map(jnp.zeros_like, taps.vectors))
    loop = functools.partial(jax.lax.scan, body, reverse=True, unroll=unroll)
    if chunk is not None:
        loop = functools.partial(_scan_in_chunks, loop, chunk)
    (d_carry, d_vectors), written = loop(state, (d_hs, carries, xs, scanned, outputs))
    d_xs, d_outputs = _part(written, (xs, all_outputs)) if joined else written
    d_xs = d_outputs[same[0]] if same else d_xs
    return taps.gradients(inputs, d_outputs, d_vectors, transposed), d_carry, d_xs


_scan.defvjp(_forward, _backward)


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


@jax.custom_vjp
def _recall(x, output, transposed):
    """The output of a linear map that is known already, differentiable in the map's input."""
    return output


def _recall_backward(transposed, d_output):
    d_x = d_output
    for matrix in reversed(transposed):
        d_x = jnp.tensordot(
            _pad_last(d_x.astype(matrix.dtype), matrix.shape[-2]),
            matrix,
            axes=matrix.ndim - 1,
            preferred_element_type=d_output.dtype,
        )
    return d_x, d_output, None


_recall.defvjp(lambda x, output, transposed: (output, transposed), _recall_backward)


@jax.custom_vjp
def _recall_sum(output, addend):
    """An output that has the addend in it, differentiable in both."""
    return output


_recall_sum.defvjp(lambda output, addend: (output, None), lambda _, d_sum: (d_sum, d_sum))


def _pad_last(x, size):
    """Zeros behind the last axis of x, up to a size."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _transpose(matrix):
    """[I, ...] to [..., I]."""
    return jnp.moveaxis(matrix, 0, -1)


class Taps:
    """A parameter tree taken apart into linear maps, their biases, and other vectors.

    A map is a tuple of one matrix, or of the two factors `down` and `up`; it goes by the name
    of the first. Names are paths in the tree. Matrices are cast to `dtype`; `output_dtype` is
    that of the maps' outputs, if it is another. An output has its bias in it unless that would
    round it once more.
    """

    _FIRST = ("kernel", "down", "input", "recurrent")
    _BIASED = ("kernel", "down", "input")  # The one of these that stands beside a bias.

    def __init__(self, params, dtype, output_dtype=None):
        self._dtype, self._output_dtype = dtype, output_dtype or dtype
        self._whole = cells.wide(self._output_dtype) == self._output_dtype
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(params)
        self._params = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
        self._second, self._bias, self.maps = {}, {}, {}
        self.read_inputs = False  # Whether x goes through a map, too.
        for path, leaf in flat:
            name, last = jax.tree_util.keystr(path), path[-1].key
            if last in self._FIRST:
                self.maps[name] = (leaf.astype(dtype),)
                self.read_inputs |= last != "recurrent"
                up, bias = _beside(path, "up"), _beside(path, "bias")
                if last == "down":
                    self._second[name] = up
                    self.maps[name] += (self._params[up].astype(dtype),)
                if last in self._BIASED and bias in self._params:
                    self._bias[name] = bias
        taken = {*self.maps, *self._second.values(), *self._bias.values()}
        self.vectors = {name: v for name, v in self._params.items() if name not in taken}

    @property
    def cast(self):
        """The tree with its matrices in the compute dtype."""
        matrices = {name: matrices[0] for name, matrices in self.maps.items()}
        matrices |= {up: self.maps[down][1] for down, up in self._second.items()}
        return self._treedef.unflatten({**self._params, **matrices}.values())

    def is_thin(self, name):
        """Whether a map is a product of two factors."""
        return len(self.maps[name]) == 2

    def products(self, transpose=False):
        """The maps with the product of their factors, if it is small, in the factors' place.

        Its first axis has zeros at the end: XLA cuts it into parts, and would fill up the last one
        in every step.
        """

        def multiply(matrices):
            down, up = matrices[0], matrices[-1]
            size = len(down) * up.shape[-1] * down.dtype.itemsize
            if len(matrices) == 1 or up.ndim > 2 or size > CUDA_PRODUCT:
                return tuple(map(_transpose, matrices)) if transpose else matrices
            wide = cells.wide(self._dtype)
            product = jnp.tensordot(
                down, up, axes=1, precision="highest", preferred_element_type=wide
            )
            product = _transpose(product) if transpose else product
            missing = -product.shape[0] % CUDA_ALIGNMENT
            return (jnp.pad(product.astype(self._dtype), [(0, missing), (0, 0)]),)

        return {name: multiply(matrices) for name, matrices in self.maps.items()}

    def apply(self, name, x, maps):
        """The output of a map; `maps` are these, or their products."""
        for matrix in maps[name]:
            x = jnp.tensordot(
                _pad_last(x.astype(self._dtype), matrix.shape[0]),
                matrix,
                axes=1,
                preferred_element_type=self._output_dtype,
            )
        return self._add_bias(name, x) if self._whole else x

    def _add_bias(self, name, y):
        """To a map's output, if the map has one."""
        y = cells.widen(y)
        return y + cells.stretch(self._params[self._bias[name]], y) if name in self._bias else y

    def replace(self, output_of, vectors=None):
        """The tree with `output_of(name, x, addend)` in place of each map: see `cells.project`.

        The addend is what the caller adds that is no parameter, if anything.
        """

        def tap(name):
            def use(x, bias):
                addend = None if name in self._bias or bias is None else cells.widen(bias)
                if self._whole:
                    return output_of(name, x, addend)
                y = self._add_bias(name, output_of(name, x, None))
                return y if addend is None else y + addend

            return use

        taps = {name: tap(name) for name in self.maps}
        return self._treedef.unflatten({**self._params, **(vectors or {}), **taps}.values())

    def gradients(self, inputs, d_outputs, d_vectors, transposed):
        """One matmul over [T, B] for each matrix, one sum for each bias."""
        grads = dict(d_vectors)
        for name, matrices in self.maps.items():
            x, d_output = inputs[name], d_outputs[name]
            if name in self._bias:
                grads[self._bias[name]] = cells.sum_leading(d_output, 2)
            if self.is_thin(name):
                low = jnp.tensordot(x, matrices[0], axes=1)
                grads[self._second[name]] = _sum_of_products(low, d_output)
                up = transposed[name][1]
                d_output = jnp.tensordot(d_output, up, axes=up.ndim - 1)
            grads[name] = _sum_of_products(x, d_output)
        return self._treedef.unflatten(
            grads[name].astype(leaf.dtype) for name, leaf in self._params.items()
        )


def _sum_of_products(x, d_output):
    """The gradient of a matrix from the two ends of its matmul, over all of [T, B]."""
    wide = cells.wide(d_output.dtype)
    return jnp.tensordot(x, d_output, ((0, 1), (0, 1)), preferred_element_type=wide)


def _beside(path, name):
    """The name of what stands beside a leaf in its dict."""
    return jax.tree_util.keystr((*path[:-1], jax.tree_util.DictKey(name)))

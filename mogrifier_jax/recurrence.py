"""The scan over a window, with a backward pass that is fast.

Axes: T time, B batch, I and O the two sides of a matrix.

Differentiating a plain `lax.scan` adds a weight-sized array at every step. Here the
backward scan emits only the gradient at each matmul's output, and each weight gradient is
one matmul over [T * B] after the scan. It works for any step whose matrices are multiplied
in `cells.project`: there a matrix may be replaced by a tap, which on the way forward notes
the matmul's output and on the way back recalls it. So no matmul runs twice, the elementwise
part is computed again, and the cells know nothing of all this.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mogrifier_jax import cells

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
    remat_window: int | None = None,
    unroll: int = 1,
) -> tuple[Any, jax.Array]:
    """Runs `step` over the leading axis of xs and `scanned`; returns (carry, hs [T, B, H]).

    Args:
      params: tree in storage dtype. Leaves with two or more axes are matrices, used in
        `cells.project` and nowhere else; a `bias` belongs to the matrix beside it.
      scanned, constant: masks and the like, passed to the step by keyword, without gradient.
      dtype: what the matmuls run in.
      remat_window: keep only the carry every so many steps, and compute the rest again.
    """
    run = functools.partial(_scan, step, jnp.dtype(dtype), unroll)
    steps = xs.shape[0]
    if remat_window is None or remat_window >= steps:
        return run(params, carry, xs, scanned, constant)

    chunk = jax.checkpoint(lambda carry, part: run(params, carry, *part, constant))
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(step, dtype, unroll, params, carry, xs, scanned, constant):
    params = Taps(params, dtype).cast

    def body(carry, inputs):
        x, extras = inputs
        carry = step(params, carry, x, **extras, **constant)
        return carry, carry.h

    return jax.lax.scan(body, carry, (xs, scanned), unroll=unroll)


def _forward(step, dtype, unroll, params, carry, xs, scanned, constant):
    taps = Taps(params, dtype)

    def body(carry, inputs):
        x, extras = inputs
        outputs = {}

        def note(name, x):
            outputs[name] = jnp.tensordot(x, taps.matrices[name], axes=1)
            return outputs[name]

        carry = step(taps.replace(note), carry, x, **extras, **constant)
        return carry, (carry, outputs)

    last, (carries, outputs) = jax.lax.scan(body, carry, (xs, scanned), unroll=unroll)
    return (last, carries.h), (params, carry, xs, scanned, constant, carries, outputs)


def _backward(step, dtype, unroll, saved, cotangents):
    params, first, xs, scanned, constant, carries, outputs = saved
    d_last, d_hs = cotangents
    taps = Taps(params, dtype)
    # Materialised once, so that the matmuls of the loop read their matrix as it lies.
    transposed = jax.lax.optimization_barrier(jax.tree.map(_transpose, taps.matrices))
    carries = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b[:-1]]), first, carries)

    def body(state, inputs):
        d_carry, d_vectors = state
        d_h, carry, x, extras, outputs = inputs

        def replay(carry, x, outputs, vectors):
            recall = lambda name, x: _recall(x, outputs[name], transposed[name])
            return step(taps.replace(recall, vectors), carry, x, **extras, **constant)

        _, pull = jax.vjp(replay, carry, x, outputs, taps.vectors)
        d_carry = d_carry._replace(h=d_carry.h + d_h)
        d_carry, d_x, d_outputs, d_vectors_here = pull(d_carry)
        d_vectors = jax.tree.map(jnp.add, d_vectors, d_vectors_here)
        return (d_carry, d_vectors), (d_x, d_outputs)

    state = (d_last, jax.tree.map(jnp.zeros_like, taps.vectors))
    (d_carry, d_vectors), (d_xs, d_outputs) = jax.lax.scan(
        body, state, (d_hs, carries, xs, scanned, outputs), reverse=True, unroll=unroll
    )

    def matmul_inputs(carry, x, extras, outputs):
        inputs = {}

        def recall(name, x):
            inputs[name] = x
            return outputs[name]

        step(taps.replace(recall), carry, x, **extras, **constant)
        return inputs

    inputs = jax.vmap(matmul_inputs)(carries, xs, scanned, outputs)
    return taps.gradients(inputs, d_outputs, d_vectors), d_carry, d_xs, None, None


_scan.defvjp(_forward, _backward)


@jax.custom_vjp
def _recall(x, output, transposed):
    """The output of a matmul that has been done before, differentiable in its input."""
    return output


def _recall_backward(transposed, d_output):
    axes = transposed.ndim - 1
    return jnp.tensordot(d_output, transposed, axes=axes), d_output, None


_recall.defvjp(lambda x, output, transposed: (output, transposed), _recall_backward)


def _transpose(matrix):
    """[I, ...] to [..., I]."""
    return jnp.moveaxis(matrix, 0, -1)


class Taps:
    """A parameter tree taken apart into matrices, their biases, and other vectors."""

    _MATRICES = ("kernel", "down", "up", "input", "recurrent")
    _BIASED = ("kernel", "up", "input")  # The one of these that stands beside a bias.

    def __init__(self, params, dtype):
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(params)
        self._params = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
        last = {jax.tree_util.keystr(path): path[-1].key for path, _ in flat}
        self._bias_of = {}
        for path, _ in flat:
            if path[-1].key == "bias":
                beside = [(*path[:-1], jax.tree_util.DictKey(name)) for name in self._BIASED]
                matrix = next(k for k in map(jax.tree_util.keystr, beside) if k in last)
                self._bias_of[matrix] = jax.tree_util.keystr(path)
        self.matrices = {
            k: v.astype(dtype) for k, v in self._params.items() if last[k] in self._MATRICES
        }
        biases = self._bias_of.values()
        self.vectors = {
            k: v for k, v in self._params.items() if k not in self.matrices and k not in biases
        }
        self.cast = self._treedef.unflatten({**self._params, **self.matrices}.values())

    def replace(self, output_of, vectors=None):
        """The tree with `output_of(name, x)` in place of each matrix: see `cells.project`."""

        def tap(name):
            def use(x, bias):
                y = cells.widen(output_of(name, x))
                return y if bias is None else y + cells.stretch(bias, y)

            return use

        taps = {name: tap(name) for name in self.matrices}
        return self._treedef.unflatten({**self._params, **(vectors or {}), **taps}.values())

    def gradients(self, inputs, d_outputs, d_vectors):
        """One matmul over [T, B] for each matrix, one sum for each bias."""
        grads = dict(d_vectors)
        for name in self.matrices:
            d_output = d_outputs[name]
            wide = cells.wide(d_output.dtype)
            over_time = ((0, 1), (0, 1))
            grads[name] = jnp.tensordot(
                inputs[name], d_output, over_time, preferred_element_type=wide
            )
            if name in self._bias_of:
                grads[self._bias_of[name]] = d_output.sum((0, 1), dtype=wide)
        return self._treedef.unflatten(
            grads[name].astype(leaf.dtype) for name, leaf in self._params.items()
        )

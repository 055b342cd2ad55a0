"""Stand-ins for a cell's matrices, which let the recurrence store and reuse each matmul.

With them `recurrence.py` intercepts the input and the output of every linear map of a step. Only
`cells.project` and `cells.affine` call them. Axes: T time, B batch, I inputs of a map.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mogrifier_jax.nn import cells, plans

# The matrix of a map [I, ...], or the two factors `down` [I, K] and `up` [K, ...] of a thin one.
Matrices = tuple[Float[Array, "..."], ...]
# (name, x, addend) to the output of a map for x, plus the addend unless it is None.
OutputOf = Callable[[str, Array, Array | None], Array]


class Taps:
    """A parameter tree, split into linear maps, their biases, and other vectors.

    The name of a map is the path of its first matrix in the tree. An output includes the bias of
    the map, except in a dtype narrower than float32, because the sum would be rounded once more.

    Args:
      params: a tree in the storage dtype. Leaves with two or more axes are matrices; a `bias`
        belongs to the matrix beside it.
      dtype: the dtype of the outputs.
      operand_dtype: the dtype of matrices and of what they multiply; `dtype` if None.
    """

    _FIRST = ("kernel", "down", "input", "recurrent")
    _BIASED = ("kernel", "down", "input")  # A bias beside one of these belongs to it.

    def __init__(
        self,
        params: cells.Params | list[cells.Params],
        dtype: np.dtype,
        operand_dtype: np.dtype | None = None,
    ) -> None:
        self._dtype, self.operand_dtype = dtype, operand_dtype or dtype
        self._adds_bias = cells.wide(dtype) == dtype
        flat, treedef = jax.tree_util.tree_flatten_with_path(params)
        self._treedef: Any = treedef
        self._params = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
        self._second: dict[str, str] = {}  # The path of the second factor of a map.
        self._bias: dict[str, str] = {}  # The path of the bias of a map.
        self.maps: dict[str, Matrices] = {}
        self.read_inputs = False  # Whether there are maps of x, and not only of h.
        for path, leaf in flat:
            name, last = jax.tree_util.keystr(path), path[-1].key
            if last in self._FIRST:
                self.maps[name] = (leaf.astype(self.operand_dtype),)
                self.read_inputs |= last != "recurrent"
                up, bias = _beside(path, "up"), _beside(path, "bias")
                if last == "down":
                    self._second[name] = up
                    self.maps[name] += (self._params[up].astype(self.operand_dtype),)
                if last in self._BIASED and bias in self._params:
                    self._bias[name] = bias
        taken = {*self.maps, *self._second.values(), *self._bias.values()}
        self.vectors = {name: v for name, v in self._params.items() if name not in taken}

    def cast_matrices(self) -> Any:
        """The tree with its matrices in the dtype of the operands."""
        matrices = {name: matrices[0] for name, matrices in self.maps.items()}
        matrices |= {up: self.maps[down][1] for down, up in self._second.items()}
        return self._treedef.unflatten({**self._params, **matrices}.values())

    def is_thin(self, name: str) -> bool:
        """Whether a map is a product of two factors."""
        return len(self.maps[name]) == 2

    def transpose(self) -> dict[str, Matrices]:
        """The transposed matrices of all maps, for `saved_output`."""
        # The barrier makes XLA transpose them once, before a loop.
        return jax.lax.optimization_barrier(jax.tree.map(transpose, self.maps))

    def multiply_factors(
        self, most_bytes: int, alignment: int, transposed: bool = False
    ) -> dict[str, Matrices]:
        """The maps (transposed), with the product of two factors in their place if it is small.

        Zeros fill the inner axis of a product up to a multiple of `alignment`.
        """

        def multiply(matrices: Matrices) -> Matrices:
            down, up = matrices[0], matrices[-1]
            size = len(down) * up.shape[-1] * down.dtype.itemsize
            if len(matrices) == 1 or up.ndim > 2 or size > most_bytes:
                return tuple(map(transpose, matrices)) if transposed else matrices
            wide = cells.wide(down.dtype)
            product = jnp.tensordot(
                down, up, axes=1, precision="highest", preferred_element_type=wide
            )
            product = transpose(product) if transposed else product
            missing = -product.shape[0] % alignment
            return (jnp.pad(product.astype(down.dtype), [(0, missing), (0, 0)]),)

        # The barrier makes XLA multiply them once, before a loop.
        products = {name: multiply(matrices) for name, matrices in self.maps.items()}
        return jax.lax.optimization_barrier(products)

    def pad_inner(
        self, maps: dict[str, Matrices], alignment: int, transposed: bool = False
    ) -> dict[str, Matrices]:
        """These maps (transposed), with zeros that fill the inner axis of single matrices."""

        def pad(matrices: Matrices) -> Matrices:
            axis = matrices[0].ndim - 2 if transposed else 0  # The last one of several.
            return _fill_up(matrices, axis, alignment)

        # The barrier makes XLA fill them up once, before a loop.
        return jax.lax.optimization_barrier({name: pad(each) for name, each in maps.items()})

    def pad_outputs(self, alignment: int) -> dict[str, Matrices]:
        """The maps, with zeros that fill the last axis of large ones up to a multiple."""

        # The barrier makes XLA fill them up once, before a loop.
        padded = {name: _fill_up(matrices, -1, alignment) for name, matrices in self.maps.items()}
        return jax.lax.optimization_barrier(padded)

    def vectors_of_rows(self, rows: int) -> dict[str, Array]:
        """The vectors once for each row of a batch."""
        return {n: jnp.broadcast_to(v, (rows, *v.shape)) for n, v in self.vectors.items()}

    def apply(
        self, name: str, x: Float[Array, "*B I"], maps: dict[str, Matrices]
    ) -> Float[Array, "..."]:
        """The output of a map for x; `maps` is `self.maps`, or these as made by a method above."""
        for matrix in maps[name]:
            x = jnp.tensordot(
                _pad_last(x.astype(self.operand_dtype), matrix.shape[0]),
                matrix,
                axes=1,
                preferred_element_type=self._dtype,
            )
        size = self.maps[name][-1].shape[-1]
        if x.shape[-1] > size:
            x = x[..., :size]
        return self._add_bias(name, x) if self._adds_bias else x

    def _add_bias(self, name: str, y: Float[Array, "*S"]) -> Float[Array, "*S"]:
        """Adds the bias of a map, if it has one, to the output of the map."""
        y = cells.widen(y)
        return y + cells.stretch(self._params[self._bias[name]], y) if name in self._bias else y

    def put(self, output_of: OutputOf, vectors: dict[str, Array] | None = None) -> Any:
        """The tree with a tap in place of each map, and with these vectors if they are given.

        The addend that a tap passes on is what `cells.project` adds to the output if it is not a
        parameter, else None.
        """

        def make_tap(name: str) -> cells.Tap:
            def tap(x: Array, bias: Array | None) -> Array:
                addend = None if name in self._bias or bias is None else cells.widen(bias)
                if self._adds_bias:
                    return output_of(name, x, addend)
                y = self._add_bias(name, output_of(name, x, None))
                return y if addend is None else y + addend

            return tap

        taps = {name: make_tap(name) for name in self.maps}
        return self._treedef.unflatten({**self._params, **(vectors or {}), **taps}.values())

    def gradients(
        self,
        inputs: dict[str, Array],
        d_outputs: dict[str, Array],
        d_vectors: dict[str, Array],
        transposed: dict[str, Matrices],
        plan: plans.Plan,
    ) -> Any:
        """The gradients of the tree from what maps read and the gradients of their outputs.

        A matrix takes one matmul over [T, B], and a bias one sum.
        """
        grads = dict(d_vectors)
        for name, matrices in self.maps.items():
            x, d_output = inputs[name], d_outputs[name]
            if name in self._bias:
                grads[self._bias[name]] = sum_leading(d_output, 2)
            if self.is_thin(name):
                low = jnp.tensordot(x, matrices[0], axes=1)
                grads[self._second[name]] = sum_of_products(low, d_output, plan.flatten_rows)
                up = transposed[name][1]
                d_output = jnp.tensordot(d_output, up, axes=up.ndim - 1)
            grads[name] = sum_of_products(x, d_output, plan.flatten_rows)
        return self._treedef.unflatten(
            grads[name].astype(leaf.dtype) for name, leaf in self._params.items()
        )


def cast_matrices(params: Any, dtype: np.dtype) -> Any:
    """The tree with its matrices in the compute dtype; vectors stay in the storage dtype."""
    return Taps(params, dtype).cast_matrices()


def _beside(path: tuple[Any, ...], name: str) -> str:
    """The path of another entry of the dict that a leaf is in."""
    return jax.tree_util.keystr((*path[:-1], jax.tree_util.DictKey(name)))


def transpose(matrix: Float[Array, "I *O"]) -> Float[Array, "*O I"]:
    """Moves the first axis to the end."""
    return jnp.moveaxis(matrix, 0, -1)


def _fill_up(matrices: Matrices, axis: int, alignment: int) -> Matrices:
    """A single matrix with zeros up to a multiple on an axis; two factors as they are."""
    missing = -matrices[0].shape[axis] % alignment
    if len(matrices) == 2 or not missing:
        return matrices
    widths = [(0, 0)] * matrices[0].ndim
    widths[axis] = (0, missing)
    return (jnp.pad(matrices[0], widths),)


def _pad_last(x: Float[Array, "*B I"], size: int) -> Float[Array, "*B {size}"]:
    """Adds zeros at the end of the last axis of x, up to a size."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


@jax.custom_vjp
def saved_output(
    x: Float[Array, "B I"], output: Float[Array, "B *O"], transposed: Matrices
) -> Float[Array, "B *O"]:
    """Returns the saved `output` of a map; backpropagates to x as if it were computed from x."""
    return output


def _saved_output_forward(
    x: Float[Array, "B I"], output: Float[Array, "B *O"], transposed: Matrices
) -> tuple[Float[Array, "B *O"], Matrices]:
    return output, transposed


def _saved_output_backward(
    transposed: Matrices, d_output: Float[Array, "B *O"]
) -> tuple[Float[Array, "B I"], Float[Array, "B *O"], None]:
    d_x = d_output
    for matrix in reversed(transposed):
        d_x = jnp.tensordot(
            _pad_last(d_x.astype(matrix.dtype), matrix.shape[-2]),
            matrix,
            axes=matrix.ndim - 1,
            preferred_element_type=d_output.dtype,
        )
    return d_x, d_output, None


saved_output.defvjp(_saved_output_forward, _saved_output_backward)


@jax.custom_vjp
def saved_sum(total: Float[Array, "*S"], addend: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Returns `total`, which includes the addend; backpropagates to both as to the sum of two."""
    return total


saved_sum.defvjp(lambda total, addend: (total, None), lambda _, d_sum: (d_sum, d_sum))


def sum_of_products(
    x: Float[Array, "T B I"], d_output: Float[Array, "T B *O"], flatten: bool = False
) -> Float[Array, "I *O"]:
    """The gradient of a matrix, from its inputs and the gradients of its outputs.

    `flatten` makes one axis of T and B first, and one of O: with more of them, XLA refuses products
    of bfloat16 whose sum is float32 on CPUs.
    """
    wide = cells.wide(d_output.dtype)
    if flatten:
        rows, shape = x.shape[0] * x.shape[1], (*x.shape[2:], *d_output.shape[2:])
        x, d_output = (a.reshape(rows, math.prod(a.shape[2:])) for a in (x, d_output))
        product = jnp.tensordot(x, d_output, ((0,), (0,)), preferred_element_type=wide)
        return product.reshape(shape)
    return jnp.tensordot(x, d_output, ((0, 1), (0, 1)), preferred_element_type=wide)


def sum_leading(x: Float[Array, "..."], num_axes: int) -> Float[Array, "..."]:
    """Sums over the first `num_axes` axes in at least float32."""
    return cells.widen(x).sum(tuple(range(num_axes)))

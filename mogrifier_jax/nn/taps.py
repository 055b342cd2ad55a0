"""Linear maps of a parameter tree, and what may be put in their place while a step is traced.

`recurrence.py` takes over the matmuls of a step this way; the cells know nothing of it.
"""

import jax
import jax.numpy as jnp

from mogrifier_jax.nn import cells

# On GPUs a matmul by two thin factors takes several kernels, which take longer to start than to
# run. A product of at most so many bytes is read in less time than that. Its inner axis has zeros
# at the end: XLA cuts it into parts, and would fill up the last one in every step.
CUDA_PRODUCT = 2**24
CUDA_ALIGNMENT = 128


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

    def products(self, transposed=False):
        """The maps with the product of their factors, if it is small, in the factors' place."""

        def multiply(matrices):
            down, up = matrices[0], matrices[-1]
            size = len(down) * up.shape[-1] * down.dtype.itemsize
            if len(matrices) == 1 or up.ndim > 2 or size > CUDA_PRODUCT:
                return tuple(map(transpose, matrices)) if transposed else matrices
            wide = cells.wide(self._dtype)
            product = jnp.tensordot(
                down, up, axes=1, precision="highest", preferred_element_type=wide
            )
            product = transpose(product) if transposed else product
            missing = -product.shape[0] % CUDA_ALIGNMENT
            return (jnp.pad(product.astype(self._dtype), [(0, missing), (0, 0)]),)

        return {name: multiply(matrices) for name, matrices in self.maps.items()}

    def apply(self, name, x, maps):
        """The output of a map; `maps` are these, or their products."""
        if self._dtype != self._output_dtype and self.read_inputs and not self.is_thin(name):
            # Rounded before it is cast, so that XLA casts within the matmul. If it could, it would
            # move the cast to where x is made, and for a TPU it takes longer to write bfloat16.
            to = jnp.finfo(self._dtype)
            x = jax.lax.reduce_precision(x, to.nexp, to.nmant)
        for matrix in maps[name]:
            x = jnp.tensordot(
                pad_last(x.astype(self._dtype), matrix.shape[0]),
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
                grads[self._second[name]] = sum_of_products(low, d_output)
                up = transposed[name][1]
                d_output = jnp.tensordot(d_output, up, axes=up.ndim - 1)
            grads[name] = sum_of_products(x, d_output)
        return self._treedef.unflatten(
            grads[name].astype(leaf.dtype) for name, leaf in self._params.items()
        )


def sum_of_products(x, d_output):
    """The gradient of a matrix from the two ends of its matmul, over all of [T, B]."""
    wide = cells.wide(d_output.dtype)
    return jnp.tensordot(x, d_output, ((0, 1), (0, 1)), preferred_element_type=wide)


def _beside(path, name):
    """The name of what stands beside a leaf in its dict."""
    return jax.tree_util.keystr((*path[:-1], jax.tree_util.DictKey(name)))


def pad_last(x, size):
    """Zeros behind the last axis of x, up to a size."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def transpose(matrix):
    """[I, ...] to [..., I]."""
    return jnp.moveaxis(matrix, 0, -1)


@jax.custom_vjp
def recall(x, output, transposed):
    """The output of a linear map that is known already, differentiable in the map's input."""
    return output


def _recall_backward(transposed, d_output):
    d_x = d_output
    for matrix in reversed(transposed):
        d_x = jnp.tensordot(
            pad_last(d_x.astype(matrix.dtype), matrix.shape[-2]),
            matrix,
            axes=matrix.ndim - 1,
            preferred_element_type=d_output.dtype,
        )
    return d_x, d_output, None


recall.defvjp(lambda x, output, transposed: (output, transposed), _recall_backward)


@jax.custom_vjp
def recall_sum(output, addend):
    """An output that has the addend in it, differentiable in both."""
    return output


recall_sum.defvjp(lambda output, addend: (output, None), lambda _, d_sum: (d_sum, d_sum))

"""The leaves of a state as named plain arrays, in the form of checkpoints, and their checksums.

A name is the path of the leaf, such as `params.layer_0.kernel`, and a typed random key is saved as
its data. So a checkpoint does not depend on the classes that the state is made of, and parts of it
can be read alone. `checkpoints.py` saves them, and verifies the checksums.

The checksum of an array is computed on its devices and does not depend on its sharding: each
element is hashed together with its position in the whole array, and the hashes are added up in
uint32, where addition wraps around and is therefore exact in any order.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import permutations

Description = dict[str, dict[str, Any]]


def name_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of any pytree by the names of their paths, in order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have paths of the same name")
    return named


def to_arrays(state: PyTree) -> dict[str, jax.Array]:
    """The leaves of a state by name, with the data of typed random keys."""
    named = {name: jnp.asarray(leaf) for name, leaf in name_leaves(state).items()}
    return {n: jax.random.key_data(leaf) if _is_key(leaf) else leaf for n, leaf in named.items()}


def to_abstract_arrays(abstract_state: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, dtypes and shardings of `to_arrays` for such a state."""
    arrays = {}
    for name, leaf in name_leaves(abstract_state).items():
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        arrays[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return arrays


def from_arrays(
    arrays: dict[str, jax.Array], abstract_state: PyTree, description: Description
) -> PyTree:
    """The state that `to_arrays` was given, with its typed keys."""

    def restore(name: str) -> jax.Array:
        key_kind = description[name].get("key_kind")
        return jax.random.wrap_key_data(arrays[name], impl=key_kind) if key_kind else arrays[name]

    treedef = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(treedef, [restore(name) for name in name_leaves(abstract_state)])


def describe_leaves(state: PyTree) -> Description:
    """Shape, dtype and checksum of every leaf, for JSON."""
    checksums, description = compute_checksums(to_arrays(state)), {}
    for name, leaf in name_leaves(state).items():
        leaf = jnp.asarray(leaf)
        description[name] = {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "checksum": checksums[name],
        }
        if _is_key(leaf):
            description[name]["key_kind"] = str(jax.random.key_impl(leaf))
    return description


def check_compatible(description: Description, abstract_state: PyTree, *, partial: bool) -> None:
    """Refuses a saved state of another model.

    With `partial`, the abstract state may lack whole parts of the saved one. A part is named by the
    first word of a name, such as `params`, and is restored either whole or not at all.
    """
    saved = {name: f"{leaf['dtype']}{leaf['shape']}" for name, leaf in description.items()}
    expected = {
        name: f"{leaf.dtype}{list(leaf.shape)}"
        for name, leaf in name_leaves(abstract_state).items()
    }
    parts = {name.partition(".")[0] for name in expected}
    differences = [
        f"{name}: {saved.get(name, 'absent')} (saved) vs {expected.get(name, 'absent')} (expected)"
        for name in saved | expected
        if saved.get(name) != expected.get(name)
        and (name.partition(".")[0] in parts or not partial)
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise errors.UsageError(
            f"the checkpoint does not match the config: "
            f"{'; '.join(differences[:5])}{more}; use the config of that run or another workdir"
        )


def compute_checksums(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """A 64-bit checksum, in hexadecimal, of every array."""

    meshes = {name: getattr(array.sharding, "mesh", None) for name, array in arrays.items()}
    sums = {name: _jit_checksum(meshes[name])(array) for name, array in arrays.items()}
    sums = jax.device_get(sums)
    return {name: f"{first:08x}{second:08x}" for name, (first, second) in sums.items()}


@functools.cache
def _jit_checksum(mesh: Mesh | None) -> Callable[[jax.Array], jax.Array]:
    """The checksum, replicated over the mesh so that every process can read it."""
    return jax.jit(_checksum, out_shardings=mesh and partitioning.replicated(mesh))


def _checksum(x: jax.Array) -> jax.Array:
    """Two sums of hashes of (position, bits), one of them weighted by position.

    The hash is one to one for a given position and the weights are odd, so a single changed element
    is always detected. Other changes, such as swapped elements, are detected almost surely.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position = position * np.uint32(size) + index
    weight = permutations.mix_bits(position + np.uint32(0x9E3779B9))
    hashed = permutations.mix_bits(bits ^ weight)
    sums = [hashed.sum(dtype=jnp.uint32), (hashed * (weight | np.uint32(1))).sum(dtype=jnp.uint32)]
    return jnp.stack(sums)


def _is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

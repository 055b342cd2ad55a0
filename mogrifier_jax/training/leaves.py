"""The leaves of a state as named plain arrays, which is how `checkpoints.py` saves them.

A name is the path of the leaf, such as `params.layer_0.kernel`; a typed random key is saved as
its data. So a checkpoint does not depend on the classes that the state is made of, and a
part of it can be read alone.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mogrifier_jax import errors

Description = dict[str, dict[str, Any]]


def name_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by the names of their paths, in order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have paths of the same name")
    return named


def to_arrays(state: Any) -> dict[str, jax.Array]:
    """Leaves without typed keys."""
    named = {name: jnp.asarray(leaf) for name, leaf in name_leaves(state).items()}
    return {n: jax.random.key_data(leaf) if _is_key(leaf) else leaf for n, leaf in named.items()}


def to_abstract_arrays(abstract_state: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of what `to_arrays` gives of such a state."""
    arrays = {}
    for name, leaf in name_leaves(abstract_state).items():
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        arrays[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return arrays


def from_arrays(arrays: dict[str, jax.Array], abstract_state: Any, description: Description) -> Any:
    """The state again, keys included."""

    def restore(name: str) -> jax.Array:
        key_kind = description[name].get("key_kind")
        return jax.random.wrap_key_data(arrays[name], impl=key_kind) if key_kind else arrays[name]

    treedef = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(treedef, [restore(name) for name in name_leaves(abstract_state)])


def describe(state: Any, checksums: dict[str, str]) -> Description:
    """Shape, dtype and checksum of every leaf, for JSON."""
    description = {}
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


def compare(description: Description, abstract_state: Any, *, partial: bool) -> None:
    """Refuses a saved state of another model; `partial` allows it more leaves than wanted."""
    saved = {name: f"{leaf['dtype']}{leaf['shape']}" for name, leaf in description.items()}
    wanted = {
        name: f"{leaf.dtype}{list(leaf.shape)}"
        for name, leaf in name_leaves(abstract_state).items()
    }
    differences = [
        f"{name}: {saved.get(name, 'absent')} (saved) vs {wanted.get(name, 'absent')} (wanted)"
        for name in (wanted if partial else saved | wanted)
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise errors.UsageError(
            f"the checkpoint holds another state than the config asks for: "
            f"{'; '.join(differences[:5])}{more}; use the config of that run or another workdir"
        )


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

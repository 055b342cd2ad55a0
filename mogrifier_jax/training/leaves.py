"""The leaves of a state as named plain arrays, which is how `checkpoints.py` saves them.

A name is the path of the leaf, such as `params.layer_0.kernel`; a typed random key is saved as
its data. So a checkpoint does not depend on the classes that the state is made of, and a
part of it can be read alone.

Each leaf has a checksum, computed where it lives and the same however it is sharded: each element
is hashed together with its position in the whole array and the hashes are added up in uint32.
That addition wraps and so has no order: eight devices, one device and any layout give the same
sum.
"""

import contextlib
import glob
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import streams

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


def describe(state: Any) -> Description:
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


def compare(description: Description, abstract_state: Any, *, partial: bool) -> None:
    """Refuses a saved state of another model; `partial` allows that whole parts are not wanted.

    A part is what the first word of a name says, such as `params`: none is restored in pieces.
    """
    saved = {name: f"{leaf['dtype']}{leaf['shape']}" for name, leaf in description.items()}
    wanted = {
        name: f"{leaf.dtype}{list(leaf.shape)}"
        for name, leaf in name_leaves(abstract_state).items()
    }
    parts = {name.partition(".")[0] for name in wanted}
    differences = [
        f"{name}: {saved.get(name, 'absent')} (saved) vs {wanted.get(name, 'absent')} (wanted)"
        for name in saved | wanted
        if saved.get(name) != wanted.get(name) and (name.partition(".")[0] in parts or not partial)
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise errors.UsageError(
            f"the checkpoint holds another state than the config asks for: "
            f"{'; '.join(differences[:5])}{more}; use the config of that run or another workdir"
        )


class Folder(type(epath.Path("."))):  # type: ignore[misc]
    """A path for Orbax, which takes brackets in its own path for a pattern when it globs."""

    def glob(self, pattern: str) -> Iterator["Folder"]:
        """Files in this folder, whatever its name."""
        return map(self._new, glob.glob(os.path.join(glob.escape(str(self)), pattern)))


def read_arrays(
    folder: pathlib.Path, targets: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads saved arrays, onto the shardings of `targets`."""
    saved = {name: target for name, target in targets.items() if target.size}
    # The handler rather than the checkpointer: that one waits for the other processes at the
    # end, and would wait in vain for one that met damage.
    with _quiet_failure():
        arrays = ocp.PyTreeCheckpointHandler().restore(
            Folder(folder),
            args=ocp.args.PyTreeRestore(
                item=saved,
                restore_args=ocp.checkpoint_utils.construct_restore_args(saved),
                partial_restore=True,
            ),
        )
    for name, target in targets.items():
        if not target.size:
            arrays[name] = jnp.zeros(target.shape, target.dtype, device=target.sharding)
    return {name: arrays[name] for name in targets}


@contextlib.contextmanager
def _quiet_failure() -> Iterator[None]:
    """Keeps a failed read from printing a traceback for every other read that was under way.

    They come from other threads, or whenever the reads are freed, so the filter stays.
    """
    hook = sys.unraisablehook

    def filtered(failure) -> None:
        code = getattr(failure.object, "cr_code", None)
        reads = code is not None and "orbax" in code.co_filename
        if not reads and "Event loop is closed" not in str(failure.exc_value):
            hook(failure)

    sys.unraisablehook = filtered
    yield
    sys.unraisablehook = hook


def compute_checksums(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """A 64-bit checksum, in hexadecimal, of every array."""

    def compute(x: jax.Array) -> jax.Array:
        # One compilation per shape. Replicated, so that every process can read the sums.
        mesh: Any = getattr(x.sharding, "mesh", None)
        return jax.jit(_checksum, out_shardings=mesh and partitioning.replicated(mesh))(x)

    sums = jax.device_get({name: compute(array) for name, array in arrays.items()})
    return {name: f"{first:08x}{second:08x}" for name, (first, second) in sums.items()}


def _checksum(x: jax.Array) -> jax.Array:
    """Two sums of hashes of (position, bits), one of them weighted by position.

    The hash is one to one for a given position and the weights are odd: a single changed element
    is always found, and anything else, such as elements that changed places, all but surely.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position = position * np.uint32(size) + index
    weight = streams.mix(position + np.uint32(0x9E3779B9))
    hashed = streams.mix(bits ^ weight)
    sums = [hashed.sum(dtype=jnp.uint32), (hashed * (weight | np.uint32(1))).sum(dtype=jnp.uint32)]
    return jnp.stack(sums)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

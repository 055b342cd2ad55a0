"""The mesh ("data", "model") of the devices, and how arrays are sharded over it.

The axis "data" splits the batch, and "model" splits wide dimensions. `LOGICAL_AXES` names the axes
of a parameter by the end of its path, and `MESH_AXES` maps these names to axes of the mesh. Outside
this module only the axis "data" is mentioned.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mogrifier_jax import errors, hardware

# The logical axes of a parameter, by the end of its path.
LOGICAL_AXES = {
    "gates/input": ("features", "gates", "hidden"),
    "gates/recurrent": ("features", "gates", "hidden"),
    "gates/down": ("features", "rank"),
    "gates/up": ("rank", "gates", "hidden"),
    "gates/bias": ("gates", "hidden"),
    "multiplicative/input": ("features", "hidden"),
    "multiplicative/recurrent": ("features", "hidden"),
    "down": ("hidden", "rank"),
    "up": ("rank", "hidden"),
    "kernel": ("features", "hidden"),
    "embedding": ("vocab", "embed"),
    "softmax/kernel": ("embed", "vocab"),
    "softmax/bias": ("vocab",),
    "carry/c": ("batch", "hidden"),
    "carry/h": ("batch", "hidden"),
}
MESH_AXES = {"batch": "data", "hidden": "model", "vocab": "model"}


def make_mesh(data: int = -1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all devices; an axis of size -1 gets what the other axis leaves.

    If `use_cores` chose the number of devices, a mesh without -1 uses only as many as it needs.
    """
    if devices is None and -1 not in (data, model) and hardware.counted_cores():
        devices = jax.devices()[: max(1, data * model)]
    if devices is None:
        shape = mesh_shape(data, model, jax.device_count())
        grid = mesh_utils.create_device_mesh(shape, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices)
        grid = grid.reshape(mesh_shape(data, model, grid.size))
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def mesh_shape(data: int, model: int, count: int) -> tuple[int, int]:
    """The sizes (data, model) of a mesh of `count` devices."""
    sizes = {"data": data, "model": model}
    for name, size in sizes.items():
        if size == 0 or size < -1:
            raise errors.UsageError(
                f"mesh.{name} {size} is not a size: give 1 or more, or -1 for what is left"
            )
    if data == model == -1:
        raise errors.UsageError("mesh.data and mesh.model are both -1: set one of them")
    known = max(data, 1) * max(model, 1)
    if (-1 in (data, model) and count % known) or (-1 not in (data, model) and known != count):
        splits = ", ".join(f"{count // m} x {m}" for m in range(1, count + 1) if count % m == 0)
        raise errors.UsageError(
            f"mesh.data {data} x mesh.model {model} does not use all {count} devices: possible "
            f"(data x model) are {splits}"
        )
    rest = count // known
    return (rest if data == -1 else data), (rest if model == -1 else model)


def shrink(mesh: Mesh, size: int) -> Mesh:
    """The first `size` rows of a mesh along the axis "data"."""
    return Mesh(mesh.devices[:size], mesh.axis_names, axis_types=mesh.axis_types)


def check_batch(mesh: Mesh, *, batch_size: int, groups: int = 1) -> None:
    """Refuses a batch that the mesh and gradient accumulation cannot split evenly."""
    data = mesh.shape["data"]
    unit = data * groups
    if batch_size % unit:
        per_group = f" times optimizer.accumulate ({groups})" if groups > 1 else ""
        raise errors.UsageError(
            f"batch_size {batch_size} is not a multiple of the data axis ({data}){per_group}; "
            f"try {_nearest(batch_size, unit)}"
        )


def check_hidden_size(mesh: Mesh, hidden_size: int) -> None:
    """Refuses a hidden size that the mesh cannot split evenly."""
    model, devices = mesh.shape["model"], mesh.size
    if hidden_size % model:
        fitting = [m for m in range(1, model) if hidden_size % m == 0 and devices % m == 0]
        raise errors.UsageError(
            f"hidden_size {hidden_size} is not a multiple of the model axis ({model}); try "
            f"mesh.model {max(fitting)}, or model.hidden_size {_nearest(hidden_size, model)}"
        )


def _nearest(size: int, unit: int) -> str:
    """The multiples of `unit` around a size."""
    below, above = size // unit * unit, -(-size // unit) * unit
    return f"{below} or {above}" if below else str(above)


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """A NamedSharding for each leaf of a state or parameter tree, by its name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh)), tree
    )


def with_shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """The abstract tree with a sharding for each leaf."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(tree, mesh),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Copies a tree to every device of the mesh, if there is a mesh."""
    return tree if mesh is None else jax.device_put(tree, replicated(mesh))


def _spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    if "carry" in names:
        names = ["carry", names[-1]]
    for length in (2, 1):
        axes = LOGICAL_AXES.get("/".join(names[-length:]))
        if axes and len(axes) == len(shape):
            break
    else:
        return PartitionSpec()
    split = [MESH_AXES.get(axis) for axis in axes]
    # A vocabulary that the mesh does not divide is replicated. Other sizes that it does not divide
    # were refused by `check_hidden_size`.
    fits = [
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(split, shape, strict=True)
    ]
    return PartitionSpec(*fits)

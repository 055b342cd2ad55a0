"""Makes the types of a loop's carry agree on explicit meshes and inside `jax.shard_map`.

On such a mesh the type of an array says how it is sharded, and the type of a loop's carry must not
change. A carry of zeros is sharded over no axis, whereas the carry after a step is sharded as the
inputs are, so the types are made to agree before the loop. With automatic axes the compiler decides
about shardings, and nothing has to be done.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

Tree = TypeVar("Tree")
Result = TypeVar("Result")
# The mesh axes of each axis of an array.
Spec = tuple[str | tuple[str, ...] | None, ...]


def vary_alike(tree: Tree) -> Tree:
    """Lets all arrays vary over the manual axes that any of them varies over.

    Within `shard_map`, an array that is the same on all devices differs in type from one that
    varies. The transpose of this cast is the sum of gradients over the devices.
    """
    varying = [_varying(leaf) for leaf in jax.tree.leaves(tree)]
    axes = frozenset[str]().union(*varying)
    if all(axes == own for own in varying):
        return tree

    def vary(leaf: Array) -> Array:
        missing = tuple(sorted(axes - _varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree)


def _varying(leaf: Array) -> frozenset[str]:
    return frozenset(jax.typeof(leaf).manual_axis_type.varying)


def run_automatically(
    compute: Callable[..., Result],
    operands: tuple[Any, ...],
    specs: Callable[[Spec], Any],
    like: Array,
) -> Result:
    """Calls `compute(*operands)`, with explicit axes made automatic within it.

    Args:
      specs: makes the `PartitionSpec`s of the results from the spec of `like`.
      like: an operand, the inputs.
    """
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands)]
    meshes.append(jax.sharding.get_abstract_mesh())
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return compute(*operands)
    spec = jax.typeof(like).sharding.spec
    spec = (*spec, *[None] * (like.ndim - len(spec)))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs(spec),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    run = jax.sharding.auto_axes(compute, axes=mesh.explicit_axes, out_sharding=shardings)
    return run(*operands)


def shard_carry(carry: Tree, inputs: Array, batch_axes: Sequence[int]) -> Tree:
    """Shards a carry [*batch, ...] as the batch axes of the inputs are."""
    type_of_inputs = jax.typeof(inputs)
    if type_of_inputs.sharding.mesh.explicit_axes:
        spec = (*type_of_inputs.sharding.spec, *[None] * inputs.ndim)
        of_batch = PartitionSpec(*(spec[axis] for axis in batch_axes))
        carry = jax.tree.map(lambda leaf: jax.reshard(leaf, of_batch), carry)
    return vary_alike((carry, inputs))[0]

"""Puts streams and batches on the devices of a mesh, whose axis "data" splits the batch.

Every device has all token ids of a split. Only arrays with one entry per stripe are split.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Stream = TypeVar("Stream")
_PER_STRIPE = {"stripes", "bases", "begins", "ends"}  # Fields [B] of the streams.


def place_stream(
    stream_type: type[Stream], mesh: Mesh | None, **arrays: np.ndarray | np.generic | jax.Array
) -> Stream:
    """Makes a stream whose stripes are split over "data" and whose other arrays are replicated."""
    if mesh is None:
        return stream_type(**jax.tree.map(jnp.asarray, arrays))
    over_data = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(mesh, PartitionSpec())
    placed = {
        name: _make_global(array, over_data if name in _PER_STRIPE else replicated)
        for name, array in arrays.items()
    }
    return stream_type(**placed)


def split_batch(batch_at: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Splits the batches of batch_at(stream, index) over the mesh axis "data".

    Only examples that carry no state need this: stripes follow the sharding of their state.
    """
    if mesh is None or mesh.shape["data"] == 1:
        return batch_at
    over_data = NamedSharding(mesh, PartitionSpec("data"))
    return lambda stream, index: jax.lax.with_sharding_constraint(
        batch_at(stream, index), over_data
    )


def round_up_batch(batch_size: int, mesh: Mesh | None) -> int:
    """The batch size, rounded up to a multiple of the mesh axis "data"."""
    devices = mesh.shape["data"] if mesh else 1
    return -(-batch_size // devices) * devices


def _make_global(array: np.ndarray | np.generic | jax.Array, sharding: NamedSharding) -> jax.Array:
    """A global array from one that every process has whole, so that no process sends data."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _make_global(np.asarray(jax.random.key_data(array)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

"""Gathers arrays on the hosts and sends them out again, for files that only process 0 can see."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def gather(arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Each array whole on every host, also those that are sharded over hosts."""

    def whole(array: jax.Array) -> np.ndarray:
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    return {name: whole(array) for name, array in arrays.items()}


def distribute(
    arrays: Mapping[str, np.ndarray], targets: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The arrays of process 0, with the shardings of `targets`; other processes pass no arrays."""

    def place(whole: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(
            target.shape, target.sharding, lambda index: whole[index]
        )

    distributed: dict[str, jax.Array] = {}
    for name, target in targets.items():
        own = arrays[name] if arrays else np.zeros(target.shape, target.dtype)
        # As bytes, because a broadcast is a sum, which turns -0.0 into 0.0.
        flat = np.ascontiguousarray(own).reshape(-1).view(np.uint8)
        whole = np.asarray(multihost_utils.broadcast_one_to_all(flat))
        distributed[name] = place(whole.view(target.dtype).reshape(target.shape), target)
    return distributed


def broadcast(content: bytes) -> bytes:
    """The bytes of process 0, in all processes."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    own = content if jax.process_index() == 0 else bytes(size)
    return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8))).tobytes()

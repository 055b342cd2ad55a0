"""Gathers arrays on the hosts, sends them out again, and compares what the hosts have.

Files that only process 0 can see need the first two.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mogrifier_jax import errors


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


def check_same(values: Mapping[str, object]) -> None:
    """Refuses values that are not the same in all processes; raises in all or in none."""
    if jax.process_count() == 1:
        return
    own = {name: errors.show(value) for name, value in values.items()}
    first = json.loads(broadcast(json.dumps(own).encode()))
    names = sorted(name for name in own | first if own.get(name) != first.get(name))
    differ = np.flatnonzero(multihost_utils.process_allgather(np.array(bool(names))))
    if names:
        listing = ", ".join(f"{n} ({own.get(n)} instead of {first.get(n)})" for n in names[:5])
        raise errors.UsageError(
            f"process {jax.process_index()} differs from process 0 in {listing}; give all "
            "processes the same flags and the same files"
        )
    if len(differ):
        raise errors.UsageError(
            f"process {', '.join(map(str, differ))} has other flags or files than process 0, and "
            "says which; give all processes the same"
        )

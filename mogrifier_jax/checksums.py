"""Checksums of arrays, computed where they live and the same however they are sharded.

Each element is hashed together with its position in the whole array and the hashes are added up
in uint32. That addition wraps and so has no order: eight devices, one device and any layout
give the same sum. `checkpoints.py` saves them beside the arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np


def compute(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """A 64-bit checksum, in hexadecimal, of every array; they all live on one mesh."""
    if not arrays:
        return {}
    meshes = [a.sharding.mesh for a in arrays.values() if hasattr(a.sharding, "mesh")]
    # Replicated, so that every process can read the sums.
    spec = jax.sharding.PartitionSpec()
    replicated = jax.sharding.NamedSharding(meshes[0], spec) if meshes else None
    sums = jax.jit(_checksum_all, out_shardings=replicated)(list(arrays.values()))
    return {n: f"{a:08x}{b:08x}" for n, (a, b) in zip(arrays, np.asarray(sums), strict=True)}


def _checksum_all(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_checksum(array) for array in arrays])


def _checksum(x: jax.Array) -> jax.Array:
    """Two sums, with different salts, of the hashes of (position, bits).

    The hash is one to one for a given position: a single changed element is always found, and
    anything else, such as elements that changed places, all but surely.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position = position * np.uint32(size) + index
    hashes = [_mix(bits ^ _mix(position + np.uint32(salt))) for salt in (0x9E3779B9, 0x7F4A7C15)]
    return jnp.stack([jnp.sum(h, dtype=jnp.uint32) for h in hashes])


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: one to one, and each input bit moves about half the output."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

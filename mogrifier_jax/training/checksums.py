"""Checksums of arrays, computed where they live and the same however they are sharded.

Each element is hashed together with its position in the whole array and the hashes are added up
in uint32. That addition wraps and so has no order: eight devices, one device and any layout
give the same sum. `checkpoints.py` saves them beside the arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np


def compute(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """A 64-bit checksum, in hexadecimal, of every array."""
    sums = jax.device_get({name: _compute(array) for name, array in arrays.items()})
    return {name: f"{first:08x}{second:08x}" for name, (first, second) in sums.items()}


def _compute(x: jax.Array) -> jax.Array:
    # One compilation per shape. Replicated, so that every process can read the sums.
    if isinstance(x.sharding, jax.sharding.NamedSharding):
        replicated = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())
        return jax.jit(_checksum, out_shardings=replicated)(x)
    return jax.jit(_checksum)(x)


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
    weight = _mix(position + np.uint32(0x9E3779B9))
    hashed = _mix(bits ^ weight)
    return jnp.stack([_sum(hashed), _sum(hashed * (weight | np.uint32(1)))])


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: one to one, and each input bit moves about half the output."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

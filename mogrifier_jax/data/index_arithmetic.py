"""Exact division of a product that does not fit into 32 bits, for positions in long texts."""

import jax
import jax.numpy as jnp
import numpy as np


def divmod_product(
    index: jax.Array | int, factor: int, modulus: int
) -> tuple[jax.Array, jax.Array]:
    """divmod(index * factor, modulus) without the product, which may exceed 2^31.

    The index is split into four digits of eight bits, and the quotient and remainder of each digit
    come from tables. The quotient is uint32 and wraps around; the remainder is int32.
    """
    index = jnp.asarray(index, jnp.uint32)
    quotient = remainder = jnp.zeros_like(index)
    for shift in range(0, 32, 8):
        table = [divmod((digit << shift) * factor, modulus) for digit in range(256)]
        digits = (index >> shift) & 255
        quotient += jnp.asarray([q % 2**32 for q, _ in table], jnp.uint32)[digits]
        remainder += jnp.asarray([r for _, r in table], jnp.uint32)[digits]
        carry = remainder >= modulus
        remainder = jnp.where(carry, remainder - np.uint32(modulus), remainder)
        quotient += carry.astype(jnp.uint32)
    return quotient, remainder.astype(jnp.int32)

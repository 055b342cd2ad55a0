"""Shuffles the examples of every epoch by a permutation that is computed, not stored.

Letters: B batch, N examples, K epochs that meet in one batch, R rounds of the shuffle. Neither the
permutation nor a position in it is stored: the examples of a batch are a pure function of a key and
the index of the batch, so the index is all that a run has to save.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mogrifier_jax.data import index_arithmetic

NUM_ROUNDS = 96  # Of the shuffle: several times log2(N) for any N in use.


def shuffled_examples(
    key: jax.Array, index: jax.Array | int, batch_size: int, num_examples: int
) -> jax.Array:
    """The examples [B] of the batch at this index, which may span epochs.

    Every epoch has each of the N examples once, in an order that differs from epoch to epoch.
    """
    epoch, offset = index_arithmetic.divmod_product(index, batch_size, num_examples)
    steps = offset + jnp.arange(batch_size)
    num_epochs = (num_examples - 1 + batch_size - 1) // num_examples + 1
    epochs = epoch + jnp.arange(num_epochs, dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, epochs)
    return permute(keys, steps // num_examples, steps % num_examples, num_examples)


def permute(keys: jax.Array, which: jax.Array, x: jax.Array, size: int) -> jax.Array:
    """Maps each x [B] below `size` by the permutation of keys[which] (keys [K], which [B]).

    This is the swap-or-not shuffle (Hoang, Morris, Rogaway 2012). In each round x is either kept or
    exchanged with its mirror image c - x, as decided by one bit that both of them share. It works
    for any size without a sort, a table or a loop of unknown length.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, (2, NUM_ROUNDS)))(keys)  # [K, 2, R]
    centres = (bits[:, 0] % np.uint32(size)).astype(jnp.int32)
    salts = bits[:, 1]

    def swap_or_not(i: jax.Array, x: jax.Array) -> jax.Array:
        mirror = centres[which, i] - x
        mirror = jnp.where(mirror < 0, mirror + size, mirror)
        swap = mix_bits(jnp.maximum(x, mirror).astype(jnp.uint32) ^ salts[which, i]) >> 31
        return jnp.where(swap == 1, mirror, x)

    return jax.lax.fori_loop(0, NUM_ROUNDS, swap_or_not, x, unroll=4)


def mix_bits(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: a bijection in which an input bit affects all output bits."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

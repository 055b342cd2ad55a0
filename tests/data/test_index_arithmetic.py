"""Positions in a text whose product with the window does not fit into 32 bits."""

import jax
import numpy as np

from mogrifier_jax.data import index_arithmetic, streams


def test_positions_beyond_two_to_the_31_are_exact():
    rng = np.random.default_rng(0)
    divide = jax.jit(index_arithmetic.divmod_product, static_argnums=(1, 2))
    for factor, modulus in [(500, 90_000_001), (71, 5), (100_003, streams.MAX_TOKENS), (1, 1)]:
        indices = [0, 1, 2**31 - 1, *rng.integers(0, 2**31, 20).tolist()]
        quotients, remainders = divide(np.array(indices, np.int32), factor, modulus)
        expected = [divmod(i * factor, modulus) for i in indices]
        assert quotients.tolist() == [q % 2**32 for q, _ in expected]
        assert remainders.tolist() == [r for _, r in expected]
        if factor > 1:  # Control: the plain product overflows.
            assert remainders.tolist() != (np.int32(indices) * np.int32(factor) % modulus).tolist()

"""Permutations: every example once an epoch, in an order of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax.data import permutations
from tests import quick


def read_order(seed, num_examples, batch_size, num_batches):
    read = quick.jit_optimised(permutations.shuffled_examples, static_argnums=(2, 3))
    key = jax.random.key(seed)
    return np.concatenate([read(key, i, batch_size, num_examples) for i in range(num_batches)])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "batch_size"), [(1, 3), (2, 7), (37, 64), (1000, 7), (4099, 64)])
def test_every_epoch_has_every_example_once_across_batches(size, batch_size):
    num_epochs = 4
    order = read_order(0, size, batch_size, -(-num_epochs * size // batch_size))
    epochs = order[: num_epochs * size].reshape(num_epochs, size)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
    if size > 30:  # Controls: not in order, and another order each epoch and seed.
        other = read_order(1, size, batch_size, -(-size // batch_size))[:size]
        for a, b in [(epochs[0], np.arange(size)), (epochs[0], epochs[1]), (epochs[0], other)]:
            assert np.mean(a == b) < 0.2


@pytest.mark.slow
def test_the_order_looks_random():
    size = 1000
    epochs = read_order(3, size, size, 400).reshape(400, size)
    # How often an example comes in each tenth of an epoch: 40 of 400, deviation 6.
    tenths = np.stack(
        [np.bincount(np.argsort(e)[:50] // 100 * 50 + np.arange(50), minlength=500) for e in epochs]
    ).sum(axis=0)
    assert np.abs(tenths - 40).max() < 5 * 6
    # Neighbours are apart as often as chance has it: 1 pair an epoch is (n, n + 1).
    assert 0.7 < np.mean(np.sum(np.diff(epochs, axis=1) == 1, axis=1)) < 1.3
    assert np.abs(np.corrcoef(epochs[:40])[~np.eye(40, dtype=bool)]).max() < 5 / np.sqrt(size)


@pytest.mark.slow
def test_half_a_million_examples_are_a_permutation():
    keys = jax.random.key(0)[None]
    permute = quick.jit_optimised(permutations.permute, static_argnums=3)
    size = 500_000
    order = permute(keys, jnp.zeros(size, jnp.int32), jnp.arange(size), size)
    assert np.bincount(order, minlength=size).tolist() == [1] * size

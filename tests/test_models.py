"""The language model: lamb's numbers, dropout, chunked loss, introspection, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mogrifier_jax import errors, models
from tests import golden


def nats(model, params, *args, **kwargs):
    return model.apply({"params": params}, *args, method="nats", **kwargs)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", golden.CASES)
def test_lamb_reference(case, fast):
    model, params = golden.make(case, fast=fast)
    assert sum(p.size for p in jax.tree.leaves(params)) == golden.NUM_SCALARS[case]
    init = model.init(jax.random.key(0), *golden.batch(), method="nats")["params"]
    assert jax.tree.map(jnp.shape, init) == jax.tree.map(jnp.shape, params)
    inputs, targets = map(jnp.asarray, golden.batch())
    lengths = jnp.asarray(golden.LENGTHS)

    def loss(params, l2):
        values, carry = nats(model, params, inputs, targets, None, lengths, temperature=0.9)
        penalty = 0.5 * sum(jnp.square(p).sum() for p in jax.tree.leaves(params))
        return values.sum(1).mean() + l2 * penalty, (values, carry)

    plain, (values, carry) = loss(params, 0.0)
    (regularised, _), grads = jax.value_and_grad(loss, has_aux=True)(params, 0.01)
    sums = [float(a.sum()) for layer in carry for a in layer]
    np.testing.assert_allclose(values.T, golden.NATS[case], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, golden.FINAL_STATES[case], rtol=1e-5)
    found = [plain, regularised, optax.tree.norm(grads)]
    np.testing.assert_allclose(found, golden.LOSSES[case], rtol=1e-5)

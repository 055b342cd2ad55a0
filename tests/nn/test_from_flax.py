"""Flax's own cells converted to ours and back: the same numbers, and what has no counterpart."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mogrifier_jax
from mogrifier_jax import errors

from_flax = mogrifier_jax.from_flax
B, T, D, H = 3, 5, 4, 6
XS = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
NAMES = ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")


def make_params(cell):
    rng = np.random.default_rng(1)
    carry = cell.initialize_carry(jax.random.key(0), (B, D))
    shapes = jax.eval_shape(cell.init, jax.random.key(0), carry, XS[:, 0])["params"]
    return jax.tree.map(lambda leaf: 0.5 * rng.standard_normal(leaf.shape, np.float32), shapes)


def outputs(cell, params):
    return nn.RNN(cell).apply({"params": {"cell": params}}, XS)


def close(found, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_cell_computes_the_same(name):
    cell = getattr(nn, name)(H)
    params = make_params(cell)
    ours, converted = from_flax.convert(cell, params)
    close(outputs(ours, converted), outputs(cell, params))
    assert abs(outputs(ours.copy(dtype=jnp.bfloat16), converted) - outputs(cell, params)).max() > (
        1e-4
    )

    def loss(params, through):
        pair = from_flax.convert(cell, params) if through else (cell, params)
        return jnp.sin(outputs(*pair)).sum()

    gradient = jax.grad(loss)
    close(gradient(params, True), gradient(params, False), 1e-5)
    assert all(abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradient(params, True)))

    back, same = from_flax.to_flax(ours, converted)
    assert jax.tree.structure(same) == jax.tree.structure(params)
    close(same, params, 0)
    close(outputs(back, same), outputs(cell, params), 0 if name != "LSTMCell" else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_cell_of_nnx_computes_the_same(name):
    cell = getattr(nnx, name)(D, H, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal())
    ours = from_flax.convert(cell)
    expected = nnx.RNN(cell)(XS)
    close(nnx.RNN(ours)(XS), expected)
    assert abs(nnx.RNN(ours)(2 * XS) - expected).max() > 1e-2
    back = from_flax.to_flax(ours)
    close(nnx.RNN(back)(XS), expected)
    assert type(back) is type(cell) or name == "LSTMCell"


@pytest.mark.parametrize("name", NAMES)
def test_other_functions_are_kept(name):
    options = {"activation_fn": nn.relu}
    if name != "SimpleCell":
        options["gate_fn"] = nn.hard_sigmoid
    cell = getattr(nn, name)(H, **options)
    params = make_params(cell)
    ours, our_params = from_flax.convert(cell, params)
    carry = cell.initialize_carry(jax.random.key(0), XS[:, 0].shape)
    expected = cell.apply({"params": params}, carry, XS[:, 0])[1]
    close(ours.apply({"params": our_params}, carry, XS[:, 0])[1], expected)
    back, back_params = from_flax.to_flax(ours, our_params)
    close(back.apply({"params": back_params}, carry, XS[:, 0])[1], expected)
    plain = cell.clone(activation_fn=nn.tanh)
    assert abs(plain.apply({"params": params}, carry, XS[:, 0])[1] - expected).max() > 1e-3
    shell = getattr(nnx, name)(D, H, **options, rngs=nnx.Rngs(0))
    assert from_flax.convert(shell).spec.activation_fn is nn.relu
    assert from_flax.to_flax(from_flax.convert(shell)).activation_fn is nn.relu


def test_dtypes_are_kept():
    cell = nn.OptimizedLSTMCell(H, dtype=jnp.bfloat16)
    ours, params = from_flax.convert(cell, make_params(cell))
    assert ours.dtype == jnp.bfloat16 and ours.param_dtype == jnp.float32
    assert from_flax.to_flax(ours, params).cell.dtype == jnp.bfloat16
    gru = nn.GRUCell(H)
    assert from_flax.convert(gru, make_params(gru)).cell.dtype is None  # It promotes, as Flax's.


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: nn.MGUCell(H),
            r"MGUCell has no counterpart here; LSTMCell, OptimizedLSTMCell, GRUCell",
        ),
        (
            lambda: nn.SimpleCell(H, residual=True),
            r"SimpleCell with residual=True has no counterpart",
        ),
        (
            lambda: nnx.SimpleCell(D, H, residual=True, rngs=nnx.Rngs(0)),
            r"SimpleCell with residual=True has no counterpart",
        ),
        (lambda: nnx.Linear(D, H, rngs=nnx.Rngs(0)), r"Linear has no counterpart here; Flax's own"),
    ],
)
def test_a_cell_without_counterpart_is_refused(make, words):
    cell = make()
    with pytest.raises(errors.UsageError, match=words):
        from_flax.convert(cell, {})


def test_parameters_of_something_else_are_refused():
    params = make_params(nn.GRUCell(H))
    with pytest.raises(errors.UsageError, match=r"params has hn, hr, .*a LSTMCell are hf, hg"):
        from_flax.convert(nn.LSTMCell(H), params)
    from_flax.convert(nn.GRUCell(H), params)


@pytest.mark.parametrize(
    "name, options, words",
    [
        (
            "LSTMCell",
            {},
            r"no LSTMCell with cap_input_gate=True; only one with cap_input_gate=False can",
        ),
        (
            "MogrifierGRUCell",
            {"rounds": 2},
            r"no MogrifierGRUCell with rounds=2; only one with rounds=0",
        ),
        ("RewiredLSTMCell", {"rounds": 0}, r"Flax has no RewiredLSTMCell, so it cannot"),
        (
            "MLSTMCell",
            {"cap_input_gate": False},
            r"Flax has no MLSTMCell, so it cannot be converted",
        ),
        ("LSTMCell", {"cell_clip": 1.0}, r"with cap_input_gate=True, cell_clip=1.0; only one"),
        (
            "MogrifierElmanCell",
            {"rounds": 0, "scaling": True},
            r"with scaling=True; only one with scaling=False can be converted",
        ),
    ],
)
def test_what_flax_does_not_have_cannot_go_back(name, options, words):
    cell = getattr(mogrifier_jax, name)(H, **options)
    with pytest.raises(errors.UsageError, match=words):
        from_flax.to_flax(cell, {})


def test_a_bias_that_nnx_does_not_have_cannot_go_back():
    make = functools.partial(mogrifier_jax.nnx.MogrifierGRUCell, D, H, rounds=0)
    cell = make(rngs=nnx.Rngs(0))
    from_flax.to_flax(cell)
    cell.gates["candidate_bias"][...] = jnp.ones(H)
    with pytest.raises(errors.UsageError, match=r"nnx.GRUCell has no bias .* go back to nn.GRUCe"):
        from_flax.to_flax(cell)

"""Every cell against the float64 NumPy loops and, where there is one, Flax's own cell."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax.nn import layers, rnn
from tests import quick, reference

T, B, D, H = 3, 2, 3, 4


@pytest.fixture(autouse=True)
def float64(strict_dtypes):
    with jax.enable_x64(True):
        yield


def make(variant, **more):
    """The module and parameters for it, none of them zero or one."""
    name, options = reference.VARIANTS[variant]
    module = layers.CELLS[name](
        H, **{**options, **more}, dtype=jnp.float64, param_dtype=jnp.float64
    )

    def init(key):
        return module.init(key, module.initialize_carry(None, (B, D)), jnp.zeros((B, D)))

    shapes = jax.eval_shape(init, jax.random.key(0))["params"]
    rng = np.random.default_rng(0)
    return module, jax.tree.map(lambda leaf: 0.6 * rng.standard_normal(leaf.shape), shapes)


def problem(module):
    """Inputs, a start, a state mask, and weights that make outputs and end a scalar."""
    rng = np.random.default_rng(1)
    xs = rng.standard_normal((T, B, D))
    zero = functools.partial(module.initialize_carry, None, (B, D))
    like = jax.eval_shape(lambda: module.to_state(zero(), jnp.float64))
    carry = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), like)
    keep = rng.random((T, B, H)) < 0.7
    return xs, carry, keep, rng.standard_normal((T, B, H)), rng.standard_normal((B, H))


def run(module, params, carry, xs, keep):
    """The pure cell over time: (carry, ys, gates)."""
    weights = module.apply({"params": params}, D, method="weights")

    scale, ys, gates = jnp.asarray(1 / 0.7), [], []
    for x, keep_now in zip(xs, keep, strict=True):
        carry, gates_now = module.cell(weights, carry, jnp.asarray(x), keep_now, scale)
        ys.append(carry.h)
        gates.append(gates_now)
    return carry, ys, gates


def run_reference(variant, tree, keep, more=()):
    name, options = reference.VARIANTS[variant]
    options = {**options, **dict(more)}
    return reference.run(name, options, tree[0], tuple(tree[1]), tree[2], keep / 0.7)


def assert_close(found, expected, **tolerance):
    for a, b in zip(jax.tree.leaves(found), reference.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize("variant", quick.mostly_slow(reference.VARIANTS, "mogrifier low rank"))
def test_cell_and_gradients_equal_the_numpy_loops(variant):
    module, params = make(variant)
    xs, carry, keep, of_ys, of_end = problem(module)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(tree):
        end, ys, gates = run(module, *tree, keep)
        value = sum((y * of_y).sum() for y, of_y in zip(ys, of_ys, strict=True)) + sum(
            (leaf * of_end).sum() for leaf in end
        )
        return value, (end, ys, gates)

    def reference_loss(tree):
        end, ys, _ = run_reference(variant, tree, keep)
        return (ys * of_ys).sum() + sum((leaf * of_end).sum() for leaf in end)

    (_, (end, ys, gates)), grads = jax.device_get(loss((params, carry, xs)))
    tree = reference.to_numpy((params, carry, xs))
    expected_end, expected_ys, steps = run_reference(variant, tree, keep)
    assert_close((end, ys), (expected_end, list(expected_ys)), rtol=1e-11, atol=1e-13)
    for t, expected in enumerate(steps):
        assert_close(gates[t], expected, rtol=1e-11, atol=1e-13)
    # Differences over 1e-5 are good to about 1e-10 of the largest slope.
    assert_close(grads, reference.gradients(reference_loss, tree), rtol=1e-7, atol=1e-8)
    assert max(abs(leaf).min() for leaf in jax.tree.leaves(grads)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("variant", [name for name in reference.VARIANTS if "rewired" in name])
def test_the_rewired_lstm_over_a_sequence_equals_the_numpy_loops(variant, fast, masked):
    """Values and gradients of both paths, with and without state dropout."""
    module, params = make(variant)
    xs, carry, keep, of_ys, of_end = problem(module)
    keep = keep if masked else None
    scale = jnp.asarray(1 / 0.7) if masked else None
    layer = rnn.RNN(module, fast=fast)

    @quick.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(tree):
        variables = {"params": {"cell": tree[0]}}
        end, ys = layer.apply(variables, *tree[1:], keep, scale, method="window")
        return (ys * of_ys).sum() + sum((leaf * of_end).sum() for leaf in end), (end, ys)

    mask = np.full((T, B, H), 0.7) if keep is None else keep  # The reference divides by 0.7.

    def reference_loss(tree):
        end, ys, _ = run_reference(variant, tree, mask)
        return (ys * of_ys).sum() + sum((leaf * of_end).sum() for leaf in end)

    (_, found), grads = jax.device_get(loss((params, carry, xs)))
    tree = reference.to_numpy((params, carry, xs))
    end, ys, _ = run_reference(variant, tree, mask)
    assert_close(found, (end, [ys]), rtol=1e-11, atol=1e-13)
    assert_close(grads, reference.gradients(reference_loss, tree), rtol=1e-6, atol=1e-8)
    other = run_reference(variant, tree, 0.7 - mask)[1]
    assert abs(other - ys).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, change",
    [
        ("lstm", {"cap_input_gate": False}),
        ("lstm", {"cell_clip": 0.1}),
        ("mogrifier", {"rounds": 4}),
        ("mogrifier low rank", {"rounds": 0}),
        ("lstm scaled", {"scaling": False}),
        ("mogrifier rewired", {"rounds": 4}),
        ("rewired scaled", {"scaling": False}),
        ("mogrifier gru", {"rounds": 3}),
        ("mogrifier elman", {"rounds": 2}),
    ],
)
def test_the_comparison_sees_one_switch(variant, change):
    module, params = make(variant)
    xs, carry, keep, _, _ = problem(module)
    ys = np.stack(run(module, params, carry, xs, keep)[1])
    tree = reference.to_numpy((params, carry, xs))
    same, other = (run_reference(variant, tree, keep, more)[1] for more in ({}, change))
    np.testing.assert_allclose(ys, same, rtol=1e-11)
    assert abs(ys - other).max() > 1e-3


def test_state_dropout_is_seen_by_the_gates_alone():
    """The c that is carried on is untouched, and so is the h that a GRU keeps."""
    for variant in ("lstm", "gru"):
        module, params = make(variant)
        params["gates"]["bias"][(2, 1)[variant == "gru"]] = 50.0  # Forget and update gates open.
        xs, carry, _, _, _ = problem(module)
        none = np.zeros((T, B, H), bool)
        end, ys, _ = run(module, params, carry, xs, none)
        np.testing.assert_allclose(end[0], carry[0], rtol=1e-12)
        kept = run(module, params, carry, xs, ~none)[1]
        assert (abs(ys[0] - kept[0]).max() > 1e-2) == (variant == "lstm")  # o reads h; u is one.


def test_state_dropout_is_seen_by_the_output_gate_of_the_rewired_lstm():
    """Where h is read by nothing, the mask changes o and h by way of c, and c stays as it is."""
    module, params = make("rewired")
    params["gates"]["recurrent"][:] = 0
    params["forget"]["kernel"][H:] = 0
    xs, carry, keep, _, _ = problem(module)
    found = {}
    for name, mask in {"all": np.ones_like(keep), "some": keep}.items():
        _, _, steps = run(module, params, carry, xs[:1], mask[:1])
        found[name] = steps[0]
    np.testing.assert_array_equal(found["all"]["c"], found["some"]["c"])
    z = (found["some"]["c"] * (keep[0] / 0.7)) @ params["output"]["kernel"]
    expected = reference.sigmoid(np.asarray(z) + params["output"]["bias"])
    np.testing.assert_allclose(found["some"]["o"], expected, rtol=1e-12)
    assert abs(found["some"]["o"] - found["all"]["o"]).max() > 1e-2


def test_masks_of_ones_and_no_mask_are_the_same_for_the_rewired_lstm():
    module, params = make("mogrifier rewired")
    xs, carry, keep, _, _ = problem(module)
    weights = module.apply({"params": params}, D, method="weights")
    without, _ = module.cell(weights, carry, jnp.asarray(xs[0]))
    expected, _ = reference.step(*reference.VARIANTS["mogrifier rewired"], params, carry, xs[0])
    np.testing.assert_allclose(without.h, expected[1], rtol=1e-11)
    ones, _ = module.cell(weights, carry, jnp.asarray(xs[0]), keep[0] | True, jnp.asarray(1.0))
    np.testing.assert_array_equal(ones.h, without.h)
    some, _ = module.cell(weights, carry, jnp.asarray(xs[0]), keep[0], jnp.asarray(1.0))
    assert abs(some.h - without.h).max() > 1e-3


def test_gru_without_rounds_is_the_gru_of_flax():
    module, params = make("gru")
    gates = params["gates"]
    theirs = {}
    for index, name in enumerate(("r", "z", "n")):
        kernel, bias = gates["input"][:, index], gates["bias"][index]
        theirs[f"i{name}"] = {"kernel": kernel, "bias": bias}
        theirs[f"h{name}"] = {"kernel": gates["recurrent"][:, index]}
    theirs["hn"]["bias"] = gates["candidate_bias"]
    xs, (h,), _, _, _ = problem(module)
    expected, _ = nn.GRUCell(H).apply({"params": theirs}, h, xs[0])
    found, _ = module.apply({"params": params}, h, xs[0])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    gated, gated_params = make("mogrifier gru")
    gated_params = {**gated_params, "gates": gates}
    other, _ = gated.apply({"params": gated_params}, h, xs[0])
    assert abs(other - expected).max() > 1e-2


def test_uncapped_lstm_is_the_lstm_of_flax():
    module, params = make("lstm uncapped")
    gates = params["gates"]
    theirs = {}
    for index, name in enumerate("gofi"):  # j is called g there.
        theirs[f"i{name}"] = {"kernel": gates["input"][:, index]}
        hidden = {"kernel": gates["recurrent"][:, index], "bias": gates["bias"][index]}
        theirs[f"h{name}"] = hidden
    xs, carry, _, _, _ = problem(module)
    expected, _ = nn.LSTMCell(H).apply({"params": theirs}, tuple(carry), xs[0])
    found, _ = module.apply({"params": params}, carry, xs[0])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    capped, _ = make("lstm")[0].apply({"params": params}, carry, xs[0])
    assert abs(capped.c - expected[0]).max() > 1e-2


def test_mogrifier_lstm_of_no_rounds_is_the_lstm():
    lstm, params = make("lstm")
    xs, carry, _, _, _ = problem(lstm)
    expected = lstm.apply({"params": params}, carry, xs[0])
    none = make("mogrifier", rounds=0)[0].apply({"params": params}, carry, xs[0])
    np.testing.assert_array_equal(none[1], expected[1])
    mogrifier, gated = make("mogrifier")
    five = mogrifier.apply({"params": {**gated, **params}}, carry, xs[0])
    assert abs(five[1] - expected[1]).max() > 1e-2


def test_rank_of_zero_or_less_is_full_rank():
    shapes = {rank: jax.tree.map(np.shape, make("mogrifier", rank=rank)[1]) for rank in (0, -7, 2)}
    assert shapes[0] == shapes[-7] != shapes[2]
    assert shapes[-7]["round_1"] == {"kernel": (H, D), "bias": (D,)}
    assert shapes[2]["round_2"] == {"down": (D, 2), "up": (2, H), "bias": (H,)}


@pytest.mark.parametrize("variant", ["mogrifier low rank", "mogrifier no zigzag"])
def test_mogrifier_alone_does_what_the_cell_does(variant):
    cell, params = make(variant)
    lstm, _ = make("lstm")
    xs, carry, _, _, _ = problem(cell)
    rounds = {name: params[name] for name in params if name.startswith("round")}
    gated = {}
    for zigzag in (True, False):
        alone = layers.Mogrifier(cell.rounds, cell.rank, zigzag, dtype=jnp.float64)
        gated[zigzag] = alone.apply({"params": rounds}, xs[0], carry.h)
    x, h = gated[cell.zigzag]
    expected, _ = cell.apply({"params": params}, carry, xs[0])
    found, _ = lstm.apply({"params": {"gates": params["gates"]}}, carry._replace(h=h), x)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    x, h = gated[not cell.zigzag]
    other, _ = lstm.apply({"params": {"gates": params["gates"]}}, carry._replace(h=h), x)
    assert abs(other.h - expected.h).max() > 1e-3


def test_capped_gate_keeps_c_within_one():
    largest = {}
    for variant in ("lstm", "rewired", "lstm uncapped"):
        module, params = make(variant)
        params = jax.tree.map(lambda leaf: 5 * leaf, params)
        xs = np.random.default_rng(2).standard_normal((50, B, D))
        zero = module.initialize_carry(jax.random.key(0), (B, D))
        _, _, gates = run(module, params, zero, xs, np.ones((50, B, H), bool))
        largest[variant] = max(abs(step["c"]).max() for step in gates)
    assert max(largest["lstm"], largest["rewired"]) <= 1 < largest["lstm uncapped"]

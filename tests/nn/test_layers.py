"""The Flax modules: initial values, counts, and what bad input is told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, layers, models
from tests import quick, reference

T, B, D, H = 5, 3, 4, 6


@pytest.fixture(scope="module")
def case():
    """A cell, its parameters and inputs [B, T, D]."""
    cell = layers.MogrifierLSTMCell(H, rounds=3, rank=2)
    xs = np.random.default_rng(0).standard_normal((B, T, D), np.float32)
    init = quick.jit(lambda key: cell.init(key, D, method="weights")["params"])
    return cell, init(jax.random.key(0)), xs


def test_cells_take_any_number_of_batch_axes(case):
    cell, params, xs = case
    carry = cell.initialize_carry(None, (B, T, D))
    apply = quick.jit(functools.partial(cell.apply, {"params": params}))
    (c, h), _ = jax.device_get(apply(carry, xs))
    one, _ = apply(jax.tree.map(lambda leaf: leaf[1, 2], carry), xs[1, 2])
    np.testing.assert_allclose((c[1, 2], h[1, 2]), one, rtol=1e-5)
    assert abs(h[1, 2] - h[1, 3]).max() > 1e-3


# Initial values: name of the leaf, expected deviation, expected mean.

WIDE, TALL, RANK = 300, 500, 40
DEVIATION_OF_TRUNCATED = 0.87962566


def spread(leaf):
    leaf = np.asarray(leaf, np.float64)
    return leaf.std(), leaf.mean(), abs(leaf - leaf.mean()).max()


def initial(cell, input_size=WIDE):
    init = quick.jit(lambda key: cell.init(key, input_size, method="weights")["params"])
    return init(jax.random.key(1))


def assert_drawn(leaf, deviation, mean=0.0):
    """A normal cut at two of its own deviations, whose real deviation this is."""
    found, centre, largest = spread(leaf)
    error = 4 / np.sqrt(leaf.size)
    assert abs(found / deviation - 1) < error
    assert abs(centre - mean) < error * deviation
    bound = 2 * deviation / DEVIATION_OF_TRUNCATED
    assert 0.9 * bound < largest < bound * (1 + error)


@pytest.mark.slow
def test_cells_start_with_a_fan_for_each_block():
    params = initial(layers.MogrifierLSTMCell(TALL, rounds=2, init_factor=1.5))
    scale = np.sqrt(1.3 * 1.5) * DEVIATION_OF_TRUNCATED  # 1.0029 sqrt(factor): convention (i).
    assert_drawn(params["gates"]["input"], scale / np.sqrt(WIDE))
    assert_drawn(params["gates"]["recurrent"], scale / np.sqrt(TALL))
    for gate, mean in enumerate((0.0, 0.0, 1.0, 0.0)):  # j, o, f, i.
        assert_drawn(params["gates"]["bias"][gate], scale / np.sqrt(TALL), mean)
    assert_drawn(params["round_1"]["kernel"], scale / np.sqrt(TALL))
    assert_drawn(params["round_2"]["kernel"], scale / np.sqrt(WIDE))
    assert not np.any(params["round_1"]["bias"])
    with pytest.raises(AssertionError):  # The fan of both blocks together.
        assert_drawn(params["gates"]["input"], scale / np.sqrt(WIDE + TALL))
    with pytest.raises(AssertionError):
        assert_drawn(params["gates"]["bias"][2], scale / np.sqrt(TALL), 0.0)


@pytest.mark.slow
def test_gates_of_the_rewired_lstm_have_the_fan_of_a_state():
    params = initial(layers.RewiredLSTMCell(TALL, rounds=0))
    scale = np.sqrt(1.3) * DEVIATION_OF_TRUNCATED / np.sqrt(TALL)
    for name, mean in (("forget", 1.0), ("output", 0.0)):
        assert_drawn(params[name]["kernel"], scale)
        assert_drawn(params[name]["bias"], scale, mean)


@pytest.mark.parametrize("kind", [layers.LSTMCell, layers.RewiredLSTMCell])
def test_chrono_draws_the_logarithm_of_a_uniform_time(kind):
    def forget_biases(**options):
        params = initial(kind(TALL, rounds=0, **options), D)
        bias = params["forget"]["bias"] if "forget" in params else params["gates"]["bias"][2]
        others = [params["output"]["bias"]] if "forget" in params else params["gates"]["bias"][:2]
        return np.asarray(bias, np.float64), np.concatenate([np.ravel(b) for b in others])

    bias, others = forget_biases(chrono_max=50.0)
    times = np.exp(bias)
    assert times.min() >= 1 and 0.9 * 49 < times.max() <= 49 * (1 + 1e-6)
    error = 4 * 48 / np.sqrt(12 * len(times))  # Four deviations of the mean of a uniform.
    assert abs(times.mean() - 25) < error
    plain, same = forget_biases()
    np.testing.assert_array_equal(others, same)
    assert abs(np.exp(plain).mean() - 25) > error


def test_factors_start_so_that_their_product_has_three_fifths_of_the_variance():
    params = initial(layers.MogrifierLSTMCell(TALL, rounds=1, rank=RANK))["round_1"]
    each = DEVIATION_OF_TRUNCATED * (TALL * RANK) ** -0.25
    assert_drawn(params["down"], each)
    assert_drawn(params["up"], each)
    product = np.asarray(params["down"]) @ np.asarray(params["up"])
    np.testing.assert_allclose(product.var() * TALL, 0.599, rtol=0.03)


@pytest.mark.slow
def test_other_parameters_start_as_the_identity():
    params = initial(layers.LSTMCell(H, layer_norm=True, scaling=True), D)
    ones = [params["gates"]["input_gain"], params["gates"]["recurrent_gain"]]
    ones += [params["cell_norm"]["gain"], *params["scaling"].values()]
    assert all((leaf == 1).all() for leaf in ones)
    assert not params["cell_norm"]["shift"].any()
    means = params["gates"]["shift"].mean(1)
    assert abs(means - np.array([0, 0, 1, 0])).max() < 4 / H
    gru = initial(layers.MogrifierGRUCell(H, rounds=0), D)
    assert not gru["gates"]["candidate_bias"].any() and gru["gates"]["bias"].all()


@pytest.mark.parametrize("variant", reference.VARIANTS)
def test_formula_counts_every_cell_and_switch(variant):
    name, options = reference.VARIANTS[variant]
    cell = layers.CELLS[name](H, **{"rounds": 0, **options})
    shapes = jax.eval_shape(lambda key: cell.init(key, D, method="weights"), jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    options = {"rounds": 0, **options}
    model = models.LanguageModel(1, H, D, num_layers=1, cell=name, cell_options=options)
    assert models.count_parameters(model)["recurrent"] == count
    more = {**options, "scaling": not options.get("scaling", False)}
    assert models.count_parameters(model.copy(cell_options=more))["recurrent"] != count


# Bad input.


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: layers.MogrifierLSTMCell(H, rounds=-1), "rounds -1 must be at least 0"),
        (lambda: layers.MogrifierGRUCell(H, rounds=-2), "rounds -2 must be at least 0"),
        (lambda: layers.MogrifierLSTMCell(H, rounds=101), "rounds 101 must be at most 100"),
        (lambda: layers.MogrifierLSTMCell(H, rounds=2.0), "rounds 2.0 must be a whole number"),
        (lambda: layers.RewiredLSTMCell(H, chrono_max=1.5), "chrono_max 1.5 must be at least 2.0"),
        (lambda: layers.LSTMCell(0), "features 0 must be at least 1"),
        (lambda: layers.LSTMCell(H, cell_clip=0.0), "cell_clip 0.0 must be at least 1e-09"),
        (
            lambda: layers.LSTMCell(H, layer_norm=True, gate_rank=2),
            r"gate_rank 2 and layer_norm exclude each other; set one of them off",
        ),
    ],
)
def test_impossible_cells_are_refused(make, words):
    with pytest.raises(errors.UsageError, match=words):
        make()


@pytest.mark.parametrize("rank", [7, 100])
def test_rank_above_both_sizes_is_refused(rank):
    cell = layers.MogrifierLSTMCell(H, rounds=1, rank=rank)
    with pytest.raises(errors.UsageError, match=rf"rank {rank} is larger than both.*at most 6"):
        jax.eval_shape(lambda key: cell.init(key, D, method="weights"), jax.random.key(0))
    between = layers.MogrifierLSTMCell(H, rounds=1, rank=H)  # As in lamb.
    jax.eval_shape(lambda key: between.init(key, D, method="weights"), jax.random.key(0))


ZERO = cells.LSTMCarry(np.zeros((B, H), np.float32), np.zeros((B, H), np.float32))
XS = np.zeros((T, B, D), np.float32)


def test_misfitting_input_of_a_step_is_explained(case):
    cell, params, _ = case
    step = functools.partial(cell.apply, {"params": params})
    with pytest.raises(errors.UsageError, match=r"\(\) has no features; give x"):
        step(ZERO, jnp.zeros(()))
    with pytest.raises(errors.UsageError, match=r"x has 5 features and the parameters are for 4"):
        step(ZERO, jnp.zeros((B, 5)))
    with pytest.raises(errors.UsageError, match=r"carry .* does not fit .*make one with"):
        step(ZERO.h, XS[0])


def test_mogrifier_alone_refuses_what_it_cannot_gate():
    x, h = jnp.zeros((B, D)), jnp.zeros((B + 1, H))
    with pytest.raises(errors.UsageError, match=r"x \(3, 4\) and h \(4, 6\) must agree"):
        layers.Mogrifier(2).init(jax.random.key(0), x, h)
    with pytest.raises(errors.UsageError, match="rounds -3 must be"):
        layers.Mogrifier(-3).init(jax.random.key(0), x, h[:B])

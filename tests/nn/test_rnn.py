"""RNN in the place of nn.RNN: results, gradients, transformations, and what bad input is told."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mogrifier_jax import errors, partitioning
from mogrifier_jax.nn import cells, layers, rnn, stack
from tests import quick

T, B, D, H = 5, 3, 4, 6
LENGTHS = np.array([5, 0, 2])
OURS = {
    "lstm": functools.partial(layers.LSTMCell, H),
    "mogrifier_lstm": functools.partial(layers.MogrifierLSTMCell, H, rounds=3, rank=2),
    "mlstm": functools.partial(layers.MLSTMCell, H),
    "rewired": functools.partial(layers.RewiredLSTMCell, H, rounds=0),
    "gru": functools.partial(layers.MogrifierGRUCell, H, rounds=2),
    "elman": functools.partial(layers.MogrifierElmanCell, H, rounds=2),
}
FLAXS = {
    "nn.LSTMCell": functools.partial(nn.LSTMCell, H),
    "nn.OptimizedLSTMCell": functools.partial(nn.OptimizedLSTMCell, H),
    "nn.GRUCell": functools.partial(nn.GRUCell, H),
    "nn.SimpleCell": functools.partial(nn.SimpleCell, H),
}


def problem(cell, shape=(B, T, D), dtype=np.float32):
    """Parameters that are all drawn at random, and inputs."""
    rng = np.random.default_rng(0)
    xs = rng.standard_normal(shape).astype(dtype)
    shapes = jax.eval_shape(nn.RNN(cell).init, jax.random.key(0), xs)
    draw = lambda leaf: (0.5 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)  # noqa: E731
    return jax.tree.map(draw, shapes), xs


def solve(make, cell, variables, xs, carry=None, inside=None, **options):
    """All that an RNN returns, and the gradients of it; `inside` tells padding apart."""

    def value(tree):
        variables, xs, carry = tree
        end, ys = make(cell).apply(variables, xs, initial_carry=carry, return_carry=True, **options)
        seen = ys if inside is None else jnp.where(inside, ys, jnp.zeros_like(ys))
        weights = jnp.cos(jnp.arange(ys.size)).reshape(ys.shape)
        ends = sum(jnp.sin(leaf.astype(ys.dtype)).sum() for leaf in jax.tree.leaves(end))
        return (weights.astype(ys.dtype) * seen).sum() + ends, (end, ys)

    run = quick.jit(jax.value_and_grad(value, has_aux=True))
    return jax.device_get(run((variables, xs, carry)))


def assert_equal(found, expected, tolerance=2e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OURS, *FLAXS])
def test_it_is_the_rnn_of_flax_of_the_same_cell(name):
    """Values to float64 accuracy, of a sequence of length zero too; other inputs differ."""
    with jax.enable_x64(True):
        options = dict(dtype=jnp.float64, param_dtype=jnp.float64)
        cell = (OURS | FLAXS)[name](**options)
        variables, xs = problem(cell, dtype=np.float64)
        found, expected = (
            [solve(kind, cell, variables, xs, seq_lengths=lengths) for lengths in (None, LENGTHS)]
            for kind in (rnn.RNN, nn.RNN)
        )
        assert_equal(found, expected, 1e-12)
        with pytest.raises(AssertionError):
            assert_equal(found[0], expected[1], 1e-3)


ORDERS = [(False, False), (True, False), (True, True)]  # Reversed, and in the old order again.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "time_major", "lengths"),
    [
        ("mogrifier_lstm", True, LENGTHS),
        ("nn.OptimizedLSTMCell", False, None),
    ],
)
def test_order_layout_and_lengths_are_those_of_flax(name, time_major, lengths):
    cell = (OURS | FLAXS)[name]()
    variables, xs = problem(cell)
    if time_major:
        xs = xs.swapaxes(0, 1)
    carry = cell.initialize_carry(jax.random.key(0), (B, D))
    carry = jax.tree.map(lambda leaf: leaf + 0.3, carry)
    values = {}
    for reverse, keep_order in ORDERS:
        options = dict(
            time_major=time_major, reverse=reverse, keep_order=keep_order, seq_lengths=lengths
        )
        expected = solve(nn.RNN, cell, variables, xs, carry, **options)
        assert_equal(solve(rnn.RNN, cell, variables, xs, carry, **options), expected)
        values[reverse, keep_order] = expected[0][0]
    for keep_order in (False, True):
        assert abs(values[True, keep_order] - values[False, False]) > 1e-3


@pytest.mark.slow
def test_weights_are_those_of_flax():
    for make in (OURS["mogrifier_lstm"], FLAXS["nn.GRUCell"]):
        init = [quick.jit(kind(make()).init) for kind in (rnn.RNN, nn.RNN)]
        xs = jnp.ones((B, T, D))
        found, expected = (fn(jax.random.key(0), xs) for fn in init)
        assert_equal(found, expected, 0)
        other = init[0](jax.random.key(1), xs)
        assert abs(jax.tree.leaves(other)[-1] - jax.tree.leaves(expected)[-1]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "time_major"), [((), False), ((2, 1, 3), True)])
def test_any_number_of_batch_axes(batch, time_major):
    cell = OURS["mogrifier_lstm"]()
    variables, xs = problem(cell, (*batch, T, D))
    xs = np.moveaxis(xs, -2, 0) if time_major else xs
    expected = solve(nn.RNN, cell, variables, xs, time_major=time_major, reverse=True)
    assert_equal(solve(rnn.RNN, cell, variables, xs, time_major=time_major, reverse=True), expected)
    # Lengths too, which nn.RNN cannot do: row by row.
    lengths = np.random.default_rng(0).integers(1, T + 1, batch)
    options = dict(time_major=time_major, seq_lengths=lengths)
    (_, (end, _)), _ = solve(rnn.RNN, cell, variables, xs, **options)
    rows = (np.moveaxis(xs, 0, -2) if time_major else xs).reshape(-1, T, D)
    (_, (alone, _)), _ = solve(nn.RNN, cell, variables, rows, seq_lengths=lengths.reshape(-1))
    assert_equal(end, jax.tree.map(lambda leaf: leaf.reshape(*batch, H), alone))


@pytest.mark.parametrize("name", quick.mostly_slow(["lstm", "elman", "nn.LSTMCell"], "elman"))
def test_a_sequence_without_steps_returns_its_carry(name):
    cell = (OURS | FLAXS)[name]()
    variables, xs = problem(cell)
    carry = jax.tree.map(jnp.ones_like, cell.initialize_carry(jax.random.key(0), (B, D)))
    for lengths in (None, np.zeros(B, int)):
        run = functools.partial(rnn.RNN(cell).apply, initial_carry=carry, return_carry=True)
        end, ys = run(variables, xs[:, :0], seq_lengths=lengths)
        assert ys.shape == (B, 0, H)
        assert_equal(end, carry)
    assert abs(jax.tree.leaves(run(variables, xs)[0])[-1] - 1).max() > 1e-2


@pytest.mark.slow
def test_both_directions():
    make, lengths = OURS["mogrifier_lstm"], LENGTHS
    _, xs = problem(make())

    def both(kind):
        return lambda _: nn.Bidirectional(kind(make()), kind(make()))

    init = quick.jit(both(nn.RNN)(None).init)
    variables = init(jax.random.key(0), xs)
    assert_equal(quick.jit(both(rnn.RNN)(None).init)(jax.random.key(0), xs), variables, 0)
    expected = solve(both(nn.RNN), None, variables, xs, seq_lengths=lengths)
    assert_equal(solve(both(rnn.RNN), None, variables, xs, seq_lengths=lengths), expected)
    (_, (_, ys)), _ = expected
    assert abs(ys[..., :H] - ys[..., H:]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mogrifier_lstm", "nn.GRUCell"])
def test_bfloat16(name):
    """Close to nn.RNN in bfloat16, of the same dtypes; and not the same as float32."""
    make = (OURS | FLAXS)[name]
    variables, xs = problem(make())
    cell = make(dtype=jnp.bfloat16)
    (_, (end, ys)), grads = solve(rnn.RNN, cell, variables, xs)
    (_, (end_of_flax, ys_of_flax)), grads_of_flax = solve(nn.RNN, cell, variables, xs)
    wide = solve(nn.RNN, make(), variables, xs)
    assert jax.tree.map(lambda a: a.dtype, (end, ys, grads)) == jax.tree.map(
        lambda a: a.dtype, (end_of_flax, ys_of_flax, grads_of_flax)
    )
    # A bfloat16 has 8 bits: 0.4 % for each rounding, of which a step makes a few.
    exact = np.asarray(wide[0][1][1], np.float32)
    np.testing.assert_allclose(ys.astype(np.float32), exact, atol=0.03)
    assert abs(ys.astype(np.float32) - exact).max() > 1e-4
    for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(wide[1][0]), strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


@pytest.mark.slow
def test_under_transformations(several_backends):
    """vmap over weights, nn.remat, unroll, chunks and the plain path: all the same."""
    cell = OURS["mogrifier_lstm"]()
    variables, xs = problem(cell)
    expected = solve(rnn.RNN, cell, variables, xs, seq_lengths=LENGTHS)
    for options in (dict(unroll=2), dict(remat_window=2), dict(fast=False)):
        make = functools.partial(rnn.RNN, **options)
        assert_equal(solve(make, cell, variables, xs, seq_lengths=LENGTHS), expected)

    def square(variables, make):
        return jnp.square(make(cell).apply(variables, xs)).sum()

    plain, rematerialised = (
        quick.jit(jax.grad(functools.partial(square, make=make)))(variables)
        for make in (rnn.RNN, nn.remat(rnn.RNN))
    )
    assert_equal(rematerialised, {"params": {"cell": plain["params"]["cell"]}})

    def loss(variables):
        return jnp.sin(rnn.RNN(cell).apply(variables, xs)).sum()

    many = jax.tree.map(lambda leaf: np.stack([leaf, 0.5 * leaf]), variables)
    mapped = quick.jit(jax.vmap(jax.grad(loss)))(many)
    gradient = quick.jit(jax.grad(loss))
    for index, factor in enumerate((1.0, 0.5)):
        alone = gradient(jax.tree.map(lambda a, f=factor: f * a, variables))
        assert_equal(jax.tree.map(lambda a, i=index: a[i], mapped), alone, 1e-4)
        assert all(abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(alone))


@pytest.mark.slow
def test_a_sharded_batch_stays_sharded():
    cell = OURS["mogrifier_lstm"]()
    variables, xs = problem(cell, (8, T, D))
    lengths = np.array([5, 2, 3, 1, 5, 4, 3, 2])
    apply = quick.jit(functools.partial(rnn.RNN(cell, return_carry=True).apply))
    rows = NamedSharding(partitioning.make_mesh(), PartitionSpec("data"))
    end, ys = apply(variables, jax.device_put(xs, rows), seq_lengths=jax.device_put(lengths, rows))
    assert_equal((end, ys), apply(variables, xs, seq_lengths=lengths))
    assert ys.sharding.is_equivalent_to(rows, 3) and end.c.sharding.is_equivalent_to(rows, 2)
    assert abs(ys[0] - ys[1]).max() > 1e-2


EXPLAINED = (errors.UsageError, r"forward-mode .* set fast=False, or use reverse")
BY_JAX = (TypeError, "can't apply forward-mode autodiff")  # Raised when nothing of ours runs.
FORWARD = {
    "jvp": (EXPLAINED, lambda run, x: jax.jvp(run, (x,), (x,))[1]),
    "jacfwd": (EXPLAINED, lambda run, x: jax.jacfwd(run)(x)),
    "jit of jacfwd": (EXPLAINED, lambda run, x: jax.jit(jax.jacfwd(run))(x)),
    "jit of jvp": (BY_JAX, lambda run, x: jax.jit(lambda x: jax.jvp(run, (x,), (x,))[1])(x)),
    "jvp of jit": (BY_JAX, lambda run, x: jax.jvp(jax.jit(run), (x,), (x,))[1]),
    "linearize": (BY_JAX, lambda run, x: jax.linearize(run, x)[1](x)),
}


@pytest.mark.parametrize("name", quick.mostly_slow(FORWARD, "jvp", "jit of jvp"))
def test_forward_mode_ends_with_a_sentence(name, several_backends):
    cell = OURS["elman"]()
    variables, xs = problem(cell)
    (error, words), push = FORWARD[name]
    fast, plain = (functools.partial(rnn.RNN(cell, fast=f).apply, variables) for f in (True, False))
    with pytest.raises(error, match=words):
        push(fast, xs)
    assert abs(push(plain, xs)).max() > 1e-2


SECOND = {
    "jvp of grad": lambda run, x: jax.jvp(jax.grad(run), (x,), (x,))[1],
    "grad of grad": lambda run, x: jax.grad(lambda y: jnp.vdot(jax.grad(run)(y), x))(x),
    "hessian": lambda run, x: jax.hessian(run)(x),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat_window"),
    [("jvp of grad", None), ("grad of grad", None), ("grad of grad", 2), ("hessian", 2)],
)
def test_second_derivatives_pass(name, remat_window, several_backends):
    """Forward over reverse too: to float64 accuracy those of the plain path."""
    with jax.enable_x64(True):
        cell = OURS["mogrifier_lstm"](dtype=jnp.float64, param_dtype=jnp.float64)
        variables, xs = problem(cell, dtype=np.float64)

        def make_second(fast):
            module = rnn.RNN(cell, fast=fast, remat_window=remat_window)
            run = lambda x: jnp.sin(module.apply(variables, x)).sum()  # noqa: E731
            return quick.jit(functools.partial(SECOND[name], run))

        expected, second = make_second(fast=False)(xs), make_second(fast=True)
        assert_equal(second(xs), expected, 1e-12)
        assert abs(second(2 * xs) - expected).max() > 1e-3


# State dropout.


@pytest.mark.parametrize("name", quick.mostly_slow(["lstm", "nn.GRUCell"], "lstm"))
def test_state_dropout_is_one_mask_for_the_sequence(name):
    cell = (OURS | FLAXS)[name]()
    variables, xs = problem(cell)
    keys = {"dropout": jax.random.key(3)}
    run = functools.partial(rnn.RNN(cell, state_dropout=0.5).apply, variables, xs)
    dropped = run(deterministic=False, rngs=keys)
    assert_equal(run(deterministic=False, rngs=keys), dropped, 0)
    still = run(deterministic=True)
    assert_equal(still, rnn.RNN(cell).apply(variables, xs))
    np.testing.assert_allclose(dropped[:, 0], still[:, 0], atol=1e-5)  # The first h is zero.
    assert abs(dropped[:, 1] - still[:, 1]).max() > 1e-2
    plain = functools.partial(rnn.RNN(cell, state_dropout=0.5, fast=False).apply, variables, xs)
    assert_equal(plain(deterministic=False, rngs=keys), dropped)
    other = run(deterministic=False, rngs={"dropout": jax.random.key(4)})
    assert abs(other - dropped).max() > 1e-2


def test_zoneout_keeps_the_state_in_training_and_its_mean_otherwise():
    cell = layers.LSTMCell(H, zoneout=0.5)
    variables, xs = problem(cell, (2000, 1, D))
    start = cell.initialize_carry(None, (2000, D))
    start = jax.tree.map(lambda a: jnp.full_like(a, 2.0), start)
    run = functools.partial(solve, cell=cell, variables=variables, xs=xs, carry=start)
    drawn = dict(deterministic=False, rngs={"dropout": jax.random.key(1)})
    fast, plain = (run(functools.partial(rnn.RNN, fast=fast), **drawn) for fast in (True, False))
    assert_equal(fast, plain)
    mean = run(rnn.RNN, deterministic=True)
    for zoned, expected in zip(fast[0][1][0], mean[0][1][0], strict=True):
        kept = zoned == 2
        assert abs(kept.mean() - 0.5) < 0.02  # The others have another value.
        np.testing.assert_allclose(np.where(kept, expected, (2 + zoned) / 2), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="deterministic"):
        rnn.RNN(cell).apply(variables, xs)


def test_a_stack_draws_the_masks_of_its_cells_in_training_only():
    module = stack.Stack(1, H, cell="lstm", cell_options={"zoneout": 0.5})
    xs = np.random.default_rng(0).standard_normal((T, 300, D)).astype(np.float32)
    variables = module.init(jax.random.key(0), None, xs)
    still = module.apply(variables, None, xs)[1]
    assert not (still[1:] == still[:-1]).any()
    ys = module.apply(variables, None, xs, rngs={"dropout": jax.random.key(3)})[1]
    stays = ys[1:] == ys[:-1]
    np.testing.assert_allclose(stays.mean((1, 2)), 0.5, atol=0.06)
    assert not (stays[1:] == stays[:-1]).all()  # Each step has a mask of its own.


def test_state_dropout_is_the_mask_of_the_window():
    cell = OURS["lstm"]()
    variables, xs = problem(cell)
    keep = np.random.default_rng(1).random((B, H)) < 0.5
    carry = cell.initialize_carry(None, (B, D))
    run = functools.partial(rnn.RNN(cell).apply, variables, carry, xs.swapaxes(0, 1))
    drop = functools.partial(run, method="window", scale=jnp.asarray(2.0))
    _, ys = drop(keep=keep)
    step = functools.partial(cell.apply, {"params": variables["params"]["cell"]})
    for t in range(T):
        carry, y = step(carry, xs[:, t], keep=keep, scale=jnp.asarray(2.0))
        np.testing.assert_allclose(ys[t], y, atol=1e-5)
    assert abs(drop(keep=~keep)[1] - ys).max() > 1e-2


# What Flax tests of its own RNN, step by step.


@pytest.mark.parametrize("name", quick.mostly_slow(["nn.LSTMCell", "lstm"], "lstm"))
@pytest.mark.parametrize("reverse, keep_order", [*itertools.product([False, True], repeat=2)])
def test_steps_of_the_cell_by_hand(name, reverse, keep_order):
    cell = (OURS | FLAXS)[name]()
    variables, xs = problem(cell)
    lengths = np.array([4, 1, 5])
    run = rnn.RNN(cell, return_carry=True, reverse=reverse, keep_order=keep_order).apply
    end, ys = run(variables, xs, seq_lengths=lengths)
    step = functools.partial(cell.apply, {"params": variables["params"]["cell"]})
    for row, length in enumerate(lengths):
        order = [*reversed(range(length))] if reverse else [*range(length)]
        carry = cell.initialize_carry(jax.random.key(0), (D,))
        for place, t in enumerate(order):
            carry, y = step(carry, xs[row, t])
            np.testing.assert_allclose(ys[row, t if keep_order else place], y, atol=1e-5)
        for a, b in zip(end, carry, strict=True):
            np.testing.assert_allclose(a[row], b, atol=1e-5)
        if not reverse:  # Beyond the end it goes on, and says so nowhere: as in Flax.
            for t in range(length, T):
                carry, y = step(carry, xs[row, t])
                np.testing.assert_allclose(ys[row, t], y, atol=1e-5)


def test_cells_with_spatial_axes_run_as_in_flax():
    cell = nn.ConvLSTMCell(2, (3, 3))
    xs = np.random.default_rng(0).standard_normal((2, 3, 4, 4, 2)).astype(np.float32)
    variables = nn.RNN(cell).init(jax.random.key(0), xs)
    run = functools.partial(rnn.RNN(cell, return_carry=True).apply, variables)
    assert_equal(run(xs), nn.RNN(cell, return_carry=True).apply(variables, xs), 1e-6)
    assert abs(run(xs)[1][:, 0]).max() > 1e-3
    with pytest.raises(errors.UsageError, match=r"ConvLSTMCell has no counterpart.*step by step"):
        rnn.RNN(cell, remat_window=2).apply(variables, xs)


@pytest.mark.slow
def test_a_shared_cell_and_another_way_to_merge():
    xs = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
    cell = OURS["lstm"]()
    shared = nn.Bidirectional(rnn.RNN(cell), rnn.RNN(cell), merge_fn=jnp.add)
    ys, variables = shared.init_with_output(jax.random.key(0), xs)
    assert ys.shape == (B, T, H) and len(variables["params"]) == 1
    (there, back), _ = shared.apply(variables, xs, return_carry=True)
    assert there.h.shape == back.h.shape == (B, H) and abs(there.h - back.h).max() > 1e-3


# Bad input.

ZERO = cells.LSTMCarry(np.zeros((B, H), np.float32), np.zeros((B, H), np.float32))
XS = np.zeros((T, B, D), np.float32)
MASK = np.ones((B, H), bool)


def trace_window(carry, xs, **masks):
    cell = OURS["mogrifier_lstm"]()
    window = functools.partial(rnn.RNN(cell).apply, problem(cell)[0], method="window")
    return jax.eval_shape(window, carry, xs, **masks)


@pytest.mark.parametrize(
    "carry, xs, masks, words",
    [
        (ZERO, XS[0], {}, r"\(3, 4\) must be \[time, batch, features\]"),
        (ZERO, XS[..., :3], {}, r"x has 3 features and the parameters are for 4"),
        (ZERO, XS[:, :2], {}, r"carry .*\[3, 6\].* does not fit .*\(2, 4\).*\[2, 6\].*initialize_"),
        (cells.Carry(ZERO.h), XS, {}, r"carry Carry.* does not fit .*LSTMCarry"),
        (ZERO.h, XS, {}, r"carry float32.* does not fit .*LSTMCarry"),
        ((*ZERO, ZERO.h), XS, {}, r"carry .* does not fit .*LSTMCarry"),
        (ZERO._replace(c=ZERO.c[:, :5]), XS, {}, r"\[3, 5\].* does not fit .*\[3, 6\]"),
        (ZERO._replace(c=ZERO.c.astype(jnp.int32)), XS, {}, r"int32.*does not fit.*floats"),
        (ZERO, XS, {"keep": MASK}, r"keep and scale belong together"),
        (ZERO, XS, {"keep": MASK[:2], "scale": 1.0}, r"keep of shape \(2, 6\) must be \(5, 3, 6\)"),
        (ZERO, XS, {"valid": jnp.ones((B, T), bool)}, r"valid .*\(3, 5\) must be \[time, batch\]"),
    ],
)
def test_misfitting_input_of_a_window_is_explained(carry, xs, masks, words):
    with pytest.raises(errors.UsageError, match=words):
        trace_window(carry, xs, **masks)


def test_fitting_input_of_a_window_is_not_refused():
    masks = {"keep": MASK, "scale": jnp.ones(()), "valid": jnp.ones((T, B), bool)}
    assert trace_window(ZERO, XS, **masks)[1].shape == (T, B, H)


@pytest.mark.parametrize(
    "options, given, words",
    [
        ({"remat_window": 0}, {}, "remat_window 0 must be at least 1, or left out"),
        ({"unroll": 0}, {}, "unroll 0 must be at least 1"),
        ({"state_dropout": 1.0}, {"deterministic": False}, "dropout rate 1.0 must be at least 0"),
        ({}, {"inputs": XS[0, 0]}, r"inputs \(4,\) must be \[..., time, features\]"),
        ({}, {"seq_lengths": LENGTHS[:2]}, r"seq_lengths of shape \(2,\) .* here \(3,\)"),
        ({}, {"seq_lengths": np.ones(B)}, "seq_lengths .* must be an array of one integer for"),
        ({}, {"initial_carry": ZERO._replace(c=ZERO.c[:2])}, r"carry .*\[2, 6\].* does not fit"),
    ],
)
def test_misfitting_input_is_explained(options, given, words):
    cell = OURS["mogrifier_lstm"]()
    variables, xs = problem(cell)
    run = functools.partial(rnn.RNN(cell, **options).apply, variables)
    with pytest.raises(errors.UsageError, match=words):
        run(**{"inputs": xs, "rngs": {"dropout": jax.random.key(0)}, **given})


@pytest.mark.parametrize("lengths", [np.int8(3), LENGTHS[:2], LENGTHS[:, None]], ids=str)
@pytest.mark.parametrize("resets", [None, np.zeros((B, T), bool)], ids=["no resets", "resets"])
def test_lengths_that_do_not_fit_are_explained_for_cells_that_run_step_by_step(lengths, resets):
    run = rnn.RNN(nn.GRUCell(H), fast=False).init
    with pytest.raises(errors.UsageError, match=r"seq_lengths of shape .* here \(3,\)"):
        run(jax.random.key(0), np.ones((B, T, D)), seq_lengths=lengths, resets=resets)


INTEGERS = ("int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64")
LONG = 300  # Longer than int8 and uint8 can say.


def run_long(name, lengths, traced, **options):
    """Carry and outputs of a long sequence."""
    cell = (OURS | FLAXS)[name]()
    variables, xs = problem(cell, (B, LONG, D))
    run = functools.partial(rnn.RNN(cell).apply, variables, xs, return_carry=True)
    if not traced:
        return run(seq_lengths=lengths, **options)
    return jax.jit(lambda lengths: run(seq_lengths=lengths, **options))(lengths)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "name", quick.mostly_slow(["lstm", "elman", "nn.GRUCell", "nn.OptimizedLSTMCell"], "elman")
)
def test_lengths_of_every_integer_dtype_mean_what_int32_means(name, traced):
    with jax.enable_x64(True):
        lengths = np.array([100, 0, 7])
        for options in ({}, {"reverse": True, "keep_order": True}):
            expected = run_long(name, lengths.astype(np.int32), traced, **options)
            for dtype in INTEGERS:
                found = run_long(name, lengths.astype(dtype), traced, **options)
                assert_equal(found, expected, 0)
            other = run_long(name, lengths.astype(np.int32) + 1, traced, **options)
            assert abs(jax.tree.leaves(other[0])[-1] - jax.tree.leaves(expected[0])[-1]).max() > 0.1


def test_lengths_beyond_int32_do_not_wrap_around():
    whole = run_long("elman", np.full(B, LONG), traced=False)
    for lengths in (np.full(B, 2**32 + 3), np.full(B, 2**63 + 3, np.uint64)):
        assert_equal(run_long("elman", lengths, traced=False), whole, 0)


@pytest.mark.parametrize("lengths", [[-1, 2, 3], np.array([5, -128, 1], np.int8)])
def test_negative_lengths_are_refused(lengths):
    for name in ("elman", "nn.GRUCell"):
        with pytest.raises(errors.UsageError, match="must not be negative; give 0 for an empty"):
            run_long(name, lengths, traced=False)


class Doubled(layers.LSTMCell):
    """A cell whose output is not its state."""

    def __call__(self, carry, x):
        carry, h = super().__call__(carry, x)
        return carry, 2 * h


@pytest.mark.parametrize("resets", [None, np.arange(T) == 2])
def test_a_step_that_a_subclass_overrides_is_run(resets):
    cell = layers.LSTMCell(6)
    variables, xs = problem(cell)
    given = {} if resets is None else {"resets": np.broadcast_to(resets, xs.shape[:2])}
    want = rnn.RNN(cell).apply(variables, xs, **given)
    ys = rnn.RNN(Doubled(6)).apply(variables, xs, **given)
    np.testing.assert_allclose(ys, 2 * want, rtol=1e-5, atol=1e-6)

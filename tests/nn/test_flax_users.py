"""What users of Flax type, for every cell, linen and NNX: names, initialisers, carries, dtypes,
resets, export, meshes, and what misuse is told."""

import collections
import functools
import inspect
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mogrifier_jax
from mogrifier_jax import errors
from mogrifier_jax.nn import cells, rnn
from tests import quick

B, T, D, H = 4, 6, 5, 3
CELLS = {
    "LSTMCell": {},
    "MogrifierLSTMCell": dict(rounds=3, rank=2),
    "MLSTMCell": {},
    "RewiredLSTMCell": dict(rounds=2),
    "GRUCell": {},
    "MogrifierGRUCell": dict(rounds=2),
    "ElmanCell": {},
    "MogrifierElmanCell": dict(rounds=2),
}
GATED = ("LSTMCell", "MogrifierLSTMCell", "MLSTMCell", "RewiredLSTMCell")  # Their carry is (c, h).
FLAXS = ("OptimizedLSTMCell", "GRUCell", "SimpleCell")
EVERY = quick.mostly_slow([*CELLS, *(f"nn.{name}" for name in FLAXS)], "MogrifierGRUCell")
OURS = quick.mostly_slow(CELLS, "MogrifierGRUCell")
RNG = np.random.default_rng(0)
XS = RNG.standard_normal((B, T, D)).astype(np.float32)
RESETS = np.array(
    [[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0]], bool
)
LENGTHS = np.array([6, 3, 4, 5])


def make(name, **options):
    if name.startswith("nn."):
        return getattr(nn, name[3:])(H, **options)
    return getattr(mogrifier_jax, name)(H, **{**CELLS[name], **options})


def make_nnx(name, seed=0, **options):
    if name.startswith("nn."):
        return getattr(nnx, name[3:])(D, H, rngs=nnx.Rngs(seed), **options)
    kind = getattr(mogrifier_jax.nnx, name)
    return kind(D, H, rngs=nnx.Rngs(seed), **{**CELLS[name], **options})


def problem(cell, xs=XS):
    """Parameters that are all drawn at random, and a carry."""
    rng = np.random.default_rng(1)
    draw = lambda leaf: (0.5 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)  # noqa: E731
    module = rnn.RNN(cell, deterministic=True)
    shapes = jax.eval_shape(module.init, jax.random.key(0), xs)
    carry = jax.eval_shape(lambda: cell.initialize_carry(jax.random.key(0), (xs.shape[0], D)))
    return jax.tree.map(draw, shapes), jax.tree.map(draw, carry)


def assert_close(found, expected, tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def differentiate(run):
    """A function of (variables, carry, xs, ...) that returns all values and all gradients."""

    def value(variables, carry, xs, *args):
        end, ys = run(variables, carry, xs, *args)
        weights = jnp.cos(jnp.arange(ys.size)).reshape(ys.shape).astype(ys.dtype)
        ends = sum(jnp.sin(leaf).sum().astype(ys.dtype) for leaf in jax.tree.leaves(end))
        return (weights * ys).sum() + ends, (jax.tree.leaves(end), ys)

    return quick.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))


# Names, signatures, initialisers.


@pytest.mark.parametrize("name", CELLS)
def test_arguments_are_those_of_flax_in_its_order(name):
    """Of linen and NNX; the Elman cell alone has gate_fn where Flax's simple cell has none."""
    like = nn.SimpleCell if "Elman" in name else nn.GRUCell if "GRU" in name else nn.LSTMCell
    ours, theirs = (
        [n for n in inspect.signature(kind).parameters if n not in ("parent", "name", "residual")]
        for kind in (getattr(mogrifier_jax, name), like)
    )
    assert [n for n in ours if n in theirs] == theirs and ours[0] == "features"
    of_nnx = inspect.signature(getattr(mogrifier_jax.nnx, name)).parameters
    assert {*ours[1:], "in_features", "hidden_features", "rngs", "metadata"} == {*of_nnx}
    assert {"rounds", "rank"} <= {*of_nnx} and of_nnx["rounds"].default in (0, 5)
    for kind in (getattr(mogrifier_jax, name), getattr(mogrifier_jax.nnx, name)):
        assert "Args:" in kind.__doc__ and "rounds: rounds of mutual gating" in kind.__doc__


@pytest.mark.parametrize("name", CELLS)
def test_initialisers_draw_every_gate_as_in_flax(name):
    called = []

    def record(label, value):
        def init(key, shape, dtype):
            called.append((label, shape, dtype))
            return jnp.full(shape, value, dtype)

        return init

    given = dict(
        kernel_init=record("input", 2.0),
        recurrent_kernel_init=record("recurrent", 3.0),
        bias_init=record("bias", 4.0),
    )
    shapes = {"input": (D, H), "recurrent": (H, H), "bias": (H,)}
    for cell in (make(name, **given), make_nnx(name, **given)):
        called.clear()
        if isinstance(cell, nn.Module):
            params = cell.init(jax.random.key(0), D, method="weights")["params"]
        else:
            params = make_nnx(name, **given).params()
        for label, value in (("input", 2.0), ("recurrent", 3.0), ("bias", 4.0)):
            assert (params["gates"][label] == value).all()
            assert label in {found[0] for found in called}
        assert all(shape == shapes[label] for label, shape, _ in called)
        assert {dtype for *_, dtype in called} == {jnp.float32}
    default = make(name).init(jax.random.key(0), D, method="weights")["params"]
    assert jax.tree.map(jnp.shape, default) == jax.tree.map(jnp.shape, params)
    assert default["gates"]["input"].std() > 0.1
    orthogonal = make(name, recurrent_kernel_init=nn.initializers.orthogonal())
    kernel = orthogonal.init(jax.random.key(0), D, method="weights")["params"]["gates"]["recurrent"]
    for gate in range(kernel.shape[1]):
        np.testing.assert_allclose(kernel[:, gate] @ kernel[:, gate].T, np.eye(H), atol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_graphs_of_nnx_do_not_depend_on_initialisers_as_in_flax(name):
    init = jax.nn.initializers
    drawn = [make_nnx(name), *(make_nnx(name, kernel_init=init.normal(s)) for s in (0.5, 1.0))]
    drawn.append(make_nnx(name, recurrent_kernel_init=init.ones, bias_init=init.ones))
    graphs = [nnx.graphdef(cell) for cell in drawn]
    assert all(graph == graphs[0] for graph in graphs)
    values = [cell(cell.initialize_carry((B, D)), XS[:, 0])[1] for cell in drawn]
    assert all(abs(a - b).max() > 1e-3 for a, b in itertools.pairwise(values))
    assert nnx.graphdef(make_nnx(name, activation_fn=jnp.sin)) != graphs[0]


@pytest.mark.slow
def test_functions_of_gates_can_be_replaced_as_in_flax():
    functions = dict(gate_fn=nn.hard_sigmoid, activation_fn=jnp.sin)
    cell, theirs = make("GRUCell", **functions), nn.GRUCell(H, **functions)
    params, carry = problem(cell)
    gates = params["params"]["cell"]["gates"]
    of_flax = {f"h{n}": {"kernel": gates["recurrent"][:, i]} for i, n in enumerate("rzn")}
    for i, n in enumerate("rzn"):
        of_flax[f"i{n}"] = {"kernel": gates["input"][:, i], "bias": gates["bias"][i]}
    of_flax["hn"]["bias"] = gates["candidate_bias"]
    expected = nn.RNN(theirs).apply({"params": {"cell": of_flax}}, XS, initial_carry=carry)
    found = rnn.RNN(cell).apply(params, XS, initial_carry=carry)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(rnn.RNN(make("GRUCell")).apply(params, XS) - expected).max() > 1e-2


# Dtypes and carries.


@pytest.mark.parametrize("name", OURS)
def test_dtypes_are_promoted_as_in_flax(name):
    """By the default, None; a given dtype is that of the computation."""
    with jax.enable_x64(True):
        for inputs, params, dtype, expected in (
            ("float32", "float32", None, "float32"),
            ("bfloat16", "float32", None, "float32"),
            ("float64", "float32", None, "float64"),
            ("bfloat16", "bfloat16", None, "bfloat16"),
            ("int32", "float32", None, "float32"),
            ("float64", "float32", "bfloat16", "bfloat16"),
        ):
            cell = make(name, dtype=dtype, param_dtype=params)
            xs = jax.ShapeDtypeStruct((B, T, D), inputs)
            ys, variables = jax.eval_shape(rnn.RNN(cell).init_with_output, jax.random.key(0), xs)
            assert ys.dtype == expected
            assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(params)}
            run = functools.partial(rnn.RNN(cell).apply, return_carry=True)
            end, _ = jax.eval_shape(run, variables, xs)
            assert jax.tree.leaves(end)[-1].dtype == expected
            if name in GATED:
                assert end.c.dtype == np.promote_types(expected, np.float32)


@pytest.mark.parametrize("name", OURS)
def test_carries_are_those_of_flax(name):
    """A tuple (c, h), or an array; other float dtypes are cast. A Dense layer reads it."""
    cell, module = make(name), make_nnx(name)
    params = module.params()
    run = functools.partial(cell.apply, {"params": params})
    carry = cell.initialize_carry(jax.random.key(0), (B, D))
    assert isinstance(carry, tuple) == (name in GATED)
    assert jax.tree.structure(module.initialize_carry((B, D))) == jax.tree.structure(carry)
    ones = jax.tree.map(jnp.ones_like, carry)
    expected, y = run(ones, XS[:, 0])
    assert jax.tree.leaves(expected)[-1].shape == y.shape == (B, H)
    given = [jax.tree.map(lambda a: a.astype(jnp.bfloat16), ones)]
    if name in GATED:
        assert isinstance(expected, mogrifier_jax.LSTMCarry)
        given += [tuple(ones), [*ones]]
    else:
        given += [cells.Carry(ones)]  # As in states that were saved before.
    for other in given:
        assert_close(run(other, XS[:, 0]), (expected, y), 1e-6)
        assert_close(module(other, XS[:, 0]), (expected, y), 1e-6)
        end, _ = rnn.RNN(cell, return_carry=True).apply(
            {"params": {"cell": params}}, XS[:, :1], initial_carry=other
        )
        assert_close(end, expected, 1e-6)
    zero, _ = run(carry, XS[:, 0])
    assert abs(jax.tree.leaves(zero)[-1] - y).max() > 1e-3
    read = nn.Dense(2).init_with_output(jax.random.key(0), jax.tree.leaves(expected)[-1])[0]
    assert read.shape == (B, 2)
    for wrong in (ones[0] if name in GATED else (ones, ones), y[:2], "no carry"):
        with pytest.raises(errors.UsageError, match=r"make one with initialize_carry"):
            run(wrong, XS[:, 0])


@pytest.mark.parametrize("name", OURS)
def test_carry_init_draws_the_start(name):
    init = nn.initializers.normal(1.0)
    cell, like = make(name, carry_init=init), make(name)
    variables, _ = problem(cell)
    key = jax.random.key(3)
    start = cell.initialize_carry(key, (B, D))
    assert all(abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(start))
    if name in GATED:
        assert abs(start.c - start.h).max() > 0.1
    run = functools.partial(rnn.RNN(cell).apply, variables, XS)
    expected = rnn.RNN(like).apply(variables, XS, initial_carry=start)
    assert_close(run(init_key=key), expected, 1e-6)
    assert abs(run(init_key=jax.random.key(4)) - expected).max() > 1e-2
    # Resets go there, too.
    all_reset = rnn.RNN(like).apply(variables, XS, initial_carry=start, resets=RESETS | True)
    found = run(init_key=key, resets=RESETS | True)
    assert abs(found[:, 1] - all_reset[:, 1]).max() > 1e-3  # That one is reset to zeros.
    step = functools.partial(cell.apply, {"params": variables["params"]["cell"]}, start)
    for t in range(T):
        np.testing.assert_allclose(found[:, t], step(XS[:, t])[1], atol=1e-5)
    with pytest.raises(errors.UsageError, match="carry_init needs a key"):
        cell.initialize_carry(None, (B, D))
    module = make_nnx(name, carry_init=init)
    drawn = mogrifier_jax.nnx.RNN(module, rngs=nnx.Rngs(0))(XS)
    zeros = mogrifier_jax.nnx.RNN(make_nnx(name))(XS)
    assert abs(drawn - zeros).max() > 1e-2
    given = make_nnx(name).initialize_carry((B, D), nnx.Rngs(0), init)
    assert all(abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(given))


@pytest.mark.parametrize("name", quick.mostly_slow(GATED, "LSTMCell"))
def test_a_scan_may_repack_the_carry_as_a_plain_tuple(name):
    """As agents do: the carry comes back as `initialize_carry` made it, whose type must not change.

    A scan must start from that carry, too, and not from a plain tuple.
    """
    cell, module = make(name), make_nnx(name)
    step = functools.partial(cell.apply, {"params": module.params()})
    start = cell.initialize_carry(jax.random.key(0), (B, D))
    for run in (step, module):
        end, _ = jax.lax.scan(lambda carry, x, run=run: run((*carry,), x), start, XS.swapaxes(0, 1))
        assert isinstance(end, mogrifier_jax.LSTMCarry)
        with pytest.raises(TypeError, match="carry"):
            jax.lax.scan(run, (*start,), XS.swapaxes(0, 1))


# Resets.


class ScannedRNN(nn.Module):
    """The class that agents contain: a scan over [T, B, ...] that starts anew where it must."""

    cell: nn.Module

    @nn.compact
    def __call__(self, carry, xs, resets):
        def step(cell, carry, inputs):
            x, reset = inputs
            fresh = cell.initialize_carry(jax.random.key(0), x.shape)
            carry = jax.tree.map(
                lambda new, old: jnp.where(reset[:, None], new.astype(old.dtype), old), fresh, carry
            )
            return cell(carry, x)

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return scan(self.cell, carry, (xs, resets))


def scanned(cell):
    def run(variables, carry, xs, resets):
        xs, resets = jnp.swapaxes(xs, 0, 1), jnp.swapaxes(resets, 0, 1)
        end, ys = ScannedRNN(cell).apply(variables, carry, xs, resets)
        return end, jnp.swapaxes(ys, 0, 1)

    return run


def resetting(cell, fast=True, **options):
    def run(variables, carry, xs, resets, **given):
        module = rnn.RNN(cell, return_carry=True, fast=fast, **options)
        return module.apply(variables, xs, initial_carry=carry, resets=resets, **given)

    return run


def resetting_nnx(name, **options):
    """As `resetting`, with the NNX cell of this name, which takes the parameters of linen."""
    graph, params, rest = nnx.split(make_nnx(name), nnx.Param, ...)

    def run(variables, carry, xs, resets, **given):
        state = jax.tree.map(lambda leaf: leaf, params)
        nnx.replace_by_pure_dict(state, variables["params"]["cell"])
        module = mogrifier_jax.nnx.RNN(nnx.merge(graph, state, rest), return_carry=True, **options)
        return module(xs, initial_carry=carry, resets=resets, **given)

    return run


@pytest.mark.parametrize("name", EVERY)
def test_resets_are_those_of_a_scan_that_starts_anew(name):
    """Values and all gradients, in float64 and float32; without resets it is another result."""
    with jax.enable_x64(True):
        for dtype, tolerance in ((np.float64, 1e-11), (np.float32, 2e-6)):
            cell = make(name, dtype=dtype, param_dtype=dtype)
            xs = XS.astype(dtype)
            variables, carry = problem(cell, xs)
            expected = differentiate(scanned(cell))(variables, carry, xs, RESETS)
            ways = [resetting(cell), resetting(cell, fast=False), resetting(cell, remat_window=4)]
            for run in ways if dtype == np.float64 else ways[:1]:
                assert_close(differentiate(run)(variables, carry, xs, RESETS), expected, tolerance)
    others = differentiate(resetting(cell))(variables, carry, xs, ~RESETS)
    assert abs(others[0][0] - expected[0][0]) > 1e-2
    # No gradient crosses: the carry of the first row is reset before it is read.
    for leaf in jax.tree.leaves(expected[1][1]):
        assert not leaf[0].any() and abs(leaf[1]).max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_resets_in_nnx_are_those_of_linen(name):
    module = make_nnx(name)
    if name.startswith("nn."):
        ours = mogrifier_jax.from_flax.convert(module)
    else:
        ours = module
    variables = {"params": {"cell": ours.params()}}
    carry = jax.tree.map(jnp.ones_like, ours.spec.initialize_carry(None, (B, D)))
    expected = resetting(ours.spec)(variables, carry, XS, RESETS)
    for fast in (True, False):
        run = mogrifier_jax.nnx.RNN(module, return_carry=True, fast=fast)
        end, ys = run(XS, initial_carry=tuple(carry) if name in GATED else carry, resets=RESETS)
        assert_close((jax.tree.leaves(end), ys), (jax.tree.leaves(expected[0]), expected[1]), 2e-6)
    assert abs(run(XS, initial_carry=carry)[1] - ys).max() > 1e-2


@pytest.mark.parametrize("name", quick.mostly_slow(CELLS, "GRUCell"))
def test_gradients_of_nnx_are_those_of_linen(name):
    """With resets, lengths, reverse order, time in front, chunks and several batch axes."""
    cell = make(name)
    variables, carry = problem(cell)
    given = dict(seq_lengths=LENGTHS, reverse=True, keep_order=True)
    linen = functools.partial(resetting(cell), **given)
    expected = differentiate(linen)(variables, carry, XS, RESETS)
    nested = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (carry, XS, RESETS))
    given["seq_lengths"] = LENGTHS.reshape(2, 2)

    def run(variables, carry, xs, resets):
        xs, resets = jnp.moveaxis(xs, 2, 0), jnp.moveaxis(resets, 2, 0)
        end, ys = resetting_nnx(name, remat_window=4, time_major=True)(
            variables, carry, xs, resets, **given
        )
        return end, jnp.moveaxis(ys, 0, 2)

    (value, results), grads = differentiate(run)(variables, *nested)
    flat = lambda tree: jax.tree.map(lambda a: a.reshape(B, *a.shape[2:]), tree)  # noqa: E731
    assert_close(((value, flat(results)), (grads[0], *flat(grads[1:]))), expected, 2e-6)
    assert abs(differentiate(run)(variables, *nested[:2], ~nested[2])[0][0] - value) > 1e-2


@pytest.mark.parametrize("name", EVERY)
def test_resets_go_with_lengths_order_layout_and_batch_axes(name):
    """Row by row, without padding and in the order of processing, it is the scan above."""
    cell = make(name)
    variables, carry = problem(cell)
    rows = {}
    for reverse in (False, True):
        for row, length in enumerate(LENGTHS):
            order = slice(None, None, -1) if reverse else slice(None)
            x, reset = (a[row : row + 1, :length][:, order] for a in (XS, RESETS))
            start = jax.tree.map(lambda a, row=row: a[row : row + 1], carry)
            end, ys = scanned(cell)(variables, start, x, reset)
            rows[reverse, row] = jax.tree.leaves(end), ys[:, order]
    run = resetting(cell)
    for reverse in (False, True):
        given = dict(seq_lengths=LENGTHS, reverse=reverse, keep_order=True)
        end, ys = run(variables, carry, XS, RESETS, **given)
        major = run(
            variables, carry, XS.swapaxes(0, 1), RESETS.T.astype(np.int8), time_major=True, **given
        )
        assert_close(major, (end, ys.swapaxes(0, 1)), 1e-6)
        if not name.startswith("nn."):
            more = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (carry, XS, RESETS))
            given["seq_lengths"] = LENGTHS.reshape(2, 2)
            batches = run(variables, *more, **given)
            assert_close(jax.tree.map(lambda a: a.reshape(B, *a.shape[2:]), batches), (end, ys), 0)
        for row, length in enumerate(LENGTHS):
            of_end, of_ys = rows[reverse, row]
            np.testing.assert_allclose(ys[row, :length], of_ys[0], atol=2e-6)
            for a, b in zip(jax.tree.leaves(end), of_end, strict=True):
                np.testing.assert_allclose(a[row], b[0], atol=2e-6)
    assert abs(run(variables, carry, XS, RESETS)[1] - ys).max() > 1e-2


@pytest.mark.parametrize("name", OURS)
def test_gradients_of_resets_in_bfloat16(name):
    """They are those of float32, up to the rounding of what is multiplied."""
    cell = make(name, dtype=jnp.bfloat16)
    variables, carry = problem(cell)
    found = differentiate(resetting(cell))(variables, carry, XS, RESETS)
    wide = differentiate(resetting(make(name)))(variables, carry, XS, RESETS)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wide[1]), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b, atol=0.05 * max(1, abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_resets_go_with_masks_and_bfloat16(name):
    cell = make(name, dtype=jnp.bfloat16, **({"zoneout": 0.3} if name == "LSTMCell" else {}))
    variables, carry = problem(cell)
    given = dict(deterministic=False, rngs={"dropout": jax.random.key(0)})
    fast, plain = (
        resetting(cell, fast=fast, state_dropout=0.2)(variables, carry, XS, RESETS, **given)
        for fast in (True, False)
    )
    assert fast[1].dtype == jnp.bfloat16
    assert_close(*(jax.tree.map(lambda a: a.astype(np.float32), r) for r in (fast, plain)), 0.02)
    # From a reset on, nothing depends on what was before.
    changed = resetting(cell, state_dropout=0.2)(
        variables, jax.tree.map(lambda a: a + 1, carry), XS, RESETS, **given
    )
    assert (changed[1][0] == fast[1][0]).all() and (changed[1][1] != fast[1][1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", ["MogrifierLSTMCell", "GRUCell"])
def test_resets_by_the_plans_of_other_platforms(name, platform):
    with jax.enable_x64(True):
        cell = make(name, dtype=np.float64, param_dtype=np.float64)
        variables, carry = problem(cell, XS.astype(np.float64))
        for rows in (B, 1):  # The plan of TPUs gives a single row eight.
            some = jax.tree.map(lambda a, n=rows: a[:n], (carry, XS.astype(np.float64), RESETS))
            expected = differentiate(resetting(cell, fast=False))(variables, *some)
            run = quick.on_platform(platform, resetting(cell))
            assert_close(differentiate(run)(variables, *some), expected, 1e-11)


def test_resets_of_a_cell_that_runs_step_by_step():
    cell = nn.SimpleCell(H, residual=True)
    variables, carry = problem(cell)
    expected = scanned(cell)(variables, carry, XS, RESETS)
    assert_close(resetting(cell)(variables, carry, XS, RESETS), expected, 1e-6)
    module = nnx.SimpleCell(D, H, residual=True, rngs=nnx.Rngs(0))
    run = mogrifier_jax.nnx.RNN(module, return_carry=True)
    end, ys = run(XS, resets=RESETS, seq_lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        state = jnp.zeros(H)
        for t in range(length):
            state = jnp.zeros(H) if RESETS[row, t] else state
            state, y = module(state, XS[row, t])
            np.testing.assert_allclose(ys[row, t], y, atol=1e-5)
        np.testing.assert_allclose(end[row], state, atol=1e-5)


@pytest.mark.parametrize("resets", [RESETS.T, RESETS[:, :3], 1, "all"])
def test_resets_of_another_shape_are_refused(resets):
    for cell in (make("GRUCell"), nn.GRUCell(H), nn.SimpleCell(H, residual=True)):
        with pytest.raises(errors.UsageError, match=r"resets .* must be an array .* \(4, 6\)"):
            rnn.RNN(cell).init(jax.random.key(0), XS, resets=resets)


# Export.


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_export_with_symbolic_batch_and_time(name, fast, several_backends):
    cell = make(name)
    variables, _ = problem(cell)
    options = dict(remat_window=2, unroll=2) if name == "MogrifierLSTMCell" else {}
    module = rnn.RNN(cell, return_carry=True, fast=fast, **options)

    def run(variables, carry, xs, lengths, resets):
        given = dict(seq_lengths=lengths, reverse=True, keep_order=True)
        return module.apply(variables, xs, initial_carry=carry, resets=resets, **given)

    batch, steps = export.symbolic_shape("batch, steps")
    abstract = jax.ShapeDtypeStruct
    carry = jax.eval_shape(lambda: cell.initialize_carry(jax.random.key(0), (1, D)))
    exported = export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"))(
        jax.tree.map(lambda a: abstract(a.shape, a.dtype), variables),
        jax.tree.map(lambda a: abstract((batch, H), a.dtype), carry),
        abstract((batch, steps, D), np.float32),
        abstract((batch,), np.int32),
        abstract((batch, steps), np.bool_),
    )
    rng = np.random.default_rng(2)
    for rows, length in ((2, 1), (3, 4), (1, 7)):
        args = (
            jax.tree.map(lambda a, n=rows: jnp.full((n, H), 0.5, a.dtype), carry),
            rng.standard_normal((rows, length, D)).astype(np.float32),
            rng.integers(1, length + 1, rows).astype(np.int32),
            rng.random((rows, length)) < 0.4,
        )
        expected = run(variables, *args)
        assert_close(exported.call(variables, *args), expected, 1e-5)
        assert expected[1].shape == (rows, length, H) and abs(expected[1]).max() > 1e-3


@pytest.mark.parametrize("name", quick.mostly_slow(CELLS, "GRUCell"))
def test_export_of_nnx_with_symbolic_batch_and_time(name, several_backends):
    cell = make(name)
    variables, _ = problem(cell)
    run = functools.partial(resetting_nnx(name), reverse=True, keep_order=True)
    batch, steps = export.symbolic_shape("batch, steps")
    abstract = jax.ShapeDtypeStruct
    carry = jax.eval_shape(lambda: cell.initialize_carry(jax.random.key(0), (1, D)))
    program = export.export(
        jax.jit(lambda *args, lengths: run(variables, *args, seq_lengths=lengths)),
        platforms=("cpu", "cuda", "tpu"),
    )(
        jax.tree.map(lambda a: abstract((batch, H), a.dtype), carry),
        abstract((batch, steps, D), np.float32),
        abstract((batch, steps), np.bool_),
        lengths=abstract((batch,), np.int32),
    )
    linen = functools.partial(resetting(cell), reverse=True, keep_order=True)
    for rows, length in ((4, 6), (1, 1), (2, 3)):
        carry = jax.tree.map(lambda a, n=rows: jnp.full((n, H), 0.5, a.dtype), carry)
        args = (carry, XS[:rows, :length], RESETS[:rows, :length])
        lengths = np.minimum(LENGTHS[:rows], length).astype(np.int32)
        expected = linen(variables, *args, seq_lengths=lengths)
        assert_close(program.call(*args, lengths=lengths), expected, 1e-5)
        assert expected[1].shape == (rows, length, H) and abs(expected[1]).max() > 1e-3


@pytest.mark.parametrize("make_cell", [make, make_nnx], ids=["linen", "nnx"])
def test_exported_programs_with_the_carry_of_an_lstm_can_be_serialised(make_cell):
    cell = make_cell("LSTMCell")
    if make_cell is make:
        run = functools.partial(rnn.RNN(cell, return_carry=True).apply, problem(cell)[0])
    else:
        run = mogrifier_jax.nnx.RNN(cell, return_carry=True)
    carry = mogrifier_jax.LSTMCarry(np.ones((B, H), np.float32), np.ones((B, H), np.float32))
    step = lambda carry, xs: run(xs, initial_carry=carry)  # noqa: E731
    program = export.deserialize(export.export(jax.jit(step))(carry, XS).serialize())
    found = program.call(carry, XS)
    assert_close(found, step(carry, XS), 1e-6)
    assert isinstance(found[0], mogrifier_jax.LSTMCarry)


def test_the_carry_of_an_lstm_is_registered_for_serialisation():
    register = functools.partial(export.register_namedtuple_serialization, serialized_name="Other")
    with pytest.raises(ValueError, match="Duplicate serialization registration"):
        register(mogrifier_jax.LSTMCarry)
    unknown = collections.namedtuple("unknown", "c h")
    assert register(unknown) is unknown


# Meshes.


def on_explicit_mesh(run, variables, carry, xs, resets):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        whole = jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))
        return differentiate(run)(whole, *jax.device_put((carry, xs, resets), rows))


def on_manual_mesh(run, variables, carry, xs, resets):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def on_each(variables, carry, xs, resets, weights):
        def value(variables, carry, xs):
            end, ys = run(variables, carry, xs, resets)
            ends = sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(end))
            return jax.lax.psum((weights * ys).sum() + ends, "data"), (jax.tree.leaves(end), ys)

        return jax.value_and_grad(value, (0, 1, 2), has_aux=True)(variables, carry, xs)

    specs = dict(
        in_specs=(whole, rows, rows, rows, rows),
        out_specs=((whole, (rows, rows)), (whole, rows, rows)),
    )
    weights = np.cos(np.arange(B * T * H, dtype=np.float32)).reshape(B, T, H)
    sharded = jax.shard_map(on_each, mesh=mesh, check_vma=True, **specs)
    return quick.jit(sharded)(variables, carry, xs, resets, weights)


@pytest.mark.parametrize("on_mesh", [on_explicit_mesh, on_manual_mesh])
@pytest.mark.parametrize("name", EVERY)
def test_explicit_and_manual_meshes(name, on_mesh):
    cell = make(name)
    variables, carry = problem(cell)
    if name == "LSTMCell":
        cell = make(name, layer_norm=True)
        variables, carry = problem(cell)
    expected = differentiate(resetting(cell))(variables, carry, XS, RESETS)
    found = on_mesh(resetting(cell), variables, carry, XS, RESETS)
    assert_close(found, expected, 1e-5)
    shards = {shard.data.shape for shard in found[0][1][1].addressable_shards}
    assert shards == {(1, T, H)}
    # Without a carry, which is then made within; and the plain scan.
    for options in ({}, {"fast": False}):
        run = resetting(cell, **options)
        start = jax.tree.map(jnp.zeros_like, carry)
        expected = differentiate(run)(variables, start, XS, RESETS)[0]
        found = on_mesh(
            lambda v, c, xs, resets, run=run: run(v, None, xs, resets),
            *(variables, start, XS, RESETS),
        )
        assert_close(found[0], expected, 1e-5)


@pytest.mark.parametrize("on_mesh", [on_explicit_mesh, on_manual_mesh])
@pytest.mark.parametrize("name", quick.mostly_slow(CELLS, "GRUCell"))
def test_nnx_on_explicit_and_manual_meshes(name, on_mesh):
    cell = make(name)
    variables, carry = problem(cell)
    expected = differentiate(resetting(cell))(variables, carry, XS, RESETS)
    found = on_mesh(resetting_nnx(name), variables, carry, XS, RESETS)
    assert_close(found, expected, 1e-5)
    assert {shard.data.shape for shard in found[0][1][1].addressable_shards} == {(1, T, H)}


# What misuse is told.


@pytest.mark.parametrize(
    "make_it, words",
    [
        (lambda: mogrifier_jax.LSTMCell(hidden_size=8), "the size is called features, as in Flax"),
        (lambda: mogrifier_jax.GRUCell(8, round=3), "GRUCell has no argument round; it has"),
        (
            lambda: mogrifier_jax.nnx.LSTMCell(4, hidden_size=8, rngs=nnx.Rngs(0)),
            "the size is called hidden_features, as in Flax",
        ),
        (
            lambda: mogrifier_jax.nnx.LSTMCell(4, 8, round=3, rngs=nnx.Rngs(0)),
            "LSTMCell has no argument round; it has in_features",
        ),
        (
            lambda: rnn.RNN(mogrifier_jax.LSTMCell).init(jax.random.key(0), XS),
            r"was given the class LSTMCell; make one, as in RNN\(LSTMCell\(64\)\)",
        ),
        (
            lambda: mogrifier_jax.nnx.RNN(mogrifier_jax.nnx.LSTMCell),
            r"as in RNN\(LSTMCell\(32, 64, rngs=rngs\)\)",
        ),
        (
            lambda: rnn.RNN(make_nnx("LSTMCell")).init(jax.random.key(0), XS),
            "LSTMCell is a cell of nnx, .* use mogrifier_jax.nnx.RNN",
        ),
        (
            lambda: rnn.RNN(nnx.GRUCell(D, H, rngs=nnx.Rngs(0))).init(jax.random.key(0), XS),
            "GRUCell is a cell of nnx, .* use mogrifier_jax.nnx.RNN",
        ),
        (
            lambda: mogrifier_jax.nnx.RNN(make("LSTMCell")),
            "LSTMCell is a cell of linen, .* use mogrifier_jax.RNN",
        ),
        (
            lambda: mogrifier_jax.nnx.RNN(nn.GRUCell(H)),
            "GRUCell is a cell of linen, .* use mogrifier_jax.RNN",
        ),
        (
            lambda: mogrifier_jax.nnx.RNN(make_nnx("LSTMCell"), state_dropout=0.5)(XS),
            r"state_dropout 0.5 needs random numbers: .*rngs=nnx.Rngs\(dropout=0\)",
        ),
        (
            lambda: make("ElmanCell", gate_fn=nn.relu),
            "ElmanCell has no gates that gate_fn could change",
        ),
        (
            lambda: make("LSTMCell", bias_init=nn.initializers.ones, forget_bias=2.0),
            "forget_bias 2.0 and bias_init exclude each other",
        ),
        (
            lambda: make("LSTMCell", kernel_init=nn.initializers.ones, gate_rank=2),
            "gate_rank 2 makes the gate matrix a product",
        ),
        (lambda: make("LSTMCell", kernel_init="ones"), "kernel_init 'ones' must be a function"),
        (lambda: make("LSTMCell", dtype="int32"), "dtype 'int32' must be a dtype of floating"),
        (lambda: make("LSTMCell", param_dtype=None), "param_dtype None must be a dtype of float"),
    ],
)
def test_misuse_is_told_in_a_sentence(make_it, words):
    with pytest.raises(errors.UsageError, match=words):
        make_it()


def test_the_advice_about_dropout_works():
    for options, given in (
        (dict(rngs=nnx.Rngs(dropout=0)), {}),
        ({}, dict(rngs=nnx.Rngs(dropout=0))),
        (dict(deterministic=True), {}),
    ):
        run = mogrifier_jax.nnx.RNN(make_nnx("GRUCell"), state_dropout=0.5, **options)
        assert run(XS, **given).shape == (B, T, H)

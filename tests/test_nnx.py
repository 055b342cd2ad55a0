"""The NNX cells and RNN against those of linen and of Flax, and NNX's own machinery."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mogrifier_jax
from mogrifier_jax import errors, partitioning
from tests import quick

T, B, D, H = 5, 3, 4, 6
LENGTHS = np.array([5, 0, 2])
XS = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
CELLS = {
    "LSTMCell": dict(layer_norm=True),
    "MogrifierLSTMCell": dict(rounds=3, rank=2),
    "MLSTMCell": dict(scaling=True),
    "RewiredLSTMCell": dict(rounds=3, rank=2),
    "MogrifierGRUCell": dict(rounds=2),
    "MogrifierElmanCell": dict(rounds=2, gate_bias=False),
}
FLAXS = ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")


def make_cell(name="MogrifierLSTMCell", seed=0, **more):
    options = {"rngs": nnx.Rngs(seed), **CELLS[name], **more}
    return getattr(mogrifier_jax.nnx, name)(D, H, **options)


def assert_equal(found, expected, tolerance=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def solve(rnn, xs=XS, **given):
    """What an RNN returns, and the gradients in its cell's parameters and in the inputs."""

    def value(rnn, xs):
        end, ys = rnn(xs, return_carry=True, **given)
        weights = jnp.cos(jnp.arange(ys.size)).reshape(ys.shape).astype(ys.dtype)
        ends = sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(end))
        return (weights * ys).sum() + ends, (end, ys)

    gradient = nnx.value_and_grad(value, argnums=(0, 1), has_aux=True)
    (_, found), (d_rnn, d_xs) = gradient(rnn, xs)
    return found, nnx.to_pure_dict(d_rnn)["cell"], d_xs


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_linen_and_nnx_are_equal_weight_by_weight_and_gradient_by_gradient(name):
    cell = make_cell(name)
    linen = getattr(mogrifier_jax, name)(H, **CELLS[name])
    key = nnx.Rngs(0).params()
    expected = linen.init(key, D, method="weights")["params"]
    assert_equal(nnx.to_pure_dict(nnx.state(cell)), expected, 0)
    other = nnx.to_pure_dict(nnx.state(make_cell(name, seed=1)))
    assert abs(other["gates"]["input"] - expected["gates"]["input"]).max() > 1e-2

    def value(params, xs):
        rnn = mogrifier_jax.RNN(linen, return_carry=True)
        end, ys = rnn.apply({"params": {"cell": params}}, xs, seq_lengths=LENGTHS)
        weights = jnp.cos(jnp.arange(ys.size)).reshape(ys.shape)
        ends = sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(end))
        return (weights * ys).sum() + ends, (end, ys)

    grads, found = jax.grad(value, (0, 1), has_aux=True)(expected, XS)
    assert_equal(solve(mogrifier_jax.nnx.RNN(cell), seq_lengths=LENGTHS), (found, *grads), 1e-6)
    assert all(abs(leaf).max() > 1e-5 for leaf in jax.tree.leaves(grads))


def flax_or_ours(name):
    if name in CELLS:
        return make_cell(name)
    cell = getattr(nnx, name.removeprefix("nnx."))(D, H, rngs=nnx.Rngs(0))
    state = jax.tree.map(lambda leaf: leaf + 0.1, nnx.state(cell, nnx.Param))
    nnx.update(cell, state)  # No bias is zero.
    return cell


ALL = [*CELLS, *(f"nnx.{name}" for name in FLAXS)]


GIVEN = {
    "lengths": dict(seq_lengths=LENGTHS, reverse=True, keep_order=True),
    "nothing": dict(),
    "time_major": dict(time_major=True, reverse=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, "lengths") for name in ALL),
        *(("MogrifierLSTMCell", given) for given in ("nothing", "time_major")),
        *(("nnx.OptimizedLSTMCell", given) for given in ("nothing", "time_major")),
    ],
)
def test_it_is_the_rnn_of_nnx_of_the_same_cell(name, given):
    given = GIVEN[given]
    expected = solve(nnx.RNN(flax_or_ours(name)), **given)
    assert_equal(solve(mogrifier_jax.nnx.RNN(flax_or_ours(name)), **given), expected)
    other = solve(mogrifier_jax.nnx.RNN(flax_or_ours(name)), XS**2, **given)
    assert abs(other[0][1] - expected[0][1]).max() > 1e-2


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        xs = XS.astype(np.float64)
        options = dict(dtype=jnp.float64, param_dtype=jnp.float64)
        expected = solve(nnx.RNN(make_cell(**options)), xs, seq_lengths=LENGTHS)
        found = solve(mogrifier_jax.nnx.RNN(make_cell(**options)), xs, seq_lengths=LENGTHS)
        assert_equal(found, expected, 1e-12)


@pytest.mark.slow
def test_both_directions():
    def both(kind):
        return nnx.Bidirectional(kind(make_cell()), kind(make_cell(seed=1)))

    expected = both(nnx.RNN)(XS, seq_lengths=LENGTHS)
    found = nnx.jit(both(mogrifier_jax.nnx.RNN))(XS, seq_lengths=LENGTHS)
    assert_equal(found, expected)
    assert abs(found[..., :H] - found[..., H:]).max() > 1e-2


def test_signature_is_that_of_nnx():
    for ours, theirs in (
        (mogrifier_jax.nnx.RNN.__init__, nnx.RNN.__init__),
        (mogrifier_jax.nnx.RNN.__call__, nnx.RNN.__call__),
        (mogrifier_jax.RNN.__call__, nn.RNN.__call__),
    ):
        found, expected = (inspect.signature(f).parameters for f in (ours, theirs))
        assert expected.keys() <= found.keys()
        for name, parameter in expected.items():
            assert (found[name].kind, found[name].default) == (parameter.kind, parameter.default)
    assert "fast" not in inspect.signature(nnx.RNN.__init__).parameters
    # Of the class too, where NNX shows (*args, **kwargs).
    shown = inspect.signature(mogrifier_jax.nnx.RNN).parameters
    assert [*shown] == [*inspect.signature(mogrifier_jax.nnx.RNN.__init__).parameters][1:]

    class Narrow(mogrifier_jax.nnx.RNN):
        def __init__(self, size):
            super().__init__(mogrifier_jax.nnx.LSTMCell(size, size, rngs=nnx.Rngs(0)))

    assert [*inspect.signature(Narrow).parameters] == ["size"]


@pytest.mark.slow
def test_an_optimizer_trains_it():
    """nnx.jit, nnx.grad, nnx.Optimizer; without steps nothing moves."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            cell = mogrifier_jax.nnx.MogrifierLSTMCell(D, H, rounds=2, rngs=rngs)
            self.rnn = mogrifier_jax.nnx.RNN(cell, state_dropout=0.1, rngs=rngs)
            self.head = nnx.Linear(H, 1, rngs=rngs)

        def __call__(self, xs):
            return self.head(self.rnn(xs))[..., 0]

    model = Model(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
    targets = np.cumsum(XS[..., 0], 1)

    def loss_of(model):
        return jnp.square(model(XS) - targets).mean()

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    model.eval()
    before = loss_of(model)
    assert loss_of(model) == before
    model.train()
    for _ in range(30):
        step(model, optimizer)
    model.eval()
    assert loss_of(model) < 0.5 * before


@pytest.mark.slow
def test_split_and_merge():
    rnn = mogrifier_jax.nnx.RNN(make_cell())
    expected = rnn(XS)
    graph, params, rest = nnx.split(rnn, nnx.Param, ...)
    halved = jax.tree.map(lambda leaf: 0.5 * leaf, params)

    @quick.jit
    def run(params):
        return nnx.merge(graph, params, rest)(XS)

    assert_equal(run(params), expected)
    assert abs(run(halved) - expected).max() > 1e-3
    assert nnx.split(mogrifier_jax.nnx.RNN(make_cell()), nnx.Param, ...)[0] == graph
    assert nnx.split(mogrifier_jax.nnx.RNN(make_cell(zigzag=False)), nnx.Param, ...)[0] != graph


@pytest.mark.slow
def test_a_step_and_its_carry():
    cell = make_cell(dtype=jnp.bfloat16)
    carry, y = cell(cell.initialize_carry((B, D), nnx.Rngs(0)), XS[:, 0])
    assert y.dtype == carry.h.dtype == jnp.bfloat16 and carry.c.dtype == jnp.float32
    assert cell.gates["input"].dtype == jnp.float32 and cell.num_feature_axes == 1
    drawn = cell.initialize_carry((B, D), nnx.Rngs(0), nnx.initializers.normal())
    assert abs(drawn.c).max() > 1e-3 and drawn.h.shape == (B, H)
    assert not cell.initialize_carry((B, D)).c.any()


@pytest.mark.slow
def test_state_dropout_draws_from_its_stream():
    def make(**options):
        return mogrifier_jax.nnx.RNN(make_cell(), state_dropout=0.5, **options)

    rnn = make(rngs=nnx.Rngs(0))
    first, second = rnn(XS), rnn(XS)
    assert abs(first - second).max() > 1e-3
    plain = mogrifier_jax.nnx.RNN(make_cell())(XS)
    assert_equal(rnn(XS, deterministic=True), plain)
    rnn.eval()
    assert_equal(rnn(XS), plain)
    keys = functools.partial(nnx.Rngs, dropout=5)
    assert_equal(make()(XS, rngs=keys()), make()(XS, rngs=keys()), 0)
    with pytest.raises(errors.UsageError, match=r"state_dropout 0.5 needs random numbers: give"):
        make()(XS)


@pytest.mark.slow
def test_metadata_goes_to_the_parameters():
    mesh = partitioning.make_mesh(data=4, model=2)
    sharding = {"out_sharding": (None, None, "model"), "mesh": mesh}
    cell = make_cell(metadata={"gates/input": sharding})
    shards = {shard.data.shape for shard in cell.gates["input"][...].addressable_shards}
    assert shards == {(D, 4, H // 2)}
    whole = cell.gates["recurrent"][...].addressable_shards
    assert {shard.data.shape for shard in whole} == {(H, 4, H)}
    assert_equal(mogrifier_jax.nnx.RNN(cell)(XS), mogrifier_jax.nnx.RNN(make_cell())(XS))
    with pytest.raises(errors.UsageError, match=r"metadata for gates/kernel, .* not a parameter"):
        make_cell(metadata={"gates/kernel": {}})


def test_the_gating_alone():
    gating = mogrifier_jax.nnx.Mogrifier(D, H, rounds=3, rank=2, rngs=nnx.Rngs(0))
    x, h = XS[:, 0], np.ones((B, H), np.float32)
    linen = mogrifier_jax.Mogrifier(rounds=3, rank=2)
    params = nnx.to_pure_dict(nnx.state(gating))
    assert_equal(gating(x, h), linen.apply({"params": params}, x, h))
    assert_equal(params, linen.init(nnx.Rngs(0).params(), x, h)["params"], 0)
    assert abs(gating(x, h)[0] - x).max() > 1e-2


@pytest.mark.parametrize("name", ["MogrifierElmanCell", "nnx.SimpleCell", "step by step"])
def test_lengths_of_every_integer_dtype_mean_what_int32_means(name):
    cell = flax_or_ours("nnx.SimpleCell" if name == "step by step" else name)
    rnn = mogrifier_jax.nnx.RNN(cell, return_carry=True, fast=name != "step by step")
    xs = np.random.default_rng(0).standard_normal((3, 300, D)).astype(np.float32)
    lengths = np.array([100, 0, 7])
    expected = rnn(xs, seq_lengths=lengths.astype(np.int32))
    for dtype in ("int8", "int64", "uint8", "uint32"):
        assert_equal(rnn(xs, seq_lengths=lengths.astype(dtype)), expected, 0)
    other = rnn(xs, seq_lengths=lengths + 1)
    assert abs(jax.tree.leaves(other[0])[-1] - jax.tree.leaves(expected[0])[-1]).max() > 1e-2
    with pytest.raises(errors.UsageError, match="must not be negative"):
        rnn(xs, seq_lengths=-lengths)
    for misfit in (np.int8(3), lengths[:2], lengths[:, None]):
        with pytest.raises(errors.UsageError, match=r"seq_lengths of shape .* here \(3,\)"):
            rnn(xs, seq_lengths=misfit)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
def test_transforms_of_nnx_work_in_both_of_its_modes(graph, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("the tree mode does without this")

    make = functools.partial(make_cell, "MogrifierGRUCell")
    linen = from_rnn(make())
    expected, expected_grad = linen(XS), jax.grad(lambda xs: linen(xs).sum())(XS)
    with nnx.set_graph_mode(graph):
        rnn = mogrifier_jax.nnx.RNN(make())
        monkeypatch.setattr(nnx.compat, "scan", refuse)
        monkeypatch.setattr(nnx, "StateAxes", refuse)
        assert_equal(nnx.jit(lambda rnn, xs: rnn(xs))(rnn, XS), expected)
        loss = nnx.jit(nnx.value_and_grad(lambda rnn, xs: rnn(xs).sum(), argnums=(0, 1)))
        value, (d_rnn, d_xs) = loss(rnn, XS)
        assert_equal(value, expected.sum())
        assert_equal(d_xs, expected_grad)
        assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(d_rnn))
        assert_equal(nnx.merge(*nnx.split(rnn))(XS), expected)
        twice = np.stack([XS, 2 * XS])
        run = nnx.vmap(lambda rnn, xs: rnn(xs), in_axes=(None, 0))
        assert_equal(run(rnn, twice), np.stack([expected, linen(2 * XS)]))
        many = nnx.vmap(lambda key: make(rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0)))
        run = nnx.vmap(lambda cell, xs: mogrifier_jax.nnx.RNN(cell)(xs), in_axes=(0, None))
        first, second = run(many, XS)
        assert first.shape == expected.shape and jnp.abs(first - second).max() > 1e-2
    # Control: a cell that only NNX knows runs step by step, by what was taken away.
    with pytest.raises(AssertionError, match="does without"):
        mogrifier_jax.nnx.RNN(nnx.LSTMCell(D, H, rngs=nnx.Rngs(0)), fast=False)(XS)


def from_rnn(cell):
    """The linen RNN of an NNX cell, as a function of its inputs."""
    params = nnx.to_pure_dict(nnx.state(cell))
    rnn = mogrifier_jax.RNN(cell.spec)
    return lambda xs: rnn.apply({"params": {"cell": params}}, xs)


class Doubled(mogrifier_jax.nnx.LSTMCell):
    """A cell whose output is not its state."""

    def __call__(self, carry, inputs):
        carry, h = super().__call__(carry, inputs)
        return carry, 2 * h


@pytest.mark.parametrize("with_carry", [False, True])
def test_a_step_that_a_subclass_overrides_is_run(with_carry):
    xs = jax.random.normal(jax.random.key(0), (2, 5, 3))
    cells = [make(3, 4, rngs=nnx.Rngs(0)) for make in (mogrifier_jax.nnx.LSTMCell, Doubled)]
    given = {"initial_carry": cells[0].initialize_carry((2, 3))} if with_carry else {}
    want, ys = (mogrifier_jax.nnx.RNN(cell)(xs, **given) for cell in cells)
    np.testing.assert_allclose(ys, 2 * want, rtol=1e-5, atol=1e-6)

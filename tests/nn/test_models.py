"""The language model: lamb's numbers, NumPy loops, dropout, chunked loss, gates, bad input."""

import dataclasses
import functools
import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from mogrifier_jax.nn import dropout, models, plans, stack
from tests import golden, quick, reference

V, H, E, T, B = 7, 5, 3, 6, 2
LENGTHS = np.array([6, 4], np.int32)
MODELS = {
    "mixture": dict(
        embedding_size=E,
        num_layers=3,
        tied_embeddings=True,
        mixture_components=3,
        state_mask="step",
        cell_options=dict(rounds=3, rank=2),
    ),
    "projected": dict(
        embedding_size=E,
        output="residual",
        num_layers=3,
        cell="lstm",
        cell_options=dict(cap_input_gate=False),
        max_logits=2 * B * V,
    ),
    "square": dict(
        embedding_size=H,
        output="last",
        tied_embeddings=True,
        cell="mogrifier_gru",
        cell_options=dict(rounds=2),
    ),
}


def make(name, **more):
    """A model in float64, and parameters for it of which none is zero."""
    model = models.LanguageModel(V, H, **{"dtype": jnp.float64, **MODELS[name], **more})
    return model, fill(jax.eval_shape(model.init, jax.random.key(0), **model.example())["params"])


def fill(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: 0.5 * rng.standard_normal(leaf.shape), shapes)


def batch(steps=T):
    rng = np.random.default_rng(1)
    return tuple(rng.integers(0, V, (2, B, steps), np.int32))


def some_carry(model, seed=2):
    return fill(jax.eval_shape(lambda: model.zero_carry(B)), seed)


def nats(model, params, *args, **kwargs):
    return model.apply({"params": params}, *args, method="nats", **kwargs)


def tree_norm(tree):
    return np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)))


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", golden.CASES)
def test_lamb_reference(case, fast):
    model, params = golden.make(case, fast=fast)
    assert sum(p.size for p in jax.tree.leaves(params)) == golden.NUM_SCALARS[case]
    init = jax.eval_shape(model.init, jax.random.key(0), **model.example())["params"]
    assert jax.tree.map(jnp.shape, init) == jax.tree.map(jnp.shape, params)

    @quick.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        carry, values = nats(model, params, *golden.batch(), None, golden.LENGTHS, logit_scale=0.9)
        plain = values.sum(1).mean()
        penalty = 0.5 * sum(jnp.square(p).sum() for p in jax.tree.leaves(params))
        return plain + 0.01 * penalty, (plain, values, carry)

    (regularised, (plain, values, carry)), grads = jax.device_get(loss(params))
    sums = [a.sum() for layer in carry for a in layer]
    np.testing.assert_allclose(values.T, golden.NATS[case], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, golden.FINAL_STATES[case], rtol=1e-5)
    found = [plain, regularised, tree_norm(grads)]
    np.testing.assert_allclose(found, golden.LOSSES[case], rtol=1e-5)


# Dropout and everything else against the NumPy loops.

RATES = models.Dropout(
    input=0.1, inter_layer=0.2, state=0.3, output=0.4, downprojected=0.5, cell_output=0.15
)


@pytest.fixture
def masks(monkeypatch):
    """What was dropped, as multipliers by the name of the rate, in the order of drawing."""
    drawn = {}
    rng = np.random.default_rng(3)

    def keep_mask(rate, shape, key):
        del key
        name = RATES._fields[RATES.index(rate)]
        mask = rng.random(shape) < 0.6
        drawn.setdefault(name, []).append(mask * np.float64(np.float32(1) / np.float32(1 - rate)))
        return jnp.asarray(mask)

    monkeypatch.setattr(dropout, "keep_mask", keep_mask)
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model_with_dropout_and_gradients_equals_the_numpy_loops(name, masks, float64):
    model, params = make(name)
    inputs, targets = batch()
    carry = some_carry(model)
    weights = np.random.default_rng(4).random((B, T))

    @quick.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(tree):
        masks.clear()
        rngs = {"dropout": jax.random.key(0)}
        params, carry, temperature = tree
        end, values = nats(
            model, params, inputs, targets, carry, LENGTHS, RATES, temperature, rngs=rngs
        )
        return (values * weights).sum(), (values, end)

    start = (params, carry, np.array(0.9))
    (_, (values, end)), grads = jax.device_get(loss(start))

    # Where each mask is drawn, and its shape.
    state = (T, B, H) if model.state_mask == "step" else (B, H)
    shapes = {
        "input": [(T, B, model.embedding_size)],
        "inter_layer": [(T, B, H)] * (model.num_layers - 1),
        "state": [state] * model.num_layers,
        "output": [(T, B, H)],
        "cell_output": [(T, B, H)] * model.num_layers,
    }
    if name != "square":
        components = (3,) if name == "mixture" else ()
        shapes["downprojected"] = [(T, B, *components, E)]
    assert {key: [mask.shape for mask in found] for key, found in masks.items()} == shapes

    masks["state"] = [np.broadcast_to(mask, (T, B, H)) for mask in masks["state"]]
    run = functools.partial(
        reference.language_model,
        model,
        inputs=inputs,
        targets=targets,
        lengths=LENGTHS,
    )
    tree = reference.to_numpy(start)
    expected, expected_end, _ = run(tree[0], state=tree[1], temperature=0.9, masks=masks)
    np.testing.assert_allclose(values, expected, rtol=1e-10, atol=1e-12)
    assert (values[1, 4:] == 0).all() and (values[:, :4] > 0).all()
    ends = zip(jax.tree.leaves(end), reference.leaves(expected_end), strict=True)
    for a, b in ends:
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)

    # The control: without any one of the masks the outcome is another.
    for missing in shapes:
        others = {key: mask for key, mask in masks.items() if key != missing}
        other, _, _ = run(tree[0], state=tree[1], temperature=0.9, masks=others)
        assert abs(other - values).max() > 1e-3

    def reference_loss(tree):
        params, state, temperature = tree
        return (run(params, state=state, temperature=temperature, masks=masks)[0] * weights).sum()

    for seed in range(3):
        way = reference.to_numpy(fill(start, seed))
        pairs = zip(jax.tree.leaves(grads), reference.leaves(way), strict=True)
        found = sum((a * b).sum() for a, b in pairs)
        expected = reference.slope(reference_loss, tree, way, 1e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert abs(expected) > 1e-3


def test_residual_layers_equal_the_sum_of_two_layers_also_with_cell_output_dropout():
    """Three layers differ: there the sums that the layers read are not those of "sum"."""
    rates = models.Dropout(cell_output=0.4)
    inputs, targets = batch()
    for layers, same in ((2, True), (3, False)):
        found = []
        for output in ("sum", "residual"):
            sizes = dict(num_layers=layers, output=output, cell="lstm", cell_options={})
            model = models.LanguageModel(V, H, H, **sizes)
            shapes = jax.eval_shape(model.init, jax.random.key(0), **model.example())["params"]
            params = jax.tree.map(np.float32, fill(shapes))
            rngs = {"dropout": jax.random.key(1)}
            found.append(nats(model, params, inputs, targets, rates=rates, rngs=rngs)[1])
        assert np.array_equal(*found) == same


def test_dropped_share_and_scale_follow_the_rate():
    x = jnp.full((200, 50), 3.0)
    for rate in (0.1, 0.7):
        dropped = np.asarray(quick.jit(dropout.drop)(rate, x, jax.random.key(1)))
        kept = dropped != 0
        assert abs(kept.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / x.size)
        np.testing.assert_allclose(dropped[kept], 3 / (1 - rate), rtol=1e-6)
        # Elements and rows are dropped independently.
        assert abs(np.corrcoef(kept[:, 0::2].ravel(), kept[:, 1::2].ravel())[0, 1]) < 0.06
        assert abs(np.corrcoef(kept[0::2].ravel(), kept[1::2].ravel())[0, 1]) < 0.06


@pytest.mark.parametrize("state_mask", ["window", "step"])
def test_state_masks_are_one_for_a_window_or_one_for_a_step(state_mask):
    """h = tanh(1 + dropped previous h) shows what was dropped."""
    module = stack.Stack(
        2, 40, cell="mogrifier_elman", cell_options=dict(rounds=0), state_mask=state_mask
    )
    carry, xs = stack.zero_carry(module, B), np.zeros((4, B, 3), np.float32)
    gates = {"recurrent": np.eye(40)[:, None], "bias": np.ones((1, 40))}
    params = {
        f"layers_{index}": {"cell": {"gates": {**gates, "input": np.zeros((size, 1, 40))}}}
        for index, size in enumerate((3, 40))
    }
    params = jax.tree.map(np.float32, params)
    apply = quick.jit(module.apply)

    def run(rate, seed):
        rngs = {"dropout": jax.random.key(seed)}
        return jax.device_get(
            apply({"params": params}, carry, xs, None, models.Dropout(state=rate), rngs=rngs)
        )

    ends, total = run(0.5, 0)
    first = total[1:] - np.tanh(1)  # Two layers: 2 tanh(1) where both dropped, and so on.
    kept = first > np.tanh(1) + 1e-3
    assert 0.6 < kept.mean() < 0.9  # Three quarters have at least one of two.
    shared = (kept == kept[:1]).all(0)
    assert shared.all() == (state_mask == "window")
    layers_kept = [end.h > np.tanh(1) + 1e-3 for end in ends]
    assert (layers_kept[0] != layers_kept[1]).any()
    assert (layers_kept[0][0] != layers_kept[0][1]).any()  # Examples differ too.
    assert (run(0.5, 1)[1] != total).any()  # A new window has a new mask.


@pytest.mark.slow
def test_rates_are_traced_and_none_takes_the_operation_away():
    model, params = make("mixture", dtype=jnp.float32)
    params = jax.tree.map(np.float32, params)
    traces = []

    @quick.jit
    def loss(rates):
        traces.append(rates)
        rngs = {"dropout": jax.random.key(0)}
        return nats(model, params, *batch(), rates=rates, rngs=rngs)[1].sum()

    low, high = (
        loss(jax.tree.map(lambda rate, f=factor: jnp.float32(f * rate), RATES))
        for factor in (0.5, 1.0)
    )
    assert len(traces) == 1 and abs(low - high) > 1e-3
    loss(models.Dropout(input=jnp.float32(0.1)))
    assert len(traces) == 2

    def program(rates):
        return str(jax.make_jaxpr(lambda: nats(model, params, *batch(), rates=rates))())

    assert "random" not in program(models.Dropout()) + program(None)  # No key is needed either.
    with pytest.raises(flax.errors.InvalidRngError):
        program(models.Dropout(output=0.1))


# The loss in chunks.


def largest_array(jaxpr):
    sizes = [variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars]
    inner = [j for equation in jaxpr.eqns for j in core.jaxprs_in_params(equation.params)]
    return max(sizes + [largest_array(jaxpr) for jaxpr in inner], default=0)


@pytest.mark.slow
@pytest.mark.parametrize("components", [0, 3])
def test_chunked_loss_is_equal_and_never_makes_all_logits(components, float64):
    vocab_size, steps = 100, 13  # Chunks of five steps do not divide it.
    inputs, targets = batch(steps)
    results, largest = {}, {}
    logits_of_a_step = B * max(1, components) * vocab_size
    for most in (1 << 26, 5 * logits_of_a_step + 1):
        model = models.LanguageModel(
            vocab_size,
            H,
            E,
            1,
            "lstm",
            mixture_components=components,
            max_logits=most,
            dtype=jnp.float64,
        )
        shapes = jax.eval_shape(model.init, jax.random.key(0), **model.example())["params"]

        @jax.value_and_grad
        def loss(params, model=model):
            rngs = {"dropout": jax.random.key(0)}
            rates = models.Dropout(output=0.3, downprojected=0.3)
            _, values = nats(model, params, inputs, targets, rates=rates, rngs=rngs)
            return (values * jnp.arange(1.0, steps + 1)[None]).sum()

        results[most] = jax.device_get(quick.jit(loss)(fill(shapes)))
        largest[most] = largest_array(jax.make_jaxpr(loss)(fill(shapes)).jaxpr)
    whole, chunked = results.values()
    for a, b in zip(jax.tree.leaves(chunked), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        assert abs(b).max() > 1e-4
    whole, chunked = largest.values()
    assert chunked == 5 * logits_of_a_step < steps * logits_of_a_step == whole


def test_cpus_take_logits_in_chunks_that_fit_a_cache_and_other_platforms_do_not(monkeypatch):
    vocab_size, steps = 101, 13
    make_plan = plans.make_softmax_plan

    def make_plan_of_small_caches(platform, dtype):
        plan = make_plan(platform, dtype)
        if plan.logits_at_once == math.inf:
            return plan
        return dataclasses.replace(plan, logits_at_once=5 * B * vocab_size)

    monkeypatch.setattr(plans, "make_softmax_plan", make_plan_of_small_caches)
    model = models.LanguageModel(vocab_size, H, H, 1, "lstm")
    inputs, targets = batch(steps)
    shapes = jax.eval_shape(model.init, jax.random.key(0), **model.example())["params"]

    def program(platform):
        run = quick.on_platform(platform, lambda params: nats(model, params, inputs, targets)[1])
        return str(jax.make_jaxpr(run)(shapes))

    chunk, whole = f"f32[{5 * B},{vocab_size}]", f"f32[{steps},{B},{vocab_size}]"
    assert chunk in program("cpu") and whole not in program("cpu")
    assert whole in program("tpu") and chunk not in program("tpu")


# States.


@pytest.mark.slow
def test_two_windows_equal_one_long_window(float64):
    model, params = make("mixture")
    inputs, targets = batch()
    run = quick.jit(functools.partial(nats, model, params))
    end, whole = run(inputs, targets, model.zero_carry(B))
    middle, first = run(inputs[:, :3], targets[:, :3], model.zero_carry(B))
    last, second = run(inputs[:, 3:], targets[:, 3:], middle)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-10)
    for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(end), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    _, restarted = run(inputs[:, 3:], targets[:, 3:], model.zero_carry(B))
    assert abs(restarted - second).max() > 1e-3


@pytest.mark.slow
def test_trainable_initial_state_is_used_and_trained(float64):
    model, params = make("mixture", trainable_initial_state=True)
    plain, without = make("mixture")
    assert "initial_state" not in without["stack"]
    start = params["stack"].pop("initial_state")
    assert jax.tree.map(np.shape, start) == jax.tree.map(lambda a: a.shape[1:], some_carry(plain))

    def loss(start, carry):
        if carry is not None:
            return nats(plain, params, *batch(), carry)[1].sum()
        stack = {**params["stack"], "initial_state": start}
        return nats(model, {**params, "stack": stack}, *batch())[1].sum()

    carry = jax.tree.map(lambda leaf: np.stack([leaf] * B), start)
    run = quick.jit(jax.value_and_grad(loss, (0, 1), allow_int=True))
    value, (trained, _) = run(start, None)
    expected, (_, of_carry) = run(start, carry)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(of_carry), strict=True):
        np.testing.assert_allclose(a, b.sum(0), rtol=1e-8)
        assert abs(a).max() > 1e-3
    zeros = jax.tree.map(np.zeros_like, start)
    assert abs(run(zeros, None)[0] - value) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gates_and_logits_equal_the_numpy_loops(name, float64):
    model, params = make(name)
    inputs, _ = batch()
    carry = some_carry(model)

    @quick.jit
    def look(params, carry):
        variables = {"params": params}
        end, gates = model.apply(variables, inputs, carry, method="gates")
        expected_end, logits = model.apply(variables, inputs, carry, 0.8, method="logits")
        return gates, end, jax.nn.log_softmax(logits), expected_end

    gates, end, log_p, expected_end = jax.device_get(look(params, carry))
    tree = reference.to_numpy((params, carry))
    xs = tree[0]["embedding"][inputs.T]
    _, ys, expected = reference.stack(model, tree[0]["stack"], tree[1], xs)
    assert len(gates) == len(expected) == model.num_layers
    for found, steps in zip(gates, expected, strict=True):
        assert found.keys() == steps[0].keys()
        assert len(found["rounds"]) == dict(model.cell_options).get("rounds", 0)
        for t, step in enumerate(steps):
            here = jax.tree.map(lambda leaf, t=t: leaf[t], found)
            for a, b in zip(jax.tree.leaves(here), reference.leaves(step), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(jax.tree.leaves(end), jax.tree.leaves(expected_end), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    expected = reference.log_probabilities(model, tree[0], ys, 0.8)
    np.testing.assert_allclose(log_p.swapaxes(0, 1), expected, rtol=1e-10)
    assert abs(reference.log_probabilities(model, tree[0], ys) - expected).max() > 1e-2


def test_encoder_decoder_equals_the_numpy_loops(float64):
    model = models.EncoderDecoder(
        V, H, E, num_layers=2, cell_options=dict(rounds=2, rank=2), dtype=jnp.float64
    )
    params = fill(jax.eval_shape(model.init, jax.random.key(0), **model.example())["params"])
    source, inputs = batch(4)
    targets = inputs[:, ::-1]
    source_lengths, lengths = np.array([4, 2], np.int32), np.array([3, 4], np.int32)

    @quick.jit
    def run(params, source_lengths):
        return nats(model, params, source, inputs, targets, source_lengths, lengths)

    found = run(params, source_lengths)
    tree = reference.to_numpy(params)
    expected = reference.encoder_decoder(
        model, tree, source, source_lengths, inputs, targets, lengths
    )
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    longer = run(params, np.array([4, 4], np.int32))
    np.testing.assert_array_equal(longer[0], found[0])
    assert abs(longer[1] - found[1]).max() > 1e-3


@pytest.mark.slow
def test_bfloat16_is_close_and_keeps_float32_where_it_matters(strict_dtypes):
    inputs, targets = batch()
    results = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        model, params = make("mixture", dtype=dtype, num_layers=1)
        params = jax.tree.map(np.float32, params)

        @quick.jit
        @functools.partial(jax.value_and_grad, has_aux=True)
        def loss(params, model=model):
            rngs = {"dropout": jax.random.key(0)}
            end, values = nats(model, params, inputs, targets, None, LENGTHS, RATES, 0.9, rngs=rngs)
            return values.sum(), (values, end)

        results[dtype] = jax.device_get(loss(params))
    (_, (values, end)), grads = results[jnp.bfloat16]
    (_, (expected, _)), expected_grads = results[jnp.float32]
    assert values.dtype == np.float32
    assert {(c.dtype.name, h.dtype.name) for c, h in end} == {("float32", "bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    # A bfloat16 has 8 bits; a step rounds some ten times.
    np.testing.assert_allclose(values, expected, atol=0.05)
    assert abs(values - expected).max() > 1e-4
    distance = tree_norm(jax.tree.map(np.subtract, grads, expected_grads))
    assert distance < 0.05 * tree_norm(expected_grads)


# Initial values and counts.


def assert_deviation(leaf, deviation):
    """Of a normal cut at two deviations, corrected so that this is the real one."""
    leaf, error = np.asarray(leaf, np.float64), 4 / np.sqrt(leaf.size)
    assert abs(leaf.std() / deviation - 1) < error and abs(leaf.mean()) < error * deviation
    bound = 2 * deviation / 0.87962566
    assert 0.98 * bound < abs(leaf).max() < bound * 1.0001


@pytest.mark.slow
def test_embeddings_and_softmax_start_as_in_lamb():
    sizes = dict(vocab_size=400, hidden_size=150, embedding_size=100, num_layers=1, cell="lstm")
    initial = {}
    for components in (0, 2):
        model = models.LanguageModel(**sizes, mixture_components=components)
        init = quick.jit(model.init)(jax.random.key(0), **model.example())
        initial[components] = jax.device_get(init)["params"]
    plain, mixed = initial[0]["softmax"], initial[2]["softmax"]
    assert_deviation(initial[0]["embedding"], 100**-0.5)
    assert_deviation(plain["kernel"], 100**-0.5)
    assert_deviation(mixed["projection"], 150**-0.5)
    assert_deviation(mixed["mixture"], 150**-0.5)
    with pytest.raises(AssertionError):  # The other convention is off by 0.3 %, the bound by 1 %.
        assert_deviation(1.0029 * plain["kernel"], 100**-0.5)
    columns = plain["projection"]
    assert columns.shape == (150, 100)
    np.testing.assert_allclose(columns.T @ columns, np.eye(100), atol=1e-5)
    assert not (plain["bias"].any() or mixed["bias"].any() or mixed["projection_bias"].any())


@pytest.mark.parametrize(
    "options",
    [
        *MODELS.values(),
        dict(embedding_size=E, cell="mogrifier_no_zigzag", cell_options=dict(gate_bias=False)),
        dict(embedding_size=H, cell="mlstm", cell_options=dict(layer_norm=True, scaling=True)),
        dict(embedding_size=H, cell="lstm", cell_options=dict(tied_gates=True, gate_rank=2)),
        dict(embedding_size=E, cell="mogrifier_elman", mixture_components=2),
        dict(embedding_size=E, cell="mogrifier_elman", trainable_initial_state=True),
        dict(embedding_size=E, num_layers=2, trainable_initial_state=True),
        dict(embedding_size=E, encoder_decoder=True),
    ],
)
def test_formula_counts_the_model(options):
    options = dict(options)
    make = models.EncoderDecoder if options.pop("encoder_decoder", 0) else models.LanguageModel
    model = make(V, H, **options)
    shapes = jax.eval_shape(model.init, jax.random.key(0), **model.example())
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert sum(models.count_parameters(model).values()) == count
    assert sum(models.count_parameters(model.copy(vocab_size=V + 1)).values()) > count

"""Monte-Carlo dropout, and the plain pass beside it, on a small model of random weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import tasks, vocabularies
from mogrifier_jax.evaluation import montecarlo
from mogrifier_jax.nn import models
from mogrifier_jax.training import scoring

WINDOW, SAMPLES = 5, 6
DROPOUT = models.Dropout(state=0.3, output=0.4)
KEY = jax.random.key(7)
LINES = [f"{'abcdefgh'[i % 8] * (i % 5 + 1)}{'xyz'[i % 3]}" for i in range(14)]
VOCAB = vocabularies.Vocabulary.from_text("\n".join(LINES), "character")
SPLIT = VOCAB.encode_split("\n".join(LINES))


@functools.cache
def make_model(mixture_components=0):
    model = models.LanguageModel(
        vocab_size=len(VOCAB),
        hidden_size=6,
        embedding_size=4,
        mixture_components=mixture_components,
        num_layers=1,
        cell_options={"rounds": 2, "rank": 2},
    )
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), **model.example())["params"])
    draw = np.random.default_rng(1)
    return model, jax.tree.map(lambda a: jnp.asarray(draw.normal(0, 0.7, a.shape), a.dtype), shapes)


def make_plan(stripes=2, window=WINDOW, mesh=None):
    return tasks.plan_text(SPLIT, VOCAB.eos_id, stripes, window, mesh)


@functools.cache
def deterministic(stripes=2, window=WINDOW):
    model, params = make_model()
    return scoring.Deterministic(model, make_plan(stripes, window), chunk=4)(params, 0.9)


@functools.cache
def sampler(kind="arithmetic", samples=SAMPLES, per_block=None, devices=0, power=0.5):
    model, _ = make_model()
    mesh = partitioning.make_mesh(devices=jax.devices()[:devices]) if devices else None
    return montecarlo.MonteCarlo(
        *(model, make_plan(), DROPOUT),
        key=KEY,
        samples=samples,
        average=montecarlo.make_average(kind, power),
        samples_per_block=per_block,
        mesh=mesh,
        chunk=4,
    )


def sample(*args, multiplier=1.0, **options):
    return sampler(*args, **options)(make_model()[1], 0.9, multiplier=multiplier)


@pytest.mark.slow
def test_the_plain_pass_gives_each_token_of_the_text_in_order():
    scores = deterministic()
    np.testing.assert_array_equal(scores.tokens, SPLIT.tokens)
    model, params = make_model()
    sums = scoring.Deterministic(model, make_plan()).sums(params, [0.9, 1.1])
    assert sums.count == len(scores.nats)
    assert scores.mean() == pytest.approx(sums.total[0] / sums.count, rel=1e-6)
    assert abs(sums.total[1] / sums.total[0] - 1) > 1e-4
    first = scoring.Deterministic(model, make_plan())(params, 0.9, max_windows=1)
    assert len(first.tokens) == 2 * WINDOW  # Not all of the text, so the order must be made.


@pytest.mark.slow
def test_one_stream_does_not_depend_on_the_window():
    short, long = deterministic(1, WINDOW), deterministic(1, 64)
    np.testing.assert_allclose(short.nats, long.nats, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_stripes_agree_with_one_stream_until_the_second_stripe_starts():
    one, two = deterministic(1), deterministic(2)
    start = int(SPLIT.line_starts[len(LINES) // 2])
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.nats[:start], two.nats[:start], rtol=1e-5, atol=1e-6)
    assert abs(one.nats[start] - two.nats[start]) > 1e-3  # There the state starts anew.


@pytest.mark.slow
def test_multiplier_zero_is_deterministic():
    for kind in montecarlo.AVERAGES:
        zero = sample(kind, multiplier=0.0)
        np.testing.assert_allclose(zero.nats, deterministic().nats, rtol=2e-5, atol=2e-6)
        assert abs(sample(kind).mean() - zero.mean()) > 1e-3


@jax.jit
def dropped_out_nats(params, batch, carry, rates, key):
    return make_model()[0].apply(
        {"params": params}, batch, carry, rates, 0.9, rngs={"dropout": key}, method="batch_nats"
    )


def plain_pass(index, multiplier=1.0, window_keys=True):
    """Sample `index` as a loop over windows, without the machinery."""
    model, params = make_model()
    plan, carry, parts = make_plan(), model.zero_carry(2), []
    rates = montecarlo.scale_dropout(DROPOUT, multiplier)
    for window in range(plan.num_windows):
        batch = plan.batch_at(plan.stream, window)
        key = jax.random.fold_in(jax.random.fold_in(KEY, index), window if window_keys else 0)
        carry, nats = dropped_out_nats(params, batch, carry, rates, key)
        parts.append(np.asarray(nats))
    return scoring.read_targets(plan).in_order(np.stack(parts)).nats


@pytest.mark.slow
def test_one_sample_is_a_plain_pass_with_dropout():
    one = sample(samples=1)
    np.testing.assert_allclose(one.nats, plain_pass(0), rtol=1e-5, atol=1e-6)
    assert np.abs(one.nats - plain_pass(1)).max() > 1e-2
    assert np.abs(one.nats - plain_pass(0, window_keys=False)).max() > 1e-2


@pytest.mark.slow
def test_the_arithmetic_average_is_the_mean_probability_of_its_samples():
    probabilities = np.mean([np.exp(-plain_pass(s).astype(np.float64)) for s in range(3)], axis=0)
    three = sample(samples=3)
    np.testing.assert_allclose(three.nats, -np.log(probabilities), rtol=1e-5, atol=1e-6)
    # Each sample keeps its own state: that is not the mean over masks of single windows.
    assert np.abs(three.nats - plain_pass(0)).max() > 1e-2


@pytest.mark.slow
def test_blocks_do_not_change_the_result():
    # Three in blocks of two: one place is padding.
    for kind, samples, per_block in (("arithmetic", 3, 2), ("geometric", 6, 4)):
        blocks = sample(kind, samples, per_block)
        np.testing.assert_allclose(blocks.nats, sample(kind, samples).nats, rtol=2e-5, atol=2e-6)
        assert sampler(kind, samples, per_block).num_blocks == 2
    assert np.abs(sample(samples=3).nats - sample().nats).max() > 1e-3


@pytest.mark.slow
def test_a_mesh_of_eight_gives_what_one_device_does():
    spread = sampler(devices=8)
    assert (spread.num_blocks, spread.block_size) == (1, 8)
    np.testing.assert_allclose(sample(devices=8).nats, sample().nats, rtol=2e-5, atol=2e-6)
    carry = spread.model.zero_carry(2)[0].h
    placed = spread._place(jnp.zeros((8, *carry.shape)))
    assert {shard.data.shape[1] for shard in placed.addressable_shards} == {1}


@pytest.mark.slow
def test_means_are_ordered_token_by_token():
    arithmetic, geometric, power, unnormalised = (sample(kind) for kind in montecarlo.AVERAGES)
    assert (arithmetic.nats <= unnormalised.nats + 1e-5).all()  # AM-GM.
    assert arithmetic.mean() < unnormalised.mean() - 1e-2
    # The geometric means of all tokens sum to less than one: renormalising only helps.
    assert (geometric.nats <= unnormalised.nats + 1e-5).all()
    assert np.abs(power.nats - geometric.nats).max() > 1e-3


@pytest.mark.slow
def test_the_power_average_lies_between():
    one = sample("power", power=1.0)
    np.testing.assert_allclose(one.nats, sample("arithmetic").nats, rtol=2e-5, atol=2e-6)
    near_zero = sample("power", power=1e-3)
    np.testing.assert_allclose(near_zero.nats, sample("geometric").nats, atol=0.02)
    assert np.abs(sample("power", power=0.5).nats - near_zero.nats).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("components", [0, 2])
def test_log_probabilities_are_those_of_the_loss(components):
    model, params = make_model(components)
    plan = make_plan()
    batch = plan.batch_at(plan.stream, 0)
    rates = montecarlo.scale_dropout(DROPOUT, 1.0)

    @jax.jit
    def both(logit_scale):
        args = ({"params": params}, batch, model.zero_carry(2), rates, logit_scale)
        methods = ("batch_nats", montecarlo.log_probabilities)
        return [model.apply(*args, rngs={"dropout": KEY}, method=method) for method in methods]

    (carry, nats), (same_carry, log_p) = both(0.8)
    chosen = jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(-chosen, nats, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jnp.exp(log_p).sum(-1), 1.0, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, carry, same_carry)
    assert np.abs(both(1.0)[0][1] - nats).max() > 1e-3


@pytest.mark.slow
def test_nothing_beyond_the_block_is_held():
    """Only the samples of a block have logits at the same time."""
    small, large = (sampler(samples=64, per_block=size) for size in (2, 64))

    def temporaries(run):
        model, params = make_model()
        carry = jax.tree.map(lambda a: run._place(jnp.zeros((64, *a.shape))), model.zero_carry(2))
        rates = montecarlo.scale_dropout(DROPOUT, 1.0)
        args = (params, run.plan.stream, carry, 0, 4, 0.9, rates, run._blocks)
        return run._score_jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(large) > 4 * temporaries(small)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: montecarlo.make_average("harmonic"), "harmonic"),
        (lambda: montecarlo.make_average("power", 0.0), "power 0.0"),
        (lambda: montecarlo.scale_dropout(DROPOUT, 2.5), "multiplier 2.5"),
        (lambda: montecarlo.scale_dropout(DROPOUT, -1), "multiplier -1"),
        (lambda: sampler(samples=0), "0 samples"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(errors.UsageError, match=message):
        make()

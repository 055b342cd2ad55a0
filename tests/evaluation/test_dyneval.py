"""Dynamic evaluation against lamb's numbers, and its settings, samples and statistics."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import streams, tasks
from mogrifier_jax.evaluation import dyneval, gradient_statistics, montecarlo
from mogrifier_jax.nn import models
from tests import golden

SETTING = dyneval.UpdateRule(learning_rate=1e-3, decay_rate=0.1, epsilon=1e-4)
OTHER = dyneval.UpdateRule(learning_rate=3e-3, decay_rate=0.01, epsilon=1e-3)
STILL = dyneval.UpdateRule(learning_rate=0.0, decay_rate=0.1, epsilon=1e-4)
WILD = dyneval.UpdateRule(learning_rate=1e37, decay_rate=0.0, epsilon=1e-12)
DROPOUT = models.Dropout(output=0.4)
KEY = jax.random.key(5)


def make_plan(inputs, targets):
    """Windows [W, B, T] as they are given."""
    stream = tuple(jnp.asarray(a, jnp.int32) for a in (inputs, targets))
    windows, batch_size, _ = inputs.shape
    return tasks.Plan(stream, at, windows, batch_size, carries=True)


def at(stream, index):
    return streams.Window(stream[0][index], stream[1][index])


def statistics_plan():
    t, b = np.arange(4), np.arange(2)[:, None]
    q = np.arange(2)[:, None, None]
    return make_plan((3 * t + 5 * b + 1 + q) % golden.VOCAB, (5 * t + 2 * b + 2 + q) % golden.VOCAB)


def adaptation_plan(windows=4):
    t, w = np.arange(4), np.arange(windows)[:, None, None]
    return make_plan((2 * t + w + 1) % golden.VOCAB, (3 * t + 2 * w) % golden.VOCAB)


@functools.cache
def case():
    model, params = golden.make("A")
    return (
        model,
        params,
        gradient_statistics.compute_statistics(model, params, statistics_plan(), chunk=1),
    )


@functools.cache
def adapter(windows=4, **options):
    model, _, statistics = case()
    return dyneval.DynamicEvaluation(model, adaptation_plan(windows), statistics, **options)


def adapt(run, settings):
    """Nats [windows, A, B, T] and weights; deterministic."""
    keys = montecarlo.sample_keys(KEY, len(settings))
    return run.adapt(case()[1], dyneval.stack_rules(settings), keys, 0.9)


@pytest.mark.slow
def test_statistics_are_those_of_lamb():
    _, _, statistics = case()
    np.testing.assert_allclose(statistics.losses, [8.764944, 7.108145], atol=1e-5)
    assert float(statistics.mean) == pytest.approx(0.016625, abs=1e-6)
    assert float(statistics.rms["embedding"].mean()) == pytest.approx(0.110827, abs=1e-6)


@pytest.mark.slow
def test_four_windows_are_those_of_lamb():
    _, params, _ = case()
    nats, adapted = adapt(adapter(), [SETTING, STILL])
    sums = nats.sum((2, 3))
    np.testing.assert_allclose(sums[:, 0], [8.263866, 8.313983, 7.943994, 7.989597], atol=1e-5)
    # The control: without updates the later windows differ.
    np.testing.assert_allclose(sums[:, 1], [8.263866, 8.309338, 7.942412, 7.974408], atol=1e-5)
    assert float(params["embedding"].sum()) == pytest.approx(0.280425, abs=1e-5)
    totals = adapted["embedding"].sum((1, 2))
    np.testing.assert_allclose(totals, [0.286228, 0.280425], atol=1e-5)


@pytest.mark.slow
def test_outcomes_are_the_scores_of_the_tokens():
    outcome, still = adapter()(case()[1], [SETTING, STILL], 0.9)
    assert outcome.mean() == pytest.approx(
        (8.263866 + 8.313983 + 7.943994 + 7.989597) / 16, abs=1e-6
    )
    assert still.mean() < outcome.mean()
    np.testing.assert_array_equal(
        outcome.scores.tokens, np.asarray(adaptation_plan().stream[1]).ravel()
    )
    assert outcome.diverged_at is None


@pytest.mark.slow
def test_the_weights_return_at_the_decay_rate():
    """With a decay of one at every weight the update undoes all that came before."""
    _, params, statistics = case()
    ones = jax.tree.map(jnp.ones_like, params)
    full = statistics._replace(rms=ones, mean=jnp.float32(1))

    @jax.jit
    def update(decay_rate):
        moved = jax.tree.map(lambda a: a + 1, params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        setting = STILL._replace(decay_rate=decay_rate)
        return dyneval.update_weights(moved, params, zeros, full, setting)["embedding"]

    np.testing.assert_allclose(update(5.0), params["embedding"], atol=1e-6)
    np.testing.assert_allclose(update(0.25), params["embedding"] + 0.75, atol=1e-6)


@pytest.mark.slow
def test_settings_side_by_side_are_those_alone():
    settings = [SETTING, OTHER]
    together, weights = adapt(adapter(), settings)
    for i, setting in enumerate(settings):
        alone, own = adapt(adapter(), [setting])
        np.testing.assert_allclose(together[:, i], alone[:, 0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            weights["embedding"][i], own["embedding"][0], rtol=1e-5, atol=1e-6
        )
    assert np.abs(together[:, 0] - together[:, 1]).max() > 1e-3


@pytest.mark.slow
def test_blocks_and_dispatches_do_not_change_the_result():
    settings = [SETTING, OTHER]
    _, params, _ = case()
    whole = adapter()(params, settings, 0.9)
    # Dispatches of three windows, of which the second is not full.
    pieces = adapter(parallel=1, chunk=3)(params, settings, 0.9)
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_allclose(one.scores.nats, other.scores.nats, rtol=1e-5, atol=1e-6)
    _, weights = adapt(adapter(parallel=1, chunk=3), [SETTING])
    assert float(weights["embedding"].sum()) == pytest.approx(0.286228, abs=1e-5)


@pytest.mark.slow
def test_a_mesh_of_eight_gives_what_one_device_does():
    settings = [SETTING, OTHER]
    mesh = partitioning.make_mesh()
    spread, weights = adapt(adapter(mesh=mesh), settings)
    whole, expected = adapt(adapter(), settings)
    np.testing.assert_allclose(spread, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights["embedding"], expected["embedding"], rtol=1e-5, atol=1e-6)
    copies = adapter(mesh=mesh)._copies(case()[1], count=8)[0]["embedding"]
    assert {shard.data.shape[0] for shard in copies.addressable_shards} == {1}


@pytest.mark.slow
def test_divergence_is_found_and_does_not_spread():
    _, params, _ = case()
    tame, wild = adapter()(params, [SETTING, WILD], 0.9)
    np.testing.assert_allclose(
        tame.scores.nats, adapter()(params, [SETTING], 0.9)[0].scores.nats, rtol=1e-5
    )
    assert wild.diverged_at is not None and wild.diverged_at >= 1
    assert math.isnan(wild.mean())
    assert len(wild.scores.nats) == 4 * wild.diverged_at
    assert math.isfinite(wild.scores.mean())
    assert wild.scores.nats[:4] == pytest.approx(tame.scores.nats[:4], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[SETTING], [SETTING, OTHER]])
def test_the_check_for_rounding_runs_the_program_of_the_scores(settings):
    model, params, statistics = case()
    run = dyneval.DynamicEvaluation(model, adaptation_plan(), statistics)
    run(params, settings, 0.9)
    programs = run._adapt_jitted._cache_size()
    distance = run.rounding_nats(params, SETTING, 0.9, len(settings))
    assert run._adapt_jitted._cache_size() == programs
    assert 0 <= distance < dyneval.CHAOTIC_NATS
    # Controls: another number of adaptations is another program, and divergence is no distance.
    assert run.rounding_nats(params, WILD, 0.9, 3 - len(settings)) == math.inf
    assert run._adapt_jitted._cache_size() == programs + 1


@pytest.mark.slow
def test_a_pass_ends_when_everything_diverged():
    nats, _ = adapt(adapter(12, chunk=2), [WILD])
    assert nats.shape[0] == 12 and np.isnan(nats[-1]).all()


@pytest.mark.slow
def test_samples_adapt_by_themselves_and_are_averaged():
    _, params, _ = case()
    run = adapter(dropout=DROPOUT)
    rates = montecarlo.scale_dropout(DROPOUT, 1.0)
    keys = montecarlo.sample_keys(KEY, 2)
    settings = dyneval.stack_rules([SETTING] * 2)
    nats, weights = run.adapt(params, settings, keys, 0.9, rates)
    probabilities = np.exp(-nats.astype(np.float64)).mean(1)
    outcome = run.sample(params, SETTING, KEY, 2, 0.9)
    np.testing.assert_allclose(outcome.scores.nats, -np.log(probabilities).ravel(), rtol=1e-5)
    sums = weights["embedding"].sum((1, 2))
    assert len({round(float(s), 5) for s in sums}) == 2  # Different masks, different weights.
    few = adapter(dropout=DROPOUT, parallel=1).sample(params, SETTING, KEY, 2, 0.9)
    np.testing.assert_allclose(few.scores.nats, outcome.scores.nats, rtol=1e-5)
    # Without adaptation it is Monte-Carlo dropout, with the same masks.
    model, _, _ = case()
    still = run.sample(params, STILL, KEY, 2, 0.9)
    plain = montecarlo.MonteCarlo(model, adaptation_plan(), DROPOUT, key=KEY, samples=2)(
        params, 0.9
    )
    np.testing.assert_allclose(still.scores.nats, plain.nats, rtol=1e-5)
    assert np.abs(still.scores.nats - outcome.scores.nats).max() > 1e-4


@pytest.mark.slow
def test_multiplier_zero_adapts_without_dropout():
    _, params, _ = case()
    run = adapter(dropout=DROPOUT)
    nats = run.sample(params, SETTING, KEY, 2, 0.9, 0.0).scores.nats
    np.testing.assert_allclose(nats, run(params, [SETTING], 0.9)[0].scores.nats, rtol=1e-5)


@pytest.mark.slow
def test_stripes_without_lines_do_not_dilute_the_statistics():
    """Stripes that only fill up a mesh are not part of the mean."""
    model, params, statistics = case()
    plan = statistics_plan()

    def padded(stream, index):
        window = at(stream, index)
        inputs, targets = (jnp.pad(a, ((0, 3), (0, 0))) for a in window[:2])
        return streams.Window(inputs, targets, jnp.array([4, 4, 0, 0, 0]))

    wide = gradient_statistics.compute_statistics(
        model, params, plan._replace(batch_at=padded, batch_size=5)
    )
    np.testing.assert_allclose(wide.losses, statistics.losses, rtol=1e-5)
    assert float(wide.mean) == pytest.approx(float(statistics.mean), rel=1e-5)
    short = gradient_statistics.compute_statistics(model, params, plan, max_windows=1)
    assert len(short.losses) == 1 and abs(float(short.mean) - float(statistics.mean)) > 1e-4


@pytest.mark.slow
def test_statistics_are_kept_until_something_changes(tmp_path, monkeypatch):
    model, params, statistics = case()
    runs = []

    def compute(model, params, plan, **options):
        runs.append(options["max_windows"])
        return statistics

    monkeypatch.setattr(gradient_statistics, "compute_statistics", compute)
    get = functools.partial(gradient_statistics.read_or_compute, tmp_path)
    for _ in range(2):
        found = get(100, model, params, statistics_plan())
    jax.tree.map(np.testing.assert_array_equal, found, statistics)
    assert len(runs) == 1
    other = {**params, "embedding": params["embedding"] + 1e-6}
    get(100, model, other, statistics_plan())  # Other weights,
    get(200, model, other, statistics_plan())  # another step,
    get(200, model, other, statistics_plan(), max_windows=1)  # fewer windows.
    assert len(runs) == 4
    (path,) = (tmp_path / "dyneval").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    get(200, model, other, statistics_plan(), max_windows=1)
    assert len(runs) == 5  # A damaged file is replaced,
    get(200, model, other, statistics_plan(), max_windows=1)
    assert len(runs) == 5  # and is good after that.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "losses", "rms.embedding"])
def test_statistics_whose_numbers_were_changed_are_made_again(name, tmp_path, monkeypatch, caplog):
    model, params, statistics = case()
    monkeypatch.setattr(gradient_statistics, "compute_statistics", lambda *_, **__: statistics)
    get = functools.partial(gradient_statistics.read_or_compute, tmp_path, 100, model, params)
    get(statistics_plan())
    get(statistics_plan())
    assert "computed again" not in caplog.text  # Control.
    (path,) = (tmp_path / "dyneval").iterdir()
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {name: np.zeros_like(arrays[name])})
    jax.tree.map(np.testing.assert_array_equal, get(statistics_plan()), statistics)
    assert "was changed; the statistics are computed again" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [SETTING._replace(epsilon=0.0), SETTING._replace(learning_rate=-1e-3)]
)
def test_settings_that_cannot_be_are_refused(setting):
    with pytest.raises(errors.UsageError, match="must be at least 0"):
        dyneval.stack_rules([setting])
    with pytest.raises(errors.UsageError, match="side by side"):
        adapter(parallel=0)
    with pytest.raises(errors.UsageError, match="rates of dropout"):
        adapter().sample(case()[1], SETTING, KEY, 2)

"""Streaming statistics are those of the whole, and hand-made gates give known numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.analysis import gate_figures, gate_statistics, loss_figures, token_losses
from mogrifier_jax.data import tasks, vocabularies
from mogrifier_jax.nn import models
from tests import quick

VOCAB, LINES, WINDOW, STRIPES = 7, 24, 5, 3


def direct(values, valid):
    """What `compute_statistics` and `Summary` must say, in float64 and at once."""
    values = np.asarray(values, np.float64)[np.asarray(valid)]
    return {
        "mean": values.mean(),
        "variance": values.var(),
        "variance_over_tokens": values.var(0).mean(),
        "minimum": values.min(),
        "maximum": values.max(),
        "saturated_low": (values < 0.1).mean(),
        "saturated_high": (values > 0.9).mean(),
    }


def streamed(values, valid, pieces):
    total = None
    for chunk, mask in zip(
        np.array_split(values, pieces), np.array_split(valid, pieces), strict=True
    ):
        total = gate_statistics.merge(
            total, gate_statistics.summarise(jnp.asarray(chunk), mask, 0.0, 1.0)
        )
    return total


@pytest.mark.slow
def test_merged_windows_equal_the_whole():
    rng = np.random.default_rng(0)
    values = rng.beta(0.4, 0.6, (30, 4, 6)).astype(np.float32)
    valid = rng.random((30, 4)) < 0.7
    total = streamed(values, valid, pieces=4)
    found, expected = gate_statistics.compute_statistics(total, 0.0, 1.0), direct(values, valid)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)
    assert found["tokens"] == valid.sum() and found["units"] == 6
    np.testing.assert_allclose(total.mean, values[valid].mean(0), rtol=2e-6)
    counts, _ = np.histogram(values[valid], gate_statistics.BINS, (0, 1))
    # A value on an edge may fall to either side of it.
    assert np.abs(np.cumsum(total.histogram - counts)).max() <= 2
    assert total.histogram.sum() == values[valid].size
    # The mask counts, and so does the distance between the means of windows.
    assert abs(found["mean"] / direct(values, np.ones_like(valid))["mean"] - 1) > 1e-4
    drifting = values + np.linspace(0, 3, 30, dtype=np.float32)[:, None, None]
    apart = streamed(drifting, valid, pieces=4)
    np.testing.assert_allclose(
        apart.m2.sum(), drifting[valid].var(0).sum() * valid.sum(), rtol=1e-5
    )
    assert total.m2.sum() < 0.5 * apart.m2.sum()


def test_windows_without_tokens_change_nothing():
    values, valid = np.full((2, 1, 3), 0.25, np.float32), np.ones((2, 1), bool)
    one = gate_statistics.merge(
        None, gate_statistics.summarise(jnp.asarray(values), valid, 0.0, 1.0)
    )
    empty = gate_statistics.summarise(jnp.asarray(values), ~valid, 0.0, 1.0)
    for a, b in zip(one, gate_statistics.merge(one, empty), strict=True):
        np.testing.assert_array_equal(a, b)


def test_hand_made_gates_have_known_saturation():
    """Two units: one is closed three times of four, the other open once and half open else."""
    unit_1, unit_2 = [0.0, 0.05, 0.09, 0.5], [0.95, 0.5, 0.5, 0.5]
    values = jnp.asarray([unit_1, unit_2], jnp.float32).T[:, None]
    found = gate_statistics.summarise(values, np.ones((4, 1), bool), 0.0, 1.0, bins=10)
    assert found.low.tolist() == [3, 0] and found.high.tolist() == [0, 1]
    assert found.histogram.tolist() == [3, 0, 0, 0, 0, 4, 0, 0, 0, 1]
    described = gate_statistics.compute_statistics(gate_statistics.merge(None, found), 0.0, 1.0)
    assert described["saturated_low"] == 3 / 8 and described["saturated_high"] == 1 / 8
    # The same values in a range that is twice as wide are closer to its lower end.
    wide = gate_statistics.summarise(values, np.ones((4, 1), bool), 0.0, 2.0, bins=10)
    assert wide.low.tolist() == [3, 0] and wide.high.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "rounds", "expected"),
    [
        ("f", 0, (0, 1)),
        ("c", 0, (-1, 1)),
        ("round4", 5, (0, 2)),
        ("x_scale", 5, (0, 8)),
        ("h_scale", 5, (0, 4)),
    ],
)
def test_ranges_are_those_of_the_paper(name, rounds, expected):
    """Together the rounds scale by 0 to 2^ceil(r/2) and 2^floor(r/2)."""
    assert gate_statistics.limits(name, rounds) == expected


def test_quantiles_come_from_the_histogram():
    assert gate_statistics.quantile(np.array([0, 10, 0, 0]), 0.5, 0.0, 4.0) == 1.5
    assert gate_statistics.quantile(np.array([5, 0, 0, 5]), 0.25, 0.0, 4.0) == 0.5


@pytest.fixture(scope="module")
def trial():
    """A model with rounds, a text in stripes, and every gate at every token."""
    model = models.make_model(VOCAB, hidden_size=6, num_layers=2, rounds=3, rank=2)
    params = quick.jit(model.init)(jax.random.key(0), **model.example())["params"]
    params = jax.tree.map(lambda leaf: 2 * leaf, params)  # Gates that do something.
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, VOCAB, LINES * 4).astype(np.uint8)
    tokens[3::4] = 0
    split = vocabularies.EncodedSplit(tokens, np.arange(LINES) * 4)
    plan = tasks.plan_text(split, 0, STRIPES, WINDOW)
    stripes = tokens.reshape(STRIPES, -1)
    inputs = np.concatenate([np.zeros((STRIPES, 1), int), stripes[:, :-1]], 1).astype(np.int32)
    gates = quick.jit(lambda x: model.apply({"params": params}, x, method="gates"))(inputs)[1]
    report = gate_statistics.GateAnalysis(model, plan)(params, top=4)
    return report, gates, inputs


@pytest.mark.slow
def test_a_streamed_text_equals_one_pass_over_all_of_it(trial):
    report, gates, inputs = trial
    assert inputs.shape[1] % WINDOW  # The last window is not full.
    rows = {(row["layer"], row["gate"]): row for row in report.rows()}
    valid = np.ones(inputs.T.shape, bool)
    for layer, values in enumerate(gates, start=1):
        for name in ("f", "i", "o"):
            expected = direct(values[name], valid)
            for key, value in expected.items():
                np.testing.assert_allclose(rows[layer, name][key], value, rtol=1e-5, atol=1e-7)
        scale = np.asarray(values["rounds"][0] * values["rounds"][2])
        np.testing.assert_allclose(rows[layer, "x_scale"]["mean"], scale.mean(), rtol=1e-5)
        assert rows[layer, "x_scale"]["tokens"] == inputs.size
    assert abs(rows[1, "f"]["mean"] / rows[2, "f"]["mean"] - 1) > 1e-3
    assert set(rows) == {
        (layer, name)
        for layer in (1, 2)
        for name in "f i o j c round1 round2 round3 x_scale h_scale".split()
    }


@pytest.mark.slow
def test_strong_gating_is_found_where_it_is(trial):
    report, gates, inputs = trial
    scales = [(g["rounds"][0] * g["rounds"][2], g["rounds"][1]) for g in gates]
    logs = [[np.abs(np.log2(scale)).mean(-1).T for scale in sides] for sides in scales]
    total = np.mean(logs, (0, 1))  # [B, T]
    moments = report.strongest()
    np.testing.assert_allclose(
        [moment.strength for moment in moments], np.sort(total.ravel())[::-1][:4], rtol=1e-5
    )
    row, step = np.unravel_index(total.argmax(), total.shape)
    assert moments[0].context[-1] == inputs[row, step] and len(moments[0].context) <= WINDOW
    vocab = vocabularies.Vocabulary(("<UNK>", "a", "b", "c", "d", "e", "▼"), "word")
    found = {row["token"]: row for row in report.token_rows(vocab)}
    for token, name in enumerate(vocab.tokens):
        assert found[name]["count"] == (inputs == token).sum()
        np.testing.assert_allclose(
            found[name]["strength"], total[inputs == token].mean(), rtol=1e-5
        )
    strengths = [row["strength"] for row in report.token_rows(vocab, min_count=2)]
    assert strengths == sorted(strengths, reverse=True) and len(set(strengths)) > 1


def test_twice_and_half_are_equally_strong():
    scale = jnp.asarray([[2.0, 2.0], [0.5, 0.5], [1.0, 1.0], [4.0, 1.0]])
    np.testing.assert_allclose(gate_statistics.strength(scale), [1, 1, 0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "rewired_lstm"])
def test_models_without_rounds_have_gates_too(cell):
    model = models.make_model(VOCAB, cell=cell, rounds=0, hidden_size=3, num_layers=1)
    params = quick.jit(model.init)(jax.random.key(0), **model.example())["params"]
    split = vocabularies.EncodedSplit(np.array([1, 2, 0], np.uint8), np.array([0]))
    report = gate_statistics.GateAnalysis(model, tasks.plan_text(split, 0, 1, 4))(params)
    assert [row["gate"] for row in report.rows()] == ["c", "f", "i", "j", "o"]
    assert report.rounds == 0 and report.strongest() == [] and report.counts.sum() == 3


def test_an_encoder_decoder_is_refused():
    model = models.make_model(VOCAB, encoder_decoder=True, hidden_size=3)
    with pytest.raises(errors.UsageError, match="give a language model"):
        gate_statistics.GateAnalysis(model, tasks.Plan((), None, 1, 1, False))


@pytest.mark.slow
def test_pictures_show_what_is_there(trial):
    report, *_ = trial
    reports = {"LSTM": report, "Mogrifier": report}
    fig = gate_figures.draw_histograms(reports, ("f", "o"))
    assert [axes.get_title() for axes in fig.axes] == [
        f"layer {layer}, {name} gate {name[0]}" for layer in (1, 2) for name in ("forget", "output")
    ]
    area = [patch.get_data() for patch in fig.axes[0].patches]
    assert np.sum(area[0].values * np.diff(area[0].edges)) == pytest.approx(1)
    assert len(gate_figures.draw_saturation(reports).axes[0].lines) == 3
    ranges = gate_figures.draw_ranges(report)
    labels = [tick.get_text() for tick in ranges.axes[0].get_yticklabels()]
    assert labels == [
        *("round 1, of x", "round 2, of h", "round 3, of x"),
        *("all rounds, of x", "all rounds, of h"),
    ]
    scale = np.ones((3, 5))
    scale[1, 2] = 4.0
    shown = (
        gate_figures.draw_heat_map(["a", "b", "c"], scale, units=2).axes[0].images[0].get_array()
    )
    assert shown.shape == (2, 3) and shown.max() == 2.0 and shown[1, 1] == 2.0
    rows = token_losses.after_losses(np.array([9.0, 1.0, 5.0, 2.0, 0.0]), thresholds=(0.5, 4))
    worse = [{**row, "nats": row["nats"] + 1} for row in rows]
    fig = loss_figures.draw_losses({"LSTM": worse, "Mogrifier": rows}, "loss before")
    assert [text.get_text() for text in fig.axes[0].get_xticklabels()] == ["> 0.5", "> 4"]
    assert fig.axes[1].lines[0].get_ydata().tolist() == [1.0, 1.0]

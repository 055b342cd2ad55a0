"""The examples run, in a few steps, and do what they say."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import mogrifier_jax
from mogrifier_jax import configs
from tests import browser, quick, workdir

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def load(monkeypatch):
    """Imports an example, with compilers that are in a hurry."""
    monkeypatch.setattr(jax, "jit", quick.jit)
    return lambda name: configs.load_file(str(ROOT / "examples" / name))


@pytest.mark.slow
def test_forecasts_go_on_from_forecasts(load):
    example = load("forecasting.py")
    model = example.Forecaster(mogrifier_jax.MogrifierLSTMCell(8, rounds=2))
    waves = example.make_waves(jax.random.key(0), 3, 12)
    assert waves.shape == (3, 12, 1) and 0.5 < abs(waves).max() < 1.2
    variables = jax.jit(model.init)(jax.random.key(1), waves)
    found = jax.jit(lambda v: example.forecast(model, v, waves, 4))(variables)
    apply = jax.jit(lambda v, xs: model.apply(v, xs)[0])
    longer = jnp.concatenate([waves, found[..., None]], axis=1)  # As if they were real.
    np.testing.assert_allclose(found, apply(variables, longer)[:, 11:15, 0], rtol=1e-4, atol=1e-5)
    other = longer.at[:, 12].add(0.5)
    assert abs(apply(variables, other)[:, 12, 0] - found[:, 1]).max() > 1e-4


@pytest.mark.slow
def test_forecasting_learns(load, capsys):
    example = load("forecasting.py")
    example.BATCH, example.TIME = 16, 32
    errors = example.main(60)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[3].startswith("Mogrifier LSTM")
    naive, found = errors["last value"], errors["Mogrifier LSTM"]
    assert len(found) == example.HORIZON and 0 < found[0] < 0.7 * naive[0]


@pytest.mark.slow
def test_tagging_learns(load, capsys):
    example = load("tagging.py")
    example.BATCH, example.TIME = 16, 8
    digits, lengths, tags = example.make_batch(jax.random.key(0), 5)
    for row, length, found in zip(*map(np.asarray, (digits, lengths, tags)), strict=True):
        expected = [row[:t].sum() > row[t:length].sum() for t in range(length)]
        assert found[:length].tolist() == expected and not row[length:].any()
    shares = example.main(60)
    assert "both directions" in capsys.readouterr().out
    assert shares["both directions"] > 0.75


@pytest.mark.slow
def test_adding_learns_in_nnx(load, capsys):
    example = load("adding_nnx.py")
    example.TIME = 4
    xs, sums = example.make_batch(jax.random.key(0), 5)
    assert xs.shape == (5, 4, 2) and (xs[..., 1].sum(1) == 2).all()
    np.testing.assert_allclose(np.where(xs[..., 1] == 1, xs[..., 0], 0).sum(1), sums, rtol=1e-6)
    errors = example.main(150)
    assert "Mogrifier LSTM" in capsys.readouterr().out
    assert errors["Mogrifier LSTM"] < 0.3 * errors["the mean"]


@pytest.mark.slow
@pytest.mark.skipif(not browser.BINARY, reason="chromium is not installed")
def test_a_picture_of_the_page_is_taken(load, tmp_path):
    text = "the cat sat on the mat\n"
    workdir.write(tmp_path / "run", text, hidden_size=6, num_layers=1, rounds=3)
    example = load("explore.py")
    example.main(tmp_path / "run", tmp_path / "explore.png", "the mat")
    with Image.open(tmp_path / "explore.png") as picture:
        assert picture.width == example.WIDTH * example.SCALE
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 100  # It is not blank.

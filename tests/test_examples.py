"""The examples run in a short form and do what they say."""

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
    """Imports an example, with a `jit` that compiles quickly."""
    monkeypatch.setattr(jax, "jit", quick.jit)
    return lambda name: configs.load_file(str(ROOT / "examples" / name))


@pytest.mark.slow
def test_forecasts_continue_from_forecasts(load):
    example = load("forecasting.py")
    model = example.Forecaster(mogrifier_jax.MogrifierLSTMCell(8, rounds=2))
    waves = example.make_waves(jax.random.key(0), 3, 12)
    assert waves.shape == (3, 12, 1) and 0.5 < abs(waves).max() < 1.2
    variables = jax.jit(model.init)(jax.random.key(1), waves)
    found = jax.jit(lambda v: example.forecast(model, v, waves, 4))(variables)
    apply = jax.jit(lambda v, xs: model.apply(v, xs)[1])
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


def test_the_pinball_loss_is_least_at_the_quantile(load, monkeypatch):
    example = load("quantiles.py")
    targets = jnp.linspace(0.0, 1.0, 101)
    guesses = np.linspace(0.0, 1.0, 21)
    for level in example.QUANTILES:
        monkeypatch.setattr(example, "QUANTILES", (level,))
        losses = [example.pinball_loss(jnp.full((101, 1), guess), targets) for guess in guesses]
        np.testing.assert_allclose(guesses[np.argmin(losses)], level, atol=1e-6)


@pytest.mark.slow
def test_quantiles_are_learned(load, capsys):
    example = load("quantiles.py")
    example.BATCH, example.TIME = 16, 32
    waves = example.make_waves(jax.random.key(0), 3, 12)
    targets = example.cut_targets(waves)
    assert targets.shape == (3, 12 - example.HORIZON, example.HORIZON)
    np.testing.assert_array_equal(targets[:, 1, 0], waves[:, 2])
    scores = example.main(80)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[3].startswith("Mogrifier LSTM")
    naive, learned = scores["always the same"], scores["Mogrifier LSTM"]
    assert learned["pinball loss"] < 0.75 * naive["pinball loss"]
    assert 0.6 < learned["inside"] < 0.95 and learned["width"] < naive["width"]
    quantiles = example.Forecaster(mogrifier_jax.LSTMCell(4)).init_with_output(
        jax.random.key(0), waves
    )[0]
    assert (jnp.diff(quantiles, axis=-1) > 0).all()


@pytest.mark.slow
def test_streaming_equals_the_whole_sequence(load, capsys):
    example = load("streaming.py")
    example.BATCH, example.TIME = 16, 32
    found = example.main(5)  # Too few to detect anything, and enough to change all weights.
    assert f"of {found['glitches']} glitches detected" in capsys.readouterr().out
    assert found["largest difference"] < 1e-5 and found["glitches"] > 20
    model = example.Detector()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1, 1)))
    stream = example.Stream(model, variables)
    first = stream(0.5)
    assert stream(0.5) != first  # It remembers, and a new stream does not.
    assert example.Stream(model, variables)(0.5) == first


@pytest.fixture
def ppo(load):
    example = load("memory_ppo.py")
    example.BATCH, example.TIME = 16, 24
    example.SHORTEST, example.LONGEST = 2, 4
    return example


def test_the_maze_rewards_the_turn_that_the_signal_shows(ppo):
    maze = ppo.new_mazes(jax.random.key(0), 8)
    signal = ppo.observe(maze)[:, 0]
    remembered = jnp.where(signal < 0, ppo.TURN_LEFT, ppo.TURN_RIGHT)
    assert set(remembered.tolist()) == {ppo.TURN_LEFT, ppo.TURN_RIGHT}
    # Wrong turns on the way cost a little and do not move.
    same, rewards, done = ppo.act(maze, remembered, jax.random.key(1))
    assert not done.any() and (same.position == 0).all()
    np.testing.assert_allclose(rewards, -0.1)
    for steps in range(ppo.LONGEST):
        at_junction = ppo.observe(maze)[:, 1] == 1
        assert (ppo.observe(maze)[:, 0] != 0).all() == (steps == 0)  # The signal is gone.
        maze, rewards, done = ppo.act(maze, jnp.zeros(8, int), jax.random.key(2))
        assert not done.any()
        np.testing.assert_allclose(rewards, jnp.where(at_junction, -0.1, 0.0))
    fresh, rewards, done = ppo.act(maze, remembered, jax.random.key(3))
    assert done.all() and (rewards == 1).all() and (fresh.position == 0).all()
    _, rewards, _ = ppo.act(maze, 3 - remembered, jax.random.key(3))
    assert (rewards == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["LSTMCell", "GRUCell"])
def test_an_agent_learns_from_what_it_saw_when_it_acted(ppo, cell):
    agent = ppo.Agent(getattr(mogrifier_jax, cell)(8))
    carry = agent.cell.initialize_carry(jax.random.key(0), (16, 16))
    carry = jax.tree.map(lambda a: a + 0.5, carry)  # As in the middle of an episode.
    maze, resets = ppo.new_mazes(jax.random.key(0), 16), jnp.zeros(16, bool)
    init = jax.jit(agent.init)
    params = init(jax.random.key(1), carry, ppo.observe(maze)[:, None], resets[:, None])
    play = jax.jit(lambda p: ppo.play(agent, p, (carry, maze, resets), jax.random.key(2))[1])
    rollout = play(params)
    assert rollout.resets.any() and not rollout.resets.all()
    np.testing.assert_array_equal(rollout.resets[:, 1:], rollout.done[:, :-1])

    @jax.jit
    def replay(resets):
        _, logits, values = agent.apply(params, rollout.carry, rollout.observations, resets)
        return ppo.log_prob(logits, rollout.actions), values

    log_probs, values = replay(rollout.resets)
    np.testing.assert_allclose(log_probs, rollout.log_probs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values, rollout.values, rtol=1e-5, atol=1e-6)
    assert abs(replay(jnp.zeros_like(rollout.resets))[0] - rollout.log_probs).max() > 1e-3


@pytest.mark.slow
def test_advantages_stop_at_the_end_of_an_episode(ppo):
    ppo.BATCH = 2
    zeros = jnp.zeros((2, 4))
    rewards = zeros.at[:, 1].set(1.0).at[:, 3].set(10.0)
    done = jnp.array([[False, True, False, False], [False] * 4])
    rollout = ppo.Rollout(*[zeros] * 6, rewards=rewards, done=done)
    found = ppo.estimate_advantages(rollout, jnp.zeros(2))
    decay = ppo.DISCOUNT * ppo.TRACE_DECAY
    np.testing.assert_allclose(found[0], [decay, 1.0, 10 * decay**1, 10.0], rtol=1e-6)
    np.testing.assert_allclose(found[1, 0], decay + 10 * decay**3, rtol=1e-6)


@pytest.mark.slow
def test_the_agent_learns_to_remember(ppo):
    _, rates = ppo.train(mogrifier_jax.LSTMCell(16), 30)
    assert len(rates) == 30 and all(0 <= rate <= 1 for rate in rates)
    assert np.mean(rates[-5:]) > 0.8 > np.mean(rates[:3])  # Guessing gives 0.5.


@pytest.mark.slow
def test_digits_are_learned(load, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    example = load("digits.py")
    (pixels, labels), (test_pixels, test_labels) = example.load_digits()
    assert pixels.shape == (1347, 64) and test_pixels.shape == (450, 64)
    assert 0 <= pixels.min() and pixels.max() == 1 and set(labels.tolist()) == set(range(10))

    def zeros_and_ones(pixels, labels):
        """Two digits, and every second row and column, so that the test is short."""
        keep = labels < 2
        return pixels[keep].reshape(-1, 8, 8)[:, 1::2, 1::2].reshape(-1, 16), labels[keep]

    splits = zeros_and_ones(pixels, labels), zeros_and_ones(test_pixels, test_labels)
    monkeypatch.setattr(example, "load_digits", lambda: splits)
    example.BATCH = 16  # More steps per epoch.
    accuracies = example.main(12)
    assert "Mogrifier LSTM" in capsys.readouterr().out
    assert min(accuracies.values()) > 0.9


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

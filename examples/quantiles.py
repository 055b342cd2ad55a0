r"""Probabilistic forecasting: quantiles instead of a single value, on waves with bursts of noise.

    python examples/quantiles.py

A model reads a wave and says at each step, for each of the next HORIZON values, which value will be
exceeded with a probability of 90%, 50% and 10%. The noise of a wave comes and goes, so a good
forecast is wide at one time and narrow at another. The pinball loss makes the outputs quantiles.
Axes: B waves, T time, S steps ahead, Q quantiles.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import mogrifier_jax

BATCH, TIME, HORIZON = 64, 96, 8
QUANTILES = (0.1, 0.5, 0.9)


class Forecaster(nn.Module):
    """Values [B, T] to quantiles [B, T, S, Q] of the values that follow each of them."""

    cell: nn.RNNCellBase

    @nn.compact
    def __call__(self, values):
        """Quantiles are in order, because each is the one below it plus a positive distance."""
        ys = mogrifier_jax.RNN(self.cell)(values[..., None])
        raw = nn.Dense(HORIZON * len(QUANTILES))(ys)
        raw = raw.reshape(*ys.shape[:-1], HORIZON, len(QUANTILES))
        distances = nn.softplus(raw[..., 1:])
        return jnp.cumsum(jnp.concatenate([raw[..., :1], distances], axis=-1), axis=-1)


def make_waves(key, count, time):
    """Sines [count, time] with noise that swells and fades at its own rate."""
    keys = jax.random.split(key, 5)
    steps = jnp.arange(time)[None]
    frequency, rate = (
        jax.random.uniform(key, (count, 1), minval=low, maxval=high)
        for key, low, high in ((keys[0], 0.2, 0.5), (keys[1], 0.1, 0.2))
    )
    start, phase = (jax.random.uniform(key, (count, 1), maxval=6.28) for key in keys[2:4])
    loudness = 0.5 * jnp.square(jnp.sin(phase + rate * steps))
    return jnp.sin(start + frequency * steps) + loudness * jax.random.normal(keys[4], (count, time))


def cut_targets(waves):
    """Waves [B, T + S] to the S values after each of the first T, [B, T, S]."""
    time = waves.shape[1] - HORIZON
    return jnp.stack([waves[:, s : s + time] for s in range(1, HORIZON + 1)], axis=-1)


def pinball_loss(quantiles, targets):
    """Costs `q` per unit that a target is above quantile q, and `1 - q` per unit below."""
    error = targets[..., None] - quantiles
    level = jnp.broadcast_to(jnp.array(QUANTILES), error.shape)
    return jnp.maximum(level * error, (level - 1) * error).mean()


def train(model, num_steps, seed=0):
    """Learns from new waves at every step; returns the variables."""
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))

    def loss_fn(variables, waves):
        return pinball_loss(model.apply(variables, waves[:, :-HORIZON]), cut_targets(waves))

    @jax.jit
    def step(variables, opt_state, key):
        grads = jax.grad(loss_fn)(variables, make_waves(key, BATCH, TIME + HORIZON))
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(variables, updates), opt_state

    init_key, data_key = jax.random.split(jax.random.key(seed))
    variables = jax.jit(model.init)(init_key, jnp.zeros((1, 1)))
    opt_state = tx.init(variables)
    for number in range(num_steps):
        variables, opt_state = step(variables, opt_state, jax.random.fold_in(data_key, number))
    return variables


def evaluate(quantiles, targets):
    """The pinball loss, the share of targets between the outer quantiles, and their distance."""
    low, high = quantiles[..., 0], quantiles[..., -1]
    return {
        "pinball loss": float(pinball_loss(quantiles, targets)),
        "inside": float(((low < targets) & (targets < high)).mean()),
        "width": float((high - low).mean()),
    }


def main(num_steps=600):
    """Trains two models; prints and returns the scores of their forecasts of new waves."""
    waves = make_waves(jax.random.key(1), 256, TIME + HORIZON)
    targets = cut_targets(waves)
    # The same quantiles for every wave and step: what is known without a model.
    constant = jnp.broadcast_to(jnp.quantile(waves, jnp.array(QUANTILES)), (*targets.shape, 3))
    scores = {"always the same": evaluate(constant, targets)}
    cells = {
        "LSTM": mogrifier_jax.LSTMCell(features=33),
        "Mogrifier LSTM": mogrifier_jax.MogrifierLSTMCell(features=32, rounds=4),
    }
    for name, cell in cells.items():
        model = Forecaster(cell)
        quantiles = jax.jit(model.apply)(train(model, num_steps), waves[:, :-HORIZON])
        scores[name] = evaluate(quantiles, targets)
    print(f"{'':18}pinball loss   inside 10% to 90%   width")
    for name, score in scores.items():
        loss, inside, width = score.values()
        print(f"{name:18}{loss:12.4f}{inside:20.1%}{width:8.2f}")
    return scores


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

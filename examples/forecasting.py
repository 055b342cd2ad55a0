r"""Forecasting a time series: the cell in `RNN`, on waves whose frequency keeps changing.

    python examples/forecasting.py

A model reads a wave and predicts the next value at each step. After the end of the wave it
continues from its own forecasts. Needs nothing but the package. Axes: B waves, T time.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import mogrifier_jax

BATCH, TIME, HORIZON = 64, 96, 16


class Forecaster(nn.Module):
    """Values [B, T, 1] to the value after each of them, and the carry to continue from."""

    cell: nn.RNNCellBase

    @nn.compact
    def __call__(self, values, carry=None):
        """Starts from a zero carry unless one is given; returns (carry, forecasts)."""
        carry, ys = mogrifier_jax.RNN(self.cell, return_carry=True)(values, initial_carry=carry)
        return carry, nn.Dense(1)(ys)


def make_waves(key, count, time):
    """Noisy sines [count, time, 1], each with a frequency that is modulated at its own rate."""
    keys = jax.random.split(key, 4)
    frequency = jax.random.uniform(keys[0], (count, 1), minval=0.2, maxval=0.5)
    rate = jax.random.uniform(keys[1], (count, 1), minval=0.05, maxval=0.15)
    start = jax.random.uniform(keys[2], (count, 1), maxval=6.28)
    steps = jnp.arange(time)[None]
    phase = start + jnp.cumsum(frequency * (1 + 0.8 * jnp.sin(start + rate * steps)), axis=1)
    noise = 0.02 * jax.random.normal(keys[3], (count, time))
    return (jnp.sin(phase) + noise)[..., None]


def train(model, num_steps, seed=0):
    """Learns from new waves at every step; returns the variables."""
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))

    def loss(variables, waves):
        _, forecasts = model.apply(variables, waves[:, :-1])
        return jnp.square(forecasts - waves[:, 1:]).mean()

    @jax.jit
    def step(variables, opt_state, key):
        grads = jax.grad(loss)(variables, make_waves(key, BATCH, TIME))
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(variables, updates), opt_state

    init_key, data_key = jax.random.split(jax.random.key(seed))
    variables = jax.jit(model.init)(init_key, jnp.zeros((1, 1, 1)))
    opt_state = tx.init(variables)
    for number in range(num_steps):
        variables, opt_state = step(variables, opt_state, jax.random.fold_in(data_key, number))
    return variables


def forecast(model, variables, waves, horizon):
    """The `horizon` values [B, horizon] after the waves, each predicted from the one before."""
    carry, forecasts = model.apply(variables, waves)

    def body(state, _):
        carry, value = state
        carry, following = model.apply(variables, value, carry)
        return (carry, following), value[:, 0, 0]

    _, values = jax.lax.scan(body, (carry, forecasts[:, -1:]), None, length=horizon)
    return values.T


def main(num_steps=600):
    """Trains an LSTM and a Mogrifier LSTM; prints and returns the errors of their forecasts."""
    waves = make_waves(jax.random.key(1), 256, TIME + HORIZON)
    past, future = waves[:, :TIME], waves[:, TIME:, 0]
    models = {
        "LSTM": Forecaster(mogrifier_jax.LSTMCell(features=33)),
        "Mogrifier LSTM": Forecaster(mogrifier_jax.MogrifierLSTMCell(32, rounds=4)),
    }
    errors = {"last value": jnp.square(past[:, -1] - future).mean(0)}
    sizes = {"last value": 0}
    for name, model in models.items():
        variables = train(model, num_steps)
        forecasts = jax.jit(lambda v, model=model: forecast(model, v, past, HORIZON))(variables)
        errors[name] = jnp.square(forecasts - future).mean(0)
        sizes[name] = sum(leaf.size for leaf in jax.tree.leaves(variables))
    print("mean squared error, steps ahead:    1         4        16    weights")
    for name, error in errors.items():
        shown = "".join(f"{float(error[ahead - 1]):10.4f}" for ahead in (1, 4, 16))
        print(f"{name:28}{shown}{sizes[name]:11,}")
    return {name: error.tolist() for name, error in errors.items()}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

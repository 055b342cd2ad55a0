r"""Forecasting a time series: the cell in `RNN`, on waves whose pace changes all the time.

    python examples/forecasting.py

A model reads a wave and says at each step what comes next; then it goes on alone, from its own
forecasts. Needs nothing but the package. Axes: B waves, T time.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import mogrifier_jax

BATCH, TIME, HORIZON = 64, 96, 16


class Forecaster(nn.Module):
    """Values [B, T, 1] to the value after each of them, and the carry to go on from."""

    cell: nn.RNNCellBase

    @nn.compact
    def __call__(self, values, carry=None):
        """Starts from a zero carry unless one is given."""
        carry, ys = mogrifier_jax.RNN(self.cell, return_carry=True)(values, initial_carry=carry)
        return nn.Dense(1)(ys), carry


def make_waves(key, count, time):
    """Noisy sines [count, time, 1], each with a pace that swings in a rhythm of its own."""
    keys = jax.random.split(key, 4)
    pace = jax.random.uniform(keys[0], (count, 1), minval=0.2, maxval=0.5)
    rhythm = jax.random.uniform(keys[1], (count, 1), minval=0.05, maxval=0.15)
    start = jax.random.uniform(keys[2], (count, 1), maxval=6.28)
    steps = jnp.arange(time)[None]
    phase = start + jnp.cumsum(pace * (1 + 0.8 * jnp.sin(start + rhythm * steps)), axis=1)
    noise = 0.02 * jax.random.normal(keys[3], (count, time))
    return (jnp.sin(phase) + noise)[..., None]


def train(model, num_steps, seed=0):
    """Learns from new waves at every step; returns the variables."""
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))

    def loss(variables, waves):
        forecasts, _ = model.apply(variables, waves[:, :-1])
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
    """The next `horizon` values [B, horizon] after the waves, each from the one before."""
    values, carry = model.apply(variables, waves)

    def body(state, _):
        value, carry = state
        following, carry = model.apply(variables, value, carry)
        return (following, carry), value[:, 0, 0]

    _, values = jax.lax.scan(body, (values[:, -1:], carry), None, length=horizon)
    return values.T


def main(num_steps=600):
    """Trains an LSTM and a Mogrifier LSTM; prints and returns the errors of their forecasts."""
    waves = make_waves(jax.random.key(1), 256, TIME + HORIZON)
    past, future = waves[:, :TIME], waves[:, TIME:, 0]
    models = {
        "LSTM": Forecaster(mogrifier_jax.LSTMCell(hidden_size=33)),
        "Mogrifier LSTM": Forecaster(mogrifier_jax.MogrifierLSTMCell(32, rounds=4)),
    }
    errors = {"last value": jnp.square(past[:, -1] - future).mean(0)}
    sizes = {"last value": 0}
    for name, model in models.items():
        variables = train(model, num_steps)
        found = jax.jit(lambda v, model=model: forecast(model, v, past, HORIZON))(variables)
        errors[name] = jnp.square(found - future).mean(0)
        sizes[name] = sum(leaf.size for leaf in jax.tree.leaves(variables))
    print("mean squared error, steps ahead:    1         4        16    weights")
    for name, error in errors.items():
        shown = "".join(f"{float(error[ahead - 1]):10.4f}" for ahead in (1, 4, 16))
        print(f"{name:28}{shown}{sizes[name]:11,}")
    return {name: error.tolist() for name, error in errors.items()}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

r"""Streaming: a model that is trained on whole sequences, used on one value at a time.

    python examples/streaming.py

A detector watches a sine wave for glitches. It is trained on windows with `RNN`. In use it keeps
the carry and calls the same parameters on each new value, with the same results: the state has a
fixed size, so a step takes the same time after a million values as after one. Axes: B waves, T
time.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import mogrifier_jax

BATCH, TIME = 64, 96
GLITCH = 0.6  # How far a glitch is from the wave.


class Detector(nn.Module):
    """Values [B, T, 1] to the logit [B, T] of a glitch at each of them, and the carry."""

    @nn.compact
    def __call__(self, values, carry=None):
        """Starts from a fresh carry unless one is given; returns (carry, logits)."""
        cell = mogrifier_jax.MogrifierLSTMCell(features=32, rounds=4)
        carry, ys = mogrifier_jax.RNN(cell, return_carry=True)(values, initial_carry=carry)
        return carry, nn.Dense(1)(ys)[..., 0]


def make_waves(key, count, time):
    """Noisy sines [count, time, 1] with some glitches, and where these are, [count, time]."""
    keys = jax.random.split(key, 5)
    frequency = jax.random.uniform(keys[0], (count, 1), minval=0.1, maxval=0.5)
    phase = jax.random.uniform(keys[1], (count, 1), maxval=2 * jnp.pi)
    noise = 0.05 * jax.random.normal(keys[2], (count, time))
    glitches = jax.random.bernoulli(keys[3], 0.05, (count, time))
    sign = jax.random.rademacher(keys[4], (count, time))
    values = jnp.sin(phase + frequency * jnp.arange(time)[None]) + noise + GLITCH * sign * glitches
    return values[..., None], glitches


def train(model, num_steps, seed=0):
    """Learns from new waves at every step; returns the variables."""
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))

    def loss_fn(variables, values, glitches):
        _, logits = model.apply(variables, values)
        return optax.sigmoid_binary_cross_entropy(logits, glitches.astype(jnp.float32)).mean()

    @jax.jit
    def step(variables, opt_state, key):
        grads = jax.grad(loss_fn)(variables, *make_waves(key, BATCH, TIME))
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(variables, updates), opt_state

    init_key, data_key = jax.random.split(jax.random.key(seed))
    variables = jax.jit(model.init)(init_key, jnp.zeros((1, 1, 1)))
    opt_state = tx.init(variables)
    for number in range(num_steps):
        variables, opt_state = step(variables, opt_state, jax.random.fold_in(data_key, number))
    return variables


class Stream:
    """The detector for one value at a time; it remembers the values before."""

    def __init__(self, model, variables):
        @jax.jit
        def step(variables, value, carry):
            carry, logits = model.apply(variables, value[None, None, None], carry)
            return carry, nn.sigmoid(logits[0, 0])

        # The carry of an empty window is the fresh one, in the structure that the model needs.
        self.carry, _ = model.apply(variables, jnp.zeros((1, 0, 1)))
        self.variables, self.step = variables, step

    def __call__(self, value):
        """The probability that this value is a glitch."""
        self.carry, probability = self.step(self.variables, jnp.float32(value), self.carry)
        return float(probability)


def main(num_steps=400):
    """Trains, then streams a wave; prints and returns how well both ways of calling agree."""
    model = Detector()
    variables = train(model, num_steps)
    values, glitches = make_waves(jax.random.key(1), 1, 1000)
    stream = Stream(model, variables)
    streamed = jnp.array([stream(value) for value in values[0, :, 0]])
    windowed = nn.sigmoid(jax.jit(model.apply)(variables, values)[1][0])
    alarms = streamed > 0.5
    found = {
        "glitches": int(glitches.sum()),
        "detected": int((alarms & glitches[0]).sum()),
        "false alarms": int((alarms & ~glitches[0]).sum()),
        "largest difference": float(abs(streamed - windowed).max()),
    }
    print(f"{found['detected']} of {found['glitches']} glitches detected,", end=" ")
    print(f"{found['false alarms']} false alarms in {len(streamed)} values")
    print(
        f"one value at a time and all at once differ by at most {found['largest difference']:.1e}"
    )
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

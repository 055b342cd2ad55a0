r"""The adding problem in Flax NNX: the sum of the two numbers of a sequence that are marked.

    python examples/adding_nnx.py

A recurrent network has to remember the first marked number until the second one comes. Needs
nothing but the package. Axes: B sequences, T time.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mogrifier_jax

BATCH, TIME = 64, 30


class Adder(nnx.Module):
    """Values and marks [B, T, 2] to a sum [B]."""

    def __init__(self, hidden_features, rngs):
        cell = mogrifier_jax.nnx.MogrifierLSTMCell(2, hidden_features, rounds=4, rngs=rngs)
        self.rnn = mogrifier_jax.nnx.RNN(cell)
        self.head = nnx.Linear(hidden_features, 1, rngs=rngs)

    def __call__(self, xs):
        """Reads the sequences and answers at their end."""
        return self.head(self.rnn(xs)[:, -1])[:, 0]


def make_batch(key, count):
    """Sequences [count, T, 2] of a number and its mark, and the sums [count]."""
    value_key, mark_key = jax.random.split(key)
    values = jax.random.uniform(value_key, (count, TIME))
    places = jax.random.uniform(mark_key, (count, TIME)).argsort(axis=1)[:, :2]
    marks = jax.nn.one_hot(places, TIME).sum(1)
    return jnp.stack([values, marks], -1), (values * marks).sum(1)


def main(num_steps=500):
    """Trains; prints and returns the mean squared errors of the model and of the mean."""
    model = Adder(32, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        xs, sums = make_batch(key, BATCH)
        grads = nnx.grad(lambda model: jnp.square(model(xs) - sums).mean())(model)
        optimizer.update(model, grads)

    key = jax.random.key(0)
    for number in range(num_steps):
        step(model, optimizer, jax.random.fold_in(key, number))
    xs, sums = make_batch(jax.random.fold_in(key, num_steps), 1000)
    errors = {
        "the mean": float(sums.var()),
        "Mogrifier LSTM": float(jnp.square(nnx.jit(model)(xs) - sums).mean()),
    }
    for name, error in errors.items():
        print(f"mean squared error of {name:15}{error:8.4f}")
    return errors


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

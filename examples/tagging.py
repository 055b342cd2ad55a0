r"""Tagging: the cell in `nn.Bidirectional`, with sequences of different lengths in a batch.

    python examples/tagging.py

The tag of a position depends on both sides of it: it says whether the digits before it add up to
more than the digits from it on. A model that reads in one direction can only guess. Axes: B
sequences, T time.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import mogrifier_jax

BATCH, TIME = 64, 20


class Tagger(nn.Module):
    """Digits [B, T] and lengths [B] to the logit [B, T] of each tag."""

    both: bool  # Whether to read in both directions.

    @nn.compact
    def __call__(self, digits, lengths):
        """Logits beyond the length of a sequence are meaningless."""
        rnn = mogrifier_jax.RNN(mogrifier_jax.MogrifierLSTMCell(features=24, rounds=4, rank=8))
        if self.both:
            rnn = nn.Bidirectional(
                rnn, mogrifier_jax.RNN(mogrifier_jax.MogrifierLSTMCell(24, rounds=4, rank=8))
            )
        ys = rnn(nn.Embed(10, 8)(digits), seq_lengths=lengths)
        return nn.Dense(1)(ys)[..., 0]


def make_batch(key, count):
    """Digits, lengths and tags; digits beyond the lengths are zero."""
    digit_key, length_key = jax.random.split(key)
    lengths = jax.random.randint(length_key, (count,), TIME // 2, TIME + 1)
    inside = jnp.arange(TIME)[None] < lengths[:, None]
    digits = jnp.where(inside, jax.random.randint(digit_key, (count, TIME), 0, 10), 0)
    before = jnp.cumsum(digits, axis=1) - digits
    return digits, lengths, before > digits.sum(1, keepdims=True) - before


def train(model, num_steps, seed=0):
    """Learns from new sequences at every step; returns the variables."""
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))

    def loss(variables, digits, lengths, tags):
        losses = optax.sigmoid_binary_cross_entropy(
            model.apply(variables, digits, lengths), tags.astype(jnp.float32)
        )
        inside = jnp.arange(TIME)[None] < lengths[:, None]
        return (losses * inside).sum() / inside.sum()

    @jax.jit
    def step(variables, opt_state, key):
        grads = jax.grad(loss)(variables, *make_batch(key, BATCH))
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(variables, updates), opt_state

    init_key, data_key = jax.random.split(jax.random.key(seed))
    variables = jax.jit(model.init)(init_key, *make_batch(init_key, 1)[:2])
    opt_state = tx.init(variables)
    for number in range(num_steps):
        variables, opt_state = step(variables, opt_state, jax.random.fold_in(data_key, number))
    return variables


def main(num_steps=400):
    """Trains with one and with both directions; prints and returns the shares of right tags."""
    digits, lengths, tags = make_batch(jax.random.key(1), 256)
    inside = jnp.arange(TIME)[None] < lengths[:, None]
    shares = {}
    for name, both in (("one direction", False), ("both directions", True)):
        model = Tagger(both)
        logits = jax.jit(model.apply)(train(model, num_steps), digits, lengths)
        right = ((logits > 0) == tags) & inside
        shares[name] = float(right.sum() / inside.sum())
        print(f"{name:16}{shares[name]:8.1%} of the tags are right")
    return shares


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

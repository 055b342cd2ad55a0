r"""Sequence classification in Flax NNX: handwritten digits, read one pixel after the other.

    pip install scikit-learn
    python examples/digits.py

scikit-learn comes with 1,797 images of 8 x 8 pixels. As sequences of 64 pixels they are a small
sibling of sequential MNIST: the first strokes have to be remembered to the end. Axes: B images, T
pixels.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn import datasets, model_selection

import mogrifier_jax

BATCH = 64
CLASSES = 10


class Classifier(nnx.Module):
    """Pixels [B, T] to the logits [B, 10] of the digits."""

    def __init__(self, cell, rngs):
        self.rnn = mogrifier_jax.nnx.RNN(cell, return_carry=True)
        self.head = nnx.Linear(cell.hidden_features, CLASSES, rngs=rngs)

    def __call__(self, pixels):
        """Reads the pixels and answers from the last state."""
        carry, _ = self.rnn(pixels[..., None])
        return self.head(carry.h)


def load_digits(seed=0):
    """(pixels, labels) of the training and of the test images; pixels are between 0 and 1."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    split = model_selection.train_test_split(
        pixels.astype("float32") / 16, labels, test_size=0.25, stratify=labels, random_state=seed
    )
    train_pixels, test_pixels, train_labels, test_labels = map(jnp.asarray, split)
    return (train_pixels, train_labels), (test_pixels, test_labels)


def train(model, pixels, labels, num_epochs):
    """Trains in random batches, with a learning rate that falls to zero."""
    steps = len(pixels) // BATCH
    schedule = optax.cosine_decay_schedule(1e-2, num_epochs * steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, pixels, labels):
        return optax.softmax_cross_entropy_with_integer_labels(model(pixels), labels).mean()

    @nnx.jit
    def step(model, optimizer, rows):
        grads = nnx.grad(loss_fn)(model, pixels[rows], labels[rows])
        optimizer.update(model, grads)

    for epoch in range(num_epochs):
        order = jax.random.permutation(jax.random.key(epoch), len(pixels))
        for rows in order[: steps * BATCH].reshape(steps, BATCH):
            step(model, optimizer, rows)


def main(num_epochs=30):
    """Trains an LSTM and a Mogrifier LSTM; prints and returns their accuracies on test images."""
    (pixels, labels), (test_pixels, test_labels) = load_digits()
    rngs = nnx.Rngs(0)
    cells = {
        "LSTM": mogrifier_jax.nnx.LSTMCell(1, 64, chrono_max=64.0, rngs=rngs),
        "Mogrifier LSTM": mogrifier_jax.nnx.MogrifierLSTMCell(
            1, 64, rounds=2, chrono_max=64.0, rngs=rngs
        ),
    }
    accuracies = {}
    for name, cell in cells.items():
        model = Classifier(cell, rngs)
        train(model, pixels, labels, num_epochs)
        accuracies[name] = float((nnx.jit(model)(test_pixels).argmax(-1) == test_labels).mean())
        size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        print(f"{name:15} {size:7,} weights: {accuracies[name]:6.1%} of the test images are right")
    return accuracies


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

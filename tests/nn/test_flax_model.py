"""A model written for Flax runs with ours after only the names of classes have been replaced."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import mogrifier_jax
from tests import quick

LINEN = """
class Model(nn.Module):
    features: int = 6

    @nn.compact
    def __call__(self, xs, lengths):
        cell = nn.OptimizedLSTMCell(
            self.features,
            kernel_init=nn.initializers.xavier_uniform(),
            recurrent_kernel_init=nn.initializers.orthogonal(),
            bias_init=nn.initializers.constant(0.5),
            dtype=jnp.bfloat16,
            param_dtype=jnp.float32,
            name="lstm_cell",
        )
        (c, h), ys = nn.RNN(cell, return_carry=True)(xs, seq_lengths=lengths)
        gru = nn.RNN(nn.GRUCell(features=self.features, name="gru_cell"), return_carry=True)
        carry, zs = gru(ys, initial_carry=h, reverse=True, keep_order=True)
        both = nn.Bidirectional(
            nn.RNN(nn.LSTMCell(4, carry_init=nn.initializers.ones), time_major=False),
            nn.RNN(nn.SimpleCell(5, activation_fn=nn.relu)),
        )
        logits = nn.Dense(3)(carry)
        return {"logits": logits, "c": c, "h": h, "ys": ys, "zs": zs, "both": both(zs)}


def run(key, xs, lengths):
    model = Model()
    variables = model.init(key, xs, lengths)
    return variables, model.apply(variables, xs, lengths)
"""

NNX = """
class Model(nnx.Module):
    def __init__(self, rngs):
        cell = nnx.OptimizedLSTMCell(
            3,
            6,
            kernel_init=nnx.initializers.xavier_uniform(),
            recurrent_kernel_init=nnx.initializers.orthogonal(),
            bias_init=nnx.initializers.constant(0.5),
            dtype=jnp.bfloat16,
            rngs=rngs,
        )
        self.lstm = nnx.RNN(cell, return_carry=True)
        cell = nnx.GRUCell(in_features=6, hidden_features=6, rngs=rngs)
        self.gru = nnx.RNN(cell, return_carry=True, reverse=True, keep_order=True)
        self.both = nnx.Bidirectional(
            nnx.RNN(nnx.LSTMCell(6, 4, rngs=rngs)), nnx.RNN(nnx.SimpleCell(6, 5, rngs=rngs))
        )
        self.dense = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, xs, lengths):
        (c, h), ys = self.lstm(xs, seq_lengths=lengths)
        carry, zs = self.gru(ys, initial_carry=h)
        logits = self.dense(carry)
        return {"logits": logits, "c": c, "h": h, "ys": ys, "zs": zs, "both": self.both(zs)}


def run(key, xs, lengths):
    model = Model(nnx.Rngs(params=key))
    return nnx.state(model, nnx.Param), model(xs, lengths)
"""
OURS = {
    "OptimizedLSTMCell": "LSTMCell",
    "LSTMCell": "LSTMCell",
    "GRUCell": "GRUCell",
    "SimpleCell": "ElmanCell",
    "RNN": "RNN",
}


def replace_classes(script, framework, ours):
    """Puts our classes in the place of Flax's, and changes nothing else."""
    pattern = rf"\b{framework}\.({'|'.join(OURS)})\("
    return re.sub(pattern, lambda match: f"{ours}.{OURS[match[1]]}(", script)


def run_script(script):
    names = {"nn": nn, "nnx": nnx, "jax": jax, "jnp": jnp, "mogrifier_jax": mogrifier_jax}
    exec(script, names)
    xs = jax.random.normal(jax.random.key(1), (2, 5, 3))
    return quick.jit(names["run"])(jax.random.key(0), xs, jnp.array([5, 3]))


@pytest.mark.parametrize(
    ("script", "framework", "ours"),
    [(LINEN, "nn", "mogrifier_jax"), (NNX, "nnx", "mogrifier_jax.nnx")],
    ids=["linen", "nnx"],
)
def test_replacing_class_names_is_enough(script, framework, ours):
    replaced = replace_classes(script, framework, ours)
    assert replaced.count("mogrifier_jax.") == script.count(".RNN(") + script.count("Cell(") == 8
    params, expected = run_script(script)
    our_params, found = run_script(replaced)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(found))

    def count(tree):
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    extra = 0
    if framework == "nnx":  # Our GRU has the bias of the candidate that linen's has, and NNX's not.
        extra = 6
    assert count(our_params) == count(params) + extra
    # Ours ran: the parameters have our names, and the initialisers of the script.
    biases = [
        np.asarray(leaf, np.float32)
        for path, leaf in jax.tree.leaves_with_path(our_params)
        if "gates" in jax.tree_util.keystr(path) and "bias" in jax.tree_util.keystr(path)
    ]
    assert len(biases) == 5 and sum((bias == 0.5).all() for bias in biases) == 1

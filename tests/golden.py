"""Small models with parameters from a formula, and what lamb computes for them.

The numbers were produced by the authors' TensorFlow code in float32. V = 7, H = 5, two
layers, T = 4, B = 2, lengths (4, 3), no dropout, zero initial state. Tensor n, in lamb's
order, holds 0.5 sin(0.7 i + 1.3 n) at row-major index i.
"""

import jax.numpy as jnp
import numpy as np

from mogrifier_jax.nn import models

VOCAB, HIDDEN, STEPS, BATCH = 7, 5, 4, 2
LENGTHS = np.array([4, 3])

CASES = {
    "A": dict(tied_embeddings=True, embedding_size=5, cell_options=dict(rounds=5, rank=3)),
    "B": dict(
        tied_embeddings=True,
        embedding_size=3,
        mixture_components=2,
        cell_options=dict(rounds=2, rank=2),
    ),
    "C": dict(embedding_size=3, cell_options=dict(rounds=3, rank=0)),
    "D": dict(embedding_size=5, cell_options=dict(rounds=0)),
}
NUM_SCALARS = {"A": 832, "B": 564, "C": 610, "D": 517}
# [T, B] at temperature 0.9.
NATS = {
    "A": [[2.467237, 2.226042], [2.232546, 2.717688], [1.674112, 2.126713], [2.044991, 0]],
    "B": [[2.394914, 2.221998], [1.474314, 2.386795], [2.283214, 1.473325], [2.226072, 0]],
    "C": [[1.726497, 2.271713], [1.644208, 1.727808], [2.402211, 1.638176], [1.980013, 0]],
    "D": [[2.207056, 2.192782], [1.574526, 2.157517], [1.988360, 1.626444], [2.267629, 0]],
}
# Sums of c and h of layer 0, then of layer 1.
FINAL_STATES = {
    "A": [-1.961438, -0.854646, -2.191528, -1.077444],
    "B": [-1.116180, -0.383724, 0.600694, 0.281731],
    "C": [-0.873858, -0.239907, 0.744565, 0.383141],
    "D": [-1.984474, -0.772436, -2.622630, -1.283260],
}
# Without and with L2 of 0.01, temperature 0.9; the gradient norm of the latter.
LOSSES = {
    "A": (7.744665, 8.263002, 1.623839),
    "B": (7.230316, 7.581851, 1.253996),
    "C": (6.695313, 7.075748, 0.886800),
    "D": (7.007157, 7.330292, 1.170657),
}
# Loss without L2 at temperature 1 before steps 1 to 4 of Adam (L2 0.01, clip 0.5, rate 0.01).
TRAJECTORIES = {
    "A": [7.874756, 7.747349, 7.630556, 7.522088],
    "B": [7.302698, 7.233049, 7.169024, 7.110024],
    "C": [6.704333, 6.665349, 6.622873, 6.575698],
    "D": [7.041968, 6.964940, 6.887094, 6.807332],
}


def batch(steps=STEPS, batch_size=BATCH):
    """Inputs and targets [B, T]."""
    t, b = np.arange(steps)[None, :], np.arange(batch_size)[:, None]
    return (3 * t + 5 * b + 1) % VOCAB, (5 * t + 2 * b + 2) % VOCAB


def make(case, **overrides):
    """(model, params) of a case."""
    options = {**dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=2), **CASES[case]}
    model = models.LanguageModel(**{**options, **overrides})
    return model, params_by_formula(model)


def params_by_formula(model):
    """All parameters of a model of capped or uncapped LSTMs, filled in lamb's order."""
    count = iter(range(10**6))

    def tensor(*shape):
        index = np.arange(np.prod(shape)).reshape(shape)
        return (0.5 * np.sin(0.7 * index + 1.3 * next(count))).astype(np.float32)

    hidden, size, vocab = model.hidden_size, model.embedding_size, model.vocab_size
    options = dict(model.cell_options)
    rank = options.get("rank", 0)
    params = {"embedding": tensor(vocab, size), "stack": {}, "softmax": {}}
    for layer in range(model.num_layers):
        width = hidden if layer else size
        cell = {}
        for i in range(1, options["rounds"] + 1):
            side_in, side_out = (hidden, width) if i % 2 else (width, hidden)
            if rank > 0:
                gate = {"down": tensor(side_in, rank), "up": tensor(rank, side_out)}
            else:
                gate = {"kernel": tensor(side_in, side_out)}
            cell[f"round_{i}"] = {**gate, "bias": tensor(side_out)}
        kernel = tensor(width + hidden, 4 * hidden).reshape(width + hidden, 4, hidden)
        bias = np.stack([tensor(hidden) for _ in range(4)])
        cell["gates"] = {"input": kernel[:width], "recurrent": kernel[width:], "bias": bias}
        params["stack"][f"layers_{layer}"] = {"cell": cell}
    softmax, components = params["softmax"], model.mixture_components
    if components:
        projection = tensor(hidden, components * size)
        softmax["projection"] = projection.reshape(hidden, components, size)
        softmax["projection_bias"] = tensor(components * size).reshape(components, size)
        softmax["mixture"] = tensor(hidden, components)
    elif size != hidden:
        softmax["projection"] = tensor(hidden, size)
    if not model.tied_embeddings:
        softmax["kernel"] = tensor(size, vocab)
    softmax["bias"] = tensor(vocab)
    return {k: _to_jax(v) for k, v in params.items()}


def _to_jax(tree):
    return {k: _to_jax(v) for k, v in tree.items()} if isinstance(tree, dict) else jnp.asarray(tree)

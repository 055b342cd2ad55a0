# %% [markdown]
# # Quickstart
#
# **After 500 steps the Mogrifier predicts unseen text with 2.21 bits per character, and an LSTM
# with as many parameters with 2.41.** This notebook trains both as cells of an ordinary Flax
# model, which takes a few minutes on a CPU, and samples from the Mogrifier. Then it loads the
# trained model that comes with the package.
#
# This is one seed and a short run in which nothing is tuned. With a tuned learning rate for each
# model and more steps, the two come closer on this text: RESULTS.md has the comparison.

# %%
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import mogrifier_jax
from mogrifier_jax import RNN, MogrifierLSTMCell
from mogrifier_jax.data import corpora

QUICK = bool(os.environ.get("MOGRIFIER_QUICK"))  # Train for seconds only, as tests do.
plt.rcParams.update({"figure.figsize": (7, 3), "figure.dpi": 90, "axes.grid": True})

# %% [markdown]
# ## A model
#
# `RNN` takes the same arguments as Flax's `nn.RNN` and has the same parameters and results, but a
# faster recurrence. `rounds` is how often x and h gate each other before the LSTM reads them, so a
# cell with `rounds=0` is an LSTM. `rank` factorises the gating matrices.


# %%
class CharacterModel(nn.Module):
    vocab_size: int
    features: int
    rounds: int

    @nn.compact
    def __call__(self, tokens, carry=None):
        x = nn.Embed(self.vocab_size, 64)(tokens)
        cell = MogrifierLSTMCell(self.features, rounds=self.rounds, rank=16)
        rnn = RNN(cell, return_carry=True)
        carry, y = rnn(x, initial_carry=carry)
        return carry, nn.Dense(self.vocab_size)(y)


# %% [markdown]
# ## A text
#
# The package comes with a small corpus, `pydoc`: the help texts of Python, character by character.
# Each row of `batch(step)` is a random piece of the training text, in which every next character is
# to be predicted.

# %%
corpus = corpora.load_corpus("pydoc")
vocab = corpus.vocabulary
ids = corpus.train.tokens.astype(np.int32)
print(f"{len(ids):,} characters to train on, {len(vocab)} different ones")
print(vocab.decode(ids[100_000:100_300]))


def batch(step, rows=32, length=64):
    starts = np.random.default_rng(step).integers(0, len(ids) - length - 1, rows)
    return jnp.asarray(ids[starts[:, None] + np.arange(length + 1)])


# %% [markdown]
# ## Training
#
# For a fair comparison both models have the same number of parameters: the LSTM is as wide as it
# can be with no more parameters than the Mogrifier.


# %%
def count_parameters(model):
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(variables))


mogrifier = CharacterModel(len(vocab), features=128, rounds=5)
widths = [CharacterModel(len(vocab), features, rounds=0) for features in range(128, 160)]
lstm = max(
    (model for model in widths if count_parameters(model) <= count_parameters(mogrifier)),
    key=count_parameters,
)
models = {"LSTM": lstm, "Mogrifier": mogrifier}
for name, model in models.items():
    print(f"{name:10s} {model.features} features, {count_parameters(model):,} parameters")


# %%
def fit(model, steps):
    params = model.init(jax.random.key(0), batch(0)[:, :-1])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(4e-3))

    @jax.jit
    def update(params, state, tokens):
        def loss_fn(params):
            _, logits = model.apply(params, tokens[:, :-1])
            labels = tokens[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for step in range(steps):
        params, state, loss = update(params, state, batch(step))
        losses.append(float(loss))
    return params, losses


STEPS = 10 if QUICK else 500
fitted = {name: fit(model, STEPS) for name, model in models.items()}

# %%
fig, axes = plt.subplots()
for (name, (_, losses)), colour in zip(fitted.items(), ("tab:orange", "tab:blue"), strict=True):
    smooth = np.convolve(np.array(losses) / np.log(2), np.ones(10) / 10, "valid")
    axes.plot(smooth, color=colour, label=name)
axes.set(
    xlabel="steps",
    ylabel="bits per character",
    title="Training loss on Python's help texts, means of 10 steps",
)
axes.legend()
plt.show()


# %% [markdown]
# How well do they predict a text that they have not seen?


# %%
def score(name):
    model, (params, _) = models[name], fitted[name]
    unseen = corpus.valid.tokens.astype(np.int32)
    tokens = jnp.asarray(unseen[: len(unseen) // 16 * 16].reshape(16, -1))
    _, logits = jax.jit(model.apply)(params, tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return float(nats.mean()) / np.log(2)


for name in models:
    print(f"{name:10s} {score(name):.3f} bits per character on validation data")

# %% [markdown]
# ## Sampling
#
# Characters are drawn one at a time; the carry holds what the model remembers of those before.


# %%
def write(name, prompt, length, temperature=0.6, seed=0):
    model, (params, _) = models[name], fitted[name]
    step = jax.jit(model.apply)
    tokens = jnp.asarray(vocab.encode(prompt), jnp.int32)[None]
    carry, logits = step(params, tokens)
    written = []
    for key in jax.random.split(jax.random.key(seed), length):
        token = jax.random.categorical(key, logits[:, -1] / temperature)
        written.append(int(token[0]))
        carry, logits = step(params, token[:, None], carry)
    return prompt + vocab.decode(np.array(written))


print(write("Mogrifier", "The statement ", 20 if QUICK else 300))

# %% [markdown]
# ## A trained model
#
# `experiments/pydoc.py` trains on the same text, with two layers, layer normalisation, weight
# averaging, checkpoints and a tuned learning rate. Its result comes with the package.
# `mogrifier_jax.load` also opens the workdir of a run of your own, such as the one that
# `make train` leaves in `runs/pydoc`.

# %%
model = mogrifier_jax.load("pydoc")
print(f"{model.model.num_layers} layers of {model.model.hidden_size}, step {model.info['step']:,}")

# %%
print(model.generate("The statement ", length=20 if QUICK else 300, temperature=0.6)[0])

# %% [markdown]
# The model also scores a text, character by character: a long bar is a surprise.

# %%
scored = model.score("The lambda form creates a function.")
print(f"{scored.bits_per_token:.3f} bits per character")
for token, nats in list(zip(scored.tokens, scored.nats, strict=True))[:12]:
    print(f"{token!r:5} {nats / np.log(2):6.2f} bits {'#' * round(4 * nats)}")

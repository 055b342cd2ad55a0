# %% [markdown]
# # Quickstart
#
# The Mogrifier LSTM as a cell in a Flax model of your own: define, train, sample. It needs a minute
# or two on a CPU. Then the same in one line, with everything that an experiment of this package
# brings along.

# %%
import os
import pathlib
import pydoc_data.topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import mogrifier_jax
from mogrifier_jax import RNN, MogrifierLSTMCell, configs
from mogrifier_jax.training import train

QUICK = bool(os.environ.get("MOGRIFIER_QUICK"))  # Seconds instead of minutes: for tests.
RUNS = pathlib.Path(os.environ.get("MOGRIFIER_RUNS", "../runs"))
plt.rcParams.update({"figure.figsize": (7, 3), "figure.dpi": 90, "axes.grid": True})

# %% [markdown]
# ## A model
#
# `RNN` is Flax's `nn.RNN` with the fast recurrence: the same arguments, parameters and results.
# `rounds=0` makes the cell an LSTM; `rank` factorises the gating matrices.


# %%
class CharacterModel(nn.Module):
    vocab_size: int
    rounds: int = 5

    @nn.compact
    def __call__(self, tokens, carry=None):
        x = nn.Embed(self.vocab_size, 64)(tokens)
        rnn = RNN(MogrifierLSTMCell(128, rounds=self.rounds, rank=16), return_carry=True)
        carry, y = rnn(x, initial_carry=carry)
        return nn.Dense(self.vocab_size)(y), carry


# %% [markdown]
# ## A text
#
# Python's own help: nothing to download. Each row of `batch(step)` is a piece of text, and the next
# character is what has to be predicted.

# %%
text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
letters = sorted(set(text))
ids = np.array([letters.index(letter) for letter in text], np.int32)
held_out, ids = ids[:20_000], ids[20_000:]
print(f"{len(text):,} characters, {len(letters)} different ones")


def batch(step, rows=32, length=64):
    starts = np.random.default_rng(step).integers(0, len(ids) - length - 1, rows)
    return jnp.asarray(ids[starts[:, None] + np.arange(length + 1)])


# %% [markdown]
# ## Training
#
# The Mogrifier and, for comparison, the LSTM of the same width.


# %%
def fit(model, steps):
    params = model.init(jax.random.key(0), batch(0)[:, :-1])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(4e-3))

    @jax.jit
    def update(params, state, tokens):
        def loss_fn(params):
            logits, _ = model.apply(params, tokens[:, :-1])
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


STEPS = 10 if QUICK else 300
models = {
    "LSTM": CharacterModel(len(letters), rounds=0),
    "Mogrifier": CharacterModel(len(letters), rounds=5),
}
fitted = {name: fit(model, STEPS) for name, model in models.items()}

# %%
fig, axes = plt.subplots()
for (name, (_, losses)), colour in zip(fitted.items(), ("tab:orange", "tab:blue"), strict=True):
    smooth = np.convolve(np.array(losses) / np.log(2), np.ones(10) / 10, "valid")
    axes.plot(smooth, color=colour, label=name)
axes.set(xlabel="steps", ylabel="bits per character", title="training loss, mean of 10 steps")
axes.legend()
plt.show()


# %% [markdown]
# How well do they do on a text that they have not seen?


# %%
def score(name):
    model, (params, _) = models[name], fitted[name]
    tokens = jnp.asarray(held_out[: len(held_out) // 128 * 128].reshape(16, -1))
    logits, _ = jax.jit(model.apply)(params, tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return float(nats.mean()) / np.log(2)


for name in models:
    size = sum(leaf.size for leaf in jax.tree.leaves(fitted[name][0]))
    print(f"{name:10s} {size:,} parameters, {score(name):.3f} bits per character")

# %% [markdown]
# ## Sampling
#
# One character at a time; the carry holds all that was read.


# %%
def write(name, prompt, length, temperature=0.6, seed=0):
    model, (params, _) = models[name], fitted[name]
    step = jax.jit(model.apply)
    tokens = jnp.asarray([[letters.index(letter) for letter in prompt]])
    logits, carry = step(params, tokens)
    written = prompt
    for key in jax.random.split(jax.random.key(seed), length):
        token = jax.random.categorical(key, logits[:, -1] / temperature)
        written += letters[int(token[0])]
        logits, carry = step(params, token[:, None], carry)
    return written


print(write("Mogrifier", "The statement ", 20 if QUICK else 300))

# %% [markdown]
# ## The whole experiment
#
# Two normalised layers, weight averaging, checkpoints, a searched softmax temperature:
# `experiments/pydoc.py` is such a run. It is trained here unless its workdir exists, and
# `mogrifier_jax.load` opens it.

# %%
variant = ":tiny" if QUICK else ""
workdir = RUNS / f"pydoc{variant.replace(':', '_')}"
if not (workdir / "results.json").exists():
    train.train_and_evaluate(configs.load_config(f"../experiments/pydoc.py{variant}"), str(workdir))
model = mogrifier_jax.load(workdir)
print(model)

# %%
print(model.generate("The statement ", length=20 if QUICK else 300, temperature=0.6)[0])

# %%
score = model.score("The lambda form creates a function.")
print(f"{score.bits_per_token:.3f} bits per character")
for token, nats in list(zip(score.tokens, score.nats, strict=True))[:12]:
    print(f"{token!r:5} {nats / np.log(2):6.2f} bits {'#' * round(4 * nats)}")

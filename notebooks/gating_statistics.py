# %% [markdown]
# # What the gates do
#
# Gate statistics of a trained Mogrifier LSTM, and of an LSTM with as many parameters. The paper
# reports (section 4.4) that the gates of both have nearly the same means, but that those of the
# Mogrifier vary less: its inputs are scaled up, and yet its gates do not saturate more. Its models
# were large, well trained and strongly regularised; a small one need not do the same.
#
# The default experiment is loaded from its workdir, or trained if there is none (minutes on a CPU).
# Set `FILES` and `SPLIT` to look at other runs.

# %%
import os
import pathlib

import numpy as np
from IPython.display import Markdown
from matplotlib_inline.backend_inline import set_matplotlib_formats

import mogrifier_jax
from mogrifier_jax import configs
from mogrifier_jax.analysis import gating, inspection, tables
from mogrifier_jax.data import corpora
from mogrifier_jax.training import train

QUICK = bool(os.environ.get("MOGRIFIER_QUICK"))  # Seconds instead of minutes: for tests.
RUNS = pathlib.Path(os.environ.get("MOGRIFIER_RUNS", "../runs"))
SPLIT, WINDOWS = "valid", 5 if QUICK else None
FILES = {
    "LSTM": "pydoc.py:lstm,tiny" if QUICK else "pydoc.py:lstm",
    "Mogrifier": "pydoc.py:tiny" if QUICK else "pydoc.py",
}
set_matplotlib_formats("png")

# %%
workdirs = {}
for name, file in FILES.items():
    workdirs[name] = RUNS / file.replace(".py", "").replace(":", "_").replace(",", "_")
    if not (workdirs[name] / "results.json").exists():
        config = configs.load_config(f"../experiments/{file}")
        train.train_and_evaluate(config, str(workdirs[name]))

runs = {name: mogrifier_jax.load(workdir) for name, workdir in workdirs.items()}
opened = {name: inspection.open_run(workdir) for name, workdir in workdirs.items()}
reports = {name: run.gates(SPLIT, WINDOWS) for name, run in opened.items()}

# %% [markdown]
# ## Gates of the LSTM
#
# `variance over tokens` is how much a unit's gate moves as the text goes by, averaged over units.
# A gate is closed below 0.1 and open above 0.9.

# %%
columns = ["mean", "variance", "variance_over_tokens", "saturated_low", "saturated_high"]
head = ["layer, gate", "model", "mean", "variance", "variance over tokens", "closed", "open"]
lines = []
for layer, gate in [(1, "f"), (1, "i"), (1, "o"), (2, "f"), (2, "i"), (2, "o")]:
    for name, report in reports.items():
        (row,) = [r for r in report.rows() if (r["layer"], r["gate"]) == (layer, gate)]
        lines.append([f"{layer}, {gate}", name, *(row[column] for column in columns)])
Markdown(tables.markdown(head, lines))

# %%
inspection.draw_histograms(reports)

# %% [markdown]
# Each dot is a unit: one in the corner to the right is a gate that stays closed, one in the upper
# corner is always open, and near the origin are those that work in between.

# %%
inspection.draw_saturation(reports, layer=1)

# %% [markdown]
# ## Gates of the Mogrifier
#
# Every round multiplies x or h by a gate between 0 and 2. All rounds together could scale x by up
# to 2^⌈r/2⌉; this is the range they use: the bar holds nine values of ten, the dot is the mean.

# %%
inspection.draw_ranges(reports["Mogrifier"])

# %% [markdown]
# ## A sentence
#
# By how much the first layer's input is scaled, character by character: red is amplified, blue is
# attenuated. The characters are always embedded in the same way; what is scaled up depends on the
# context.

# %%
sentence = "The import statement combines two operations."
found = runs["Mogrifier"].gates(sentence)
scale = np.prod(found.layers[0]["rounds"][0::2], axis=0)
inspection.draw_heat_map(found.tokens, scale)

# %% [markdown]
# The same for the state h of the second layer.

# %%
scale = np.prod(found.layers[1]["rounds"][1::2], axis=0)
inspection.draw_heat_map(found.tokens, scale)

# %% [markdown]
# ## Which tokens are gated most?
#
# The mean of |log₂ factor| over layers and units: 1 is as much as doubling or halving everything.

# %%
vocab = runs["Mogrifier"].vocabulary
rows = reports["Mogrifier"].token_rows(vocab, min_count=5 if QUICK else 20)
inspection.draw_strengths(rows, top=10)

# %% [markdown]
# And the moments at which it was strongest, with what came before:

# %%
for moment in reports["Mogrifier"].strongest()[:10]:
    *before, token = (vocab.tokens[i] for i in moment.context)
    print(f"{moment.strength:.2f}  {''.join(before)!r} then {token!r}")

# %% [markdown]
# ## Where is the difference made?
#
# The loss of every token under both models. Is the Mogrifier better at rare tokens only? Late in
# the line? Does it recover faster after a large loss? The paper answers no to the last question.

# %%
config = runs["Mogrifier"].config
corpus = corpora.load_corpus(config.data.name)
scores = {name: run.scores(SPLIT, WINDOWS) for name, run in opened.items()}
counts = np.bincount(corpus.train.tokens, minlength=len(vocab))
edges = (0, 100, 1_000, 3_000, 10_000, 30_000)
by_frequency = {name: gating.by_frequency(given, counts, edges) for name, given in scores.items()}
inspection.draw_losses(by_frequency, "times that the token is in the training text")

# %%
by_position = {name: gating.by_position(given, vocab.eos_id) for name, given in scores.items()}
inspection.draw_losses(by_position, "tokens before it in the line")

# %%
# Each model after losses of its own: the tokens are not the same.
recovery = {
    name: gating.recovery(given.nats, (0, 0.5, 1, 2, 4, 6)) for name, given in scores.items()
}
inspection.draw_losses(recovery, "loss of the token before it, nats")

# %% [markdown]
# ## To move in
#
# The sentence once more, with everything about it, on a page that answers to mouse and keys. It is
# cut short here, as the notebook keeps the page. `.save("explore.html")` writes one to open in a
# browser, and `runs["Mogrifier"].explore(text, runs["LSTM"])` shows both models.

# %%
runs["Mogrifier"].explore(sentence, length=30)

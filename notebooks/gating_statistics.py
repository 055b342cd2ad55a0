# %% [markdown]
# # What the gates do
#
# **Do the gates of the Mogrifier vary less than those of an LSTM?** The paper says so (section
# 4.4): the means of the gates are nearly the same, but the Mogrifier's vary less, and although its
# inputs are scaled, its gates do not saturate more. **Yes, here too: all six gates of the Mogrifier
# vary less**, by 14 to 17% in the second layer and by 3 to 7% in the first, in models of 500,000
# parameters that were trained for minutes. In the comparison on Penn Treebank (RESULTS.md), with
# three seeds and ten passes over the text, their variance is smaller by a third to a half.
#
# The two models of the default experiment (`experiments/pydoc.py`), which have the same number of
# parameters, are loaded from their workdirs, or trained if there are none. Set `FILES` and `SPLIT`
# to look at other runs.

# %%
import os
import pathlib

import numpy as np
from IPython.display import Markdown
from matplotlib_inline.backend_inline import set_matplotlib_formats

import mogrifier_jax
from mogrifier_jax import configs
from mogrifier_jax.analysis import (
    documents,
    gate_figures,
    inspection,
    loss_figures,
    token_losses,
)
from mogrifier_jax.evaluation import loading
from mogrifier_jax.training import train

QUICK = bool(os.environ.get("MOGRIFIER_QUICK"))  # Train for seconds only, as tests do.
RUNS = pathlib.Path(os.environ.get("MOGRIFIER_RUNS", "../runs"))
SPLIT, WINDOWS = "valid", 5 if QUICK else None
FILES = {
    "LSTM": "pydoc.py:lstm,tiny" if QUICK else "pydoc.py:lstm",
    "Mogrifier": "pydoc.py:tiny" if QUICK else "pydoc.py",
}
TEXT = "Python's help texts, validation"  # For titles.
MODEL = "Mogrifier trained on Python's help texts"
set_matplotlib_formats("png")

# %%
workdirs = {}
for name, file in FILES.items():
    workdirs[name] = RUNS / file.replace(".py", "").replace(":", "_").replace(",", "_")
    if not (workdirs[name] / "results.json").exists():
        config = configs.load_config(f"../experiments/{file}")
        train.train_and_evaluate(config, str(workdirs[name]))

loaded = {name: loading.load_run(workdir) for name, workdir in workdirs.items()}
plans = {name: inspection.plan_splits(each, SPLIT)[0] for name, each in loaded.items()}
reports = {
    name: inspection.measure_gates(each, plans[name], WINDOWS) for name, each in loaded.items()
}

# %% [markdown]
# ## Gates of the LSTM in both models
#
# `variance` is over tokens and units; `variance over tokens` is how much the gate of a unit changes
# from token to token, averaged over units. A gate is closed below 0.1 and open above 0.9. The last
# column is the share of the LSTM's variance that the Mogrifier has.

# %%
columns = ["mean", "variance", "variance_over_tokens", "saturated_low", "saturated_high"]
head = ["layer, gate", "model", "mean", "variance", "variance over tokens", "closed", "open"]
lines, shares = [], {}
for layer, gate in [(1, "f"), (1, "i"), (1, "o"), (2, "f"), (2, "i"), (2, "o")]:
    rows = {}
    for name, report in reports.items():
        (rows[name],) = [r for r in report.rows() if (r["layer"], r["gate"]) == (layer, gate)]
    shares[layer, gate] = rows["Mogrifier"]["variance"] / rows["LSTM"]["variance"]
    for name, row in rows.items():
        share = f"{shares[layer, gate]:.0%}" if name == "Mogrifier" else ""
        lines.append([f"{layer}, {gate}", name, *(row[column] for column in columns), share])
less = sum(share < 1 for share in shares.values())
print(f"{less} of {len(shares)} gates of the Mogrifier vary less than those of the LSTM")
Markdown(documents.make_table([*head, "of the LSTM's variance"], lines))

# %%
gate_figures.draw_histograms(reports, title=f"Values of the gates ({TEXT})")

# %% [markdown]
# In the next figure each dot is a unit. One at the lower right is closed at almost every token, one
# at the upper left is almost always open, and those near the origin take values in between.

# %%
gate_figures.draw_saturation(reports, layer=1, title=f"How often units saturate ({TEXT})")

# %% [markdown]
# ## Gates of the Mogrifier
#
# Each round multiplies x or h by a gate between 0 and 2, so r rounds together could scale x by up
# to 2^⌈r/2⌉. This is the range that they use: the bar holds 90% of all values, and the dot is the
# mean.

# %%
gate_figures.draw_ranges(reports["Mogrifier"], title=f"Factors of the rounds ({TEXT})")

# %% [markdown]
# ## A sentence
#
# The factors by which the rounds scale the input x of the first layer, character by character: red
# is amplified, blue is attenuated. A character has the same embedding wherever it stands, so the
# differences between two places come from the context.

# %%
model = mogrifier_jax.load(workdirs["Mogrifier"])
sentence = "The import statement combines two operations."
gates = model.gates(sentence)
scale = np.prod(gates.layers[0]["rounds"][0::2], axis=0)
gate_figures.draw_heat_map(gates.tokens, scale, title=f"Factors of x, layer 1 ({MODEL})")

# %% [markdown]
# The same for the state h of the second layer:

# %%
scale = np.prod(gates.layers[1]["rounds"][1::2], axis=0)
gate_figures.draw_heat_map(gates.tokens, scale, title=f"Factors of h, layer 2 ({MODEL})")

# %% [markdown]
# ## Which tokens are gated most?
#
# The strength of gating is the mean of |log₂ factor| over layers and units: 1 is as much as
# doubling or halving every unit.

# %%
rows = reports["Mogrifier"].token_rows(model.vocabulary, min_count=5 if QUICK else 20)
title = f"Strength of gating by token ({TEXT})"
gate_figures.draw_strengths(rows, top=10, title=title)

# %% [markdown]
# These are the moments at which it was strongest, with the characters before ("▼" ends a line):

# %%
for moment in reports["Mogrifier"].strongest()[:10]:
    *before, token = (model.vocabulary.tokens[i] for i in moment.context)
    print(f"{moment.strength:.2f}  {''.join(before)!r} then {token!r}")

# %% [markdown]
# ## Where is the difference made?
#
# The loss of every character under both models. Is the Mogrifier better only at rare characters,
# or late in a line? Does it recover faster after a large loss, which the paper denies?
#
# Not by frequency, and rather early in a line: its lead is largest at the first character. After a
# loss above 4 nats it leads by 0.14, but after one above 6 the two are even. Bars are standard
# errors.

# %%
scores = {
    name: inspection.score_tokens(each, plans[name], WINDOWS) for name, each in loaded.items()
}
(trained,) = inspection.plan_splits(loaded["Mogrifier"], "train")
counts = np.bincount(np.asarray(trained.stream.tokens), minlength=len(model.vocabulary))
edges = (0, 100, 1_000, 3_000, 10_000, 30_000)
losses = {name: token_losses.by_frequency(each, counts, edges) for name, each in scores.items()}
title = f"Loss by frequency ({TEXT})"
loss_figures.draw_losses(losses, "occurrences in the training text", title)

# %%
eos_id = model.vocabulary.eos_id
losses = {name: token_losses.by_position(each, eos_id) for name, each in scores.items()}
title = f"Loss by position ({TEXT})"
loss_figures.draw_losses(losses, "characters before it in the line", title)

# %% [markdown]
# Each model after losses of its own, so the characters are not the same for both:

# %%
thresholds = (0, 0.5, 1, 2, 4, 6)
losses = {name: token_losses.after_losses(each.nats, thresholds) for name, each in scores.items()}
title = f"Loss after a large loss ({TEXT})"
loss_figures.draw_losses(losses, "loss of the character before it, nats", title)

# %% [markdown]
# ## A page to explore
#
# The beginning of the sentence once more, on an interactive page with every gate at every token. It
# is cut short here to keep the notebook small. `.save("explore.html")` writes a page to open in a
# browser, and `model.explore(text, other_model)` compares two models.

# %%
model.explore(sentence, length=30)

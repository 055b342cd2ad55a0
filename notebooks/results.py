# %% [markdown]
# # Results beside the paper's
#
# What sweeps have measured (`docs/results`, made by `--mode=sweep --report=RESULTS.md`) and the
# numbers of arXiv:1909.01792. RESULTS.md says what follows from them.

# %%
import json
import pathlib

from IPython.display import Markdown, display
from matplotlib_inline.backend_inline import set_matplotlib_formats

from mogrifier_jax import configs
from mogrifier_jax.analysis import tables
from mogrifier_jax.training import units

FOLDER = pathlib.Path("../docs/results")
set_matplotlib_formats("png")
paper = configs.paper_numbers()

# %% [markdown]
# ## The paper's main results
#
# Test scores, without and with dynamic evaluation.

# %%
lines = []
for corpus, table in paper["tables"].items():
    unit = table["unit"]
    show = units.perplexity if unit == "ppl" else units.bits
    for row in table["rows"]:
        if "nats" in row and row["evaluation"] == "deterministic":
            scores = ["" if nats is None else f"{show(nats):.3f} {unit}" for nats in row["nats"]]
            lines.append([corpus, row["name"], row["params"], scores[1], scores[3]])
Markdown(
    tables.markdown(["corpus", "model", "parameters", "test", "with dynamic evaluation"], lines)
)

# %% [markdown]
# Its ablation study and its reverse copy task:

# %%
for file, name in (("ablation", "rounds"), ("ablation", "table"), ("reverse_copy", "10m_1k")):
    each = configs.load_file(f"../experiments/{file}.py").SETS[name]
    display(tables.figure_of_set(each, []))

# %% [markdown]
# ## Ours
#
# Each set of runs: validation score, mean and standard deviation over seeds; the paper's beside it
# where it has the same comparison. The models here are much smaller and were trained for minutes,
# so what can be compared is the order, not the height.

# %%
measured = {}
for path in sorted(FOLDER.glob("*.json")):
    measured[path.stem] = json.loads(path.read_text())
print(f"{len(measured)} sets: {', '.join(measured)}")


# %%
def find_set(stem):
    """The set of an experiment file that a file of results belongs to."""
    for path in pathlib.Path("../experiments").glob("*.py"):
        sets = getattr(configs.load_file(path), "SETS", {})
        for name, each in sets.items():
            if stem.startswith(f"{path.stem}_") and stem.endswith(f"_{name}"):
                return each
    raise LookupError(stem)


for stem, rows in measured.items():
    each = find_set(stem)
    display(Markdown(tables.to_markdown(each.title, rows, each.x_label)))
    display(tables.figure_of_set(each, rows))

# %% [markdown]
# ## Learning curves
#
# Validation loss at the end of every turn, one line for each seed of the variants of the ablation's
# table, or of the first set if that was not run.

# %%
tabled = [stem for stem in measured if stem.endswith("_table")]
for stem in (tabled or list(measured))[:1]:
    display(tables.draw_curves(measured[stem], title=stem.replace("_", " ")))

# %% [markdown]
# ## Which claims hold?
#
# The gap between LSTM and Mogrifier, in nats, wherever both were run under the same conditions; the
# paper's is that of its ablation study.

# %%
lines = [
    ["paper: ablation", f"{paper['ablation']['lstm'] - paper['ablation']['mogrifier']:.4f}", ""]
]
for stem, rows in measured.items():
    for x in dict.fromkeys(row["x"] for row in rows):
        pair = {row["label"]: row for row in rows if row["x"] == x}
        if {"LSTM", "Mogrifier"} <= pair.keys():
            one, two = (pair[name]["valid"] for name in ("LSTM", "Mogrifier"))
            better = sum(a > b for a, b in zip(one["scores"], two["scores"], strict=False))
            name = stem.replace("_", " ") + ("" if x is None else f", {x}")
            seeds = min(len(one["scores"]), len(two["scores"]))
            lines.append([name, f"{one['nats'] - two['nats']:.4f}", f"{better} of {seeds}"])
Markdown(tables.markdown(["comparison", "gap in nats", "seeds that favour the Mogrifier"], lines))

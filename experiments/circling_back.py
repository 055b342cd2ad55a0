r"""The models of "Circling Back to Recurrent Models of Language" (arXiv:2211.01848).

    python -m mogrifier_jax.main --config=experiments/circling_back.py --workdir=runs/circling
    python -m mogrifier_jax.main --config=experiments/circling_back.py:mogrifier,enwik8,48m \
        --workdir=runs/circling_enwik8

The paper's scores on valid / test, without and with dynamic evaluation: perplexity of words, bits
per character otherwise.

                                 Mogrifier LSTM                     Mogrifier RLSTM
    Penn Treebank, 24M           49.93 / 48.51    43.51 / 43.28     48.87 / 47.91    42.87 / 42.86
    WikiText-2, 35M              57.44 / 55.84    40.01 / 38.57     56.68 / 54.97    39.33 / 37.98
    PTB characters, 24M          1.128 / 1.109    1.085 / 1.074     1.115 / 1.096    1.073 / 1.061
    enwik8, 96M                  1.058 / 1.073    0.964 / 0.946     1.029 / 1.042    0.952 / 0.935
    enwik8, 48M                  1.083 / 1.094    0.988 / 0.970     1.060 / 1.071    0.986 / 0.968
    text8, 96M                   1.033 / 1.106    0.977 / 1.047     1.022 / 1.096    0.975 / 1.044
    text8, 48M                   1.063 / 1.140    1.005 / 1.075     1.044 / 1.119    0.998 / 1.068

None of them has been run here, and no code of the author is public. Published: layers, sizes,
epochs, batch, window, the number of dropout samples, residual layers with dropout of their outputs,
no mixture of softmaxes, embeddings as wide as the hidden state (tied for words), Rectified Adam,
Two-Tailed Averaging, and Chrono initialisation.

Not published, so ours:
- What was tuned: rounds, rank, learning rate, L2 penalty and dropout rates have the values of the
  Mogrifier of 2019 on the same corpus (on enwik8 for text8); `cell_output` has the rate of
  `inter_layer`. `chrono_max` is the middle of its range. `--mode=tune --study=circling_back` (or
  `circling_back_enwik8`) has the ranges.
- `stagnating_evaluations`: the paper on Two-Tailed Averaging says "a few".
- The length of a turn. Epochs are rounded to whole turns.
- `max_restarts`: how often a run that diverges returns to its best state, at 0.9 of the rate.

Variants: `rlstm` (default, the Mogrifier RLSTM), `mogrifier` (the Mogrifier LSTM) or `lstm`
(no rounds, with the values of the LSTM of 2019); `ptb` (default), `wikitext2`, `ptb_char`, `enwik8`
or `text8`; `96m` (default) or `48m`, for enwik8 and text8; `tiny` is a smoke run.
"""

import math
import pathlib

from mogrifier_jax import configs, errors

COMMON = dict(
    data=dict(batch_size=128),
    model=dict(
        output="residual",
        embedding_ratio=1.0,
        mixture_components=0,
        state_mask="window",
        chrono_max=math.exp(3.5),
    ),
    optimizer=dict(name="radam"),
    averaging=dict(kind="two_tailed", stagnating_evaluations=3),
    schedule=dict(on_divergence="restart", restart_multiplier=0.9),
)
CORPORA = {
    "ptb": dict(  # 400 epochs.
        data=dict(name="ptb", window=70),
        model=dict(num_params=24_000_000, tied_embeddings=True),
        optimizer=dict(training_samples=8),
        schedule=dict(turns=415, steps_per_turn=100),
    ),
    "wikitext2": dict(  # 250 epochs.
        data=dict(name="wikitext2", window=70),
        model=dict(num_params=35_000_000, tied_embeddings=True),
        optimizer=dict(training_samples=4),
        schedule=dict(turns=291, steps_per_turn=200),
    ),
    "ptb_char": dict(  # 100 epochs.
        data=dict(name="ptb_char", window=200),
        model=dict(num_params=24_000_000),
        optimizer=dict(training_samples=4),
        schedule=dict(turns=98, steps_per_turn=200),
    ),
    "enwik8": dict(  # 200 epochs.
        data=dict(name="enwik8", window=256),
        model=dict(num_layers=6),
        schedule=dict(turns=400, steps_per_turn=1_373),
    ),
    "text8": dict(  # 200 epochs.
        data=dict(name="text8", window=256),
        model=dict(num_layers=6),
        schedule=dict(turns=400, steps_per_turn=1_373),
        evaluation=dict(lines_per_stripe=1),  # Its lines are long.
    ),
}
BUDGETS = {
    "": {},
    "96m": dict(model=dict(num_params=96_000_000)),
    "48m": dict(model=dict(num_params=48_000_000)),
}
LARGE = ("enwik8", "text8")
CELLS = {"rlstm": configs.REWIRED, "mogrifier": {}, "lstm": {}}
SIZES = {"": {}, "tiny": configs.TINY}
TUNED = ("model.rounds", "model.rank", "optimizer.learning_rate", "optimizer.l2_penalty")
TUNED += ("dropout.input", "dropout.state", "dropout.output")


def tuned_in_2019(corpus, cell, budget):
    """The tuned values of the experiment of 2019, by name."""
    file = "enwik8" if corpus in LARGE else corpus
    variant = ",".join(filter(None, ["lstm" if cell == "lstm" else "mogrifier", budget]))
    module = configs.load_file(pathlib.Path(__file__).with_name(f"{file}.py"))
    values = configs.flatten(module.get_config(variant))
    return {name: values[name] for name in TUNED} | {
        "dropout.cell_output": values["dropout.inter_layer"]
    }


def get_config(variant=""):
    cell, corpus, budget, size = configs.choose(variant, CELLS, CORPORA, BUDGETS, SIZES)
    if budget and corpus not in LARGE:
        raise errors.UsageError(f"{budget} is a size of {' and '.join(LARGE)}, not of {corpus}")
    if corpus in LARGE:
        budget = budget or "96m"
    tuned = tuned_in_2019(corpus, cell, budget)
    changes = COMMON, CORPORA[corpus], BUDGETS[budget], tuned, CELLS[cell], SIZES[size]
    return configs.base(configs.LAMB, *changes)

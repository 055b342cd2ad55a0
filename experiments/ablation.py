r"""Section 4 of the paper on Penn Treebank words: what makes the Mogrifier better than the LSTM?

    python -m mogrifier_jax.main --mode=sweep --config=experiments/ablation.py \
        --set=rounds --seeds=1,2,3 --workdir=runs/ablation

runs a set of variants, one after the other or several at once (`--parallel=4`), and draws it beside
the paper's numbers. If it is stopped, the same command continues it. One variant alone is an
ordinary run: `--config=experiments/ablation.py:full_rank`.

Sets: `rounds` (figure 5 of the paper), `table` (table 3), and the hypotheses of "What the Mogrifier
is not": `scaling`, `rank`, `optimisers`, `embeddings`, `factorisation`, `episodes`, `characters`;
and `circling_back`: what each change of arXiv:2211.01848 does alone.

A variant is a model and, optionally, a condition and a size: `lstm,sgd,small`. All models have the
same number of parameters. Models that gate have the tuned values of the Mogrifier, and the others
have the tuned values of the LSTM (see ptb.py); the schedule is the paper's short one. `small` has
the settings of ptb.py:small, which were tuned for both models, and two passes over the text: five
minutes of a CPU core. `tiny` is a smoke run. Measured numbers are in RESULTS.md.
"""

import math
import pathlib

from mogrifier_jax import configs
from mogrifier_jax.configs import Row, Set

PTB = configs.load_file(pathlib.Path(__file__).with_name("ptb.py"))  # The tuned values.
SHORT = dict(
    log_every=50,
    data=dict(window=35),
    averaging=dict(trigger_turns=50, trigger_at_the_latest=400),
    schedule=dict(turns=600, steps_per_turn=100),
)
MODELS = {
    "mogrifier": {},
    "lstm": {},
    **{f"r{rounds}": dict(model=dict(rounds=rounds)) for rounds in (1, 2, 3, 4, 6)},
    "full_rank": dict(model=dict(rank=0)),
    "no_zigzag": dict(model=dict(cell="mogrifier_no_zigzag")),
    "rlstm": configs.REWIRED,
    "mlstm": dict(model=dict(cell="mlstm")),
    **{f"rank{rank}": dict(model=dict(rank=rank)) for rank in (1, 2, 3, 4)},
    "scaling": dict(model=dict(scaling=True)),  # Constants in place of gates.
    "factorised": dict(model=dict(gate_rank=300)),
}
UNGATED = ("lstm", "mlstm", "scaling", "factorised")
CONDITIONS = {
    "": {},
    "sgd": dict(optimizer=dict(name="sgd", learning_rate=1.0)),
    "rmsprop": dict(optimizer=dict(name="rmsprop", learning_rate=0.002, b2=0.99)),
    "layer_norm": dict(model=dict(layer_norm=True)),
    "untied": dict(model=dict(tied_embeddings=False)),
    "episodic": dict(
        data=dict(episodic=True, drop_state_probability=0.0),
        model=dict(trainable_initial_state=True),
    ),
    "characters": dict(data=dict(name="ptb_char"), model=dict(tied_embeddings=False)),
    # From arXiv:2211.01848; circling_back.py says which numbers are ours.
    "samples": dict(optimizer=dict(training_samples=4)),
    "chrono": dict(model=dict(chrono_max=math.exp(3.5))),
    "cell_output": dict(model=dict(output="residual")),  # And the rate of inter-layer dropout.
    "radam": dict(optimizer=dict(name="radam")),
    "two_tailed": dict(averaging=dict(kind="two_tailed", stagnating_evaluations=3)),
}
SMALL = dict(
    averaging=dict(trigger_at_the_latest=3),
    schedule=dict(turns=4, steps_per_turn=415),
)
SMALL_CHARACTERS = dict(
    optimizer=dict(learning_rate=0.004),
    evaluation=dict(max_windows=200),  # A quarter of the text.
)
SIZES = {"": (), "small": (PTB.SMALL, SMALL), "tiny": (configs.TINY,)}
RANKS = {"small": PTB.SMALL_GATES["model"]["rank"], "tiny": 4}  # Of gated models that set none.
GATE_RANKS = {"small": 32, "tiny": 4}


def get_config(variant=""):
    model, condition, size = configs.choose(variant, MODELS, CONDITIONS, SIZES)
    tuned, sized = (PTB.LSTM, configs.UNGATED) if model in UNGATED else ({}, {})
    if size and not sized:
        sized = dict(model=dict(rank=RANKS[size]))
    changes = PTB.MOGRIFIER, SHORT, tuned, *SIZES[size], sized, MODELS[model], CONDITIONS[condition]
    config = configs.base(configs.LAMB, *changes)
    if size and model == "factorised":
        config.model.gate_rank = GATE_RANKS[size]
    if condition == "cell_output":
        config.dropout.update(cell_output=config.dropout.inter_layer, inter_layer=0.0)
    if (condition, size) == ("characters", "small"):
        config.update(SMALL_CHARACTERS)
    return config


PAPER = configs.paper_numbers()
NAMES = {
    "mogrifier": "Mogrifier",
    "full_rank": "full rank",
    "no_zigzag": "no zigzag",
    "lstm": "LSTM",
    "mlstm": "mLSTM",
}
BOTH = {"lstm": "LSTM", "mogrifier": "Mogrifier"}


def compare(title, conditions):
    """LSTM and Mogrifier under some conditions, which have names to be shown."""
    rows = [
        Row(f"{model},{condition}".rstrip(","), label, x=name)
        for model, label in BOTH.items()
        for condition, name in conditions.items()
    ]
    return Set(title, rows, x_label="")


SETS = {
    "rounds": Set(
        "Rounds of gating",
        [
            Row({0: "lstm", 5: "mogrifier"}.get(r, f"r{r}"), "Mogrifier", x=r, paper=math.log(ppl))
            for r, ppl in PAPER["rounds"]
        ],
        x_label="rounds r (0 is the LSTM)",
    ),
    "table": Set(
        "Ablation",
        [Row(v, label, paper=PAPER["ablation"][v]) for v, label in NAMES.items()],
    ),
    "scaling": Set(
        "Constant scaling in place of gates",
        [Row("lstm", "LSTM"), Row("scaling", "LSTM, scaled"), Row("mogrifier", "Mogrifier")],
    ),
    "rank": Set(
        "Rank of the gating matrices",
        [
            Row("lstm", "LSTM"),
            *(Row(f"rank{rank}", f"rank {rank}") for rank in (1, 2, 3, 4)),
            Row("mogrifier", "Mogrifier"),
        ],
    ),
    "optimisers": compare(
        "Optimisers and layer normalisation",
        {"": "Adam", "rmsprop": "RMSProp", "sgd": "SGD", "layer_norm": "Adam, layer norm"},
    ),
    "embeddings": compare("Tied and untied embeddings", {"": "tied", "untied": "untied"}),
    "factorisation": Set(
        "Factorised LSTM gates",
        [Row("lstm", "LSTM"), Row("factorised", "LSTM, factorised"), Row("mogrifier", "Mogrifier")],
    ),
    "episodes": compare("Sentences alone", {"": "stream", "episodic": "sentences"}),
    "characters": compare("Characters of Penn Treebank", {"characters": "characters"}),
    "circling_back": Set(
        "The changes of 2022, each alone",
        [
            Row("mogrifier", "Mogrifier"),
            Row("rlstm", "Mogrifier RLSTM"),
            Row("mogrifier,samples", "four dropout samples"),
            Row("mogrifier,chrono", "Chrono initialisation"),
            Row("mogrifier,cell_output", "dropout of cell outputs"),
            Row("mogrifier,radam", "Rectified Adam"),
            Row("mogrifier,two_tailed", "Two-Tailed Averaging"),
        ],
    ),
}

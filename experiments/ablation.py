r"""Section 4 of the paper on Penn Treebank words: what makes the Mogrifier better than the LSTM?

    python -m mogrifier_jax.main --mode=sweep --config=experiments/ablation.py \
        --set=rounds --seeds=1,2,3 --workdir=runs/ablation

runs a set of variants, one after the other or several at once (`--parallel=4`), and draws it beside
the paper's numbers. The same command goes on where it was stopped. One variant alone is an ordinary
run: `--config=experiments/ablation.py:full_rank`.

Sets: `rounds` (figure 5 of the paper), `table` (table 3), and the hypotheses of "What the Mogrifier
is not": `scaling`, `rank`, `optimisers`, `embeddings`, `factorisation`, `episodes`, `characters`.

A variant is a model and, if wanted, a condition and a size: `lstm,sgd,small`. All models have the
same number of parameters. Those that gate take the tuned values of the Mogrifier, the others those
of the LSTM (see ptb.py); the schedule is the paper's short one. `small` has 2M parameters and takes
minutes on a CPU core: less than one pass over the text, so without dropout, with a learning rate
that was tuned for the Mogrifier and another for the LSTM. `tiny` is a smoke run. Measured numbers
are in RESULTS.md.
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
}
SMALL = dict(
    data=dict(batch_size=16),
    model=dict(num_params=2_000_000),
    dropout=dict(input=0.0, inter_layer=0.0, state=0.0, output=0.0),
    optimizer=dict(l2_penalty=1e-5),
    averaging=dict(trigger_turns=5, trigger_at_the_latest=4),
    schedule=dict(turns=5, steps_per_turn=200),
    evaluation=dict(softmax_temperature=1.0, train_windows=1),
)
SMALL_RANK, SMALL_GATE_RANK = 20, 64  # Where a variant sets nothing else.
SMALL_RATE, SMALL_LSTM_RATE = 0.006, 0.008
SMALL_CHARACTERS = dict(
    optimizer=dict(learning_rate=0.004),
    evaluation=dict(max_windows=200),  # 112,000 characters, more than a quarter of the text.
)


def get_config(variant=""):
    model, condition, size = configs.choose(variant, MODELS, CONDITIONS, ("", "small", "tiny"))
    tuned = PTB.LSTM if model in UNGATED else {}
    config = configs.base(configs.LAMB, PTB.MOGRIFIER, SHORT, tuned)
    if size:
        config.model.rank = SMALL_RANK if model not in UNGATED else 0
        config.optimizer.learning_rate = SMALL_LSTM_RATE if model in UNGATED else SMALL_RATE
    config.update(MODELS[model])
    config.update(CONDITIONS[condition])
    if size and model == "factorised":
        config.model.gate_rank = SMALL_GATE_RANK
    rank = config.model.rank
    config.update({"": {}, "small": SMALL, "tiny": configs.TINY}[size])
    if size == "tiny":
        config.model.rank, config.model.gate_rank = min(rank, 4), min(config.model.gate_rank, 4)
    if size == "small" and condition == "characters":
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
}

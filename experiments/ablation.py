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

from ml_collections import config_dict

from mogrifier_jax import configs
from mogrifier_jax.configs import Row, Set

LSTM = dict(
    model=dict(rounds=0, rank=0),
    dropout=dict(
        input=0.6275626425150355,
        inter_layer=0.3069926535017156,
        state=0.3692225400980858,
        output=0.6901712653612706,
    ),
    optimizer=dict(learning_rate=0.0030369099569192135, l2_penalty=0.00024908138497223704),
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
TINY = dict(
    data=dict(batch_size=32, window=16),
    model=dict(hidden_size=16),
    averaging=dict(trigger_turns=1, trigger_at_the_latest=1),
    schedule=dict(turns=2, steps_per_turn=4),
    evaluation=dict(temperature_tokens=1_000, train_windows=1, max_windows=10),
)


def get_config(variant=""):
    model, condition, size = configs.choose(variant, MODELS, CONDITIONS, ("", "small", "tiny"))
    config = config_dict.ConfigDict()
    config.seed = 1
    config.log_every = 50  # Steps; also how many run in one dispatch.
    config.data = dict(
        name="ptb",
        batch_size=64,
        window=35,
        episodic=False,
        drop_state_probability=0.01,
        source_dir=config_dict.placeholder(str),
        data_dir=config_dict.placeholder(str),
    )
    config.model = dict(
        cell="mogrifier_lstm",
        num_layers=2,
        num_params=24_000_000,
        hidden_size=config_dict.placeholder(int),  # Solved from num_params unless set.
        embedding_ratio=1.0,
        tied_embeddings=True,
        mixture_components=0,
        rounds=5,
        rank=84,
        scaling=False,
        layer_norm=False,
        gate_rank=0,
        cap_input_gate=True,
        forget_bias=1.0,
        output="sum",
        state_mask="window",
        trainable_initial_state=False,
        dtype="float32",
    )
    config.dropout = dict(
        input=0.7290787773167251,
        inter_layer=0.2909822365241189,
        state=0.38729439899832296,
        output=0.7156690388448465,
        downprojected=config_dict.placeholder(float),  # As output unless set.
    )
    config.optimizer = dict(
        name="adam",
        learning_rate=0.002299987130225388,
        l2_penalty=0.00025235335778471014,
        clip_norm=10.0,
        b1=0.0,
        b2=0.999,
        eps=1e-8,
        accumulate=1,
        accumulate_reduce="sum",
    )
    config.averaging = dict(kind="triggered", trigger_turns=50, trigger_at_the_latest=400)
    config.schedule = dict(turns=600, steps_per_turn=100, **configs.schedule_options())
    config.evaluation = dict(
        softmax_temperature=config_dict.placeholder(float),  # Searched unless set.
        temperature_tokens=50_000,
        lines_per_stripe=100,
        train_windows=20,
        max_windows=config_dict.placeholder(int),  # Of a split; all unless set.
    )
    config.mesh = dict(data=-1, model=1)
    if model in UNGATED:
        config.update(LSTM)
    if size:
        config.model.rank = SMALL_RANK if model not in UNGATED else 0
        config.optimizer.learning_rate = SMALL_LSTM_RATE if model in UNGATED else SMALL_RATE
    config.update(MODELS[model])
    config.update(CONDITIONS[condition])
    if size and model == "factorised":
        config.model.gate_rank = SMALL_GATE_RANK
    config.update({"": {}, "small": SMALL, "tiny": TINY}[size])
    if size == "small" and condition == "characters":
        config.update(SMALL_CHARACTERS)
    if size == "tiny":
        config.model.rank = min(config.model.rank, 4)
        config.model.gate_rank = min(config.model.gate_rank, 4)
    return config.lock()


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

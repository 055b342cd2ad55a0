r"""WikiText-2, word level: two layers, 35M parameters, a mixture of two softmaxes.

    python -m mogrifier_jax.main --config=experiments/wikitext2.py --workdir=runs/wikitext2
    python -m mogrifier_jax.main --config=experiments/wikitext2.py:lstm --workdir=runs/wt2_lstm

Paper, perplexity on valid / test (hidden sizes 1211 and 1366, embeddings 428 and 272):

               deterministic   + dyneval     MC dropout    + dyneval
    LSTM       62.6 / 60.1     43.2 / 41.5   61.9 / 59.4   43.2 / 41.4
    Mogrifier  58.7 / 56.6     40.6 / 39.0   57.3 / 55.1   40.2 / 38.6

Measured: not yet.

Variants: `mogrifier` (default) or `lstm`; `tiny` is a smoke run.
"""

from ml_collections import config_dict

from mogrifier_jax import configs

LSTM = dict(
    model=dict(rounds=0, rank=0, embedding_ratio=0.3530770457779424),
    dropout=dict(
        input=0.6090979517941943,
        inter_layer=0.09075401405970591,
        state=0.2714030562283111,
        output=0.34845530389157287,
    ),
    optimizer=dict(learning_rate=0.003183909546336849, l2_penalty=0.00023063627783021125),
)
TINY = dict(
    data=dict(batch_size=32, window=16),
    model=dict(hidden_size=16, rank=4),
    averaging=dict(trigger_turns=1, trigger_at_the_latest=1),
    schedule=dict(turns=2, steps_per_turn=4),
    evaluation=dict(temperature_tokens=1_000, train_windows=1, max_windows=10),
)


def get_config(variant=""):
    cell, size = configs.choose(variant, ("mogrifier", "lstm"), ("", "tiny"))
    config = config_dict.ConfigDict()
    config.seed = 1
    config.log_every = 20  # Steps; also how many run in one dispatch.
    config.data = dict(
        name="wikitext2",
        batch_size=64,
        window=70,
        drop_state_probability=0.01,
        source_dir=config_dict.placeholder(str),
        data_dir=config_dict.placeholder(str),
    )
    config.model = dict(
        cell="mogrifier_lstm",
        num_layers=2,
        num_params=35_000_000,
        hidden_size=config_dict.placeholder(int),  # Solved from num_params unless set.
        embedding_ratio=0.1993194960596213,
        tied_embeddings=True,
        mixture_components=2,
        rounds=6,
        rank=48,
        cap_input_gate=True,
        forget_bias=1.0,
        output="sum",
        state_mask="step",  # The published program redraws the mask at each step here.
        dtype="float32",  # As the published runs; bfloat16 is faster on TPUs.
    )
    config.dropout = dict(
        input=0.5469087645499495,
        inter_layer=0.1988228263748591,
        state=0.22137985867236876,
        output=0.34766651193735193,
        downprojected=config_dict.placeholder(float),  # As output unless set.
    )
    config.optimizer = dict(
        name="adam",
        learning_rate=0.003287792100749033,
        l2_penalty=0.00018994987193751323,
        clip_norm=10.0,
        b1=0.0,
        b2=0.999,
        eps=1e-8,
        accumulate=1,
        accumulate_reduce="sum",
    )
    config.averaging = dict(kind="triggered", trigger_turns=50, trigger_at_the_latest=800)
    config.schedule = dict(turns=1000, steps_per_turn=200, **configs.schedule_options())
    config.evaluation = dict(
        softmax_temperature=config_dict.placeholder(float),  # Searched unless set.
        temperature_tokens=50_000,
        lines_per_stripe=100,
        train_windows=20,
        max_windows=config_dict.placeholder(int),  # Of a split; all unless set.
    )
    config.mesh = dict(data=-1, model=1)
    if cell == "lstm":
        config.update(LSTM)
    config.update({"": {}, "tiny": TINY}[size])
    return config.lock()

r"""Penn Treebank, word level: two layers, 24M parameters.

    python -m mogrifier_jax.main --config=experiments/ptb.py --workdir=runs/ptb
    python -m mogrifier_jax.main --config=experiments/ptb.py:lstm --workdir=runs/ptb_lstm

Paper, perplexity on valid / test (hidden sizes 951 and 912):

               deterministic   + dyneval     MC dropout    + dyneval
    LSTM       55.8 / 54.6     48.9 / 48.4   55.5 / 54.1   48.6 / 48.4
    Mogrifier  52.1 / 51.0     45.1 / 45.0   51.4 / 50.1   44.9 / 44.8

Measured, `small` on two CPU cores, validation perplexity at the turns 0 to 10: 10081.7, 299.6,
220.6, 189.5, 168.1, 156.0, 145.0, 140.6, 133.7, 123.5, 120.1; averaging starts at turn 8. Test
115.4 at the end. `lstm,small` with a learning rate of 0.008 ends at 114.1 / 109.2. The full size:
not yet.

Variants: `mogrifier` (default) or `lstm`; `small` has 2M parameters and takes 1000
steps, for a CPU; `tiny` is a smoke run.
"""

from ml_collections import config_dict

from mogrifier_jax import configs

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
SMALL = dict(
    data=dict(window=35),
    model=dict(num_params=2_000_000, rank=20),
    dropout=dict(input=0.2, inter_layer=0.1, state=0.1, output=0.2),
    optimizer=dict(learning_rate=0.004, l2_penalty=1e-5),
    averaging=dict(trigger_turns=3, trigger_at_the_latest=8),
    schedule=dict(turns=10, steps_per_turn=100),
)
TINY = dict(
    data=dict(batch_size=32, window=16),
    model=dict(hidden_size=16, rank=4),
    averaging=dict(trigger_turns=1, trigger_at_the_latest=1),
    schedule=dict(turns=2, steps_per_turn=4),
    evaluation=dict(temperature_tokens=1_000, train_windows=1, max_windows=10),
)


def get_config(variant=""):
    cell, size = configs.choose(variant, ("mogrifier", "lstm"), ("", "small", "tiny"))
    config = config_dict.ConfigDict()
    config.seed = 1
    config.log_every = 20  # Steps; also how many run in one dispatch.
    config.data = dict(
        name="ptb",
        batch_size=64,
        window=70,
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
        cap_input_gate=True,
        forget_bias=1.0,
        output="sum",
        state_mask="window",
        dtype="float32",  # As the published runs; bfloat16 is faster on TPUs.
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
    config.update({"": {}, "small": SMALL, "tiny": TINY}[size])
    return config.lock()

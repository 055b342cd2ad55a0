r"""enwik8, byte level: four layers, 96M or 48M parameters.

    python -m mogrifier_jax.main --config=experiments/enwik8.py --workdir=runs/enwik8
    python -m mogrifier_jax.main --config=experiments/enwik8.py:lstm,48m --workdir=runs/enwik8_lstm

Paper, bits per byte on valid / test (hidden sizes 1725, 1687, 1218 and 1160):

                   deterministic   + dyneval       MC dropout
    96M LSTM       1.145 / 1.155   1.041 / 1.020   1.139 / 1.147
    96M Mogrifier  1.110 / 1.122   1.009 / 0.988   1.105 / 1.116
    48M LSTM       1.182 / 1.195   1.074 / 1.051   1.177 / 1.188
    48M Mogrifier  1.135 / 1.146   1.035 / 1.012   1.131 / 1.141

Measured: not yet.

Variants: `mogrifier` (default) or `lstm`; `96m` (default) or `48m`; `tiny` is a smoke run.
"""

from ml_collections import config_dict

from mogrifier_jax import configs

# The Mogrifier of 96M is spelt out in get_config.
TUNED = {
    ("96m", "mogrifier"): {},
    ("96m", "lstm"): dict(
        model=dict(rounds=0, rank=0),
        dropout=dict(
            input=0.1233672355450206,
            inter_layer=0.12636500626697247,
            state=0.13063181510547955,
            output=0.24846692818769148,
        ),
        optimizer=dict(learning_rate=0.001975213597736287, l2_penalty=5.853555404849184e-05),
    ),
    ("48m", "mogrifier"): dict(
        model=dict(rounds=6, rank=79),
        dropout=dict(
            input=0.015496029112930465,
            inter_layer=0.008633961431527571,
            state=0.0437288219541186,
            output=0.138307173174503,
        ),
        optimizer=dict(learning_rate=0.001021423409385794, l2_penalty=0.000993383826740019),
    ),
    ("48m", "lstm"): dict(
        model=dict(rounds=0, rank=0),
        dropout=dict(
            input=0.16279440026790548,
            inter_layer=0.11949666753873665,
            state=0.1036809388104279,
            output=0.13860156332143037,
        ),
        optimizer=dict(learning_rate=0.002516709293528533, l2_penalty=2.5181258956042348e-05),
    ),
}
TINY = dict(
    data=dict(batch_size=128, window=32),
    model=dict(hidden_size=16, rank=4),
    averaging=dict(trigger_turns=1, trigger_at_the_latest=1),
    schedule=dict(turns=2, steps_per_turn=4),
    evaluation=dict(temperature_tokens=1_000, train_windows=1, max_windows=10),
)


def get_config(variant=""):
    cell, budget, size = configs.choose(
        variant, ("mogrifier", "lstm"), ("96m", "48m"), ("", "tiny")
    )
    config = config_dict.ConfigDict()
    config.seed = 1
    config.log_every = 20  # Steps; also how many run in one dispatch.
    config.data = dict(
        name="enwik8",
        batch_size=128,
        window=500,
        drop_state_probability=0.01,
        source_dir=config_dict.placeholder(str),
        data_dir=config_dict.placeholder(str),
    )
    config.model = dict(
        cell="mogrifier_lstm",
        num_layers=4,
        num_params=96_000_000,
        hidden_size=config_dict.placeholder(int),  # Solved from num_params unless set.
        embedding_ratio=1.0,
        tied_embeddings=False,
        mixture_components=0,
        rounds=5,
        rank=61,
        cap_input_gate=True,
        forget_bias=1.0,
        output="sum",
        state_mask="step",  # The published program redraws the mask at each step here.
        dtype="float32",  # As the published runs; bfloat16 is faster on TPUs.
    )
    config.dropout = dict(
        input=0.015908852824256536,
        inter_layer=0.13785990907975867,
        state=0.1648727901535727,
        output=0.2878539844807166,
        downprojected=config_dict.placeholder(float),  # As output unless set.
    )
    config.optimizer = dict(
        name="adam",
        learning_rate=0.0022480107672343715,
        l2_penalty=4.409390792135428e-05,
        clip_norm=10.0,
        b1=0.0,
        b2=0.999,
        eps=1e-8,
        accumulate=2,  # The sum over the two halves makes clipping at 10 act like clipping at 5.
        accumulate_reduce="sum",
    )
    config.averaging = dict(kind="triggered", trigger_turns=10, trigger_at_the_latest=80)
    config.schedule = dict(turns=100, steps_per_turn=400, **configs.schedule_options())
    config.evaluation = dict(
        softmax_temperature=config_dict.placeholder(float),  # Searched unless set.
        temperature_tokens=50_000,
        lines_per_stripe=100,
        train_windows=20,
        max_windows=config_dict.placeholder(int),  # Of a split; all unless set.
    )
    config.mesh = dict(data=-1, model=1)
    config.update(TUNED[budget, cell])
    if budget == "48m":
        config.update(dict(model=dict(num_params=48_000_000), optimizer=dict(accumulate=1)))
    config.update({"": {}, "tiny": TINY}[size])
    return config.lock()

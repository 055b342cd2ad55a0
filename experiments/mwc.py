r"""Multilingual Wikipedia Corpus, character level, English or Finnish: two layers, 24M parameters.

    python -m mogrifier_jax.main --config=experiments/mwc.py --workdir=runs/mwc_en
    python -m mogrifier_jax.main --config=experiments/mwc.py:lstm,fi --workdir=runs/mwc_fi_lstm

Paper, bits per character on valid / test:

                  deterministic   + dyneval       MC dropout      + dyneval
    en LSTM       1.353 / 1.338   1.239 / 1.225   1.347 / 1.332   1.238 / diverged
    en Mogrifier  1.320 / 1.305   1.202 / 1.189   1.313 / 1.298   1.200 / 1.187
    fi LSTM       1.383 / 1.367   1.249 / 1.237   1.377 / 1.361   1.247 / 1.234
    fi Mogrifier  1.339 / 1.326   1.202 / 1.192   1.327 / 1.314   1.198 / diverged

Measured: not yet.

Variants: `mogrifier` (default) or `lstm`; `en` (default) or `fi`; `tiny` is a smoke run.
"""

from ml_collections import config_dict

from mogrifier_jax import configs

# The English Mogrifier is spelt out in get_config.
TUNED = {
    ("en", "mogrifier"): {},
    ("en", "lstm"): dict(
        model=dict(rounds=0, rank=0, embedding_ratio=0.16763290107221795),
        dropout=dict(
            input=0.24803406411000273,
            inter_layer=0.04740148103981923,
            state=0.046954638037220955,
            output=0.06200886700243824,
        ),
        optimizer=dict(learning_rate=0.0038051220647221428, l2_penalty=7.825277510671981e-06),
    ),
    ("fi", "mogrifier"): dict(
        model=dict(rounds=5, rank=100, embedding_ratio=1.3016032871831578),
        dropout=dict(
            input=0.06995541397794428,
            inter_layer=0.11571939622760244,
            state=0.1759160317735942,
            output=0.22149685667402097,
        ),
        optimizer=dict(learning_rate=0.001999992683987708, l2_penalty=9.607977185924193e-05),
    ),
    ("fi", "lstm"): dict(
        model=dict(rounds=0, rank=0, embedding_ratio=1.5665444454253725),
        dropout=dict(
            input=0.0004278254540998817,
            inter_layer=0.03679207573249842,
            state=0.15784488790163897,
            output=0.21672999424789158,
        ),
        optimizer=dict(learning_rate=0.0038728221226125496, l2_penalty=3.35903544036833e-05),
    ),
}
TINY = dict(
    data=dict(batch_size=32, window=16),
    model=dict(hidden_size=16, rank=4),
    averaging=dict(trigger_turns=1, trigger_at_the_latest=1),
    schedule=dict(turns=2, steps_per_turn=4),
    evaluation=dict(temperature_tokens=1_000, train_windows=1, max_windows=10),
)


def get_config(variant=""):
    cell, language, size = configs.choose(
        variant, ("mogrifier", "lstm"), ("en", "fi"), ("", "tiny")
    )
    config = config_dict.ConfigDict()
    config.seed = 1
    config.log_every = 20  # Steps; also how many run in one dispatch.
    config.data = dict(
        name="mwc",
        language=language,
        batch_size=64,
        window=150,
        drop_state_probability=0.01,
        source_dir=config_dict.placeholder(str),
        data_dir=config_dict.placeholder(str),
    )
    config.model = dict(
        cell="mogrifier_lstm",
        num_layers=2,
        num_params=24_000_000,
        hidden_size=config_dict.placeholder(int),  # Solved from num_params unless set.
        embedding_ratio=0.48783057795681084,
        tied_embeddings=False,
        mixture_components=0,
        rounds=6,
        rank=78,
        cap_input_gate=True,
        forget_bias=1.0,
        output="sum",
        state_mask="step",  # The published program redraws the mask at each step here.
        dtype="float32",  # As the published runs; bfloat16 is faster on TPUs.
    )
    config.dropout = dict(
        input=0.22379479910762798,
        inter_layer=0.08779703173530118,
        state=0.09548532162445378,
        output=0.005212299871888891,
        downprojected=config_dict.placeholder(float),  # As output unless set.
    )
    config.optimizer = dict(
        name="adam",
        learning_rate=0.0014344414472614946,
        l2_penalty=9.245434142118616e-05,
        clip_norm=10.0,
        b1=0.0,
        b2=0.999,
        eps=1e-8,
        accumulate=1,
        accumulate_reduce="sum",
    )
    config.averaging = dict(kind="triggered", trigger_turns=25, trigger_at_the_latest=400)
    config.schedule = dict(turns=500, steps_per_turn=200, **configs.schedule_options())
    config.evaluation = dict(
        softmax_temperature=config_dict.placeholder(float),  # Searched unless set.
        temperature_tokens=50_000,
        lines_per_stripe=100,
        train_windows=20,
        max_windows=config_dict.placeholder(int),  # Of a split; all unless set.
    )
    config.mesh = dict(data=-1, model=1)
    config.update(TUNED[language, cell])
    config.update({"": {}, "tiny": TINY}[size])
    return config.lock()

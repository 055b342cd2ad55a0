r"""The help texts of the running Python, character level: nothing to download, minutes on a CPU.

    python -m mogrifier_jax.main --config=experiments/pydoc.py --workdir=runs/pydoc

Measured: about 1.84 bits per character on valid and 1.51 on test, with Python 3.11's texts, in
about seven minutes of CPU time.

Variants: `mogrifier` (default) or `lstm`; `tiny` is a smoke run of seconds.
"""

from ml_collections import config_dict

from mogrifier_jax import configs

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
        name="pydoc",
        batch_size=32,
        window=64,
        drop_state_probability=0.01,
        source_dir=config_dict.placeholder(str),
        data_dir=config_dict.placeholder(str),
    )
    config.model = dict(
        cell="mogrifier_lstm",
        num_layers=2,
        num_params=500_000,
        hidden_size=config_dict.placeholder(int),  # Solved from num_params unless set.
        embedding_ratio=1.0,
        tied_embeddings=False,
        mixture_components=0,
        rounds=5,
        rank=20,
        cap_input_gate=True,
        forget_bias=1.0,
        output="sum",
        state_mask="window",
        dtype="float32",
    )
    config.dropout = dict(
        input=0.05,
        inter_layer=0.05,
        state=0.05,
        output=0.05,
        downprojected=config_dict.placeholder(float),  # As output unless set.
    )
    config.optimizer = dict(
        name="adam",
        learning_rate=4e-3,
        l2_penalty=1e-5,
        clip_norm=10.0,
        b1=0.0,
        b2=0.999,
        eps=1e-8,
        accumulate=1,
        accumulate_reduce="sum",
    )
    config.averaging = dict(kind="triggered", trigger_turns=2, trigger_at_the_latest=5)
    config.schedule = dict(turns=8, steps_per_turn=100, **configs.schedule_options())
    config.evaluation = dict(
        softmax_temperature=config_dict.placeholder(float),  # Searched unless set.
        temperature_tokens=50_000,
        lines_per_stripe=100,
        train_windows=20,
        max_windows=config_dict.placeholder(int),  # Of a split; all unless set.
    )
    config.mesh = dict(data=-1, model=1)
    if cell == "lstm":
        config.update(dict(model=dict(rounds=0, rank=0)))
    config.update({"": {}, "tiny": TINY}[size])
    return config.lock()

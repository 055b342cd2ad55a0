r"""Penn Treebank, character level: two layers, 24M parameters.

    python -m mogrifier_jax.main --config=experiments/ptb_char.py --workdir=runs/ptb_char
    python -m mogrifier_jax.main --config=experiments/ptb_char.py:lstm --workdir=runs/ptb_char_lstm

Paper, bits per character on valid / test (hidden size of the Mogrifier 1209):

               deterministic   + dyneval       MC dropout      + dyneval
    LSTM       1.163 / 1.143   1.116 / 1.103   1.159 / 1.139   1.115 / 1.102
    Mogrifier  1.149 / 1.131   1.098 / 1.088   1.137 / 1.120   1.094 / 1.083

Measured: not yet.

The tuned LSTM of this row was never published: `lstm` is the Mogrifier's settings with no rounds
(hidden size 1221), so its result need not be the paper's.

Variants: `mogrifier` (default) or `lstm`; `tiny` is a smoke run.
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
        name="ptb_char",
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
        embedding_ratio=1.0,
        tied_embeddings=False,
        mixture_components=0,
        rounds=4,
        rank=24,
        cap_input_gate=True,
        forget_bias=1.0,
        output="sum",
        state_mask="window",
        dtype="float32",  # As the published runs; bfloat16 is faster on TPUs.
    )
    config.dropout = dict(
        input=0.27860252841733274,
        inter_layer=0.0737609984911853,
        state=0.17118611234551975,
        output=0.2347428361918374,
        downprojected=config_dict.placeholder(float),  # As output unless set.
    )
    config.optimizer = dict(
        name="adam",
        learning_rate=0.003739598828019367,
        l2_penalty=0.00025558089199237096,
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
    if cell == "lstm":
        config.update(dict(model=dict(rounds=0, rank=0)))
    config.update({"": {}, "tiny": TINY}[size])
    return config.lock()

r"""Penn Treebank, word level: two layers, 24M parameters.

    python -m mogrifier_jax.main --config=experiments/ptb.py --workdir=runs/ptb
    python -m mogrifier_jax.main --config=experiments/ptb.py:lstm --workdir=runs/ptb_lstm

Paper, perplexity on valid / test (hidden sizes 951 and 912):

               deterministic   + dyneval     MC dropout    + dyneval
    LSTM       55.8 / 54.6     48.9 / 48.4   55.5 / 54.1   48.6 / 48.4
    Mogrifier  52.1 / 51.0     45.1 / 45.0   51.4 / 50.1   44.9 / 44.8

Measured, `small` on one CPU core, seed 1, validation perplexity at the turns 0 to 10: 10041.4,
268.5, 203.5, 174.9, 153.2, 143.4, 132.9, 129.2, 123.7, 112.5, 109.2; averaging starts at turn 8.
Test 104.7 at the end. `lstm,small` ends at 113.4 / 109.3. The full size: not yet.

    python -m mogrifier_jax.main --mode=sweep --config=experiments/ptb.py:small --set=models \
        --seeds=1,2,3 --workdir=runs/ptb_models

compares both models over seeds.

Variants: `mogrifier` (default) or `lstm`; `small` has 2M parameters and takes 1000
steps, for a CPU; `tiny` is a smoke run.
"""

from mogrifier_jax import configs
from mogrifier_jax.configs import Row, Set

MOGRIFIER = dict(
    data=dict(name="ptb", batch_size=64, window=70),
    model=dict(num_params=24_000_000, tied_embeddings=True, rounds=5, rank=84),
    dropout=(0.7290787773167251, 0.2909822365241189, 0.38729439899832296, 0.7156690388448465),
    optimizer=dict(learning_rate=0.002299987130225388, l2_penalty=0.00025235335778471014),
    averaging=dict(trigger_turns=50, trigger_at_the_latest=800),
    schedule=dict(turns=1000, steps_per_turn=200),
)
LSTM = dict(
    model=dict(rounds=0, rank=0),
    dropout=(0.6275626425150355, 0.3069926535017156, 0.3692225400980858, 0.6901712653612706),
    optimizer=dict(learning_rate=0.0030369099569192135, l2_penalty=0.00024908138497223704),
)
SMALL = dict(
    data=dict(window=35),
    model=dict(num_params=2_000_000, rank=4),
    dropout=dict(input=0.2, inter_layer=0.1, state=0.1, output=0.2),
    optimizer=dict(learning_rate=0.008, l2_penalty=1e-5),  # The best of three for each model.
    averaging=dict(trigger_turns=3, trigger_at_the_latest=8),
    schedule=dict(turns=10, steps_per_turn=100),
)


def get_config(variant=""):
    cells = {"mogrifier": {}, "lstm": LSTM}
    return configs.build(variant, MOGRIFIER, cells, {"": {}, "small": SMALL, "tiny": configs.TINY})


SETS = {"models": Set("LSTM and Mogrifier", [Row("lstm", "LSTM"), Row("mogrifier", "Mogrifier")])}

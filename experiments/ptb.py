r"""Penn Treebank, word level: two layers, 24M parameters.

    python -m mogrifier_jax.main --config=experiments/ptb.py --workdir=runs/ptb
    python -m mogrifier_jax.main --config=experiments/ptb.py:lstm --workdir=runs/ptb_lstm

Paper, perplexity on valid / test (hidden sizes 951 and 912):

               deterministic   + dyneval     MC dropout    + dyneval
    LSTM       55.8 / 54.6     48.9 / 48.4   55.5 / 54.1   48.6 / 48.4
    Mogrifier  52.1 / 51.0     45.1 / 45.0   51.4 / 50.1   44.9 / 44.8

`small` has 1M parameters, for a CPU core: one turn is one pass over the text and takes two to three
minutes, and training ends when validation stops improving, after at most 10 turns. Its settings are
the best of eight trials for each model (experiments/studies/ptb_small.json, docs/science.md); all
models are best at the same rate and dropout.

    python -m mogrifier_jax.main --mode=sweep --config=experiments/ptb.py:small --set=models \
        --seeds=1,2,3 --parallel=2 --workdir=runs/ptb_models

compares both models over seeds, and `--set=rewired` the Mogrifier and `rlstm`; RESULTS.md has the
results. The full size has not been run.

`rlstm` is the Mogrifier RLSTM (docs/cells.md) at the settings of the Mogrifier; no others were
published for it.

Variants: `mogrifier` (default), `lstm` or `rlstm`; `small` as above; `tiny` is a smoke run.
"""

from mogrifier_jax import configs

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
    data=dict(batch_size=32, window=35),
    model=dict(num_params=1_000_000),
    dropout=(0.026721553956272272, 0.2609694199922853, 0.027372040535628986, 0.23025377666699828),
    optimizer=dict(learning_rate=0.010059913059084881, l2_penalty=1e-5),
    averaging=dict(trigger_turns=2, trigger_at_the_latest=7),
    schedule=dict(turns=10, steps_per_turn=830, early_stopping_turns=3),
)
SMALL_GATES = dict(model=dict(rounds=4, rank=17))  # Of the models with rounds.
CELLS = {"mogrifier": {}, "lstm": LSTM, "rlstm": configs.REWIRED}
SIZES = {"": {}, "small": SMALL, "tiny": configs.TINY}


def get_config(variant=""):
    cell, size = configs.choose(variant, CELLS, SIZES)
    gates = SMALL_GATES if size == "small" and cell != "lstm" else {}
    return configs.base(configs.LAMB, MOGRIFIER, CELLS[cell], SIZES[size], gates)


SETS = {"models": configs.MODELS, "rewired": configs.REWIRED_MODELS}

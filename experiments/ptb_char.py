r"""Penn Treebank, character level: two layers, 24M parameters.

    python -m mogrifier_jax.main --config=experiments/ptb_char.py --workdir=runs/ptb_char
    python -m mogrifier_jax.main --config=experiments/ptb_char.py:lstm --workdir=runs/ptb_char_lstm

Paper, bits per character on valid / test (hidden size of the Mogrifier 1209):

               deterministic   + dyneval       MC dropout      + dyneval
    LSTM       1.163 / 1.143   1.116 / 1.103   1.159 / 1.139   1.115 / 1.102
    Mogrifier  1.149 / 1.131   1.098 / 1.088   1.137 / 1.120   1.094 / 1.083

The full size has not been run. The tuned LSTM of this row was never published: `lstm` is the
Mogrifier's settings with no rounds (hidden size 1221), so its result need not be the paper's.
`rlstm` is the Mogrifier RLSTM (docs/cells.md) at the settings of the Mogrifier.

`small` has 1M parameters and one pass over the text, which takes a CPU core five minutes. Each
model has the settings of the best of its four trials (docs/science.md); those of the Mogrifier and
the Mogrifier RLSTM are the same. `--config.model.layer_norm=True` makes LSTM and Mogrifier better,
and puts the Mogrifier ahead. RESULTS.md has the comparison.

Variants: `mogrifier` (default), `lstm` or `rlstm`; `small` as above; `tiny` is a smoke run.
"""

from mogrifier_jax import configs

MOGRIFIER = dict(
    data=dict(name="ptb_char", batch_size=64, window=150),
    model=dict(num_params=24_000_000, rounds=4, rank=24),
    dropout=(0.27860252841733274, 0.0737609984911853, 0.17118611234551975, 0.2347428361918374),
    optimizer=dict(learning_rate=0.003739598828019367, l2_penalty=0.00025558089199237096),
    averaging=dict(trigger_turns=25, trigger_at_the_latest=400),
    schedule=dict(turns=500, steps_per_turn=200),
)
SMALL = dict(
    data=dict(batch_size=32, window=75),
    model=dict(num_params=1_000_000),
    dropout=(0.0, 0.0, 0.0, 0.0),
    optimizer=dict(l2_penalty=1e-5),
    averaging=dict(trigger_turns=2, trigger_at_the_latest=3),
    schedule=dict(turns=4, steps_per_turn=522),
)
SMALL_GATED = dict(model=dict(rounds=4, rank=8), optimizer=dict(learning_rate=0.003011732126701547))
SMALL_CELLS = {
    "mogrifier": SMALL_GATED,
    "lstm": dict(optimizer=dict(learning_rate=0.003256053572653868)),
    "rlstm": SMALL_GATED,
}
CELLS = {"mogrifier": {}, "lstm": configs.UNGATED, "rlstm": configs.REWIRED}
SIZES = {"": {}, "small": SMALL, "tiny": configs.TINY}


def get_config(variant=""):
    cell, size = configs.choose(variant, CELLS, SIZES)
    tuned = SMALL_CELLS[cell] if size == "small" else {}
    return configs.base(configs.LAMB, MOGRIFIER, CELLS[cell], SIZES[size], tuned)


SETS = {"models": configs.ALL_MODELS}

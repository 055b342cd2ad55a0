r"""enwik8, byte level: four layers, 96M or 48M parameters.

    python -m mogrifier_jax.main --config=experiments/enwik8.py --workdir=runs/enwik8
    python -m mogrifier_jax.main --config=experiments/enwik8.py:lstm,48m --workdir=runs/enwik8_lstm

Paper, bits per byte on valid / test (hidden sizes 1725, 1687, 1218 and 1160):

                   deterministic   + dyneval       MC dropout
    96M LSTM       1.145 / 1.155   1.041 / 1.020   1.139 / 1.147
    96M Mogrifier  1.110 / 1.122   1.009 / 0.988   1.105 / 1.116
    48M LSTM       1.182 / 1.195   1.074 / 1.051   1.177 / 1.188
    48M Mogrifier  1.135 / 1.146   1.035 / 1.012   1.131 / 1.141

The full sizes have not been run. `rlstm` is the Mogrifier RLSTM (docs/cells.md) at the settings of
the Mogrifier.

`small` has two layers and 1M parameters. It reads 5M bytes, which start at 32 places of the
training text, and is scored on a tenth of the other texts, which takes a CPU core about ten
minutes. Each model has the settings of the best of its four trials (docs/science.md).
`--config.model.layer_norm=True` makes LSTM and Mogrifier better, and puts the Mogrifier ahead
(one seed). RESULTS.md has the comparison.

Variants: `mogrifier` (default), `lstm` or `rlstm`; `96m` (default) or `48m`; `small` as above;
`tiny` is a smoke run.
"""

from mogrifier_jax import configs

COMMON = dict(
    data=dict(name="enwik8", batch_size=128, window=500),
    # The published program redraws the mask of the state at each step here.
    model=dict(num_layers=4, state_mask="step"),
    averaging=dict(trigger_turns=10, trigger_at_the_latest=80),
    schedule=dict(turns=100, steps_per_turn=400),
)
BUDGETS = {
    # The sum over the two halves of a batch makes clipping at 10 act like clipping at 5.
    "96m": dict(model=dict(num_params=96_000_000), optimizer=dict(accumulate=2)),
    "48m": dict(model=dict(num_params=48_000_000)),
}
# For each key the values of the Mogrifier and of the LSTM.
TUNED_96M = {
    "model.rounds": (5, 0),
    "model.rank": (61, 0),
    "dropout.input": (0.015908852824256536, 0.1233672355450206),
    "dropout.inter_layer": (0.13785990907975867, 0.12636500626697247),
    "dropout.state": (0.1648727901535727, 0.13063181510547955),
    "dropout.output": (0.2878539844807166, 0.24846692818769148),
    "optimizer.learning_rate": (0.0022480107672343715, 0.001975213597736287),
    "optimizer.l2_penalty": (4.409390792135428e-05, 5.853555404849184e-05),
}
TUNED_48M = {
    "model.rounds": (6, 0),
    "model.rank": (79, 0),
    "dropout.input": (0.015496029112930465, 0.16279440026790548),
    "dropout.inter_layer": (0.008633961431527571, 0.11949666753873665),
    "dropout.state": (0.0437288219541186, 0.1036809388104279),
    "dropout.output": (0.138307173174503, 0.13860156332143037),
    "optimizer.learning_rate": (0.001021423409385794, 0.002516709293528533),
    "optimizer.l2_penalty": (0.000993383826740019, 2.5181258956042348e-05),
}
SMALL = dict(
    data=dict(batch_size=32, window=100),
    model=dict(num_layers=2, num_params=1_000_000, state_mask="window"),
    dropout=(0.0, 0.0, 0.0, 0.0),
    optimizer=dict(l2_penalty=1e-5, accumulate=1),
    averaging=dict(trigger_turns=2, trigger_at_the_latest=3),
    schedule=dict(turns=4, steps_per_turn=390),
    evaluation=dict(max_windows=160),
)
SMALL_GATED = dict(model=dict(rounds=4, rank=8), optimizer=dict(learning_rate=0.003011732126701547))
SMALL_CELLS = {
    "mogrifier": SMALL_GATED,
    "lstm": dict(optimizer=dict(learning_rate=0.003256053572653868)),
    "rlstm": SMALL_GATED,
}
CELLS = {"mogrifier": {}, "lstm": {}, "rlstm": configs.REWIRED}
SIZES = {
    "": ({},),
    "small": (SMALL,),
    "tiny": (configs.TINY, dict(data=dict(batch_size=128, window=32))),
}


def get_config(variant=""):
    cell, budget, size = configs.choose(variant, CELLS, BUDGETS, SIZES)
    table = {"96m": TUNED_96M, "48m": TUNED_48M}[budget]
    tuned = {name: values[cell == "lstm"] for name, values in table.items()}
    small = SMALL_CELLS[cell] if size == "small" else {}
    return configs.base(
        configs.LAMB, COMMON, BUDGETS[budget], tuned, CELLS[cell], *SIZES[size], small
    )


SETS = {"models": configs.ALL_MODELS}

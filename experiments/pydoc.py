r"""Python's language reference, character level: nothing to download, minutes on a CPU.

    python -m mogrifier_jax.main --config=experiments/pydoc.py --workdir=runs/pydoc

The text is what `help()` shows in Python 3.11, and it comes with the package. Measured: about 1.74
bits per character on valid and 1.39 on test, in about two minutes on one CPU core.

    python -m mogrifier_jax.main --mode=sweep --config=experiments/pydoc.py --set=models \
        --seeds=1,2,3 --parallel=2 --workdir=runs/pydoc_models

compares both models over seeds; RESULTS.md has what came out.

Variants: `mogrifier` (default) or `lstm`; `tiny` is a smoke run of seconds.
"""

from mogrifier_jax import configs

COMMON = dict(  # What `tiny` and text.py build on, too.
    data=dict(name="pydoc", batch_size=32, window=64),
    model=dict(num_params=500_000, rounds=5, rank=20),
    dropout=dict(input=0.05, inter_layer=0.05, state=0.05, output=0.05),
    optimizer=dict(learning_rate=4e-3, l2_penalty=1e-5),
    averaging=dict(trigger_turns=2, trigger_at_the_latest=5),
    schedule=dict(turns=8, steps_per_turn=100),
)
CELLS = {"mogrifier": {}, "lstm": configs.UNGATED}
# The best of eight trials for each model, both normalised and without dropout (docs/science.md).
NORMALISED = dict(model=dict(layer_norm=True), dropout=(0.0, 0.0, 0.0, 0.0))
TUNED = {
    "mogrifier": dict(
        model=dict(rounds=3, rank=25), optimizer=dict(learning_rate=0.007908314384496531)
    ),
    "lstm": dict(optimizer=dict(learning_rate=0.0074237130094510495)),
}
SIZES = {"": NORMALISED, "tiny": configs.TINY}


def get_config(variant=""):
    cell, size = configs.choose(variant, CELLS, SIZES)
    tuned = {} if size else TUNED[cell]
    return configs.base(configs.LAMB, COMMON, CELLS[cell], SIZES[size], tuned)


SETS = {"models": configs.MODELS}

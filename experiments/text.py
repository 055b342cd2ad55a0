r"""Your own text: a model whose size, dropout and schedule follow from how much text there is.

    python -m mogrifier_jax.main --config=experiments/text.py --config.data.path=book.txt

`data.path` names one file, cut by its lines as `data.fractions` says; or give all of
`data.train`, `data.valid` and `data.test`. `data.level` is character, word or byte.

The size of the files chooses one of the rows below: 100KB, 1MB, 10MB or 100MB, whichever is the
nearest on a logarithmic scale. The table at the start of a run says which row was taken, and
`--config.data.text_size=10MB` chooses another. Whatever else is set on the command line takes
precedence over the row. docs/data.md has the trials and scores by which the rows were chosen.

Variants: `mogrifier` (default) or `lstm`; `former` has the settings of all texts before there were
rows, with which a workdir from that time resumes; `tiny` is a smoke run.
"""

import functools
import math
import os
import pathlib
from typing import Any, NamedTuple

from ml_collections import config_dict

from mogrifier_jax import configs

PYDOC = configs.load_file(pathlib.Path(__file__).with_name("pydoc.py"))
TEXT = dict(
    data=dict(name="text", fractions=(0.9, 0.05, 0.05), level="character", encoding="utf-8")
)
BYTES = {"100KB": 1e5, "1MB": 1e6, "10MB": 1e7, "100MB": 1e8}
DEFAULT = "1MB"  # Where no file is named, as when the config is only shown.

# Found for pydoc.py.
TUNED = dict(model=dict(layer_norm=True, rounds=3, rank=25), optimizer=dict(learning_rate=0.0079))
CHARACTERS = {  # And bytes.
    # Bits on valid / test of 164 KB: 2.278 / 2.276; without dropout 2.326 / 2.387; the former
    # settings 2.312 / 2.360.
    "100KB": dict(TUNED, dropout=(0.2, 0.2, 0.2, 0.2)),
    # Of 1.1 MB: 1.927 / 1.923; with half as many steps 2.026 / 2.018; formerly 2.140 / 2.142.
    "1MB": dict(
        TUNED,
        dropout=(0.0, 0.0, 0.0, 0.0),
        averaging=dict(trigger_at_the_latest=10),
        schedule=dict(turns=16),
    ),
    # Of 10.8 MB: 2.032 / 2.013; formerly 2.283 / 2.269.
    "10MB": dict(TUNED, dropout=(0.0, 0.0, 0.0, 0.0), schedule=dict(steps_per_turn=300)),
    # Not tried: the published settings of enwik8 at 48M parameters, with a smaller budget and a
    # schedule of two passes. On a CPU take --config.data.text_size=10MB.
    "100MB": dict(
        data=dict(batch_size=128, window=100),
        model=dict(num_params=10_000_000, rounds=6, rank=79),
        dropout=(
            0.015496029112930465,
            0.008633961431527571,
            0.0437288219541186,
            0.138307173174503,
        ),
        optimizer=dict(learning_rate=0.001021423409385794, l2_penalty=0.000993383826740019),
        averaging=dict(trigger_turns=4, trigger_at_the_latest=24),
        schedule=dict(turns=32, steps_per_turn=500),
    ),
}
# Perplexity on valid / test of 1.1 MB: 380 / 411. The former settings refuse its words.
WORDS_1MB = dict(
    TUNED,
    data=dict(batch_size=16, window=32),
    model=dict(TUNED["model"], num_params=2_000_000, tied_embeddings=True),
    dropout=(0.4, 0.4, 0.4, 0.4),
)
WORDS = {
    # Of 164 KB: 557 / 526; with the row of 1MB, which has served here before, 639 / 600 (at its
    # best after 100 steps); with 1M parameters and dropout of 0.65, 662 / 611.
    "100KB": dict(
        WORDS_1MB,
        dropout=(0.55, 0.55, 0.55, 0.55),
        averaging=dict(trigger_at_the_latest=2),
        schedule=dict(steps_per_turn=50),
    ),
    "1MB": WORDS_1MB,
    # Of 10.8 MB: 271 / 212 after one pass; with the row of 1MB 683 / 639; without layer
    # normalisation, at the settings of wikitext2.py:small, 304 / 242.
    "10MB": dict(
        TUNED,
        data=dict(batch_size=32, window=35),
        model=dict(TUNED["model"], num_params=3_000_000, tied_embeddings=True),
        dropout=(0.0, 0.0, 0.0, 0.0),
        averaging=dict(trigger_turns=2, trigger_at_the_latest=3),
        schedule=dict(turns=4, steps_per_turn=466),
        # A search at 14 temperatures takes as long as training on 2M tokens of 33,000 words.
        evaluation=dict(temperature_tokens=10_000),
    ),
    # Not tried: the published settings of WikiText-2, with one softmax and a schedule of a few
    # passes. On a CPU take --config.data.text_size=10MB.
    "100MB": dict(
        data=dict(batch_size=64, window=70),
        model=dict(
            num_params=35_000_000,
            tied_embeddings=True,
            embedding_ratio=0.1993194960596213,
            rounds=6,
            rank=48,
        ),
        dropout=(0.5469087645499495, 0.1988228263748591, 0.22137985867236876, 0.34766651193735193),
        optimizer=dict(learning_rate=0.003287792100749033, l2_penalty=0.00018994987193751323),
        averaging=dict(trigger_turns=4, trigger_at_the_latest=30),
        schedule=dict(turns=40, steps_per_turn=500),
    ),
}


def get_config(variant=""):
    cell, size = configs.choose(variant, PYDOC.CELLS, ("", "former", "tiny"))
    if size:
        changes = configs.TINY if size == "tiny" else {}
        return configs.base(configs.LAMB, PYDOC.COMMON, PYDOC.CELLS[cell], changes, TEXT)
    rows = {
        (of_words, text_size): configs.flatten(
            configs.base(configs.LAMB, PYDOC.COMMON, TEXT, row, PYDOC.CELLS[cell])
        )
        for of_words, table in ((False, CHARACTERS), (True, WORDS))
        for text_size, row in table.items()
    }
    default = rows[False, DEFAULT]
    config = configs.base(configs.LAMB, PYDOC.COMMON, TEXT)
    follow(config, "data.text_size", DEFAULT, lambda: nearest_size(config.data))

    def value_in_row(name):
        return rows[config.data.level == "word", config.data.text_size][name]

    for name, value in default.items():
        if any(row[name] != value for row in rows.values()):
            follow(config, name, value, functools.partial(value_in_row, name))
        elif value is not None:
            configs.assign(config, name, value)
    return config


class Computed(NamedTuple):
    """What ml_collections takes for an operation on a reference: the value of a key, when read."""

    fn: Any
    args: tuple[()] = ()


def follow(config, name, default, compute):
    """Lets a key have the value of compute() until it is set, as by the command line."""
    section, _, key = name.rpartition(".")
    read = Computed(lambda _: compute())
    with config.unlocked():
        config[section][key] = config_dict.FieldReference(default, type(default), read)


def nearest_size(data):
    """The row for the files that `config.data` names; a missing file is refused later."""
    paths = [path for path in (data.path, data.train, data.valid, data.test) if path]
    try:
        size = sum(os.path.getsize(os.path.expanduser(path)) for path in paths)
    except OSError:
        size = 0
    if not size:
        return DEFAULT
    return min(BYTES, key=lambda name: abs(math.log(size / BYTES[name])))

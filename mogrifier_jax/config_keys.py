"""Every key of a config, with its type, default, limits and meaning.

`configs.py` makes configs of these keys, checks them and compares them. The keys of the section
`model` are the options of models and cells, which `nn/model_options.py` and `nn/layers.py` declare.
"""

import dataclasses
import functools
import inspect
from typing import Any

from mogrifier_jax.options import COUNT, SEED, Option

# A number of turns; negative or absent means never.
_TURN = Option(int, low=-1, high=10**9)
# A probability of dropping, or a decay.
_RATE = Option(float, 0.0, low=0.0, below=1.0)


def _means(option: Option, meaning: str, **changes: Any) -> Option:
    return option._replace(meaning=meaning, **changes)


SECTIONS: dict[str, dict[str, Option]] = {
    "": {
        "seed": _means(SEED, "of weights, dropout masks and where the stripes of the text begin"),
        "log_every": Option(
            int, 20, low=1, high=10**6, meaning="steps per log line, and per dispatch"
        ),
    },
    "data": {
        "name": Option(str, required=True, meaning="a corpus, or the task reverse_copy"),
        "batch_size": Option(
            int, low=1, high=10**6, required=True, meaning="stripes, over all devices"
        ),
        "window": Option(
            int, low=1, high=10**6, required=True, meaning="time steps of backpropagation"
        ),
        "episodic": Option(bool, False, meaning="every line is an independent sequence"),
        "drop_state_probability": _means(
            _RATE, "probability per stripe and window of starting from a zero state"
        ),
        "source_dir": Option(str, meaning="folder of corpus files that were fetched already"),
        "data_dir": Option(str, meaning="folder of the prepared corpus"),
        # The rest are options of some corpora; None means the default of the corpus.
        "language": Option(str, meaning="mwc: en or fi"),
        "path": Option(str, meaning="text: one file, cut by `fractions`"),
        "fractions": Option(
            tuple, above=0.0, below=1.0, meaning="text: shares of lines for train, valid, test"
        ),
        "train": Option(str, meaning="text: a file to train on, instead of `path`"),
        "valid": Option(str, meaning="text: a file to validate on, instead of `path`"),
        "test": Option(str, meaning="text: a file to test on, instead of `path`"),
        "level": Option(str, choices="data.vocabularies.LEVELS", meaning="what a token is"),
        "encoding": Option(str, meaning="text: how the files are encoded"),
        "text_size": Option(
            str,
            choices=("100KB", "1MB", "10MB", "100MB"),
            meaning="text.py: the row of its settings; by the size of the files unless set",
        ),
        "length": Option(int, low=1, high=10**5, meaning="reverse_copy: tokens of a sequence"),
        "vocab_size": Option(int, low=1, high=10**7, meaning="reverse_copy: number of words"),
        "num_train": _means(COUNT, "reverse_copy: sequences to train on"),
        "num_valid": _means(COUNT, "reverse_copy: sequences to validate on"),
        "num_test": _means(COUNT, "reverse_copy: sequences to test on"),
        "seed": _means(SEED, "reverse_copy: of the sequences", default=None),
    },
    "dropout": {
        "input": _means(_RATE, "on embedded tokens"),
        "inter_layer": _means(_RATE, "between layers"),
        "state": _means(_RATE, "on the previous h as the gates read it"),
        "output": _means(_RATE, "on the output of the layers"),
        "downprojected": _means(
            _RATE, "on the output after its projection; as `output` unless set", default=None
        ),
        "cell_output": _means(_RATE, "on the output of each layer, before layers are combined"),
    },
    "optimizer": {
        "name": Option(
            str, "adam", choices="training.optimizers.OPTIMIZERS", meaning="the update rule"
        ),
        "learning_rate": Option(float, low=0.0, high=1e30, required=True, meaning="learning rate"),
        "l2_penalty": Option(
            float, low=0.0, high=1e30, required=True, meaning="factor on half the squared norm"
        ),
        "clip_norm": Option(
            float, 10.0, low=-1.0, high=1e30, meaning="largest gradient norm; 0 or less: no limit"
        ),
        "b1": _means(_RATE, "decay of the first moment"),
        "b2": _means(_RATE, "decay of the second moment, and of rmsprop", default=0.999),
        "eps": Option(float, 1e-8, above=0.0, high=1e3, meaning="added to the denominator"),
        "momentum": _means(_RATE, "of sgd and rmsprop"),
        "accumulate": Option(
            int, 1, low=1, high=10**6, meaning="groups of a batch whose gradients are accumulated"
        ),
        "accumulate_reduce": Option(
            str, "mean", choices=("mean", "sum"), meaning="how the gradients are combined"
        ),
        "training_samples": Option(
            int,
            1,
            low=1,
            high=1000,
            meaning="dropout samples per stripe, whose probabilities are averaged",
        ),
        "accumulate_at_once": Option(
            bool, meaning="compute all groups in parallel; unless set, if a device has few rows"
        ),
    },
    "averaging": {
        "kind": Option(
            str, "triggered", choices="training.averaging.AVERAGES", meaning="average of weights"
        ),
        "trigger_turns": _means(_TURN, "triggered: start after turns without improvement"),
        "trigger_at_the_latest": _means(_TURN, "triggered: start at this turn in any case"),
        "stagnating_evaluations": _means(
            COUNT, "two_tailed: restart a tail after so many evaluations without improvement"
        ),
    },
    "schedule": {
        "turns": Option(
            int, low=0, high=10**7, required=True, meaning="evaluations, each followed by training"
        ),
        "steps_per_turn": Option(
            int, low=1, high=10**7, required=True, meaning="optimizer steps between evaluations"
        ),
        "drop_learning_rate_turns": _means(_TURN, "drop the rate after turns without improvement"),
        "drop_learning_rate_multiplier": Option(
            float, 1.0, above=0.0, high=10.0, meaning="factor on the rate when it is dropped"
        ),
        "drop_learning_rate_at_the_latest": _means(_TURN, "drop the rate at this turn anyway"),
        "early_stopping_turns": _means(_TURN, "stop after turns without improvement"),
        "early_stopping_rampup_turns": _means(
            _TURN, "turns during which that patience grows from one turn", default=0
        ),
        "early_stopping_slowest_rate": Option(
            float, 0.0, low=-1e3, high=1e3, meaning="stop if improving by fewer nats per turn"
        ),
        "early_stopping_worst_xe_target": Option(
            float,
            low=-1e3,
            high=1e3,
            meaning="stop if this score (nats) is out of reach",
        ),
        "on_divergence": Option(
            str, "stop", choices=("stop", "restart"), meaning="what to do if numbers are not finite"
        ),
        "restart_multiplier": Option(
            float, 0.9, above=0.0, high=1.0, meaning="factor on the learning rate at a restart"
        ),
        "max_restarts": Option(int, 10, low=0, high=10**6, meaning="restarts before the run fails"),
    },
    "evaluation": {
        "softmax_temperature": Option(
            float, above=0.0, high=10.0, meaning="factor on the logits; searched for unless set"
        ),
        "temperature_tokens": _means(COUNT, "validation tokens of that search", default=50_000),
        "lines_per_stripe": _means(
            COUNT, "least number of lines in a stripe that carries its state", default=100
        ),
        "train_windows": _means(COUNT, "training windows scored at each turn", default=20),
        "max_windows": _means(COUNT, "windows scored of validation and test data; all unless set"),
    },
    "mesh": {
        "data": Option(
            int, -1, low=-1, high=10**6, meaning="devices that share a batch; -1: all that are left"
        ),
        "model": Option(
            int, 1, low=-1, high=10**6, meaning="devices that share the weights; -1: as above"
        ),
    },
}


@functools.cache
def keys() -> dict[str, Option]:
    """Every key by its full name, such as "model.rounds"."""
    sections = {**SECTIONS, "model": _model_keys()}
    order = ("", "data", "model", *(name for name in SECTIONS if name not in ("", "data")))
    return {
        f"{section}.{name}".lstrip("."): option
        for section in order
        for name, option in sections[section].items()
    }


def _model_keys() -> dict[str, Option]:
    """The options of models and cells, with the defaults of their fields.

    Where cells differ in a default, the key is absent unless set, which means the cell's own.
    """
    from mogrifier_jax.nn import layers, model_options, models  # Slow: they import Flax.

    defaults = {
        field.name: field.default
        for field in dataclasses.fields(models.LanguageModel)
        if field.default is not dataclasses.MISSING
    }
    parameters = inspect.signature(models.make_model).parameters.values()
    defaults |= {p.name: p.default for p in parameters if p.default is not p.empty}
    declared = {
        name: option._replace(default=defaults.get(name))
        for name, option in model_options.OPTIONS.items()
    }
    cell_defaults: dict[str, set[Any]] = {name: set() for name in layers.OPTIONS}
    for make in layers.CELLS.values():
        fixed = getattr(make, "keywords", {})
        cell: Any = getattr(make, "func", make)  # Some are partials of a class.
        for field in dataclasses.fields(cell):
            if field.name in cell_defaults:
                cell_defaults[field.name].add(fixed.get(field.name, field.default))
    del cell_defaults["features"]  # It is set from hidden_size.
    for name, values in cell_defaults.items():
        default = next(iter(values)) if len(values) == 1 else None
        declared[name] = layers.OPTIONS[name]._replace(default=default)
    return declared

"""Every key of a config, with its type, default and limits; and what experiment files share.

An experiment states what is particular to it, and `base` adds the rest. A key is declared once: in
SECTIONS, or as a field of a cell. A key that a config leaves out has its default, also in old
workdirs.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.resources
import importlib.util
import json
import math
import pathlib
import traceback
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ml_collections import config_dict

from mogrifier_jax import errors


class Key(NamedTuple):
    """The values that a key may have; numbers are finite."""

    kind: type
    default: Any = None  # None: absent unless set.
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf  # As low and high, but these limits are excluded.
    below: float = math.inf
    choices: tuple[str, ...] | str = ()  # Or where in the package they are listed, as "nn.a.B".
    required: bool = False

    def refusal(self, value: Any) -> str | None:
        """Why a value is refused, as words that follow "key value"; None if it is not."""
        if value is None:
            return "is missing; set it" if self.required else None
        accepted: Any = {float: int | float, tuple: tuple | list}.get(self.kind, self.kind)
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            return f"must be {_KINDS[self.kind]}"
        if self.kind in (int, float):
            return self._refusal_of_number(value)
        if self.kind is tuple:
            one = self._replace(kind=float, required=True)
            return next((f"of which {v!r} {r}" for v in value if (r := one.refusal(v))), None)
        known = self.known()
        if not known or value in known:
            return None
        near = " or ".join(difflib.get_close_matches(value, known))
        hint = f" (did you mean {near}?)" if near else ""
        return f"is unknown: choose one of {', '.join(known)}{hint}"

    def _refusal_of_number(self, value: float) -> str | None:
        otherwise = ", or left out" if self.default is None and not self.required else ""
        if not -math.inf < value < math.inf:
            return f"must be a finite number{otherwise}"
        rules = (
            (value >= self.low, f"at least {self.low}"),
            (value <= self.high, f"at most {self.high}"),
            (value > self.above, f"above {self.above}"),
            (value < self.below, f"below {self.below}"),
        )
        return next((f"must be {rule}{otherwise}" for holds, rule in rules if not holds), None)

    def known(self) -> tuple[str, ...]:
        """The choices; a module that lists them is imported when they are asked for."""
        if isinstance(self.choices, tuple):
            return self.choices
        module, _, name = self.choices.rpartition(".")
        return tuple(getattr(importlib.import_module(f"{__package__}.{module}"), name))


_KINDS = {bool: "True or False", int: "a whole number", float: "a number"}
_KINDS |= {str: "a text", tuple: "a tuple of numbers"}
SEED = Key(int, 1, low=0, high=2**32 - 1)  # JAX silently changes larger ones.
COUNT = Key(int, low=1, high=10**9)
TURN = Key(int, low=-1, high=10**9)  # Negative or absent: never.
RATE = Key(float, 0.0, low=0.0, below=1.0)  # A probability of dropping, or a decay.

SECTIONS: dict[str, dict[str, Key]] = {
    "": {
        "seed": SEED,  # Of weights, dropout masks and where the stripes of the text begin.
        "log_every": Key(int, 20, low=1, high=10**6),  # Steps; also how many run in one dispatch.
    },
    "data": {
        "name": Key(str, required=True),  # A corpus, or a task of tasks.GENERATED.
        "batch_size": Key(int, low=1, high=10**6, required=True),  # Global: over all devices.
        "window": Key(int, low=1, high=10**6, required=True),  # Steps of backpropagation.
        "episodic": Key(bool, False),  # Whether each line stands alone.
        "drop_state_probability": RATE,  # For each stripe and window, of starting from zeros.
        "source_dir": Key(str),  # Of files that were fetched already.
        "data_dir": Key(str),  # Of what was prepared from them.
        # What follows belongs to some corpora; None is their own default.
        "language": Key(str),  # mwc: en or fi.
        "path": Key(str),  # text: one file,
        "fractions": Key(
            tuple, above=0.0, below=1.0
        ),  # cut into train, valid and test by these shares of its lines,
        **dict.fromkeys(("train", "valid", "test"), Key(str)),  # or three files.
        "level": Key(str, choices="data.corpora.LEVELS"),
        "encoding": Key(str),
        "length": Key(int, low=1, high=10**5),  # reverse_copy: of the sequences,
        "vocab_size": Key(int, low=1, high=10**7),  # and how many words there are.
        **dict.fromkeys(("num_train", "num_valid", "num_test"), COUNT),
        "seed": SEED._replace(default=None),
    },
    "model": {  # And the fields of the cells, see `keys`.
        "cell": Key(str, "mogrifier_lstm", choices="nn.layers.CELLS"),
        "num_layers": Key(int, 2, low=1, high=100),
        "num_params": Key(int, low=1, high=10**12),  # The budget that hidden_size is solved from
        "hidden_size": Key(int, low=1, high=10**6),  # unless this is set.
        "embedding_ratio": Key(float, 1.0, low=0.0, high=1e3),  # To hidden_size; 1 or more: equal.
        "tied_embeddings": Key(bool, False),  # One matrix for input and output.
        "mixture_components": Key(int, 0, low=0, high=100),  # Of the softmax; 0: an ordinary one.
        "output": Key(str, "sum", choices=("sum", "residual", "last")),  # Of the layers.
        "state_mask": Key(str, "window", choices=("window", "step")),  # How often it is drawn.
        "trainable_initial_state": Key(bool, False),
        "fast": Key(bool, True),  # False: the plain scan.
        "remat_window": Key(int, low=1, high=10**6),  # Steps that are recomputed together.
        "unroll": Key(int, 1, low=1, high=1000),  # Steps of the scan.
        "max_logits": Key(int, 1 << 26, low=1, high=1 << 40),  # In memory at once.
        "dtype": Key(str, "float32", choices=("float32", "bfloat16")),  # Of matmuls.
    },
    "dropout": {
        "input": RATE,  # On embedded tokens.
        "inter_layer": RATE,  # On what one layer hands to the next.
        "state": RATE,  # On the previous h as the gates read it.
        "output": RATE,  # On the output of the layers,
        "downprojected": RATE._replace(default=None),  # and after a projection; None: the same.
        "cell_output": RATE,  # On the output of each layer, before the layers are added up.
    },
    "optimizer": {
        "name": Key(str, "adam", choices="training.optimizers.OPTIMIZERS"),
        "learning_rate": Key(float, low=0.0, high=1e30, required=True),
        "l2_penalty": Key(float, low=0.0, high=1e30, required=True),  # Of half the squared norm.
        "clip_norm": Key(float, 10.0, low=-1.0, high=1e30),  # Of the gradient; 0 or less: none.
        "b1": RATE,  # Decay of the first moment,
        "b2": RATE._replace(default=0.999),  # of the second, and of rmsprop.
        "eps": Key(float, 1e-8, above=0.0, high=1e3),
        "momentum": RATE,  # Of sgd and rmsprop.
        "accumulate": Key(int, 1, low=1, high=10**6),  # Groups that a batch is split into.
        "accumulate_reduce": Key(str, "mean", choices=("mean", "sum")),  # Of their gradients.
        # Dropout samples of each stripe; the objective is the log of their mean probability.
        "training_samples": Key(int, 1, low=1, high=1000),
        "accumulate_at_once": Key(bool),  # Groups side by side; None: if a device has few rows.
    },
    "averaging": {
        "kind": Key(str, "triggered", choices="training.averaging.AVERAGES"),
        "trigger_turns": TURN,  # Turns without improvement that start it,
        "trigger_at_the_latest": TURN,  # and the turn that does in any case.
        # two_tailed: evaluations without improvement after which a tail begins again, and the raw
        # weights are a candidate too; None: the algorithm without these extensions.
        "stagnating_evaluations": COUNT,
    },
    "schedule": {
        "turns": Key(int, low=0, high=10**7, required=True),
        "steps_per_turn": Key(int, low=1, high=10**7, required=True),
        "drop_learning_rate_turns": TURN,  # Turns without improvement until it is dropped.
        "drop_learning_rate_multiplier": Key(float, 1.0, above=0.0, high=10.0),
        "drop_learning_rate_at_the_latest": TURN,
        "early_stopping_turns": TURN,  # Turns without improvement until the run ends,
        "early_stopping_rampup_turns": TURN._replace(default=0),  # fewer during these.
        "early_stopping_slowest_rate": Key(float, 0.0, low=-1e3, high=1e3),  # Nats a turn.
        "early_stopping_worst_xe_target": Key(float, low=-1e3, high=1e3),  # Nats.
        "on_divergence": Key(str, "stop", choices=("stop", "restart")),  # From the best state,
        "restart_multiplier": Key(float, 0.9, above=0.0, high=1.0),  # with the rate times this,
        "max_restarts": Key(int, 10, low=0, high=10**6),  # so many times.
    },
    "evaluation": {
        "softmax_temperature": Key(float, above=0.0, high=10.0),  # On logits; None: searched,
        "temperature_tokens": COUNT._replace(default=50_000),  # on so much validation data.
        "lines_per_stripe": COUNT._replace(default=100),  # At least, where state is carried.
        "train_windows": COUNT._replace(default=20),
        "max_windows": COUNT,  # Of validation and test data; None: all.
    },
    "mesh": {  # Of devices; -1 takes what the other axis leaves.
        "data": Key(int, -1, low=-1, high=10**6),
        "model": Key(int, 1, low=-1, high=10**6),
    },
}
# lamb's choices where they are not the defaults.
LAMB = dict(data=dict(drop_state_probability=0.01), optimizer=dict(accumulate_reduce="sum"))
UNGATED = dict(model=dict(rounds=0, rank=0))
REWIRED = dict(model=dict(cell="rewired_lstm"))  # The Mogrifier RLSTM, if there are rounds.
TINY = dict(  # A smoke run.
    data=dict(batch_size=32, window=16),
    model=dict(hidden_size=16, rank=4),
    averaging=dict(trigger_turns=1, trigger_at_the_latest=1),
    schedule=dict(turns=2, steps_per_turn=4),
    evaluation=dict(temperature_tokens=1_000, train_windows=1, max_windows=10),
)


@functools.cache
def keys() -> dict[str, Key]:
    """Every key by its full name, such as "model.rounds"."""
    found = {f"{s}.{n}".lstrip("."): k for s, keys in SECTIONS.items() for n, k in keys.items()}
    return found | {f"model.{n}": k for n, k in _cell_keys().items() if f"model.{n}" not in found}


def _cell_keys() -> dict[str, Key]:
    """The fields of the cells; where cells differ in a default, None stands for the cell's own."""
    from mogrifier_jax.nn import layers  # Not needed to read sets or the paper's numbers.

    kinds: dict[str, type] = {}
    defaults: dict[str, set[Any]] = {}
    for make in layers.CELLS.values():
        fixed = getattr(make, "keywords", {})
        cell: Any = getattr(make, "func", make)
        for field in dataclasses.fields(cell):
            types = [t for t in typing.get_args(field.type) or [field.type] if t in _KINDS]
            if types and field.name != "name":  # Flax's own.
                kinds[field.name] = types[0]
                default = fixed.get(field.name, field.default)
                defaults.setdefault(field.name, set()).add(default)
    shared = {n: next(iter(found)) if len(found) == 1 else None for n, found in defaults.items()}
    return {n: Key(k, shared[n], *layers.LIMITS.get(n, ())) for n, k in kinds.items()}


def make_dict(declared: Mapping[str, Key]) -> config_dict.ConfigDict:
    """A config of these keys at their defaults."""
    config = config_dict.ConfigDict()
    for name, key in declared.items():
        *sections, last = name.split(".")
        absent = config_dict.placeholder(key.kind)
        _find(config, sections)[last] = absent if key.default is None else key.default
    return config


def _find(config: config_dict.ConfigDict, sections: Iterable[str]) -> config_dict.ConfigDict:
    for section in sections:
        if section not in config:
            config[section] = config_dict.ConfigDict()
        config = config[section]
    return config


def base(*changes: Mapping[str, Any]) -> config_dict.ConfigDict:
    """A locked config: all defaults, changed by these (parts of) configs in order."""
    config = make_dict(keys())
    for change in changes:
        for name, value in flatten(change).items():
            assign(config, name, value)
    return config.lock()


def assign(config: config_dict.ConfigDict, name: str, value: Any) -> None:
    """Sets a key; refuses an unknown key, and a value of another type."""
    declared = keys()
    if name not in declared:
        section, _, key = name.rpartition(".")
        known = [k.rpartition(".")[2] for k in declared if k.rpartition(".")[0] == section]
        near = difflib.get_close_matches(key, known) or known
        hint = f"did you mean {' or '.join(near or difflib.get_close_matches(name, declared))}?"
        raise errors.UsageError(f"config.{name} is read by nothing; {hint}")
    *sections, last = name.split(".")
    try:
        if value is not None:
            _find(config, sections)[last] = value
    except TypeError:
        raise errors.UsageError(f"{name} {value!r} must be {_KINDS[declared[name].kind]}") from None


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every value by its full name; a tuple for a section holds its first keys in their order."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in SECTIONS and isinstance(value, tuple):
            value = dict(zip(SECTIONS[key], value, strict=False))
        if isinstance(value, Mapping | config_dict.ConfigDict):
            found |= {f"{key}.{name}": inner for name, inner in flatten(value).items()}
        else:
            found[key] = value
    return found


def check(config: config_dict.ConfigDict) -> None:
    """Refuses a complete config that lacks a value or has a wrong one."""
    values = flatten(config)
    for section, declared in SECTIONS.items():
        for name, key in declared.items():
            if key.required and values[f"{section}.{name}"] is None:
                raise errors.UsageError(f"config.{section} lacks {name}; add it")
    check_values(values, keys())


def check_values(values: Mapping[str, Any], declared: Mapping[str, Key], prefix: str = "") -> None:
    """Refuses the first value that its key may not have."""
    for name, value in values.items():
        reason = declared[name].refusal(value)
        if reason:
            raise errors.UsageError(f"{prefix}{name} {errors.show(value)} {reason}")


def differences(
    saved: Mapping[str, Any], requested: Mapping[str, Any], ignore: Collection[str] = ()
) -> list[tuple[str, Any, Any]]:
    """(name, saved, requested) of each key that differs, without those (or sections) to ignore."""
    old, new = flatten(saved), flatten(requested)
    return [
        (name, old.get(name, "absent"), new.get(name, "absent"))
        for name in sorted(old | new)
        if old.get(name, "absent") != new.get(name, "absent") and not is_among(name, ignore)
    ]


def is_among(name: str, names: Collection[str]) -> bool:
    """Whether a key is one of these keys, or in one of these sections."""
    return any(name == other or name.startswith(f"{other}.") for other in names)


class Row(NamedTuple):
    """One variant of a set."""

    variant: str
    label: str  # Of the row, or of the curve that the row is a point of.
    x: float | str | None = None  # Its place in the figure, if that has an axis.
    paper: float | None = None  # Validation nats in the paper.


class Set(NamedTuple):
    """Variants to be compared; a file lists its sets in SETS, and `sweeps.py` runs them."""

    title: str
    rows: Sequence[Row]
    x_label: str | None = None
    unit: str | None = None  # "nats", or that of the task unless set.


MODELS = Set("LSTM and Mogrifier", [Row("lstm", "LSTM"), Row("mogrifier", "Mogrifier")])
REWIRED_MODELS = Set(
    "Mogrifier and Mogrifier RLSTM",
    [Row("mogrifier", "Mogrifier"), Row("rlstm", "Mogrifier RLSTM")],
)


def choose(variant: str, *groups: Iterable[str]) -> tuple[str, ...]:
    """One name of each group for a variant "a,b"; the first is the default, "" means none."""
    names = [name.strip() for name in variant.split(",") if name.strip()]
    known = [name for group in groups for name in group if name]
    if unknown := [name for name in names if name not in known]:
        raise errors.UsageError(
            f"variant {unknown[0]!r} is unknown: this experiment has {', '.join(known)}"
        )
    chosen = []
    for group in map(tuple, groups):
        picks = [name for name in group if name in names]
        if len(picks) > 1:
            raise errors.UsageError(
                f"variants {' and '.join(picks)} exclude each other: choose one of "
                f"{', '.join(name for name in group if name)}"
            )
        chosen.append(picks[0] if picks else group[0])
    return tuple(chosen)


def build(
    variant: str, common: Mapping[str, Any], *groups: Mapping[str, Mapping[str, Any]]
) -> config_dict.ConfigDict:
    """The config of a variant: lamb's choices, `common`, and the chosen change of each group."""
    names = choose(variant, *groups)
    return base(LAMB, common, *(group[n] for group, n in zip(groups, names, strict=True)))


@functools.cache
def paper_numbers() -> dict[str, Any]:
    """The numbers of arXiv:1909.01792: tables, curves and the ranges that were tuned over."""
    folder = importlib.resources.files("mogrifier_jax.evaluation")
    return json.loads((folder / "paper_results.json").read_text(encoding="utf-8"))


def load_file(path: str | pathlib.Path) -> ModuleType:
    """An experiment file as a module."""
    path = str(path)
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    if not (spec and spec.loader and pathlib.Path(path).is_file()):
        raise errors.UsageError(f"{path} is not an experiment; give a file as in experiments/")
    module = importlib.util.module_from_spec(spec)
    _blame(path, spec.loader.exec_module, module)
    return module


def load_config(name: str) -> config_dict.ConfigDict:
    """The config of "file.py:variant", as `--config` makes it."""
    path, _, variant = name.partition(":")
    get_config = getattr(load_file(path), "get_config", None)
    if not callable(get_config):
        raise errors.UsageError(f"{path} has no function get_config; define it, as docs/adding.md")
    config = _blame(path, get_config, *([variant] if variant else []))
    if not isinstance(config, config_dict.ConfigDict):
        code = getattr(get_config, "__code__", None)
        where = f"{path}, line {code.co_firstlineno}" if code else path
        raise errors.UsageError(f"{where}: get_config returns {config!r}; return that of base()")
    return config


def _blame(path: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of an experiment file; the message of an error names the line."""
    try:
        return function(*arguments)
    except errors.UsageError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 0
        what = f"line {line}: {type(error).__name__}: {' '.join(str(error).split())}"
        raise errors.UsageError(f"{path}, {what}; mend the experiment") from error

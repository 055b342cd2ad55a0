"""Configs and the experiment files that make them: loading, defaults, checks, comparisons.

An experiment file states only what is particular to it, and `base` adds the defaults of all other
keys (`config_keys.py`). A key that a saved config lacks gets its default, too, so the workdirs of
earlier versions can be read. An experiment file is given by its path, or by its name if it comes
with the package.
"""

import difflib
import functools
import importlib.resources
import importlib.util
import json
import os
import pathlib
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ml_collections import config_dict

from mogrifier_jax import config_keys, errors, options

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


def make_dict(declared: Mapping[str, options.Option]) -> config_dict.ConfigDict:
    """A config of these options at their defaults."""
    config = config_dict.ConfigDict()
    for name, option in declared.items():
        *sections, last = name.split(".")
        absent = config_dict.placeholder(option.kind)
        _section(config, sections)[last] = absent if option.default is None else option.default
    return config


def _section(config: config_dict.ConfigDict, sections: Iterable[str]) -> config_dict.ConfigDict:
    for section in sections:
        if section not in config:
            config[section] = config_dict.ConfigDict()
        config = config[section]
    return config


def base(*changes: Mapping[str, Any]) -> config_dict.ConfigDict:
    """A locked config: all defaults, changed by these (parts of) configs in order."""
    config = make_dict(config_keys.keys())
    for change in changes:
        for name, value in flatten(change).items():
            assign(config, name, value)
    return config.lock()


def assign(config: config_dict.ConfigDict, name: str, value: object) -> None:
    """Sets a key; refuses an unknown key, and a value of another type."""
    declared = config_keys.keys()
    if name not in declared:
        section, _, key = name.rpartition(".")
        known = [k.rpartition(".")[2] for k in declared if k.rpartition(".")[0] == section]
        near = difflib.get_close_matches(key, known) or known
        hint = f"did you mean {' or '.join(near or difflib.get_close_matches(name, declared))}?"
        raise errors.UsageError(f"config.{name} is read by nothing; {hint}")
    *sections, last = name.split(".")
    try:
        if value is not None:
            _section(config, sections)[last] = value
    except TypeError:
        kind = options.KINDS[declared[name].kind]
        raise errors.UsageError(f"{name} {errors.show(value)} must be {kind}") from None


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every value by its full name; a tuple for a section holds its first keys in their order."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in config_keys.SECTIONS and isinstance(value, tuple):
            value = dict(zip(config_keys.SECTIONS[key], value, strict=False))
        if isinstance(value, Mapping | config_dict.ConfigDict):
            flat |= {f"{key}.{name}": inner for name, inner in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def check(config: config_dict.ConfigDict) -> None:
    """Refuses a complete config that lacks a value or has a wrong one."""
    values = flatten(config)
    for section, declared in config_keys.SECTIONS.items():
        for name, option in declared.items():
            if option.required and values[f"{section}.{name}"] is None:
                raise errors.UsageError(f"config.{section} lacks {name}; add it")
    options.check_values(values, config_keys.keys())


def differences(
    saved: Mapping[str, Any], requested: Mapping[str, Any], ignore: Collection[str] = ()
) -> list[tuple[str, object, object]]:
    """(name, saved, requested) of each key that differs; `ignore` has keys and sections."""
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
    label: str  # The label of the row, or of the curve of which the row is a point.
    x: float | str | None = None  # Where it is on the x axis of the figure, if there is one.
    paper: float | None = None  # Validation nats in the paper.


class Set(NamedTuple):
    """Variants to be compared; a file lists its sets in SETS, and `sweeps.py` runs them."""

    title: str
    rows: Sequence[Row]
    x_label: str | None = None
    unit: str | None = None  # "nats"; the unit of the task unless set.


MODELS = Set("LSTM and Mogrifier", [Row("lstm", "LSTM"), Row("mogrifier", "Mogrifier")])
REWIRED_MODELS = Set(
    "Mogrifier and Mogrifier RLSTM",
    [Row("mogrifier", "Mogrifier"), Row("rlstm", "Mogrifier RLSTM")],
)
ALL_MODELS = Set("LSTM, Mogrifier and Mogrifier RLSTM", [*MODELS.rows, REWIRED_MODELS.rows[1]])


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


def experiments_folder() -> pathlib.Path:
    """Where the experiments of the package are: inside it if installed, beside it in a checkout."""
    package = pathlib.Path(__file__).parent
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "experiments"


def list_experiments() -> dict[str, str]:
    """The names of the experiments that come with the package, each with its first line."""
    paths = sorted(experiments_folder().glob("*.py"))
    return {path.stem: _first_line(path) for path in paths if path.stem != "__init__"}


def _first_line(path: pathlib.Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("r").strip('"').rstrip(".")


def find_file(name: str | os.PathLike) -> pathlib.Path:
    """The experiment file at a path, or the package's own experiment of this name."""
    path = pathlib.Path(name)
    own = experiments_folder() / f"{path}.py"
    if path.is_file():
        return path
    if path.name == os.fspath(name) and own.is_file():
        return own
    known = list_experiments()
    near = " or ".join(difflib.get_close_matches(path.stem, known))
    hint = f"did you mean {near}?" if near else f"give one of {', '.join(known)}, or a path"
    raise errors.UsageError(f"{name} is not a file, and not the name of an experiment; {hint}")


# The modules of experiment files by path, time and size, so that each is executed only once.
_modules: dict[tuple[str, int, int], ModuleType] = {}


def load_file(name: str | os.PathLike) -> ModuleType:
    """An experiment file as a module."""
    path = str(find_file(name))
    state = os.stat(path)
    key = (os.path.abspath(path), state.st_mtime_ns, state.st_size)
    if key not in _modules:
        spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
        if not (spec and spec.loader):
            raise errors.UsageError(f"{path} is not a Python file; give a file as in experiments/")
        module = importlib.util.module_from_spec(spec)
        _blame(path, spec.loader.exec_module, module)
        _modules[key] = module
    return _modules[key]


def load_config(name: str) -> config_dict.ConfigDict:
    """The config of "file.py:variant" or "name:variant", as `--config` makes it."""
    file, _, variant = name.partition(":")
    path = str(find_file(file))
    get_config = getattr(load_file(path), "get_config", None)
    if not callable(get_config):
        raise errors.UsageError(
            f"{path} has no function get_config; define one, as docs/adding.md shows"
        )
    config = _blame(path, get_config, *([variant] if variant else []))
    if not isinstance(config, config_dict.ConfigDict):
        code = getattr(get_config, "__code__", None)
        where = f"{path}, line {code.co_firstlineno}" if code else path
        raise errors.UsageError(
            f"{where}: get_config returns {errors.show(config)}; return the result of configs.base"
        )
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
        reason = f"line {line}: {type(error).__name__}: {' '.join(str(error).split())}"
        raise errors.UsageError(f"{path}, {reason}; correct the experiment") from error

"""What the files in experiments/ share: the variant after the colon, and sets of variants."""

import functools
import importlib.resources
import importlib.util
import json
import pathlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ml_collections import config_dict

from mogrifier_jax import errors


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


@functools.cache
def paper_numbers() -> dict[str, Any]:
    """The numbers of arXiv:1909.01792: tables, curves and the ranges that were tuned over."""
    folder = importlib.resources.files("mogrifier_jax.evaluation")
    return json.loads((folder / "paper_results.json").read_text())


def load_file(path: str) -> ModuleType:
    """An experiment file as a module."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    if not (spec and spec.loader and pathlib.Path(path).is_file()):
        raise errors.UsageError(f"{path} is not an experiment; give a file as in experiments/")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_config(name: str) -> config_dict.ConfigDict:
    """The config of "file.py:variant", as `--config` makes it."""
    path, _, variant = name.partition(":")
    return load_file(path).get_config(variant)


def choose(variant: str, *groups: Iterable[str]) -> tuple[str, ...]:
    """One name from each group for a comma separated variant; the first name is the default.

    An empty default means "none of these".
    """
    names = [name.strip() for name in variant.split(",") if name.strip()]
    known = [name for group in groups for name in group if name]
    for name in names:
        if name not in known:
            raise errors.UsageError(
                f"variant {name!r} is unknown: this experiment has {', '.join(known)}"
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


def schedule_options() -> dict[str, Any]:
    """Learning-rate drops and early stopping, off: the command line can switch them on."""
    return dict(
        drop_learning_rate_turns=config_dict.placeholder(int),
        drop_learning_rate_multiplier=1.0,
        drop_learning_rate_at_the_latest=config_dict.placeholder(int),
        early_stopping_turns=config_dict.placeholder(int),
        early_stopping_rampup_turns=0,
        early_stopping_slowest_rate=0.0,
        early_stopping_worst_xe_target=config_dict.placeholder(float),
    )

"""Studies: which settings are tuned, and within which limits.

The package has the studies of the paper's Appendix A (`evaluation/paper_results.json`) and those of
arXiv:2211.01848. Other studies are JSON files of the same form:

    {"optimizer.learning_rate": {"low": 1e-3, "high": 4e-3, "scale": "log"},
     "model.rounds": {"low": 0, "high": 6, "scale": "integer"}}

The names are keys of the config. A rank of zero or less means full rank. Unless the config sets
the hidden size, each trial solves for the one that fits the parameter budget.
"""

import copy
import dataclasses
import difflib
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import optuna
from ml_collections import config_dict

from mogrifier_jax import config_keys, configs, errors, files
from mogrifier_jax.nn import models
from mogrifier_jax.training import workdirs

SCALES = ("linear", "log", "integer")
# These are inputs of the compiled program, so trials that differ only in them share a program.
TRACED = ["optimizer.learning_rate", "optimizer.l2_penalty", "data.drop_state_probability"]
TRACED += [f"dropout.{name}" for name in models.Dropout._fields]
UNTUNED = ("seed", "log_every", "mesh.data", "mesh.model")
LSTM: files.JsonObject = {"model.rounds": 0, "model.rank": 0}
# For each study the name of its ranges in paper_results.json, and the settings that are fixed.
PAPER: dict[str, tuple[str, files.JsonObject]] = {
    "appendix_a": ("all_but_enwik8", {}),
    "appendix_a_lstm": ("all_but_enwik8", LSTM),
    "enwik8": ("enwik8", {}),
    "enwik8_lstm": ("enwik8", LSTM),
    "reverse_copy": ("reverse_copy", {}),
    "reverse_copy_lstm": ("reverse_copy", LSTM),
    "dyneval_character": ("dynamic_evaluation_character", {}),
    "dyneval_word": ("dynamic_evaluation_word", {}),
}
# What a storage keeps about a study, with which each worker compares its own settings.
SAVED_SCHEMA = {
    "study?": {"name": str, "ranges": dict, "fixed": dict},
    **dict.fromkeys(("config?", "eval?", "corpus?"), dict),
}
# Studies of arXiv:2211.01848, and the ranges in paper_results.json from which they are derived.
CIRCLING_BACK = {"circling_back": "all_but_enwik8", "circling_back_enwik8": "enwik8"}
DYNEVAL = ("window", "learning_rate", "decay_rate", "epsilon")


class Range(NamedTuple):
    """The inclusive limits of a setting, and the scale between them."""

    low: float
    high: float
    scale: str = "linear"

    def to_unit(self, value: float) -> float:
        """Maps the range to [0, 1] on its scale."""
        low, high = self.low, self.high
        if self.scale == "log":
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)

    def from_unit(self, position: float) -> float:
        """Maps [0, 1] to the range: the inverse of `to_unit`."""
        if self.scale == "log":
            return self.low * (self.high / self.low) ** position
        return self.low + position * (self.high - self.low)

    @property
    def distribution(self) -> optuna.distributions.BaseDistribution:
        """The range as a distribution of Optuna."""
        low, high, scale = self
        if scale == "integer":
            return optuna.distributions.IntDistribution(int(low), int(high))
        return optuna.distributions.FloatDistribution(low, high, log=scale == "log")


@dataclasses.dataclass(frozen=True)
class Study:
    """What is tuned, and the `fixed` settings, which are the same in all trials."""

    name: str
    ranges: Mapping[str, Range]
    fixed: files.JsonObject = dataclasses.field(default_factory=dict)

    @property
    def adapts(self) -> bool:
        """Whether it tunes dynamic evaluation of a trained run, rather than training."""
        return set(self.ranges) <= set(DYNEVAL)

    def to_json(self) -> files.JsonObject:
        """The study as plain values, for the storage."""
        ranges = {name: list(limits) for name, limits in self.ranges.items()}
        return {"name": self.name, "ranges": ranges, "fixed": dict(self.fixed)}


def load(name: str) -> Study:
    """The study of the package with this name, or the one in a JSON file."""
    if name in PAPER:
        table, fixed = PAPER[name]
        published = configs.paper_numbers()["tuning_ranges"][table]
        ranges = {k: v for k, v in published.items() if k not in fixed}
        return Study(name, parse_ranges(name, ranges), fixed)
    if name in CIRCLING_BACK:
        published = configs.paper_numbers()["tuning_ranges"][CIRCLING_BACK[name]]
        ranges = parse_ranges(name, published)
        # Embeddings are as wide as the hidden state, and dropout is applied to the outputs of all
        # layers instead of between layers.
        ranges.pop("model.embedding_ratio", None)
        ranges["dropout.cell_output"] = ranges.pop("dropout.inter_layer")
        ranges["model.chrono_max"] = Range(math.exp(2), math.exp(5), "log")
        return Study(name, ranges)
    if os.path.isfile(name):
        path = pathlib.Path(name)
        content = files.read_json(path, remedy="see the example in docs/tuning.md")
        return Study(path.stem, parse_ranges(name, content))
    known = [*PAPER, *CIRCLING_BACK]
    hint = _hint(name, known, f"use {', '.join(known)}")
    raise errors.UsageError(f"study {name!r} is unknown: {hint} (or give a JSON file of ranges)")


def _hint(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def parse_ranges(study: str, content: Any) -> dict[str, Range]:
    """Parses the ranges of a study; refuses ranges that are empty or malformed."""
    if not isinstance(content, dict) or not content:
        raise errors.UsageError(
            f"study {study} has no ranges; give at least one, as "
            '{"optimizer.learning_rate": {"low": 1e-3, "high": 4e-3, "scale": "log"}}'
        )
    return {name: _parse_range(study, name, limits) for name, limits in content.items()}


def _parse_range(study: str, name: str, limits: Any) -> Range:
    start = f"study {study}: the range of {name}"
    if not isinstance(limits, dict) or not {"low", "high"} <= limits.keys() <= set(Range._fields):
        raise errors.UsageError(f"{start} is {limits}; give low, high and, if not linear, scale")
    parsed = Range(**limits)
    low, high, scale = parsed
    if scale not in SCALES:
        raise errors.UsageError(f"{start} has the scale {scale!r}; use {', '.join(SCALES)}")
    numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in (low, high))
    if not numbers or (scale == "integer" and not (low == int(low) and high == int(high))):
        raise errors.UsageError(f"{start} is {low} to {high}; give two numbers of its scale")
    if low > high:
        raise errors.UsageError(f"{start} is reversed: low {low} is above high {high}; swap them")
    if low == high:
        raise errors.UsageError(
            f"{start} is empty: low and high are both {low}; set it in the config instead"
        )
    if scale == "log" and low <= 0:
        raise errors.UsageError(f"{start} starts at {low}, which has no logarithm; start above 0")
    return parsed


def check(study: Study) -> None:
    """Refuses a study with settings that a config does not have or that cannot be tuned."""
    known = config_keys.keys()
    for name in (*study.ranges, *study.fixed):
        if name not in known:
            hint = _hint(name, known, "use another study")
            raise errors.UsageError(
                f"study {study.name} tunes {name}, which the config does not have; {hint}"
            )
    for name, limits in study.ranges.items():
        start, kind = f"study {study.name}: {name}", known[name].kind
        if kind not in (int, float) or name in UNTUNED:
            raise errors.UsageError(
                f"{start} cannot be tuned; tune numbers that affect the result, such as {TRACED[0]}"
            )
        if kind is int and limits.scale != "integer":
            raise errors.UsageError(
                f"{start} is an integer in the config, but the scale of its range is "
                f"{limits.scale}; use the scale integer"
            )
        for limit in (limits.low, limits.high):
            reason = known[name].refusal(int(limit) if kind is int else limit)
            if reason:
                raise errors.UsageError(f"{start} reaches {limit}, which {reason}")


def configure(
    study: Study, config: config_dict.ConfigDict, params: Mapping[str, float]
) -> config_dict.ConfigDict:
    """The config of a trial: the config of the experiment with the values of the trial."""
    tried = copy.deepcopy(config)  # A deep copy keeps the types of values that are None.
    with tried.unlocked():
        for name, value in {**study.fixed, **params}.items():
            configs.assign(tried, name, value)
        # Every rank of zero or less means full rank.
        tried.model.rank = max(0, tried.model.rank) if tried.model.rounds else 0
    return tried.lock()


def check_unchanged(
    start: str, saved: files.JsonObject, requested: files.JsonObject, remedy: str
) -> None:
    """Refuses to continue a saved study with different settings.

    Args:
      start: how the message begins.
      saved: what the storage has about the study.
      requested: what this worker has.
      remedy: how the last sentence of the message begins.
    """

    def fill(about: files.JsonObject) -> files.JsonObject:
        """Adds today's defaults of keys that a study of an earlier version does not have."""
        return {**about, "config": configs.base(about["config"])} if "config" in about else about

    free = [f"config.{name}" for name in workdirs.FREE_KEYS]
    free += [name for name in ("eval", "corpus") if name not in saved]  # Of an early version.
    lines = [
        f"  {name}: {old} (there) vs {new} (requested)"
        for name, old, new in configs.differences(fill(saved), fill(requested), free)
    ]
    if lines:
        last = f"{remedy}, or the same settings to continue it."
        raise errors.UsageError("\n".join([f"{start} with other settings:", *lines, last]))

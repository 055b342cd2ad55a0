"""The evaluation before each turn of training, with the search for the softmax temperature.

The temperature is lamb's, a logit scale: it multiplies the logits. `scoring.py` scores the texts.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax
from ml_collections import config_dict

from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models
from mogrifier_jax.training import scoring

# lamb's grid of logit scales, in its order,
TEMPERATURES = tuple(round(1.06 - 0.02 * i, 2) for i in range(14))
AT_ONCE = 7  # and how many of them are tried in one pass.


def search_temperature(
    evaluate: Callable[[tuple[float, ...]], Sequence[float]], at_once: int = AT_ONCE
) -> float:
    """lamb's search: down the grid until two successive values fail to beat the best.

    Args:
      evaluate: returns the nats at each of several logit scales.
      at_once: how many scales are tried in one call, which costs little more than one.
    """
    best, best_xe, failures = 1.0, math.inf, 0
    for first in range(0, len(TEMPERATURES), at_once):
        group = TEMPERATURES[first : first + at_once]
        for temperature, xe in zip(group, evaluate(group), strict=True):
            if xe < best_xe:
                best, best_xe, failures = temperature, xe, 0
            else:
                failures += 1
            if failures == 2:
                return best
    return best


class Scores(NamedTuple):
    """The result of the evaluation of a turn, in nats per token."""

    train_nats: float
    valid_nats: float
    temperature: float  # The logit scale.


class TurnEvaluation:
    """The evaluation before each turn, in lamb's order: training data, temperature, validation.

    Args:
      settings: `config.evaluation`.
    """

    def __init__(
        self,
        model: models.Model,
        task: tasks.Task,
        settings: config_dict.ConfigDict,
        *,
        batch_size: int,
        window: int,
    ):
        self._model, self._task, self._settings = model, task, settings
        self._batch_size = batch_size
        self.search_windows = max(1, settings.temperature_tokens // batch_size // window)
        self._train = self._pass("train", batch_size, settings.train_windows)
        # The search reads many short stripes, as training does.
        self.search = self._pass("valid", batch_size, self.search_windows)
        self._splits: dict[str, scoring.Deterministic] = {}

    def __call__(self, params: optax.Params) -> Scores:
        """The scores of these weights."""
        train = mean_nats(self._train, params, 1.0, self._settings.train_windows)
        temperature = self._settings.softmax_temperature
        if temperature is None:
            temperature = search_temperature(functools.partial(self.search_nats, params))
        return Scores(train, self.score("valid", params, temperature), float(temperature))

    def search_nats(self, params: optax.Params, logit_scales: Sequence[float]) -> list[float]:
        """Nats per token at each of these logit scales, on the text of the temperature search."""
        sums = self.search.sums(params, logit_scales, self.search_windows)
        return list(sums.total / sums.count)

    def score(self, split: str, params: optax.Params, logit_scale: float) -> float:
        """Nats per token of a whole split, or of as much as the settings allow."""
        windows = self._settings.max_windows
        return mean_nats(self.whole(split), params, logit_scale, windows, split)

    def whole(self, split: str) -> scoring.Deterministic:
        """The pass over a whole split."""
        if split not in self._splits:
            lines = self._settings.lines_per_stripe
            stripes = num_stripes(self._task, split, self._batch_size, lines)
            self._splits[split] = self._pass(split, stripes, self._settings.max_windows)
        return self._splits[split]

    def _pass(self, split: str, stripes: int, windows: int | None) -> scoring.Deterministic:
        plan = self._task.plan(split, stripes)
        return scoring.Deterministic(self._model, plan, chunk=min(windows or 16, 32))


def mean_nats(
    score: scoring.Deterministic, params: optax.Params, logit_scale: float, *args: Any
) -> float:
    """Nats per token at one logit scale."""
    sums = score.sums(params, (logit_scale,), *args)
    return float(sums.total[0] / sums.count)


def num_stripes(task: tasks.Task, split: str, batch_size: int, lines_per_stripe: int) -> int:
    """As many stripes as in training, if each has at least `lines_per_stripe` lines."""
    return max(1, min(batch_size, task.num_lines(split) // lines_per_stripe))

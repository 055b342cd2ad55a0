"""A whole split in order, the carry kept: cross-entropy and softmax temperature.

Axes: B stripes, T time, W windows of one dispatch. Nats and counts are summed on the device
for each window and added on the host in float64. `montecarlo.py` averages over dropout
masks, `dyneval.py` adapts the weights on the way.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tqdm

from mogrifier_jax import errors, metrics, steps, tasks

# lamb's grid of multipliers on the logits, in its order.
TEMPERATURES = tuple(round(1.06 - 0.02 * i, 2) for i in range(14))


class Evaluation:
    """Evaluates weights on one plan; compiles once, for any weights and temperature."""

    def __init__(self, model: Any, plan: tasks.Plan, *, chunk: int = 16):
        self.model, self.plan = model, plan
        self._chunk = min(chunk, plan.num_windows)
        self._run = jax.jit(
            functools.partial(
                score_windows, model=model, batch_at=plan.batch_at, num_windows=self._chunk
            )
        )

    def __call__(
        self, params: Any, temperature: float = 1.0, max_windows: int | None = None, title: str = ""
    ) -> metrics.Sum:
        """Nats over tokens of the first `max_windows` windows, or of all."""
        windows = min(self.plan.num_windows, max_windows or self.plan.num_windows)
        carry = self.model.zero_carry(self.plan.batch_size) if self.plan.carries else ()
        total = metrics.Sum(0.0, 0)
        bar = tqdm.tqdm(total=windows, desc=title, disable=None if title else True, leave=False)
        for first in range(0, windows, self._chunk):
            nats, counts, carry = self._run(params, self.plan.stream, carry, first, temperature)
            wanted = slice(0, windows - first)
            total = total.merge(metrics.Sum(nats[wanted], counts[wanted]).on_host())
            bar.update(min(self._chunk, windows - first))
        bar.close()
        return total


def score_windows(params, stream, carry, first, temperature, *, model, batch_at, num_windows):
    """Sums of nats and numbers of tokens of each of W windows, and the carry after them."""

    def body(carry, index):
        batch = batch_at(stream, index)
        nats, carry = model.apply(
            {"params": params}, batch, carry, None, temperature, method="batch_nats"
        )
        return carry, (nats.sum(), steps.num_targets(batch))

    carry, (nats, counts) = jax.lax.scan(body, carry, first + jnp.arange(num_windows))
    return nats, counts, carry


def search_temperature(evaluate: Callable[[float], float]) -> float:
    """lamb's search: down the grid until two successive values fail to beat the best."""
    best, best_xe, failures = 1.0, math.inf, 0
    for temperature in TEMPERATURES:
        xe = evaluate(temperature)
        if xe < best_xe:
            best, best_xe, failures = temperature, xe, 0
        else:
            failures += 1
        if failures == 2:
            break
    return best


class Scores(NamedTuple):
    """What is known after the evaluation of a turn; nats per token."""

    train_nats: float
    valid_nats: float
    temperature: float


class TurnEvaluation:
    """The evaluation before each turn, in lamb's order: training data, temperature, validation."""

    def __init__(
        self,
        model: Any,
        task: tasks.Task,
        *,
        batch_size: int,
        window: int,
        softmax_temperature: float | None = None,
        temperature_tokens: int = 50_000,
        lines_per_stripe: int = 100,
        train_windows: int = 20,
    ):
        if softmax_temperature is not None and not 0 < softmax_temperature <= 10:
            raise errors.UsageError(
                f"evaluation.softmax_temperature {softmax_temperature} is out of range: it "
                "multiplies the logits, so give a value in (0, 10], or leave it unset to search"
            )
        stripes = num_stripes(task, "valid", batch_size, lines_per_stripe)
        self._train = Evaluation(model, task.plan("train", batch_size), chunk=train_windows)
        self._valid = Evaluation(model, task.plan("valid", stripes))
        # The search reads many short stripes, as training does.
        self._search = Evaluation(model, task.plan("valid", batch_size))
        self._train_windows = train_windows
        self._search_windows = max(1, temperature_tokens // batch_size // window)
        self._temperature = softmax_temperature

    def __call__(self, params: Any) -> Scores:
        """Scores of these weights."""
        train = self._train(params, max_windows=self._train_windows).mean()
        temperature = self._temperature or search_temperature(
            lambda t: self._search(params, t, self._search_windows).mean()
        )
        return Scores(train, self._valid(params, temperature).mean(), temperature)


def num_stripes(task: tasks.Task, split: str, batch_size: int, lines_per_stripe: int) -> int:
    """As many stripes as in training, but each with at least so many lines."""
    return max(1, min(batch_size, task.num_lines(split) // lines_per_stripe))

"""A whole split in order, the carry kept: cross-entropy and softmax temperature.

Axes: B stripes, T time, W windows of one dispatch. Nats and counts are summed on the device
for each window and added on the host in float64. `montecarlo.py` averages over dropout
masks, `dyneval.py` adapts the weights on the way.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.training import metrics, steps

# lamb's grid of multipliers on the logits, in its order,
TEMPERATURES = tuple(round(1.06 - 0.02 * i, 2) for i in range(14))
AT_ONCE = 7  # and how many of them are tried in one pass.


class Evaluation:
    """Evaluates weights on one plan; compiles once, for any weights and temperature."""

    def __init__(self, model: Any, plan: tasks.Plan, *, chunk: int = 16):
        self.model, self.plan = model, plan
        self._chunk = min(chunk, plan.num_windows)
        zero_carry = functools.partial(model.zero_carry, plan.batch_size)
        carry = jax.eval_shape(zero_carry) if plan.carries else ()
        # Placed the same before and after a dispatch, or else it would be compiled twice.
        in_place = _carry_shardings(plan, carry)
        self._zero_carry = jax.jit(zero_carry, out_shardings=in_place) if plan.carries else tuple
        self._run = jax.jit(
            functools.partial(
                score_windows, model=model, batch_at=plan.batch_at, num_windows=self._chunk
            ),
            out_shardings=(None, None, in_place),
        )

    def __call__(
        self, params: Any, temperature: float = 1.0, max_windows: int | None = None, title: str = ""
    ) -> metrics.Sum:
        """Nats over tokens of the first `max_windows` windows, or of all."""
        (total,) = self.at_temperatures(params, (temperature,), max_windows, title)
        return total

    def at_temperatures(
        self,
        params: Any,
        temperatures: Sequence[float],
        max_windows: int | None = None,
        title: str = "",
    ) -> list[metrics.Sum]:
        """The same at each of several temperatures; all but the softmax is computed once."""
        windows = min(self.plan.num_windows, max_windows or self.plan.num_windows)
        carry: Any = self._zero_carry()
        totals = [metrics.Sum(0.0, 0) for _ in temperatures]
        values = np.asarray(temperatures, np.float32)
        bar = tqdm.tqdm(total=windows, desc=title, disable=None if title else True, leave=False)
        for first in range(0, windows, self._chunk):
            nats, counts, carry = self._run(params, self.plan.stream, carry, first, values)
            nats, counts = (np.asarray(a)[: windows - first] for a in (nats, counts))
            totals = [
                total.merge(metrics.Sum(nats[:, k], counts).on_host())
                for k, total in enumerate(totals)
            ]
            bar.update(min(self._chunk, windows - first))
        bar.close()
        return totals


def _carry_shardings(plan: tasks.Plan, carry: Any) -> Any:
    """Where the carry lies: with the stripes of the plan, if those lie on a mesh."""
    for leaf in jax.tree.leaves(plan.stream):
        if isinstance(leaf.sharding, jax.sharding.NamedSharding):
            mesh: Any = leaf.sharding.mesh
            return partitioning.shardings({"carry": carry}, mesh)["carry"]
    return None


def score_windows(params, stream, carry, first, temperature, *, model, batch_at, num_windows):
    """Sums of nats and numbers of tokens of each of W windows, and the carry after them.

    `temperature` is a number, or [K]; the nats are then [W, K].
    """

    def body(carry, index):
        batch = batch_at(stream, index)

        def score(temperature):
            return model.apply(
                {"params": params}, batch, carry, None, temperature, method="batch_nats"
            )

        # What does not depend on the temperature is not repeated.
        at_all = jax.vmap(score, out_axes=(0, None)) if jnp.ndim(temperature) else score
        nats, after = at_all(temperature)
        return after, (nats.sum((-2, -1)), steps.num_targets(batch))

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


def search_in_groups(evaluate: Callable[[tuple[float, ...]], Sequence[float]]) -> float:
    """`search_temperature` where it costs little to try several temperatures in one pass."""
    evaluate = functools.cache(evaluate)

    def xe(temperature):
        place = TEMPERATURES.index(temperature)
        first = place - place % AT_ONCE
        return evaluate(TEMPERATURES[first : first + AT_ONCE])[place - first]

    return search_temperature(xe)


class Scores(NamedTuple):
    """What is known after the evaluation of a turn; nats per token."""

    train_nats: float
    valid_nats: float
    temperature: float


@dataclasses.dataclass(frozen=True)
class Settings:
    """`config.evaluation`."""

    softmax_temperature: float | None = None  # Searched unless set.
    temperature_tokens: int = 50_000
    lines_per_stripe: int = 100
    train_windows: int = 20
    max_windows: int | None = None  # Of validation and test data; all unless set.

    def __post_init__(self):
        temperature = self.softmax_temperature
        if temperature is not None and not 0 < temperature <= 10:
            raise errors.UsageError(
                f"evaluation.softmax_temperature {temperature} is out of range: it multiplies the "
                "logits, so give a value in (0, 10], or leave it unset to search"
            )
        for name in ("temperature_tokens", "lines_per_stripe", "train_windows", "max_windows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.UsageError(f"evaluation.{name} {value} must be at least 1")


class TurnEvaluation:
    """The evaluation before each turn, in lamb's order: training data, temperature, validation."""

    def __init__(
        self, model: Any, task: tasks.Task, settings: Settings, *, batch_size: int, window: int
    ):
        self._model, self._task, self._settings = model, task, settings
        self._batch_size = batch_size
        self.search_windows = max(1, settings.temperature_tokens // batch_size // window)
        self._train = self._make("train", batch_size, settings.train_windows)
        # The search reads many short stripes, as training does.
        self._search = self._make("valid", batch_size, self.search_windows)
        self._splits: dict[str, Evaluation] = {}

    def __call__(self, params: Any) -> Scores:
        """Scores of these weights."""
        train = self._train(params, max_windows=self._settings.train_windows).mean()
        temperature = self._settings.softmax_temperature or self._search_temperature(params)
        return Scores(train, self.score("valid", params, temperature), temperature)

    def _search_temperature(self, params: Any) -> float:
        def score(group):
            sums = self._search.at_temperatures(params, group, self.search_windows)
            return [total.mean() for total in sums]

        return search_in_groups(score)

    def score(self, split: str, params: Any, temperature: float) -> float:
        """Nats per token of a whole split, or of as much as the settings allow."""
        return self._of(split)(params, temperature, self._settings.max_windows, split).mean()

    def _of(self, split: str) -> Evaluation:
        """The evaluation of a whole split."""
        if split not in self._splits:
            lines = self._settings.lines_per_stripe
            stripes = num_stripes(self._task, split, self._batch_size, lines)
            self._splits[split] = self._make(split, stripes, self._settings.max_windows)
        return self._splits[split]

    def _make(self, split: str, stripes: int, windows: int | None) -> Evaluation:
        return Evaluation(
            self._model, self._task.plan(split, stripes), chunk=min(windows or 16, 32)
        )


def num_stripes(task: Any, split: str, batch_size: int, lines_per_stripe: int) -> int:
    """As many stripes as in training, but each with at least so many lines of the task's split."""
    return max(1, min(batch_size, task.num_lines(split) // lines_per_stripe))

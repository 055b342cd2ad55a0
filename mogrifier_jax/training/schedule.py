"""Decides after each evaluation: early stopping, learning rate drops, the start of averaging.

Decisions depend on the validation cross-entropies alone.

A turn is an evaluation, then the decisions (is it the best? stop? start averaging? drop the
learning rate?), then `steps_per_turn` optimizer steps. `decide` makes these decisions in that
order. There are `turns` + 1 evaluations, the first (turn 0) before any training. xe is
cross-entropy in nats per token. An interval or turn that is None or negative is off.
"""

import dataclasses
import math
from typing import NamedTuple, TypeGuard

from mogrifier_jax import errors, files


@dataclasses.dataclass(frozen=True)
class Rules:
    """The settings of a run: `config.schedule`, and the triggers of `config.averaging`."""

    turns: int
    steps_per_turn: int
    drop_learning_rate_turns: int | None = None
    drop_learning_rate_multiplier: float = 1.0
    drop_learning_rate_at_the_latest: int | None = None
    early_stopping_turns: int | None = None
    early_stopping_rampup_turns: int = 0
    early_stopping_slowest_rate: float = 0.0
    early_stopping_worst_xe_target: float | None = None
    averaging_turns: int | None = None
    averaging_at_the_latest: int | None = None
    on_divergence: str = "stop"  # Or "restart": continue from the best state at a lower rate.
    restart_multiplier: float = 0.9  # Of the learning rate, at each restart.
    max_restarts: int = 10

    def __post_init__(self):
        drops = _is_on(self.drop_learning_rate_turns) or _is_on(
            self.drop_learning_rate_at_the_latest
        )
        if drops and self.drop_learning_rate_multiplier == 1:
            raise errors.UsageError(
                "schedule.drop_learning_rate_multiplier 1.0 drops nothing, although a drop is "
                "configured; set it too, for example to 0.5"
            )
        by_rate = self.early_stopping_slowest_rate or self.early_stopping_worst_xe_target
        if by_rate and not _is_on(self.early_stopping_turns):
            raise errors.UsageError(
                "schedule.early_stopping_slowest_rate and _worst_xe_target look at the last "
                "early_stopping_turns turns, which is not set; set it too"
            )


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the decisions depend on; part of the saved state."""

    turn: int = 0
    best_turn: int = 0
    best_xe: float = math.inf
    averaging_on: bool = False
    last_drop_turn: int | None = None
    learning_rate_factor: float = 1.0
    history: tuple[float, ...] = ()  # xe by turn; inf where the weights had diverged.
    restarts: int = 0

    def to_dict(self) -> files.JsonObject:
        """Plain values that survive JSON."""
        return dataclasses.asdict(self) | {"history": list(self.history)}

    @classmethod
    def from_dict(cls, values: files.JsonObject) -> "Progress":
        """Inverse of `to_dict`, for values that fit PROGRESS."""
        known = {
            field.name: values.get(field.name, field.default) for field in dataclasses.fields(cls)
        }
        return cls(**known | {"history": tuple(values["history"])})


PROGRESS = {  # What `to_dict` returns, as JSON. Early versions had no restarts.
    **dict.fromkeys(("turn", "best_turn", "restarts?"), files.COUNT),
    "best_xe": float,
    "averaging_on": bool,
    "last_drop_turn": (files.COUNT, None),
    "learning_rate_factor": files.Number(float, 0.0),
    "history": [float],
}


class Stop(NamedTuple):
    """Why a run ends."""

    kind: str  # "nan", "turns", "patience", "rate" or "target".
    message: str


class Decision(NamedTuple):
    """What follows from the evaluation of a turn."""

    improved: bool
    stop: Stop | None
    start_averaging: bool
    drop_learning_rate: bool
    restart: bool = False  # From the best state, because this one has diverged.


def decide(progress: Progress, rules: Rules, xe: float) -> tuple[Progress, Decision]:
    """Records the evaluation of the next turn, and makes its decisions in order."""
    turn, improved = len(progress.history), xe < progress.best_xe  # Never true of NaN.
    again = restart(progress, rules) if not math.isfinite(xe) else None
    if again:
        # inf, because the other decisions compare the history, and NaN has no order.
        progress = dataclasses.replace(again, turn=turn, history=(*again.history, math.inf))
        stop = should_stop(progress, rules)
        return progress, Decision(False, stop, False, False, restart=stop is None)
    progress = dataclasses.replace(progress, turn=turn, history=(*progress.history, float(xe)))
    if improved:
        progress = dataclasses.replace(progress, best_turn=turn, best_xe=float(xe))
    stop = should_stop(progress, rules)
    if stop:
        return progress, Decision(improved, stop, start_averaging=False, drop_learning_rate=False)
    start = should_start_averaging(progress, rules)
    if start:
        progress = dataclasses.replace(progress, averaging_on=True)
    drop = should_drop_learning_rate(progress, rules)
    if drop:
        factor = progress.learning_rate_factor * rules.drop_learning_rate_multiplier
        progress = dataclasses.replace(
            progress, learning_rate_factor=factor, last_drop_turn=progress.turn
        )
    return progress, Decision(improved, None, start, drop)


def restart(progress: Progress, rules: Rules) -> Progress | None:
    """The progress of a run that restarts from its best state after it has diverged, or None.

    The step is not set back, so the run reads new text with new masks, at a lower learning rate.
    There is no restart before the first evaluation, nor after `max_restarts` restarts.
    """
    allowed = rules.on_divergence == "restart" and progress.restarts < rules.max_restarts
    if not allowed or not math.isfinite(progress.best_xe):
        return None
    factor = progress.learning_rate_factor * rules.restart_multiplier
    return dataclasses.replace(
        progress, restarts=progress.restarts + 1, learning_rate_factor=factor
    )


def should_stop(progress: Progress, rules: Rules) -> Stop | None:
    """The reason to end the run at the turn just evaluated, if there is one."""
    turn, best = progress.turn, progress.best_xe
    if math.isnan(progress.history[-1]):
        return Stop("nan", f"the validation cross-entropy of turn {turn} is NaN")
    if turn >= rules.turns:
        return Stop("turns", f"all {rules.turns} turns are done")
    if not _is_on(rules.early_stopping_turns):
        return None
    window = patience(rules, turn)
    if progress.best_turn + window < turn:
        return Stop("patience", f"no improvement since turn {progress.best_turn}")
    if not 0 < window <= turn:
        return None  # Too early to measure a rate.
    rate = (min(progress.history[: turn - window + 1]) - best) / window
    slowest, target = rules.early_stopping_slowest_rate, rules.early_stopping_worst_xe_target
    if rate < slowest:
        return Stop("rate", f"improves by {rate:.3g} nats per turn, less than {slowest:.3g}")
    if target is not None and best - rate * (rules.turns - turn) > target:
        return Stop("target", f"at {rate:.3g} nats per turn, {target:.3g} nats is out of reach")
    return None


def patience(rules: Rules, turn: int) -> int:
    """How many turns without improvement are tolerated; it grows from 1 during the ramp-up."""
    full, rampup = rules.early_stopping_turns or 0, rules.early_stopping_rampup_turns
    if rampup <= 0:
        return full
    return 1 + math.floor((full - 1) / rampup * min(rampup, turn))


def should_start_averaging(progress: Progress, rules: Rules) -> bool:
    """Whether the triggered average starts with the next step."""
    if progress.averaging_on or not _is_on(rules.averaging_turns):
        return False
    turn, latest = progress.turn, rules.averaging_at_the_latest
    stalled = turn > 0 and turn - progress.best_turn >= rules.averaging_turns
    return stalled or (_is_on(latest) and turn >= latest)


def should_drop_learning_rate(progress: Progress, rules: Rules) -> bool:
    """Whether the learning rate is dropped before the next step."""
    turn, last = progress.turn, progress.last_drop_turn
    interval, latest = rules.drop_learning_rate_turns, rules.drop_learning_rate_at_the_latest
    since = progress.best_turn if last is None else max(progress.best_turn, last)
    stalled = _is_on(interval) and since + interval < turn
    return stalled or (_is_on(latest) and last is None and turn >= latest)


def _is_on(interval: int | None) -> TypeGuard[int]:
    return interval is not None and interval >= 0

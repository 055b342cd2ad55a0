"""What is decided at each turn, from the validation cross-entropies alone, and weight averages.

A turn is: evaluate; remember the best; stop?; start averaging?; drop the learning rate?;
`steps_per_turn` optimizer steps. `decide` makes these decisions in that order. There are
`turns` + 1 evaluations, the first (turn 0) before any training. xe is cross-entropy in nats per
token. An interval or turn that is None or negative is off.

Averages of the weights are pure functions of a state. All kinds share one interface, so the loop
has no branches:

    average = make_averaging(kind)
    state = average.init(params)
    state = average.update(state, params)          # After every optimizer step.
    for weights in average.candidates(state, params): ...evaluate...
    state = average.after_evaluation(state, *cross_entropies)
    weights = average.value(state, params)         # The candidate that scored best.

Flags and counts are traced arrays: switching an average on does not recompile, and states can be
stacked and vmapped.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import optax

from mogrifier_jax import errors


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
    on_divergence: str = "stop"  # Or "restart": go on from the best state at a lower rate.
    restart_multiplier: float = 0.9  # Of the learning rate, at each restart.
    max_restarts: int = 10

    def __post_init__(self):
        drops = _is_on(self.drop_learning_rate_turns) or _is_on(
            self.drop_learning_rate_at_the_latest
        )
        if drops and self.drop_learning_rate_multiplier == 1:
            raise errors.UsageError(
                "schedule.drop_learning_rate_multiplier 1.0 drops nothing though a drop is asked "
                "for: set it too, for example to 0.5"
            )
        by_rate = self.early_stopping_slowest_rate or self.early_stopping_worst_xe_target
        if by_rate and not _is_on(self.early_stopping_turns):
            raise errors.UsageError(
                "schedule.early_stopping_slowest_rate and _worst_xe_target look at the last "
                "early_stopping_turns turns, which is not set: set it too"
            )


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the decisions remember; part of the saved state."""

    turn: int = 0
    best_turn: int = 0
    best_xe: float = math.inf
    averaging_on: bool = False
    last_drop_turn: int | None = None
    learning_rate_factor: float = 1.0
    history: tuple[float, ...] = ()  # xe by turn; inf where the weights had diverged.
    restarts: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values that survive JSON."""
        return dataclasses.asdict(self) | {"history": list(self.history)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Progress":
        """Inverse of `to_dict`."""
        return cls(**values | {"history": tuple(values["history"])})


class Stop(NamedTuple):
    """Why a run ends."""

    kind: str  # "nan", "turns", "patience", "rate" or "target".
    message: str


class Decision(NamedTuple):
    """What to do after the evaluation of a turn."""

    improved: bool
    stop: Stop | None
    start_averaging: bool
    drop_learning_rate: bool
    restart: bool = False  # From the best state, since this one has diverged.


def decide(progress: Progress, rules: Rules, xe: float) -> tuple[Progress, Decision]:
    """Records the evaluation of the next turn and makes all its decisions, in order."""
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
    """The progress with which a run that has diverged goes on from its best state, or None.

    The step goes on too, so the run reads new text with new masks, at a lower learning rate. There
    is no restart before the first evaluation, or after `max_restarts` of them.
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
        return None  # Too early to speak of a rate.
    rate = (min(progress.history[: turn - window + 1]) - best) / window
    slowest, target = rules.early_stopping_slowest_rate, rules.early_stopping_worst_xe_target
    if rate < slowest:
        return Stop("rate", f"improves by {rate:.3g} nats per turn, less than {slowest:.3g}")
    if target is not None and best - rate * (rules.turns - turn) > target:
        return Stop("target", f"at {rate:.3g} nats per turn, {target:.3g} nats is out of reach")
    return None


def patience(rules: Rules, turn: int) -> int:
    """Turns without improvement that are tolerated: grows from 1 during the ramp-up."""
    full, rampup = rules.early_stopping_turns or 0, rules.early_stopping_rampup_turns
    if rampup <= 0:
        return full
    return 1 + math.floor((full - 1) / rampup * min(rampup, turn))


def should_start_averaging(progress: Progress, rules: Rules) -> bool:
    """Whether the triggered average starts with the coming step."""
    if progress.averaging_on or not _is_on(rules.averaging_turns):
        return False
    turn, latest = progress.turn, rules.averaging_at_the_latest
    stalled = turn > 0 and turn - progress.best_turn >= rules.averaging_turns
    return stalled or (_is_on(latest) and turn >= latest)


def should_drop_learning_rate(progress: Progress, rules: Rules) -> bool:
    """Whether the learning rate is multiplied before the coming step."""
    turn, last = progress.turn, progress.last_drop_turn
    interval, latest = rules.drop_learning_rate_turns, rules.drop_learning_rate_at_the_latest
    since = progress.best_turn if last is None else max(progress.best_turn, last)
    stalled = _is_on(interval) and since + interval < turn
    return stalled or (_is_on(latest) and last is None and turn >= latest)


def _is_on(interval: int | None) -> TypeGuard[int]:
    return interval is not None and interval >= 0


class Averaging(NamedTuple):
    """One way of averaging; see the module's docstring for the order of calls."""

    init: Callable[[optax.Params], Any]
    update: Callable[[Any, optax.Params], Any]
    value: Callable[[Any, optax.Params], optax.Params]
    candidates: Callable[[Any, optax.Params], tuple[optax.Params, ...]]
    is_on: Callable[[Any], Any]  # Whether any mean has weights in it.
    after_evaluation: Callable[..., Any] = lambda state, *cross_entropies: state
    start: Callable[[Any], Any] = lambda state: state  # What a trigger switches on.


class RunningMean(NamedTuple):
    """Uniform mean of the weights added so far; all zeros while n is 0."""

    n: jax.Array
    mean: optax.Params


class TriggeredState(NamedTuple):
    """A mean that collects nothing before it is switched on, and never stops or restarts."""

    on: jax.Array
    average: RunningMean


class TwoTailedState(NamedTuple):
    """Means over a short and a long tail of the trajectory; the long one is the better so far."""

    short: RunningMean
    long: RunningMean


class Watch(NamedTuple):
    """The lowest cross-entropy of a tail since it began, and how many evaluations ago that was."""

    best: jax.Array
    stale: jax.Array


class WatchedTailsState(NamedTuple):
    """Two tails that are given up when they stagnate, and the raw weights as an alternative."""

    short: RunningMean
    long: RunningMean
    watch_short: Watch
    watch_long: Watch
    steps: jax.Array  # Since the last evaluation.
    raw: jax.Array  # Whether the raw weights were better than both tails then.


def _empty(params: optax.Params) -> RunningMean:
    return RunningMean(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))


def _add(average: RunningMean, params: optax.Params) -> RunningMean:
    """mean <- mean + (params - mean) / (n + 1)."""
    n = average.n + 1
    mean = jax.tree.map(lambda a, p: a + (p - a) / n.astype(a.dtype), average.mean, params)
    return RunningMean(n, mean)


def _value(average: RunningMean, params: optax.Params) -> optax.Params:
    """The mean, or the raw weights while it is empty."""
    return _where(average.n > 0, average.mean, params)


def _where(condition: jax.Array, yes: optax.Params, no: optax.Params) -> optax.Params:
    return jax.tree.map(lambda y, n: jnp.where(condition, y, n), yes, no)


def _none() -> Averaging:
    return Averaging(
        init=lambda params: (),
        update=lambda state, params: state,
        value=lambda state, params: params,
        candidates=lambda state, params: (params,),
        is_on=lambda state: jnp.zeros([], jnp.bool_),
    )


def _triggered() -> Averaging:
    """The tail average of the paper's experiments: from a chosen step to the end."""

    def value(state, params):
        return _value(state.average, params)

    def update(state, params):
        added = _add(state.average, params)
        return state._replace(average=_where(state.on, added, state.average))

    return Averaging(
        init=lambda params: TriggeredState(jnp.zeros([], jnp.bool_), _empty(params)),
        update=update,
        value=value,
        candidates=lambda state, params: (value(state, params),),
        is_on=lambda state: state.average.n > 0,
        start=lambda state: state._replace(on=jnp.ones_like(state.on)),
    )


def _two_tailed() -> Averaging:
    """Two-Tailed Averaging (arXiv:2209.12581): no trigger to choose, a good average at any time."""

    def candidates(state, params):
        return _value(state.short, params), _value(state.long, params)

    def after_evaluation(state, short_xe, long_xe):
        switch = jnp.asarray(short_xe) <= jnp.asarray(long_xe)
        empty = optax.tree.zeros_like(state.short)
        return TwoTailedState(
            short=_where(switch, empty, state.short), long=_where(switch, state.short, state.long)
        )

    return Averaging(
        init=lambda params: TwoTailedState(_empty(params), _empty(params)),
        update=lambda state, params: TwoTailedState(
            _add(state.short, params), _add(state.long, params)
        ),
        # When the short tail won, it has just become the long one.
        value=lambda state, params: _value(state.long, params),
        candidates=candidates,
        is_on=lambda state: (state.short.n > 0) | (state.long.n > 0),
        after_evaluation=after_evaluation,
    )


def _watched_tails(stagnating_evaluations: int) -> Averaging:
    """Two-Tailed Averaging in the version that its author recommends for practice.

    A tail stagnates if its cross-entropy has not improved for this many evaluations. The short tail
    then begins again, and the long one is replaced by the short one. The raw weights are used if
    they are better than the long tail. If they always were, both tails begin again.
    """

    def fresh():
        return Watch(jnp.asarray(jnp.inf, jnp.float32), jnp.zeros([], jnp.int32))

    def watch(before, xe):
        improved = xe < before.best
        return Watch(jnp.where(improved, xe, before.best), jnp.where(improved, 0, before.stale + 1))

    def init(params):
        zero, no = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.bool_)
        return WatchedTailsState(_empty(params), _empty(params), fresh(), fresh(), zero, no)

    def update(state, params):
        return state._replace(
            short=_add(state.short, params), long=_add(state.long, params), steps=state.steps + 1
        )

    def after_evaluation(state, short_xe, long_xe, raw_xe):
        short_xe, long_xe, raw_xe = (
            jnp.asarray(xe, jnp.float32) for xe in (short_xe, long_xe, raw_xe)
        )
        empty = optax.tree.zeros_like(state.short)
        of_short, of_long = watch(state.watch_short, short_xe), watch(state.watch_long, long_xe)
        # A tail that stagnates is not the best of the run, so nothing that is best is lost.
        switch = (short_xe <= long_xe) | (of_long.stale >= stagnating_evaluations)
        restart = ~switch & (of_short.stale >= stagnating_evaluations)
        long = _where(switch, state.short, state.long)
        long_xe = jnp.where(switch, short_xe, long_xe)
        of_long = _where(switch, Watch(short_xe, jnp.zeros([], jnp.int32)), of_long)
        raw = (long.n > 1) & (raw_xe <= long_xe)
        always = raw & (long.n == state.steps)
        return WatchedTailsState(
            short=_where(switch | restart | always, empty, state.short),
            long=_where(always, empty, long),
            watch_short=_where(switch | restart | always, fresh(), of_short),
            watch_long=_where(always, fresh(), of_long),
            steps=jnp.zeros_like(state.steps),
            raw=raw,
        )

    return Averaging(
        init=init,
        update=update,
        value=lambda state, params: _where(state.raw, params, _value(state.long, params)),
        candidates=lambda state, params: (
            _value(state.short, params),
            _value(state.long, params),
            params,
        ),
        is_on=lambda state: (state.short.n > 0) | (state.long.n > 0),
        after_evaluation=after_evaluation,
    )


AVERAGES = {"none": _none, "triggered": _triggered, "two_tailed": _two_tailed}


def make_averaging(kind: str = "triggered", stagnating_evaluations: int | None = None) -> Averaging:
    """The functions of one of AVERAGES; with a number, two tails are watched for stagnation."""
    if stagnating_evaluations is None:
        return AVERAGES[kind]()
    if kind != "two_tailed":
        raise errors.UsageError(
            f"averaging.stagnating_evaluations {stagnating_evaluations} is for kind two_tailed, "
            f"not for {kind}; leave it out, or set averaging.kind=two_tailed"
        )
    return _watched_tails(stagnating_evaluations)

"""Averages of the weights, as pure functions of a state.

All kinds share one interface, so the training loop has no branches:

    average = make_averaging(kind)
    state = average.init(params)
    state = average.update(state, params)          # After every optimizer step.
    for weights in average.candidates(state, params): ...evaluate...
    state = average.after_evaluation(state, *cross_entropies)
    weights = average.value(state, params)         # The candidate that scored best.

Flags and counts are traced arrays, so switching an average on does not recompile. `schedule.py`
decides when to do so.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from mogrifier_jax import errors


class Averaging(NamedTuple):
    """An averaging scheme; see the docstring of the module for the order of calls."""

    init: Callable[[optax.Params], PyTree]
    update: Callable[[PyTree, optax.Params], PyTree]
    value: Callable[[PyTree, optax.Params], optax.Params]
    candidates: Callable[[PyTree, optax.Params], tuple[optax.Params, ...]]
    is_on: Callable[[PyTree], bool | jax.Array]  # Whether any mean is not empty.
    after_evaluation: Callable[..., PyTree] = lambda state, *cross_entropies: state
    start: Callable[[PyTree], PyTree] = lambda state: state  # Called when averaging is triggered.


class RunningMean(NamedTuple):
    """Uniform mean of the weights added so far; all zeros while n is 0."""

    n: jax.Array
    mean: optax.Params


class TriggeredState(NamedTuple):
    """A mean that is empty until it is switched on, and never stops or restarts."""

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
    """Two tails that restart when they stagnate, and the raw weights as an alternative."""

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

    def value(state: TriggeredState, params: optax.Params) -> optax.Params:
        return _value(state.average, params)

    def update(state: TriggeredState, params: optax.Params) -> TriggeredState:
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
    """Two-Tailed Averaging (arXiv:2209.12581), which needs no trigger."""

    def candidates(state: TwoTailedState, params: optax.Params) -> tuple[optax.Params, ...]:
        return _value(state.short, params), _value(state.long, params)

    def after_evaluation(
        state: TwoTailedState, short_xe: ArrayLike, long_xe: ArrayLike
    ) -> TwoTailedState:
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
        # If the short tail was better, it has just become the long one.
        value=lambda state, params: _value(state.long, params),
        candidates=candidates,
        is_on=lambda state: (state.short.n > 0) | (state.long.n > 0),
        after_evaluation=after_evaluation,
    )


def _watched_tails(stagnating_evaluations: int) -> Averaging:
    """Two-Tailed Averaging in the version that its author recommends for practice.

    A tail stagnates if its cross-entropy has not improved for this many evaluations. A short tail
    that stagnates restarts, and a long one is replaced by the short one. The raw weights are used
    if they are better than the long tail. If they always were, both tails restart.
    """

    def fresh() -> Watch:
        return Watch(jnp.asarray(jnp.inf, jnp.float32), jnp.zeros([], jnp.int32))

    def watch(before: Watch, xe: jax.Array) -> Watch:
        improved = xe < before.best
        return Watch(jnp.where(improved, xe, before.best), jnp.where(improved, 0, before.stale + 1))

    def init(params: optax.Params) -> WatchedTailsState:
        zero, no = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.bool_)
        return WatchedTailsState(_empty(params), _empty(params), fresh(), fresh(), zero, no)

    def update(state: WatchedTailsState, params: optax.Params) -> WatchedTailsState:
        return state._replace(
            short=_add(state.short, params), long=_add(state.long, params), steps=state.steps + 1
        )

    def after_evaluation(
        state: WatchedTailsState, *cross_entropies: ArrayLike
    ) -> WatchedTailsState:
        short_xe, long_xe, raw_xe = (jnp.asarray(xe, jnp.float32) for xe in cross_entropies)
        empty = optax.tree.zeros_like(state.short)
        of_short, of_long = watch(state.watch_short, short_xe), watch(state.watch_long, long_xe)
        # A tail that stagnates is not the best of the run, so the best weights are not lost.
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

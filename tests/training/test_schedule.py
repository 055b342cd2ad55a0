"""Each rule by a small table: what happens, turn by turn, for a given learning curve."""

import dataclasses
import json
import math

import pytest

from mogrifier_jax import errors
from mogrifier_jax.training import schedule

FLAT = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]  # Best at turn 1, then nothing.
FALLING = [3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3]


def run(curve, **rules):
    """The decisions of a run that sees this curve, up to and including the turn it stops."""
    rules = schedule.Rules(**{"turns": 1000, "steps_per_turn": 1, **rules})
    progress, decisions = schedule.Progress(), []
    for xe in curve:
        progress, decision = schedule.decide(progress, rules, xe)
        decisions.append(decision)
        if decision.stop:
            break
    return progress, decisions


def turns_with(decisions, field):
    return [turn for turn, decision in enumerate(decisions) if getattr(decision, field)]


def stop_of(curve, **rules):
    _, decisions = run(curve, **rules)
    return (len(decisions) - 1, decisions[-1].stop and decisions[-1].stop.kind)


def test_best_is_strictly_below_everything_before():
    progress, decisions = run([3.0, 2.5, 2.5, 2.6, 2.4])
    assert turns_with(decisions, "improved") == [0, 1, 4]
    assert (progress.best_turn, progress.best_xe, progress.turn) == (4, 2.4, 4)


def test_turns_plus_one_evaluations():
    assert stop_of(FALLING, turns=3) == (3, "turns")
    assert stop_of(FALLING, turns=0) == (0, "turns")
    assert stop_of(FALLING, turns=100) == (7, None)


def test_nan_stops_and_is_never_best():
    progress, decisions = run([3.0, 2.0, math.nan, 1.0])
    assert len(decisions) == 3 and decisions[-1].stop.kind == "nan"
    assert not decisions[-1].improved and progress.best_turn == 1
    assert stop_of([math.nan], turns=0) == (0, "nan")  # NaN is reported before "done".


@pytest.mark.parametrize(
    "rules, expected",
    [
        ({"early_stopping_turns": 3}, (5, "patience")),  # 1 + 3 < 5 is the first time.
        ({"early_stopping_turns": 1}, (3, "patience")),
        ({"early_stopping_turns": -1}, (7, None)),
        ({}, (7, None)),
        # Patience 1 + floor(3/6 * turn): 1, 1, 2, 2, 3, 3 for turns 0 to 5.
        ({"early_stopping_turns": 4, "early_stopping_rampup_turns": 6}, (5, "patience")),
        ({"early_stopping_turns": 4, "early_stopping_rampup_turns": 0}, (6, "patience")),
    ],
)
def test_early_stopping_after_patience(rules, expected):
    assert stop_of(FLAT, **rules) == expected


def test_patience_ramps_up_to_its_full_value():
    rules = schedule.Rules(
        turns=9, steps_per_turn=1, early_stopping_turns=5, early_stopping_rampup_turns=4
    )
    assert [schedule.patience(rules, turn) for turn in range(7)] == [1, 2, 3, 4, 5, 5, 5]


def test_improving_too_slowly_stops():
    slow = {"early_stopping_turns": 3, "early_stopping_slowest_rate": 0.11}
    assert stop_of(FALLING, **slow) == (3, "rate")  # 0.1 a turn, over the first full window.
    assert stop_of(FALLING, **slow | {"early_stopping_slowest_rate": 0.09}) == (7, None)


def test_unreachable_target_stops():
    target = {"turns": 10, "early_stopping_turns": 2}
    # At turn 2 the best is 2.8 and 8 more turns give 2.0.
    assert stop_of(FALLING, **target, early_stopping_worst_xe_target=1.9) == (2, "target")
    assert stop_of(FALLING, **target, early_stopping_worst_xe_target=2.1) == (7, None)


@pytest.mark.parametrize(
    "curve, rules, starts",
    [
        (FLAT, {"averaging_turns": 3}, [4]),
        (FLAT, {"averaging_turns": 3, "averaging_at_the_latest": 2}, [2]),
        (FALLING, {"averaging_turns": 3}, []),
        (FALLING, {"averaging_turns": 3, "averaging_at_the_latest": 5}, [5]),
        (FALLING, {"averaging_turns": 0}, [1]),  # Never by stalling at turn 0.
        (FALLING, {"averaging_turns": 0, "averaging_at_the_latest": 0}, [0]),
        (FLAT, {"averaging_turns": -1, "averaging_at_the_latest": 2}, []),
        (FLAT, {}, []),
    ],
)
def test_averaging_starts_once(curve, rules, starts):
    progress, decisions = run(curve, **rules)
    assert turns_with(decisions, "start_averaging") == starts
    assert progress.averaging_on == bool(starts)


def test_nothing_starts_at_the_turn_that_stops():
    progress, decisions = run(FLAT, turns=4, averaging_turns=3)
    assert decisions[-1].stop and not decisions[-1].start_averaging and not progress.averaging_on
    assert run(FLAT, turns=5, averaging_turns=3)[1][4].start_averaging


@pytest.mark.parametrize(
    "curve, rules, drops",
    [
        (FLAT, {"drop_learning_rate_turns": 2}, [4, 7]),  # 1 + 2 < 4, then 4 + 2 < 7.
        (FALLING, {"drop_learning_rate_turns": 2}, []),
        (FALLING, {"drop_learning_rate_turns": 2, "drop_learning_rate_at_the_latest": 5}, [5]),
        (FLAT, {"drop_learning_rate_turns": 2, "drop_learning_rate_at_the_latest": 5}, [4, 7]),
        (FLAT, {"drop_learning_rate_turns": -1}, []),
    ],
)
def test_learning_rate_drops(curve, rules, drops):
    progress, decisions = run(curve, drop_learning_rate_multiplier=0.5, **rules)
    assert turns_with(decisions, "drop_learning_rate") == drops
    assert progress.learning_rate_factor == 0.5 ** len(drops)


def test_progress_survives_json_in_the_middle_of_a_run():
    rules = schedule.Rules(turns=9, steps_per_turn=1, averaging_turns=2, early_stopping_turns=4)
    unbroken = resumed = schedule.Progress()
    for xe in FLAT[:6]:
        unbroken, expected = schedule.decide(unbroken, rules, xe)
        resumed = schedule.Progress.from_dict(json.loads(json.dumps(resumed.to_dict())))
        resumed, decision = schedule.decide(resumed, rules, xe)
        assert decision == expected and resumed == unbroken
    assert unbroken != dataclasses.replace(unbroken, averaging_on=False)


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"drop_learning_rate_turns": 3}, "drop_learning_rate_multiplier"),
        ({"early_stopping_slowest_rate": 0.1}, "early_stopping_turns"),
        ({"early_stopping_worst_xe_target": 1.1}, "early_stopping_turns"),
    ],
)
def test_impossible_rules_are_refused(rules, message):
    with pytest.raises(errors.UsageError, match=message):
        schedule.Rules(**{"turns": 1, "steps_per_turn": 1, **rules})


RESTARTING = schedule.Rules(turns=6, steps_per_turn=1, on_divergence="restart", max_restarts=2)


def follow(rules, xes):
    """The decisions and the last progress of a run with these evaluations."""
    progress, decisions = schedule.Progress(), []
    for xe in xes:
        progress, decision = schedule.decide(progress, rules, xe)
        decisions.append(decision)
    return progress, decisions


def test_a_run_that_diverges_goes_on_at_a_lower_rate_a_few_times():
    progress, decisions = follow(RESTARTING, [5.0, 4.0, math.nan, 3.0, math.inf])
    assert [decision.restart for decision in decisions] == [False, False, True, False, True]
    assert not any(decision.stop for decision in decisions)
    assert progress.history == (5.0, 4.0, math.inf, 3.0, math.inf)
    assert (progress.best_turn, progress.best_xe, progress.restarts) == (3, 3.0, 2)
    assert progress.learning_rate_factor == pytest.approx(0.81)
    # No third time.
    progress, decision = schedule.decide(progress, RESTARTING, math.nan)
    assert decision.stop.kind == "nan" and not decision.restart and progress.restarts == 2


def test_within_a_turn_a_restart_changes_the_rate_and_nothing_else():
    before, _ = follow(RESTARTING, [5.0, 4.0])
    after = schedule.restart(before, RESTARTING)
    changes = dict(restarts=1, learning_rate_factor=0.9)
    assert after == dataclasses.replace(before, **changes)
    assert schedule.Progress.from_dict(json.loads(json.dumps(after.to_dict()))) == after


@pytest.mark.parametrize(
    "rules, xes",
    [
        (schedule.Rules(6, 1), [5.0]),  # "stop".
        (RESTARTING, []),  # There is nothing to go back to.
        (dataclasses.replace(RESTARTING, max_restarts=0), [5.0]),
    ],
)
def test_there_is_no_restart(rules, xes):
    progress, _ = follow(rules, xes)
    assert schedule.restart(progress, rules) is None
    assert schedule.decide(progress, rules, math.nan)[1].stop.kind == "nan"


def test_a_restart_at_the_last_turn_ends_the_run():
    _, decisions = follow(RESTARTING, [5.0, 4.0, 4.0, 4.0, 4.0, 4.0, math.nan])
    assert decisions[-1].stop.kind == "turns" and not decisions[-1].restart


def test_patience_counts_diverged_turns():
    rules = dataclasses.replace(RESTARTING, early_stopping_turns=1)
    _, decisions = follow(rules, [5.0, math.nan, math.nan])
    assert decisions[-1].stop.kind == "patience"


def test_progress_of_earlier_versions_has_no_restarts():
    old = schedule.Progress(history=(3.0,)).to_dict()
    del old["restarts"]
    assert schedule.Progress.from_dict(old).restarts == 0

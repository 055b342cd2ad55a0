"""The evaluation before a turn, and the search for the temperature on lamb's grid."""

import pytest

from mogrifier_jax import configs
from mogrifier_jax.training import scoring, turn_evaluation


def test_the_search_goes_down_the_grid_and_stops_after_two_failures():
    def search(best, at_once=1):
        tried = []

        def xes(group):
            tried.extend(group)
            return [(temperature - best) ** 2 for temperature in group]

        return turn_evaluation.search_temperature(xes, at_once), tried

    assert turn_evaluation.TEMPERATURES[:3] == (1.06, 1.04, 1.02)
    assert (len(turn_evaluation.TEMPERATURES), turn_evaluation.TEMPERATURES[-1]) == (14, 0.8)
    assert search(1.0) == (1.0, [1.06, 1.04, 1.02, 1.0, 0.98, 0.96])
    assert search(2.0) == (1.06, [1.06, 1.04, 1.02])
    assert search(0.0) == (0.8, list(turn_evaluation.TEMPERATURES))
    for best in (2.0, 1.0, 0.91, 0.0):  # In groups it finds the same, with fewer calls.
        found, tried = search(best, at_once=7)
        assert found == search(best)[0] and len(tried) in (7, 14)


def test_a_failure_between_successes_does_not_stop_the_search():
    xes = dict(zip(turn_evaluation.TEMPERATURES, [5, 6, 4, 6, 3, 9, 9, 0], strict=False))
    for at_once in (1, 2):
        found = turn_evaluation.search_temperature(lambda group: [xes[t] for t in group], at_once)
        assert found == 0.98


def test_a_search_that_finds_only_nan_returns_one():
    assert turn_evaluation.search_temperature(lambda group: [float("nan")] * len(group)) == 1.0


@pytest.mark.parametrize(
    ("lines", "batch_size", "stripes"),
    [(3370, 64, 33), (3760, 64, 37), (50, 64, 1), (10**6, 128, 128)],
)
def test_stripes_have_enough_lines(lines, batch_size, stripes):
    class Task:
        num_lines = staticmethod(lambda split: lines)

    assert turn_evaluation.num_stripes(Task, "valid", batch_size, 100) == stripes


@pytest.mark.slow
def test_a_turn_scores_training_data_temperature_and_validation(small):
    settings = dict(temperature_tokens=100, lines_per_stripe=10, train_windows=2)
    settings = configs.base({"evaluation": settings}).evaluation
    turn = turn_evaluation.TurnEvaluation(small.model, small.task, settings, batch_size=4, window=6)
    assert turn.search_windows == 100 // 4 // 6
    scores = turn(small.params)
    plan = small.task.plan("train", 4)
    train = scoring.Deterministic(small.model, plan).sums(small.params, [1.0], 2)
    assert scores.train_nats == pytest.approx(train.total[0] / train.count, rel=1e-6)
    assert scores.temperature in turn_evaluation.TEMPERATURES
    stripes = turn_evaluation.num_stripes(small.task, "valid", 4, 10)
    assert stripes == 3
    valid = scoring.Deterministic(small.model, small.task.plan("valid", stripes))
    for temperature in (scores.temperature, 1.0):
        expected = valid(small.params, temperature).mean()
        found = turn.score("valid", small.params, temperature)
        assert found == pytest.approx(expected, rel=1e-6)
    assert scores.valid_nats != pytest.approx(valid(small.params).mean(), rel=1e-6)
    fixed = dict(softmax_temperature=0.9, max_windows=1, train_windows=1)
    fixed = configs.base({"evaluation": fixed}).evaluation
    turn = turn_evaluation.TurnEvaluation(small.model, small.task, fixed, batch_size=4, window=6)
    assert turn(small.params).temperature == 0.9

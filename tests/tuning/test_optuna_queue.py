"""Trials in a storage: none is lost, none is counted twice, whoever dies or starts when."""

import math
import subprocess
import threading
import time

import pytest
from optuna.trial import TrialState

from mogrifier_jax import errors
from mogrifier_jax.tuning import optuna_queue, samplers, storages, studies

TWO = {"x": studies.Range(-1.0, 1.0), "n": studies.Range(0, 6, "integer")}


@pytest.fixture(params=["sqlite", "journal"])
def storage(request, tmp_path):
    path = tmp_path / "storage"
    return f"sqlite:///{path}" if request.param == "sqlite" else str(path)


def open_queue(storage, target, sampler="random", **settings):
    study = storages.open_study(storage, "test", {"a": 1}, sampler=sampler, **settings)
    return optuna_queue.Queue(study, TWO, target)


def outcomes(queue):
    return sorted((r.number, r.outcome) for r in queue.records())


def test_a_study_goes_on_and_another_is_refused(storage):
    queue = open_queue(storage, 3)
    first, second = queue.ask(2)
    first.note(hidden_size=7)
    first.finish(1.5)
    second.fail("infeasible", "too small")
    again = open_queue(storage, 3)
    assert outcomes(again) == [(0, "complete"), (1, "infeasible")]
    record = again.records()[0]
    assert record.nats == 1.5 and record.notes["hidden_size"] == 7 and record.params == first.params
    assert math.isnan(again.records()[1].nats)
    (third,) = again.ask(4)  # No more than are wanted.
    assert third.number == 2 and third.params != first.params
    with pytest.raises(errors.UsageError, match=r"with other settings:\s+a: 1 \(there\) vs 2"):
        storages.open_study(storage, "test", {"a": 2})


def test_workers_that_start_together_draw_different_trials(storage):
    one, other = (open_queue(storage, 4) for _ in range(2))
    drawn = [queue.ask(1)[0] for queue in (one, other, one, other)]
    assert len({trial.params["x"] for trial in drawn}) == 4
    assert [trial.number for trial in drawn] == [0, 1, 2, 3]
    assert not one.ask(1)


def test_the_draws_follow_from_the_seed(tmp_path):
    def draw(name, seed):
        queue = open_queue(f"sqlite:///{tmp_path / name}", 2, seed=seed)
        return [trial.params for trial in queue.ask(2)]

    assert draw("a", 1) == draw("b", 1) != draw("c", 2)


def test_new_trials_share_chosen_values_of_the_first(storage):
    asked = open_queue(storage, 5).ask(4, shared=["n"])
    assert len({trial.params["n"] for trial in asked}) == 1
    assert len({trial.params["x"] for trial in asked}) == 4


def test_what_may_change_in_a_run_may_change_in_its_study():
    """A default may become another one; what moves no number is no reason to refuse a study."""
    saved = {"config": {"optimizer": {"accumulate_at_once": False}}}
    studies.check_unchanged("the study is", saved, {"config": {}}, "Use another")
    saved["config"]["optimizer"]["accumulate"] = 2
    with pytest.raises(errors.UsageError, match=r"config.optimizer.accumulate: 2 \(there\) vs 1"):
        studies.check_unchanged("the study is", saved, {"config": {}}, "Use another")


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["diverged", "infeasible", "lost"])
def test_a_sampler_turns_away_from_settings_that_have_no_value(tmp_path, outcome):
    """The best value is at the edge of what works; a trial that was lost tells nothing."""
    queue, bad = open_queue(str(tmp_path / "journal"), 30, "tpe"), []
    while asked := queue.ask(2):
        for trial in asked:
            x = trial.params["x"]
            bad.append(x > 0)
            trial.fail(outcome, "why") if x > 0 else trial.finish(1.0 - x)
    assert (sum(bad[16:]) < 9) == (outcome != "lost")
    known = queue.records()
    assert [r.outcome == outcome and math.isnan(r.nats) for r in known] == bad
    assert {t.state.name for t, b in zip(queue.study.trials, bad, strict=True) if b} == {"FAIL"}


def test_samplers_see_a_trial_that_diverged_as_the_worst_one(tmp_path):
    queue = open_queue(str(tmp_path / "journal"), 3)
    good, diverged, lost = queue.ask(3)
    good.finish(2.0)
    diverged.fail("diverged", "why")
    lost.fail("lost", "why")
    seen = samplers._FailuresAsWorst(queue.study)._get_trials(states=(TrialState.COMPLETE,))
    assert [trial.number for trial in seen] == [good.number, diverged.number]
    assert seen[0].value == 2.0 < seen[1].value < 2.001


def test_failed_trials_change_no_random_draw(tmp_path):
    def draw(outcome):
        queue, drawn = open_queue(str(tmp_path / outcome), 12), []
        while asked := queue.ask(1):
            drawn += [trial.params for trial in asked]
            asked[0].fail(outcome, "why") if outcome == "diverged" else asked[0].finish(1.0)
        return drawn

    assert draw("diverged") == draw("complete")


def die(queue, monkeypatch):
    """Leaves a trial running whose worker no longer tells that it is alive."""
    monkeypatch.setattr(optuna_queue, "DOUBT_SECONDS", 0.0)
    queue.take_over()
    with monkeypatch.context() as patch:
        patch.setattr(optuna_queue, "worker_name", lambda: "elsewhere 1")
        patch.setattr(time, "time", lambda: 1000.0)
        (trial,) = queue.ask(1)
    return trial


def test_a_trial_of_a_dead_worker_is_gone_on_with_once(storage, monkeypatch):
    queue, other = open_queue(storage, 2), open_queue(storage, 2)
    dead = die(queue, monkeypatch)
    begun = [other.ask(2), queue.ask(2)]
    taken = [t for asked in begun for t in asked if t.folder == dead.folder]
    assert len(taken) == 1 and taken[0].params == dead.params and taken[0].attempt == 2
    assert sum(map(len, begun)) == 2
    # The one that was thought dead must not count as well.
    dead.finish(1.0)
    for asked in begun:
        for trial in asked:
            trial.finish(2.0)
    assert [record.nats for record in queue.records()] == [2.0, 2.0]


def test_a_living_worker_keeps_its_trial_and_a_late_one_learns_that_it_lost_it(
    storage, monkeypatch
):
    queue = open_queue(storage, 1)
    (trial,) = queue.ask(1)
    assert not open_queue(storage, 1).ask(1)
    assert trial.report(0, 1.0) is None
    monkeypatch.setattr(optuna_queue, "GRACE_SECONDS", -1.0)
    monkeypatch.setattr(optuna_queue, "DOUBT_SECONDS", 0.0)
    (other,) = open_queue(storage, 1).ask(1)
    assert other.folder == trial.folder and other.number != trial.number
    trial.beat()
    stop = trial.report(1, 1.0)
    assert stop.kind == "lost" and "taken over" in stop.message


def test_a_dead_process_of_this_machine_needs_no_patience(tmp_path, monkeypatch):
    queue = open_queue(f"sqlite:///{tmp_path / 'a'}", 1)
    with subprocess.Popen(["true"]) as process:
        pass
    here, _, _ = optuna_queue.worker_name().rpartition(" ")
    with monkeypatch.context() as patch:
        patch.setattr(optuna_queue, "worker_name", lambda: f"{here} {process.pid}")
        (trial,) = queue.ask(1)
    assert queue.ask(1)[0].folder == trial.folder


def test_what_kills_every_worker_is_given_up(tmp_path, monkeypatch):
    queue = open_queue(f"sqlite:///{tmp_path / 'a'}", 1)
    for _ in range(optuna_queue.MAX_ATTEMPTS):
        die(queue, monkeypatch)
    assert not queue.ask(1)
    (record,) = queue.records()
    assert record.outcome == "lost" and "4 workers ended" in record.notes["reason"]


def test_an_interruption_puts_trials_back(tmp_path, monkeypatch):
    monkeypatch.setattr(optuna_queue, "BEAT_SECONDS", 0.01)
    queue = open_queue(f"sqlite:///{tmp_path / 'a'}", 2)
    first, second = queue.ask(2)
    beats = first._trial.user_attrs["heartbeat"]
    with pytest.raises(errors.Interrupted), queue.hold([first, second]):
        second.finish(1.0)
        while queue.study.trials[0].user_attrs["heartbeat"] == beats:
            time.sleep(0.01)
        raise errors.Interrupted("now")
    assert queue.study.trials[0].user_attrs["heartbeat"] > beats
    assert threading.active_count() < 50
    assert outcomes(queue) == [(1, "complete"), (2, "waiting")]
    (again,) = queue.ask(2)
    assert again.folder == first.folder and again.attempt == 1


def test_workers_do_not_ask_for_more_than_there_are(tmp_path, monkeypatch):
    storage = f"sqlite:///{tmp_path / 'a'}"
    one, other = (open_queue(storage, 1) for _ in range(2))
    counted = optuna_queue.Queue.counted

    def late(self):
        monkeypatch.setattr(optuna_queue.Queue, "counted", counted)
        before = counted(self)
        other.ask(1)  # In the moment between looking and asking.
        return before

    monkeypatch.setattr(optuna_queue.Queue, "counted", late)
    assert one.ask(1) == [] and outcomes(one) == [(0, "running")]


@pytest.mark.slow
def test_the_median_rule_stops_trials(tmp_path):
    pruner = samplers.make_pruner(turns=10)
    queue = open_queue(f"sqlite:///{tmp_path / 'a'}", 9, pruner=pruner)
    for value in range(5):
        (trial,) = queue.ask(1)
        for turn in range(3):
            trial.report(turn, float(value))
        trial.finish(float(value))
    (good,) = queue.ask(1)
    assert [good.report(turn, 1.0) for turn in range(3)] == [None] * 3
    (bad,) = queue.ask(1)
    assert bad.report(0, 9.0) is None
    assert bad.report(1, 9.0) == ("pruned", "above the median of the trials at turn 1")
    bad.fail("pruned", "why")
    assert outcomes(queue)[-1] == (6, "pruned") and math.isnan(queue.records()[-1].nats)


@pytest.mark.slow
def test_the_gaussian_process_comes_closer_than_chance(tmp_path):
    pytest.importorskip("torch")

    def best(sampler):
        queue = open_queue(f"sqlite:///{tmp_path / sampler}", 18, sampler)
        while asked := queue.ask(2):
            for trial in asked:
                trial.finish((trial.params["x"] - 0.3) ** 2 + 0.1 * (trial.params["n"] - 2) ** 2)
        values = [record.nats for record in queue.records()]
        return min(values[10:])

    assert best("gp") < 0.01 < best("random")


@pytest.mark.parametrize("ahead", [0.0, 86_400.0, 1e9])
def test_a_dead_worker_whose_clock_was_wrong_is_not_waited_for(storage, ahead, monkeypatch):
    (trial,) = open_queue(storage, 1).ask(1)
    trial.note(heartbeat=time.time() + ahead, worker="elsewhere")
    queue, now = open_queue(storage, 1), [0.0]
    monkeypatch.setattr(optuna_queue.time, "monotonic", lambda: now[0])
    assert not queue.ask(1)
    now[0] = optuna_queue.GRACE_SECONDS - 1
    trial.note(heartbeat=time.time() + ahead + 1)  # It was alive,
    assert not queue.ask(1)
    now[0] += optuna_queue.GRACE_SECONDS - 1
    assert not queue.ask(1)
    now[0] += 2
    (again,) = queue.ask(1)  # and is no more.
    assert again.folder == trial.folder


@pytest.mark.parametrize("behind", [300.0, 86_400.0, 1e9])
def test_a_living_worker_whose_clock_is_behind_keeps_its_trial(storage, behind, monkeypatch):
    (trial,) = open_queue(storage, 1).ask(1)
    queue, now = open_queue(storage, 1), [0.0]
    monkeypatch.setattr(optuna_queue.time, "monotonic", lambda: now[0])
    for beat in range(8):
        trial.note(heartbeat=time.time() - behind + 15 * beat, worker="elsewhere 1")
        assert not queue.ask(1)
        now[0] += optuna_queue.BEAT_SECONDS
    now[0] += optuna_queue.DOUBT_SECONDS
    (again,) = queue.ask(1)  # Now it has been silent for three heartbeats.
    assert again.folder == trial.folder

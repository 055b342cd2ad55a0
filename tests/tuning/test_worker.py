"""Studies: what they tune, that no trial is lost, and that trials are what they claim to be."""

import csv
import importlib.util
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from ml_collections import config_dict

from experiments import ptb, pydoc
from mogrifier_jax import errors
from mogrifier_jax.evaluation import methods, pretrained
from mogrifier_jax.nn import models
from mogrifier_jax.training import metrics, workdirs
from mogrifier_jax.tuning import report, storages, studies, trials, worker
from tests import quick

ROOT = pathlib.Path(__file__).parents[2]
SMALL = dict(
    log_every=4,
    data=dict(batch_size=8, window=4),
    model=dict(num_layers=1, hidden_size=8, rounds=1, rank=2),
    evaluation=dict(temperature_tokens=64, max_windows=2, softmax_temperature=1.0),
    schedule=dict(turns=2, steps_per_turn=4),
)
RATES = {
    "optimizer.learning_rate": {"low": 1e-3, "high": 1e-2, "scale": "log"},
    "dropout.input": {"low": 0.0, "high": 0.9},
}
TWO = {"x": studies.Range(-1.0, 1.0), "n": studies.Range(0, 6, "integer")}


def make_config(**sections):
    config = pydoc.get_config("tiny")
    config.update(SMALL)
    config.update(sections)
    return config


def write_study(folder, ranges):
    path = folder / "rates.json"
    path.write_text(json.dumps(ranges))
    return str(path)


# What is tuned.


def test_the_studies_of_the_paper():
    mogrifier = studies.load("appendix_a")
    assert mogrifier.ranges["optimizer.learning_rate"] == (1e-3, 4e-3, "log")
    assert mogrifier.ranges["model.rank"] == (-20, 100, "integer")
    assert mogrifier.ranges["dropout.inter_layer"] == (0.0, 0.95, "linear")
    assert set(mogrifier.shapes) == {"model.embedding_ratio", "model.rounds", "model.rank"}
    lstm = studies.load("appendix_a_lstm")
    assert set(mogrifier.ranges) - set(lstm.ranges) == {"model.rounds", "model.rank"}
    large = studies.load("enwik8")
    assert large.ranges["dropout.state"].high == 0.25
    assert set(mogrifier.ranges) - set(large.ranges) == {"model.embedding_ratio"}
    assert not any("dropout" in name for name in studies.load("reverse_copy").ranges)
    highest = {u: studies.load(f"dyneval_{u}").ranges["window"].high for u in ("word", "character")}
    assert highest == {"word": 20, "character": 50}
    assert studies.load("dyneval_word").adapts and not mogrifier.adapts
    fitting = set(studies.PAPER) - {"dyneval_word", "dyneval_character"}
    assert len(fitting) == 6
    for name in fitting:
        studies.check(studies.load(name))


def test_a_trial_has_its_own_hidden_size_and_zero_rank_is_full():
    study, config = studies.load("appendix_a"), ptb.get_config()

    def sizes(**params):
        tried = studies.configure(study, config, params)
        model = models.make_model(10_001, **tried.model)
        assert sum(models.count_parameters(model).values()) <= config.model.num_params
        return tried.model.rank, model.hidden_size

    full, small = ({"model.rounds": 5, "model.rank": rank} for rank in (-7, 40))
    assert sizes(**full)[0] == 0 == sizes(**{"model.rounds": 0, "model.rank": 40})[0]
    assert sizes(**small)[0] == 40 and sizes(**small)[1] > sizes(**full)[1]
    assert sizes(**full) == sizes(**{"model.rounds": 5, "model.rank": -1})
    plain = studies.configure(studies.load("appendix_a_lstm"), config, {})
    assert plain.model.rounds == plain.model.rank == 0 and config.model.rounds == 5
    with pytest.raises(AttributeError):
        plain.model.rouns = 1


@pytest.mark.parametrize("scale", ["log", "linear", "integer"])
def test_places_in_a_range_and_back(scale):
    limits = studies.Range(1, 100, scale)
    assert limits.place(1) == 0 and limits.place(100) == 1
    assert limits.place(10) == pytest.approx(0.5 if scale == "log" else 9 / 99)
    assert limits.at(limits.place(37)) == pytest.approx(37)


def one(**limits):
    return {"optimizer.learning_rate": limits}


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ({}, "has no ranges"),
        (one(low=2, high=1), "is reversed: low 2 is above high 1; swap them"),
        (one(low=1, high=1), "is empty: low and high are both 1"),
        (one(low=0, high=1, scale="log"), "begins at 0, which has no logarithm"),
        (one(low=0, high=1, scale="lag"), "has the scale 'lag'; use linear, log, integer"),
        (one(low=0), "give low, high"),
        (one(low=0, high="many"), "give two numbers"),
        ({"model.rounds": {"low": 0.5, "high": 3, "scale": "integer"}}, "numbers of its scale"),
        ({"model.rank": {"low": 0, "high": 3}}, "model.rank is a whole number in the config"),
        ({"model.ronds": {"low": 0, "high": 3}}, "does not have; did you mean model.rounds"),
        ({"model.cell": {"low": 0, "high": 3}}, "model.cell cannot be tuned"),
        ({"seed": {"low": 0, "high": 3, "scale": "integer"}}, "seed cannot be tuned"),
        ({"dropout.input": {"low": 0, "high": 4}}, "dropout.input reaches 4, which must be below"),
    ],
)
def test_ranges_that_cannot_be_are_refused(tmp_path, ranges, words):
    with pytest.raises(errors.UsageError) as refused:
        studies.check(studies.load(write_study(tmp_path, ranges)))
    assert words in str(refused.value) and "rates" in str(refused.value)


def tune(workdir, config=None, study="appendix_a", **settings):
    settings = dict(name="test", num_trials=2, sampler="random") | settings
    return worker.tune(config or make_config(), str(workdir), study=study, **settings)


def without(package):
    """How packages are looked for where this one is not installed."""
    find = importlib.util.find_spec
    return lambda name, *args: None if name == package else find(name, *args)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(study="apendix_a"), "study 'apendix_a' is unknown: did you mean appendix_a"),
        (dict(num_trials=0), "--trials=0 must be at least 1"),
        (dict(parallel=0), "--parallel=0 must be at least 1"),
        (dict(sampler="gb"), "--sampler=gb is unknown; use gp, tpe, random"),
        (dict(storage="postgresql+nodriver://localhost/x"), "cannot be reached"),
        (dict(storage="sqlite:////no/such/folder/study.db"), "unable to open database file"),
        (dict(storage="/no/such/folder/journal"), "there is no folder /no/such/folder"),
        (dict(storage="vizier://localhost:1"), "needs google-vizier, which is not installed"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_any_compute(tmp_path, monkeypatch, settings, words):
    monkeypatch.setattr(worker, "Training", lambda *_: pytest.fail("it went on"))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", without("vizier"))
    with pytest.raises(errors.UsageError) as refused:
        tune(tmp_path / "study", **settings)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_passwords_are_not_shown():
    shown = storages.hide_password("postgresql+psycopg://me:secret@host:5432/db")
    assert shown == "postgresql+psycopg://me:***@host:5432/db"
    assert storages.hide_password("sqlite:////a:b/c") == "sqlite:////a:b/c"


def test_the_gaussian_process_needs_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("torch"))
    with pytest.raises(errors.UsageError, match=r"torch, which is not installed.*--sampler=tpe"):
        storages.check_sampler("gp")
    storages.check_sampler("tpe")


# No trial is lost.


@pytest.fixture(params=["sqlite", "journal"])
def storage(request, tmp_path):
    path = tmp_path / "storage"
    return f"sqlite:///{path}" if request.param == "sqlite" else str(path)


def open_queue(storage, target, sampler="random", **settings):
    study = storages.open_study(storage, "test", {"a": 1}, sampler=sampler, **settings)
    return trials.Queue(study, TWO, target)


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
    with pytest.raises(errors.UsageError, match=r"of another kind:\s+a: 1 \(there\) vs 2"):
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


def test_new_trials_share_the_shapes_of_the_first(storage):
    asked = open_queue(storage, 5).ask(4, shapes=["n"])
    assert len({trial.params["n"] for trial in asked}) == 1
    assert len({trial.params["x"] for trial in asked}) == 4


def die(queue, monkeypatch):
    """Leaves a trial running whose worker no longer tells that it is alive."""
    queue.take_over()
    with monkeypatch.context() as patch:
        patch.setattr(trials, "worker_name", lambda: "elsewhere 1")
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
    trial.report(0, 1.0)
    monkeypatch.setattr(trials, "GRACE_SECONDS", -1.0)
    (other,) = open_queue(storage, 1).ask(1)
    assert other.folder == trial.folder and other.number != trial.number
    trial.beat()
    with pytest.raises(trials.Lost, match="taken over"):
        trial.report(1, 1.0)


def test_a_dead_process_of_this_machine_needs_no_patience(tmp_path, monkeypatch):
    queue = open_queue(f"sqlite:///{tmp_path / 'a'}", 1)
    with subprocess.Popen(["true"]) as process:
        pass
    here, _, _ = trials.worker_name().rpartition(" ")
    with monkeypatch.context() as patch:
        patch.setattr(trials, "worker_name", lambda: f"{here} {process.pid}")
        (trial,) = queue.ask(1)
    assert queue.ask(1)[0].folder == trial.folder


def test_what_kills_every_worker_is_given_up(tmp_path, monkeypatch):
    queue = open_queue(f"sqlite:///{tmp_path / 'a'}", 1)
    for _ in range(trials.MAX_ATTEMPTS):
        die(queue, monkeypatch)
    assert not queue.ask(1)
    (record,) = queue.records()
    assert record.outcome == "lost" and "4 times" in record.notes["reason"]


def test_an_interruption_puts_trials_back(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "BEAT_SECONDS", 0.01)
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
    counted = trials.Queue.counted

    def late(self):
        monkeypatch.setattr(trials.Queue, "counted", counted)
        before = counted(self)
        other.ask(1)  # In the moment between looking and asking.
        return before

    monkeypatch.setattr(trials.Queue, "counted", late)
    assert one.ask(1) == [] and outcomes(one) == [(0, "running")]


@pytest.mark.slow
def test_the_median_rule_stops_trials(tmp_path):
    pruner = storages.make_pruner(turns=10)
    queue = open_queue(f"sqlite:///{tmp_path / 'a'}", 9, pruner=pruner)
    for value in range(5):
        (trial,) = queue.ask(1)
        for turn in range(3):
            trial.report(turn, float(value))
        trial.finish(float(value))
    (good,) = queue.ask(1)
    for turn in range(3):
        good.report(turn, 1.0)
    (bad,) = queue.ask(1)
    with pytest.raises(trials.Pruned, match="above the median of the trials at turn 1"):
        for turn in range(3):
            bad.report(turn, 9.0)
    bad.prune("why")
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


# Trials are runs.


@pytest.fixture(scope="module")
def study_file(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("ranges"), RATES)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, study_file):
    """Three trials, two at a time, so that the last one is alone."""
    workdir = tmp_path_factory.mktemp("tuned")
    return workdir, tune(workdir, study=study_file, num_trials=3, parallel=2)


@pytest.mark.slow
def test_a_study_end_to_end(tuned):
    workdir, records = tuned
    assert [record.outcome for record in records] == ["complete"] * 3
    for record in records:
        folder = workdir / record.notes["folder"]
        found = [r["valid_nats"] for r in metrics.read_metrics(folder) if r["kind"] == "eval"]
        assert record.nats == pytest.approx(min(found), rel=1e-6)
        config = workdirs.read_config(folder)
        assert config.optimizer.learning_rate == record.params["optimizer.learning_rate"]
        assert config.dropout.input == record.params["dropout.input"]
        assert json.loads((folder / "results.json").read_text())["valid_nats"] == record.nats
        assert pretrained.load_weights(folder).info["finished"]
    assert len({record.nats for record in records}) == 3


@pytest.mark.slow
def test_the_report_says_what_was_found(tuned):
    workdir, records = tuned
    with (workdir / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["valid_nats"]) for row in rows] == [record.nats for record in records]
    best = min(records, key=lambda record: record.nats)
    text = (workdir / "report.md").read_text()
    assert f"Best: {best.nats:.4f} nats" in text and f"trial {best.number}." in text
    assert text.count("| optimizer.learning_rate |") == 2  # A column and a row.
    for name in ("parallel_coordinates.png", "learning_curves.png"):
        assert (workdir / name).read_bytes().startswith(b"\x89PNG")
    spec = importlib.util.spec_from_file_location("best", workdir / "best.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    there = workdirs.read_config(workdir / best.notes["folder"])
    assert module.get_config() == there
    assert isinstance(module.get_config().model, config_dict.ConfigDict)
    assert module.get_config().get_type("schedule") is config_dict.ConfigDict


def test_neighbourhoods_by_hand():
    study = studies.Study("x", {"a": studies.Range(0.0, 1.0), "b": studies.Range(1, 100, "log")})
    places = [(0.5, 10), (0.55, 90), (0.43, 11), (0.9, 9), (0.52, 50)]
    known = [
        trials.Record(i, "complete", 1.0 + i / 10, 1.0, dict(zip("ab", place, strict=True)), {})
        for i, place in enumerate(places)
    ]
    a, b = report.neighbourhoods(known, study)
    assert (a.low, a.high, a.others) == (pytest.approx(0.425), pytest.approx(0.575), 3)
    assert (a.nearest, a.median) == (pytest.approx(1.1), pytest.approx(1.2))
    assert b.others == 2 and b.nearest == pytest.approx(1.2)
    assert b.low == pytest.approx(10 ** (1 - 0.15)) and b.high == pytest.approx(10 ** (1 + 0.15))
    edge = [known[0]._replace(params={"a": 0.99, "b": 1}), *known[1:]]
    a, b = report.neighbourhoods(edge, study)
    assert (a.low, a.high) == (pytest.approx(0.85), pytest.approx(1.0)) and a.others == 1
    assert b.low == 1 and b.nearest is None


@pytest.mark.slow
def test_infeasible_and_diverged_trials_are_no_numbers(tmp_path):
    ranges = {"model.rank": {"low": 6, "high": 20, "scale": "integer"}}
    config = make_config(optimizer=dict(learning_rate=1e30))
    records = tune(tmp_path, config, write_study(tmp_path, ranges))
    kinds = {record.outcome for record in records}
    assert kinds == {"infeasible", "diverged"} and all(math.isnan(r.nats) for r in records)
    reasons = {record.outcome: record.notes["reason"] for record in records}
    assert "is larger than both sides" in reasons["infeasible"]
    assert "is not finite" in reasons["diverged"]
    text = (tmp_path / "report.md").read_text()
    assert "Without a value" in text and "| infeasible |" in text
    assert not (tmp_path / "best.py").exists()


@pytest.mark.slow
def test_trials_that_differ_in_rates_share_their_programs(tmp_path, study_file, monkeypatch):
    after = []
    run = worker.Training.run

    def run_and_count(self, asked):
        run(self, asked)
        after.append(count[0])

    monkeypatch.setattr(worker.Training, "run", run_and_count)
    ranges = RATES | {"model.rank": {"low": 3, "high": 8, "scale": "integer"}}
    with quick.count_compilations() as count:
        tune(tmp_path / "rates", study=study_file, num_trials=2)
        tune(tmp_path / "ranks", study=write_study(tmp_path, ranges), num_trials=2)
    first, second, third, other = after
    assert second == first > 0
    assert second < third < other  # Another rank is another program.


@pytest.mark.slow
def test_a_workdir_belongs_to_one_study(tuned, study_file):
    workdir, _ = tuned
    with pytest.raises(errors.UsageError, match="belongs to the study 'test-rates', this one is"):
        tune(workdir, name="other", study=study_file)
    other = make_config(model=dict(rounds=2))
    with pytest.raises(errors.UsageError, match=r"config.model.rounds: 1 \(there\) vs 2"):
        tune(workdir, other, study_file)


WORKER = """
import sys, time
from mogrifier_jax.training import train
from mogrifier_jax.tuning import trials, worker
from tests.tuning import test_worker

workdir, study, doomed = sys.argv[1:]
trials.BEAT_SECONDS, trials.GRACE_SECONDS, worker.POLL_SECONDS = 0.5, 5.0, 0.2
save = train.Book.save

def save_and_say(self, state, **info):
    save(self, state, **info)
    self.saved.wait()
    print("saved", int(state.step), self.workdir, flush=True)
    if doomed and state.step == 4:
        time.sleep(3600)  # It is killed here.

train.Book.save = save_and_say
test_worker.tune(workdir, study=study, num_trials=4, parallel=1)
"""


@pytest.mark.slow
def test_kill_9_of_a_worker_loses_nothing(tmp_path, study_file):
    workdir = tmp_path / "study"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start(doomed):
        command = [sys.executable, "-c", WORKER, str(workdir), study_file, doomed]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )

    with start("doomed") as doomed, start("") as other:
        for line in doomed.stdout:
            if line.startswith("saved 4"):
                break
        doomed.send_signal(signal.SIGKILL)
        folder = pathlib.Path(line.split()[2])
        output = other.communicate()[0]
    assert doomed.returncode == -signal.SIGKILL and other.returncode == 0
    queue = trials.Queue(
        storages.open_study(storages.default(str(workdir)), "test-rates", _about(workdir)), {}, 4
    )
    records = queue.records()
    assert [record.outcome for record in records] == ["complete"] * 4
    folders = [record.notes["folder"] for record in records]
    assert len(set(folders)) == 4 and f"trials/{folder.name}" in folders
    # It went on from step 4, and did not begin again.
    assert f"saved 8 {folder}" in output and f"saved 0 {folder}" not in output
    assert f"saved 4 {folder}" not in output
    steps = [r["step"] for r in metrics.read_metrics(folder) if r["kind"] == "eval"]
    assert steps == [0, 4, 8]


def _about(workdir):
    import optuna

    name, storage = "test-rates", storages.default(str(workdir))
    return optuna.load_study(study_name=name, storage=storage).user_attrs["about"]


@pytest.mark.slow
def test_dynamic_evaluation_is_tuned_on_a_trained_run(tuned):
    folder = tuned[0] / tuned[1][0].notes["folder"]
    settings = methods.default_options()
    with settings.unlocked():
        settings.temperature = "saved"
        settings.dyneval.update(dict(batch_size=8, max_windows=2, parallel=2))
    records = worker.tune_dyneval(str(folder), settings, num_trials=2, parallel=2, sampler="random")
    assert len({record.params["window"] for record in records}) == 1
    assert len({record.nats for record in records}) == 2
    text = (folder / "dyneval_study" / "report.md").read_text()
    assert "--mode=evaluate --eval.methods=dyneval --eval.dyneval.window=" in text
    with pytest.raises(errors.UsageError, match="--workdir is missing"):
        worker.tune_dyneval("", settings, num_trials=2)

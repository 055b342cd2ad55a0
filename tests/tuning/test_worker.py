"""Workers: what they refuse, that trials are runs, and that a killed one loses nothing."""

import csv
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import pytest
from ml_collections import config_dict

from experiments import pydoc
from mogrifier_jax import configs, errors
from mogrifier_jax.evaluation import eval_options, loading
from mogrifier_jax.training import checkpoints, metrics, schedule, workdirs
from mogrifier_jax.tuning import optuna_queue, storages, studies, training_trials
from mogrifier_jax.tuning import tune as tune_mode
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


def make_config(**sections):
    config = pydoc.get_config("tiny")
    config.update(SMALL)
    config.update(sections)
    return config


def write_study(folder, ranges):
    path = folder / "rates.json"
    path.write_text(json.dumps(ranges))
    return str(path)


def tune(workdir, config=None, study="appendix_a", **settings):
    settings = dict(name="test", num_trials=2, sampler="random") | settings
    return tune_mode.tune(config or make_config(), str(workdir), study=study, **settings)


def without(package):
    """How packages are looked for where this one is not installed."""
    find = importlib.util.find_spec
    return lambda name, *args: None if name == package else find(name, *args)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(study="apendix_a"), "study 'apendix_a' is unknown: did you mean appendix_a"),
        (dict(num_trials=0), "--trials=0 must be at least 1"),
        (dict(sampler="gb"), "--sampler=gb is unknown; use gp, tpe, random"),
        (dict(storage="postgresql+nodriver://localhost/x"), "cannot be reached"),
        (dict(storage="sqlite:////no/such/folder/study.db"), "unable to open database file"),
        (dict(storage="/no/such/folder/journal"), "there is no folder /no/such/folder"),
        (dict(storage="vizier://localhost:1"), "needs google-vizier, which is not installed"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_any_compute(tmp_path, monkeypatch, settings, words):
    monkeypatch.setattr(training_trials, "TrainingTrials", lambda *_: pytest.fail("it went on"))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", without("vizier"))
    with pytest.raises(errors.UsageError) as refused:
        tune(tmp_path / "study", **settings)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_study_does_not_go_on_with_another_corpus(tmp_path):
    text = {"train": "1", "valid": "2"}
    training_trials.check_corpus(str(tmp_path), text)  # Control: there is no trial yet.
    fingerprint = {f"{workdirs.CORPUS}{split}": digest for split, digest in text.items()}
    with checkpoints.Checkpoints(tmp_path / "trials" / "0000", fingerprint=fingerprint) as saved:
        saved.save(1, {"x": jnp.float32(1)}, info={}, best=True)
    training_trials.check_corpus(str(tmp_path), text)
    with pytest.raises(errors.UsageError, match=r"trials/0000: the text of valid has changed"):
        training_trials.check_corpus(str(tmp_path), text | {"valid": "3"})


def test_a_study_of_dynamic_evaluation_does_not_go_on_with_other_scores(tmp_path, monkeypatch):
    text = {"train": "1", "valid": "2"}

    class Executor:
        unit, at_once, shared = "bpc", 1, ()

        def __init__(self, *_):
            loaded = types.SimpleNamespace(info={"step": 8})
            self.scorer = types.SimpleNamespace(
                loaded=loaded, task=types.SimpleNamespace(digests=dict(text))
            )

        def run(self, asked):
            for trial in asked:
                trial.finish(1.0)

    def tune_dyneval(num_trials, **changes):
        options = eval_options.defaults()
        options.update_from_flattened_dict(changes)
        tune_mode.tune_dyneval(str(tmp_path), options, num_trials=num_trials, sampler="random")

    monkeypatch.setattr(tune_mode.dyneval_trials, "DynevalTrials", Executor)
    tune_dyneval(1)
    tune_dyneval(2, **{"dyneval.parallel": 3})
    with pytest.raises(errors.UsageError, match=r"eval.temperature: search \(there\) vs 0.9"):
        tune_dyneval(3, temperature="0.9")
    with pytest.raises(errors.UsageError, match=r"eval.dyneval.batch_size: 1024 \(there\) vs 8"):
        tune_dyneval(3, **{"dyneval.batch_size": 8})
    text["valid"] = "3"
    with pytest.raises(errors.UsageError, match=r"corpus.valid: 2 \(there\) vs 3 \(requested\)"):
        tune_dyneval(3)
    about = {"study": {"name": "a"}}  # Of an early version, which did not note them.
    studies.check_unchanged("it is", about, about | {"corpus": text}, "Use another")


# Trials are runs.


@pytest.fixture(scope="module")
def study_file(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("ranges"), RATES)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, study_file):
    """Three trials, one after the other."""
    workdir = tmp_path_factory.mktemp("tuned")
    return workdir, tune(workdir, study=study_file, num_trials=3)


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
        assert loading.load_run(folder).info["finished"]
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
    assert "Trials without a value" in text and "| infeasible |" in text
    assert not (tmp_path / "best.py").exists()


@pytest.mark.slow
def test_a_trial_ends_when_it_is_pruned_or_lost(tmp_path, monkeypatch, study_file):
    report_turn, asked = optuna_queue.Trial.report, []

    def report_and_stop(self, turn, value):
        asked.append((self.number, turn))
        ends = {(0, 1): "pruned", (1, 0): "lost"}
        kind = ends.get((self.number, turn))
        if kind == "lost":
            self.finish(5.0)  # By another worker.
        return schedule.Stop(kind, "enough") if kind else report_turn(self, turn, value)

    monkeypatch.setattr(optuna_queue.Trial, "report", report_and_stop)
    records = tune(tmp_path, study=study_file, num_trials=3)
    assert asked == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert [record.outcome for record in records] == ["pruned", "complete", "complete"]
    assert records[0].notes["reason"] == "enough" and records[1].nats == 5.0
    done = [(tmp_path / r.notes["folder"] / "results.json").exists() for r in records]
    assert done == [False, False, True]


COMMAND = "from mogrifier_jax import main; main.run()"


def start_command(workdir, study, *flags, **changes):
    """The command of a study as somebody would start it."""
    values = configs.flatten(config_dict.ConfigDict(SMALL)) | changes
    keys = [f"--config.{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-c", COMMAND, "--mode=tune", "--config=experiments/pydoc.py:tiny"]
    flags = [*keys, f"--study={study}", "--sampler=random", f"--workdir={workdir}", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *flags], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_workers_side_by_side_share_a_study(tmp_path, study_file):
    with start_command(tmp_path, study_file, "--trials=4", "--parallel=2") as process:
        output = process.communicate()[1]
    assert process.returncode == 0, output
    assert "worker 0: starts" in output and "worker 1: starts" in output
    assert "4 of 4 done" in output  # The first worker shows what it does.
    assert "4 of 4 done" in (tmp_path / "workers" / "1.txt").read_text()
    with (tmp_path / "trials.csv").open() as file:
        assert [row["outcome"] for row in csv.DictReader(file)] == ["complete"] * 4


@pytest.mark.slow
def test_a_stop_of_workers_side_by_side_saves_all_of_them(tmp_path, study_file):
    with start_command(tmp_path, study_file, "--trials=40", "--parallel=2") as process:
        while not list(tmp_path.glob("trials/*/metrics.jsonl")) and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output = process.communicate()[1]
    assert process.returncode == errors.Interrupted.exit_code, output
    assert "Interrupted: all workers were stopped" in output and "Traceback" not in output
    begun = {path.parent for path in tmp_path.glob("trials/*/config.json")}
    # Each worker may have taken one more trial, whose folder it had not made yet.
    count = f"--trials={len(begun) + 2}"
    with start_command(tmp_path, study_file, count, "--parallel=2") as process:
        output = process.communicate()[1]
    assert process.returncode == 0, output
    assert all((folder / "results.json").exists() for folder in begun)


@pytest.mark.slow
def test_what_no_worker_can_do_is_said_once(tmp_path, study_file):
    flags, odd = ("--parallel=2", "--cpu_devices=2"), {"data.batch_size": 9}
    with start_command(tmp_path, study_file, *flags, **odd) as process:
        output = process.communicate()[1]
    assert process.returncode == 2 and "Traceback" not in output
    assert re.search(r"UsageError: worker \d ended with code 2", output)
    with start_command(tmp_path, "apendix_a", "--parallel=2") as process:
        output = process.communicate()[1]
    assert process.returncode == 2 and "did you mean appendix_a" in output
    assert "starts" not in output


@pytest.mark.slow
def test_trials_that_differ_in_rates_share_their_programs(tmp_path, monkeypatch):
    after = [0]
    run = training_trials.TrainingTrials.run

    def run_and_count(self, asked):
        run(self, asked)
        after.append(count[0])

    monkeypatch.setattr(training_trials.TrainingTrials, "run", run_and_count)
    ranges = RATES | {"model.rank": {"low": 3, "high": 4, "scale": "integer"}}
    with quick.count_compilations() as count:
        records = tune(tmp_path, study=write_study(tmp_path, ranges), num_trials=3)
    ranks = [record.params["model.rank"] for record in records]
    assert len(set(ranks)) == 2  # Of three trials two share a rank.
    new = [rank not in ranks[:i] for i, rank in enumerate(ranks)]
    # Another rank is another program.
    assert [after[i] < after[i + 1] for i in range(3)] == new


@pytest.mark.slow
def test_a_workdir_belongs_to_one_study(tuned, study_file):
    workdir, _ = tuned
    with pytest.raises(
        errors.UsageError, match="belongs to the study 'test-rates', but this one is"
    ):
        tune(workdir, name="other", study=study_file)
    other = make_config(model=dict(rounds=2))
    with pytest.raises(errors.UsageError, match=r"config.model.rounds: 1 \(there\) vs 2"):
        tune(workdir, other, study_file)


WORKER = """
import sys, time
from mogrifier_jax.training import run_record
from mogrifier_jax.tuning import optuna_queue, worker
from tests.tuning import test_worker

workdir, study, doomed = sys.argv[1:]
optuna_queue.GRACE_SECONDS, worker.POLL_SECONDS = 3600.0, 0.2  # Its end is seen, not guessed.
save = run_record.RunRecord.save

def save_and_say(self, state, **info):
    save(self, state, **info)
    self.saved.wait()
    print("saved", int(state.step), self.workdir, flush=True)
    if doomed and state.step == 4:
        time.sleep(3600)  # It is killed here.

run_record.RunRecord.save = save_and_say
test_worker.tune(workdir, study=study, num_trials=2)
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

    with start("doomed") as doomed:
        assert doomed.stdout.readline().startswith("saved 0")
        with start("") as other:  # It leaves the first trial to the one that has begun it.
            line = doomed.stdout.readline()
            assert line.startswith("saved 4")
            doomed.send_signal(signal.SIGKILL)
            doomed.wait()
            folder = pathlib.Path(line.split()[2])
            output = other.communicate()[0]
    assert doomed.returncode == -signal.SIGKILL and other.returncode == 0
    queue = optuna_queue.Queue(
        storages.open_study(storages.default_storage(str(workdir)), "test-rates", _about(workdir)),
        {},
        2,
    )
    records = queue.records()
    assert [record.outcome for record in records] == ["complete"] * 2
    folders = [record.notes["folder"] for record in records]
    assert len(set(folders)) == 2 and f"trials/{folder.name}" in folders
    # It went on from step 4, and did not begin again.
    assert f"saved 8 {folder}" in output and f"saved 0 {folder}" not in output
    assert f"saved 4 {folder}" not in output
    steps = [r["step"] for r in metrics.read_metrics(folder) if r["kind"] == "eval"]
    assert steps == [0, 4, 8]


def _about(workdir):
    import optuna

    name, storage = "test-rates", storages.default_storage(str(workdir))
    return optuna.load_study(study_name=name, storage=storages.open_storage(storage)).user_attrs[
        "about"
    ]


@pytest.mark.slow
def test_dynamic_evaluation_is_tuned_on_a_trained_run(tuned):
    folder = tuned[0] / tuned[1][0].notes["folder"]
    settings = eval_options.defaults()
    with settings.unlocked():
        settings.temperature = "saved"
        settings.dyneval.update(dict(batch_size=8, max_windows=2, parallel=2))
    records = tune_mode.tune_dyneval(str(folder), settings, num_trials=2, sampler="random")
    assert len({record.params["window"] for record in records}) == 1
    assert len({record.nats for record in records}) == 2
    text = (folder / "dyneval_study" / "report.md").read_text()
    assert "--mode=evaluate --eval.methods=dyneval --eval.dyneval.window=" in text
    with pytest.raises(errors.UsageError, match="--workdir is missing"):
        tune_mode.tune_dyneval("", settings, num_trials=2)

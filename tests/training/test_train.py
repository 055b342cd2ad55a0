"""Whole runs: exact after any interruption, on any mesh, refused early, stopped in order."""

import copy
import json
import math
import os
import pathlib
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from experiments import pydoc
from mogrifier_jax import errors, partitioning
from mogrifier_jax.training import (
    checkpoints,
    metrics,
    programs,
    runs,
    train,
    turn_evaluation,
    workdirs,
)
from tests import workdir as written

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "log_every": 2,
    "data.batch_size": 8,
    "data.window": 4,
    "model.num_layers": 1,
    "model.hidden_size": 8,
    "model.rounds": 1,
    "model.rank": 2,
    "averaging.trigger_at_the_latest": 1,
    "evaluation.temperature_tokens": 64,
    "evaluation.max_windows": 2,
}
# Two turns of four steps, each in two dispatches.
FILES = {
    *("checkpoints", "config.json", "learning_curve.png", "metrics.jsonl", "results.json"),
    *("profile", "run.log", "speed.jsonl", "tensorboard", "version.json", "vocabulary.json"),
}


@pytest.fixture(autouse=True, scope="module")
def log_all():
    logging.set_verbosity(logging.INFO)


@pytest.fixture(autouse=True, scope="module")
def share_programs():
    """Runs that differ in a rate alone trace and compile once, as trials of a study do."""
    made, make = {}, programs.Programs

    def share(run):
        config = run.config.copy_and_resolve_references()
        with config.unlocked():
            del config.optimizer.learning_rate
        key = (config.to_json(sort_keys=True), run.mesh)
        if key not in made:
            made[key] = make(run)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "Programs", share)
        yield


def make_config(overrides=None):
    """The config of the tiny runs below, which differ in a few keys."""
    config = pydoc.get_config("tiny")
    with config.unlocked():
        for name, value in (SMALL | (overrides or {})).items():
            *sections, key = name.split(".")
            section = config
            for part in sections:
                section = section[part]
            section[key] = value
    return config


def records(workdir, kind, key):
    return [record[key] for record in metrics.read_metrics(workdir) if record["kind"] == kind]


def restore(config, workdir, which="latest"):
    with checkpoints.Checkpoints(workdir, read_only=True) as saved:
        return saved.restore(runs.make_run(config).abstract_state(), which=which)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The workdir of a run that nothing happened to; its second dispatch is traced."""
    workdir = tmp_path_factory.mktemp("unbroken")
    train.train_and_evaluate(make_config(), str(workdir), profile_steps="3:4")
    return workdir


@pytest.fixture
def workdir(unbroken, tmp_path):
    """A copy of it."""
    return shutil.copytree(unbroken, tmp_path / "run")


def remove_newest(workdir):
    """As if the run had been killed in its last turn."""
    for path in (workdir / "checkpoints").glob("8"):
        shutil.rmtree(path)


def assert_same_metrics(workdir, unbroken):
    assert (workdir / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_run_leaves_all_it_should(unbroken):
    assert {path.name for path in unbroken.iterdir()} == FILES
    assert records(unbroken, "train", "step") == [2, 4, 6, 8]
    assert records(unbroken, "eval", "step") == [0, 4, 8]
    assert records(unbroken, "eval", "averaged") == [False, False, True]
    results = json.loads((unbroken / "results.json").read_text())
    assert results["valid_nats"] == pytest.approx(min(records(unbroken, "eval", "valid_nats")))
    assert results["test_bpc"] == pytest.approx(results["test_nats"] / math.log(2))
    assert (unbroken / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((unbroken / "tensorboard").iterdir())
    log = (unbroken / "run.log").read_text()
    assert "best so far" in log and "stopping: all 2 turns are done" in log


@pytest.mark.slow
def test_a_trace_has_the_steps_that_were_asked_for_and_no_others(unbroken):
    (path,) = (unbroken / "profile").glob("**/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    seen = [event.name for plane in planes for line in plane.lines for event in line.events]
    programs = [re.fullmatch(r"\[(\d)\] .*\((jit_\w+)\)", name) for name in seen]
    # Each device has done one of four dispatches, and nothing else.
    found = sorted(program.groups() for program in programs if program)
    assert found == [(str(device), "jit_train_steps") for device in range(8)]


@pytest.mark.slow
def test_a_finished_run_stays_finished(workdir, unbroken):
    (workdir / "results.json").unlink()
    results = train.train_and_evaluate(make_config(), str(workdir))
    assert_same_metrics(workdir, unbroken)
    assert results == json.loads((unbroken / "results.json").read_text())


BROKEN = """
from mogrifier_jax import main
from mogrifier_jax.training import steps, turn_evaluation

def fail(*args, **options):
    raise ZeroDivisionError("inside the train step")

steps.train_step = fail
scores = turn_evaluation.Scores(1.0, 1.0, 1.0)
turn_evaluation.TurnEvaluation.__call__ = lambda self, params: scores
main.run()
"""


@pytest.mark.slow
def test_four_frames_lead_from_main_to_the_jitted_train_step(tmp_path):
    """Somebody who reads a traceback sees the whole way; what is jitted begins at train_steps."""
    command = [sys.executable, "-c", BROKEN, "--config=experiments/pydoc.py:tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "ZeroDivisionError: inside the train step" in done.stderr, done.stderr
    package = re.escape(str(ROOT / "mogrifier_jax"))
    ours = re.findall(rf'File "{package}/([\w/]+).py", line \d+, in (\w+)', done.stderr)
    way = ours[ours.index(("main", "main")) : ours.index(("training/programs", "train_steps"))]
    assert way == [
        ("main", "main"),
        ("main", "train"),
        ("training/train", "train_and_evaluate"),
        ("training/train", "train_turns"),
    ]


DRIVER = """
import os, sys
from mogrifier_jax import main
from mogrifier_jax.training import metrics

moment, number = sys.argv.pop(1).split(":")
write = metrics.MetricWriter.write

def write_and_strike(self, step, kind, **values):
    write(self, step, kind, **values)
    if f"{kind} {step}" == moment:
        os.kill(os.getpid(), int(number))

metrics.MetricWriter.write = write_and_strike
main.run()
"""


def start(workdir, moment, terminal=False):
    """The run as a command that is struck by a signal at some moment: (exit code, its output)."""
    overrides = [f"--config.{name}={value}" for name, value in SMALL.items()]
    arguments = ["--config=experiments/pydoc.py:tiny", f"--workdir={workdir}", *overrides]
    command = [sys.executable, "-c", DRIVER, moment, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if not terminal:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr
    screen, side = pty.openpty()
    termios.tcsetwinsize(side, (30, 120))
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=side, stdout=side) as process:
        os.close(side)
        shown = b""
        try:
            while piece := os.read(screen, 4096):
                shown += piece
        except OSError:  # How the end of a terminal is told.
            pass
    os.close(screen)
    return process.returncode, shown.decode()


@pytest.mark.slow
def test_a_run_killed_again_and_again_gives_the_metrics_of_the_unbroken_one(tmp_path, unbroken):
    code, output = start(tmp_path, f"train 2:{signal.SIGTERM:d}")
    assert code == errors.Interrupted.exit_code == 75, output
    assert "SIGTERM: saving and stopping" in output
    assert "Interrupted: stopped at step 2" in output and "Traceback" not in output
    # The table comes before the first turn, and without a terminal there is no bar.
    assert 0 < output.index("parameters") < output.index("turn 0/2: valid")
    assert "%|" not in output
    assert (tmp_path / "checkpoints" / "2").exists()

    code, output = start(tmp_path, f"train 6:{signal.SIGKILL:d}")
    assert code == -signal.SIGKILL, output
    assert "resuming at step 2" in output
    # Readable at any moment, and ahead of the checkpoint.
    assert records(tmp_path, "train", "step") == [2, 4, 6]
    assert not (tmp_path / "checkpoints" / "6").exists()

    code, output = start(tmp_path, "never:0", terminal=True)
    assert code == 0, output
    assert "%|" in output and "tok/s" in output and "learning_curve.png" in output
    assert_same_metrics(tmp_path, unbroken)
    assert (tmp_path / "results.json").read_bytes() == (unbroken / "results.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("train", 4), ("eval", 4)])
def test_a_stop_around_an_evaluation_is_in_order(tmp_path, unbroken, monkeypatch, moment):
    write = metrics.MetricWriter.write

    def write_and_signal(self, step, kind, **values):
        write(self, step, kind, **values)
        if (kind, step) == moment:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.MetricWriter, "write", write_and_signal)
        with pytest.raises(errors.Interrupted, match="stopped at step 4, saved in"):
            train.train_and_evaluate(make_config(), str(tmp_path))
    assert written.latest_step(tmp_path) == 4
    train.train_and_evaluate(make_config(), str(tmp_path))
    assert_same_metrics(tmp_path, unbroken)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(workdir, unbroken, caplog):
    for path in (workdir / "checkpoints" / "8" / "state").glob("**/d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    train.train_and_evaluate(make_config(), str(workdir))
    assert "checkpoint of step 8 is damaged" in caplog.text
    assert "resuming at step 4" in caplog.text
    assert_same_metrics(workdir, unbroken)


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices(workdir, unbroken, monkeypatch):
    remove_newest(workdir)
    mesh = partitioning.make_mesh(1, 2, devices=jax.devices()[:2])
    monkeypatch.setattr(partitioning, "make_mesh", lambda data, model: mesh)
    train.train_and_evaluate(make_config({"mesh.data": 1, "mesh.model": 2}), str(workdir))
    for kind, key in (("train", "loss_nats"), ("train", "grad_norm"), ("eval", "valid_nats")):
        here, there = records(workdir, kind, key), records(unbroken, kind, key)
        np.testing.assert_allclose(here, there, rtol=1e-5)
        assert abs(there[-1] / there[-2] - 1) > 1e-3  # Or else any would do.


@pytest.mark.slow
def test_another_config_is_refused_with_the_difference(workdir):
    with pytest.raises(errors.UsageError) as refused:
        train.train_and_evaluate(
            make_config({"optimizer.learning_rate": 0.5, "model.rank": 3}), str(workdir)
        )
    assert "model.rank: 2 (in the workdir) vs 3 (requested)" in str(refused.value)
    assert "learning_rate: 0.004 (in the workdir) vs 0.5 (requested)" in str(refused.value)
    assert "log_every" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "vocabulary.json").write_text('{"tok'), "vocabulary.json"),
        (lambda path: (path / "config.json").write_text('{"seed'), "config.json is not valid JSON"),
        (lambda path: (path / "config.json").unlink(), "has checkpoints but no config.json"),
    ],
)
def test_a_damaged_workdir_is_refused(workdir, damage, words):
    damage(workdir)
    before = (workdir / "metrics.jsonl").read_bytes()
    with pytest.raises(errors.UsageError, match=words):
        train.train_and_evaluate(make_config(), str(workdir))
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_run_that_diverges_says_so_and_keeps_what_is_good(workdir):
    remove_newest(workdir)
    (workdir / "config.json").unlink()
    config = make_config({"optimizer.learning_rate": 1e30})
    workdirs.write_run_files(workdir, config, workdirs.read_vocabulary(workdir))
    with pytest.raises(errors.Diverged) as stopped:
        train.train_and_evaluate(config, str(workdir))
    assert stopped.value.exit_code == 3
    for words in (
        "the loss of step 6",
        "is from step 4",
        "learning_rate (now 1e+30)",
    ):
        assert words in str(stopped.value)
    assert math.isnan(float(metrics.read_metrics(workdir)[-1]["loss_nats"]))
    for which in ("latest", "best"):
        good = restore(config, workdir, which)
        assert good.step == 4
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(good.state.params))


def change_steps(monkeypatch, change):
    """The state after every dispatch is changed by a function of it."""
    make = programs.Programs

    def make_changed(run):
        compiled = copy.copy(make(run))
        train_steps = compiled.train_steps

        def train_and_change(*args, **options):
            state, measured = train_steps(*args, **options)
            return change(state), measured

        compiled.train_steps = train_and_change
        return compiled

    monkeypatch.setattr(programs, "Programs", make_changed)


@pytest.mark.slow
def test_broken_weights_are_not_saved(tmp_path, monkeypatch):
    """A stop may be asked for between the step that breaks them and the loss that shows it."""

    def break_weights(state):
        signal.raise_signal(signal.SIGTERM)
        return state.replace(params=jax.tree.map(lambda p: p * jnp.nan, state.params))

    change_steps(monkeypatch, break_weights)
    with pytest.raises(errors.Diverged, match=r"a weight is not finite.* is from step 0"):
        train.train_and_evaluate(make_config(), str(tmp_path))
    assert written.latest_step(tmp_path) == 0


@pytest.mark.slow
def test_an_evaluation_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    scores = turn_evaluation.Scores(train_nats=1.0, valid_nats=math.inf, temperature=1.0)
    monkeypatch.setattr(turn_evaluation.TurnEvaluation, "__call__", lambda self, params: scores)
    message = "validation cross-entropy of turn 0 is not finite; .* has no checkpoint yet"
    with pytest.raises(errors.Diverged, match=message):
        train.train_and_evaluate(make_config(), str(tmp_path))
    assert written.latest_step(tmp_path) is None


@pytest.mark.slow
def test_the_average_begins_when_it_should_and_is_what_is_evaluated(
    tmp_path, unbroken, monkeypatch, caplog
):
    trained, evaluated = [], []
    evaluate_weights = turn_evaluation.TurnEvaluation.__call__

    def note_trained(state):
        trained.append(jax.device_get(state.params))
        return state

    def note_evaluated(self, params):
        evaluated.append(jax.device_get(params))
        return evaluate_weights(self, params)

    change_steps(monkeypatch, note_trained)
    monkeypatch.setattr(turn_evaluation.TurnEvaluation, "__call__", note_evaluated)
    train.train_and_evaluate(make_config({"log_every": 1}), str(tmp_path))
    assert len(trained) == 8 and len(evaluated) == 3

    def assert_equal(a, b, **tolerance):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)

    # Until its turn is over the weights are evaluated as they are.
    assert_equal(evaluated[1], trained[3], rtol=0)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0, dtype=np.float64), *trained[4:])
    assert_equal(evaluated[2], mean, rtol=1e-5, atol=1e-6)
    moved = abs(trained[7]["embedding"] - evaluated[2]["embedding"]).max()
    assert moved > 1e-3  # The last weights are not the mean.
    assert "averaging starts" in caplog.text
    # How often a run reports does not change what it computes.
    for key in ("valid_nats", "train_nats"):
        here, there = records(tmp_path, "eval", key), records(unbroken, "eval", key)
        np.testing.assert_allclose(here, there, rtol=1e-6)
    assert records(tmp_path, "train", "step") == list(range(1, 9))


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The workdir of a run on lines that stand alone, with two-tailed averaging."""
    workdir = tmp_path_factory.mktemp("lines")
    config = make_config(
        {
            "averaging.kind": "two_tailed",
            "data.episodic": True,
            "data.window": 10,
            "model.trainable_initial_state": True,
        }
    )
    return config, workdir, train.train_and_evaluate(config, str(workdir))


@pytest.mark.slow
def test_two_tailed_averaging_runs_to_the_end(lines):
    config, workdir, results = lines
    assert records(workdir, "eval", "averaged") == [False, True, True]
    assert {path.name for path in workdir.iterdir()} == FILES - {"profile"}
    assert results["valid_nats"] == pytest.approx(min(records(workdir, "eval", "valid_nats")))
    average = restore(config, workdir).state.average
    # Each evaluation was won by the short tail, which went on from there as the long one.
    assert (int(average.short.n), int(average.long.n)) in {(0, 4), (0, 8), (4, 8), (8, 8)}


@pytest.mark.slow
def test_lines_that_stand_alone_train_their_initial_state(lines):
    config, workdir, _ = lines
    state = restore(config, workdir).state
    assert state.carry == ()
    for leaf in jax.tree.leaves(state.params["stack"]["initial_state"]):
        assert abs(leaf).min() > 1e-3  # They began as zeros.


@pytest.mark.slow
def test_the_learning_rate_drops_and_the_run_stops_when_nothing_improves(
    tmp_path, unbroken, caplog
):
    config = make_config(
        {
            "optimizer.learning_rate": 1e-30,
            "schedule.turns": 9,
            "schedule.drop_learning_rate_turns": 0,
            "schedule.drop_learning_rate_multiplier": 0.5,
            "schedule.early_stopping_turns": 2,
        }
    )
    results = train.train_and_evaluate(config, str(tmp_path))
    rates = np.array(records(tmp_path, "train", "learning_rate"))
    np.testing.assert_allclose(rates, [*[1e-30] * 2, *[5e-31] * 2, *[2.5e-31] * 2])
    assert results["best_turn"] == 0 and len(records(tmp_path, "eval", "step")) == 4
    assert "stopping: no improvement since turn 0" in caplog.text
    # Metrics are not the same whatever is done.
    assert records(tmp_path, "eval", "valid_nats")[2] != records(unbroken, "eval", "valid_nats")[2]
    # And it stays where it stopped.
    before = (tmp_path / "metrics.jsonl").read_bytes()
    train.train_and_evaluate(config, str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_changed_text_is_not_trained_on(tmp_path):
    """The lines of a file are reversed between two starts: what was test would be trained on."""
    lines = [f"{'abc'[i % 3] * (i % 7 + 1)} d\n" for i in range(400)]
    (tmp_path / "book.txt").write_text("".join(lines))
    config = make_config({"data.name": "text", "data.path": str(tmp_path / "book.txt")})
    with config.unlocked():
        config.data.data_dir = str(tmp_path / "data")
    train.train_and_evaluate(config, str(tmp_path / "run"))
    remove_newest(tmp_path / "run")
    (tmp_path / "book.txt").write_text("".join(lines[::-1]))
    with pytest.raises(errors.UsageError, match="train, valid, test has changed; restore the text"):
        train.train_and_evaluate(config, str(tmp_path / "run"))
    (tmp_path / "book.txt").write_text("".join(lines))  # Control.
    assert train.train_and_evaluate(config, str(tmp_path / "run"))["step"] > 0

"""Whole runs with what arXiv:2211.01848 adds: exact after an interruption, and on any mesh."""

import json
import shutil

import jax
import numpy as np
import pytest

from experiments import pydoc
from mogrifier_jax import errors, partitioning
from mogrifier_jax.training import metrics, run_record, train

CHANGES = {
    "log_every": 2,
    "data.batch_size": 8,
    "data.window": 4,
    "data.drop_state_probability": 0.1,
    "model.cell": "rewired_lstm",
    "model.num_layers": 2,
    "model.hidden_size": 8,
    "model.rounds": 1,
    "model.rank": 2,
    "model.output": "residual",
    "model.layer_norm": False,
    "model.chrono_max": 20.0,
    "dropout.state": 0.2,
    "dropout.output": 0.2,
    "dropout.cell_output": 0.2,
    "optimizer.name": "radam",
    "optimizer.training_samples": 3,
    "averaging.kind": "two_tailed",
    "averaging.stagnating_evaluations": 1,
    "schedule.turns": 3,
    "schedule.steps_per_turn": 4,
    "evaluation.temperature_tokens": 64,
    "evaluation.max_windows": 2,
}


def run(workdir, **changes):
    config = pydoc.get_config("tiny")
    with config.unlocked():
        for name, value in (CHANGES | changes).items():
            *sections, key = name.split(".")
            section = config
            for part in sections:
                section = section[part]
            section[key] = value
    return train.train_and_evaluate(config, str(workdir))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    run(workdir)
    return workdir


@pytest.mark.slow
def test_a_resumed_run_has_the_same_metrics_byte_by_byte(unbroken, tmp_path):
    """As if it had been killed in its last turn."""
    workdir = shutil.copytree(unbroken, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "12")
    assert (workdir / "checkpoints" / "8").exists()
    (workdir / "results.json").unlink()
    run(workdir)
    for name in ("metrics.jsonl", "results.json"):
        assert (workdir / name).read_bytes() == (unbroken / name).read_bytes()


@pytest.mark.slow
def test_one_device_has_the_losses_of_eight(unbroken, tmp_path, monkeypatch):
    mesh = partitioning.make_mesh(1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr(partitioning, "make_mesh", lambda data, model: mesh)
    run(tmp_path, **{"mesh.data": 1})
    losses, expected = (
        [r["loss_nats"] for r in metrics.read_metrics(folder) if r["kind"] == "train"]
        for folder in (tmp_path, unbroken)
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # Another number of samples is another run.
    run(tmp_path / "two", **{"mesh.data": 1, "optimizer.training_samples": 2})
    other = [r["loss_nats"] for r in metrics.read_metrics(tmp_path / "two") if r["kind"] == "train"]
    assert abs(other[0] - losses[0]) > 1e-4


@pytest.mark.slow
def test_results_are_those_of_the_best_turn(unbroken):
    results = json.loads((unbroken / "results.json").read_text())
    valid = [r["valid_nats"] for r in metrics.read_metrics(unbroken) if r["kind"] == "eval"]
    assert results["valid_nats"] == pytest.approx(min(valid)) and len(valid) == 4


# A run that diverges.

DIVERGING = {
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 1e30,
    "optimizer.clip_norm": 0.0,
    "schedule.on_divergence": "restart",
    "schedule.restart_multiplier": 1e-10,
    "schedule.max_restarts": 3,
    "schedule.turns": 3,
}


def lines(workdir, kind):
    return [record for record in metrics.read_metrics(workdir) if record["kind"] == kind]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """A run whose learning rate is far too high until the third restart."""
    workdir = tmp_path_factory.mktemp("restarted")
    run(workdir, **DIVERGING)
    return workdir


@pytest.mark.slow
def test_a_run_that_diverges_goes_on_from_its_best_state(restarted):
    found = lines(restarted, "restart")
    assert [line["restarts"] for line in found] == [1, 2, 3]
    np.testing.assert_allclose([line["learning_rate"] for line in found], [1e20, 1e10, 1.0])
    assert {line["best_step"] for line in found} == {0}
    assert [line["step"] for line in lines(restarted, "eval")] == [0, 4, 8, 12]
    assert np.isfinite([line["valid_nats"] for line in lines(restarted, "eval")][-1])
    assert json.loads((restarted / "results.json").read_text())["step"] > 0


@pytest.mark.slow
def test_a_run_resumed_after_a_restart_has_the_same_metrics_byte_by_byte(
    restarted, tmp_path, monkeypatch
):
    """It is killed right after its second restart, and again as it saves the third."""
    seen = []
    restart = run_record.RunRecord.restart

    def killed(self, step):
        if self.progress.restarts == 3 and "before" not in seen:
            seen.append("before")
            raise SystemExit("killed")
        state = restart(self, step)
        if self.progress.restarts == 2 and "after" not in seen:
            seen.append("after")
            raise SystemExit("killed")
        return state

    monkeypatch.setattr(run_record.RunRecord, "restart", killed)
    for _ in range(2):
        with pytest.raises(SystemExit):
            run(tmp_path, **DIVERGING)
    run(tmp_path, **DIVERGING)
    assert sorted(seen) == ["after", "before"]
    for name in ("metrics.jsonl", "results.json"):
        assert (tmp_path / name).read_bytes() == (restarted / name).read_bytes()


@pytest.mark.slow
def test_restarts_are_bounded_and_off_unless_asked_for(tmp_path):
    for name, changes in {
        "bounded": {"schedule.max_restarts": 1},
        "off": {"schedule.on_divergence": "stop"},
    }.items():
        with pytest.raises(errors.Diverged, match="is not finite"):
            run(tmp_path / name, **(DIVERGING | changes))
        assert len(lines(tmp_path / name, "restart")) == (name == "bounded")

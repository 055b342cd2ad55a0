"""Whole runs with what arXiv:2211.01848 adds: exact after an interruption, and on any mesh."""

import json
import shutil

import jax
import numpy as np
import pytest

from experiments import pydoc
from mogrifier_jax import partitioning
from mogrifier_jax.training import metrics, train

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

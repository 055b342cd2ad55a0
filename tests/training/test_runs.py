import os
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from experiments import pydoc
from mogrifier_jax import errors, hardware
from mogrifier_jax.training import runs

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    "platform, devices, batch, expected",
    [("tpu", 4, 128, True), ("tpu", 4, 132, False), ("gpu", 1, 32, True), ("cpu", 4, 128, False)],
)
def test_groups_go_side_by_side_where_a_device_has_few_rows(platform, devices, batch, expected):
    chips = np.array([types.SimpleNamespace(platform=platform)] * devices)
    mesh = types.SimpleNamespace(devices=chips, shape={"data": devices})
    assert runs.few_rows(mesh, batch) == expected


@pytest.mark.parametrize("at_once, expected", [(None, True), (False, False), (True, True)])
def test_a_set_key_decides_about_groups(at_once, expected, monkeypatch):
    monkeypatch.setattr(runs, "few_rows", lambda mesh, batch_size: True)
    config = pydoc.get_config("tiny")
    config.optimizer.update(accumulate=2, accumulate_at_once=at_once)
    assert runs.make_run(config).program.accumulate_at_once == expected


@pytest.mark.parametrize(("name", "value"), [("data.batch_size", 9), ("optimizer.accumulate", 3)])
def test_cores_nobody_counted_divide_any_batch(name, value, monkeypatch):
    config = pydoc.get_config("tiny")  # Its batch has 32 stripes, which 8 devices divide.
    config.update_from_flattened_dict({"data.batch_size": 36, name: value})
    with pytest.raises(errors.UsageError, match="not a multiple of the data axis"):
        runs.make_run(config)
    monkeypatch.setattr(hardware, "counted_cores", lambda: True)
    assert runs.make_mesh(config).devices.shape == ({9: 3, 3: 6}[value], 1)
    config.mesh.data = 2
    assert runs.make_mesh(config).devices.shape == (2, 1)
    config.mesh.data = 9
    with pytest.raises(errors.UsageError, match="does not use all 8 devices"):
        runs.make_mesh(config)


# `main` on some cores; it asks itself to stop when its table is printed, or at its first metrics.
PROGRAM = """
import os, signal, sys

cores, place, name = eval(sys.argv.pop(1))
os.sched_setaffinity(0, cores)

from mogrifier_jax import main
from mogrifier_jax.training import metrics, summaries

owner = {"summaries": summaries, "metrics": metrics.MetricWriter}[place]
function = getattr(owner, name)

def call_and_stop(*args, **named):
    os.kill(os.getpid(), signal.SIGTERM)
    return function(*args, **named)

setattr(owner, name, call_and_stop)
main.run()
"""
FLAGS = (
    "--config=experiments/pydoc.py:lstm,tiny",
    "--config.data.batch_size=8",
    "--config.data.window=4",
    "--config.model.num_layers=1",
    "--config.model.hidden_size=8",
    "--config.evaluation.max_windows=2",
    "--config.evaluation.softmax_temperature=1.0",
)


TABLE, METRICS = ("summaries", "describe_run"), ("metrics", "write")


def start(workdir, *flags, cores, stop=TABLE, **environment):
    """What the table at the start of a run says of its devices, and all that the run says.

    As a user starts it, without the devices that conftest asks for.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "NPROC")}
    given = {flag.partition("=")[0] for flag in flags}
    others = [flag for flag in FLAGS if flag.partition("=")[0] not in given]
    flags = [*others, *flags, f"--workdir={workdir}"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr((cores, *stop)), *flags],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == errors.Interrupted.exit_code, done.stderr
    return re.search(r"  devices +(.*)", done.stderr)[1], done.stderr


two_cores = pytest.mark.skipif(len(hardware.usable_cores()) < 2, reason="needs two cores")


@pytest.mark.slow
@two_cores
def test_main_uses_as_many_devices_as_it_is_told_and_as_divide_the_batch(tmp_path):
    cores = hardware.usable_cores()[:2]
    told = ["--cpu_devices=1"]
    assert start(tmp_path / "a", *told, cores=cores)[0] == "1 cpu"
    told = {"JAX_NUM_CPU_DEVICES": "4"}
    assert start(tmp_path / "b", cores=cores, **told)[0] == "4 cpu"
    odd = "--config.data.batch_size=7"
    found, _ = start(tmp_path / "c", odd, cores=cores)
    assert found == "1 of 2 cpu, to divide the batch"


@pytest.mark.slow
@two_cores
def test_a_run_begun_on_two_cores_goes_on_with_one(tmp_path):
    """A device for each core is what a run has that is not told otherwise."""
    cores = hardware.usable_cores()[:2]
    found, said = start(tmp_path, cores=cores, stop=METRICS)
    assert found == "2 cpu" and "resuming" not in said
    (stopped,) = re.findall(r"stopped at step (\d+), saved", said)
    found, said = start(tmp_path, cores=cores[:1])
    assert found == "1 cpu" and f"resuming at step {stopped}" in said


@pytest.mark.slow
def test_importing_the_package_adds_no_devices():
    code = "import jax, mogrifier_jax.main, mogrifier_jax.partitioning; print(jax.device_count())"
    kept = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr

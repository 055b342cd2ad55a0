import math
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from experiments import pydoc
from mogrifier_jax import errors, partitioning
from mogrifier_jax.training import runs

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def config(monkeypatch):
    """Undoes changes of the cache's folder."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield monkeypatch
    jax.config.update("jax_compilation_cache_dir", before)


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


def test_compiled_programs_are_kept_unless_told_where(config, tmp_path):
    config.setenv("MOGRIFIER_CACHE_DIR", str(tmp_path))
    runs.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
    jax.config.update("jax_compilation_cache_dir", "mine")
    config.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    runs.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == "mine"


@pytest.mark.parametrize("text", ["5", "5:", "a:b", "0:3", "7:6", "1:2:3", "-1:4"])
def test_steps_that_cannot_be_traced(text):
    with pytest.raises(errors.UsageError, match="is not N:M"):
        runs.parse_steps(text)


@pytest.mark.parametrize(
    ("steps", "traced"),
    [
        ("1:1", [0]),
        ("4:5", [0, 4]),  # Dispatches of four steps each: 1 to 4, 5 to 8.
        ("5:8", [4]),
        ("6:13", [4, 8, 12]),
        ("99:100", []),
        (None, []),
    ],
)
def test_whole_dispatches_are_traced(steps, traced, monkeypatch, tmp_path):
    running, seen = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", running.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", running.pop)
    trace = runs.Trace(tmp_path, steps)
    for done in range(0, 20, 4):
        with trace.steps(done, 4):
            seen += [done] * len(running)
    assert seen == traced and not running


def write_group(root, listing, **files):
    """A root folder with the control groups that these files describe."""
    files = {"proc/self/cgroup": listing, **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("listing", "files", "expected"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        (
            "4:memory:/x\n1:cpuacct,cpu:/x\n",
            {
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            "1:cpu:/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
    ],
)
def test_the_quota_of_a_container_is_found(listing, files, expected, tmp_path):
    assert partitioning.quota(write_group(tmp_path, listing, **files)) == expected
    assert partitioning.quota(tmp_path / "elsewhere") == math.inf


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, [1, 4, 6]), (2.9, [1, 4]), (0.5, [1])])
def test_cores_are_those_of_affinity_and_quota(quota, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {6, 1, 4}, raising=False)
    monkeypatch.setattr(partitioning, "quota", lambda: quota)
    assert partitioning.usable_cores() == cores


@pytest.mark.parametrize(("name", "value"), [("data.batch_size", 9), ("optimizer.accumulate", 3)])
def test_cores_nobody_counted_divide_any_batch(name, value, monkeypatch):
    config = pydoc.get_config("tiny")  # Its batch has 32 stripes, which 8 devices divide.
    config.update_from_flattened_dict({"data.batch_size": 36, name: value})
    with pytest.raises(errors.UsageError, match="not a multiple of the data axis"):
        runs.make_run(config)
    monkeypatch.setattr(partitioning, "counted_cores", lambda: True)
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
from mogrifier_jax.training import metrics, progress

owner = {"progress": progress, "metrics": metrics.MetricWriter}[place]
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


TABLE, METRICS = ("progress", "describe_run"), ("metrics", "write")


def start(workdir, *flags, cores, stop=TABLE, **environment):
    """What the table at the start of a run says of its devices, and all that the run says.

    As a user starts it, without the devices that conftest asks for.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "NPROC")}
    flags = [*FLAGS, *flags, f"--workdir={workdir}"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr((cores, *stop)), *flags],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == errors.Interrupted.exit_code, done.stderr
    return re.search(r"  devices +(.*)", done.stderr)[1], done.stderr


two_cores = pytest.mark.skipif(len(partitioning.usable_cores()) < 2, reason="needs two cores")


@pytest.mark.slow
@two_cores
def test_main_uses_as_many_devices_as_it_is_told_and_as_divide_the_batch(tmp_path):
    cores = partitioning.usable_cores()[:2]
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
    cores = partitioning.usable_cores()[:2]
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

"""Whole runs whose workdir is in a bucket, killed and resumed, against one on a disk."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from tests import object_store

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = [
    *("--config=pydoc:tiny", "--cpu_devices=1", "--config.schedule.turns=6"),
    *("--config.schedule.steps_per_turn=10", "--config.log_every=5"),
]
# Files are looked at often, because the run is over in seconds.
PROGRAM = "from mogrifier_jax import buckets, main; buckets.PAUSE = buckets.BEAT = 0.2; main.run()"


def start(*flags, environment, **options):
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) | options
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        **options,
    )


def finish(*flags, environment):
    process = start(*flags, environment=environment)
    said, _ = process.communicate(timeout=600)
    return process.returncode, said


class KillingStore(object_store.ObjectStore):
    """Kills a process when it has sent some number of requests."""

    victim, left = None, 0

    def count_down(self):
        self.left -= 1
        if self.left == 0 and self.victim is not None:
            os.kill(self.victim.pid, signal.SIGKILL)


@pytest.fixture
def store(monkeypatch, tmp_path):
    answer = object_store.Handler.answer

    def count(handler, act):
        handler.server.count_down()
        answer(handler, act)

    monkeypatch.setattr(object_store.Handler, "answer", count)
    server = KillingStore("runs")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.variables = server.environment | {"MOGRIFIER_CACHE_DIR": str(tmp_path / "cache")}
    yield server
    server.shutdown()
    server.server_close()


def read(store, name):
    return store.objects["runs"][name][0]


@pytest.mark.slow
def test_a_killed_run_in_a_bucket_writes_what_one_on_a_disk_writes(store, tmp_path):
    disk = tmp_path / "disk"
    code, said = finish(*FLAGS, f"--workdir={disk}", environment=store.variables)
    assert code == 0, said
    in_bucket = [*FLAGS, "--workdir=gs://runs/x"]
    kills = int(os.environ.get("MOGRIFIER_TEST_KILLS", "2"))
    for number in range(kills):
        process = start(*in_bucket, environment=store.variables)
        store.victim, store.left = process, 6 + 14 * number
        said, _ = process.communicate(timeout=600)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, said
    else:
        store.victim = None
        code, said = finish(*in_bucket, environment=store.variables)
        assert code == 0, said
    for name in ("metrics.jsonl", "results.json"):
        assert read(store, f"x/{name}") == (disk / name).read_bytes()
    starts = json.loads(read(store, "x/version.json"))
    assert len(starts) > 1 or number > 0  # It really was interrupted.
    assert "x/.lease" not in store.objects["runs"]


@pytest.mark.slow
def test_two_processes_share_a_bucket_and_no_disk(store, tmp_path):
    """Also with a carry that is split between them, and resumed by one process."""
    flags = [*FLAGS, "--workdir=gs://runs/y"]
    command = ["-m", "mogrifier_jax.launch", "--processes=2", "--restarts=0", "--", *flags]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | store.variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(read(store, "y/results.json"))
    assert results["step"] == 60
    assert any(name.startswith("y/checkpoints/60/state/") for name in store.objects["runs"])
    code, said = finish(*flags, environment=store.variables)
    assert code == 0 and "stopping: all 6 turns are done" in said, said
    assert json.loads(read(store, "y/results.json"))["valid_nats"] == pytest.approx(
        results["valid_nats"], rel=1e-5
    )

"""Many processes as one run. The slow tests start real ones, with gloo between them."""

import ast
import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import jax
import numpy as np
import pytest

from mogrifier_jax import configs, distributed, errors, launch, partitioning
from mogrifier_jax.training import host_arrays, metrics, train
from tests import golden_run, old_workdir

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 16  # Of each of two turns.
FLAGS = (
    "--config=experiments/pydoc.py:lstm,tiny",
    "--config.seed=3",
    "--config.data.batch_size=12",
    "--config.evaluation.lines_per_stripe=10",
    "--config.model.num_layers=1",
    "--config.model.hidden_size=8",
    # Small enough that rounding, which differs from mesh to mesh, does not grow.
    "--config.optimizer.learning_rate=1e-4",
    "--config.schedule.turns=2",
    f"--config.schedule.steps_per_turn={STEPS}",
    "--config.log_every=1",
    "--config.evaluation.softmax_temperature=1.0",
)


def place_of(environment, **arguments):
    return distributed.find_cluster(**arguments, environment=environment)


def test_alone_unless_told_otherwise():
    assert place_of({"JAX_PLATFORMS": "cpu"}) is None
    assert place_of({"JAX_PLATFORMS": "cpu", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert place_of({"TPU_WORKER_HOSTNAMES": "a,b"}, num_processes=1) is None


def test_place_from_arguments_beats_the_environment():
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
    place = place_of(slurm, coordinator="10.0.0.2:1234", num_processes=2, process_id=1)
    assert place == ("10.0.0.2:1234", 2, 1, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1", None, None), "belong together: give all three"),
        (("a", 2, 0), "'a' is not host:port"),
        (("a:1", 2, 2), "counted from 0 to 1"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(errors.UsageError, match=message):
        distributed.find_cluster(*arguments, environment={})


def test_place_in_an_indexed_job():
    job = {"JAX_COORDINATOR_ADDRESS": "run-0.run:1234", "JAX_NUM_PROCESSES": "8"}
    assert place_of(job | {"JOB_COMPLETION_INDEX": "5"}) == ("run-0.run:1234", 8, 5, None)
    assert place_of(job | {"JAX_PROCESS_ID": "0"}) == ("run-0.run:1234", 8, 0, None)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[017-020,031]", "gpu017"), ("n1,n2", "n1"), ("host-a[3,5]", "host-a3"), ("one", "one")],
)
def test_place_in_slurm(nodes, first):
    job = {
        "SLURM_JOB_ID": "4097",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": "16",
        "SLURM_NNODES": "4",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
    }
    assert place_of(job) == (f"{first}:61441", 16, 6, (2,))
    # One task has a node to itself: it takes all devices of it.
    assert place_of(job | {"SLURM_NNODES": "16"}) == (f"{first}:61441", 16, 6, None)


def test_a_tpu_pod_asks_its_own_environment():
    assert place_of({"TPU_WORKER_HOSTNAMES": "a,b"}) == (None, None, None, None)


def call_roll(*numbers, count, timeout):
    """What each of these processes hears, as threads of this one."""
    address = f"127.0.0.1:{launch._free_port()}"
    heard = {}

    def call(thread, number):
        try:
            distributed.roll_call(distributed.Cluster(address, count, number), timeout)
            heard[thread] = "all here"
        except distributed.PeerLost as error:
            heard[thread] = str(error)

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [heard[thread] for thread in range(len(numbers))]


def test_roll_call():
    assert call_roll(2, 1, 0, count=3, timeout=300.0) == ["all here"] * 3


@pytest.mark.slow
def test_roll_call_names_who_is_missing():
    with concurrent.futures.ThreadPoolExecutor() as pool:  # It waits longer than it is told to.
        alone = pool.submit(call_roll, 1, count=2, timeout=0.1)
        for message in call_roll(0, 2, count=5, timeout=2.0):
            assert "processes 1, 3, 4 did not report within 2 s" in message
    (message,) = alone.result()
    assert "process 0 did not answer" in message


def test_roll_call_notices_a_number_given_twice():
    for message in call_roll(0, 1, 1, count=3, timeout=300.0):
        assert "two processes claim to be process 1" in message


STRANGE = (
    b"5\n",
    b"null\n",
    b"[[1],2]\n",
    b"[" * 5000 + b"\n",
    b"[7, 2]\n",
    b"[1, 9]\n",
    b"",
    b"[1,",
)


def test_roll_call_is_not_harmed_by_strangers():
    port = launch._free_port()
    place = distributed.Cluster(f"127.0.0.1:{port}", 2, 0)
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor() as pool:
        called = pool.submit(distributed.roll_call, place, 300.0)
        for message in STRANGE:  # They stay, and the last one never ends its line.
            while True:
                try:
                    guest = socket.create_connection(("127.0.0.1", port))
                    break
                except ConnectionRefusedError:
                    assert not called.done()
            stack.enter_context(guest).sendall(message)
        distributed.roll_call(place._replace(process_id=1), 300.0)
        called.result()


def test_roll_call_listens_where_it_is_told_to():
    with distributed._listen(
        distributed.Cluster(f"127.0.0.1:{launch._free_port()}", 2, 0)
    ) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(errors.UsageError, match="process 0 cannot listen at"):
        distributed._listen(distributed.Cluster(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0))


@pytest.mark.parametrize(
    "variables",
    [
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
        {"JAX_COORDINATOR_ADDRESS": "a:99999", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
        {"SLURM_NTASKS": "x", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"},
    ],
)
def test_broken_variables_of_a_launcher(variables):
    with pytest.raises(errors.UsageError):
        place_of(variables)


@pytest.mark.parametrize("timeout", [math.nan, 0.0, math.inf])
def test_a_peer_timeout_that_cannot_be(timeout):
    with (
        pytest.raises(errors.UsageError, match="peer_timeout"),
        distributed.session(None, peer_timeout=timeout),
    ):
        pass


# Python runs this first in every process of `main`. What other platforms would be given is not
# traced. One of the processes sends itself a signal, once, as soon as it has done a step and a
# file is there; from then on it takes its time, and so do the others, who wait for it in every
# step: they hear of the signal long before the end.
SITE = """
import json, os, pathlib, sys, time

def strike_in(metrics):
    write = metrics.MetricWriter.write

    def write_and_strike(self, step, kind, **values):
        write(self, step, kind, **values)
        if struck.exists():
            time.sleep(0.5)
        elif (step, kind) == (plan["step"], "train"):
            while not os.path.exists(plan["file"]):
                time.sleep(0.05)
            struck.touch()
            os.kill(os.getpid(), plan["signal"])

    metrics.MetricWriter.write = write_and_strike

plan = json.loads(os.environ["STRIKE"])
struck = pathlib.Path(__file__).with_name("struck")
if "mogrifier_jax.main" in sys.orig_argv:
    if f"--process_id={plan.get('process')}" in sys.orig_argv and not struck.exists():
        from mogrifier_jax.training import metrics
        strike_in(metrics)
"""


def launch_main(processes, *flags, folder=ROOT, restarts=0, strike=None):
    """`main` as several processes: the exit code, and what was said and printed."""
    with tempfile.TemporaryDirectory() as site:
        (pathlib.Path(site) / "sitecustomize.py").write_text(SITE)
        plan = {"PYTHONPATH": f"{site}:{ROOT}", "STRIKE": json.dumps(strike or {})}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "mogrifier_jax.launch", f"--processes={processes}"),
                *(f"--restarts={restarts}", "--wait=0", "--grace=3600", "--", *flags),
            ],
            cwd=folder,
            env=os.environ | plan,
            capture_output=True,
            text=True,
        )
    return done.returncode, done.stderr, done.stdout


def launch_train(processes, workdir, *flags, **options):
    return launch_main(processes, *FLAGS, f"--workdir={workdir}", *flags, **options)[:2]


def losses(workdir):
    records = metrics.read_metrics(workdir)
    trained = [(r["step"], r["loss_nats"]) for r in records if r["kind"] == "train"]
    evaluated = [(r["step"], r["valid_nats"]) for r in records if r["kind"] == "eval"]
    return np.array(trained + evaluated)


def train_here(workdir):
    """The same run in this process, on one device."""
    config = configs.load_config(str(ROOT / FLAGS[0].removeprefix("--config=")))
    for flag in FLAGS[1:]:
        name, _, value = flag.removeprefix("--config.").partition("=")
        config.update_from_flattened_dict({name: ast.literal_eval(value)})
    mesh = partitioning.make_mesh(devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioning, "make_mesh", lambda data, model: mesh)
        train.train_and_evaluate(config, str(workdir))
    return losses(workdir)


@pytest.mark.slow
def test_processes_stop_together_and_start_again_and_others_go_on(tmp_path):
    """Losses are those of one process that nothing happened to, whatever happens to several."""
    unbroken = train_here(tmp_path / "unbroken")
    assert unbroken.shape == (2 * STEPS + 3, 2)
    # Steps are told apart by far more than what is allowed between meshes.
    assert np.abs(np.diff(unbroken[: 2 * STEPS, 1])).min() > 1e-5

    # Three processes, of which one is asked to stop.
    workdir = tmp_path / "broken"
    strike = dict(process=2, step=3, file="/", signal=signal.SIGTERM)
    code, said = launch_train(3, workdir, strike=strike)
    assert code == errors.Interrupted.exit_code, said
    stopped = set(re.findall(r"Interrupted: stopped at step (\d+)", said))
    assert len(stopped) == 1 and 3 <= int(*stopped) < STEPS, said

    # Two go on, of which one is killed; both start again.
    saved = str(workdir / "checkpoints" / str(STEPS))
    strike = dict(process=1, step=STEPS + 4, file=saved, signal=signal.SIGKILL)
    # A machine that is too busy for a sign of life in time costs a restart, not the run.
    code, said = launch_train(2, workdir, "--peer_timeout=10", strike=strike, restarts=100)
    assert code == 0, said
    before, _, after = said.partition("starting again")
    assert f"resuming at step {int(*stopped)}" in before, said
    # The other one has noticed by itself: nobody had to end it.
    assert "PeerLost: process 1 has been silent for" in said and "still running" not in said
    assert re.search(r"process 1 \(pid \d+\) was ended by SIGKILL", said), said
    assert f"resuming at step {STEPS}" in after, said
    # Before and after, several processes have trained as one, and what they said they said once.
    np.testing.assert_allclose(losses(workdir), unbroken, rtol=2e-6)
    assert said.count("── model ──") == 1 + said.count("starting again")
    assert json.loads((workdir / "results.json").read_text())["step"] in (0, STEPS, 2 * STEPS)

    # One goes on, as if the two had been killed in the last turn.
    shutil.rmtree(workdir / "checkpoints" / str(2 * STEPS))
    np.testing.assert_allclose(train_here(workdir), unbroken, rtol=2e-6)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (0, "process 1, 2 has other flags or files than process 0"),
        (1, "process 1 differs from process 0 in the text of valid ('b' instead of 'a')"),
    ],
)
def test_processes_that_differ_are_named(index, words, monkeypatch):
    values = {"config.seed": 1, "the text of valid": "ab"[index]}
    first = json.dumps({"config.seed": "1", "the text of valid": "'a'"})
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(host_arrays, "broadcast", lambda _: first)
    gather = "process_allgather"
    monkeypatch.setattr(host_arrays.multihost_utils, gather, lambda own: np.array([False] * 3))
    if not index:
        host_arrays.check_same(values)  # Control.
    monkeypatch.setattr(
        host_arrays.multihost_utils, gather, lambda own: np.array([False, True, True])
    )
    with pytest.raises(errors.UsageError, match=re.escape(words)):
        host_arrays.check_same(values)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["text", "seed"])
def test_processes_with_different_texts_or_flags_do_not_train(tmp_path, what):
    lines = [f"{'abc'[i % 3] * (i % 7 + 1)} {i % 11}\n" for i in range(600)]
    coordinator = f"--coordinator=127.0.0.1:{launch._free_port()}"
    started = []
    for index in range(2):
        folder = tmp_path / str(index)
        folder.mkdir()
        changed = what == "text" and index
        (folder / "book.txt").write_text("".join(lines[::-1] if changed else lines))
        flags = ["--config=text:tiny", "--config.data.path=book.txt", f"--workdir={tmp_path}/run"]
        flags += ["--config.data.data_dir=prepared", coordinator, "--num_processes=2"]
        flags += [f"--process_id={index}", f"--config.seed={1 + index * (what == 'seed')}"]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "mogrifier_jax.main", *flags],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], said
    expected = "config.seed (2 instead of 1)" if what == "seed" else "in the text of test"
    assert "process 1 has other flags or files" in said[0] and expected in said[1], said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


EXPECTED = json.loads(old_workdir.EXPECTED.read_text())


@pytest.fixture
def old_run(tmp_path):
    """A folder with a trained run, of which is known what one process makes of it."""
    with golden_run.inside(tmp_path) as folder:
        shutil.copytree(old_workdir.WORKDIR, folder / "run")
        yield folder


@pytest.mark.slow
def test_two_processes_evaluate_as_one(old_run):
    """Also with dropout, and adapting to the text, by steps that do not make rounding grow."""
    calm = {"dyneval.epsilons": "1e-2"}
    alone = shutil.copytree(old_run / "run", old_run / "alone")
    expected = EXPECTED["evaluate"] | old_workdir.evaluate(alone, methods="dyneval", **calm)
    options = old_workdir.OPTIONS | calm
    flags = [f"--eval.{name}={value}" for name, value in options.items()]
    code, said, _ = launch_main(2, "--mode=evaluate", "--workdir=run", *flags, folder=old_run)
    assert code == 0, said
    evaluation = json.loads((old_run / "run" / "evaluation.json").read_text())
    assert evaluation["versions"]["processes"] == 2
    found = {row["method"]: row["nats"] for row in evaluation["results"]}
    assert found == pytest.approx(expected, rel=1e-5)
    assert np.diff(sorted(found.values())).min() > 1e-3  # Each is told from the others.


@pytest.mark.slow
def test_two_processes_draw_what_one_draws_and_print_it_once(old_run):
    flags = ["--prompt=the ", "--length=40", "--temperature=0.8", "--num_samples=2", "--seed=3"]
    code, said, printed = launch_main(2, "--mode=sample", "--workdir=run", *flags, folder=old_run)
    assert code == 0, said
    first, second = EXPECTED["use"]["drawn"]
    assert printed.endswith(f"--- sample 1\n{first}\n--- sample 2\n{second}\n")
    assert printed.count("--- sample 1") == 1 and first != second

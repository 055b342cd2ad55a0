"""The files of launch/, with stand-ins for gcloud, Slurm, pip and Python that note their calls."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
JOBSETS = {"jobset.yaml": "google.com/tpu", "jobset_gpu.yaml": "nvidia.com/gpu"}

# Each stand-in adds its name and arguments to the file `calls`, with separators of ASCII.
NOTE = """#!/usr/bin/env bash
{ printf "${0##*/}"; (($# == 0)) || printf "\\x1f%s" "$@"; printf "\\x1e"; } >> "$CALLS"
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Makes programs that come first on PATH; returns how to run a script with them."""
    monkeypatch.delenv("PYTHON", raising=False)  # `make test PYTHON=...` sets it, too.
    programs = tmp_path / "programs"
    programs.mkdir()
    calls = tmp_path / "calls"

    def add(name, body=""):
        (programs / name).write_text(NOTE + body)
        (programs / name).chmod(0o755)

    def run(script, *arguments, **environment):
        calls.write_text("")
        path = f"{programs}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(LAUNCH / script), *arguments],
            cwd=environment.pop("cwd", tmp_path),
            env=os.environ | {"PATH": path, "CALLS": str(calls)} | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, [call.split("\x1f") for call in calls.read_text().split("\x1e")[:-1]]

    run.add = add
    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_without_arguments_says_how_it_is_used(script, stand_ins):
    done, calls = stand_ins(script.name)
    assert done.returncode == 2
    assert f"launch/{script.name} " in done.stderr
    assert not calls and os.access(script, os.X_OK)


# Slurm.


def run_slurm(stand_ins, tmp_path, code, *arguments, state="RUNNING", **environment):
    stand_ins.add("srun", f"exit {code}\n")
    stand_ins.add(
        "scontrol", f'[[ $1 == show ]] && echo "JobId=7 JobState={state} Requeue=1" || true\n'
    )
    return stand_ins("slurm.sh", *arguments, SLURM_JOB_ID="7", **environment)


@pytest.mark.parametrize("code", [75, 134, 137, 143])
def test_an_interrupted_job_is_queued_again(stand_ins, tmp_path, code):
    done, calls = run_slurm(stand_ins, tmp_path, code, "--config=x")
    assert done.returncode == 0
    assert ["scontrol", "requeue", "7"] in calls


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_a_job_that_finished_or_failed_is_not(stand_ins, tmp_path, code):
    done, calls = run_slurm(stand_ins, tmp_path, code, "--config=x")
    assert done.returncode == code
    assert [call[0] for call in calls] == ["srun"]


def test_a_cancelled_job_does_not_come_back(stand_ins, tmp_path):
    done, calls = run_slurm(stand_ins, tmp_path, 75, "--config=x", state="COMPLETING")
    assert done.returncode == 75
    assert ["scontrol", "requeue", "7"] not in calls


def test_a_job_is_not_queued_for_ever(stand_ins, tmp_path):
    done, calls = run_slurm(stand_ins, tmp_path, 137, "--config=x", SLURM_RESTART_COUNT="100")
    assert done.returncode == 137
    assert ["scontrol", "requeue", "7"] not in calls


def test_a_task_gets_all_cores_of_its_node_and_a_worker_each_gpu(stand_ins, tmp_path):
    _, (call,) = run_slurm(stand_ins, tmp_path, 0, "--config=x", SLURM_CPUS_ON_NODE="12")
    assert "--cpus-per-task=12" in call
    assert call[-4:] == ["-u", "-m", "mogrifier_jax.main", "--config=x"]
    _, (call,) = run_slurm(stand_ins, tmp_path, 0, "--mode=tune", SLURM_GPUS_ON_NODE="4")
    assert call[-3:] == ["--mode=tune", "--num_processes=1", "--parallel=4"]


# TPU VMs.

# A slice that goes through the states in the file `states`, one for each time somebody asks, and
# workers whose training ends with the codes in the file `codes`.
GCLOUD = """
next() { head -n 1 "$1"; sed -i 1d "$1"; }
case "$*" in
*"queued-resources describe"*)
  state=$(next "$FOLDER/states")
  [[ $state != NONE ]] && echo "$state" ;;
*"tpu-vm describe"*) exit 1 ;;
*" create "*) exit "$([[ -s $FOLDER/creates ]] && next "$FOLDER/creates" || echo 0)" ;;
*"queued-resources delete"*) [[ ! -e $FOLDER/unqueued ]] ;;
*mogrifier_jax.main*) exit "$(next "$FOLDER/codes")" ;;
esac
"""


def run_pod(stand_ins, tmp_path, states, codes, **environment):
    (tmp_path / "states").write_text("\n".join(states) + "\n")
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    stand_ins.add("gcloud", GCLOUD)
    arguments = ["slice", "zone", "/runs/x", "--config=experiments/enwik8.py:lstm,48m"]
    environment = {"FOLDER": str(tmp_path), "PAUSE": "0"} | environment
    done, calls = stand_ins("tpu_pod.sh", *arguments, **environment)
    assert all("--zone=zone" in call for call in calls)
    deeds = [" ".join(call[3:5]) for call in calls if "describe" not in call]
    return done, deeds, calls


def test_a_slice_is_asked_for_and_waited_for_and_used_and_deleted(stand_ins, tmp_path):
    states = ["NONE", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "ACTIVE"]
    done, deeds, calls = run_pod(stand_ins, tmp_path, states, [0])
    assert done.returncode == 0, done.stderr
    assert deeds == [
        "queued-resources create",
        "tpu-vm scp",
        *["tpu-vm ssh"] * 2,
        "queued-resources delete",
    ]
    (created,) = [call for call in calls if "create" in call]
    assert {"--spot", "--node-id=slice", "--accelerator-type=v5litepod-16"} <= set(created)
    install, train = [call[-2] for call in calls if "ssh" in call]
    assert "launch/install.sh tpu" in install
    (command,) = re.findall(r"(-m mogrifier_jax.main .*?);", train)
    flags = shlex.split(command)[2:]
    assert flags == ["--config=experiments/enwik8.py:lstm,48m", "--workdir=/runs/x"]


def test_a_preempted_slice_is_asked_for_again(stand_ins, tmp_path):
    states = ["ACTIVE", "SUSPENDED", "SUSPENDED", "NONE", "ACTIVE", "ACTIVE"]
    done, deeds, _ = run_pod(stand_ins, tmp_path, states, [255, 0], KEEP="yes")
    assert done.returncode == 0, done.stderr
    run = ["tpu-vm scp", "tpu-vm ssh", "tpu-vm ssh"]
    again = ["queued-resources delete", "queued-resources create"]
    assert deeds == [*run, *again, *run]


@pytest.mark.parametrize("code", [2, 3, 1])
def test_a_mistake_is_not_repeated_and_the_slice_is_kept(stand_ins, tmp_path, code):
    done, deeds, _ = run_pod(stand_ins, tmp_path, ["ACTIVE", "ACTIVE"], [code, 0])
    assert done.returncode == code
    assert deeds == ["tpu-vm scp", "tpu-vm ssh", "tpu-vm ssh"]


@pytest.mark.parametrize(("creates", "code"), [([1, 1], 0), ([1, 1, 1], 1)])
def test_a_moment_without_a_network_is_not_the_end(stand_ins, tmp_path, creates, code):
    (tmp_path / "creates").write_text("\n".join(map(str, creates)) + "\n")
    states = ["NONE", "NONE", "NONE", "ACTIVE", "ACTIVE"]
    done, deeds, _ = run_pod(stand_ins, tmp_path, states, [0])
    assert done.returncode == code
    assert deeds.count("queued-resources create") == 3
    assert ("tpu-vm ssh" in deeds) == (code == 0)


def test_a_slice_without_a_queue_is_deleted_too(stand_ins, tmp_path):
    (tmp_path / "unqueued").touch()
    done, deeds, _ = run_pod(stand_ins, tmp_path, ["ACTIVE", "ACTIVE"], [0])
    assert done.returncode == 0, done.stderr
    assert deeds[-2:] == ["queued-resources delete", "tpu-vm delete"]


def test_a_start_waits_for_one_whose_connection_was_lost(stand_ins, tmp_path):
    _, _, calls = run_pod(stand_ins, tmp_path, ["ACTIVE", "ACTIVE"], [0])
    (command, _) = (call[-2].removeprefix("--command=") for call in calls if "ssh" in call)
    lock, _, _ = command.partition("mkdir")
    assert "flock" in lock
    first = subprocess.Popen(["bash", "-c", f"{lock} sleep 1; echo first >> out"], cwd=tmp_path)
    while not (tmp_path / "mogrifier_jax.lock").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    second = subprocess.run(
        ["bash", "-c", f"{lock} echo second >> out"], cwd=tmp_path, capture_output=True, text=True
    )
    assert first.wait() == second.returncode == 0
    assert "waiting for the end of an earlier start" in second.stdout
    assert (tmp_path / "out").read_text() == "first\nsecond\n"


def test_a_slice_can_be_paid_for(stand_ins, tmp_path):
    states = ["NONE", "ACTIVE", "ACTIVE"]
    _, _, calls = run_pod(stand_ins, tmp_path, states, [0], CAPACITY="")
    (created,) = [call for call in calls if "create" in call]
    assert "--spot" not in created and "" not in created


# One machine.


def test_a_worker_for_each_gpu(stand_ins, tmp_path):
    stand_ins.add("python-of-package")
    here = {"PYTHON": "python-of-package"}
    tune = ["--mode=tune", "--study=appendix_a"]
    stand_ins.add("nvidia-smi", "echo GPU 0; echo GPU 1; echo GPU 2\n")
    _, calls = stand_ins("machine.sh", *tune, **here)
    started = ["python-of-package", "-m", "mogrifier_jax.launch", "--processes=1", "--"]
    assert calls[-1] == [*started, *tune, "--parallel=3"]
    _, calls = stand_ins("machine.sh", *tune, "--parallel=2", **here)
    assert calls[-1] == [*started, *tune, "--parallel=2"]
    _, calls = stand_ins("machine.sh", "--config=x", **here)
    assert calls[-1] == [*started, "--config=x"]
    stand_ins.add("nvidia-smi", "exit 9\n")
    _, calls = stand_ins("machine.sh", *tune, **here)
    assert calls[-1] == [*started, *tune, "--parallel=1"]


# Installing.


@pytest.mark.parametrize(
    ("accelerator", "extras"),
    [("cpu", "data,plot"), ("cuda12", "data,plot,cuda12"), ("tpu", "data,plot,tpu")],
)
def test_the_accelerator_is_an_extra(stand_ins, tmp_path, accelerator, extras):
    """With the real Python, whose `venv` makes an environment without pip: ours notes its call."""
    venv = tmp_path / "venv"
    pip = tmp_path / "pip"
    pip.write_text(NOTE)
    pip.chmod(0o755)
    body = f'[[ $1 == -c ]] && exec {shlex.quote(sys.executable)} "$@"\n'
    body += f"mkdir -p {venv}/bin && cp {pip} {venv}/bin/pip\n"
    stand_ins.add("a-python", body)
    done, calls = stand_ins("install.sh", accelerator, str(venv), PYTHON="a-python")
    assert done.returncode == 0, done.stderr
    assert calls[-1][0] == "pip"
    assert calls[-1][-1] == f"--editable={ROOT}[{extras}]"
    assert f"--constraint={ROOT}/requirements.txt" in calls[-1]


def test_an_old_python_is_replaced_by_one_of_uv(stand_ins, tmp_path):
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        stand_ins.add(name, "exit 1\n")  # As if it were older than 3.11.
    stand_ins.add("id", "echo 1000\n")  # Not root, so Debian's cannot be installed.
    venv = tmp_path / "venv"
    pip = "#!/bin/sh\\nexit 0\\n"
    stand_ins.add(
        "uv", f"mkdir -p {venv}/bin; printf '{pip}' > {venv}/bin/pip; chmod +x {venv}/bin/pip\n"
    )
    done, calls = stand_ins("install.sh", "tpu", str(venv))
    assert done.returncode == 0, done.stderr
    assert ["uv", "venv", "--seed", "--clear", "--python=3.12", str(venv)] in calls


def test_another_accelerator_is_refused(stand_ins):
    done, calls = stand_ins("install.sh", "abacus")
    assert done.returncode == 2 and "cpu|cuda12|cuda13|tpu" in done.stderr and not calls


def test_the_image_has_what_installing_needs(tmp_path):
    """The files that the Dockerfile copies before it installs are enough for an installation."""
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    install = next(i for i, line in enumerate(lines) if line.startswith("RUN"))
    assert lines[install].endswith('launch/install.sh "$ACCELERATOR"')
    for line in lines[:install]:
        if line.startswith("COPY"):
            *sources, target = line.split()[1:]
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, tmp_path / target)
                    continue
                (tmp_path / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    assert {"requirements.txt", "launch"} <= {path.name for path in tmp_path.iterdir()}
    program = "from setuptools import build_meta; build_meta.build_editable('.')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.whl"))


# Kubernetes.


def read_jobset(name):
    manifest = yaml.safe_load((LAUNCH / name).read_text())
    (job,) = manifest["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return manifest, job, pod, container


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_agrees_with_itself(name):
    manifest, job, pod, container = read_jobset(name)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = job["template"]["spec"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    hosts = spec["parallelism"]
    assert spec["completions"] == hosts and variables["JAX_NUM_PROCESSES"] == str(hosts)
    assert spec["completionMode"] == "Indexed"  # It gives JOB_COMPLETION_INDEX.
    # JobSet names a pod <set>-<job>-<index of the job>-<index of the pod>, in the set's subdomain.
    host, _, port = variables["JAX_COORDINATOR_ADDRESS"].partition(":")
    set_name = manifest["metadata"]["name"]
    assert host == f"{set_name}-{job['name']}-0-0.{set_name}"
    assert int(port) in [each["containerPort"] for each in container["ports"]]
    # Kubernetes wants both of these for a policy on exit codes.
    assert pod["restartPolicy"] == "Never"
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [2, 3] and rule["action"] == "FailJob"
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    # An extended resource must be requested as it is limited.
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert list(resources["limits"]) == [JOBSETS[name]]
    mounted = {each["name"] for each in container.get("volumeMounts", [])}
    assert mounted == {each["name"] for each in pod.get("volumes", [])}


def test_the_chips_of_the_tpu_jobset_are_its_topology():
    _, job, pod, container = read_jobset("jobset.yaml")
    across, down = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert int(across) * int(down) == job["template"]["spec"]["parallelism"] * chips


def test_the_two_jobsets_differ_only_in_hardware():
    texts = []
    for name in JOBSETS:
        manifest, job, pod, container = read_jobset(name)
        for key in ("nodeSelector", "tolerations", "volumes"):
            pod.pop(key, None)
        for key in ("image", "resources", "ports", "volumeMounts", "env"):
            container.pop(key, None)
        job["template"]["spec"].update(parallelism=0, completions=0)
        manifest["metadata"].pop("annotations", None)
        texts.append(yaml.safe_dump(manifest))
    assert texts[0] == texts[1]

"""The cores and accelerators of this machine, and their shares."""

import configparser
import math
import os
import pathlib
import subprocess

import pytest

from mogrifier_jax import errors, hardware


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
    assert hardware.quota(write_group(tmp_path, listing, **files)) == expected
    assert hardware.quota(tmp_path / "elsewhere") == math.inf


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, [1, 4, 6]), (2.9, [1, 4]), (0.5, [1])])
def test_cores_are_those_of_affinity_and_quota(quota, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {6, 1, 4}, raising=False)
    monkeypatch.setattr(hardware, "quota", lambda: quota)
    assert hardware.usable_cores() == cores


def test_cores_are_shared_and_each_process_has_at_least_one(monkeypatch):
    monkeypatch.setattr(hardware, "usable_cores", lambda: [0, 1, 2, 5, 7])
    assert [share.cores for share in hardware.share(2)] == [{0, 2, 7}, {1, 5}]
    assert [min(share.cores) for share in hardware.share(6)] == [0, 1, 2, 5, 7, 0]
    assert [share.environment for share in hardware.share(2)] == [{}, {}]


def answer(monkeypatch, text, code=0):
    """What JAX says of the devices when it is asked in a process of its own."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    done = subprocess.CompletedProcess([], code, text, "a warning\nno chips")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: done)


def test_each_process_has_one_chip_of_its_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answer(monkeypatch, "gpu|NVIDIA H100|4")
    shares = hardware.share(3)
    assert [share.environment for share in shares] == [{"CUDA_VISIBLE_DEVICES": c} for c in "012"]
    assert shares[0].hardware.startswith("1 NVIDIA H100, ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    answer(monkeypatch, "gpu|NVIDIA H100|2")
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in hardware.share(2)] == ["5", "6"]
    with pytest.raises(errors.UsageError, match=r"--parallel=3 is more than the 2 .*=2 or less"):
        hardware.share(3)


def test_each_process_has_one_tpu_chip_of_its_own(monkeypatch):
    monkeypatch.delenv("TPU_VISIBLE_CHIPS", raising=False)
    answer(monkeypatch, "tpu|TPU v5 lite|4")
    variables = [share.environment for share in hardware.share(4)]
    assert [each["TPU_VISIBLE_CHIPS"] for each in variables] == list("0123")
    assert {each["TPU_PROCESS_BOUNDS"] for each in variables} == {"1,1,1"}


def test_devices_that_cannot_be_used_are_named(monkeypatch):
    answer(monkeypatch, "", code=1)
    with pytest.raises(errors.UsageError, match=r"cannot be used \(no chips\)"):
        hardware.share(2)


@pytest.mark.slow
def test_jax_is_asked_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    assert hardware.ask_jax() == ("cpu", "cpu", 3)
    monkeypatch.setenv("JAX_PLATFORMS", "toaster")
    with pytest.raises(errors.UsageError, match=r"cannot be used .*toaster"):
        hardware.ask_jax()


FAKE_SMI = """#!/bin/sh
echo {driver}
exit {code}
"""


@pytest.mark.parametrize(
    ("driver", "code", "extra"),
    [("580.65.06", 0, "cuda13"), ("550.54.15", 0, "cuda12"), ("", 9, None), ("Failed", 0, None)],
)
def test_a_gpu_that_jax_does_not_use_is_named_with_the_remedy(
    driver, code, extra, tmp_path, monkeypatch
):
    (tmp_path / "nvidia-smi").write_text(FAKE_SMI.format(driver=driver, code=code))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert hardware.describe_unused_accelerator() is None  # Control: nothing is there.
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sentence = hardware.describe_unused_accelerator()
    if extra is None:
        assert sentence is None
        return
    assert "has an NVIDIA GPU, which JAX does not use" in sentence
    assert f'pip install "mogrifier_jax[{extra}]"' in sentence
    extras = configparser.ConfigParser()
    extras.read(pathlib.Path(__file__).parents[1] / "setup.cfg")
    assert extra in extras["options.extras_require"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # The user has chosen.
    assert hardware.describe_unused_accelerator() is None


def test_a_tpu_that_jax_does_not_use_is_named_with_the_remedy(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    assert 'pip install "mogrifier_jax[tpu]"' in hardware.describe_unused_accelerator()

"""`make train` installs what JAX needs for the accelerator of the machine that it runs on."""

import configparser
import importlib.metadata
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = ("cuda12", "cuda13", "tpu")
# The ids that the kernel shows for Google's network card, which its machines have, and for a v5e.
NETWORK_CARD, TPU = ("0x1ae0", "0x0042"), ("0x1ae0", "0x0063")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Pretends to be a machine with these GPUs (lines of nvidia-smi) and PCI devices."""

    def pretend(gpus=None, devices=()):
        tools, bus = tmp_path / "tools", tmp_path / "devices"
        tools.mkdir(), bus.mkdir()
        for name in ("awk", "bash", "cat", "env", "make", "python3", "tr"):
            (tools / name).symlink_to(shutil.which(name))
        if gpus is not None:
            answer = f"echo '{gpus}'" if gpus else "echo 'No devices were found'; exit 6"
            (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
            (tools / "nvidia-smi").chmod(0o755)
        for index, (vendor, device) in enumerate(devices):
            (bus / str(index)).mkdir()
            (bus / str(index) / "vendor").write_text(f"{vendor}\n")
            (bus / str(index) / "device").write_text(f"{device}\n")
        monkeypatch.setenv("PATH", str(tools))
        monkeypatch.setenv("PCI_DEVICES", str(bus))

    return pretend


def run(*command, **variables):
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize(
    ("gpus", "devices", "found", "said"),
    [
        (None, [], "cpu", ""),
        (None, [NETWORK_CARD], "cpu", ""),
        (None, [NETWORK_CARD, TPU, TPU], "tpu", ""),
        ("580.95.05, 9.0", [NETWORK_CARD], "cuda13", ""),
        ("590.10, 12.0", [], "cuda13", ""),
        ("580.95.05, 7.0", [], "cuda12", ""),  # Volta: CUDA 13 has dropped it.
        ("550.54.15, 8.9", [], "cuda12", ""),
        ("580.95.05, 9.0\n580.95.05, 6.1", [], "cuda12", ""),  # What both can do.
        ("470.256.02, 8.0", [], "cpu", "reports 470.256.02, 8.0"),
        ("", [], "cpu", "reports no GPU"),
    ],
)
def test_the_device_of_a_machine(machine, gpus, devices, found, said):
    machine(gpus, devices)
    printed, warned = run(".ci/device")
    assert printed == found
    assert said in warned and bool(said) == bool(warned)


def recipe(**variables):
    printed, _ = run("make", "--no-print-directory", "-n", "train", **variables)
    return printed


def test_make_train_installs_and_uses_the_gpu(machine):
    machine("580.95.05, 9.0")
    assert "-e '.[cuda13]'" in recipe() and "JAX_PLATFORMS" not in recipe()
    assert "-e '.[cuda12]'" in recipe(DEVICE="cuda12")
    assert ".[" not in recipe(DEVICE="cpu") and "JAX_PLATFORMS=cpu" in recipe(DEVICE="cpu")


def test_make_train_without_an_accelerator_installs_nothing_more(machine):
    machine()
    assert ".[" not in recipe() and "JAX_PLATFORMS=cpu" in recipe()


def test_extras_are_those_of_jax():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras, options = config["options.extras_require"], config["options"]["install_requires"]
    (bounds,) = (line[3:] for line in options.splitlines() if line.startswith("jax>"))
    known = importlib.metadata.metadata("jax").get_all("Provides-Extra")
    for name in EXTRAS:
        assert name in known
        assert extras[name].strip() == f"jax[{name}]{bounds}"
    # Preflight compiles only, so it does not bring NVIDIA's libraries.
    assert "jax-cuda12-plugin>" in extras["preflight"] and "with-cuda" not in extras["preflight"]

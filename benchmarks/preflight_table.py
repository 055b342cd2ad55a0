"""The tables of docs/pods.md: every experiment compiled for chips that are not here.

    python -m benchmarks.preflight_table --folder=runs/preflight --compile   # Hours; can be repeated.
    python -m benchmarks.preflight_table --folder=runs/preflight --write=docs/pods.md

Each compile is a process of its own and leaves a JSON file; those that are there are not made
again, and those whose compiler is not installed are left to an environment that has it.
"""

import argparse
import importlib.util
import itertools
import json
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

from mogrifier_jax import targets

ROOT = pathlib.Path(__file__).parents[1]
TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "h100:8", "v5e:16x16")
# The batch and the groups of each, smallest program first.
EXPERIMENTS = {
    "pydoc": (32, 1),
    "ptb": (64, 1),
    "wikitext2": (64, 1),
    "ptb_char": (64, 1),
    "mwc": (64, 1),
    "mwc:fi": (64, 1),
    "enwik8:48m": (128, 1),
    "enwik8": (128, 2),
}
LSTMS = {
    name.replace(":", ":lstm,") if ":" in name else f"{name}:lstm": sizes
    for name, sizes in EXPERIMENTS.items()
}
# enwik8 with 96M parameters: a fixed batch of 128, and 32 stripes for each chip.
SCALING = ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16")
MARKS = "<!-- {} -->"


class Job(NamedTuple):
    """One experiment on one topology."""

    experiment: str
    topology: str
    batch_size: int

    @property
    def name(self) -> str:
        """Of its JSON file."""
        return re.sub(r"[:,]", "_", f"{self.experiment}@{self.topology}@{self.batch_size}")


def table_job(experiment: str, topology: str) -> Job:
    """With the published batch, or the next larger one that the chips can split."""
    batch, groups = (EXPERIMENTS | LSTMS)[experiment]
    unit = targets.parse(topology).num_chips * groups
    return Job(experiment, topology, -(-batch // unit) * unit)


def scaling_jobs(growing: bool) -> list[Job]:
    """enwik8 from 1 to 256 chips."""
    chips = [targets.parse(name).num_chips for name in SCALING]
    if growing:
        return [Job("enwik8", name, 32 * n) for name, n in zip(SCALING, chips, strict=True)]
    # Two groups of 64 stripes: no more than 64 chips can share them.
    return [Job("enwik8", name, 128) for name, n in zip(SCALING, chips, strict=True) if n <= 64]


def all_jobs() -> list[Job]:
    """Every job once, the most telling first."""
    table = [table_job(e, t) for e, t in itertools.product(EXPERIMENTS, TOPOLOGIES)]
    lstms = [table_job(e, t) for e, t in itertools.product(LSTMS, TOPOLOGIES)]
    return list(dict.fromkeys([*table, *scaling_jobs(True), *scaling_jobs(False), *lstms]))


def compile_all(folder: pathlib.Path, only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    installed = {
        "tpu": importlib.util.find_spec("libtpu") is not None,
        "gpu": any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    }
    for job in all_jobs():
        path = folder / f"{job.name}.json"
        kind = targets.parse(job.topology).chip.kind
        if path.exists() or not installed[kind] or not re.search(only, job.name):
            continue
        file, _, variant = job.experiment.partition(":")
        command = [
            *(sys.executable, "-m", "mogrifier_jax.main", "--mode=preflight"),
            f"--config={ROOT}/experiments/{file}.py:{variant}",
            f"--config.data.batch_size={job.batch_size}",
            f"--topology={job.topology}",
            f"--json={path}",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [""]
        print(job.name, "done" if done.returncode == 0 else f"failed: {last[0]}", flush=True)


def read(folder: pathlib.Path, job: Job) -> dict[str, Any] | None:
    path = folder / f"{job.name}.json"
    return json.loads(path.read_text())["reports"][0] if path.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="regular expression on names of jobs")
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    if options.compile:
        compile_all(options.folder, options.only)


if __name__ == "__main__":
    main()

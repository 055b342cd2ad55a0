"""The tables of docs/pods.md: every experiment compiled for chips that are not here.

    python -m benchmarks.preflight_table --folder=runs/preflight --compile  # Hours.
    python -m benchmarks.preflight_table --folder=runs/preflight --write=docs/pods.md

Each compile is a process of its own and leaves a JSON file; those that are there are not made
again when this is repeated, and those whose compiler is not installed are left to an environment
that has it. A table of which the folder has no report stays as it is. For TPUs the tables have both
ends of the range by the schedule; all other columns are by XLA's own estimates.
"""

import argparse
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

from mogrifier_jax.preflight import targets

ROOT = pathlib.Path(__file__).parents[1]
TOPOLOGIES = ("v5e:2x2", "h100:8")
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
REWIRED = {"ptb:rlstm": (64, 1), "enwik8:rlstm,48m": (128, 1), "enwik8:rlstm": (128, 2)}
ALL = EXPERIMENTS | LSTMS | REWIRED
# enwik8 with 96M parameters: a fixed batch of 128, and 32 stripes for each chip.
SCALING = ("v5e:1x1", "v5e:2x2", "v5e:4x4", "v5e:8x8", "v5e:16x16")
GPU_COLUMNS = "GiB a chip | ms a step | in collectives | tokens/s | of peak"
TPU_COLUMNS = GPU_COLUMNS.replace("ms a step", "ms by the schedule | ms by XLA's sum")


class Job(NamedTuple):
    """One experiment on one topology."""

    experiment: str
    topology: str
    batch_size: int

    @property
    def name(self) -> str:
        """Of its JSON file."""
        return re.sub(r"[:, ]+", "_", f"{self.experiment}@{self.topology}@{self.batch_size}")


def table_job(experiment: str, topology: str) -> Job:
    """With the published batch, or the next larger one that the chips can split."""
    batch, groups = ALL[experiment]
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
    tables = [table_job(experiment, topology) for topology in TOPOLOGIES for experiment in ALL]
    return list(dict.fromkeys([*tables, *scaling_jobs(True), *scaling_jobs(False)]))


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


def topology_table(folder: pathlib.Path, topology: str) -> list[str]:
    """Every experiment on one topology."""
    target = targets.parse(topology)
    memory = target.chip.memory / 2**30
    tpu = target.chip.kind == "tpu"
    rows, jobs = [], []
    for name, (published, _) in ALL.items():
        job = table_job(name, topology)
        if report := read(folder, job):
            batch = f"{job.batch_size}{'*' * (job.batch_size != published)}"
            rows.append(f"| `{name}` | {batch} | {_costs(report, tpu)} | {_hours(report)} |")
            jobs.append(job)
    if not rows:
        return []
    return [
        versions(folder, jobs),
        "",
        f"**{topology}**: {target.num_chips} chips of {memory:.1f} GiB",
        "",
        *_head(f"experiment | batch | {TPU_COLUMNS if tpu else GPU_COLUMNS} | hours"),
        *rows,
    ]


def _head(columns: str) -> list[str]:
    """The first two lines of a table, whose first column may hold names."""
    first, *rest = columns.split(" | ")
    align = ["---" if first == "experiment" else "---:", *("---:" for _ in rest)]
    return [f"| {columns} |", f"| {' | '.join(align)} |"]


def _costs(report: dict[str, Any], tpu: bool) -> str:
    needed = f"{report['needed'] / 2**30:.2f}" if report["needed"] else "?"
    if not report["fits"]:
        return f"{needed}, does not fit | | | |" + " |" * tpu
    share = report["collective_seconds"] / report["seconds"]
    return (
        f"{needed} | {_range(report) + ' | ' if tpu else ''}{1e3 * report['seconds']:.1f} | "
        f"{share:.0%} | {report['tokens_per_second']:,.0f} | {report['peak_share']:.1%}"
    )


def _range(report: dict[str, Any]) -> str:
    """Both ends by the schedule, if the compiler wrote one."""
    if schedule := report.get("schedule"):
        return f"{1e3 * schedule['lower_seconds']:.1f} to {1e3 * schedule['upper_seconds']:.1f}"
    return ""


def _hours(report: dict[str, Any]) -> str:
    return f"{24 * report['days']:.1f}" if report["fits"] else ""


def scaling_table(folder: pathlib.Path, growing: bool) -> list[str]:
    """enwik8 with 96M parameters on more and more chips of v5e."""
    rows: list[str] = []
    best = None
    for job in scaling_jobs(growing):
        report = read(folder, job)
        if report is None:
            continue
        efficiency = ""
        if report["fits"]:
            each = report["tokens_per_second"] / report["chips"]
            best = best or each
            efficiency = f"{each / best:.0%}"
        costs = _costs(report, tpu=True)
        rows.append(f"| {report['chips']} | {job.batch_size} | {costs} | {efficiency} |")
    if len(rows) < 2:  # One row alone shows no scaling.
        return []
    return [*_head(f"chips | batch | {TPU_COLUMNS} | efficiency"), *rows]


def versions(folder: pathlib.Path, jobs: list[Job]) -> str:
    """Dates and versions of the reports of jobs."""
    contents = [json.loads((folder / f"{job.name}.json").read_text()) for job in jobs]
    dates = sorted({content["date"] for content in contents})
    used = {f"{k} {v}" for content in contents for k, v in content["versions"].items()}
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"Compiled {days} with {', '.join(sorted(used))}."


def write(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Puts the tables between their marks."""
    text = path.read_text()
    blocks = {topology: topology_table(folder, topology) for topology in TOPOLOGIES}
    blocks |= {
        "fixed batch": scaling_table(folder, growing=False),
        "growing batch": scaling_table(folder, growing=True),
    }
    for name, lines in blocks.items():
        if not lines:
            continue
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = "\n".join([f"{before}{begin}", *lines]).rstrip() + f"\n{end}{after}"
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="regular expression on names of jobs")
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    if options.compile:
        compile_all(options.folder, options.only)
    if options.write:
        write(options.folder, options.write)


if __name__ == "__main__":
    main()

"""Sweeps: all variants of a named set of an experiment are run, each with several seeds.

`SETS` of an experiment file maps names to `configs.Set`. Every run is an ordinary one in a folder
of its own, `<workdir>/<variant>/seed<k>`. So everything that works on a workdir works on it, and
the same command goes on with a sweep that was stopped. `tables.py` makes tables and figures.
"""

import contextlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.analysis import tables
from mogrifier_jax.training import processes, train, units, workdirs


class Job(NamedTuple):
    """One run of a sweep."""

    variant: str
    seed: int
    folder: pathlib.Path
    config: config_dict.ConfigDict

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


class Sweep:
    """An experiment file with its sets, in one size and with the command line's overrides."""

    def __init__(self, filename: str, overrides: Mapping[str, Any] | None = None):
        self.path, _, self.size = filename.partition(":")
        self.overrides = dict(overrides or {})
        self.module = configs.load_file(self.path)
        if not hasattr(self.module, "SETS"):
            raise errors.UsageError(
                f"{self.path} has no sets to sweep over; use a file that defines SETS, such as "
                "experiments/ablation.py"
            )

    @property
    def name(self) -> str:
        """The names of the file and the size, such as "ablation:small"."""
        return ":".join(filter(None, [pathlib.Path(self.path).stem, self.size]))

    def find_sets(self, names: str) -> dict[str, configs.Set]:
        """The sets with these names, which commas separate."""
        known, chosen = self.module.SETS, names.split(",")
        for name in chosen:
            if name not in known:
                raise errors.UsageError(
                    f"--set={name} is not in {self.path}; it has {', '.join(known)}"
                )
        return {name: known[name] for name in chosen}

    def full_variant(self, variant: str) -> str:
        """The variant and the size, as `get_config` takes them."""
        return ",".join(filter(None, [variant, self.size]))

    def make_job(self, variant: str, seed: int, workdir: str | os.PathLike) -> Job:
        """The run of a variant and a seed, with its folder and config."""
        config = self.module.get_config(self.full_variant(variant))
        config.update_from_flattened_dict({**self.overrides, "seed": seed})
        return Job(variant, seed, tables.run_folder(workdir, variant, seed), config)

    def command(self, job: Job) -> list[str]:
        """The command that runs a job in a process of its own."""
        overrides = {**self.overrides, "seed": job.seed}
        config = f"--config={self.path}:{self.full_variant(job.variant)}"
        keys = [f"--config.{key}={value}" for key, value in overrides.items()]
        program = [sys.executable, "-m", "mogrifier_jax.main"]
        return [*program, config, *keys, f"--workdir={job.folder}"]


def run(
    filename: str,
    names: str,
    seeds: str,
    workdir: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    parallel: int = 1,
    report: str | None = None,
) -> None:
    """Runs the jobs of some sets that are not done yet, and compares the results.

    Args:
      report: a Markdown file, such as RESULTS.md; its tables of these sets are replaced.
    """
    sweep = Sweep(filename, overrides)
    sets = sweep.find_sets(names)
    numbers = parse_seeds(seeds)
    processes.check_parallel(parallel)
    workdirs.check_place(workdir)
    variants = dict.fromkeys(row.variant for each in sets.values() for row in each.rows)
    # All variants run with the first seed before any runs with the next, to show results early.
    jobs = [sweep.make_job(name, seed, workdir) for seed in numbers for name in variants]
    for job in jobs:
        workdirs.check_config(job.folder, job.config)
    waiting = [job for job in jobs if not is_done(job.folder)]
    logging.info("%d runs in %s, %d of them done", len(jobs), workdir, len(jobs) - len(waiting))
    done = run_here(waiting) if parallel == 1 else run_beside(sweep, waiting, parallel)
    for job in done:
        logging.info("%s: %s", job, describe(job.folder))
        tables.write(sweep, sets, workdir, numbers)
    tables.write(sweep, sets, workdir, numbers, report=report)


def parse_seeds(text: str) -> list[int]:
    """Reads a list of different seeds, such as "1,2,3"."""
    seeds = text.split(",")
    if not all(seed.isdecimal() for seed in seeds) or len(set(seeds)) < len(seeds):
        raise errors.UsageError(f"--seeds={text} must be different numbers, such as 1,2,3")
    numbers = [int(seed) for seed in seeds]
    for number in numbers:
        configs.check_values({"seed": number}, {"seed": configs.SEED}, prefix="--")
    return numbers


def is_done(folder: pathlib.Path) -> bool:
    """Whether a run has ended, with a result or because it diverged."""
    return (folder / "results.json").exists() or "diverged" in read_record(folder)


def run_here(jobs: Sequence[Job]) -> Iterator[Job]:
    """One run after the other in this process; yields each when it is done."""
    for number, job in enumerate(jobs, start=1):
        logging.info("run %d of %d: %s", number, len(jobs), job)
        began = time.monotonic()
        try:
            train.train_and_evaluate(job.config, str(job.folder))
        except errors.Diverged as error:
            logging.warning("%s: %s", job, error)
            write_record(job.folder, diverged=str(error))
        finally:
            add_seconds(job, time.monotonic() - began, describe_hardware())
        jax.clear_caches()  # Later runs have other programs. The cache on disk stays.
        yield job


def run_beside(sweep: Sweep, jobs: Sequence[Job], parallel: int) -> Iterator[Job]:
    """Several runs at once, each in a process that writes to log.txt in its folder."""
    by_name = {str(job): job for job in jobs}

    def note_end(ended: processes.Ended) -> None:
        add_seconds(by_name[ended.job.name], ended.seconds, ended.hardware)

    commands = [processes.Job(str(job), sweep.command(job), job.folder / "log.txt") for job in jobs]
    num_stopped = 0
    with contextlib.closing(processes.run_side_by_side(commands, parallel, note_end)) as ends:
        for ended in ends:
            job = by_name[ended.job.name]
            if finished(job, ended.code):
                yield job
            else:
                num_stopped += 1
    if num_stopped:
        raise errors.Interrupted(
            f"{num_stopped} runs were stopped, or not started; the same command goes on"
        )


def finished(job: Job, code: int | None) -> bool:
    """Whether a run ended by itself and was not stopped; an error of a run ends the sweep."""
    log = job.folder / "log.txt"
    if code == errors.Diverged.exit_code:
        write_record(job.folder, diverged=log.read_text().strip().splitlines()[-1])
    elif code in (None, errors.Interrupted.exit_code, -signal.SIGTERM):
        return False
    elif code:
        raise errors.UsageError(f"{job} ended with code {code}; the reason is in {log}")
    return True


def add_seconds(job: Job, seconds: float, hardware: str) -> None:
    """Adds the time since this start to the record of a run, with what it ran on."""
    spent = read_record(job.folder).get("seconds", 0.0) + seconds
    write_record(job.folder, seconds=round(spent, 1), hardware=hardware)


_REMEDY = "restore it from a copy, or delete that folder to run it again"


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """The record that a sweep keeps of a run: seconds, hardware, and whether it diverged."""
    path = folder / "sweep.json"
    return workdirs.read_json(path, dict, _REMEDY) if path.exists() else {}


def write_record(folder: pathlib.Path, **values: Any) -> None:
    """Sets values in the record of a run and keeps the others."""
    folder.mkdir(parents=True, exist_ok=True)
    with workdirs.locked(folder):
        workdirs.write_json(folder, "sweep.json", {**read_record(folder), **values})


def describe_hardware() -> str:
    """The devices and the cores of this process, as "2 cpu, 2 cores"."""
    return f"{jax.device_count()} {jax.devices()[0].device_kind}, {os.cpu_count()} cores"


def describe(folder: pathlib.Path) -> str:
    """The result of a run that is done, in a few words."""
    record = read_record(folder)
    if "diverged" in record:
        return "diverged"
    results = workdirs.read_json(folder / "results.json", dict, _REMEDY)
    return f"valid {results['valid_nats']:.4f} nats, {units.span(record['seconds'])}"

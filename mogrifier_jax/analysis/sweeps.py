"""Sweeps: all variants of a named set of an experiment are run, each with several seeds.

`SETS` of an experiment file maps names to `configs.Set`. Every run is an ordinary one in a folder
of its own, `<workdir>/<variant>/seed<k>`. So everything that works on a workdir works on it, and
the same command goes on with a sweep that was stopped. `tables.py` makes tables and figures.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import configs, errors, partitioning
from mogrifier_jax.analysis import tables
from mogrifier_jax.training import signals, train, units, workdirs

POLL_SECONDS = 0.2  # Between looks at the processes of a parallel sweep.


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
    if parallel < 1:
        raise errors.UsageError(f"--parallel={parallel} must be at least 1 run at a time")
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
            add_seconds(job, began)
        jax.clear_caches()  # Later runs have other programs. The cache on disk stays.
        yield job


class Started(NamedTuple):
    """A run in a process of its own."""

    job: Job
    process: subprocess.Popen
    cores: set[int]
    began: float


def run_beside(sweep: Sweep, jobs: Sequence[Job], parallel: int) -> Iterator[Job]:
    """Several runs at once, each in a process that writes to log.txt in its folder."""
    waiting, running, stopped = list(jobs), list[Started](), list[Job]()
    free = share_cores(parallel)
    with signals.StopRequests() as stop:
        try:
            while waiting or running:
                if stop.requested():
                    stopped += waiting
                    waiting.clear()
                    terminate(running)
                while waiting and len(running) < parallel:
                    running.append(start(sweep, waiting.pop(0), free.pop(0)))
                time.sleep(POLL_SECONDS)
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    free.append(each.cores)
                    add_seconds(each.job, each.began, each.cores)
                    if finished(each.job, each.process.returncode):
                        yield each.job
                    else:
                        stopped.append(each.job)
        finally:
            terminate(running)  # When all went well, none is running by now.
            for each in running:
                add_seconds(each.job, each.began, each.cores)
    if stopped:
        raise errors.Interrupted(
            f"{len(stopped)} runs were stopped, or not started; the same command goes on"
        )


def terminate(running: Sequence[Started]) -> None:
    """Sends SIGTERM to runs, which makes them save and exit, and waits for them."""
    for each in running:
        each.process.terminate()
    for each in running:
        each.process.wait()


def share_cores(count: int) -> list[set[int]]:
    """Splits the cores of this process among `count` others; each gets at least one.

    Programs that all use all cores wait for each other, and two at once are slower than one after
    the other.
    """
    cores = partitioning.usable_cores()
    return [set(cores[index % len(cores) :: count]) for index in range(count)]


@contextlib.contextmanager
def bound_to(cores: set[int]) -> Iterator[None]:
    """Makes processes that are started inside run on these cores, if the system allows it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def start(sweep: Sweep, job: Job, cores: set[int]) -> Started:
    """Starts a run in a process of its own, on these cores."""
    logging.info("%s: starts", job)
    began = time.monotonic()
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / "log.txt").open("a") as log, bound_to(cores):
        process = subprocess.Popen(sweep.command(job), stdout=log, stderr=subprocess.STDOUT)
    return Started(job, process, cores, began)


def finished(job: Job, code: int) -> bool:
    """Whether a run ended by itself and was not stopped; an error of a run ends the sweep."""
    log = job.folder / "log.txt"
    if code == errors.Diverged.exit_code:
        write_record(job.folder, diverged=log.read_text().strip().splitlines()[-1])
    elif code in (errors.Interrupted.exit_code, -signal.SIGTERM):
        return False
    elif code:
        raise errors.UsageError(f"{job} ended with code {code}; the reason is in {log}")
    return True


def add_seconds(job: Job, began: float, cores: Collection[int] = ()) -> None:
    """Adds the time since this start to the record of a run that had all cores, or these."""
    spent = read_record(job.folder).get("seconds", 0.0) + time.monotonic() - began
    write_record(job.folder, seconds=round(spent, 1), hardware=hardware(cores))


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


def hardware(cores: Collection[int] = ()) -> str:
    """The devices and the cores of a run that had these to itself, as "1 cpu, 1 of 2 cores"."""
    kind, share = jax.devices()[0].device_kind, f"{len(cores)} of " if cores else ""
    count = len(cores) if cores and kind == "cpu" else jax.device_count()
    return f"{count} {kind}, {share}{os.cpu_count()} cores"


def describe(folder: pathlib.Path) -> str:
    """The result of a run that is done, in a few words."""
    record = read_record(folder)
    if "diverged" in record:
        return "diverged"
    results = workdirs.read_json(folder / "results.json", dict, _REMEDY)
    return f"valid {results['valid_nats']:.4f} nats, {units.span(record['seconds'])}"

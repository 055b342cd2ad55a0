"""Sweeps: a named set of variants of an experiment, each with several seeds, run to their end.

An experiment file that has sets says so in `SETS`: name to `Set`. Every run is an ordinary one in
a folder of its own, `<workdir>/<variant>/seed<k>`, so whatever works on a workdir works on it, and
a sweep that was stopped goes on with the same command. `tables.py` makes tables and figures.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import configs, errors, partitioning
from mogrifier_jax.analysis import tables
from mogrifier_jax.training import progress, runs, train, workdirs

POLL_SECONDS = 0.2  # Between looks at the processes of a parallel sweep.


class Job(NamedTuple):
    """One run."""

    variant: str
    seed: int
    folder: pathlib.Path
    config: config_dict.ConfigDict

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


class Sweep:
    """An experiment file with its sets, at one size, with the overrides of a command line."""

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
        """Of the file and the size, for people."""
        return ":".join(filter(None, [pathlib.Path(self.path).stem, self.size]))

    def find_sets(self, names: str) -> dict[str, configs.Set]:
        """The sets of these comma separated names."""
        known = self.module.SETS
        for name in (chosen := names.split(",")):
            if name not in known:
                raise errors.UsageError(
                    f"--set={name} is not in {self.path}; it has {', '.join(known)}"
                )
        return {name: known[name] for name in chosen}

    def full_variant(self, variant: str) -> str:
        """The variant with the size."""
        return ",".join(filter(None, [variant, self.size]))

    def folders(
        self, workdir: str | os.PathLike, variant: str, seeds: Sequence[int]
    ) -> list[pathlib.Path]:
        """Where the runs of a variant are."""
        return [run_folder(workdir, variant, seed) for seed in seeds]

    def make_job(self, variant: str, seed: int, workdir: str | os.PathLike) -> Job:
        """A run with everything that is known of it."""
        config = self.module.get_config(self.full_variant(variant))
        config.update_from_flattened_dict({**self.overrides, "seed": seed})
        return Job(variant, seed, run_folder(workdir, variant, seed), config)

    def command(self, job: Job) -> list[str]:
        """The command line of one run."""
        overrides = {**self.overrides, "seed": job.seed}
        config = f"--config={self.path}:{self.full_variant(job.variant)}"
        keys = [f"--config.{key}={value}" for key, value in overrides.items()]
        program = [sys.executable, "-m", "mogrifier_jax.main"]
        return [*program, config, *keys, f"--workdir={job.folder}"]


def run_folder(workdir: str | os.PathLike, variant: str, seed: int) -> pathlib.Path:
    """Where the run of a variant is."""
    return pathlib.Path(workdir) / variant.replace(",", "_") / f"seed{seed}"


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
    """Runs what is not done yet of some sets, and compares them.

    Args:
      report: a Markdown file, such as RESULTS.md, whose tables of these sets are renewed.
    """
    sweep = Sweep(filename, overrides)
    sets = sweep.find_sets(names)
    numbers = parse_seeds(seeds)
    if parallel < 1:
        raise errors.UsageError(f"--parallel={parallel} must be at least 1 run at a time")
    variants = dict.fromkeys(row.variant for each in sets.values() for row in each.rows)
    # All variants with the first seed come before the next: there is something to see early.
    jobs = [sweep.make_job(name, seed, workdir) for seed in numbers for name in variants]
    for job in jobs:
        workdirs.check_config(job.folder, job.config, ignore=runs.FREE_KEYS)
    waiting = [job for job in jobs if not is_done(job.folder)]
    logging.info("%d runs in %s, %d of them done", len(jobs), workdir, len(jobs) - len(waiting))
    done = run_here(waiting) if parallel == 1 else run_beside(sweep, waiting, parallel)
    for job in done:
        logging.info("%s: %s", job, describe(job.folder))
        tables.write(sweep, sets, workdir, numbers)
    tables.write(sweep, sets, workdir, numbers, report=report)


def parse_seeds(text: str) -> list[int]:
    """Reads "1,2,3"."""
    seeds = text.split(",")
    if not all(seed.isdecimal() for seed in seeds) or len(set(seeds)) < len(seeds):
        raise errors.UsageError(f"--seeds={text} must be different numbers, such as 1,2,3")
    numbers = [int(seed) for seed in seeds]
    for number in numbers:
        configs.check_values({"seed": number}, {"seed": configs.SEED}, prefix="--")
    return numbers


def is_done(folder: pathlib.Path) -> bool:
    """Whether a run has come to its end, good or bad."""
    return (folder / "results.json").exists() or "diverged" in read_record(folder)


def run_here(jobs: Sequence[Job]) -> Iterator[Job]:
    """One run after the other in this process; yields each when it is done."""
    for number, job in enumerate(jobs, start=1):
        logging.info("run %d of %d: %s", number, len(jobs), job)
        with timed(job):
            try:
                train.train_and_evaluate(job.config, str(job.folder))
            except errors.Diverged as error:
                logging.warning("%s: %s", job, error)
                write_record(job.folder, diverged=str(error))
        jax.clear_caches()  # Of programs that no later run has; those on disk stay.
        yield job


def run_beside(sweep: Sweep, jobs: Sequence[Job], parallel: int) -> Iterator[Job]:
    """Several runs at once, each in a process; their words go to log.txt in their folders."""
    waiting, running, stopped = list(jobs), list[tuple[Job, Any, Any]](), list[Job]()
    free = share_cores(parallel)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(runs.StopRequests())
        stack.callback(terminate, running)  # When all went well, none is running by then.
        while waiting or running:
            if stop.requested():
                stopped += waiting
                waiting.clear()
                terminate(running)
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                logging.info("%s: starts", job)
                clock = stack.enter_context(contextlib.ExitStack())
                clock.enter_context(timed(job))
                running.append((job, start(sweep, job, cores := free.pop(0)), clock))
                clock.callback(free.append, cores)
            time.sleep(POLL_SECONDS)
            for job, process, clock in [each for each in running if each[1].poll() is not None]:
                running.remove((job, process, clock))
                clock.close()
                if finished(job, process.returncode):
                    yield job
                else:
                    stopped.append(job)
    if stopped:
        raise errors.Interrupted(
            f"{len(stopped)} runs were stopped, or not started; the same command goes on"
        )


def terminate(running: Sequence[tuple[Job, subprocess.Popen, Any]]) -> None:
    """Ends runs as a user would: they save, and end with a code of their own."""
    for _, process, _ in running:
        process.terminate()
    for _, process, _ in running:
        process.wait()


def share_cores(count: int) -> list[set[int]]:
    """The cores of this process dealt out to a number of others, one to each if there are few.

    Programs that all use all cores wait for each other: two at once are slower than in turn.
    """
    cores = partitioning.usable_cores()
    return [set(cores[index % len(cores) :: count]) for index in range(count)]


@contextlib.contextmanager
def bound_to(cores: set[int]) -> Iterator[None]:
    """Processes started here run on these cores; on any where that cannot be said."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def start(sweep: Sweep, job: Job, cores: set[int]) -> subprocess.Popen:
    """Starts a run in a process of its own, on these cores."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / "log.txt").open("a") as log, bound_to(cores):
        return subprocess.Popen(sweep.command(job), stdout=log, stderr=subprocess.STDOUT)


def finished(job: Job, code: int) -> bool:
    """Whether the process of a run has ended as it should; what is broken ends the sweep."""
    log = job.folder / "log.txt"
    if code == errors.Diverged.exit_code:
        write_record(job.folder, diverged=log.read_text().strip().splitlines()[-1])
    elif code in (errors.Interrupted.exit_code, -signal.SIGTERM):
        return False
    elif code:
        raise errors.UsageError(f"{job} ended with code {code}; the reason is in {log}")
    return True


@contextlib.contextmanager
def timed(job: Job) -> Iterator[None]:
    """Adds the time of this start to the record of the run."""
    began = time.monotonic()
    try:
        yield
    finally:
        spent = read_record(job.folder).get("seconds", 0.0) + time.monotonic() - began
        write_record(job.folder, seconds=round(spent, 1), hardware=hardware())


_REMEDY = "restore it from a copy, or delete that folder to run it again"


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """What a sweep has noted of a run: seconds, hardware, and whether it diverged."""
    path = folder / "sweep.json"
    return workdirs.read_json(path, dict, _REMEDY) if path.exists() else {}


def write_record(folder: pathlib.Path, **values: Any) -> None:
    """Adds to the record of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    with workdirs.locked(folder):
        workdirs.write_json(folder, "sweep.json", {**read_record(folder), **values})


def hardware() -> str:
    """The devices, and how many cores there are to drive them."""
    return f"{jax.device_count()} {jax.devices()[0].device_kind}, {os.cpu_count()} cores"


def describe(folder: pathlib.Path) -> str:
    """One line for people about a run that is done."""
    record = read_record(folder)
    if "diverged" in record:
        return "diverged"
    results = workdirs.read_json(folder / "results.json", dict, _REMEDY)
    return f"valid {results['valid_nats']:.4f} nats, {progress.span(record['seconds'])}"

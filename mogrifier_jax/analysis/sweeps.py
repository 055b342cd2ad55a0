"""`--mode=sweep`: trains all variants of a set with several seeds, and compares them.

`SETS` of an experiment file maps names to `configs.Set`. Every run is an ordinary one in its own
folder, `<workdir>/<variant>/seed<k>`, so everything that works on a workdir works on it, and a
sweep that was stopped is continued by the same command. `sweep_report.py` writes the comparison.
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

from mogrifier_jax import buckets, configs, errors, files, options
from mogrifier_jax.analysis import sweep_report, sweep_results
from mogrifier_jax.data import tasks
from mogrifier_jax.training import (
    atomic_files,
    checkpoints,
    processes,
    runs,
    train,
    units,
    workdirs,
)


class Job(NamedTuple):
    """A run of a sweep."""

    variant: str
    seed: int
    folder: pathlib.Path
    config: config_dict.ConfigDict

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


def is_set(value: object) -> bool:
    """Whether a value is a `configs.Set` with rows."""
    return (
        isinstance(value, configs.Set)
        and isinstance(value.rows, Sequence)
        and bool(value.rows)
        and all(isinstance(row, configs.Row) and isinstance(row.variant, str) for row in value.rows)
    )


class Sweep:
    """An experiment file with its sets, in one size and with overrides from the command line."""

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
        """The names of the file and of the size, such as "ablation:small"."""
        return ":".join(filter(None, [pathlib.Path(self.path).stem, self.size]))

    def find_sets(self, names: str) -> dict[str, configs.Set]:
        """The sets with these names, which are separated by commas."""
        known, chosen = self.module.SETS, names.split(",")
        if not (isinstance(known, Mapping) and all(map(is_set, known.values()))):
            raise errors.UsageError(
                f"SETS of {self.path} must map names to configs.Set, each with a list of "
                "configs.Row; correct the experiment, as in experiments/ablation.py"
            )
        for name in chosen:
            if name not in known:
                raise errors.UsageError(
                    f"--set={name} is not in {self.path}; it has {', '.join(known)}"
                )
        return {name: known[name] for name in chosen}

    def title_of(self, variants: configs.Set) -> str:
        """The title of a set with the names of the corpora of its variants."""
        sections = [
            self.module.get_config(self.full_variant(row.variant)).data for row in variants.rows
        ]
        texts = (each for each in sections if not tasks.kind_of(each).encoder_decoder)
        names = dict.fromkeys(each.name for each in texts)
        return ", ".join([variants.title, *names])

    def full_variant(self, variant: str) -> str:
        """The variant and the size, as `get_config` takes them."""
        return ",".join(filter(None, [variant, self.size]))

    def make_job(self, variant: str, seed: int, workdir: str | os.PathLike) -> Job:
        """The run of a variant and a seed, with its folder and config."""
        config = self.module.get_config(self.full_variant(variant))
        config.update_from_flattened_dict({**self.overrides, "seed": seed})
        return Job(variant, seed, sweep_results.run_folder(workdir, variant, seed), config)

    def command(self, job: Job) -> list[str]:
        """The command that runs a job in a separate process."""
        overrides = {**self.overrides, "seed": job.seed}
        config = f"--config={self.path}:{self.full_variant(job.variant)}"
        keys = [f"--config.{key}={value}" for key, value in overrides.items()]
        program = [sys.executable, "-m", "mogrifier_jax.main"]
        return [*program, config, *keys, f"--workdir={job.folder}"]


def sweep(
    filename: str,
    names: str,
    seeds: str,
    workdir: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    parallel: int = 1,
    report: str | None = None,
) -> None:
    """Trains the runs of some sets that are not finished, and compares the results of all.

    Args:
      filename: the experiment and its size, such as "experiments/ablation.py:small".
      names: the sets, separated by commas.
      seeds: the seeds, separated by commas.
      parallel: how many runs at a time, each in a separate process if there are several.
      report: a Markdown file, such as RESULTS.md, in which the tables of these sets are replaced.
    """
    experiment = Sweep(filename, overrides)
    sets = experiment.find_sets(names)
    numbers = parse_seeds(seeds)
    processes.check_parallel(parallel)
    workdirs.check_place(workdir)
    variants = dict.fromkeys(row.variant for each in sets.values() for row in each.rows)
    # All variants run with the first seed before any of them runs with the next one, so that there
    # is something to compare early.
    jobs = [experiment.make_job(name, seed, workdir) for seed in numbers for name in variants]
    for job in jobs:
        workdirs.check_config(job.folder, job.config)
    waiting = [job for job in jobs if not is_finished(job.folder)]
    check_corpora(jobs, waiting)
    finished = len(jobs) - len(waiting)
    logging.info("%d runs in %s, %d of them finished", len(jobs), workdir, finished)
    if parallel == 1:
        ended = run_in_turn(waiting)
    else:
        ended = run_in_parallel(experiment, waiting, parallel)
    titles = {name: experiment.title_of(each) for name, each in sets.items()}
    for job in ended:
        logging.info("%s: %s", job, describe_result(job.folder))
        for name, each in sets.items():
            sweep_report.write(workdir, name, each, numbers, titles[name])
    written = []
    for name, each in sets.items():
        paths = sweep_report.write(workdir, name, each, numbers, titles[name])
        if paths and report:
            made = pathlib.Path(workdir) / name
            sweep_report.insert_table(report, f"{experiment.name} {name}", made)
        written += paths
    print(f"\n{buckets.show(sweep_report.show(written))}" if written else "no run has a result")


def check_corpora(jobs: Sequence[Job], waiting: Sequence[Job]) -> None:
    """Refuses a sweep whose runs would compare scores of different texts.

    A run that has begun refuses another text by itself, but a new run does not know what the other
    runs on its corpus were trained on.
    """
    known: dict[str, tuple[Job, dict[str, str]]] = {}
    for job in jobs:
        if digests := workdirs.corpus_digests(checkpoints.read_fingerprint(job.folder)):
            other, expected = known.setdefault(name_corpus(job), (job, digests))
            check_same_corpus(job, digests, other, expected)
    for job in waiting if known else ():
        if name_corpus(job) in known:
            task = runs.make_task(configs.base(job.config), runs.make_mesh(job.config))
            check_same_corpus(job, task.digests, *known.pop(name_corpus(job)))


def name_corpus(job: Job) -> str:
    """The options that decide which text a run reads."""
    data = configs.base(job.config).data
    free = {*tasks.READING, "source_dir", "data_dir"} - {"name"}
    return repr(sorted((name, value) for name, value in data.items() if name not in free))


def check_same_corpus(
    job: Job, digests: Mapping[str, str], other: Job, expected: Mapping[str, str]
) -> None:
    """Refuses a run whose text is not the same as the text of another run."""
    if changed := [split for split in expected if digests.get(split) != expected[split]]:
        raise errors.UsageError(
            f"the text of {', '.join(changed)} for the run of {job} is not the one that the run of "
            f"{other} was trained on, in {other.folder}, so they cannot be compared; restore the "
            "text, or use another --workdir"
        )


def parse_seeds(text: str) -> list[int]:
    """Reads a list of different seeds, such as "1,2,3"."""
    seeds = text.split(",")
    numbers = [int(seed) for seed in seeds if seed.isdecimal()]
    if len(set(numbers)) < len(seeds):  # 1 and 01 are the same run.
        raise errors.UsageError(f"--seeds={text} must be different numbers, such as 1,2,3")
    for number in numbers:
        options.check_values({"seed": number}, {"seed": options.SEED}, prefix="--")
    return numbers


def is_finished(folder: pathlib.Path) -> bool:
    """Whether a run has a result, or has diverged."""
    return (folder / "results.json").exists() or "diverged" in sweep_results.read_record(folder)


def run_in_turn(jobs: Sequence[Job]) -> Iterator[Job]:
    """Trains one run after another in this process, and yields each when it has ended."""
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
        jax.clear_caches()  # Later runs have other programs. The cache on disk is kept.
        yield job


def run_in_parallel(experiment: Sweep, jobs: Sequence[Job], parallel: int) -> Iterator[Job]:
    """Trains several runs at a time, each in a process whose output goes to its log.txt."""
    by_name = {str(job): job for job in jobs}

    def note_end(ended: processes.Ended) -> None:
        add_seconds(by_name[ended.job.name], ended.seconds, ended.hardware)

    commands = [
        processes.Job(str(job), experiment.command(job), job.folder / "log.txt") for job in jobs
    ]
    num_stopped = 0
    with contextlib.closing(processes.run_side_by_side(commands, parallel, note_end)) as ends:
        for ended in ends:
            job = by_name[ended.job.name]
            if has_ended(job, ended.code):
                yield job
            else:
                num_stopped += 1
    if num_stopped:
        raise errors.Interrupted(
            f"{num_stopped} runs were stopped or not started; the same command continues the sweep"
        )


def has_ended(job: Job, code: int | None) -> bool:
    """Whether a run ended by itself rather than being stopped; an error of a run ends the sweep."""
    log = job.folder / "log.txt"
    if code == errors.Diverged.exit_code:
        lines = files.read_bytes(log).decode(errors="replace").strip().splitlines()
        write_record(job.folder, diverged=lines[-1] if lines else "diverged")
    elif code in (None, errors.Interrupted.exit_code, -signal.SIGTERM):
        return False
    elif code:
        raise errors.UsageError(f"{job} ended with code {code}; the reason is in {log}")
    return True


def add_seconds(job: Job, seconds: float, hardware: str) -> None:
    """Adds the time since it was started to the record of a run, and notes the hardware."""
    spent = sweep_results.read_record(job.folder).get("seconds", 0.0) + seconds
    write_record(job.folder, seconds=round(spent, 1), hardware=hardware)


def write_record(folder: pathlib.Path, **values: Any) -> None:
    """Sets values in the record of a run, and keeps the others."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_files.locked(folder):
        workdirs.write_json(folder, "sweep.json", {**sweep_results.read_record(folder), **values})


def describe_hardware() -> str:
    """The devices and the cores of this process, as "2 cpu, 2 cores"."""
    return f"{jax.device_count()} {jax.devices()[0].device_kind}, {os.cpu_count()} cores"


def describe_result(folder: pathlib.Path) -> str:
    """The result of a run that has ended, in a few words."""
    record = sweep_results.read_record(folder)
    if "diverged" in record:
        return "diverged"
    nats = sweep_results.read_results(folder)["valid_nats"]
    return f"valid {nats:.4f} nats, {units.span(record.get('seconds', 0.0))}"

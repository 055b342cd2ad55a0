"""Tuning: a worker that asks for trials, runs them and tells what came out, until all are done.

    python -m mogrifier_jax.main --mode=tune --config=experiments/ptb.py --study=appendix_a \
        --trials=100 --parallel=4 --workdir=runs/tune_ptb

Any number of workers may share a storage. `studies.py` says what is tuned, `trials.py` hands out
suggestions, `tuning_training.py` trains them, `tuning_report.py` tells what was found. The
objective is the best validation cross-entropy, in nats per token.
"""

import collections
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.training import progress, workdirs
from mogrifier_jax.tuning import storages, studies, study_report, trials, tuning_training, vizier

POLL_SECONDS = 2.0  # Between looks at what other workers do.


class Executor(Protocol):
    """Runs trials, and tells each of them how it went."""

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """All of them, together where that is possible."""


def tune(
    config: config_dict.ConfigDict,
    workdir: str,
    *,
    study: str,
    name: str,
    num_trials: int,
    parallel: int = 1,
    storage: str | None = None,
    sampler: str = "gp",
    prune: bool = False,
) -> list[trials.Record]:
    """Tunes the training of a config; `name` is what the experiment is called in the storage."""
    check_numbers(num_trials, parallel)
    tuned = studies.load(study)
    studies.check(tuned)
    name = f"{name}-{tuned.name}"
    queue = open_queue(
        tuned,
        workdir,
        name=name,
        num_trials=num_trials,
        storage=storage,
        sampler=sampler,
        seed=config.seed,
        prune=config.schedule.turns if prune else None,
        config=tuning_training.plain_config(config),
    )
    training = tuning_training.Training(tuned, config, workdir, parallel)
    work(queue, training, parallel, tuned.shapes)
    study_report.write(name, queue.records(), tuned, workdir, unit=training.unit, config=config)
    return queue.records()


def open_queue(
    study: studies.Study,
    workdir: str,
    *,
    name: str,
    num_trials: int,
    storage: str | None,
    sampler: str,
    seed: int,
    prune: int | None = None,
    **about: Any,
) -> Any:
    """The trials of a study in its storage; `prune` is the number of turns, None is never."""
    about = {"study": study.to_json(), **about}
    check_workdir(workdir, name)
    os.makedirs(workdir, exist_ok=True)
    queue: Any
    if storage is not None and storage.startswith("vizier://"):
        queue = vizier.Queue(
            storage,
            name,
            study.ranges,
            num_trials,
            workdir=workdir,
            about=about,
            prune=prune is not None,
        )
    else:
        storages.check_sampler(sampler)
        opened = storages.open_study(
            storage or storages.default(workdir),
            name,
            about,
            sampler=sampler,
            seed=seed,
            pruner=None if prune is None else storages.make_pruner(prune),
        )
        queue = trials.Queue(opened, study.ranges, num_trials)
    workdirs.write_json(workdir, "study.json", {"name": name})
    return queue


def check_numbers(num_trials: int, parallel: int) -> None:
    """Refuses what cannot be counted, and workers that are parts of one run."""
    for flag, value in (("trials", num_trials), ("parallel", parallel)):
        if value < 1:
            raise errors.UsageError(f"--{flag}={value} must be at least 1")
    if jax.process_count() > 1:
        raise errors.UsageError(
            "--mode=tune runs in one process: start one worker on each host, without "
            "--coordinator, all with the same --storage"
        )


def check_workdir(workdir: str, name: str) -> None:
    """Refuses the workdir of another study."""
    path = pathlib.Path(workdir) / "study.json"
    if path.exists():
        there = workdirs.read_json(path, dict, "delete it, or use another --workdir").get("name")
        if there != name:
            raise errors.UsageError(
                f"{workdir} belongs to the study {there!r}, this one is {name!r}; use another "
                "--workdir"
            )


def work(queue: Any, executor: Executor, parallel: int, shapes: Sequence[str] = ()) -> None:
    """Runs trials until the study has all it wants, also those that other workers leave behind."""
    while True:
        asked = queue.ask(parallel, shapes)
        if asked:
            logging.info("%s", describe_progress(queue))
            with queue.hold(asked):
                executor.run(asked)
        elif any(trial.outcome == "running" for trial in queue.records()):
            time.sleep(POLL_SECONDS)
        else:
            logging.info("%s", describe_progress(queue))
            return


def describe_progress(queue: Any) -> str:
    """Done, running, best so far and the time left, in a line."""
    known = queue.records()
    over = [trial for trial in known if trial.outcome not in ("running", "waiting")]
    running = sum(trial.outcome == "running" for trial in known)
    kinds = collections.Counter(t.outcome for t in over if t.outcome != "complete")
    others = "".join(f", {count} {kind}" for kind, count in kinds.items())
    line = f"trials: {len(over)} of {queue.target} done{others}; {running} running"
    complete = study_report.complete_trials(known)
    if complete:
        line += f"; best {complete[0].nats:.4f} nats (trial {complete[0].number})"
    if over and running:
        mean = sum(trial.seconds for trial in over) / len(over)
        line += f"; about {progress.span((queue.target - len(over)) * mean / running)} left"
    return line

"""A worker, which asks for trials, runs them and reports their values until a study is complete.

Any number of workers may share a storage, and `--parallel` starts several of them on this machine.
"""

import collections
import contextlib
import pathlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from absl import logging
from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.training import processes, signals, units
from mogrifier_jax.tuning import report, storages, studies, trials

POLL_SECONDS = 2.0  # How often a worker without a trial looks whether the others are done.


class Executor(Protocol):
    """Runs trials, and notes the value of each trial or why it has none."""

    unit: str  # Of scores in reports: "ppl", "bpc" or "bpb".
    at_once: int  # How many trials it runs at a time.
    shared: tuple[str, ...]  # The settings that all trials of one time must have in common.

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """Runs these trials."""


def start_workers(flags: Sequence[str], workdir: str, parallel: int) -> None:
    """Starts several workers with these flags, and waits until the study is complete.

    The output of the first worker is shown, and the others write theirs to files in the workdir.
    """
    logs = pathlib.Path(workdir) / "workers"
    command = [sys.executable, "-m", "mogrifier_jax.main", *flags]
    jobs = [
        processes.Job(f"worker {index}", command, logs / f"{index}.txt" if index else None)
        for index in range(parallel)
    ]
    codes = []
    with contextlib.closing(processes.run_side_by_side(jobs, parallel)) as ends:
        for job, code, _, _ in ends:
            codes.append(code)
            if code is not None and 0 < code != errors.Interrupted.exit_code:
                where = f"the reason is in {job.log}" if job.log else "the reason is above"
                raise errors.UsageError(f"{job.name} ended with code {code}; {where}")
            if code is not None and code < 0:
                killer = signal.Signals(-code).name
                logging.warning("%s was killed by %s; the others take over", job.name, killer)
    if 0 not in codes:  # A worker ends by itself only when the whole study is complete.
        raise errors.Interrupted("all workers were stopped; the same command continues the study")


def work(
    queue: trials.Queue,
    executor: Executor,
    study: studies.Study,
    workdir: str,
    config: config_dict.ConfigDict | None = None,
) -> list[trials.Record]:
    """Runs trials until the study is complete, including those that other workers leave behind."""
    with storages.explain_errors():
        while True:
            with signals.postponed():
                asked = queue.ask(executor.at_once, executor.shared)
                if asked:
                    logging.info("%s", describe_progress(queue))
                others = any(trial.outcome == "running" for trial in queue.records())
            if asked:
                with queue.hold(asked):
                    executor.run(asked)
            elif others:
                time.sleep(POLL_SECONDS)
            else:
                break
        logging.info("%s", describe_progress(queue))
        records, folder = queue.records(), pathlib.Path(workdir)
        report.Report(queue.name, records, study, folder, executor.unit, config).write()
        return records


def describe_progress(queue: trials.Queue) -> str:
    """One line: how many trials have ended and are running, the best value, and the time left."""
    records = queue.records()
    over = [trial for trial in records if trial.outcome not in ("running", "waiting")]
    running = sum(trial.outcome == "running" for trial in records)
    kinds = collections.Counter(t.outcome for t in over if t.outcome != "complete")
    others = "".join(f", {count} {kind}" for kind, count in kinds.items())
    line = f"trials: {len(over)} of {queue.target} done{others}; {running} running"
    complete = trials.best_first(records)
    if complete:
        line += f"; best {complete[0].nats:.4f} nats (trial {complete[0].number})"
    if over and running:
        mean = sum(trial.seconds for trial in over) / len(over)
        line += f"; about {units.span((queue.target - len(over)) * mean / running)} left"
    return line

"""Runs commands in parallel on this machine, each with its share of the devices (`--parallel`).

There is one process for each run of a sweep, or for each worker of a study.
"""

import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from absl import logging

from mogrifier_jax import errors, files, hardware
from mogrifier_jax.training import signals

POLL_SECONDS = 0.2  # Between looks at the processes.


class Job(NamedTuple):
    """A command to run. Its output is appended to a file, or shown if there is none."""

    name: str
    command: Sequence[str]
    log: pathlib.Path | None


class Ended(NamedTuple):
    """How a job has ended."""

    job: Job
    code: int | None  # None: not started, because of a request to stop.
    seconds: float = 0.0
    hardware: str = ""  # Its share of the machine.


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen
    share: hardware.Share
    began: float

    def end(self) -> Ended:
        seconds = time.monotonic() - self.began
        return Ended(self.job, self.process.returncode, seconds, self.share.hardware)


def check_parallel(parallel: int) -> None:
    """Refuses a number of processes below one."""
    if parallel < 1:
        raise errors.UsageError(
            f"--parallel={parallel} must be the number of runs at a time, at least 1"
        )


def run_side_by_side(
    jobs: Sequence[Job], parallel: int, note_end: Callable[[Ended], None] = lambda ended: None
) -> Generator[Ended]:
    """Runs jobs, `parallel` at a time, and yields each when it has ended.

    A request to stop is forwarded to all jobs. They are also stopped if the caller stops iterating.

    Args:
      note_end: called for every job that was started, even if the caller has stopped iterating.
    """
    waiting, running, free = list(jobs), list[_Running](), hardware.share(parallel)
    with signals.StopRequests() as stop_requests:
        try:
            while waiting or running:
                if stop_requests.requested():
                    _terminate(running)
                    while waiting:
                        yield Ended(waiting.pop(0), None)
                while waiting and len(running) < parallel:
                    running.append(_start(waiting.pop(0), free.pop(0)))
                time.sleep(POLL_SECONDS)
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    free.append(each.share)
                    note_end(each.end())
                    yield each.end()
        finally:
            _terminate(running)  # None is left if all went well.
            for each in running:
                note_end(each.end())


def _start(job: Job, share: hardware.Share) -> _Running:
    """Starts a job on its share of the devices."""
    logging.info("%s: starts", job.name)
    environment = {**os.environ, **share.environment}
    began = time.monotonic()
    with hardware.bound_to(share.cores):
        if job.log is None:
            process = subprocess.Popen(job.command, env=environment)
        else:
            job.log.parent.mkdir(parents=True, exist_ok=True)
            with files.open_to_write(job.log, os.O_APPEND | os.O_CREAT) as log:
                process = subprocess.Popen(
                    job.command, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
    return _Running(job, process, share, began)


def _terminate(running: Sequence[_Running]) -> None:
    """Sends SIGTERM to processes, upon which they save and exit, and waits for them."""
    for each in running:
        each.process.terminate()
    for each in running:
        each.process.wait()

"""Decides which worker runs which trial of a study that Optuna stores, and requeues lost ones.

No trial is lost: every worker notes every few seconds that it is alive, and if it dies, another one
marks its trial as failed and adds a new trial, which continues in the same folder from the last
checkpoint. The attribute `outcome` of a failed trial says why it failed; a failed trial without it
was taken over.

Optuna's own heartbeats and its `RetryHeartbeatStaleTrialCallback` do not replace this: they exist
only for databases and inside `study.optimize`, one failed write ends their thread, and they wait
for the grace period even when a process is known to be gone or has been told to stop.
"""

import contextlib
import math
import os
import pathlib
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from absl import logging
from optuna.trial import FrozenTrial, TrialState

from mogrifier_jax import errors, files
from mogrifier_jax.training import schedule
from mogrifier_jax.tuning import studies, trials

BEAT_SECONDS = 15.0  # How often a worker notes that it is alive.
GRACE_SECONDS = 120.0  # A worker without a heartbeat for this long is considered dead.
# So is one whose last heartbeat is older than that, after this long: its clock may just be behind.
DOUBT_SECONDS = 45.0
MAX_ATTEMPTS = 4  # A trial is given up after this many workers have died while running it.
# What Optuna raises when it reads content that it has not written.
_UNREADABLE = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


class Trial:
    """A suggestion that this worker tries; see `trials.Trial`."""

    def __init__(self, study: optuna.Study, trial: optuna.Trial):
        self._study, self._trial = study, trial
        self.number, self.params = trial.number, trial.params
        self.folder = folder_in(trial)
        self.attempt = trial.user_attrs.get("attempt", 1)
        self.open = True
        self.beat()
        self.note(folder=self.folder, worker=worker_name())

    def beat(self) -> None:
        """Notes that the trial is running; closes it if another worker has taken it over."""
        try:
            self._trial.set_user_attr("heartbeat", time.time())
        except optuna.exceptions.UpdateFinishedTrialError:
            self.open = False

    def report(self, turn: int, value: float) -> schedule.Stop | None:
        """Notes the best value so far; returns why the trial should stop, or None."""
        if not self.open:
            return schedule.Stop("lost", f"trial {self.number} was taken over by another worker")
        self._trial.report(value, turn)
        if self._trial.should_prune():
            return schedule.Stop("pruned", f"above the median of the trials at turn {turn}")
        return None

    def note(self, **values: Any) -> None:
        """Notes more facts about the trial, such as its hidden size."""
        for name, value in values.items():
            self._trial.set_user_attr(name, value)

    def finish(self, value: float) -> None:
        """Notes the final value of a trial that ran to its end."""
        self._tell(TrialState.COMPLETE, value)

    def fail(self, outcome: str, reason: str) -> None:
        """Notes why the trial has no value: it is "infeasible", "diverged" or was "pruned"."""
        state = TrialState.PRUNED if outcome == "pruned" else TrialState.FAIL
        self._tell(state, None, outcome=outcome, reason=reason)

    def _tell(self, state: TrialState, value: float | None, **attributes: Any) -> None:
        if self.open:
            self.open = False
            try:
                self.note(**attributes)
                self._study.tell(self.number, value, state)
            except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
                logging.warning(
                    "trial %d was finished by another worker in the meantime", self.number
                )


class Queue:
    """The trials of a study, as one worker sees them; see `trials.Queue`."""

    def __init__(self, study: optuna.Study, ranges: Mapping[str, studies.Range], target: int):
        self.study, self.name, self.target = study, study.study_name, target
        self._sampler, self._ranges = study.sampler, ranges
        # The last heartbeat seen of each trial, and when it was first seen.
        self._beats: dict[int, tuple[float, float]] = {}
        self._distributions = {name: limits.distribution for name, limits in ranges.items()}

    def ask(self, count: int = 1, shared: Iterable[str] = ()) -> list[Trial]:
        """Up to `count` trials to run now; new ones share the first one's values of `shared`."""
        self.take_over()
        asked: list[Trial] = []
        while len(asked) < count and self._has_more():
            fixed = {name: asked[0].params[name] for name in shared} if asked else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.sampler = optuna.samplers.PartialFixedSampler(fixed, self._sampler)
            try:
                trial = self.study.ask(self._distributions)
            except _UNREADABLE as error:  # Such as another range in the storage.
                raise trials.damaged(self.name, f"{type(error).__name__}: {error}") from None
            if trial.number in self._surplus():
                # Another worker has asked at the same time.
                trial.set_user_attr("outcome", "surplus")
                self.study.tell(trial, state=TrialState.FAIL)
                break
            asked.append(Trial(self.study, trial))
        return asked

    @contextlib.contextmanager
    def hold(self, held: Sequence[Trial]) -> Iterator[None]:
        """Sends heartbeats while the trials run, and requeues those that are left unfinished."""
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(BEAT_SECONDS):
                for trial in held:
                    try:
                        if trial.open:
                            trial.beat()
                    except Exception as error:
                        # The storage may be unreachable for a moment, and the next beat succeed.
                        logging.warning("no heartbeat for trial %d: %s", trial.number, error)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except (KeyboardInterrupt, errors.Interrupted, Exception) as error:
            failed = not isinstance(error, errors.Interrupted | KeyboardInterrupt)
            for trial in held:
                if trial.open:
                    trial.open = False
                    self.requeue(self.study.trials[trial.number], trial.attempt + failed)
            raise
        finally:
            stopped.set()
            thread.join()

    def take_over(self) -> None:
        """Requeues the trials of dead workers."""
        for trial in self.read(TrialState.RUNNING):
            if has_ended(trial) or self._is_silent(trial):
                logging.info("the worker of trial %d is gone; the trial is requeued", trial.number)
                self.requeue(trial, trial.user_attrs.get("attempt", 1) + 1)

    def _is_silent(self, trial: FrozenTrial) -> bool:
        """Whether this worker has seen no new heartbeat for a long time.

        It goes by its own clock, because the clock in the heartbeats of the other may be wrong.
        """
        beat, now = trial.user_attrs.get("heartbeat", 0.0), time.monotonic()
        if self._beats.get(trial.number, (None, 0.0))[0] != beat:
            self._beats[trial.number] = beat, now
        patience = DOUBT_SECONDS if time.time() - beat > GRACE_SECONDS else GRACE_SECONDS
        return now - self._beats[trial.number][1] >= patience

    def read(self, *states: TrialState) -> list[FrozenTrial]:
        """All trials, or those in these states; refuses content that no worker can have written."""
        try:
            all_trials = self.study.get_trials(deepcopy=False)
        except _UNREADABLE as error:
            raise trials.damaged(self.name, f"{type(error).__name__}: {error}") from None
        for number, trial in enumerate(all_trials):
            if reason := find_damage(trial, number, self._ranges):
                raise trials.damaged(self.name, f"trial {number}: {reason}")
        return [trial for trial in all_trials if not states or trial.state in states]

    def requeue(self, trial: FrozenTrial, attempt: int) -> None:
        """Marks a running trial as failed, and queues a new one that continues in its folder."""
        try:
            # The storage lets only one worker succeed here.
            self.study.tell(trial.number, state=TrialState.FAIL)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return
        attributes = {
            "folder": folder_in(trial),
            "attempt": attempt,
            "continues": trial.number,
        }
        if attempt > MAX_ATTEMPTS:
            reason = f"{MAX_ATTEMPTS} workers ended while they ran it"
            attributes |= {"outcome": "lost", "reason": reason}
        self.study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING if attempt <= MAX_ATTEMPTS else TrialState.FAIL,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs=attributes,
            )
        )

    def folders(self) -> set[str]:
        """The folders of all trials, as paths below the workdir."""
        return {folder_in(trial) for trial in self.read()}

    def records(self) -> list[trials.Record]:
        """The records of the trials that count towards the target, in their order."""
        return [_record(trial) for trial in self.counted()]

    def counted(self) -> list[FrozenTrial]:
        """Optuna's trials that count towards the target: neither taken over nor surplus."""
        return [
            trial
            for trial in self.read()
            if (trial.state != TrialState.FAIL or "outcome" in trial.user_attrs)
            and trial.user_attrs.get("outcome") != "surplus"
        ]

    def _has_more(self) -> bool:
        """Whether a requeued trial waits for a worker, or the study needs more trials."""
        return bool(self.read(TrialState.WAITING)) or len(self.counted()) < self.target

    def _surplus(self) -> set[int]:
        """The numbers of the newest trials beyond the target."""
        first = sorted(self.counted(), key=lambda t: ("continues" not in t.user_attrs, t.number))
        return {trial.number for trial in first[self.target :]}


def _record(trial: FrozenTrial) -> trials.Record:
    complete = trial.state == TrialState.COMPLETE
    return trials.Record(
        trial.number,
        trial.user_attrs.get("outcome") or trial.state.name.lower(),
        trial.value if complete and trial.value is not None else math.nan,
        trial.duration.total_seconds() if trial.duration else math.nan,
        trial.params,
        trial.user_attrs,
    )


def find_damage(trial: FrozenTrial, number: int, ranges: Mapping[str, studies.Range]) -> str | None:
    """Why no worker can have written a trial of these ranges; None if one can."""
    if trial.number != number:
        return f"its number is {trial.number!r:.40}"
    if reason := files.mismatch(trial.user_attrs, trials.ATTRIBUTES):
        return reason
    folder = trial.user_attrs.get("folder", trials.folder_of(trial.number))
    if not re.fullmatch(r"trials/[0-9]{4,9}", folder):
        return f"folder {folder!r} is not one of the study's own"
    complete = trial.state == TrialState.COMPLETE
    for name, limits in ranges.items():
        if name in trial.params or complete:
            schema = files.Number(int if limits.scale == "integer" else float, *limits[:2])
            if reason := files.mismatch(trial.params.get(name), schema, name):
                return reason
    if complete and trial.value is not None:
        return files.mismatch(trial.value, files.Number(float), "value")
    return None


def folder_in(trial: FrozenTrial | optuna.Trial) -> str:
    """The folder of a trial; a trial that continues another one has the same folder."""
    return trial.user_attrs.get("folder", trials.folder_of(trial.number))


def worker_name() -> str:
    """Identifies the machine, the process namespace and the process of this worker.

    It is "" where they are unknown.
    """
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    except OSError:
        return ""


def has_ended(trial: FrozenTrial) -> bool:
    """Whether the worker of a running trial was a process of this machine that no longer exists."""
    this_machine, _, _ = worker_name().rpartition(" ")
    machine, _, process = trial.user_attrs.get("worker", "").rpartition(" ")
    return bool(this_machine) and machine == this_machine and not os.path.exists(f"/proc/{process}")

"""The trials of a study in one of Optuna's storages, which any number of workers share.

No trial is lost. Every worker notes every few seconds that it is alive. If a worker is dead,
another one marks its trial as failed and adds a new trial, which continues in the same folder from
the last checkpoint. The attribute `outcome` of a failed trial says why it failed; a failed trial
without this attribute was taken over. `storages.py` opens the storage.
"""

import contextlib
import math
import os
import pathlib
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from absl import logging
from optuna.trial import FrozenTrial, TrialState

from mogrifier_jax import errors
from mogrifier_jax.training import schedule
from mogrifier_jax.tuning import studies, trials

BEAT_SECONDS = 15.0
GRACE_SECONDS = 120.0  # A worker without a beat for this long counts as dead.
MAX_ATTEMPTS = 4  # A trial during which this many workers died is given up.


class Trial:
    """One suggestion that this worker tries."""

    def __init__(self, study: optuna.Study, trial: optuna.Trial):
        self._study, self._trial = study, trial
        self.number, self.params = trial.number, trial.params
        self.folder = trial.user_attrs.get("folder", trials.folder_of(trial.number))
        self.attempt = trial.user_attrs.get("attempt", 1)
        self.open = True
        self.beat()
        self.note(folder=self.folder, worker=worker_name())

    def beat(self) -> None:
        """Notes that the trial is being worked on; closes it if another worker has taken over."""
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
        """Keeps more facts about the trial, such as its hidden size."""
        for name, value in values.items():
            self._trial.set_user_attr(name, value)

    def finish(self, value: float) -> None:
        """Notes the final value of a trial that came to its end."""
        self._tell(TrialState.COMPLETE, value)

    def fail(self, outcome: str, reason: str) -> None:
        """Notes why the trial has no value: it is "infeasible", it "diverged" or was "pruned"."""
        state = TrialState.PRUNED if outcome == "pruned" else TrialState.FAIL
        self._tell(state, None, outcome=outcome, reason=reason)

    def _tell(self, state: TrialState, value: float | None, **attributes: Any) -> None:
        if self.open:
            self.open = False
            try:
                self.note(**attributes)
                self._study.tell(self.number, value, state)
            except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
                logging.warning("trial %d was finished by another worker meanwhile", self.number)


class Queue:
    """The trials of one study, as one worker sees them."""

    def __init__(self, study: optuna.Study, ranges: Mapping[str, studies.Range], target: int):
        self.study, self.name, self.target = study, study.study_name, target
        self._sampler = study.sampler
        self._distributions = {name: limits.distribution for name, limits in ranges.items()}

    def ask(self, count: int = 1, shared: Iterable[str] = ()) -> list[Trial]:
        """Up to `count` trials to run now; new ones have the first one's values of `shared`."""
        self.take_over()
        asked: list[Trial] = []
        while len(asked) < count and self._has_more():
            fixed = {name: asked[0].params[name] for name in shared} if asked else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.sampler = optuna.samplers.PartialFixedSampler(fixed, self._sampler)
            trial = self.study.ask(self._distributions)
            if trial.number in self._surplus():
                # Another worker asked at the same moment.
                trial.set_user_attr("outcome", "surplus")
                self.study.tell(trial, state=TrialState.FAIL)
                break
            asked.append(Trial(self.study, trial))
        return asked

    @contextlib.contextmanager
    def hold(self, held: Sequence[Trial]) -> Iterator[None]:
        """Notes regularly that this worker is alive; puts back trials that it leaves unfinished."""
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(BEAT_SECONDS):
                for trial in held:
                    try:
                        if trial.open:
                            trial.beat()
                    except Exception as error:
                        # The storage may be unreachable for a moment; the next beat may succeed.
                        logging.warning("no heartbeat of trial %d: %s", trial.number, error)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except (KeyboardInterrupt, Exception) as error:
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
        """Puts the trials of dead workers back into the queue."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if is_stale(trial):
                logging.info("trial %d lost its worker: queued again", trial.number)
                self.requeue(trial, trial.user_attrs.get("attempt", 1) + 1)

    def requeue(self, trial: FrozenTrial, attempt: int) -> None:
        """Marks a running trial as failed and queues a new one, which goes on in its folder."""
        try:
            # The storage lets only one worker do this.
            self.study.tell(trial.number, state=TrialState.FAIL)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return
        attributes = {
            "folder": trial.user_attrs.get("folder", trials.folder_of(trial.number)),
            "attempt": attempt,
            "continues": trial.number,
        }
        if attempt > MAX_ATTEMPTS:
            reason = f"its worker ended {MAX_ATTEMPTS} times while it ran"
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
        known = self.study.get_trials(deepcopy=False)
        return {trial.user_attrs.get("folder", trials.folder_of(trial.number)) for trial in known}

    def records(self) -> list[trials.Record]:
        """The records of the trials that count towards the target, in their order."""
        return [_record(trial) for trial in self.counted()]

    def counted(self) -> list[FrozenTrial]:
        """Optuna's trials that count towards the target: neither taken over nor surplus."""
        known = self.study.get_trials(deepcopy=False)
        known = [t for t in known if t.state != TrialState.FAIL or "outcome" in t.user_attrs]
        return [t for t in known if t.user_attrs.get("outcome") != "surplus"]

    def _has_more(self) -> bool:
        """Whether a trial that was put back waits for a worker, or new ones are wanted."""
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return bool(waiting) or len(self.counted()) < self.target

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


def worker_name() -> str:
    """Names machine, process space and process of this worker; "" where they are unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    except OSError:
        return ""


def is_stale(trial: FrozenTrial) -> bool:
    """Whether the worker of a running trial is gone."""
    here, _, _ = worker_name().rpartition(" ")
    place, _, process = trial.user_attrs.get("worker", "").rpartition(" ")
    if here and place == here and not os.path.exists(f"/proc/{process}"):
        return True  # The worker was a process of this machine.
    started = trial.datetime_start.timestamp() if trial.datetime_start else math.inf
    return time.time() - trial.user_attrs.get("heartbeat", started) > GRACE_SECONDS

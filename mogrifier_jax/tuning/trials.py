"""The trials of a study in a storage that any number of workers share: ask, report, finish.

Optuna keeps the trials and suggests new ones. This module makes sure that no trial is lost. Every
worker notes every few seconds that it is alive. If a worker is dead, another one marks its trial as
failed and adds a new trial, which goes on in the same folder from the last checkpoint.

The attribute `outcome` of a failed trial says why it failed. A failed trial without this attribute
was taken over.
"""

import contextlib
import copy
import math
import os
import pathlib
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optuna
from absl import logging
from optuna.trial import FrozenTrial, TrialState

from mogrifier_jax import errors
from mogrifier_jax.tuning import studies

BEAT_SECONDS = 15.0
GRACE_SECONDS = 120.0  # A worker without a beat for this long counts as dead.
MAX_ATTEMPTS = 4  # A trial during which this many workers died is given up.


class Pruned(errors.Abandoned):
    """The trial is worse than the median of the others at this turn."""


class Lost(errors.Abandoned):
    """Another worker has taken the trial over, because this one seemed dead."""


class Record(NamedTuple):
    """The settings and the result of a trial, the same for every kind of storage."""

    number: int
    outcome: str  # "complete", "running", "waiting", or why there is no value.
    nats: float  # NaN unless complete.
    seconds: float
    params: Mapping[str, Any]
    notes: Mapping[str, Any]


class Trial:
    """One suggestion that this worker tries."""

    def __init__(self, queue: "Queue", trial: optuna.Trial):
        self._queue, self._trial = queue, trial
        self.number, self.params = trial.number, trial.params
        self.folder = trial.user_attrs.get("folder", folder_of(trial.number))
        self.attempt = trial.user_attrs.get("attempt", 1)
        self.open = True
        self.beat()
        for name, value in {"folder": self.folder, "worker": worker_name()}.items():
            trial.set_user_attr(name, value)

    def beat(self) -> None:
        """Notes that the trial is being worked on; closes it if another worker has taken over."""
        try:
            self._trial.set_user_attr("heartbeat", time.time())
        except optuna.exceptions.UpdateFinishedTrialError:
            self.open = False

    def report(self, turn: int, value: float) -> None:
        """Notes the best value so far; raises if the trial should stop."""
        if not self.open:
            raise Lost(f"trial {self.number} was taken over by another worker")
        self._trial.report(value, turn)
        if self._trial.should_prune():
            raise Pruned(f"above the median of the trials at turn {turn}")

    def note(self, **values: Any) -> None:
        """Keeps more facts about the trial, such as its hidden size."""
        for name, value in values.items():
            self._trial.set_user_attr(name, value)

    def finish(self, value: float) -> None:
        """Notes the final value of a trial that came to its end."""
        self._tell(TrialState.COMPLETE, value)

    def prune(self, reason: str) -> None:
        """Notes that the trial was stopped early because others were better."""
        self._tell(TrialState.PRUNED, None, outcome="pruned", reason=reason)

    def fail(self, outcome: str, reason: str) -> None:
        """Notes why the trial has no value: it is "infeasible", or it "diverged"."""
        self._tell(TrialState.FAIL, None, outcome=outcome, reason=reason)

    def put_back(self, *, attempt: int) -> None:
        """Leaves the trial to the next worker that asks."""
        if self.open:
            self.open = False
            self._queue.requeue(self._queue.study.trials[self.number], attempt)

    def _tell(self, state: TrialState, value: float | None, **attributes: Any) -> None:
        if self.open:
            with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                self.note(**attributes)
            try:
                self._queue.study.tell(self.number, value, state)
            except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
                logging.warning("trial %d was finished by another worker meanwhile", self.number)
        self.open = False


class Queue:
    """The trials of one study, as one worker sees them."""

    def __init__(self, study: optuna.Study, ranges: Mapping[str, studies.Range], target: int):
        self.study, self.target, self._sampler = study, target, study.sampler
        self.name = study.study_name
        self._distributions = {name: _distribution(limits) for name, limits in ranges.items()}

    def ask(self, count: int, shapes: Iterable[str] = ()) -> list[Trial]:
        """Up to `count` trials to run now; new ones have the first one's values of `shapes`."""
        self.take_over()
        asked: list[Trial] = []
        while len(asked) < count and (self.waiting() or len(self.counted()) < self.target):
            fixed = {name: asked[0].params[name] for name in shapes} if asked else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.sampler = optuna.samplers.PartialFixedSampler(fixed, self._sampler)
            trial = self.study.ask(self._distributions)
            if trial.number in self._surplus():
                # Another worker asked at the same moment.
                trial.set_user_attr("outcome", "surplus")
                self.study.tell(trial, state=TrialState.FAIL)
                break
            asked.append(Trial(self, trial))
        return asked

    @contextlib.contextmanager
    def hold(self, trials: Sequence[Trial]) -> Iterator[None]:
        """Notes regularly that this worker is alive; puts back trials that it leaves unfinished."""
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(BEAT_SECONDS):
                for trial in trials:
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
        except (errors.Interrupted, KeyboardInterrupt):
            for trial in trials:
                trial.put_back(attempt=trial.attempt)
            raise
        except Exception:
            for trial in trials:
                trial.put_back(attempt=trial.attempt + 1)
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
            "folder": trial.user_attrs.get("folder", folder_of(trial.number)),
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
        return {trial.user_attrs.get("folder", folder_of(trial.number)) for trial in known}

    def waiting(self) -> bool:
        """Whether a trial that was put back waits for a worker."""
        return bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def records(self) -> list[Record]:
        """The records of the trials that count towards the target, in their order."""
        return [_record(trial) for trial in self.counted()]

    def counted(self) -> list[FrozenTrial]:
        """Optuna's trials that count towards the target: see `counts`."""
        return [t for t in self.study.get_trials(deepcopy=False) if counts(t)]

    def _surplus(self) -> set[int]:
        """The numbers of the newest trials beyond the target."""
        first = sorted(self.counted(), key=lambda t: ("continues" not in t.user_attrs, t.number))
        return {trial.number for trial in first[self.target :]}


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial counts towards the target: it was neither taken over nor surplus."""
    outcome = trial.user_attrs.get("outcome")
    return outcome != "surplus" and (trial.state != TrialState.FAIL or outcome is not None)


def _record(trial: FrozenTrial) -> Record:
    complete = trial.state == TrialState.COMPLETE
    return Record(
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
    attributes = trial.user_attrs
    here, _, _ = worker_name().rpartition(" ")
    place, _, process = attributes.get("worker", "").rpartition(" ")
    if here and place == here and not os.path.exists(f"/proc/{process}"):
        return True  # The worker was a process of this machine.
    started = trial.datetime_start.timestamp() if trial.datetime_start else math.inf
    return time.time() - attributes.get("heartbeat", started) > GRACE_SECONDS


def folder_of(number: int) -> str:
    """The folder of a trial, as a path below the workdir of the study."""
    return f"trials/{number:04d}"


def _distribution(limits: studies.Range) -> optuna.distributions.BaseDistribution:
    """A range as Optuna's kind of distribution."""
    if limits.scale == "integer":
        return optuna.distributions.IntDistribution(int(limits.low), int(limits.high))
    return optuna.distributions.FloatDistribution(
        limits.low, limits.high, log=limits.scale == "log"
    )


class SeededSampler(optuna.samplers.BaseSampler):
    """A sampler whose draws depend only on a seed, the trial's number and the results so far.

    So workers that start together draw different values.
    """

    def __init__(self, name: str, seed: int):
        self._name, self._seed = name, seed
        self._sampler = _make_sampler(name, seed)

    def before_trial(self, study, trial):
        """Makes a sampler with the seed of this trial."""
        self._sampler = _make_sampler(self._name, (self._seed << 20) % 2**32 ^ trial.number)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study, trial):
        """Calls the sampler of this trial."""
        return self._sampler.infer_relative_search_space(_Judged(study), trial)

    def sample_relative(self, study, trial, search_space):
        """Calls the sampler of this trial."""
        return self._sampler.sample_relative(_Judged(study), trial, search_space)

    def sample_independent(self, study, trial, param_name, param_distribution):
        """Calls the sampler of this trial."""
        study = _Judged(study)
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study, trial, state, values):
        """Calls the sampler of this trial."""
        self._sampler.after_trial(study, trial, state, values)


def _make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)


class _Judged:
    """A study as samplers see it: a diverged or infeasible trial has the worst value of all.

    Optuna's samplers leave out failed trials, so they would suggest such settings again.
    """

    def __init__(self, study: optuna.Study):
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(self, deepcopy=True, states=None, use_cache=False) -> list[FrozenTrial]:
        """Optuna's own method of this name, through which its samplers read all trials."""
        known = self._study._get_trials(deepcopy, None, use_cache)
        values = [t.value for t in known if t.state == TrialState.COMPLETE and t.value is not None]
        # It is worse than every other value, but not so far off that it would flatten them.
        worst = math.nextafter(max(values, default=0.0), math.inf)
        seen = []
        for trial in known:
            if trial.user_attrs.get("outcome") in ("diverged", "infeasible"):
                trial = copy.copy(trial)
                trial.state, trial.value = TrialState.COMPLETE, worst
            seen.append(trial)
        return [trial for trial in seen if states is None or trial.state in states]

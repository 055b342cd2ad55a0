"""The interfaces of a trial and of a queue, which hands trials out to any number of workers.

`optuna_queue.py` implements both for Optuna's storages, and `vizier_queue.py` for a Vizier service.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mogrifier_jax import errors, files
from mogrifier_jax.training import schedule

# What workers note about a trial.
ATTRIBUTES = {
    **dict.fromkeys(("folder?", "worker?", "outcome?", "reason?"), str),
    **dict.fromkeys(("continues?", "hidden_size?", "num_params?", "best_turn?"), files.COUNT),
    "attempt?": files.Number(int, 1, 1000),
    **dict.fromkeys(("heartbeat?", "temperature?", "test_nats?"), files.Number(float)),
}


class Trial(Protocol):
    """A suggestion that a worker tries."""

    @property
    def number(self) -> int:
        """Its number in the study."""

    @property
    def params(self) -> Mapping[str, float]:
        """The settings to try, by the names of their keys."""

    @property
    def folder(self) -> str:
        """Its workdir, as a path below the workdir of the study."""

    def report(self, turn: int, value: float) -> schedule.Stop | None:
        """Notes the best value so far; returns why the trial should stop, or None."""

    def note(self, **values: Any) -> None:
        """Notes more facts about the trial, such as its hidden size."""

    def finish(self, value: float) -> None:
        """Notes the final value of a trial that ran to its end."""

    def fail(self, outcome: str, reason: str) -> None:
        """Notes why the trial has no value: it is "infeasible", "diverged" or was "pruned"."""


class Queue(Protocol):
    """The trials of a study, as one worker sees them."""

    name: str
    target: int  # How many trials the study is to have.

    def ask(self, count: int = 1, shared: Iterable[str] = ()) -> Sequence[Trial]:
        """Up to `count` trials to run now, with equal values of `shared` settings if possible."""

    def hold(self, held: Sequence[Any]) -> contextlib.AbstractContextManager[object]:
        """Keeps trials of this queue from other workers for as long as this one runs them."""

    def folders(self) -> set[str]:
        """The folders of all trials, as paths below the workdir."""

    def records(self) -> "list[Record]":
        """The records of all trials that count, in their order."""


class Record(NamedTuple):
    """The settings and the result of a trial, in the same form for every kind of storage."""

    number: int
    outcome: str  # "complete", "running", "waiting", or why it has no value.
    nats: float  # NaN unless complete.
    seconds: float
    params: Mapping[str, float]
    notes: files.JsonObject


def best_first(records: Sequence[Record]) -> list[Record]:
    """The trials that have a value, the best one first."""
    return sorted((r for r in records if r.outcome == "complete"), key=lambda r: r.nats)


def folder_of(number: int) -> str:
    """The folder of a trial, as a path below the workdir of the study."""
    return f"trials/{number:04d}"


def damaged(name: str, reason: str) -> errors.UsageError:
    """The error for a storage with content that no worker can have written."""
    return errors.UsageError(
        f"the storage of the study {name!r} is damaged ({' '.join(reason.split())[:300]}); "
        "restore it from a copy, or use another --storage and --workdir for a new study"
    )

"""What is known of a trial, whoever keeps the study.

A queue hands out the trials of a study to any number of workers: `ask` gives a worker trials, and
each of them has `report` (after every turn), `note`, `finish` and `fail`. `optuna_queue.py` has the
queue of Optuna's storages and `vizier_queue.py` that of a Vizier service.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Record(NamedTuple):
    """The settings and the result of a trial, the same for every kind of storage."""

    number: int
    outcome: str  # "complete", "running", "waiting", or why there is no value.
    nats: float  # NaN unless complete.
    seconds: float
    params: Mapping[str, Any]
    notes: Mapping[str, Any]


def folder_of(number: int) -> str:
    """The folder of a trial, as a path below the workdir of the study."""
    return f"trials/{number:04d}"

"""Gets the trials of a study from a Vizier service, which suggests and assigns them.

A worker that is started again gets its trials back. If it never returns, no other worker gets them.
"""

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mogrifier_jax import errors, files
from mogrifier_jax.training import atomic_files, schedule
from mogrifier_jax.tuning import studies, trials

OBJECTIVE = "valid_nats"  # The name of the metric in the service.


class Queue:
    """The trials of a study in a service, as one worker sees them; see `trials.Queue`."""

    def __init__(
        self,
        storage: str,
        name: str,
        ranges: Mapping[str, studies.Range],
        target: int,
        *,
        workdir: str,
        about: files.JsonObject,
        prune: bool = False,
        shown: str = "the service",
    ):
        if importlib.util.find_spec("vizier") is None:
            raise errors.UsageError(
                f"--storage={shown} needs google-vizier, which is not installed; "
                "pip install google-vizier"
            )
        self.name, self.target, self._ranges, self._prune = name, target, ranges, prune
        self._worker = _claim_name(workdir)
        try:
            self._study = _open_service(storage, shown, name, ranges, about)
        except errors.UsageError:
            raise
        except Exception as error:  # gRPC raises many kinds of errors if nobody answers.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise errors.UsageError(
                f"--storage={shown} cannot be reached: {reason}; start a Vizier service there"
            ) from None

    def ask(self, count: int = 1, shared: Iterable[str] = ()) -> list["Trial"]:
        """Up to `count` trials to run now, beginning with those that this worker had before."""
        del shared  # A service cannot be asked for suggestions with given values.
        records = self.records()
        mine = sum(r.outcome == "running" and r.notes["worker"] == self._worker[0] for r in records)
        count = min(count, max(mine, self.target - len(records)))
        if count < 1:
            return []
        clients = self._study.suggest(count=count, client_id=self._worker[0])
        return [Trial(client, self._ranges, self._prune) for client in clients]

    def hold(self, held: Sequence["Trial"]) -> contextlib.AbstractContextManager[object]:
        """Does nothing, because the service knows which worker has a trial."""
        return contextlib.nullcontext(held)

    def folders(self) -> set[str]:
        """The folders of all trials, as paths below the workdir."""
        return {trials.folder_of(client.id) for client in self._study.trials()}

    def records(self) -> list[trials.Record]:
        """The records of all trials, in their order."""
        return [self._record(client.materialize()) for client in self._study.trials()]

    def _record(self, trial: Any) -> trials.Record:
        text, remedy = trial.metadata.get("notes", "{}"), "use another study"
        notes = files.parse_json(text, trials.ATTRIBUTES, f"the notes of trial {trial.id}", remedy)
        notes |= {"worker": trial.assigned_worker}
        outcome = notes.get("outcome", "complete") if trial.is_completed else "running"
        complete = outcome == "complete"
        nats = trial.final_measurement.metrics[OBJECTIVE].value if complete else math.nan
        seconds = trial.duration.total_seconds() if trial.duration else math.nan
        params = {name: trial.parameters.get_value(name) for name in self._ranges}
        return trials.Record(trial.id, outcome, nats, seconds, params, notes)


class Trial:
    """A suggestion of a service that this worker tries; see `trials.Trial`."""

    def __init__(self, client: Any, ranges: Mapping[str, studies.Range], prune: bool):
        self._client, self._prune = client, prune
        self.number, self.folder = client.id, trials.folder_of(client.id)
        values = client.parameters
        # The service returns integers as floats.
        self.params = {
            name: int(values[name]) if limits.scale == "integer" else float(values[name])
            for name, limits in ranges.items()
        }
        self._notes: files.JsonObject = {"folder": self.folder}

    def report(self, turn: int, value: float) -> schedule.Stop | None:
        """Notes the best value so far; returns why the trial should stop, or None."""
        self._client.add_measurement(_measurement(value, turn))
        if self._prune and self._client.check_early_stopping():
            return schedule.Stop("pruned", f"stopped by the service at turn {turn}")
        return None

    def note(self, **values: Any) -> None:
        """Notes more facts about the trial, which the service gets when the trial has ended."""
        self._notes |= values

    def finish(self, value: float) -> None:
        """Notes the final value of a trial that ran to its end."""
        self._complete(_measurement(value))

    def fail(self, outcome: str, reason: str) -> None:
        """Notes why the trial has no value."""
        self.note(outcome=outcome, reason=reason)
        self._complete(None, reason)

    def _complete(self, measurement: Any, reason: str | None = None) -> None:
        from vizier.service import pyvizier as vz

        self._client.update_metadata(vz.Metadata({"notes": json.dumps(self._notes)}))
        self._client.complete(measurement, infeasible_reason=reason)


def _measurement(value: float, step: int = 0) -> Any:
    from vizier.service import pyvizier as vz

    return vz.Measurement(metrics={OBJECTIVE: value}, steps=step)


def _open_service(
    storage: str,
    shown: str,
    name: str,
    ranges: Mapping[str, studies.Range],
    about: files.JsonObject,
) -> Any:
    from vizier.service import clients
    from vizier.service import pyvizier as vz

    clients.environment_variables.server_endpoint = storage.removeprefix("vizier://")
    config = vz.StudyConfig(algorithm="DEFAULT")
    space = config.search_space.root
    for key, (low, high, scale) in ranges.items():
        if scale == "integer":
            space.add_int_param(key, int(low), int(high))
        else:
            kind = vz.ScaleType.LOG if scale == "log" else vz.ScaleType.LINEAR
            space.add_float_param(key, low, high, scale_type=kind)
    goal = vz.ObjectiveMetricGoal.MINIMIZE
    config.metric_information.append(vz.MetricInformation(OBJECTIVE, goal=goal))
    config.metadata["about"] = requested = json.dumps(about, sort_keys=True)
    study = clients.Study.from_study_config(config, owner="mogrifier_jax", study_id=name)
    text = study.materialize_study_config().metadata.get("about", requested)
    saved = files.parse_json(
        text, studies.SAVED_SCHEMA, f"the study {name!r}", "use another service"
    )
    start = f"{shown} contains a study {name!r}"
    studies.check_unchanged(start, saved, about, "Use another service")
    return study


def _claim_name(workdir: str) -> tuple[str, Any]:
    """A name that no other running worker has, and the lock that guarantees it.

    The workdir is part of the name, so workers of one host in two workdirs have different names.
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(workdir))).hexdigest()[:8]
    folder, number = pathlib.Path(workdir) / "workers", 0
    folder.mkdir(parents=True, exist_ok=True)
    while not atomic_files.lock(lock := atomic_files.open_lock(folder / f"{number}.lock")):
        lock.close()
        number += 1
    return f"{socket.gethostname()}-{digest}-{number}", lock

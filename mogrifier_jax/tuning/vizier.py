"""Trials that a Vizier service keeps and suggests, reached through its light client.

`vizier://host:port` is a running service. A worker that is started again gets its trials back. The
service has no heartbeat: if a worker never comes back, no other worker gets its trials. The service
cannot be asked for suggestions of given shapes, so trials rarely share them. `storages.py` opens
the queue.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mogrifier_jax import errors
from mogrifier_jax.tuning import studies, trials

OBJECTIVE = "valid_nats"


class VizierTrial:
    """One suggestion that this worker tries."""

    def __init__(self, client: Any, ranges: Mapping[str, studies.Range], prune: bool):
        self._client, self._prune = client, prune
        self.number = client.id
        self.folder, self.attempt, self.open = trials.folder_of(client.id), 1, True
        given = client.parameters
        # The service returns whole numbers as floats.
        self.params = {
            name: int(given[name]) if limits.scale == "integer" else float(given[name])
            for name, limits in ranges.items()
        }
        self._notes: dict[str, Any] = {"folder": self.folder}

    def report(self, turn: int, value: float) -> None:
        """Notes the best value so far; raises if the trial should stop."""
        self._client.add_measurement(_measurement(value, turn))
        if self._prune and self._client.check_early_stopping():
            raise trials.Pruned(f"stopped by the service at turn {turn}")

    def note(self, **values: Any) -> None:
        """Keeps more facts about the trial, such as its hidden size."""
        self._notes |= values

    def finish(self, value: float) -> None:
        """Notes the final value of a trial that came to its end."""
        self._complete(_measurement(value))

    def prune(self, reason: str) -> None:
        """Notes that the trial was stopped early."""
        self.fail("pruned", reason)

    def fail(self, outcome: str, reason: str) -> None:
        """Notes why the trial has no value."""
        self._notes |= {"outcome": outcome, "reason": reason}
        self._complete(None, reason)

    def put_back(self, *, attempt: int) -> None:
        """Closes the trial; the service gives it to this worker again when it comes back."""
        del attempt
        self.open = False

    def _complete(self, measurement: Any, reason: str | None = None) -> None:
        from vizier.service import pyvizier as vz

        self.open = False
        self._client.update_metadata(vz.Metadata({"notes": json.dumps(self._notes)}))
        self._client.complete(measurement, infeasible_reason=reason)


class VizierQueue:
    """The trials of one study in a service, as one worker sees them."""

    def __init__(
        self,
        storage: str,
        name: str,
        ranges: Mapping[str, studies.Range],
        target: int,
        *,
        workdir: str,
        about: Mapping[str, Any],
        prune: bool = False,
    ):
        if importlib.util.find_spec("vizier") is None:
            raise errors.UsageError(
                f"--storage={storage} needs google-vizier, which is not installed; "
                "pip install google-vizier"
            )
        self.name, self.target, self._ranges, self._prune = name, target, ranges, prune
        self._worker = _claim_name(workdir)
        try:
            self._study = _open(storage, name, ranges, about)
        except errors.UsageError:
            raise
        except Exception as error:  # gRPC has many ways to say that nobody answers.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise errors.UsageError(
                f"--storage={storage} cannot be reached: {reason}; start a Vizier service there"
            ) from None

    def ask(self, count: int, shapes: Iterable[str] = ()) -> list[VizierTrial]:
        """Up to `count` trials to run now; the trials that this worker had before come first."""
        del shapes
        known = self.records()
        mine = sum(r.outcome == "running" and r.notes["worker"] == self._worker[0] for r in known)
        count = min(count, max(mine, self.target - len(known)))
        if count < 1:
            return []
        given = self._study.suggest(count=count, client_id=self._worker[0])
        return [VizierTrial(client, self._ranges, self._prune) for client in given]

    @contextlib.contextmanager
    def hold(self, asked: Sequence[VizierTrial]) -> Iterator[None]:
        """Does nothing: the service knows which worker has a trial."""
        del asked
        yield

    def folders(self) -> set[str]:
        """The folders of all trials, as paths below the workdir."""
        return {trials.folder_of(client.id) for client in self._study.trials()}

    def records(self) -> list[trials.Record]:
        """The records of all trials, in their order."""
        return [_record(client.materialize(), self._ranges) for client in self._study.trials()]


def _open(storage: str, name: str, ranges: Mapping[str, studies.Range], about: Any) -> Any:
    from vizier.service import clients
    from vizier.service import pyvizier as vz

    clients.environment_variables.server_endpoint = storage.removeprefix("vizier://")
    config = vz.StudyConfig(algorithm="DEFAULT")
    for key, limits in ranges.items():
        if limits.scale == "integer":
            config.search_space.root.add_int_param(key, int(limits.low), int(limits.high))
        else:
            scale = vz.ScaleType.LOG if limits.scale == "log" else vz.ScaleType.LINEAR
            config.search_space.root.add_float_param(key, limits.low, limits.high, scale_type=scale)
    config.metric_information.append(
        vz.MetricInformation(OBJECTIVE, goal=vz.ObjectiveMetricGoal.MINIMIZE)
    )
    asked = json.dumps(about, sort_keys=True)
    config.metadata["about"] = asked
    study = clients.Study.from_study_config(config, owner="mogrifier_jax", study_id=name)
    saved = json.loads(study.materialize_study_config().metadata.get("about", asked))
    differences = studies.describe_differences(saved, about)
    if differences:
        raise errors.UsageError(
            f"{storage} holds a study {name!r} of another kind:{differences}\nUse another service, "
            "or the same settings to go on with it."
        )
    return study


def _measurement(value: float, step: int = 0) -> Any:
    from vizier.service import pyvizier as vz

    return vz.Measurement(metrics={OBJECTIVE: value}, steps=step)


def _record(trial: Any, ranges: Mapping[str, studies.Range]) -> trials.Record:
    notes = json.loads(trial.metadata.get("notes", "{}")) | {"worker": trial.assigned_worker}
    nats, outcome = math.nan, "running"
    if trial.is_completed:
        outcome = notes.get("outcome", "complete")
        if outcome == "complete":
            nats = trial.final_measurement.metrics[OBJECTIVE].value
    seconds = trial.duration.total_seconds() if trial.duration else math.nan
    params = {name: trial.parameters.get_value(name) for name in ranges}
    return trials.Record(trial.id, outcome, nats, seconds, params, notes)


def _claim_name(workdir: str) -> tuple[str, Any]:
    """A name that no other worker has now, and the lock that says so.

    The workdir is part of the name, so two workdirs of one host are different workers.
    """
    place = hashlib.sha256(os.fsencode(os.path.realpath(workdir))).hexdigest()[:8]
    folder = pathlib.Path(workdir) / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        lock = (folder / f"{number}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            number += 1
            continue
        return f"{socket.gethostname()}-{place}-{number}", lock

"""Where the trials of a study are kept: Optuna's storages, or a Vizier service.

A storage of Optuna is an SQLAlchemy URL, such as sqlite:///study.db or that of a PostgreSQL server,
or the path of a journal file on a disk that all workers see. `trials.py` hands out its trials.

`vizier://host:port` is a running Vizier service, reached through its light client. The service
keeps the trials and suggests them. A worker that is started again gets the trials back that it
had. The service has no heartbeat: trials of a worker that never comes back stay with it.
Suggestions are free, so trials rarely share shapes.
"""

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optuna
import sqlalchemy.exc
from optuna.storages import journal

from mogrifier_jax import errors
from mogrifier_jax.training import workdirs
from mogrifier_jax.tuning import studies, trials

SAMPLERS = ("gp", "tpe", "random")


def make_pruner(turns: int) -> optuna.pruners.BasePruner:
    """The median rule, after the first tenth of the turns."""
    return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=max(1, turns // 10))


def check_sampler(name: str) -> None:
    """Refuses a sampler that is not known, or lacks a package."""
    if name not in SAMPLERS:
        raise errors.UsageError(f"--sampler={name} is unknown; use {', '.join(SAMPLERS)}")
    if name == "gp" and importlib.util.find_spec("torch") is None:
        raise errors.UsageError(
            "--sampler=gp needs torch, which is not installed; pip install torch (the CPU build "
            "will do), or use --sampler=tpe"
        )


def open_queue(
    study: studies.Study,
    workdir: str,
    *,
    name: str,
    num_trials: int,
    seed: int,
    storage: str | None = None,
    sampler: str = "gp",
    prune: int | None = None,
    **about: Any,
) -> Any:
    """The trials of a study in its storage; `prune` is the number of turns, None is never."""
    about = {"study": study.to_json(), **about}
    _check_workdir(workdir, name)
    os.makedirs(workdir, exist_ok=True)
    queue: Any
    if storage is not None and storage.startswith("vizier://"):
        ranges, prunes = study.ranges, prune is not None
        queue = VizierQueue(
            storage, name, ranges, num_trials, workdir=workdir, about=about, prune=prunes
        )
    else:
        check_sampler(sampler)
        opened = open_study(
            storage or default(workdir),
            name,
            about,
            sampler=sampler,
            seed=seed,
            pruner=None if prune is None else make_pruner(prune),
        )
        queue = trials.Queue(opened, study.ranges, num_trials)
    workdirs.write_json(workdir, "study.json", {"name": name})
    return queue


def _check_workdir(workdir: str, name: str) -> None:
    """Refuses the workdir of another study."""
    path = pathlib.Path(workdir) / "study.json"
    if path.exists():
        there = workdirs.read_json(path, dict, "delete it, or use another --workdir").get("name")
        if there != name:
            raise errors.UsageError(
                f"{workdir} belongs to the study {there!r}, this one is {name!r}; use another "
                "--workdir"
            )


def open_study(
    storage: str,
    name: str,
    about: Mapping[str, Any],
    *,
    sampler: str = "gp",
    seed: int = 1,
    pruner: optuna.pruners.BasePruner | None = None,
) -> optuna.Study:
    """Creates the study in a storage or opens it; that of another config is refused.

    Args:
      storage: an SQLAlchemy URL, or the path of a journal file.
      about: plain values that must be the same in all workers.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = _reach(
        storage,
        lambda: optuna.create_study(
            storage=_open_storage(storage),
            study_name=name,
            sampler=trials.SeededSampler(sampler, seed),
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        ),
    )
    saved = study.user_attrs.get("about")
    if saved is None:
        study.set_user_attr("about", dict(about))
    else:
        differences = studies.describe_differences(saved, about)
        if differences:
            raise errors.UsageError(
                f"{hide_password(storage)} holds a study {name!r} of another kind:{differences}\n"
                "Use another --storage or --workdir for a new study, or the same settings to go on "
                "with it."
            )
    return study


def default(workdir: str) -> str:
    """The storage of a study that is all in one workdir."""
    return f"sqlite:///{pathlib.Path(workdir).absolute() / 'study.db'}"


def _open_storage(storage: str) -> optuna.storages.BaseStorage:
    if "://" not in storage:
        folder = pathlib.Path(storage).absolute().parent
        if not folder.is_dir():
            raise errors.UsageError(f"--storage={storage}: there is no folder {folder}; create it")
        backend = journal.JournalFileBackend(storage)
        return optuna.storages.JournalStorage(backend)
    if hide_password(storage).startswith("("):
        raise sqlalchemy.exc.ArgumentError("it is not an URL")
    wait = {"timeout": 60} if storage.startswith("sqlite") else {}
    options = {"connect_args": wait, "pool_pre_ping": True}
    return optuna.storages.RDBStorage(storage, engine_kwargs=options)


def _reach(storage: str, open_it: Callable[[], optuna.Study]) -> optuna.Study:
    """Opens a storage; what is wrong with it becomes one sentence."""
    for patience in (0.5, 1.0, 2.0, 0.0):
        try:
            with _one_at_a_time(storage):
                return open_it()
        except ImportError as error:
            problem: str = f"its driver is missing ({error})"
            break
        except (sqlalchemy.exc.OperationalError, sqlalchemy.exc.ProgrammingError) as error:
            problem = str(error.orig or error).strip().splitlines()[0]
        except sqlalchemy.exc.ArgumentError:  # Its text holds the URL, perhaps with a password.
            problem = "it is not an URL"
            break
        except sqlalchemy.exc.SQLAlchemyError as error:
            problem = str(error).splitlines()[0]
            break
        except OSError as error:
            problem = str(error)
            break
        # Two workers that make the tables of a new storage may be in each other's way.
        time.sleep(patience)
    raise errors.UsageError(
        f"--storage={hide_password(storage)} cannot be reached: {problem}; give a journal file, or "
        "an URL such as sqlite:///study.db or postgresql+psycopg://user:password@host/database"
    )


def hide_password(storage: str) -> str:
    """A storage as it may be shown: a file, or an URL without what may be secret."""
    if ":" not in storage:
        return storage
    try:
        url = sqlalchemy.engine.make_url(storage)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return "(an URL that cannot be read)"
    if url.drivername.startswith("sqlite"):
        return storage.partition("?")[0]
    if "@" in (url.host or ""):
        return "(an URL whose password has an @; write it as %40)"
    # What is after the question mark may hold a password too, under many names.
    shown = url.set(query={}).render_as_string(hide_password=True)
    return shown + "?..." * bool(url.query)


@contextlib.contextmanager
def _one_at_a_time(storage: str) -> Iterator[None]:
    """Keeps workers of one machine from creating the same file together."""
    path = storage.removeprefix("sqlite:///") if storage.startswith("sqlite:///") else ""
    if not path or not pathlib.Path(path).absolute().parent.is_dir():
        yield
        return
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


OBJECTIVE = "valid_nats"


class VizierTrial:
    """One suggestion that this worker is to try."""

    def __init__(self, client: Any, ranges: Mapping[str, studies.Range], prune: bool):
        self._client, self._prune = client, prune
        self.number = client.id
        self.folder, self.attempt, self.open = f"trials/{client.id:04d}", 1, True
        given = client.parameters
        # Whole numbers come back as floats.
        self.params = {
            name: int(given[name]) if limits.scale == "integer" else float(given[name])
            for name, limits in ranges.items()
        }
        self._notes: dict[str, Any] = {"folder": self.folder}

    def report(self, turn: int, value: float) -> None:
        """Notes the value so far; raises when it is not worth going on."""
        self._client.add_measurement(_measurement(value, turn))
        if self._prune and self._client.check_early_stopping():
            raise trials.Pruned(f"stopped by the service at turn {turn}")

    def note(self, **values: Any) -> None:
        """Keeps what is worth knowing beside the value."""
        self._notes |= values

    def finish(self, value: float) -> None:
        """The trial went to its end."""
        self._complete(_measurement(value))

    def prune(self, reason: str) -> None:
        """The trial was stopped early."""
        self.fail("pruned", reason)

    def fail(self, outcome: str, reason: str) -> None:
        """There is no value, and why."""
        self._notes |= {"outcome": outcome, "reason": reason}
        self._complete(None, reason)

    def put_back(self, *, attempt: int) -> None:
        """It stays with this worker, which gets it again when it is back."""
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
        """Up to `count` trials to run now; first those that this worker had before."""
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

    def records(self) -> list[trials.Record]:
        """All trials, in their order."""
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
    """A name that no other worker of this workdir has now, and the lock that says so."""
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
        return f"{socket.gethostname()}-{number}", lock

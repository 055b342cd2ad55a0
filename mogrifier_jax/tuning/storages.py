"""Where the trials of a study are kept: Optuna's storages, or a Vizier service.

A storage of Optuna is an SQLAlchemy URL, such as sqlite:///study.db or that of a PostgreSQL server,
or the path of a journal file on a disk that all workers see. `optuna_queue.py` and
`vizier_queue.py` hand out the trials. A storage that lost trials is refused, so that a study never
starts again from nothing.

Samplers suggest settings for the trials that Optuna keeps. A service makes its own suggestions.
"""

import contextlib
import copy
import importlib.util
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optuna
import sqlalchemy.exc
from absl import logging
from optuna.storages import journal
from optuna.trial import FrozenTrial, TrialState

from mogrifier_jax import errors
from mogrifier_jax.training import workdirs
from mogrifier_jax.tuning import optuna_queue, studies, vizier_queue

SAMPLERS = ("gp", "tpe", "random")
_COPY = "put it back from a copy, or use another --storage and --workdir for a new study"


def make_pruner(turns: int) -> optuna.pruners.BasePruner:
    """Stops trials that are worse than the median, after the first tenth of the turns."""
    return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=max(1, turns // 10))


def check_sampler(name: str) -> None:
    """Refuses a sampler that is unknown, or whose package is not installed."""
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
    """Opens the queue of a study's trials.

    Args:
      prune: the number of turns of a trial, for the pruner; None: no trial is pruned.
      about: plain values that must be the same in all workers.
    """
    about = {"study": study.to_json(), **about}
    began = _check_workdir(workdir, name)
    workdirs.check_place(workdir)
    os.makedirs(workdir, exist_ok=True)
    storage = storage or default(workdir)
    # Folders are listed before the storage is read. Another worker that begins a trial in between
    # adds it to the storage first, so its folder is never taken for a lost trial.
    paths = (pathlib.Path(workdir) / "trials").glob("*/config.json")
    folders = {f"trials/{path.parent.name}" for path in paths if path.parent.name.isdecimal()}
    queue: Any
    if storage.startswith("vizier://"):
        ranges, prunes = study.ranges, prune is not None
        queue = vizier_queue.Queue(
            storage, name, ranges, num_trials, workdir=workdir, about=about, prune=prunes
        )
    else:
        check_sampler(sampler)
        opened = open_study(
            storage,
            name,
            about,
            sampler=sampler,
            seed=seed,
            pruner=None if prune is None else make_pruner(prune),
            known=f"the study {name!r} of {workdir}" if began else None,
        )
        queue = optuna_queue.Queue(opened, study.ranges, num_trials)
    if lost := sorted(folders - queue.folders()):
        more = f" and {len(lost) - 3} more" * (len(lost) > 3)
        raise _forgotten(storage, f"{', '.join(lost[:3])}{more} of {workdir}")
    workdirs.write_json(workdir, "study.json", {"name": name})
    return queue


def _forgotten(storage: str, what: str) -> errors.UsageError:
    """The error when a storage was emptied, deleted or replaced by another one."""
    return errors.UsageError(
        f"--storage={hide_password(storage)} knows nothing of {what}: put the storage back from a "
        "copy, or use another --workdir for a new study"
    )


def _check_workdir(workdir: str, name: str) -> bool:
    """Whether the study was begun in this workdir; refuses the workdir of another study."""
    path = pathlib.Path(workdir) / "study.json"
    began = path.exists()
    if began:
        there = workdirs.read_json(path, dict, "delete it, or use another --workdir").get("name")
        if there != name:
            raise errors.UsageError(
                f"{workdir} belongs to the study {there!r}, this one is {name!r}; use another "
                "--workdir"
            )
    return began


def open_study(
    storage: str,
    name: str,
    about: Mapping[str, Any],
    *,
    sampler: str = "gp",
    seed: int = 1,
    pruner: optuna.pruners.BasePruner | None = None,
    known: str | None = None,
) -> optuna.Study:
    """Opens the study in a storage, or creates it; refuses a study of another config.

    Args:
      storage: an SQLAlchemy URL, or the path of a journal file.
      about: plain values that must be the same in all workers.
      known: how messages name a study that must exist already; None: it may be new.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = _reach(
        storage,
        lambda: optuna.create_study(
            storage=_open_storage(storage),
            study_name=name,
            sampler=_SeededSampler(sampler, seed),
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        ),
    )
    saved = study.user_attrs.get("about")
    if saved is None and known:
        raise _forgotten(storage, known)
    if saved is None:
        study.set_user_attr("about", dict(about))
    else:
        there = f"{hide_password(storage)} holds a study {name!r}"
        remedy = "Use another --storage or --workdir for a new study"
        studies.check_same(there, saved, about, remedy)
    return study


def default(workdir: str) -> str:
    """The storage that is used unless another is given: an SQLite file in the workdir."""
    return f"sqlite:///{pathlib.Path(workdir).absolute() / 'study.db'}"


def _open_storage(storage: str) -> optuna.storages.BaseStorage:
    if "://" not in storage:
        folder = pathlib.Path(storage).absolute().parent
        if not folder.is_dir():
            raise errors.UsageError(f"--storage={storage}: there is no folder {folder}; create it")
        return _open_journal(storage)
    if hide_password(storage).startswith("("):
        raise sqlalchemy.exc.ArgumentError("it is not a URL")
    wait = {"timeout": 60} if storage.startswith("sqlite") else {}
    options = {"connect_args": wait, "pool_pre_ping": True}
    return optuna.storages.RDBStorage(storage, engine_kwargs=options)


def _open_journal(path: str) -> optuna.storages.JournalStorage:
    """Opens a journal; repairs it where nothing is lost, and refuses other damage."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise errors.UsageError(f"--storage={path} is not a file; give a journal, or a URL")
    backend, lock = journal.JournalFileBackend(path), journal.JournalFileSymlinkLock(path)
    lock.acquire()  # No other worker is in the middle of a line now.
    try:
        _mend_journal(path)
    finally:
        lock.release()
    try:
        return optuna.storages.JournalStorage(backend)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise errors.UsageError(f"{path} is no journal of trials ({reason}); {_COPY}") from None


def _mend_journal(path: str) -> None:
    """Ends the last line, or cuts off half a line that a kill or a full disk left."""
    *lines, last = pathlib.Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not _is_entry(line):
            raise errors.UsageError(f"line {number} of {path} is not an entry of trials; {_COPY}")
    if _is_entry(last):
        with open(path, "ab") as file:
            file.write(b"\n")
    elif last:
        shutil.copyfile(path, f"{path}.damaged")
        os.truncate(path, sum(len(line) + 1 for line in lines))
        logging.warning("%s ended in half a line; it is cut off, %s.damaged keeps it", path, path)


def _is_entry(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Turns errors of a storage while trials run into one sentence."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        first = error.__cause__ if isinstance(error.__cause__, Exception) else error
        reason = str(getattr(first, "orig", None) or first).strip().splitlines()[0]
    except json.JSONDecodeError as error:
        reason = f"the journal has a line that is no entry ({error})"
    else:
        return
    raise errors.UsageError(
        f"the storage of the study failed: {reason}; once it works again, the same command goes on"
    )


def _reach(storage: str, open_it: Callable[[], optuna.Study]) -> optuna.Study:
    """Opens a storage, with several attempts; turns its errors into one sentence."""
    for patience in (0.5, 1.0, 2.0, 0.0):
        try:
            with _one_at_a_time(storage):
                return open_it()
        except (sqlalchemy.exc.OperationalError, sqlalchemy.exc.ProgrammingError) as error:
            problem = str(error.orig or error)
            # Two workers that create the tables of a new storage may disturb each other.
            time.sleep(patience)
            continue
        except ImportError as error:
            problem = f"its driver is missing ({error})"
        except sqlalchemy.exc.ArgumentError:  # Its text has the URL, perhaps with a password.
            problem = "it is not a URL"
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError) as error:
            problem = str(error)
        except (OSError, RuntimeError) as error:
            problem = str(error)
        break
    reason = problem.strip().splitlines()[0]
    raise errors.UsageError(
        f"--storage={hide_password(storage)} cannot be reached: {reason}; put a damaged one back "
        "from a copy, or give a journal file, or a URL such as sqlite:///study.db or "
        "postgresql+psycopg://user:password@host/database"
    )


def hide_password(storage: str) -> str:
    """A storage as messages may show it: a file, or a URL without its secrets."""
    if ":" not in storage:
        return storage
    try:
        url = sqlalchemy.engine.make_url(storage)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return "(a URL that cannot be read)"
    if url.drivername.startswith("sqlite"):
        return storage.partition("?")[0]
    if "@" in (url.host or ""):
        return "(a URL whose password has an @; write it as %40)"
    # The part after the question mark may have a password too, under many names.
    shown = url.set(query={}).render_as_string(hide_password=True)
    return shown + "?..." * bool(url.query)


def _one_at_a_time(storage: str) -> contextlib.AbstractContextManager:
    """Keeps workers from creating the same SQLite file together."""
    path = pathlib.Path(storage.removeprefix("sqlite:///"))
    is_file = storage.startswith("sqlite:///") and path.absolute().parent.is_dir()
    return workdirs.locked(path.parent) if is_file else contextlib.nullcontext()


class _SeededSampler(optuna.samplers.BaseSampler):
    """A sampler whose draws depend only on a seed, the trial's number and the results so far.

    So workers that start together draw different values.
    """

    def __init__(self, name: str, seed: int):
        self._name, self._seed = name, seed
        self._sampler = _make_sampler(name, seed)

    def before_trial(self, study, trial):
        self._sampler = _make_sampler(self._name, (self._seed << 20) % 2**32 ^ trial.number)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study, trial):
        return self._sampler.infer_relative_search_space(_Judged(study), trial)

    def sample_relative(self, study, trial, search_space):
        return self._sampler.sample_relative(_Judged(study), trial, search_space)

    def sample_independent(self, study, trial, param_name, param_distribution):
        study = _Judged(study)
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study, trial, state, values):
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

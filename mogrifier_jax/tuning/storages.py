"""Where the trials of a study are kept, and what suggests them: Optuna's storages and samplers.

A storage is an SQLAlchemy URL, such as sqlite:///study.db or that of a PostgreSQL server, or the
path of a journal file on a disk that all workers see. `trials.py` hands out the trials.
"""

import contextlib
import fcntl
import importlib.util
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optuna
import sqlalchemy.exc
from optuna.storages import journal

from mogrifier_jax import errors
from mogrifier_jax.tuning import studies

SAMPLERS = ("gp", "tpe", "random")


def distribution(limits: studies.Range) -> optuna.distributions.BaseDistribution:
    """The limits in Optuna's terms."""
    if limits.scale == "integer":
        return optuna.distributions.IntDistribution(int(limits.low), int(limits.high))
    return optuna.distributions.FloatDistribution(
        limits.low, limits.high, log=limits.scale == "log"
    )


class SeededSampler(optuna.samplers.BaseSampler):
    """A sampler whose draws follow from a seed and the number of the trial.

    So workers that start together do not draw the same. What is in `fixed` is not sampled.
    """

    def __init__(self, name: str, seed: int, fixed: Mapping[str, Any] | None = None):
        self._name, self._seed, self.fixed = name, seed, dict(fixed or {})
        self._sampler = _make_sampler(name, seed)

    def before_trial(self, study, trial):
        """Draws anew for each trial."""
        self._sampler = _make_sampler(self._name, (self._seed << 20) % 2**32 ^ trial.number)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study, trial):
        """Of what is not fixed."""
        space = self._sampler.infer_relative_search_space(study, trial)
        return {name: limits for name, limits in space.items() if name not in self.fixed}

    def sample_relative(self, study, trial, search_space):
        """By the sampler itself."""
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(self, study, trial, param_name, param_distribution):
        """By the sampler itself, unless it is fixed."""
        if param_name in self.fixed:
            return self.fixed[param_name]
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study, trial, state, values):
        """By the sampler itself."""
        self._sampler.after_trial(study, trial, state, values)


def _make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed)
    if name == "tpe":
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, warn_independent_sampling=False
        )
    return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)


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
            sampler=SeededSampler(sampler, seed),
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
        except sqlalchemy.exc.ArgumentError:  # Its text holds what was given.
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

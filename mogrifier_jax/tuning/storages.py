"""Opens the database or the journal file in which Optuna stores the trials of a study.

A storage is an SQLAlchemy URL, such as sqlite:///study.db or the URL of a PostgreSQL server, or the
path of a journal file on a disk that all workers can access. `queues.py` decides between these and
a Vizier service.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator

import optuna
import sqlalchemy.exc
import sqlalchemy.pool

from mogrifier_jax import errors, files
from mogrifier_jax.training import atomic_files
from mogrifier_jax.tuning import journals, redaction, samplers, studies, trials


def open_study(
    storage: str,
    name: str,
    about: files.JsonObject,
    *,
    sampler: str = "gp",
    seed: int = 1,
    pruner: optuna.pruners.BasePruner | None = None,
    known: str | None = None,
) -> optuna.Study:
    """Opens the study in a storage, or creates it; refuses a study of another config.

    Args:
      storage: an SQLAlchemy URL, or the path of a journal file.
      name: the name of the study in the storage.
      about: plain values that must be the same for all workers.
      sampler: one of `samplers.SAMPLERS`.
      seed: the seed of the sampler.
      pruner: None if no trial is to be pruned.
      known: how messages name a study that must exist already; None if it may be new.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = _open_patiently(
        storage,
        lambda: optuna.create_study(
            storage=open_storage(storage),
            study_name=name,
            sampler=samplers.make_sampler(sampler, seed),
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        ),
    )
    try:
        saved = study.user_attrs.get("about")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise trials.damaged(name, f"{type(error).__name__}: {error}") from None
    if saved is None and known:
        raise forgotten(storage, known)
    if saved is None:
        study.set_user_attr("about", dict(about))
    else:
        if reason := files.mismatch(saved, studies.SAVED_SCHEMA, "about"):
            raise trials.damaged(name, reason)
        start = f"{redaction.hide_password(storage)} contains a study {name!r}"
        remedy = "Use another --storage or --workdir for a new study"
        studies.check_unchanged(start, saved, about, remedy)
    return study


def default_storage(workdir: str) -> str:
    """The storage of a study for which none is given: an SQLite file in its workdir."""
    return f"sqlite:///{pathlib.Path(workdir).absolute() / 'study.db'}"


def open_storage(storage: str) -> optuna.storages.BaseStorage:
    """Opens the storage at an SQLAlchemy URL, or the journal at a path."""
    if "://" not in storage:
        folder = pathlib.Path(storage).absolute().parent
        if not folder.is_dir():
            shown, missing = map(redaction.hide_password, (storage, str(folder)))
            raise errors.UsageError(f"--storage={shown}: there is no folder {missing}; create it")
        return journals.open_journal(storage)
    if storage.startswith("sqlite"):
        # A file is opened quickly, whereas the connections of a pool would never be closed.
        options = {"connect_args": {"timeout": 60}, "poolclass": sqlalchemy.pool.NullPool}
    else:
        options = {"pool_pre_ping": True}
    return optuna.storages.RDBStorage(storage, engine_kwargs=options)


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Turns errors of a storage while trials are running into one sentence."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        reason = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
    except json.JSONDecodeError as error:
        reason = f"a line of the journal is not an entry ({error})"
    else:
        return
    raise errors.UsageError(
        f"the storage of the study failed: {reason}; once it works again, the same command "
        "continues the study"
    )


def _open_patiently(storage: str, open_it: Callable[[], optuna.Study]) -> optuna.Study:
    """Opens a storage in several attempts, and turns its errors into one sentence."""
    for patience in (0.5, 1.0, 2.0, 0.0):
        try:
            with _one_at_a_time(storage):
                return open_it()
        except (sqlalchemy.exc.OperationalError, sqlalchemy.exc.ProgrammingError) as error:
            problem = str(error.orig or error)
            # Two workers that create the tables of a new storage may get in each other's way.
            time.sleep(patience)
            continue
        except ImportError as error:
            problem = f"its driver is missing ({error})"
        except sqlalchemy.exc.ArgumentError:  # Its message has the URL, perhaps with a password.
            problem = "it is not a URL"
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError) as error:
            problem = str(error)
        except (OSError, RuntimeError) as error:
            problem = str(error)
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, errors.UsageError):
                raise
            problem = f"its content is not Optuna's ({type(error).__name__}: {error})"
        break
    reason = redaction.remove_secrets(problem.strip().splitlines()[0], storage)
    raise errors.UsageError(
        f"--storage={redaction.hide_password(storage)} cannot be reached: {reason}; restore a "
        "damaged one from a copy, or give a journal file, or a URL such as sqlite:///study.db or "
        "postgresql+psycopg://user:password@host/database"
    )


def _one_at_a_time(storage: str) -> contextlib.AbstractContextManager:
    """Keeps workers from creating the same SQLite file at the same time."""
    path = pathlib.Path(storage.removeprefix("sqlite:///"))
    is_file = storage.startswith("sqlite:///") and path.absolute().parent.is_dir()
    return atomic_files.locked(path.parent) if is_file else contextlib.nullcontext()


def forgotten(storage: str, what: str) -> errors.UsageError:
    """The error for a storage that was emptied, deleted or replaced by another one."""
    return errors.UsageError(
        f"--storage={redaction.hide_password(storage)} knows nothing about {what}; restore the "
        "storage from a copy, or use another --workdir for a new study"
    )

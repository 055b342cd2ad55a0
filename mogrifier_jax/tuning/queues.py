"""Opens the queue of a study: Optuna's in a database or journal, or that of a Vizier service.

`optuna_queue.py` has the queue of Optuna's storages, and `vizier_queue.py` the queue of a Vizier
service. A storage that has lost trials is refused, so that a study never starts from scratch by
mistake.
"""

import os
import pathlib
from typing import Any

from mogrifier_jax import errors, files
from mogrifier_jax.training import signals, workdirs
from mogrifier_jax.tuning import (
    optuna_queue,
    redaction,
    samplers,
    storages,
    studies,
    trials,
    vizier_queue,
)


@signals.postponed()  # The libraries of databases do not expect a signal handler to raise.
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
) -> trials.Queue:
    """Opens the queue of the trials of a study.

    Args:
      study: what is tuned.
      workdir: the folder of the study.
      name: the name of the study in the storage.
      num_trials: how many trials the study is to have, of all workers together.
      seed: the seed of the sampler.
      storage: an SQLAlchemy URL, a journal file, or vizier://host:port; by default an SQLite file
        in the workdir.
      sampler: one of `samplers.SAMPLERS`; a Vizier service has its own.
      prune: the number of turns of a trial, for the pruner; None if no trial is to be pruned.
      about: plain values that must be the same for all workers.
    """
    about = {"study": study.to_json(), **about}
    exists = _check_workdir(workdir, name)
    workdirs.check_place(workdir)
    os.makedirs(workdir, exist_ok=True)
    storage = storage or storages.default_storage(workdir)
    # Folders are listed before the storage is read, because a worker adds a trial to the storage
    # before it creates its folder. So no folder is mistaken for one of a lost trial.
    paths = (pathlib.Path(workdir) / "trials").glob("*/config.json")
    folders = {f"trials/{path.parent.name}" for path in paths if path.parent.name.isdecimal()}
    queue: trials.Queue
    if storage.startswith("vizier://"):
        queue = vizier_queue.Queue(
            storage,
            name,
            study.ranges,
            num_trials,
            workdir=workdir,
            about=about,
            prune=prune is not None,
            shown=redaction.hide_password(storage),
        )
    else:
        samplers.check_sampler(sampler)
        opened = storages.open_study(
            storage,
            name,
            about,
            sampler=sampler,
            seed=seed,
            pruner=None if prune is None else samplers.make_pruner(prune),
            known=f"the study {name!r} of {workdir}" if exists else None,
        )
        queue = optuna_queue.Queue(opened, study.ranges, num_trials)
    if lost := sorted(folders - queue.folders()):
        more = f" and {len(lost) - 3} more" * (len(lost) > 3)
        raise storages.forgotten(storage, f"{', '.join(lost[:3])}{more} of {workdir}")
    workdirs.write_json(workdir, "study.json", {"name": name})
    return queue


def _check_workdir(workdir: str, name: str) -> bool:
    """Whether the study exists in this workdir; refuses the workdir of another study."""
    path = pathlib.Path(workdir) / "study.json"
    exists = path.exists()
    if exists:
        remedy = "delete it, or use another --workdir"
        known = files.read_json(path, {"name": str}, remedy)["name"]
        if known != name:
            raise errors.UsageError(
                f"{workdir} belongs to the study {known!r}, but this one is {name!r}; use another "
                "--workdir"
            )
    return exists

"""Checkpoints of a training run: saved in the background, verified when they are read.

Orbax writes the arrays and commits a checkpoint by renaming its folder, so a killed run leaves
either a whole checkpoint or none. It restores flipped bytes as wrong numbers without a word, so
every leaf is saved with a checksum (`leaves.py`) that is computed again after it is restored.

    <workdir>/checkpoints/<step>/state            the arrays, flat, named by their path in the state
    <workdir>/checkpoints/<step>/info/info.json   bookkeeping, shapes, dtypes, checksums and a seal
    <workdir>/checkpoints/<step>.damaged          a checkpoint that failed its checks, set aside

Nothing here knows what is in the state. Config and vocabulary of a run are in `workdirs.py`.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import resource
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from mogrifier_jax import errors, files
from mogrifier_jax.training import leaves, workdirs

Which = Literal["latest", "best"]
PATIENCE = 30.0  # Seconds that a run waits for another one in its workdir to end.
_LEAF = {"shape": [files.COUNT], "dtype": str, "checksum": str, "key_kind?": str}
SEALED = {
    "content": {
        "step": files.COUNT,
        "best_step": (files.COUNT, None),
        "info": dict,
        "seal?": dict,
        "leaves": {str: _LEAF},
    },
    "sha256": str,
}


class Restored(NamedTuple):
    """What `Checkpoints.restore` found."""

    step: int
    state: Any
    info: dict[str, Any]
    seal: dict[str, Any]  # That of the checkpoint; empty in those of early versions.


class Checkpoints:
    """The checkpoints of one workdir; open it `read_only` beside a run that is writing.

    Kept are the last `keep` checkpoints and, for each of them, the one that was the best when it
    was saved: whichever of them a run resumes from, its best is there.

    Args:
      seal: plain values by name that belong to the state. They are saved with it, and it is not
        restored beside others. What was saved without a seal is not compared.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        keep: int = 2,
        read_only: bool = False,
        seal: Mapping[str, Any] | None = None,
    ):
        self._folder = pathlib.Path(workdir).absolute() / "checkpoints"
        self._keep = keep
        self._read_only = read_only
        self._seal = seal or {}
        self._lock = None if read_only else self._take_over()
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.PyTreeCheckpointHandler(), info=ocp.JsonCheckpointHandler("info.json")
            )
        )
        self._bytes = 0  # Of the last state that was saved.

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        # What ended the block matters more than a save that fails for the same reason.
        with contextlib.suppress(errors.UsageError) if kind else contextlib.nullcontext():
            self.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, whether good or not, in order."""
        names = [path.name for path in self._folder.glob("*") if path.name.isdecimal()]
        # "007" and other alphabets are digits too, but not as we write them.
        return sorted(int(name) for name in names if str(int(name)) == name)

    @property
    def latest_step(self) -> int | None:
        """The newest step with a committed checkpoint."""
        return max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The best step, according to the newest checkpoint that can be read."""
        return next(iter(self._best_steps()), None)

    def save(self, step: int, state: Any, *, info: dict[str, Any], best: bool) -> None:
        """Saves in the background; the buffers of `state` may be donated as soon as this returns.

        Args:
          info: what JSON can hold; floats come back exact, tuples as lists.
          best: whether this is now the best checkpoint of the run.
        """
        if self._read_only:
            raise RuntimeError("these checkpoints were opened read-only")
        self.wait()
        if (self.latest_step or 0) > step:
            raise errors.UsageError(
                f"a checkpoint of step {self.latest_step} is newer than step {step}, which is to "
                f"be saved; go on from the newest or use another workdir than {self._folder.parent}"
            )
        arrays = leaves.to_arrays(state)
        content = {
            "step": step,
            "best_step": step if best else self.best_step,
            "info": info,
            "seal": dict(self._seal),
            "leaves": leaves.describe(state),
        }
        if jax.process_index() == 0:
            self._make_room(step)
        # Orbax refuses arrays without elements; there is nothing in them to save.
        arrays = {name: array for name, array in arrays.items() if array.size}
        self._bytes = sum(array.nbytes for array in arrays.values())
        with self._saving():
            if jax.process_index() == 0 and self._free() < self._bytes + 2**20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._checkpointer.save(
                leaves.Folder(self._folder / str(step)),
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays), info=ocp.args.JsonSave(_seal(content))
                ),
            )

    def restore(
        self, abstract_state: Any, *, which: Which = "latest", partial: bool = False
    ) -> Restored | None:
        """Restores the newest (or best) good checkpoint; None if nothing was ever saved.

        A damaged checkpoint is named in a warning and passed over for the one before; once an
        older one turned out good, a run that resumes sets the damaged ones aside.

        Args:
          abstract_state: `jax.ShapeDtypeStruct`s, with the shardings that are wanted.
          partial: restore only the leaves of `abstract_state`, which may lack some of the saved.
        """
        self.wait()
        targets = leaves.to_abstract_arrays(abstract_state)
        failures: dict[int, str] = {}
        while (step := self._next_step(which, failures)) is not None:
            path = self._folder / str(step)
            try:
                content, arrays = self._read_verified(path, targets, abstract_state, partial)
            except errors.UsageError:
                raise
            # Damage comes as whatever the decoder that met it raises, a bare Exception included.
            except Exception as error:
                failures[step] = _shorten(error)
                # A folder that is gone and no longer named was removed by the run that is writing.
                if path.exists() or (which == "best" and self.best_step == step):
                    _warn_of_damage(path, failures[step])
                continue
            if which == "latest" and not self._read_only:
                self._set_aside(failures)
            state = leaves.from_arrays(arrays, abstract_state, content["leaves"])
            return Restored(step, state, content["info"], content.get("seal", {}))
        if failures:
            tried = "; ".join(f"{self._folder / str(s)}: {why}" for s, why in failures.items())
            raise errors.UsageError(
                f"no good checkpoint ({which}) in {self._folder}, tried {tried}; restore the "
                "folder from a copy, or start again in another workdir"
            )
        return None

    def wait(self) -> None:
        """Waits for the save under way, then removes the checkpoints that are no longer needed."""
        with self._saving():
            self._checkpointer.wait_until_finished()
        if not self._read_only and jax.process_index() == 0:
            self._prune()

    def close(self) -> None:
        """Finishes what is under way and lets others write here."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """A save that fails becomes one sentence; what was saved before stays."""
        try:
            yield
        # The storage library raises its own kinds for a full disk, a quota or a lost mount.
        except Exception as error:
            raise errors.UsageError(
                f"no checkpoint could be saved in {self._folder} ({_shorten(error)}): "
                f"{self._find_limit(error)}, then the same command goes on from step "
                f"{self.latest_step or 0}"
            ) from None

    def _find_limit(self, error: Exception) -> str:
        """What keeps a checkpoint from being saved, as far as that can be told, and the remedy."""
        place = os.statvfs(self._folder)
        if place.f_files and not place.f_favail:
            return "the disk has no inode for another file; delete files there"
        needed, free = self._bytes + 2**20, self._free()
        if free < needed or "No space" in str(error):
            sizes = f"{needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free"
            return f"it needs {sizes}; make room"
        largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if largest != resource.RLIM_INFINITY:
            return f"no file may be larger than {largest:,} bytes; raise that limit (ulimit -f)"
        return "the disk has room; see its quota, its permissions and its state"

    def _next_step(self, which: Which, failures: dict[int, str]) -> int | None:
        """The next step to try, read anew as a run may be writing; process 0 decides for all."""
        candidates = self.steps[::-1] if which == "latest" else self._best_steps(failures)
        if which == "best" and not candidates and self.steps and not failures:
            raise errors.UsageError(
                f"no readable checkpoint in {self._folder} names a best step; use the latest one"
            )
        step = next((s for s in candidates if s not in failures), -1)
        if jax.process_count() > 1:
            step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        return None if step < 0 else step

    def _best_steps(self, failures: dict[int, str] | None = None) -> list[int]:
        """What readable checkpoints, newest first, name as the best; notes why others do not."""
        best = []
        for step in self.steps[::-1]:
            path = self._folder / str(step)
            try:
                best.append(_read_content(path)["best_step"])
            except (ValueError, OSError) as error:
                # A folder that is gone was removed by the run that is writing.
                if failures is not None and step not in failures and path.exists():
                    failures[step] = _shorten(error)
                    _warn_of_damage(path, failures[step])
        return list(dict.fromkeys(step for step in best if step is not None))

    def _read_verified(
        self,
        path: pathlib.Path,
        targets: dict[str, jax.ShapeDtypeStruct],
        abstract_state: Any,
        partial: bool,
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Reads a checkpoint and verifies its checksums; raises in all processes or in none."""
        failure, content, arrays = None, {}, {}
        try:
            content = _read_content(path)
            self._check_seal(content.get("seal", {}))
            leaves.compare(content["leaves"], abstract_state, partial=partial)
            if irregular := files.find_irregular(path):
                raise OSError(f"{irregular} is not a file")
            arrays = leaves.read_arrays(path / "state", targets)
        except Exception as error:
            failure = error
        # One process may meet damage in what the others do not read.
        if not _all_processes(failure is None):
            raise failure or OSError("another process could not read it")
        for name, checksum in leaves.compute_checksums(arrays).items():
            if checksum != content["leaves"][name]["checksum"]:
                raise OSError(f"the checksum of {name} is wrong")
        return content, arrays

    def _check_seal(self, saved: Mapping[str, Any]) -> None:
        if not (saved and self._seal):
            return
        before, now = (workdirs.sealed_digests(each) for each in (saved, self._seal))
        # A corpus is not always read, and early versions did not seal it.
        if changed := [name for name in before if before[name] != now.get(name, before[name])]:
            raise errors.UsageError(
                f"the corpus is not the one that the run in {self._folder.parent} was trained on: "
                f"the text of {', '.join(changed)} is another; restore the text to go on, or start "
                "a new run in another workdir"
            )
        # Defaults are not sealed, so that what is on one side only differs as well.
        differences = [
            f"{name} {saved.get(name, 'by default')} (as trained) vs "
            f"{self._seal.get(name, 'by default')} (now)"
            for name in sorted({*saved, *self._seal})
            if saved.get(name) != self._seal.get(name) and not name.startswith(workdirs.CORPUS)
        ]
        if differences:
            raise errors.UsageError(
                f"files in {self._folder.parent} are not those that its weights were trained with: "
                f"{'; '.join(differences[:5])}; restore them from a copy"
            )

    def _take_over(self):
        """Claims the folder for writing and tidies up after a killed run."""
        lock = None
        if jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = workdirs.open_lock(self._folder / "lock")
            if self._wait_for(lock):
                _tidy(self._folder)
            else:
                lock.close()
                lock = None
        if not _all_processes(lock is not None or jax.process_index() != 0):
            raise errors.UsageError(
                f"another run is writing to {self._folder.parent}; wait for it, or stop it, or "
                "use another workdir"
            )
        return lock

    def _wait_for(self, lock: IO[str]) -> bool:
        """Takes the lock; a run that was just told to stop has some time to save and end."""
        if workdirs.lock(lock):
            return True
        logging.warning("another run is writing to %s; waiting for its end", self._folder.parent)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            time.sleep(0.1)
            if workdirs.lock(lock):
                return True
        return False

    def _make_room(self, step: int) -> None:
        """Moves a checkpoint of the same step out of the way until the new one is committed."""
        if os.path.lexists(self._folder / str(step)):
            _remove(self._folder / f"{step}.replaced")
            (self._folder / str(step)).rename(self._folder / f"{step}.replaced")

    def _prune(self) -> None:
        _settle_replaced(self._folder)
        steps = self.steps
        newest = steps[-self._keep :]
        try:
            bests = [_read_content(self._folder / str(step))["best_step"] for step in newest]
        except (ValueError, OSError):
            return  # A damaged one does not say which was the best: keep them all.
        for step in set(steps) - {*newest, *bests}:
            # Renamed first: a folder half removed by a killed run must not look like a checkpoint.
            _remove(_rename_to_free(self._folder / str(step), f"{step}.removed"))

    def _set_aside(self, steps: Iterable[int]) -> None:
        if jax.process_index() == 0:
            for step in steps:
                with contextlib.suppress(FileNotFoundError):
                    _rename_to_free(self._folder / str(step), f"{step}.damaged")


def _shorten(error: Exception) -> str:
    """The first line of what the storage library says, without its details."""
    text = str(error).strip().split("\n")[0].split(" See full ")[0]
    return text[:200] or type(error).__name__


def _warn_of_damage(path: pathlib.Path, why: str) -> None:
    logging.warning(
        "checkpoint of step %s is damaged: %s (%s); it is passed over", path.name, path, why
    )


def _seal(content: dict[str, Any]) -> dict[str, Any]:
    content = json.loads(json.dumps(content))  # As it will be read, which is what is digested.
    return {"content": content, "sha256": _digest(content)}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_content(path: pathlib.Path) -> dict[str, Any]:
    """The sealed JSON of a checkpoint; ValueError or OSError if it is not as it was written."""
    try:
        sealed = files.read_json(path / "info" / "info.json", SEALED, remedy="")
    except errors.UsageError as error:  # Damage, for which there may be another checkpoint.
        raise OSError(str(error)) from None
    if sealed["sha256"] != _digest(sealed["content"]):
        raise ValueError("info.json does not match its own checksum")
    if sealed["content"]["step"] != int(path.name):
        raise ValueError(f"it is a copy of the checkpoint of step {sealed['content']['step']}")
    return sealed["content"]


def _tidy(folder: pathlib.Path) -> None:
    """Removes what a killed run left half written or half removed."""
    for pattern in ("*.orbax-checkpoint-tmp*", "*.removed*"):
        for path in folder.glob(pattern):
            _remove(path)
    _settle_replaced(folder)


def _remove(path: pathlib.Path) -> None:
    """Removes what is in the place of a checkpoint; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _settle_replaced(folder: pathlib.Path) -> None:
    """Removes checkpoints that were replaced; takes one back whose place is empty."""
    for path in folder.glob("*.replaced"):
        if os.path.lexists(path.with_suffix("")):
            _remove(path)
        else:
            path.rename(path.with_suffix(""))


def _rename_to_free(path: pathlib.Path, name: str) -> pathlib.Path:
    """Renames to `name`, or `name.2`, `name.3`, ... if that is taken."""
    target, number = path.with_name(name), 2
    while os.path.lexists(target):
        target, number = path.with_name(f"{name}.{number}"), number + 1
    return path.rename(target)


def _all_processes(ok: bool) -> bool:
    """Whether it went well in every process."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.array(ok))))

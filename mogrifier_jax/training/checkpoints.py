"""Saves checkpoints in the background; if checksums differ, an older checkpoint is restored.

Orbax writes the arrays and commits a checkpoint by renaming its folder, so a killed run leaves
either a whole checkpoint or none. It does not notice flipped bits, so every leaf is saved with a
checksum (`state_arrays.py`) that is verified after it is restored.

    <workdir>/checkpoints/<step>/state            the arrays, named by their path in the state
    <workdir>/checkpoints/<step>/info/info.json   bookkeeping, checksums and a fingerprint
    <workdir>/checkpoints/<step>.damaged          a checkpoint that failed its checks, set aside

This module does not depend on what the state contains. `workdirs.py` has the config and the
vocabulary of a run.
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
from collections.abc import Iterable, Iterator
from typing import IO, Any, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from mogrifier_jax import buckets, errors, files
from mogrifier_jax.training import atomic_files, host_arrays, orbax_storage, state_arrays, workdirs

Which = Literal["latest", "best"]
PATIENCE = 30.0  # Seconds to wait for another run in the workdir to end.
_LEAF = {"shape": [files.COUNT], "dtype": str, "checksum": str, "key_kind?": str}
INFO_SCHEMA = {
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
    """What `Checkpoints.restore` returns."""

    step: int
    state: PyTree
    info: files.JsonObject
    fingerprint: files.JsonObject  # Empty in checkpoints of early versions.


class Checkpoints:
    """The checkpoints of a workdir; open them `read_only` if a run may be writing there.

    The last `keep` checkpoints are kept and, for each of them, the one that was the best when it
    was saved. So whichever of them a run resumes from, its best checkpoint exists.

    Args:
      fingerprint: plain values by name that the state depends on. They are saved with it, and a
        checkpoint with other values is not restored. Checkpoints without a fingerprint are.
      info: the schema (`files.py`) of the `info` of a checkpoint. One that does not fit is damaged.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        keep: int = 2,
        read_only: bool = False,
        fingerprint: files.JsonObject | None = None,
        info: Any = dict,
    ):
        self._folder = pathlib.Path(workdir).absolute() / "checkpoints"
        self._keep = keep
        self._read_only = read_only
        self._fingerprint, self._info = fingerprint or {}, info
        # Only process 0 has a copy of a bucket, so it reads and writes for all.
        self._single = jax.process_count() > 1 and buckets.is_mirror(self._folder)
        self._agreed_step: int | None = None  # The newest one, where not all can see the folder.
        self._lock = None if read_only else self._take_over()
        self._checkpointer = orbax_storage.make_checkpointer(alone=self._single)
        self._bytes = 0  # Of the last state that was saved.
        self._saved_since_release = False
        self._quiet = contextlib.ExitStack()
        if not read_only:  # Saves run in the background.
            self._quiet.enter_context(orbax_storage.quiet_failure())

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        # The exception of the block matters more than a save that fails for the same reason.
        with contextlib.suppress(errors.UsageError) if kind else contextlib.nullcontext():
            self.close()

    @property
    def steps(self) -> list[int]:
        """The steps of all committed checkpoints in order, whether good or damaged."""
        return _list_steps(self._folder)

    @property
    def latest_step(self) -> int | None:
        """The newest step with a committed checkpoint."""
        return self._agreed_step if self._single else max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The best step, according to the newest checkpoint that can be read."""
        return next(iter(self._best_steps()), None)

    def save(self, step: int, state: PyTree, *, info: files.JsonObject, best: bool) -> None:
        """Saves in the background; the buffers of `state` may be donated as soon as this returns.

        Args:
          info: values for JSON; floats are restored exactly, tuples as lists.
          best: whether this is now the best checkpoint of the run.
        """
        if self._read_only:
            raise RuntimeError("these checkpoints were opened read-only")
        self.wait()
        if (self.latest_step or 0) > step:
            raise errors.UsageError(
                f"step {step} cannot be saved, because {self._folder.parent} has a newer "
                f"checkpoint, of step {self.latest_step}; resume from it or use another workdir"
            )
        arrays = state_arrays.to_arrays(state)
        content = {
            "step": step,
            "best_step": step if best else self.best_step,
            "info": info,
            "seal": dict(self._fingerprint),
            "leaves": state_arrays.describe_leaves(state),
        }
        if jax.process_index() == 0:
            self._make_room(step)
        # Orbax refuses empty arrays.
        arrays = {name: array for name, array in arrays.items() if array.size}
        self._bytes = sum(array.nbytes for array in arrays.values())
        self._saved_since_release = True
        if self._single:
            self._agreed_step = step
            arrays = host_arrays.gather(arrays)
            if jax.process_index() != 0:
                return
        with self._saving():
            if jax.process_index() == 0 and self._free() < self._bytes + 2**20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._checkpointer.save(
                orbax_storage.Folder(self._folder / str(step)),
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays), info=ocp.args.JsonSave(_add_digest(content))
                ),
            )

    def restore(
        self, abstract_state: PyTree, *, which: Which = "latest", partial: bool = False
    ) -> Restored | None:
        """Restores the newest (or best) good checkpoint; None if nothing was ever saved.

        A damaged checkpoint is skipped with a warning, and the one before it is tried. Once an
        older one has turned out to be good, a run that resumes sets the damaged ones aside.

        Args:
          abstract_state: `jax.ShapeDtypeStruct`s with the shardings to restore to.
          partial: restore only the leaves of `abstract_state`, which may lack some saved ones.
        """
        self.wait()
        targets = state_arrays.to_abstract_arrays(abstract_state)
        failures: dict[int, str] = {}
        while (step := self._next_step(which, failures)) is not None:
            path = self._folder / str(step)
            try:
                content, arrays = self._read_verified(path, targets, abstract_state, partial)
            except errors.UsageError:
                raise
            # A damaged file may raise anything, even a bare Exception.
            except Exception as error:
                failures[step] = _shorten(error)
                # A folder that has disappeared was removed by the run that is writing here.
                if path.exists() or (which == "best" and self.best_step == step):
                    _warn_of_damage(path, failures[step])
                continue
            if which == "latest" and not self._read_only:
                self._set_aside(failures)
            if which == "latest":
                self._agreed_step = step
            state = state_arrays.from_arrays(arrays, abstract_state, content["leaves"])
            return Restored(step, state, content["info"], content.get("seal", {}))
        if failures:
            tried = "; ".join(f"{self._folder / str(s)}: {why}" for s, why in failures.items())
            raise errors.UsageError(
                f"no good checkpoint ({which}) in {self._folder}, tried {tried}; restore the "
                "folder from a copy, or start again in another workdir"
            )
        return None

    def wait(self) -> None:
        """Waits for the save in progress, then removes checkpoints that are no longer needed."""
        with self._saving():
            self._checkpointer.wait_until_finished()
        if not self._read_only and jax.process_index() == 0:
            self._prune()
        if self._saved_since_release:
            orbax_storage.release_memory()
            self._saved_since_release = False

    def close(self) -> None:
        """Waits for the save in progress, and releases the lock of the folder."""
        try:
            self.wait()
            self._quiet.close()
        finally:
            self._checkpointer.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Turns the failure of a save into one sentence; earlier checkpoints are kept."""
        try:
            yield
        # TensorStore has exceptions of its own for a full disk, a quota or a lost mount.
        except Exception as error:
            self._quiet.pop_all()  # What was in progress may fail later.
            raise errors.UsageError(
                f"no checkpoint could be saved in {self._folder} ({_shorten(error)}): "
                f"{self._find_limit(error)}, then repeat the command, which resumes from step "
                f"{self.latest_step or 0}"
            ) from None

    def _find_limit(self, error: Exception) -> str:
        """The probable reason why a checkpoint could not be saved, and the remedy."""
        place = os.statvfs(self._folder)
        if place.f_files and not place.f_favail:
            return "the disk has no inode for another file; delete files there"
        needed, free = self._bytes + 2**20, self._free()
        if free < needed or "No space" in str(error):
            sizes = f"{needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free"
            return f"it needs {sizes}; make room"
        if os.strerror(errno.EMFILE) in str(error):
            return "this process has too many open files; raise that limit (ulimit -n)"
        largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if largest != resource.RLIM_INFINITY:
            return f"no file may be larger than {largest:,} bytes; raise that limit (ulimit -f)"
        return "the disk has room; check its quota, its permissions and its health"

    def _next_step(self, which: Which, failures: dict[int, str]) -> int | None:
        """The next step to try; process 0 decides, and lists again, as a run may be writing."""
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
        """The best steps according to readable checkpoints, newest first; notes failures."""
        best = []
        for step in self.steps[::-1]:
            path = self._folder / str(step)
            try:
                best.append(_read_content(path)["best_step"])
            except (ValueError, OSError) as error:
                # A folder that has disappeared was removed by the run that is writing here.
                if failures is not None and step not in failures and path.exists():
                    failures[step] = _shorten(error)
                    _warn_of_damage(path, failures[step])
        return list(dict.fromkeys(step for step in best if step is not None))

    def _read_verified(
        self,
        path: pathlib.Path,
        targets: dict[str, jax.ShapeDtypeStruct],
        abstract_state: PyTree,
        partial: bool,
    ) -> tuple[files.JsonObject, dict[str, jax.Array]]:
        """Reads a checkpoint and verifies its checksums; raises in all processes or in none."""
        failure, content, arrays = None, {}, {}
        try:
            if not self._single or jax.process_index() == 0:
                content = _read_content(path)
                if reason := files.mismatch(content["info"], self._info, "info"):
                    raise ValueError(f"info.json: {reason}")
                self._check_fingerprint(content.get("seal", {}))
                state_arrays.check_compatible(content["leaves"], abstract_state, partial=partial)
                if irregular := files.find_irregular(path):
                    raise OSError(f"{irregular} is not a file")
                folder = path / "state"
                arrays = orbax_storage.read_arrays(folder, targets, on_host=self._single)
        except Exception as error:
            failure = error
        # The damage may be in a part that only some processes read.
        if not _all_processes(failure is None):
            raise failure or OSError("another process could not read it")
        if self._single:
            content = json.loads(host_arrays.broadcast(json.dumps(content).encode()))
            arrays = host_arrays.distribute(arrays, targets)
        for name, checksum in state_arrays.compute_checksums(arrays).items():
            if checksum != content["leaves"][name]["checksum"]:
                raise OSError(f"the checksum of {name} is wrong")
        return content, arrays

    def _check_fingerprint(self, saved: files.JsonObject) -> None:
        if not (saved and self._fingerprint):
            return
        before, now = (workdirs.corpus_digests(each) for each in (saved, self._fingerprint))
        # A corpus is not always read, and early versions did not remember it.
        if changed := [name for name in before if before[name] != now.get(name, before[name])]:
            raise errors.UsageError(
                f"the corpus is not the one that the run in {self._folder.parent} was trained on: "
                f"the text of {', '.join(changed)} has changed; restore the text to resume, or "
                "start a new run in another workdir"
            )
        # Fingerprints omit defaults, so a value that only one of them has differs as well.
        differences = [
            f"{name} {saved.get(name, 'by default')} (as trained) vs "
            f"{self._fingerprint.get(name, 'by default')} (now)"
            for name in sorted({*saved, *self._fingerprint})
            if saved.get(name) != self._fingerprint.get(name)
            and not name.startswith(workdirs.CORPUS)
        ]
        if differences:
            raise errors.UsageError(
                f"files in {self._folder.parent} are not those that its weights were trained with: "
                f"{'; '.join(differences[:5])}; restore them from a copy"
            )

    def _take_over(self) -> IO[str] | None:
        """Locks the folder for writing, and cleans up after a killed run."""
        lock = None
        if jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = atomic_files.open_lock(self._folder / "lock")
            if self._wait_for(lock):
                _clean_up(self._folder)
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
        """Takes the lock; another run that was just told to stop has time to save and exit."""
        if atomic_files.lock(lock):
            return True
        logging.warning("another run is writing to %s; waiting for its end", self._folder.parent)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            time.sleep(0.1)
            if atomic_files.lock(lock):
                return True
        return False

    def _make_room(self, step: int) -> None:
        """Renames a checkpoint of the same step until the new one is committed."""
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
            return  # A damaged one does not tell which was the best, so all are kept.
        for step in sorted(set(steps) - {*newest, *bests}, reverse=True):  # A best one goes last.
            # Renamed first, so that a half removed folder does not look like a checkpoint.
            _remove(_rename_to_free(self._folder / str(step), f"{step}.removed"))

    def _set_aside(self, steps: Iterable[int]) -> None:
        if jax.process_index() == 0:
            for step in steps:
                with contextlib.suppress(FileNotFoundError):
                    _rename_to_free(self._folder / str(step), f"{step}.damaged")


def _shorten(error: Exception) -> str:
    """The first line of TensorStore's message, without its details."""
    text = str(error).strip().split("\n")[0].split(" See full ")[0]
    return text[:200] or type(error).__name__


def _warn_of_damage(path: pathlib.Path, why: str) -> None:
    logging.warning(
        "checkpoint of step %s is damaged: %s (%s); it is skipped", path.name, path, why
    )


def _add_digest(content: files.JsonObject) -> files.JsonObject:
    content = json.loads(json.dumps(content))  # As it will be read.
    return {"content": content, "sha256": _digest(content)}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_content(path: pathlib.Path) -> files.JsonObject:
    """The JSON of a checkpoint; ValueError or OSError if it is not as it was written."""
    try:
        signed = files.read_json(path / "info" / "info.json", INFO_SCHEMA, remedy="")
    except errors.UsageError as error:  # There may be another checkpoint that is not damaged.
        raise OSError(str(error)) from None
    if signed["sha256"] != _digest(signed["content"]):
        raise ValueError("info.json does not match its own checksum")
    if signed["content"]["step"] != int(path.name):
        raise ValueError(f"it is a copy of the checkpoint of step {signed['content']['step']}")
    return signed["content"]


def read_fingerprint(workdir: str | os.PathLike) -> files.JsonObject:
    """The fingerprint of the newest readable checkpoint of a run; empty if there is none."""
    folder = pathlib.Path(workdir) / "checkpoints"
    for step in _list_steps(folder)[::-1]:
        with contextlib.suppress(ValueError, OSError):
            return _read_content(folder / str(step)).get("seal", {})
    return {}


def _list_steps(folder: pathlib.Path) -> list[int]:
    """The steps of all committed checkpoints in order."""
    names = [path.name for path in folder.glob("*") if path.name.isdecimal()]
    # isdecimal also accepts "007" and the digits of other scripts.
    return sorted(int(name) for name in names if str(int(name)) == name)


def _clean_up(folder: pathlib.Path) -> None:
    """Removes what a killed run has half written or half removed."""
    for pattern in ("*.orbax-checkpoint-tmp*", "*.removed*"):
        for path in folder.glob(pattern):
            _remove(path)
    _settle_replaced(folder)


def _remove(path: pathlib.Path) -> None:
    """Removes a file or folder; of a symbolic link only the link itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _settle_replaced(folder: pathlib.Path) -> None:
    """Removes checkpoints that were replaced, and restores one that was not."""
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
    """Whether `ok` is true in every process."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.array(ok))))

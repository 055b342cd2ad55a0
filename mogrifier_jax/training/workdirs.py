"""The small files of a workdir, and how files are written: whole or not at all.

config.json       the resolved config; `_types` names what JSON cannot express
vocabulary.json   the vocabulary
version.json      for every start of the run: versions, commit and date
.lock             held while a file that several processes change is read and written

`replacing` writes every small file of the package, `locked` excludes other writers, and `files.py`
reads files back. `make_fingerprint` is what checkpoints remember of config, vocabulary and corpus.
"""

import contextlib
import datetime
import errno
import fcntl
import glob
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

import jax
from absl import logging
from ml_collections import config_dict

import mogrifier_jax
from mogrifier_jax import config_keys, configs, errors, files
from mogrifier_jax.data import vocabularies

# What weights and scores depend on; the rest of a config is about how the weights were found.
_FINGERPRINTED = ("model", "data", "dropout", "averaging.kind", "averaging.stagnating_evaluations")
# What may differ when a run is resumed, because it does not change the numbers.
FREE_KEYS = (
    *("mesh", "log_every", "data.source_dir", "data.data_dir"),
    "optimizer.accumulate_at_once",
)
CORPUS = "corpus: "  # The prefix of the names of splits in a fingerprint.
RESULTS = {"step": files.COUNT}  # Of results.json; sweeps need the scores too.
_FRESH = 5.0  # Seconds.
_PATIENCE = 60.0  # Seconds; files are locked for milliseconds.


def check_place(workdir: str | os.PathLike) -> None:
    """Refuses a workdir that cannot be written to, before any work."""
    name = os.fspath(workdir)
    refuse_address(name, "--workdir")
    # TensorStore takes a backslash for a slash, and needs names in UTF-8.
    if "\\" in name or "\0" in name or name != name.encode(errors="replace").decode():
        raise errors.UsageError(
            f"--workdir={name!r} has a backslash or is not UTF-8, so checkpoints cannot be saved "
            "there; give another folder"
        )
    folder = pathlib.Path(workdir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise errors.UsageError(
            f"--workdir={name} cannot be made: {there} is not a folder that can be written to; "
            "give another one"
        )


def refuse_address(path: str | os.PathLike, name: str) -> None:
    """Refuses an address such as hdfs://host/run, which would become a local folder `hdfs:`."""
    # pathlib makes gs:/bucket of gs://bucket.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise errors.UsageError(
            f"{name}={os.fspath(path)} is an address, not a path, and cannot be written; give a "
            "path of this machine, or an address of gs:// or s3:// where one is possible"
        )


def write_run_files(
    workdir: str | os.PathLike, config: config_dict.ConfigDict, vocabulary_json: str
) -> None:
    """Writes the files above; refuses to resume a run with another vocabulary."""
    workdir = pathlib.Path(workdir)
    path = workdir / "vocabulary.json"
    if os.path.lexists(path) and files.read_bytes(path) != vocabulary_json.encode():
        raise errors.UsageError(
            f"the vocabulary of the corpus is not the one in {path}; use the corpus that the run "
            "was started with, restore the file if it is damaged, or use another workdir"
        )
    if jax.process_index() != 0:
        return
    replace_text(workdir / "config.json", config_to_json(config))
    replace_text(path, vocabulary_json)
    write_json(workdir, "version.json", [*_earlier_starts(workdir / "version.json"), versions()])


def _earlier_starts(path: pathlib.Path) -> list[Any]:
    """The content of version.json; a damaged one is set aside, because no run depends on it."""
    if not path.exists():
        return []
    try:
        return files.read_json(path, [dict])
    except errors.UsageError as error:
        os.replace(path, path.with_name("version.json.damaged"))
        logging.warning("%s; it was renamed to version.json.damaged, and a new one begins", error)
        return []


def read_config(workdir: str | os.PathLike) -> config_dict.ConfigDict:
    """The locked config of the run in a workdir; keys that it lacks have their defaults."""
    workdir = pathlib.Path(workdir)
    path = workdir / "config.json"
    if not path.exists():
        raise errors.UsageError(
            f"{workdir} is not the workdir of a run: it has no config.json; "
            "give the --workdir of a run that was started"
        )
    try:
        return config_from_json(files.read_json(path, dict))
    except errors.UsageError as error:
        raise errors.UsageError(
            f"{path} is not a config as runs write it ({error}); restore it from a copy or use "
            "another workdir"
        ) from None


def config_to_json(config: config_dict.ConfigDict) -> str:
    """The text of config.json; `_types` names the types of absent values, and tuples."""
    types = {
        name: config_keys.keys()[name].kind.__name__
        for name, value in configs.flatten(config).items()
        if name in config_keys.keys() and (value is None or isinstance(value, tuple))
    }
    values = json.loads(config.to_json_best_effort()) | {"_types": types}
    return json.dumps(values, indent=2) + "\n"


def config_from_json(values: dict[str, Any]) -> config_dict.ConfigDict:
    """The config of the content of config.json, locked and checked."""
    values.pop("_types", None)  # For other programs; `config_keys.py` knows the types.
    config = configs.base(values)
    configs.check(config)
    return config


def read_vocabulary(workdir: str | os.PathLike) -> str:
    """The JSON text of the vocabulary of the run in a workdir."""
    path = pathlib.Path(workdir) / "vocabulary.json"
    text = files.read_text(path, "give the --workdir of a started run, or restore it from a copy")
    files.parse_json(text, vocabularies.JSON_SCHEMA, str(path))
    return text


def make_fingerprint(
    config: config_dict.ConfigDict,
    vocabulary_json: str,
    digests: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a checkpoint remembers, by name, so that it is not used with another config or corpus.

    Args:
      digests: those of the splits of the corpus, if it was read. They are compared only with a
        fingerprint that has them, too.
    """
    # Without defaults, so that a key of a later version does not change fingerprints.
    defaults = {name: key.default for name, key in config_keys.keys().items()}
    values = {
        f"config.json: {name}": list(value) if isinstance(value, tuple) else value
        for name, value in configs.flatten(config).items()
        if value != defaults.get(name)
        and configs.is_among(name, _FINGERPRINTED)
        and not configs.is_among(name, FREE_KEYS)
    }
    vocabulary = json.dumps(json.loads(vocabulary_json), sort_keys=True).encode()
    values["vocabulary.json: sha256"] = hashlib.sha256(vocabulary).hexdigest()
    return values | {f"{CORPUS}{split}": digest for split, digest in (digests or {}).items()}


def corpus_digests(fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """The digests of the splits in a fingerprint; empty if it was made without them."""
    return {n.removeprefix(CORPUS): v for n, v in fingerprint.items() if n.startswith(CORPUS)}


def check_config(workdir: str | os.PathLike, config: config_dict.ConfigDict) -> None:
    """Refuses to resume a run with another config than that of its workdir."""
    workdir = pathlib.Path(workdir)
    if not (workdir / "config.json").exists():
        if any(path.name.isdecimal() for path in (workdir / "checkpoints").glob("*")):
            raise errors.UsageError(
                f"{workdir} has checkpoints but no config.json; restore that from a copy, or use "
                "another workdir"
            )
        return
    differences = configs.differences(read_config(workdir), configs.base(config), FREE_KEYS)
    if differences:
        listing = "".join(
            f"\n  {name}: {saved} (in the workdir) vs {requested} (requested)"
            for name, saved, requested in differences
        )
        raise errors.UsageError(
            f"{workdir} holds a run with another config:{listing}\n"
            "Use another --workdir for a new run, or the same config to continue this one."
        )


def versions() -> dict[str, Any]:
    """The versions, commit, date and devices of this process."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "mogrifier_jax": mogrifier_jax.__version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }


def git_commit() -> str | None:
    """The commit of a checkout, with "+changes" if files differ from it; None if installed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(pathlib.Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # The package may be installed inside the checkout of something else.
        git("ls-files", "--error-unmatch", "__init__.py")
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(workdir: str | os.PathLike, name: str, values: Any) -> None:
    """Writes a small JSON file of the run atomically."""
    replace_text(pathlib.Path(workdir) / name, json.dumps(values, indent=2) + "\n")


def replace_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file atomically: readers see the old text or the new one, even after a kill."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` when the block has succeeded.

    It has a random name, and is synced to the disk before it is renamed. A device such as
    /dev/stdout is written to directly.
    """
    refuse_address(path, "path")
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        with files.open_to_write(path) as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "wb") as file:
            lock(file)  # So that `_remove_leftovers` does not delete it.
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # Not every file system can sync a folder.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_leftovers(path: pathlib.Path) -> None:
    """Deletes the temporary files of writers of this path that were killed."""
    for left in path.parent.glob(glob.escape(f".{path.name[:40]}.") + "?" * 8 + ".tmp"):
        with contextlib.suppress(OSError):
            # A new one may not be locked yet.
            if time.time() - left.stat().st_mtime > _FRESH:
                with open(left, "rb") as file:
                    if lock(file):
                        left.unlink()


def check_output(path: str | os.PathLike | None, flag: str) -> None:
    """Refuses a path that results cannot be written to, before they are computed."""
    if path is None:
        return
    errors.check(
        isinstance(path, str | os.PathLike) and "\0" not in os.fspath(path),
        f"{flag}={errors.show(path)} is not a path and cannot be written; give the path of a file",
    )
    if not os.fspath(path):
        return
    refuse_address(path, flag)
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is not a file")
        if path.exists():
            files.open_to_write(path, os.O_APPEND).close()
        if not path.exists() or path.is_file():
            folder = path.absolute().parent
            there = next(place for place in (folder, *folder.parents) if place.exists())
            tempfile.TemporaryFile(dir=there).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.UsageError(
            f"{flag}={path} cannot be written ({reason}); give a file in a folder that you own"
        ) from None


def check_results(workdir: str | os.PathLike, *names: str) -> None:
    """Refuses a workdir in which these files cannot be written, before they are computed."""
    for path in (pathlib.Path(workdir) / name for name in names):
        try:
            check_output(path, "file")
        except errors.UsageError as error:
            raise errors.UsageError(
                f"{workdir} cannot keep results: {error}, such as a copy of the workdir"
            ) from None


@contextlib.contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
    """Holds the lock of a folder, to read, change and write its files without interference."""
    path = pathlib.Path(folder) / ".lock"
    with open_lock(path) as file:
        end = time.monotonic() + _PATIENCE
        while not lock(file):
            if time.monotonic() > end:
                raise errors.UsageError(
                    f"{path} has been held by another process for {_PATIENCE:g} s; check whether "
                    "one hangs, then try again"
                )
            time.sleep(0.02)
        yield


def open_lock(path: pathlib.Path) -> IO[str]:
    """Opens a file for locking; it may exist, but not as a symbolic link."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")


def lock(file: IO) -> bool:
    """Locks a file until it is closed; False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks, so nobody can be excluded there.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True

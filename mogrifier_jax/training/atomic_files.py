"""Writes small files atomically, whole or not at all, and locks them against other processes.

`replacing` writes every small file of the package, `writing_output` what people name themselves.
`locked` excludes other writers. `files.py` reads files back.
"""

import contextlib
import errno
import fcntl
import glob
import os
import pathlib
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from typing import IO

from mogrifier_jax import errors, files

_FRESH = 5.0  # Seconds.
_PATIENCE = 60.0  # Seconds; files are locked for milliseconds.


def replace_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file atomically: readers see the old text or the new one, even after a kill."""
    with replacing(path) as file:
        file.write(text.encode())


def write_output(path: str | os.PathLike, text: str) -> None:
    """As `replace_text`, for a path that somebody has named; see `writing_output`."""
    with writing_output(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def writing_output(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """As `replacing`, but a device such as /dev/stdout is written to directly.

    A file of a workdir is never a device: what is written there must be there afterwards.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        with files.open_to_write(path) as file:
            yield file
        return
    with replacing(path) as file:
        yield file


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` when the block has succeeded.

    It has a random name, and is synced to the disk before it is renamed.
    """
    refuse_address(path, "path")
    path = pathlib.Path(path)
    if path.exists() and not path.is_file() and not path.is_symlink():
        raise errors.UsageError(f"{path} is not a regular file, and is not replaced; move it away")
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
            # A new one may not be locked yet. One from the future is of a clock that was wrong.
            if abs(time.time() - left.stat().st_mtime) > _FRESH:
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
            existing = next(each for each in (folder, *folder.parents) if each.exists())
            tempfile.TemporaryFile(dir=existing).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.UsageError(
            f"{flag}={path} cannot be written ({reason}); give a file in a folder that you own"
        ) from None


def refuse_address(path: str | os.PathLike, name: str) -> None:
    """Refuses an address such as hdfs://host/run, which would become a local folder `hdfs:`."""
    # pathlib makes gs:/bucket of gs://bucket.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise errors.UsageError(
            f"{name}={os.fspath(path)} is an address, not a path, and cannot be written; give a "
            "path of this machine, or an address of gs:// or s3:// where one is possible"
        )


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

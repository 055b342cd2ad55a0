"""Paths in object stores, gs://bucket/name and s3://bucket/name, used through local copies.

An object store has no append, no rename and no lock, and each request takes a tenth of a second.
So a folder in a bucket is used through a mirror on the local disk: `mounted` copies the folder from
the bucket, the rest of the package reads and writes plain files, and a thread copies what has
changed to the bucket while the run continues. A path that is not in a bucket is returned unchanged.

What the bucket holds after a kill at any moment is what a disk might hold after one:

- An object is replaced as a whole or not at all.
- A checkpoint counts once its info.json is there, which is written last and removed first.
- What a checkpoint depends on is written before it: metrics and older checkpoints.

A run that trains holds a lease: an object that it renews with a precondition on the object's
generation, so that of two runs one is refused. `tensorstore`, which Orbax brings along, speaks
with the stores, finds the credentials and repeats requests that fail.
"""

import atexit
import contextlib
import fcntl
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from absl import logging

from mogrifier_jax import errors, files

DRIVERS = {"gs": "gcs", "s3": "s3"}
PAUSE = 15.0  # Seconds between two looks for files that have changed.
BEAT = 10.0  # Seconds after which a lease is renewed.
EXPIRY = 60.0  # Seconds without a renewal after which a lease is free.
PATIENCE = 30.0  # Seconds that a run waits for another one to end, as on a disk.
_AT_ONCE = 32  # Requests under way.
_BUSY = 10.0  # Seconds to wait for a transaction of a database.
_RELISTS = 5  # Of a folder whose checkpoints change while they are copied.
_RETRIES = 8  # Of a request, after 1, 2, 4, ... seconds: about two minutes, or six on a bad day.
_LEASE = ".lease"
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# Folders that appear as a whole, and the file that makes them count.
_GROUP = re.compile(r"(?:.*/)?checkpoints/(\d+)/")
_MARK = "info/info.json"
# What belongs to one process: locks, and what is not finished yet.
_PRIVATE = re.compile(
    r"(^|/)(\.lease|\.lock|checkpoints/lock|\.[^/]*\.tmp|[^/]*\.orbax-checkpoint-tmp[^/]*"
    r"|\d+\.removed[^/]*|\d+\.replaced|[^/]*\.db-(journal|wal|shm))(/|$)"
)
_ADDRESSES = "MOGRIFIER_BUCKETS"  # The variable by which other processes know what mirrors show.

Signature = tuple[int, int, int]
_mirrors: dict[str, "Mirror"] = {}  # By their folders.


def is_bucket(path: object) -> bool:
    """Whether a path is an address of an object store; refuses those of unknown stores."""
    # pathlib makes gs:/bucket of gs://bucket.
    if re.match(rf"({'|'.join(DRIVERS)}):/", str(path)):
        return True
    if re.match(r"\w+://", str(path)):
        raise errors.UsageError(
            f"{path} is neither a path of this machine nor in a store that is known; addresses "
            f"begin with {' or '.join(f'{scheme}://' for scheme in DRIVERS)}"
        )
    return False


def is_mirror(path: str | os.PathLike) -> bool:
    """Whether a folder is this process's own copy of one in a bucket."""
    name = os.path.abspath(path) + os.sep
    return any(name.startswith(folder + os.sep) for folder in list(_mirrors))


def show(text: str) -> str:
    """A text with the addresses of mirrors instead of their folders.

    The mirrors may be this process's, or belong to the process that started this one.
    """
    for folder, url in _addresses().items():
        text = text.replace(folder, url)
    return text


@contextlib.contextmanager
def mounted(path: str, *, exclusive: bool = False) -> Iterator[str]:
    """The folder of this name, or the mirror of one in a bucket, which gets what changes in it.

    Args:
      exclusive: refuse a folder in a bucket that another run has. Of several processes of a run
        only process 0 then has what is in the folder, and writes.
    """
    if not is_bucket(path):
        yield path
        return
    with _written_back(path) as mirror:
        mirror.start(exclusive)
        yield str(mirror.folder)


@contextlib.contextmanager
def output(path: Any) -> Iterator[Any]:
    """A file to write: the one of this name, or one that is copied to the bucket at the end."""
    if not is_bucket(path):
        yield path
        return
    folder, _, name = str(path).rpartition("/")
    if "/" not in _normalised(path).partition("://")[2] or not name:
        raise errors.UsageError(f"{path} names no file; give one, as {str(path).rstrip('/')}/file")
    with _written_back(folder) as mirror:
        mirror.start_file(name)
        yield str(mirror.folder / name)


@contextlib.contextmanager
def _written_back(path: str) -> Iterator["Mirror"]:
    mirror = Mirror(path)
    try:
        yield mirror
    except BaseException as error:
        _name_address(error)
        mirror.close(quiet=True)
        raise
    mirror.close()


@contextlib.contextmanager
def copied(path: Any) -> Iterator[Any]:
    """A path to read from: this one, or a copy of the folder or file in a bucket."""
    if not is_bucket(path):
        yield path
        return
    mirror = _copy(path)
    try:
        yield str(mirror.folder)
    except BaseException as error:
        _name_address(error)
        raise
    finally:
        mirror.remove()


def local_copy(path: Any) -> Any:
    """As `copied`, but the copy is kept until the process ends."""
    if not is_bucket(path):
        return path
    for mirror in _mirrors.values():
        if mirror.url == _normalised(path):
            return str(mirror.folder)
    mirror = _copy(path)
    atexit.register(mirror.remove)
    return str(mirror.folder)


def _copy(path: Any) -> "Mirror":
    mirror = Mirror(path)
    try:
        if mirror.pull() or mirror.pull_file():
            return mirror
        raise errors.UsageError(f"{mirror.url} does not exist; give the address of what is there")
    except BaseException:
        mirror.remove()
        raise


def _addresses() -> dict[str, str]:
    """The addresses of mirrors by their folders, for this process and those that it starts."""
    parts = os.environ.get(_ADDRESSES, "").split("\n")
    return dict(zip(parts[::2], parts[1::2], strict=False))


def _note_address(folder: str, url: str | None) -> None:
    known = _addresses() | {folder: url}
    lines = [part for name, value in known.items() if value for part in (name, value)]
    os.environ[_ADDRESSES] = "\n".join(lines)


def _name_address(error: BaseException) -> None:
    """Lets the message of an error name the addresses of mirrors, while they are known."""
    if isinstance(error, errors.UsageError | errors.Diverged | errors.Interrupted):
        error.args = tuple(show(str(part)) for part in error.args)


class Mirror:
    """A folder in a bucket, and this process's copy of it."""

    def __init__(self, url: Any):
        self.url = _normalised(url)
        self._store = _open(self.url)
        self.folder, self._guard = _make_folder(self.url.rpartition("/")[2])
        self._pushed: dict[str, Signature] = {}
        # Nothing is written back before all is here: half a file would replace a whole one.
        self._complete = False
        self._lease: _Lease | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        _mirrors[str(self.folder)] = self
        _note_address(str(self.folder), self.url)

    def start(self, exclusive: bool) -> None:
        """Copies what is there and begins to write what changes."""
        first = _is_first_process()
        if exclusive and first:
            self._lease = _Lease(self._store, self.url)
        if first or not exclusive:
            # A single object is a model file, which can only be read.
            if not self.pull() and self.pull_file():
                if exclusive:
                    raise errors.UsageError(
                        f"{self.url} is an object and no folder; give another --workdir"
                    )
                return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._complete = first
        if first:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="bucket")
            self._thread.start()

    def start_file(self, name: str) -> None:
        """Copies one file, because a report is renewed and not begun anew.

        An empty object is written and deleted first: a bucket that is missing looks like one
        without the file, and what the command computes could not be written in the end.
        """
        self.folder.mkdir()
        first = _is_first_process()
        if first:
            probe = f".{name}.tmp".encode()
            with _explained(self.url, "written"):
                self._store.write(probe, b"").result()
                self._store.write(probe, None).result()
        self.fetch([name])
        self._complete = first

    def pull(self) -> bool:
        """Copies the folder from the bucket; False if nothing is there."""
        for attempt in range(_RELISTS):
            time.sleep(float(attempt > 0))
            with _explained(self.url, "read"):
                names = [key.decode() for key in self._store.list().result()]
            names = [name for name in names if not name.endswith("/") and not _PRIVATE.search(name)]
            _check_names(names, self.url)
            whole = {name.removesuffix(_MARK) for name in names if name.endswith(_MARK)}
            names = [name for name in names if (_group(name) or "") in {"", *whole}]
            gone = {_group(name) for name in self.fetch(names)} - {None}
            if not gone:
                break
            # The run has replaced these checkpoints by others since they were listed.
            shutil.rmtree(self.folder, ignore_errors=True)
            self._pushed.clear()
        else:
            raise errors.UsageError(
                f"{self.url} changes faster than it can be copied; try again when its run saves "
                "less often, or has ended"
            )
        return bool(names)

    def pull_file(self) -> bool:
        """Copies a single object, whose name is the whole address; False if it is not there."""
        above, _, name = self.url.rpartition("/")
        if above.endswith("/"):  # A bucket is no object.
            return False
        with _explained(self.url, "read"):
            found = _open(above).read(name.encode()).result()
        if found.state != "value":
            return False
        self.folder.write_bytes(found.value)
        return True

    def fetch(self, names: Iterable[str]) -> list[str]:
        """Copies some files from the bucket; returns those that are not there."""
        names = list(names)

        def write(name: str, found: Any) -> None:
            if found.state == "value":
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(found.value)
                self._pushed[name] = _sign(path)

        with _explained(self.url, "read"):
            _side_by_side(names, lambda name: self._store.read(name.encode()), write)
        return [name for name in names if name not in self._pushed]

    def push(self) -> None:
        """Copies what has changed to the bucket, in an order that is safe at every moment."""
        while not self._push_once():
            pass

    def close(self, *, quiet: bool = False) -> None:
        """Writes the rest, gives the lease back and removes the copy.

        Args:
          quiet: something else has failed, and that is to be told.
        """
        self._wake.set()
        try:
            if self._thread is not None:
                self._thread.join()
            if self._complete:
                self.push()
            if self._lease is not None:
                self._lease.release()
        except BaseException as error:
            if self._lease is not None:
                self._lease.stop()
            kept = self._keep()
            if quiet or not isinstance(error, errors.UsageError):
                logging.warning("%s is not complete; what it lacks is in %s", self.url, kept)
            if not quiet and isinstance(error, errors.UsageError):
                raise errors.UsageError(f"{error}; what is not there is in {kept}") from None
            if not isinstance(error, errors.UsageError):
                raise
        else:
            self.remove()

    def _keep(self) -> pathlib.Path:
        """Puts the copy where no later run removes it; returns its new place."""
        self._forget()
        above = self.folder.parent
        kept = above.rename(above.with_name(f"kept_{above.name}"))
        return kept / self.folder.name

    def remove(self) -> None:
        """Deletes the copy."""
        self._forget()
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _forget(self) -> None:
        _mirrors.pop(str(self.folder), None)
        _note_address(str(self.folder), None)
        self._guard.close()

    def _watch(self) -> None:
        """Writes what changes, until the mirror is closed or its lease is lost."""
        said = ""
        while not self._wake.wait(PAUSE):
            try:
                self.push()
            except _LeaseLost:
                return  # The lease itself ends the run.
            except (errors.UsageError, OSError) as error:
                if str(error) != said:
                    logging.warning("%s; the run continues, and this is tried again", error)
                said = str(error)

    def _scan(self) -> dict[str, Signature]:
        """The files of the mirror that belong into the bucket.

        Checkpoints are looked for first, so that the metrics reach at least as far as they do.
        """
        checkpoints = {name: sign for name, sign in self._walk().items() if _group(name)}
        others = {name: sign for name, sign in self._walk().items() if not _group(name)}
        return checkpoints | others

    def _walk(self) -> dict[str, Signature]:
        found = {}
        for place, _, names in os.walk(self.folder):
            for name in names:
                path = pathlib.Path(place, name)
                key = path.relative_to(self.folder).as_posix()
                if not _PRIVATE.search(key) and path.is_file() and not path.is_symlink():
                    with contextlib.suppress(FileNotFoundError):
                        found[key] = _sign(path)
        return found

    def _push_once(self) -> bool:
        """One pass; False if a checkpoint was removed during it, so that another pass is due."""
        found = self._scan()
        changed = [name for name in found if self._pushed.get(name) != found[name]]
        gone = [name for name in self._pushed if name not in found]
        self._write([name for name in changed if not _group(name)], found)
        groups = {group for name in changed if (group := _group(name))}
        for group in sorted(groups, key=_step_of):
            names = [name for name in changed if name.startswith(group)]
            # A checkpoint that is being replaced by another of the same step does not count.
            self._delete([name for name in [group + _MARK] if name in self._pushed])
            mark = [group + _MARK] if group + _MARK in found else []
            if not self._write([name for name in names if name not in mark], found):
                return False
            if not self._write(mark, found):
                return False
        gone = [name for name in gone if not self._is_replaced(_group(name))]
        marks = [name for name in gone if name.endswith(_MARK)]
        for name in sorted(
            marks, key=lambda mark: _step_of(mark.removesuffix(_MARK)), reverse=True
        ):
            self._delete([name])  # One that names another as the best goes before that one.
        self._delete([name for name in gone if name not in marks])
        return True

    def _is_replaced(self, group: str | None) -> bool:
        """Whether a checkpoint is out of the way until another of the same step is there."""
        return group is not None and (self.folder / f"{group[:-1]}.replaced").exists()

    def _write(self, names: list[str], found: dict[str, Signature]) -> bool:
        """Writes these files; False if one of them is gone."""
        there = True

        def send(name: str) -> Any:
            nonlocal there
            try:
                value = _read(self.folder / name)
            except FileNotFoundError:
                there = False
                return None
            except sqlite3.OperationalError:  # It is locked; the next pass tries again.
                return None
            except sqlite3.DatabaseError:  # It is no database.
                value = (self.folder / name).read_bytes()
            return self._store.write(name.encode(), value)

        def note(name: str, _: Any) -> None:
            self._pushed[name] = found[name]

        self._send(names, send, note)
        return there

    def _delete(self, names: list[str]) -> None:
        self._send(
            names,
            lambda name: self._store.write(name.encode(), None),
            lambda name, _: self._pushed.pop(name, None),
        )

    def _send(self, names: list[str], ask: Callable[[str], Any], then: Callable) -> None:
        """Changes objects, as long as no other run has the lease."""
        for start in range(0, len(names), _AT_ONCE):
            if self._lease is not None:
                self._lease.renew()
            with _explained(self.url, "written"):
                _side_by_side(names[start : start + _AT_ONCE], ask, then)


class _LeaseLost(errors.UsageError):
    """Another run has taken the folder."""


class _Lease:
    """The right to write to a folder, as an object that a thread renews.

    Whoever finds one waits until it is given back. If it is not renewed for EXPIRY seconds, or if
    it belongs to a process of this machine that has ended, it is taken over.
    """

    def __init__(self, store: Any, url: str):
        self._store, self._url = store, url
        self._token = secrets.token_hex(8)
        self._renewed = 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        with _explained(url, "written"):
            self._generation = self._acquire()
        # Not the thread that copies files, which may take longer than EXPIRY for a large one.
        threading.Thread(target=self._beat, daemon=True, name="lease").start()

    def _acquire(self) -> bytes:
        # If the bucket is missing, this says so; S3 answers a conditional write as if it were late.
        self._store.list().result()
        started = changed = time.monotonic()
        seen, warned = None, False
        while True:
            found = self._store.read(_LEASE.encode()).result()
            now = time.monotonic()
            if seen is not None and found.stamp.generation != seen:
                changed = now
            seen = found.stamp.generation
            if found.state == "missing" or _has_ended(found.value) or now - changed > EXPIRY:
                if generation := self._put(found.stamp.generation):
                    return generation
                if now - started > EXPIRY + PATIENCE:  # Nobody else can have been faster so often.
                    raise errors.UsageError(
                        f"{self._url} has no run, but refuses one; see that the store can write an "
                        "object on the condition that it has not changed (If-Match)"
                    )
            elif changed > started and now - started > PATIENCE:
                raise errors.UsageError(
                    f"another run is writing to {self._url}; wait for it, or stop it, or use "
                    "another workdir"
                )
            elif not warned:
                logging.warning("another run is writing to %s; waiting for its end", self._url)
                warned = True
            time.sleep(1.0)

    def _beat(self) -> None:
        """Renews the lease while the run lives; ends the run if another one has taken over."""
        while not self._ended.wait(BEAT):
            try:
                self.renew()
            except _LeaseLost as error:
                logging.error("%s", error)
                os.kill(os.getpid(), signal.SIGTERM)  # The run saves for itself, and ends.
                return
            except errors.UsageError as error:
                logging.warning("%s; the run goes on, and this is tried again", error)

    def renew(self) -> None:
        """Says that this run is alive; raises if another one has taken over."""
        with self._lock:
            if time.monotonic() - self._renewed < BEAT / 2:
                return
            with _explained(self._url, "written"):
                generation = self._put(self._generation)
            if not generation:
                raise _LeaseLost(
                    f"another run has taken over {self._url}, or its .lease was removed; this run "
                    "writes no more"
                )
            self._generation = generation
            self._renewed = time.monotonic()

    def stop(self) -> None:
        """Renews the lease no more."""
        self._ended.set()

    def release(self) -> None:
        """Gives the lease back."""
        self.stop()
        with self._lock, _explained(self._url, "written"):
            self._store.write(_LEASE.encode(), None, if_equal=self._generation).result()

    def _put(self, expected: bytes) -> bytes:
        """Writes the lease if it is the expected one; empty if it is not."""
        holder = _identify(os.getpid()) | {"token": self._token, "time": time.time()}
        value = json.dumps(holder).encode()
        stamp = self._store.write(_LEASE.encode(), value, if_equal=expected).result()
        if stamp.generation:
            return stamp.generation
        # A request that was repeated after its answer was lost finds its own first try.
        found = self._store.read(_LEASE.encode()).result()
        return found.stamp.generation if self._token.encode() in found.value else b""


def _identify(pid: int) -> dict[str, Any]:
    """A process, such that others of the same machine can see whether it is still there."""
    machine = [socket.gethostname()]
    with contextlib.suppress(OSError):
        machine.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        machine.append(os.readlink("/proc/self/ns/pid"))
    started = ""
    with contextlib.suppress(OSError, IndexError):
        started = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return {"machine": " ".join(machine), "pid": pid, "started": started}


def _has_ended(lease: bytes) -> bool:
    """Whether the holder was a process of this machine that is no longer there."""
    try:
        holder = json.loads(lease)
        now = _identify(int(holder["pid"]))
        return holder["machine"] == now["machine"] and holder["started"] != now["started"]
    except (ValueError, KeyError, TypeError):
        return False


def _open(url: str) -> Any:
    """The key-value store of a folder in a bucket."""
    import tensorstore

    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    driver = DRIVERS[scheme]
    spec: dict[str, Any] = {"driver": driver, "bucket": bucket, "path": f"{path}/" if path else ""}
    spec["context"] = {f"{driver}_request_retries": {"max_retries": _RETRIES}}
    if scheme == "s3" and os.environ.get("AWS_ENDPOINT_URL"):  # Stores of others than Amazon.
        spec["endpoint"] = os.environ["AWS_ENDPOINT_URL"]
        spec["aws_region"] = os.environ.get("AWS_REGION", "us-east-1")
    with _explained(url, "used"):
        return tensorstore.KvStore.open(spec).result()


@contextlib.contextmanager
def _explained(url: str, verb: str) -> Iterator[None]:
    """Turns what the storage library raises into a sentence without its details."""
    try:
        yield
    except errors.UsageError:
        raise
    except OSError as error:
        if error.errno is not None:  # Of this machine's disk, which is not the store's fault.
            raise
        raise _refusal(url, verb, error) from None
    except (ValueError, RuntimeError) as error:
        raise _refusal(url, verb, error) from None


def _refusal(url: str, verb: str, error: Exception) -> errors.UsageError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    reason = re.sub(r"\s*\[.*|https?://\S+", "", reason)
    # A store may repeat what it was sent.
    reason = re.sub(r"\b(Bearer|Credential=|Signature=)\s*[^\s,]+", r"\1 ...", reason)
    for name in _SECRETS:
        if os.environ.get(name):
            reason = reason.replace(os.environ[name], "...")
    reason = reason[:160].rstrip(" :")
    return errors.UsageError(
        f"{url} cannot be {verb} ({reason}); see that the bucket is there, that your account "
        "may use it, and that the network is up"
    )


def _side_by_side(
    names: Iterable[str], ask: Callable[[str], Any], then: Callable[[str, Any], Any]
) -> None:
    """Sends requests, some at a time, and hands each answer on; None is no request."""
    names = list(names)
    for start in range(0, len(names), _AT_ONCE):
        asked = [(name, ask(name)) for name in names[start : start + _AT_ONCE]]
        for name, future in asked:
            if future is not None:
                then(name, future.result())


def _check_names(names: list[str], url: str) -> None:
    """Refuses names of objects that are outside the folder, or inside another object."""
    folders = {name[: slash.start()] for name in names for slash in re.finditer("/", name)}
    for name in names:
        if name in folders or {"", ".", ".."} & set(name.split("/")):
            raise errors.UsageError(
                f"{url} has an object named {name!r}, which cannot be a file beside the others; "
                "remove it, or give another address"
            )


def _group(name: str) -> str | None:
    """The folder of the checkpoint that a file belongs to, as checkpoints/300/."""
    found = _GROUP.match(name)
    return found and found[0]


def _step_of(group: str) -> tuple[str, int]:
    above, _, step = group[:-1].rpartition("/")
    return above, int(step)


def _read(path: pathlib.Path) -> bytes:
    """The content of a file; of a database, what it holds between two transactions.

    A database is opened by its own library alone, because to close the file otherwise would end
    the locks that this process has on it.
    """
    if path.suffix != ".db" or not path.stat().st_size:
        return path.read_bytes()
    name = f"file:{urllib.parse.quote(str(path))}?mode=rw"  # Which creates no file.
    with contextlib.closing(sqlite3.connect(name, timeout=_BUSY, uri=True)) as database:
        database.execute("begin")
        database.execute("select count(*) from sqlite_master").fetchone()  # Now nobody writes.
        return database.serialize()


def _sign(path: pathlib.Path) -> Signature:
    """What differs when a file has changed."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _normalised(url: Any) -> str:
    """The address with two slashes after its scheme, one between names and none at its end."""
    scheme, _, rest = str(url).partition(":")
    names = [name for name in rest.split("/") if name]
    # An empty bucket, as in gs:///run, is most often a variable that was not set.
    control = re.search(r"[\x00-\x1f\x7f]", rest)
    if not names or re.match("/{3}", rest) or {".", ".."} & set(names) or control:
        raise errors.UsageError(
            f"{str(url)!r} names no place in a bucket; give one, as {scheme}://bucket/name"
        )
    return f"{scheme}://{'/'.join(names)}"


def _is_first_process() -> bool:
    # Here, because `main.py` imports this module before it handles signals and the failures of JAX.
    import jax

    return jax.process_index() == 0


def _make_folder(name: str) -> tuple[pathlib.Path, Any]:
    """A new folder of this name for a mirror, and the lock that says that its process lives.

    Removes those of processes that were killed.
    """
    cache = files.cache_folder()
    above = pathlib.Path(cache).absolute() / "buckets"
    above.mkdir(parents=True, exist_ok=True)
    for left in above.glob("[0-9a-f]" * 8):
        with contextlib.suppress(OSError):
            with open(left / "guard") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
    place = above / secrets.token_hex(4)
    new = place.with_name(f"new_{place.name}")  # Which nobody takes for that of a killed process.
    new.mkdir()
    guard = open(new / "guard", "w")
    fcntl.flock(guard, fcntl.LOCK_EX)
    new.rename(place)
    return place / name, guard

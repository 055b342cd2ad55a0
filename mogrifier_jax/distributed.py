"""Many processes as one run: their places, the roll call, and what happens if one is lost.

`find_place` reads flags and the environment. `session` starts and ends `jax.distributed`. Between
that, a thread in each process (`Watch`) tells the others through the coordinator that it is alive.
If one falls silent or fails, the others stop within a bounded time and say which one it was.
Process 0 is the coordinator. If its host is lost, the runtime itself aborts the others. A launcher
such as `launch.py` starts them again. `training/signals.py` handles requests to stop.
"""

import contextlib
import errno
import os
import re
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from absl import logging
from jax._src import distributed as runtime  # There is no public way to the key-value store.

from mogrifier_jax import errors

RESTART = errors.Interrupted.exit_code
_LONGEST = 1000  # Bytes of a message of the roll call.
_GRACE = 10.0  # Seconds that a process which failed stays, so that the others learn why.


class PeerLost(errors.Interrupted):
    """Another process is missing; starting all of them again goes on from the last checkpoint."""


class Place(NamedTuple):
    """The arguments of `jax.distributed`; without a coordinator it asks the TPU pod."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    local_devices: tuple[int, ...] | None = None  # None means all that this process sees.


def find_place(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> Place | None:
    """The place of this process among many, or None if it is alone.

    The first of these decides: the arguments; JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID (or JOB_COMPLETION_INDEX of an indexed Kubernetes job); Slurm; TPU pods.
    """
    if num_processes == 1:
        return None
    if (coordinator, num_processes, process_id) != (None, None, None):
        return _explicit(coordinator, num_processes, process_id)
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    index = environment.get("JAX_PROCESS_ID", environment.get("JOB_COMPLETION_INDEX"))
    count = environment.get("JAX_NUM_PROCESSES")
    if address and count and index:
        _require_numbers(environment, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")
        return None if int(count) == 1 else _explicit(address, int(count), int(index))
    if environment.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in environment:
        return _slurm(environment)
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or _on_tpu_host(environment):
        return Place(None, None, None)
    return None


def _explicit(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Place:
    if coordinator is None or num_processes is None or process_id is None:
        raise errors.UsageError(
            f"--coordinator {coordinator}, --num_processes {num_processes} and --process_id "
            f"{process_id} belong together: give all three, or none"
        )
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise errors.UsageError(
            f"--coordinator {coordinator!r} is not host:port; give the host of process 0 and a "
            "free port there below 65536, such as 10.0.0.2:1234"
        )
    if not 0 <= process_id < num_processes:
        raise errors.UsageError(
            f"--process_id {process_id} is not one of {num_processes} processes: they are counted "
            f"from 0 to {num_processes - 1}"
        )
    return Place(coordinator, num_processes, process_id)


def _slurm(environment: Mapping[str, str]) -> Place:
    """The place in a Slurm job; tasks that share a node take one device each."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    needed = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NNODES")
    _require_numbers({"SLURM_JOB_ID": "", "SLURM_LOCALID": "", **environment}, *needed)
    if first is None:
        raise errors.UsageError(
            f"SLURM_STEP_NODELIST {nodes!r} names no node; start with srun, or give "
            "--num_processes=1 to run alone"
        )
    prefix, number = first.groups()
    port = 61_440 + int(environment["SLURM_JOB_ID"]) % 4096  # Jobs that share a node differ.
    tasks = int(environment["SLURM_NTASKS"])
    alone = tasks == int(environment.get("SLURM_NNODES", "1"))
    place = _explicit(f"{prefix}{number or ''}:{port}", tasks, int(environment["SLURM_PROCID"]))
    return place if alone else place._replace(local_devices=(int(environment["SLURM_LOCALID"]),))


def _require_numbers(environment: Mapping[str, str], *names: str) -> None:
    """Refuses variables of a launcher that are set, but not to whole numbers."""
    for name in names:
        if not environment.get(name, "0").isdecimal():
            raise errors.UsageError(
                f"the launcher set {name} to {environment[name]!r}, which is not a whole number; "
                "mend it, or give --num_processes=1 to run alone"
            )


def _on_tpu_host(environment: Mapping[str, str]) -> bool:
    """Whether this host has TPU chips and JAX may use them."""
    if "cpu" in environment.get("JAX_PLATFORMS", ""):
        return False
    return os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")


@contextlib.contextmanager
def session(place: Place | None, *, peer_timeout: float = 60.0) -> Iterator[None]:
    """Runs its body as one of many processes; does nothing if this one is alone.

    Args:
      peer_timeout: seconds of silence after which a process counts as lost. Waits for the others
        at start and end are limited by it, too.
    """
    if not 0.1 <= peer_timeout <= 86_400:
        raise errors.UsageError(
            f"--peer_timeout {peer_timeout} must be from 0.1 to 86400 seconds; try 60"
        )
    if place is None:
        yield
        return
    if place.coordinator:
        roll_call(place, 5 * peer_timeout)
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        place.local_devices,
        initialization_timeout=int(5 * peer_timeout),
        heartbeat_timeout_seconds=int(2 * peer_timeout)
        + 10,  # `Watch` is faster, and names the process.
        shutdown_timeout_seconds=int(peer_timeout),
        cluster_detection_method="deactivate" if place.coordinator else None,
    )
    if jax.process_count() == 1:
        yield
        return
    watch = Watch(peer_timeout)
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.fail(error)
    watch.leave("0 done")
    jax.distributed.shutdown()


class Watch(threading.Thread):
    """Tells the other processes that this one is alive, and looks whether they are."""

    def __init__(self, timeout: float):
        super().__init__(daemon=True, name="watch")
        self._timeout = timeout
        self._period = min(5.0, timeout / 6)
        self._client: Any = runtime.global_state.client
        self._me = jax.process_index()
        self._others = set(range(jax.process_count())) - {self._me}
        self._stopped = threading.Event()

    def run(self) -> None:
        """Beats and checks until this process leaves."""
        seen: dict[int, tuple[str, float]] = {}
        beats = 0
        while not self._stopped.wait(self._period):
            beats += 1
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # The loop below notices silence.
                self._put(str(beats))
                for process, value in self._read().items():
                    if seen.get(process, ("", 0.0))[0] != value:
                        seen[process] = value, time.monotonic()
            for process in self._others:
                value, since = seen.setdefault(process, ("", time.monotonic()))
                self._judge(process, value, time.monotonic() - since)

    def _judge(self, process: int, value: str, age: float) -> None:
        code, _, reason = value.partition(" ")
        if not reason:  # A number of beats.
            if age > self._timeout:
                self._stop_all(
                    f"process {process} was not heard of for {age:.0f} s: this one stops too, "
                    "start all again to go on from the last checkpoint",
                    RESTART,
                )
        elif int(code) not in (0, RESTART) and age > _GRACE / 2:
            self._stop_all(f"process {process} failed: {reason}", int(code))

    def _stop_all(self, message: str, code: int) -> NoReturn:
        print(f"PeerLost: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._put(f"{RESTART} {message}")
            if self._me == 0:
                time.sleep(2 * self._period)  # The others read the message from this process.
        os._exit(code)

    def fail(self, error: BaseException) -> NoReturn:
        """Tells the others of an error, and ends this process with the error's exit code."""
        code = getattr(error, "exit_code", 1)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
        elif isinstance(error, KeyboardInterrupt):
            code = RESTART
            print("Interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        elif hasattr(error, "exit_code"):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        if isinstance(error, jax.errors.JaxRuntimeError):
            logging.warning("looking whether another process was lost")
            time.sleep(self._timeout + 2 * self._period)  # If so, the watch ends this process.
        self.leave(f"{code} {str(error).splitlines()[0][:200] if str(error) else repr(error)}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def leave(self, status: str) -> None:
        """Stops watching; process 0 has all messages, so it waits until the others have left."""
        self._stopped.set()
        self.join(2 * self._period)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._put(status)
            end = time.monotonic() + _GRACE
            while self._me == 0 and time.monotonic() < end:
                values = self._read()
                if all(" " in values.get(process, "") for process in self._others):
                    break
                time.sleep(0.2)

    def _put(self, value: str) -> None:
        self._client.key_value_set(f"watch/{self._me}", value, allow_overwrite=True)

    def _read(self) -> dict[int, str]:
        found = self._client.key_value_dir_get("watch/")
        return {int(key.rpartition("/")[2]): value for key, value in found}


def roll_call(place: Place, timeout: float) -> None:
    """Waits until all processes have reached the coordinator; names those that have not.

    It uses the coordinator's port, which is free again afterwards. `jax.distributed` would abort
    all processes without naming the missing ones.
    """
    end = time.monotonic() + timeout
    if place.process_id:
        _answer(place, end, timeout)
    else:
        _call(place, end, timeout)


def _call(place: Place, end: float, timeout: float) -> None:
    """What process 0 does: it notes who comes, and tells all of them the outcome.

    A guest that sends nothing, too much, or another text than a member sends is ignored.
    """
    members: dict[int, socket.socket] = {}
    expected = set(range(1, place.num_processes))  # type: ignore[arg-type]
    problem = strange = ""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(place))
        server.setblocking(False)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        while not problem and members.keys() != expected:
            if time.monotonic() >= end:
                missing = sorted(expected - members.keys())
                problem = f"{_name(missing)} did not come within {timeout:g} s{strange}"
                break
            for key, _ in selector.select(max(0.0, min(1.0, end - time.monotonic()))):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):
                        guest = stack.enter_context(server.accept()[0])
                        guest.setblocking(False)
                        selector.register(guest, selectors.EVENT_READ, bytearray())
                    continue
                guest, heard, more = key.fileobj, key.data, b""  # type: ignore[assignment]
                with contextlib.suppress(OSError):
                    more = guest.recv(_LONGEST)
                heard += more
                if more and b"\n" not in heard and len(heard) < _LONGEST:
                    continue  # Its line is not complete.
                selector.unregister(guest)
                said = re.fullmatch(rb"\[(\d{1,9}), (\d{1,9})\]\n", heard)
                process, count = map(int, said.groups()) if said else (0, 0)
                if process in members:
                    problem = f"two processes say that they are process {process}"
                    _tell(guest, problem)
                elif process in expected and count == place.num_processes:
                    members[process] = guest
                else:
                    if said:
                        strange = f"; process {process} of {count} came"
                        _tell(guest, f"there are {place.num_processes} processes{strange}")
                    guest.close()  # Not one of us.
        for member in members.values():
            _tell(member, problem)
    if problem:
        raise PeerLost(_not_all(problem, place))


def _tell(guest: socket.socket, problem: str) -> None:
    with contextlib.suppress(OSError):
        guest.settimeout(5.0)
        guest.sendall(f"{problem}\n".encode())


def _listen(place: Place) -> socket.socket:
    """A server at the coordinator's address, or at all of this host's addresses.

    If a service stands in front of this host, the coordinator's address is not its own.
    """
    host, port = _address(place)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, address in found:
            try:
                return socket.create_server(address[:2], family=family, backlog=128)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        return socket.create_server(("", port), backlog=128)
    except OSError as error:
        raise errors.UsageError(
            f"process 0 cannot listen at {host}:{port} ({error.strerror}); give --coordinator the "
            "address of this host, and a port that is free"
        ) from error


def _address(place: Place) -> tuple[str, int]:
    host, _, port = place.coordinator.rpartition(":")  # type: ignore[union-attr]
    return host.strip("[]"), int(port)


def _answer(place: Place, end: float, timeout: float) -> None:
    """What the others do: report to process 0, and hear whether all have come."""
    failure: Exception = TimeoutError("no answer")
    while time.monotonic() < end + 5:
        try:
            with socket.create_connection(_address(place), timeout=5.0) as connection:
                connection.sendall(f"[{place.process_id}, {place.num_processes}]\n".encode())
                connection.settimeout(max(1.0, end + 5 - time.monotonic()))
                with connection.makefile() as lines:
                    heard = lines.readline(_LONGEST)
            if heard.endswith("\n"):
                if heard.strip():
                    raise PeerLost(_not_all(heard.strip(), place))
                return
        except OSError as error:
            failure = error
        time.sleep(0.2)
    raise PeerLost(_not_all(f"process 0 did not answer within {timeout:g} s ({failure})", place))


def _not_all(problem: str, place: Place) -> str:
    return (
        f"{problem}; {place.num_processes} processes meet at {place.coordinator}: see that each is "
        "started with its own --process_id and can reach that address"
    )


def _name(processes: Sequence[int]) -> str:
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {', '.join(map(str, processes))}"

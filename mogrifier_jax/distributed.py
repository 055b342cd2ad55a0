"""Several processes as one run: how they find each other, and what happens if one is lost.

`find_cluster` reads flags and the environment, and `session` starts and ends `jax.distributed`. In
between, a thread of each process (`Watch`) reports through the coordinator that it is alive. If a
process falls silent or fails, the others name it and stop within a bounded time. Process 0 is the
coordinator, and if its host is lost, JAX's runtime aborts the others. A launcher such as
`launch.py` starts them again. `training/signals.py` handles requests to stop.
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
    """Another process is missing; a restart of all resumes from the last checkpoint."""


class Cluster(NamedTuple):
    """This process among several: the arguments of `jax.distributed.initialize`.

    Without a coordinator, JAX asks the TPU pod for everything.
    """

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    local_devices: tuple[int, ...] | None = None  # None: all that this process can see.


def find_cluster(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """Which process of a run this is, or None if the run has only one.

    The first of these that is present decides: the arguments; JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID (or JOB_COMPLETION_INDEX of an indexed Kubernetes job);
    Slurm; TPU pods.
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
        return Cluster(None, None, None)
    return None


def _explicit(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Cluster:
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
    return Cluster(coordinator, num_processes, process_id)


def _slurm(environment: Mapping[str, str]) -> Cluster:
    """The process in a Slurm job; tasks that share a node use one device each.

    JAX detects Slurm as well, but the roll call needs the address before JAX starts, and JAX would
    raise a KeyError for variables that are missing.
    """
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
    one_per_node = tasks == int(environment.get("SLURM_NNODES", "1"))
    cluster = _explicit(f"{prefix}{number or ''}:{port}", tasks, int(environment["SLURM_PROCID"]))
    if one_per_node:
        return cluster
    return cluster._replace(local_devices=(int(environment["SLURM_LOCALID"]),))


def _require_numbers(environment: Mapping[str, str], *names: str) -> None:
    """Refuses variables of a launcher that are set to something other than a whole number."""
    for name in names:
        if not environment.get(name, "0").isdecimal():
            raise errors.UsageError(
                f"the launcher set {name} to {environment[name]!r}, which is not a whole number; "
                "correct it, or give --num_processes=1 to run alone"
            )


def _on_tpu_host(environment: Mapping[str, str]) -> bool:
    """Whether this host has TPU chips and JAX may use them."""
    if "cpu" in environment.get("JAX_PLATFORMS", ""):
        return False
    return os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")


@contextlib.contextmanager
def session(cluster: Cluster | None, *, peer_timeout: float = 60.0) -> Iterator[None]:
    """Runs its body as one of several processes; does nothing if there is only one.

    Args:
      peer_timeout: seconds of silence after which a process counts as lost. It also limits how long
        processes wait for each other at start and end.
    """
    if not 0.1 <= peer_timeout <= 86_400:
        raise errors.UsageError(
            f"--peer_timeout {peer_timeout} must be from 0.1 to 86400 seconds; try 60"
        )
    if cluster is None:
        yield
        return
    if cluster.coordinator:
        roll_call(cluster, 5 * peer_timeout)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            cluster.local_devices,
            initialization_timeout=int(5 * peer_timeout),
            # `Watch` is faster, and names the process that is lost.
            heartbeat_timeout_seconds=int(2 * peer_timeout) + 10,
            shutdown_timeout_seconds=int(peer_timeout),
            cluster_detection_method="deactivate" if cluster.coordinator else None,
        )
    except (ValueError, KeyError, OSError) as error:  # Variables of a launcher that do not fit.
        raise errors.UsageError(
            f"JAX cannot find the other processes of this run ({error}); correct the variables of "
            "the launcher, such as TPU_WORKER_HOSTNAMES, or give --num_processes=1 to run alone"
        ) from None
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
    """Tells the other processes that this one is alive, and checks that they are."""

    def __init__(self, timeout: float):
        super().__init__(daemon=True, name="watch")
        self._timeout = timeout
        self._period = min(5.0, timeout / 6)
        self._client: Any = runtime.global_state.client
        self._me = jax.process_index()
        self._others = set(range(jax.process_count())) - {self._me}
        self._stopped = threading.Event()

    def run(self) -> None:
        """Sends heartbeats and checks those of the others until `leave`."""
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
        if not reason:  # A count of heartbeats.
            if age > self._timeout:
                self._stop_all(
                    f"process {process} has been silent for {age:.0f} s, so this one stops; "
                    "start all of them again to resume from the last checkpoint",
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
            message = "Interrupted: repeat the command to resume from the last checkpoint"
            print(message, file=sys.stderr)
        elif hasattr(error, "exit_code"):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        if isinstance(error, jax.errors.JaxRuntimeError):
            logging.warning("checking whether another process was lost")
            time.sleep(self._timeout + 2 * self._period)  # If so, the watch ends this process.
        self.leave(f"{code} {str(error).splitlines()[0][:200] if str(error) else repr(error)}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def leave(self, status: str) -> None:
        """Stops watching; process 0, which holds all messages, waits until the others have left."""
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
        entries = self._client.key_value_dir_get("watch/")
        return {int(key.rpartition("/")[2]): value for key, value in entries}


def roll_call(cluster: Cluster, timeout: float) -> None:
    """Waits until all processes have reached the coordinator; names those that have not.

    It uses the coordinator's port, which is free again afterwards. Without the roll call,
    `jax.distributed` would abort all processes without naming the missing ones.
    """
    end = time.monotonic() + timeout
    if cluster.process_id:
        _answer(cluster, end, timeout)
    else:
        _call(cluster, end, timeout)


def _call(cluster: Cluster, end: float, timeout: float) -> None:
    """Process 0's part of the roll call: collects the others and tells them the outcome.

    A connection that sends nothing, too much, or anything but the line of a member is ignored.
    """
    members: dict[int, socket.socket] = {}
    expected = set(range(1, cluster.num_processes))  # type: ignore[arg-type]
    problem = strange = ""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(cluster))
        server.setblocking(False)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        while not problem and members.keys() != expected:
            if time.monotonic() >= end:
                missing = sorted(expected - members.keys())
                problem = f"{_name(missing)} did not report within {timeout:g} s{strange}"
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
                    problem = f"two processes claim to be process {process}"
                    _tell(guest, problem)
                elif process in expected and count == cluster.num_processes:
                    members[process] = guest
                else:
                    if said:
                        strange = f"; process {process} of {count} reported"
                        _tell(guest, f"there are {cluster.num_processes} processes{strange}")
                    guest.close()
        for member in members.values():
            _tell(member, problem)
    if problem:
        raise PeerLost(_not_all(problem, cluster))


def _tell(guest: socket.socket, problem: str) -> None:
    with contextlib.suppress(OSError):
        guest.settimeout(5.0)
        guest.sendall(f"{problem}\n".encode())


def _listen(cluster: Cluster) -> socket.socket:
    """A server at the coordinator's address, or at all addresses of this host.

    The coordinator's address is not one of this host if a service forwards to it.
    """
    host, port = _address(cluster)
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
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


def _address(cluster: Cluster) -> tuple[str, int]:
    host, _, port = cluster.coordinator.rpartition(":")  # type: ignore[union-attr]
    return host.strip("[]"), int(port)


def _answer(cluster: Cluster, end: float, timeout: float) -> None:
    """The other processes' part: reports to process 0, and learns whether all have come."""
    failure: Exception = TimeoutError("no answer")
    while time.monotonic() < end + 5:
        try:
            with socket.create_connection(_address(cluster), timeout=5.0) as connection:
                connection.sendall(f"[{cluster.process_id}, {cluster.num_processes}]\n".encode())
                connection.settimeout(max(1.0, end + 5 - time.monotonic()))
                with connection.makefile() as lines:
                    heard = lines.readline(_LONGEST)
            if heard.endswith("\n"):
                if heard.strip():
                    raise PeerLost(_not_all(heard.strip(), cluster))
                return
        except OSError as error:
            failure = error
        time.sleep(0.2)
    raise PeerLost(_not_all(f"process 0 did not answer within {timeout:g} s ({failure})", cluster))


def _not_all(problem: str, cluster: Cluster) -> str:
    return (
        f"{problem}; {cluster.num_processes} processes meet at {cluster.coordinator}: check that "
        "each is started with its own --process_id and can reach that address"
    )


def _name(processes: Sequence[int]) -> str:
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {', '.join(map(str, processes))}"

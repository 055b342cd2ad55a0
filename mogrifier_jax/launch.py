"""Starts a run as several processes on this machine, and restarts it after an interruption.

    python -m mogrifier_jax.launch --processes=2 -- --config=experiments/pydoc.py:tiny

Flags after `--` are those of `main.py`. The launcher forwards SIGTERM and Ctrl-C, upon which every
process saves the same step and the launcher exits with code 75. If a process was preempted, killed
or lost, the launcher starts all of them again, up to `--restarts` times. It does not repeat
mistakes such as a wrong flag. On several machines a scheduler does this work: see launch/.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from mogrifier_jax import command_process, errors

RESTART = errors.Interrupted.exit_code
LIMITS = (
    ("processes", 1, 1024),
    ("devices", 1, 1024),
    ("restarts", 0, 10**6),
    ("wait", 0, 86_400),
    ("grace", 0, 86_400),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and launches; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mogrifier_jax.launch", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--processes", type=int, default=2, help="how many processes")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process")
    parser.add_argument("--restarts", type=int, default=100, help="how many restarts at most")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds before a restart")
    parser.add_argument(
        "--grace", type=float, default=180.0, help="seconds until the others are killed"
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- and the flags of main")
    options = parser.parse_args(arguments)
    for name, least, most in LIMITS:
        if not least <= getattr(options, name) <= most:
            parser.error(f"--{name} {getattr(options, name)} must be from {least} to {most}")
    flags = options.flags
    if flags[:1] == ["--"]:
        flags = flags[1:]
    launcher = Launcher(options.processes, options.devices, options.grace)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, launcher.stop)
    for attempt in range(options.restarts + 1):
        code = launcher.run(flags)
        if code != RESTART or launcher.stopping:
            break
        if attempt < options.restarts:
            _say(f"interrupted; starting again, {attempt + 1} of at most {options.restarts} times")
            time.sleep(options.wait)
    return code


class Launcher:
    """The processes of one run; if one fails, all are stopped."""

    def __init__(self, processes: int, devices: int, grace: float):
        self._count, self._devices, self._grace = processes, devices, grace
        self._running: list[subprocess.Popen] = []
        self.stopping = False

    def run(self, flags: Sequence[str]) -> int:
        """Starts all processes, waits for them, and returns one exit code for all."""
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(self._devices)}
        environment[command_process.PARENT] = str(os.getpid())  # They end with it.
        environment.setdefault("NPROC", str(max(4, 2 * self._devices)))  # Fewer threads deadlock.
        address = f"127.0.0.1:{_free_port()}"
        command = [sys.executable, "-m", "mogrifier_jax.main", *flags]
        command += [f"--coordinator={address}", f"--num_processes={self._count}"]
        self._running = [
            subprocess.Popen(
                [*command, f"--process_id={process}"],
                env=environment,
                process_group=0,  # The launcher forwards Ctrl-C of a terminal.
            )
            for process in range(self._count)
        ]
        codes = self._wait()
        for process, code in enumerate(codes):
            if code:
                _say(f"process {process} (pid {self._running[process].pid}) {_explain(code)}")
        return combine(codes)

    def stop(self, number: int, _) -> None:
        """Forwards a signal; nothing is restarted after that."""
        self.stopping = True
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def _wait(self) -> list[int]:
        """Waits for the exit codes; if one process fails, the others have `grace` seconds."""
        deadline = None
        # Polling all of them sets the return codes of those that have ended.
        while None in [process.poll() for process in self._running]:
            time.sleep(0.1)
            if deadline is None and any(process.returncode for process in self._running):
                deadline = time.monotonic() + self._grace
            if deadline is not None and time.monotonic() > deadline:
                for process in self._running:
                    if process.poll() is None:
                        _say(f"pid {process.pid} is still running after {self._grace:g} s: killed")
                        process.kill()
                        process.wait()
        return [process.returncode for process in self._running]


def combine(codes: Sequence[int]) -> int:
    """One exit code for all: the code of a mistake, or RESTART if any process failed, or 0."""
    for code in codes:
        if code > 0 and code != RESTART and code < 128:
            return code
    return RESTART if any(codes) else 0


def _explain(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _say(message: str) -> None:
    print(f"launch: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Prepares the process of a command: standard streams, limits, its parent, its exit code.

Nothing slow is imported here, because `main.py` needs this module before everything else.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from typing import NoReturn

from mogrifier_jax import errors

PARENT = "MOGRIFIER_PARENT"  # The variable with the id of the process that started this one.
MIN_OPEN_FILES = 32  # With fewer, libraries hang or print tracebacks as they save.


def prepare_streams() -> None:
    """Makes output possible in any environment."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # It is closed, so the next file to be opened would get what is printed.
            os.open(os.devnull, os.O_RDWR)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            # Characters that the encoding lacks, such as ASCII, are escaped.
            stream.reconfigure(errors="backslashreplace")
    if "MPLBACKEND" in os.environ:  # It may name a backend that is not installed.
        os.environ["MPLBACKEND"] = "agg"


def check_open_files() -> None:
    """Refuses a limit of open files with which no run could save its checkpoints."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        raise errors.UsageError(
            f"this process may open only {limit} files at a time, and needs {MIN_OPEN_FILES} or "
            "more; raise that limit, for example by ulimit -n 1024"
        )


def end_with_parent() -> None:
    """Stops this process if the one that started it is killed: a sweep, a study or a launcher."""
    parent = os.environ.get(PARENT, "")
    os.environ[PARENT] = str(os.getpid())  # For the processes that this one starts.
    if not parent.isdecimal():
        return
    if os.getppid() != int(parent):
        if not os.path.exists("/proc/self") or os.path.exists(f"/proc/{parent}"):
            return  # Another program in between started this process.
        os.kill(os.getpid(), signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def end(message: str, code: int) -> NoReturn:
    """Prints the message to stderr, if that is possible, and exits with this code."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Without a working stream, Python would exit with another code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)

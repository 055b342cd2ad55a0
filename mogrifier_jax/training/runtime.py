"""What surrounds a run: compiled programs and their cache, a trace of steps, requests to stop."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging
from jax.experimental import multihost_utils

from mogrifier_jax import errors


def use_compilation_cache() -> None:
    """Keeps compiled programs in ~/.cache, unless JAX_COMPILATION_CACHE_DIR names another folder.

    JAX_ENABLE_COMPILATION_CACHE=false switches it off.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        base = os.environ.get("MOGRIFIER_CACHE_DIR") or "~/.cache/mogrifier_jax"
        folder = pathlib.Path(base).expanduser() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))


def check_flags() -> None:
    """Refuses XLA_FLAGS that the library does not know: reading them, it would end the process."""
    value = os.environ.get("XLA_FLAGS")
    if not value:
        return
    read = "x.CompileOptions().executable_build_options.debug_options"
    command = [sys.executable, "-c", f"from jaxlib import xla_client as x; {read}"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        reason = found.stderr.strip().partition("\n")[0].rpartition("] ")[2]
        raise errors.UsageError(
            f"XLA_FLAGS={value!r} cannot be read ({reason}); correct or unset the variable"
        )


class Trace:
    """A `jax.profiler` trace of the dispatches that hold steps N to M, in <workdir>/profile."""

    def __init__(self, workdir: str | os.PathLike, steps: str | None = None):
        self._folder = pathlib.Path(workdir) / "profile"
        self._first, self._last = parse_steps(steps) if steps else (0, 0)
        self._running = False

    @contextlib.contextmanager
    def steps(self, done: int, count: int) -> Iterator[None]:
        """Put this around the dispatch of `count` steps that follow the first `done` ones."""
        wanted = done < self._last and done + count >= self._first
        if wanted and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True
        yield
        if self._running and done + count >= self._last:
            jax.profiler.stop_trace()
            self._running = False
            logging.info(
                "a trace of steps %d to %d is in %s", self._first, self._last, self._folder
            )


def parse_steps(text: str) -> tuple[int, int]:
    """Reads "N:M", counted from 1, both included."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise errors.UsageError(
            f"--profile_steps={text} is not N:M with 1 <= N <= M; give two steps, such as 101:120"
        )
    return int(first), int(last)


class StopRequests:
    """Notes requests to stop; ask `requested()` between dispatches, equally often in all processes.

    With `jax.distributed` the runtime itself listens for SIGTERM and makes every process stop at
    the same call. Without it SIGTERM and the first Ctrl-C are caught here; a second Ctrl-C
    interrupts at once. Within one that listens already, `with` gives that one.
    """

    _listening: "StopRequests | None" = None

    def __init__(self) -> None:
        self._calls = 0
        self._signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if StopRequests._listening is not None:
            return StopRequests._listening
        StopRequests._listening = self
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and not jax.distributed.is_initialized():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if StopRequests._listening is self:
            StopRequests._listening = None

    def check(self) -> None:
        """Stops at once, if asked to, where there is nothing to save yet; for one process alone."""
        if self._signal is not None:
            raise errors.Interrupted("stopped before the first step; the same command goes on")

    def requested(self) -> bool:
        """Whether to save and stop now; the same answer in every process."""
        if jax.distributed.is_initialized():
            # The runtime names one call at which all stop, so they are counted one by one.
            self._calls += 1
            return multihost_utils.reached_preemption_sync_point(self._calls)
        return self._signal is not None

    def _note(self, number: int, _) -> None:
        if self._signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self._signal = number
        logging.warning(
            "%s: saving and stopping%s",
            *(signal.Signals(number).name, "; again to stop at once" * (number == signal.SIGINT)),
        )

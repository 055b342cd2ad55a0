"""What surrounds a run: the cache of compiled programs, and a trace of some of its steps."""

import os
import pathlib

import jax
from absl import logging

from mogrifier_jax import errors


def use_compilation_cache() -> None:
    """Keeps compiled programs in ~/.cache, unless JAX_COMPILATION_CACHE_DIR names another folder.

    JAX_ENABLE_COMPILATION_CACHE=false switches it off.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        base = os.environ.get("MOGRIFIER_CACHE_DIR") or "~/.cache/mogrifier_jax"
        folder = pathlib.Path(base).expanduser() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))


class Trace:
    """A `jax.profiler` trace of the dispatches that hold steps N to M, in <workdir>/profile.

    Call `before` and `after` around each dispatch.
    """

    def __init__(self, workdir: str | os.PathLike, steps: str | None = None):
        self._folder = str(pathlib.Path(workdir) / "profile")
        self._first, self._last = parse_steps(steps) if steps else (0, 0)
        self._running = False

    def before(self, step: int, count: int) -> None:
        """Steps `step` + 1 to `step` + `count` come next."""
        wanted = step < self._last and step + count >= self._first
        if self._first and wanted and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int) -> None:
        """The run has reached `step`, and its results are on the host."""
        if self._running and step >= self._last:
            jax.profiler.stop_trace()
            self._running, self._first = False, 0
            logging.info("trace of steps up to %d is in %s", step, self._folder)


def parse_steps(text: str) -> tuple[int, int]:
    """Reads "N:M", counted from 1, both included."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise errors.UsageError(
            f"--profile_steps={text} is not N:M with 1 <= N <= M; give two steps, such as 101:120"
        )
    return int(first), int(last)

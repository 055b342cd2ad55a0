"""What surrounds a run: how programs are compiled and cached, and a trace of some steps."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator

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


@functools.cache
def compiler_options(platform: str) -> dict[str, str] | None:
    """How the compiler is to treat train steps on a platform differently than it would.

    On CPUs matmuls are given to Eigen rather than YNNPACK, which keeps the reductions.
    docs/performance.md has the measurements. A compiler that does not know the option goes without.
    """
    if platform != "cpu":
        return None
    options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return None
    return options


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

"""Profiles of chosen steps for TensorBoard and Perfetto (`--profile_steps`)."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import jax
from absl import logging

from mogrifier_jax import errors


class Trace:
    """A `jax.profiler` trace of the dispatches with steps N to M, in <workdir>/profile."""

    def __init__(self, workdir: str | os.PathLike, steps: str | None = None):
        self._folder = pathlib.Path(workdir) / "profile"
        self._first, self._last = parse_steps(steps) if steps else (0, 0)
        self._running = False

    @contextlib.contextmanager
    def steps(self, done: int, count: int) -> Iterator[None]:
        """Wraps the dispatch of `count` steps after the first `done` steps."""
        is_chosen = done < self._last and done + count >= self._first
        if is_chosen and not self._running:
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

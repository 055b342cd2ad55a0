"""What surrounds a run: cores and devices, compiled programs and their cache, traces of steps."""

import contextlib
import functools
import math
import os
import pathlib
from collections.abc import Iterator

import jax
from absl import logging

from mogrifier_jax import errors

_counted_cores = False  # Whether `use_cores` decided how many CPU devices there are.


def use_cores(count: int | None = None) -> None:
    """Gives JAX one CPU device for each core, or `count`; call it before any backend starts.

    Without `count` it does nothing if the environment or JAX's own setting names a number.
    """
    global _counted_cores
    if count is not None:
        if count < 1:
            raise errors.UsageError(f"--cpu_devices={count} must be at least 1")
        # Processes started from here are to have as many.
        os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    elif _named_count():
        return
    else:
        count, _counted_cores = len(usable_cores()), True
        if math.isfinite(quota()):
            # XLA's thread pool has a thread for each core it sees, and it does not see the quota.
            os.environ.setdefault("NPROC", str(count))
    jax.config.update("jax_num_cpu_devices", count)


def _named_count() -> bool:
    """Whether the user has named a number of CPU devices in one of JAX's ways."""
    in_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return in_flags or jax.config.jax_num_cpu_devices >= 0  # type: ignore[attr-defined]


def counted_cores() -> bool:
    """Whether the devices are CPU cores and nobody but `use_cores` chose their number."""
    return _counted_cores and jax.default_backend() == "cpu"


def usable_cores() -> list[int]:
    """The cores this process may run on, no more of them than its container has time for."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    return cores[: int(max(1, min(quota(), len(cores))))]


def quota(root: pathlib.Path = pathlib.Path("/")) -> float:
    """How many cores a Linux control group (version 1 or 2) grants at a time; inf without limit."""
    limits = [math.inf]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
                group = top / path.lstrip("/")
                inside = [each for each in (group, *group.parents) if each.is_relative_to(top)]
                limits += map(_quota_of, inside)
    return min(limits)


def _quota_of(group: pathlib.Path) -> float:
    """The limit of one control group."""
    with contextlib.suppress(OSError):
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = (
                (group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        return math.inf if limit in ("max", "-1") else int(limit) / int(period)
    return math.inf


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

"""The cores and accelerators of this machine, and how several processes share them.

Processes that run in parallel must not use the same devices. Only one process can open a TPU chip,
and programs that each use all cores wait for each other, so that two of them side by side take
longer than one after the other.
"""

import contextlib
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

from mogrifier_jax import errors

_counted_cores = False  # Whether `use_cores` decided how many CPU devices there are.


def use_cores(count: int | None = None) -> None:
    """Gives JAX one CPU device for each core, or `count`; call it before any backend starts.

    Without `count` it does nothing if the environment or JAX's own setting gives a number.
    """
    global _counted_cores
    if count is not None:
        if not 1 <= count <= 1024:
            raise errors.UsageError(f"--cpu_devices={count} must be at least 1 and at most 1024")
        # For the processes that this one starts.
        os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    elif _named_count():
        return
    else:
        count, _counted_cores = len(usable_cores()), True
        if math.isfinite(quota()):
            # XLA's thread pool has a thread for each core of the machine, ignoring the quota.
            os.environ.setdefault("NPROC", str(count))
    jax.config.update("jax_num_cpu_devices", count)


def _named_count() -> bool:
    """Whether the user has set the number of CPU devices in one of JAX's ways."""
    in_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return in_flags or jax.config.jax_num_cpu_devices >= 0  # type: ignore[attr-defined]


def counted_cores() -> bool:
    """Whether the devices are CPU cores whose number `use_cores` chose, not the user."""
    return _counted_cores and jax.default_backend() == "cpu"


def usable_cores() -> list[int]:
    """The cores that this process may run on, limited by the quota of its container."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    return cores[: int(max(1, min(quota(), len(cores))))]


def quota(root: pathlib.Path = pathlib.Path("/")) -> float:
    """How many cores a Linux control group (version 1 or 2) allows at a time; inf without limit."""
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
            limit = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return math.inf if limit in ("max", "-1") else int(limit) / int(period)
    return math.inf


class Share(NamedTuple):
    """The part of the machine that one of several processes has to itself."""

    cores: frozenset[int]
    environment: Mapping[str, str]  # The variables by which it finds its accelerator.
    hardware: str  # As "1 cpu, 1 of 2 cores".


def share(count: int) -> list[Share]:
    """Splits this machine among `count` processes: its cores, and one accelerator for each."""
    platform, kind, chips = find_accelerators()
    if platform != "cpu" and count > len(chips):
        raise errors.UsageError(
            f"--parallel={count} is more than the {len(chips)} devices ({kind}) of this machine, "
            f"and each process needs one of its own; use --parallel={len(chips)} or less"
        )
    cores, shares = usable_cores(), []
    for index in range(count):
        own = frozenset(cores[index % len(cores) :: count])
        number = len(own) if platform == "cpu" else 1
        hardware = f"{number} {kind}, {len(own)} of {os.cpu_count()} cores"
        variables = {} if platform == "cpu" else name_chip(platform, chips[index])
        shares.append(Share(own, variables, hardware))
    return shares


def name_chip(platform: str, chip: str) -> dict[str, str]:
    """The variables that make a vendor's library show only this chip to a process."""
    if platform == "tpu":
        return {
            "TPU_VISIBLE_CHIPS": chip,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Otherwise one process per host.
        }
    return {"CUDA_VISIBLE_DEVICES": chip}


def find_accelerators() -> tuple[str, str, list[str]]:
    """The platform, the kind of its chips, and their names, of which a CPU has none."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu", "cpu", []
    platform, kind, count = ask_jax()
    if platform == "cpu":
        return platform, kind, []
    variable = "TPU_VISIBLE_CHIPS" if platform == "tpu" else "CUDA_VISIBLE_DEVICES"
    named = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    return platform, kind, named or [str(index) for index in range(count)]


def ask_jax() -> tuple[str, str, int]:
    """The platform, kind and number of chips that JAX sees on this machine.

    It is asked in another process, because a process keeps the accelerators that it has opened.
    """
    # The two cores of some TPU chips are two devices with the same coordinates.
    code = (
        "import jax; devices = jax.local_devices(); "
        "chips = {str(getattr(device, 'coords', device.id)) for device in devices}; "
        "print(devices[0].platform, devices[0].device_kind, len(chips), sep='|')"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise errors.UsageError(f"the devices cannot be used ({reason}); check JAX_PLATFORMS")
    platform, kind, count = asked.stdout.strip().splitlines()[-1].split("|")
    return platform, kind, int(count)


def describe_unused_accelerator() -> str | None:
    """One sentence about an accelerator of this machine that JAX does not use, or None."""
    if os.environ.get("JAX_PLATFORMS") or jax.default_backend() != "cpu":
        return None  # Either the user has chosen, or JAX has found it.
    if any(pathlib.Path("/dev").glob("accel*")) or "TPU_ACCELERATOR_TYPE" in os.environ:
        accelerator, extra = "a TPU", "tpu"
    elif driver := _nvidia_driver():
        accelerator = "an NVIDIA GPU"
        extra = "cuda13" if driver >= _CUDA_13_DRIVER else "cuda12"
    else:
        return None
    return (
        f"this machine has {accelerator}, which JAX does not use, so the run is on the CPU; "
        f'pip install "mogrifier_jax[{extra}]", or set JAX_PLATFORMS=cpu to hide this'
    )


_CUDA_13_DRIVER = 580  # The first driver that can run CUDA 13.


def _nvidia_driver() -> int | None:
    """The major version of NVIDIA's driver, if there is one and it sees a GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    major = asked.stdout.strip().partition(".")[0]
    return int(major) if asked.returncode == 0 and major.isdecimal() else None


@contextlib.contextmanager
def bound_to(cores: frozenset[int]) -> Iterator[None]:
    """Restricts processes that are started in its block to these cores, where possible."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)

"""The cores and accelerators of this machine, and how several processes share them.

Processes that run side by side must not use the same devices. Programs that all use all cores wait
for each other, so that two at once are slower than one after the other, and a TPU chip has room
for one process only.
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

    Without `count` it does nothing if the environment or JAX's own setting names a number.
    """
    global _counted_cores
    if count is not None:
        if not 1 <= count <= 1024:
            raise errors.UsageError(f"--cpu_devices={count} must be at least 1 and at most 1024")
        # Processes that are started from here shall have the same number.
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
    """Whether the devices are CPU cores whose number `use_cores` chose, not the user."""
    return _counted_cores and jax.default_backend() == "cpu"


def usable_cores() -> list[int]:
    """The cores that this process may run on, no more than its container's quota allows."""
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
    """What one of several processes has to itself."""

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
    """The variables by which a vendor's library shows one chip to a process, and no other."""
    if platform == "tpu":
        return {
            "TPU_VISIBLE_CHIPS": chip,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # The library else allows one process on a host.
        }
    return {"CUDA_VISIBLE_DEVICES": chip}


def find_accelerators() -> tuple[str, str, list[str]]:
    """The platform, the kind of its chips and their names; on CPUs there are none."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu", "cpu", []
    platform, kind, count = ask_jax()
    if platform == "cpu":
        return platform, kind, []
    variable = "TPU_VISIBLE_CHIPS" if platform == "tpu" else "CUDA_VISIBLE_DEVICES"
    named = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    return platform, kind, named or [str(index) for index in range(count)]


def ask_jax() -> tuple[str, str, int]:
    """The platform, kind and number of chips that JAX has here.

    It is asked in a process of its own, because a process keeps the accelerators it has seen.
    """
    # The two cores of some TPU chips are two devices with the same coordinates.
    code = (
        "import jax; devices = jax.local_devices(); "
        "chips = {str(getattr(device, 'coords', device.id)) for device in devices}; "
        "print(devices[0].platform, devices[0].device_kind, len(chips), sep='|')"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise errors.UsageError(f"the devices cannot be used ({reason}); see JAX_PLATFORMS")
    platform, kind, count = asked.stdout.strip().splitlines()[-1].split("|")
    return platform, kind, int(count)


@contextlib.contextmanager
def bound_to(cores: frozenset[int]) -> Iterator[None]:
    """Makes processes that are started inside run on these cores, if the system allows it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)

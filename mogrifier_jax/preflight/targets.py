"""Chips and how they are connected: the meaning of a name such as `v5e:4x4` or `h100:8`.

`parse` reads the name. `describe` asks the vendor's compiler for that topology, which needs no
chip. `mesh` makes a ("data", "model") mesh of its chips. Peaks and memory bandwidths are published
numbers. The memory of a TPU is what its compiler leaves to a program. Bandwidths of links and
networks, latencies and launch times are round figures. `costs.py` estimates costs with them.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import os
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies

from mogrifier_jax import errors, partitioning

_GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator. Rates are per second and per chip; links count one direction."""

    generation: str
    kind: str  # "tpu" or "gpu".
    memory: int  # Bytes that a program can use.
    peak_flops: float  # Dense bfloat16.
    memory_bandwidth: float
    link_bandwidth: float  # TPU: along one axis of the torus, both ways round; GPU: NVLink or PCIe.
    link_latency: float  # Seconds for one hop.
    clock: float  # Cycles per second, in the sense of the compiler's estimates.
    launch: float = 0.0  # Seconds to start a kernel.
    network_bandwidth: float = 0.0  # GPU: to other hosts.
    torus: int = 0  # TPU: axes of the torus.
    full_side: int = 0  # TPU: sides that are a multiple of this close into a ring.


def _tpu(name, gib, tflops, flops_per_cycle, memory, link, torus, full_side) -> Chip:
    peak = tflops * 1e12
    rates = dict(peak_flops=peak, memory_bandwidth=memory * 1e9, link_bandwidth=link * 1e9)
    sides = dict(torus=torus, full_side=full_side)
    clock = peak / flops_per_cycle
    return Chip(name, "tpu", int(gib * _GIB), **rates, link_latency=1e-6, clock=clock, **sides)


def _gpu(name, size, tflops, ghz, memory, link, network) -> Chip:
    rates = dict(peak_flops=tflops * 1e12, memory_bandwidth=memory * 1e9, link_bandwidth=link * 1e9)
    rates |= dict(network_bandwidth=network * 1e9, clock=ghz * 1e9)
    return Chip(name, "gpu", size, **rates, link_latency=2e-6, launch=2e-6)


CHIPS = {
    chip.generation: chip
    for chip in (
        # Memory in GiB, TFLOP/s, operations a cycle, GB/s of memory and of one torus axis, axes,
        # side of a ring. The compiler's estimate of a large matmul reaches some number of
        # operations a cycle. The table has the power of two above it. The peak divided by this
        # number gives the clock. v4 and v5p have two cores that act as one.
        _tpu("v4", 30.75, 275, 2**18, 1200, 90, 3, 4),
        _tpu("v5e", 15.75, 197, 2**17, 819, 90, 2, 16),
        _tpu("v5p", 95.74, 459, 2**18, 2765, 180, 3, 4),
        _tpu("v6e", 31.25, 918, 2**19, 1638, 180, 2, 16),
        # Memory in bytes, TFLOP/s, GHz, GB/s of memory, of links within a host, and of the network.
        _gpu("a100", 42_331_013_120, 312, 1.41, 1555, 300, 25),
        _gpu("a100-80g", 85_100_068_864, 312, 1.41, 2039, 300, 25),
        _gpu("h100", 84_942_979_072, 989, 1.98, 3352, 450, 50),
        _gpu("l4", 23_600_000_000, 121, 2.04, 300, 25, 12),
    )
}

_PLANES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_LARGEST = {"v4": 4096, "v5p": 6144}
_GPUS_PER_HOST = 8

# What the CUDA compiler must know of a device: compute capability, streaming multiprocessors, FP32
# units and resident threads of each, shared memory of each and of one block, L2 cache, device name.
_CUDA = {
    "a100": ((8, 0), 108, 64, 2048, 167_936, 166_912, 41_943_040, "NVIDIA A100-SXM4-40GB"),
    "a100-80g": ((8, 0), 108, 64, 2048, 167_936, 166_912, 41_943_040, "NVIDIA A100-SXM4-80GB"),
    "h100": ((9, 0), 132, 128, 2048, 233_472, 232_448, 52_428_800, "NVIDIA H100 80GB HBM3"),
    "l4": ((8, 9), 58, 128, 1536, 102_400, 101_376, 50_331_648, "NVIDIA L4"),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Chips of one generation in a shape: the sides of a TPU slice, or (hosts, GPUs per host)."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """The number of chips; each is one device."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        if self.chip.kind == "gpu":
            return f"{self.chip.generation}:{self.num_chips}"
        return f"{self.chip.generation}:{'x'.join(map(str, self.shape))}"


def parse(name: str) -> Target:
    """Reads `generation:shape`: `v5e:4x4`, `v5p:2x2x1`, `h100:8`."""
    generation, _, shape = name.partition(":")
    if generation not in CHIPS:
        raise errors.UsageError(
            f"topology {name!r} names no known chip; use one of {', '.join(CHIPS)}, "
            "such as v5e:4x4, v5p:2x2x1 or h100:8"
        )
    chip = CHIPS[generation]
    try:
        sides = tuple(int(side) for side in shape.split("x"))
    except ValueError:
        sides = ()
    if chip.kind == "gpu":
        return Target(chip, _hosts(name, sides))
    allowed = sides in (_PLANES if chip.torus == 2 else _CUBES)
    if not allowed and not _whole_cubes(chip, sides):
        raise errors.UsageError(f"topology {name!r} is not a slice of {generation}; {_known(chip)}")
    return Target(chip, sides)


def _hosts(name: str, sides: tuple[int, ...]) -> tuple[int, int]:
    """Splits a number of GPUs into (hosts, GPUs of each host)."""
    count = sides[0] if len(sides) == 1 else 0
    if count < 1 or (count > _GPUS_PER_HOST and count % _GPUS_PER_HOST):
        raise errors.UsageError(
            f"topology {name!r} needs a number of GPUs from 1 to {_GPUS_PER_HOST} or a multiple of "
            f"{_GPUS_PER_HOST}, such as {name.partition(':')[0]}:{_GPUS_PER_HOST}"
        )
    return max(count // _GPUS_PER_HOST, 1), min(count, _GPUS_PER_HOST)


def _whole_cubes(chip: Chip, sides: tuple[int, ...]) -> bool:
    """Whether the sides are of a larger 3-D slice, which is built from 4x4x4 cubes."""
    whole = len(sides) == 3 and all(side > 0 and side % 4 == 0 for side in sides)
    return chip.torus == 3 and whole and math.prod(sides) <= _LARGEST[chip.generation]


def _known(chip: Chip) -> str:
    shapes = _PLANES if chip.torus == 2 else _CUBES
    known = ", ".join("x".join(map(str, shape)) for shape in shapes)
    if chip.torus == 2:
        return f"use one of {known}"
    largest = _LARGEST[chip.generation]
    return f"use one of {known}, or three multiples of 4 with at most {largest} chips"


def describe(target: Target) -> topologies.TopologyDescription:
    """The topology from the vendor's compiler. It uses no accelerator, even if there is one."""
    # If JAX used its own backend, either compiler would look for hardware. With the CPU backend
    # it does not.
    jax.config.update("jax_platforms", "cpu")
    topology = _describe_tpu(target) if target.chip.kind == "tpu" else _describe_gpu(target)
    if len(topology.devices) != target.num_chips:
        raise RuntimeError(
            f"{target.name} has {target.num_chips} chips, the compiler sees {len(topology.devices)}"
        )
    return topology


def _describe_tpu(target: Target) -> topologies.TopologyDescription:
    if importlib.util.find_spec("libtpu") is None:
        raise errors.UsageError(
            f"topology {target.name!r} needs the TPU compiler, which is not installed; "
            "run `pip install .[tpu]` (no TPU is needed)"
        )
    # The library reads these as it loads. They keep it from asking the cloud where it runs, from
    # warnings, and from refusing to share this host. It will use no chip.
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {}
    if target.num_chips == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]  # By default a host has 2x2 chips.
    if target.chip.generation == "v4":
        options["chip_config_name"] = "megacore"  # One device a chip, as Cloud TPU runs it.
    return topologies.get_topology_desc(platform="tpu", topology_name=target.name, **options)


def _describe_gpu(target: Target) -> topologies.TopologyDescription:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        raise errors.UsageError(
            f"topology {target.name!r} needs the CUDA compiler, which is not installed; "
            "run `pip install .[cuda]` (no GPU is needed)"
        )
    hosts, gpus = target.shape
    return topologies.get_topology_desc(
        platform="cuda", target_config=_textproto(target.chip), topology=f"1x{hosts}x{gpus}"
    )


def _textproto(chip: Chip) -> str:
    """A GPU as the text of XLA's GpuTargetConfigProto."""
    capability, cores, units, threads, shared, shared_block, cache, name = _CUDA[chip.generation]
    device = {
        "core_count": cores,
        "fpus_per_core": units,
        "threads_per_core_limit": threads,
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_core": shared,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_block_optin": shared_block,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "l2_cache_size": cache,
        "clock_rate_ghz": chip.clock / 1e9,
        "memory_bandwidth": int(chip.memory_bandwidth),
        "device_memory_size": chip.memory,
    }
    lines = "\n".join(f"  {key}: {value}" for key, value in device.items())
    major, minor = capability
    return f"""gpu_device_info {{
{lines}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


def mesh(target: Target, data: int, model: int) -> jax.sharding.Mesh:
    """A ("data", "model") mesh of the described chips; neighbours in the torus stay together.

    An axis of -1 gets all chips that the other axis leaves.
    """
    shape = partitioning.mesh_shape(data, model, target.num_chips)
    devices = _devices(target)
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.Mesh(grid, ("data", "model"), axis_types=auto)


@functools.cache
def _devices(target: Target) -> list[Any]:
    """The chips of a target, described once: devices of two descriptions do not mix."""
    return list(describe(target).devices)


def splits(target: Target) -> list[tuple[int, int]]:
    """All sizes (data, model) that use every chip, the largest data axis first."""
    chips = target.num_chips
    return [(chips // model, model) for model in range(1, chips + 1) if chips % model == 0]


def ring(target: Target, group: int) -> tuple[float, int]:
    """The bytes per second and the hops of a ring collective among `group` chips.

    On a torus, a group larger than a side spans several axes and uses the links of all of them. A
    side that does not close into a ring has half the bandwidth. GPUs of two hosts use the network.
    """
    chip = target.chip
    if chip.kind == "gpu":
        inside = group <= target.shape[-1]
        return (chip.link_bandwidth if inside else chip.network_bandwidth), group - 1
    sides = sorted(target.shape, reverse=True)
    products = itertools.accumulate(sides, lambda a, b: a * b)
    axes = next((n for n, chips in enumerate(products, start=1) if chips >= group), len(sides))
    used = sides[:axes]
    closed = sum(1.0 if side % chip.full_side == 0 else 0.5 for side in used if side > 1)
    hops = math.ceil(axes * (group ** (1 / axes) - 1))
    return chip.link_bandwidth * max(closed, 0.5), hops

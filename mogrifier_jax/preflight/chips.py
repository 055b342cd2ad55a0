"""The accelerators that preflight knows: memory, peak FLOPs, bandwidths, clocks.

Peak FLOPs and memory bandwidths are the published ones, and the memory of a TPU is what its
compiler leaves to a program. Bandwidths of links and networks, latencies and launch times are
round figures.
"""

import dataclasses

_GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator. Rates are per second and per chip, and links count in one direction."""

    generation: str
    kind: str  # "tpu" or "gpu".
    memory: int  # Bytes that a program can use.
    peak_flops: float  # Dense bfloat16.
    memory_bandwidth: float
    link_bandwidth: float  # TPU: of one torus axis, both ways around it. GPU: NVLink or PCIe.
    link_latency: float  # Seconds for a hop.
    clock: float  # Cycles per second, as the compiler's estimates count them.
    launch: float = 0.0  # GPU: seconds to launch a kernel.
    network_bandwidth: float = 0.0  # GPU: to other hosts.
    torus: int = 0  # TPU: the number of axes of the torus.
    full_side: int = 0  # TPU: an axis closes into a ring if its length is a multiple of this.


def _tpu(
    name: str,
    gib: float,
    tflops: float,
    flops_per_cycle: int,
    memory: float,
    link: float,
    torus: int,
    full_side: int,
) -> Chip:
    peak = tflops * 1e12
    return Chip(
        name,
        "tpu",
        int(gib * _GIB),
        peak,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=link * 1e9,
        link_latency=1e-6,
        clock=peak / flops_per_cycle,
        torus=torus,
        full_side=full_side,
    )


def _gpu(
    name: str, size: int, tflops: float, ghz: float, memory: float, link: float, network: float
) -> Chip:
    return Chip(
        name,
        "gpu",
        size,
        tflops * 1e12,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=link * 1e9,
        link_latency=2e-6,
        clock=ghz * 1e9,
        launch=2e-6,
        network_bandwidth=network * 1e9,
    )


CHIPS = {
    chip.generation: chip
    for chip in (
        # Memory in GiB, TFLOP/s, FLOPs per cycle, GB/s of memory and of one torus axis, number of
        # axes, length of a ring. FLOPs per cycle are those that the compiler's estimate of a large
        # matmul comes close to, rounded up to a power of two; the clock is the peak divided by
        # them. v4 and v5p have two cores that act as one.
        _tpu("v4", 30.75, 275, 2**18, 1200, 90, 3, 4),
        _tpu("v5e", 15.75, 197, 2**17, 819, 90, 2, 16),
        _tpu("v5p", 95.74, 459, 2**18, 2765, 180, 3, 4),
        _tpu("v6e", 31.25, 918, 2**19, 1638, 180, 2, 16),
        # Memory in bytes, TFLOP/s, GHz, GB/s of memory, of links within a host, of the network.
        _gpu("a100", 42_331_013_120, 312, 1.41, 1555, 300, 25),
        _gpu("a100-80g", 85_100_068_864, 312, 1.41, 2039, 300, 25),
        _gpu("h100", 84_942_979_072, 989, 1.98, 3352, 450, 50),
        _gpu("l4", 23_600_000_000, 121, 2.04, 300, 25, 12),
    )
}
# What the CUDA compiler must know about a device: compute capability, number of streaming
# multiprocessors, their FP32 units and resident threads, shared memory of a multiprocessor and of a
# block, L2 cache, device name.
_CUDA = {
    "a100": ((8, 0), 108, 64, 2048, 167_936, 166_912, 41_943_040, "NVIDIA A100-SXM4-40GB"),
    "a100-80g": ((8, 0), 108, 64, 2048, 167_936, 166_912, 41_943_040, "NVIDIA A100-SXM4-80GB"),
    "h100": ((9, 0), 132, 128, 2048, 233_472, 232_448, 52_428_800, "NVIDIA H100 80GB HBM3"),
    "l4": ((8, 9), 58, 128, 1536, 102_400, 101_376, 50_331_648, "NVIDIA L4"),
}


def gpu_target_config(chip: Chip) -> str:
    """A GPU in the text format of XLA's GpuTargetConfigProto."""
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

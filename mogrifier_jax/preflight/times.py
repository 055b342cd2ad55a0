"""Estimates the time of a compiled program on TPUs and GPUs from its costs.

For TPUs it is the compiler's own estimate in cycles, at the clock of the chip; `schedules.py` has
another estimate. For GPUs, whose compilers estimate nothing, it is the sum of the rooflines of all
kernels.
"""

from mogrifier_jax.preflight import chips, costs, targets


def compute_seconds(analysis: costs.Analysis, chip: chips.Chip) -> float:
    """The time without collectives."""
    if chip.kind == "tpu":
        # Copies overlap with computation, unless there are so many that it has to wait for them.
        return max(analysis.cycles / chip.clock, analysis.copied_bytes / chip.memory_bandwidth)
    return sum(cost.executions * _roofline(cost, chip) for cost in analysis.costs)


def _roofline(cost: costs.Cost, chip: chips.Chip) -> float:
    """The time for arithmetic or for memory, whichever is longer, plus that to launch a kernel."""
    peak = chip.peak_flops / 2 if cost.single else chip.peak_flops  # TF32 runs at half the rate.
    return chip.launch + max(cost.flops_each / peak, cost.traffic_each / chip.memory_bandwidth)


def collective_seconds(analysis: costs.Analysis, target: targets.Target) -> float:
    """The time of all collectives as rings, one after another: an upper bound if some overlap."""
    total = 0.0
    for one in analysis.collectives:
        bandwidth, hops = targets.ring(target, one.group_size)
        hops *= 2 if one.kind == "all-reduce" else 1
        total += one.wire_bytes / bandwidth + one.executions * hops * target.chip.link_latency
    return total

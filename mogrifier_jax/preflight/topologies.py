"""Devices to compile for that are not in this machine, described by the vendors' compilers."""

import functools
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies

from mogrifier_jax import errors, partitioning
from mogrifier_jax.preflight import chips, schedules, targets


def describe_topology(target: targets.Target) -> topologies.TopologyDescription:
    """The topology as the vendor's compiler describes it; no accelerator is touched."""
    # With any other backend than the CPU's, both compilers would look for hardware.
    jax.config.update("jax_platforms", "cpu")
    topology = _describe_tpu(target) if target.chip.kind == "tpu" else _describe_gpu(target)
    if len(topology.devices) != target.num_chips:
        raise RuntimeError(
            f"{target.name} has {target.num_chips} chips, but the compiler describes "
            f"{len(topology.devices)}"
        )
    return topology


def _describe_tpu(target: targets.Target) -> topologies.TopologyDescription:
    if importlib.util.find_spec("libtpu") is None:
        raise errors.UsageError(
            f"topology {target.name!r} needs the TPU compiler, which is not installed; "
            "run `pip install .[preflight]` (no TPU is needed)"
        )
    # The library reads these variables when it is loaded. They keep it from asking the metadata
    # server where it runs, from warning, and from refusing to share this host.
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(variable, value)
    schedules.request_listings()
    options: dict[str, Any] = {}
    if target.num_chips == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]  # By default a host has 2x2 chips.
    if target.chip.generation == "v4":
        options["chip_config_name"] = "megacore"  # One device per chip, as on Cloud TPU.
    return topologies.get_topology_desc(platform="tpu", topology_name=target.name, **options)


def _describe_gpu(target: targets.Target) -> topologies.TopologyDescription:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        raise errors.UsageError(
            f"topology {target.name!r} needs the CUDA compiler, which is not installed; "
            "run `pip install .[preflight]` (no GPU is needed)"
        )
    hosts, gpus = target.shape
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=chips.gpu_target_config(target.chip),
        topology=f"1x{hosts}x{gpus}",
    )


def make_mesh(target: targets.Target, data: int, model: int) -> jax.sharding.Mesh:
    """A ("data", "model") mesh of the chips of a target, which keeps neighbours in the torus close.

    An axis of size -1 gets all chips that the other axis leaves.
    """
    shape = partitioning.mesh_shape(data, model, target.num_chips)
    devices = _devices(target)
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.Mesh(grid, ("data", "model"), axis_types=auto)


@functools.cache
def _devices(target: targets.Target) -> list[jax.Device]:
    """The devices of a target, described only once because two descriptions cannot be mixed."""
    return list(describe_topology(target).devices)

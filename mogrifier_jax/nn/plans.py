"""Chooses how the recurrence and the softmax run on CPU, GPU and TPU, given dtype and sizes.

The equations are in `recurrence.py` and `softmax.py`, which name no platform. All plans compute the
same numbers, with one exception: for float32 at JAX's default precision, a TPU rounds the operands
of matmuls to bfloat16 anyway, so its plan stores them in bfloat16. Every other platform has to be
kept from that plan.

Each field of a plan names the number that justifies it; docs/performance_notes.md has the tables.
Numbers of TPUs are XLA's estimates for a v5e, at the time when the field was introduced, unless
they are by the schedule. To remove a field, delete it here and where `plan.<field>` is read.

Which platform a program will run on is not known from tracing alone, because `jit` may place it on
any device of the process. `follow` therefore traces one plan if

1. an operand has a `NamedSharding`: its type then names the mesh, the mesh its kind of device, and
   JAX refuses to run the program elsewhere. Training and preflight give all arrays one, and so
   does evaluation on a mesh.
2. a mesh is set by `jax.set_mesh`, which JAX holds the program to as well, or by
   `jax.sharding.use_abstract_mesh`, by which the caller vouches for it.
3. the process has one backend, which is the CPU where there is no accelerator.

Otherwise (an accelerator is present, and the arrays are placed on single devices, be it the
accelerator or the CPU) the plans that differ are all traced, and `lax.platform_dependent` takes the
right one when the program is lowered. A program that is exported for a platform other than those of
the process follows the CPU's plan, which is right everywhere, unless 1 or 2 name the platform. What
they name is believed, so arrays of a TPU's mesh exported for CPUs compute there as on a TPU.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend

MIB = 2**20
BFLOAT16 = np.dtype(jnp.bfloat16)

AnyPlan = TypeVar("AnyPlan")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one window of a layer is computed; the defaults are right for any platform."""

    # CPUs: each step projects its own input and stores one sum of both projections. Projecting all
    # inputs at once writes [T, B, 4H] once and reads it twice: 438 ms instead of 402 for the
    # gradient of a layer of H 512. On a v5e the sum would cost: 10.00 ms instead of 7.91.
    project_inputs_in_step: bool = False
    # CPUs: the backward loop writes gradients over what it has read. Otherwise it fills memory with
    # zeros first, and asks the system for new pages at every call: 73 ms instead of 104 for the
    # gradient of a GRU of H 128 (B 64, T 128), and 92 instead of 114 for an LSTM.
    overwrite_outputs: bool = False
    # CPUs: time and batch become one axis in the matmuls of weight gradients. Over two axes XLA
    # transposes an operand first: 134 ms instead of 309 for a matrix [128, 3 * 128] of B 1024.
    flatten_rows: bool = False
    # TPUs: rows to make of each row of the batch. Matrix units are not used for a single row, and
    # take as long for eight as for one. By the schedule, the loops of a layer of the size of enwik8
    # take 12.1 to 19.2 ms with it and 38.7 to 40.1 without.
    rows_from_one: int = 1
    # TPUs: the dtype in which operands of matmuls are stored; None is the dtype of the matmuls. The
    # loops of a layer of H 1024 (B 64, T 128, r = 5) need 0.64 GiB with them and 0.98 without. By
    # the schedule they take 3.60 to 6.83 ms and 3.70 to 10.16.
    operands_forward: np.dtype | None = None
    operands_backward: np.dtype | None = None
    # TPUs: fill the last axis of the matrices of large maps up to a multiple of this before the
    # forward loop. By the schedule, the gates' matmul of enwik8 (H 1687, 32 rows) takes 13,046
    # cycles instead of 25,668, although XLA's own estimate of it rises.
    output_alignment: int = 1
    # TPUs: store the parts of the carry as one array, which is too large for the fast memory and
    # leaves it to the weights. By the schedule, the loops of a layer of the size of enwik8 take
    # 16.3 to 33.4 ms with it and 18.6 to 134.9 without.
    stack_carries: bool = False
    # TPUs: compute the outputs of thin maps in each step of the backward loop, not for all steps
    # before it. By the schedule, the loops of a layer of H 1024 take 3.60 to 6.83 ms with it and
    # 3.92 to 10.89 without.
    recompute_thin_outputs: bool = False
    # TPUs: run the backward loop in chunks of at most this many steps, which fit into the fast
    # memory. By the schedule, the loops of a layer of H 1024 take 3.60 to 6.83 ms with them and
    # 3.55 to 15.32 without, and those of Penn Treebank, with the field above, 1.78 to 3.16 instead
    # of 1.81 to 4.73. Small and large windows lose: 0.36 to 0.42 ms instead of 0.29 to 0.42 for
    # H 256, and 16.9 to 51.1 instead of 16.3 to 33.4 for a layer of the size of enwik8.
    backward_chunk: int | None = None
    # GPUs: multiply the thin factors of a map before the loop if their product has at most this
    # many bytes. Two factors take five kernels in each step of PTB, their product one.
    factor_product_bytes: int = 0
    # GPUs: fill the inner axis of such a product up to a multiple of this. Otherwise XLA would add
    # the zeros in every step.
    product_alignment: int = 1
    # GPUs: fill the inner axis of all other matrices up to a multiple of this. XLA cuts it into
    # equal parts, and otherwise copies the matrix at every step: enwik8 took 589 ms, now 364, and
    # its LSTM 256, now 134.
    inner_alignment: int = 1
    # GPUs: a step writes all its results as one array, because each write is a kernel that takes
    # longer to start than to run. An LSTM, which writes two, would lose: 6.01 ms instead of 5.96.
    pack_results: bool = False


@dataclasses.dataclass(frozen=True)
class SoftmaxPlan:
    """How nats are computed from the outputs of a stack, and how they are differentiated."""

    # CPUs: the most logits at a time, and whether time and batch become one axis. 4 million logits
    # have 16 MB, which a cache holds: 152 ms instead of 303 for 2,240 tokens and 10,001 words.
    logits_at_once: float = math.inf
    flatten: bool = False
    # TPUs: the dtype of the logits' gradient in its matmuls.
    operands_backward: np.dtype | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the plan of a window depends on beside the platform."""

    dtype: np.dtype  # Of the matmuls.
    steps: int
    rows: int  # Of the batch on all devices.
    large_outputs: int  # Features of the outputs of all maps with one matrix, together.
    num_maps: int
    maps_read_inputs: bool  # Whether there are maps of x, and not only of h.
    projects_inputs: bool  # Whether x is projected before the step.
    carry_parts_alike: bool  # Whether the carry has several parts, of the same shape and dtype.
    resets: bool  # Whether the carry may be reset within the window.
    one_device: bool  # Whether no mesh of several devices holds the operands.


def make_plan(platform: str, sizes: Sizes) -> Plan:
    """The plan of a window on a platform, by the name it has in `lax.platform_dependent`."""
    if platform == "cpu":
        plan = Plan(project_inputs_in_step=sizes.projects_inputs)
        if not sizes.resets:  # The last digits of recorded runs depend on how a CPU sums.
            return plan
        # An axis that several devices share cannot be joined to another without moving it.
        return dataclasses.replace(plan, overwrite_outputs=True, flatten_rows=sizes.one_device)
    if platform == "cuda":
        plan = Plan(inner_alignment=8)
        if not sizes.maps_read_inputs:
            return plan
        return dataclasses.replace(
            plan, factor_product_bytes=16 * MIB, product_alignment=128, pack_results=True
        )
    if platform == "tpu":
        return _make_tpu_plan(sizes)
    return Plan()


def _make_tpu_plan(sizes: Sizes) -> Plan:
    devices = devices_of_batch()
    rows_from_one = 8 if sizes.rows == devices else 1
    # A filled axis that several devices share would be moved between them at every step.
    whole = jax.sharding.get_abstract_mesh().shape.get("model", 1) == 1
    aligned = 128 if sizes.maps_read_inputs and whole else 1
    plan = Plan(rows_from_one=rows_from_one, output_alignment=aligned)
    if not (tpus_round(sizes.dtype) or sizes.dtype == BFLOAT16):
        return plan
    plan = dataclasses.replace(plan, operands_forward=BFLOAT16)
    rows = sizes.rows * rows_from_one
    if not isinstance(sizes.steps * rows, int):  # Symbolic, in a program to be exported.
        return plan
    if sizes.maps_read_inputs or sizes.num_maps > 1:  # A single map of h gained nothing from it.
        plan = dataclasses.replace(plan, operands_backward=BFLOAT16)
    if not sizes.maps_read_inputs:
        return plan
    # How many numbers a device stores of the outputs of large maps for the backward pass. By the
    # schedule, the same limits serve float32 and bfloat16.
    stored = sizes.steps * rows * sizes.large_outputs // devices
    large, larger = stored > 2**22, stored > 2**25
    return dataclasses.replace(
        plan,
        recompute_thin_outputs=large,
        stack_carries=larger and sizes.carry_parts_alike,
        backward_chunk=16 if large and not larger else None,
    )


def make_softmax_plan(platform: str, dtype: np.dtype) -> SoftmaxPlan:
    """The plan of a softmax whose matmuls have this dtype."""
    if platform == "cpu":
        return SoftmaxPlan(logits_at_once=1 << 22, flatten=True)
    if platform == "tpu":
        return SoftmaxPlan(operands_backward=BFLOAT16 if tpus_round(dtype) else None)
    return SoftmaxPlan()


def tpus_round(dtype: np.dtype) -> bool:
    """Whether a TPU rounds the operands of a matmul: float32 at JAX's default precision."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return dtype == np.float32 and precision in (None, "default", "fastest", "bfloat16")


def devices_of_batch() -> int:
    """How many devices share the batch; 1 if no mesh is set."""
    return jax.sharding.get_abstract_mesh().shape.get("data", 1)


def follow(make: Callable[[str], AnyPlan], compute: Callable[..., Any], *operands: Any) -> Any:
    """Returns `compute(plan, *operands)` by the plan of the platform that it will run on.

    Args:
      make: the plan of a platform.
      operands: trees of arrays, whose shardings may tell the platform (see above).
    """
    plans = {platform: make(platform) for platform in platforms(operands)}
    default = plans.get("cpu", next(iter(plans.values())))
    others = {
        platform: functools.partial(compute, plan)
        for platform, plan in plans.items()
        if plan != default
    }
    compute_default = functools.partial(compute, default)
    if not others:
        return compute_default(*operands)
    return jax.lax.platform_dependent(*operands, **others, default=compute_default)


def platforms(operands: Any) -> tuple[str, ...]:
    """The platforms that a program with these operands may run on; one if it is known."""
    devices = {mesh.abstract_device for mesh in _meshes(operands)} - {None}
    present = tuple(backend.backends())
    named = {_lowering_name(device.platform, present) for device in devices}
    return tuple(sorted(named)) or present


def on_one_device(operands: Any) -> bool:
    """Whether no mesh of several devices is known to hold operands."""
    return all(mesh.empty or mesh.size == 1 for mesh in _meshes(operands))


def _meshes(operands: Any) -> list[jax.sharding.AbstractMesh]:
    """The meshes that the types of operands name, and the one that is set."""
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands)]
    return [*meshes, jax.sharding.get_abstract_mesh()]


def _lowering_name(platform: str, present: tuple[str, ...]) -> str:
    """The name that `lax.platform_dependent` has for the platform of a device."""
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in present else "cuda"


@contextlib.contextmanager
def of_no_platform() -> Iterator[None]:
    """Within, operands without a sharding get the default plan, which adds no work of its own."""
    with jax.sharding.use_abstract_mesh(abstract_mesh("none")):
        yield


def abstract_mesh(platform: str, devices: int = 1) -> jax.sharding.AbstractMesh:
    """A mesh of devices of a platform that need not be here; they share the batch."""
    return jax.sharding.AbstractMesh(
        (devices, 1),
        ("data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        abstract_device=jax.sharding.AbstractDevice(
            device_kind=platform, num_cores=None, platform=platform
        ),
    )

"""What a compiled program will cost: cycles, collectives, memory, seconds.

`analyse` walks the call graph of the optimised program, which `hlo.py` reads. An instruction counts
once for each turn of the loops around it. A conditional costs as much as its dearest branch. A
fusion has an estimate of its own. The TPU compiler writes `estimated_cycles` beside the
instructions that its cores compute. Collectives and asynchronous copies have no such estimate, so
they are listed with their bytes. GPU compilers estimate nothing. For GPUs, time is the roofline of
each kernel, from the counts of `hlo.py`. `count_flops` reads a traced function, without a compiler.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend

from mogrifier_jax.preflight import hlo, targets

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_COPIES = frozenset({"copy", "copy-done", "slice-done", "dynamic-slice-done"})
_GROUPS = re.compile(r"replica_groups=(\{\{[\d,]*\}|\[[\d,]+\]|mesh\[[^\]]*\] \{[^}]*\})")
_AXES = re.compile(r"'([^']*)'=(\d+)")


@dataclasses.dataclass(frozen=True)
class Cost:
    """One instruction and all its executions in one run of the program."""

    name: str
    opcode: str
    op_name: str
    executions: int
    cycles_each: int | None  # None where the compiler made no estimate.
    bytes_each: int  # The size of the result.
    traffic_each: int  # Bytes read and written.
    flops_each: int  # FLOPs of matmuls; counted in GPU programs only.
    single: bool  # Whether those matmuls have float32 operands.

    @property
    def cycles(self) -> int:
        """The cycles of all executions together; 0 without an estimate."""
        return self.executions * (self.cycles_each or 0)


@dataclasses.dataclass(frozen=True)
class LoopCost:
    """A loop and all its turns in one run of the program."""

    name: str
    op_name: str
    trips: int | None  # Turns each time it is entered; None: unknown, counted as one.
    entries: int
    cycles: int  # Of all entries together.


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective and all its executions; `bytes_each` is the whole array, not a shard."""

    name: str
    kind: str
    op_name: str
    executions: int
    bytes_each: int
    group_size: int

    @property
    def bytes(self) -> int:
        """The bytes of all executions together."""
        return self.executions * self.bytes_each

    @property
    def wire_bytes(self) -> int:
        """The bytes that each chip sends in all executions if the group forms a ring."""
        if self.kind == "collective-permute":
            return self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.group_size - 1) // self.group_size


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Costs of one run of a program on each chip."""

    costs: tuple[Cost, ...]
    loops: tuple[LoopCost, ...]
    collectives: tuple[Collective, ...]

    @property
    def cycles(self) -> int:
        """The sum of the compiler's estimates, which leave out collectives and plain copies."""
        return sum(cost.cycles for cost in self.costs)

    @property
    def copied_bytes(self) -> int:
        """Bytes written by copies without an estimate; most run beside the computation."""
        unestimated = (c for c in self.costs if c.opcode in _COPIES and c.cycles_each is None)
        return sum(c.executions * c.bytes_each for c in unestimated)

    @property
    def unknown_loops(self) -> tuple[LoopCost, ...]:
        """Loops whose number of turns depends on data, so that their cost is a lower bound."""
        return tuple(loop for loop in self.loops if loop.trips is None)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """The executions and bytes of each kind of collective."""
        sums: dict[str, tuple[int, int]] = {}
        for one in self.collectives:
            count, size = sums.get(one.kind, (0, 0))
            sums[one.kind] = count + one.executions, size + one.bytes
        return sums


def analyse(text: str) -> Analysis:
    """The costs of a program, given its text from `compiled.as_text()`."""
    program = hlo.parse(text)
    walk = _Walk(program)
    walk.computation(program.entry, [], 1)
    return Analysis(tuple(walk.costs), tuple(walk.loops), tuple(walk.collectives))


class _Walk:
    """Collects costs along the call graph."""

    def __init__(self, program: hlo.Module):
        self.program = program
        self.costs: list[Cost] = []
        self.loops: list[LoopCost] = []
        self.collectives: list[Collective] = []

    def computation(self, computation: hlo.Computation, arguments: list, executions: int) -> None:
        """Adds the costs of one computation that runs `executions` times."""
        evaluate = hlo.Evaluator(self.program, computation, arguments)
        for i in computation.instructions.values():
            if i.opcode == "while":
                self._loop(i, evaluate(i.operands[0]), executions)
            elif i.opcode == "conditional":
                self._conditional(i, executions)
            elif i.opcode in ("call", "async-start"):
                inner = self.program.callee(i)
                self.computation(inner, [evaluate(o) for o in i.operands], executions)
            else:
                self._add(computation, i, executions)
                if i.opcode == "fusion":  # Its own estimate covers everything else in it.
                    inside = self._apart(self.program.callee(i), executions)
                    self.collectives += inside.collectives
                if i.opcode.removesuffix("-start") in COLLECTIVES:
                    self.collectives.append(_collective(computation, i, executions))

    def _add(self, computation: hlo.Computation, i: hlo.Instruction, times: int) -> None:
        moved = hlo.traffic(self.program, computation, i)
        if i.cycles is not None or moved:
            dots = hlo.dots(self.program, computation, i)
            count, single = sum(dot.flops for dot in dots), any(dot.single for dot in dots)
            row = (i.name, i.opcode, i.op_name, times, i.cycles, i.bytes, moved, count, single)
            self.costs.append(Cost(*row))

    def _apart(self, computation: hlo.Computation, executions: int) -> "_Walk":
        """The costs of a computation by itself."""
        walk = _Walk(self.program)
        walk.computation(computation, [], executions)
        return walk

    def _loop(self, i: hlo.Instruction, init: hlo.Value, executions: int) -> None:
        trips = hlo.trip_count(self.program, i, init)
        inside = executions * (1 if trips is None else trips)
        body = self.program.computations[i.called["body"]]
        condition = self.program.computations[i.called["condition"]]
        constant = hlo.invariants(body, init)
        before, place = len(self.costs), len(self.loops)
        if inside:
            self.computation(body, [constant], inside)
            if not hlo.counted(i):
                self.computation(condition, [constant], inside)
        cycles = sum(cost.cycles for cost in self.costs[before:])
        # An outer loop is listed before the loops inside it.
        self.loops.insert(place, LoopCost(i.name, i.op_name, trips, executions, cycles))

    def _conditional(self, i: hlo.Instruction, executions: int) -> None:
        computations = [self.program.computations[name] for name in i.called.values()]
        branches = [self._apart(branch, executions) for branch in computations]
        dearest = max(branches, key=lambda branch: sum(cost.cycles for cost in branch.costs))
        self.costs += dearest.costs
        self.loops += dearest.loops
        self.collectives += dearest.collectives


def _collective(computation: hlo.Computation, i: hlo.Instruction, executions: int) -> Collective:
    kind = i.opcode.removesuffix("-start")
    size = sum(computation.instructions[o].bytes for o in i.operands)
    group = 2 if kind == "collective-permute" else _group_size(i.attributes)
    if kind == "all-gather":
        size *= group
    return Collective(i.name, kind, i.op_name, executions, size, group)


def _group_size(attributes: str) -> int:
    """The number of chips in a replica group; XLA writes groups in three ways."""
    found = _GROUPS.search(attributes)
    if not found:
        return 1
    groups = found[1]
    if groups.startswith("{{"):
        return groups.count(",") + 1
    if groups.startswith("["):
        return int(groups.strip("[]").split(",")[-1])
    sizes = dict(_AXES.findall(groups))
    used = re.findall(r"'([^']*)'", groups[groups.index("]") :])
    return math.prod(int(sizes[axis]) for axis in used)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each chip, by kind."""

    arguments: int
    outputs: int
    aliased: int  # Outputs that reuse the room of donated arguments.
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """The bytes that must fit into memory beside the code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def memory(compiled: jax.stages.Compiled) -> Memory:
    """The memory of a program, as its compiler reports it."""
    stats: Any = compiled.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    return Memory(*(getattr(stats, f"{kind}_size_in_bytes") for kind in kinds))


def compute_seconds(analysis: Analysis, chip: targets.Chip) -> float:
    """Time without collectives: the TPU compiler's cycles, or the sum of the kernels' rooflines."""
    if chip.kind == "tpu":
        # Copies run beside the computation. If there are very many, it waits for them.
        return max(analysis.cycles / chip.clock, analysis.copied_bytes / chip.memory_bandwidth)
    return sum(cost.executions * _roofline(cost, chip) for cost in analysis.costs)


def _roofline(cost: Cost, chip: targets.Chip) -> float:
    """The time of arithmetic or of memory, whichever is longer, plus the start of the kernel."""
    peak = chip.peak_flops / 2 if cost.single else chip.peak_flops  # TF32 runs at half the rate.
    return chip.launch + max(cost.flops_each / peak, cost.traffic_each / chip.memory_bandwidth)


def collective_seconds(analysis: Analysis, target: targets.Target) -> float:
    """The time of all collectives as rings, one after the other; an upper bound if some overlap."""
    total = 0.0
    for one in analysis.collectives:
        bandwidth, hops = targets.ring(target, one.group_size)
        hops *= 2 if one.kind == "all-reduce" else 1
        total += one.wire_bytes / bandwidth + one.executions * hops * target.chip.link_latency
    return total


_EXHAUSTED = re.compile(
    r"(?:required for HLO temporaries \(|Used )([\d.]+)([KMGT]?)\)?(?: exceeds| of)"
)


def exhausted(message: str) -> int | None:
    """The bytes that a program needs, from the compiler's refusal; 0: unknown.

    It is None if the message is not about memory.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    found = _EXHAUSTED.search(message)
    return round(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0


def count_flops(jaxpr: jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr) -> int:
    """Matmul and convolution FLOPs of a traced function, loops and recomputation included.

    The count is exact and the same on every backend. Compiled programs would give different
    counts, because compilers rewrite matmuls.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [count_flops(sub) for sub in _subjaxprs(params)]
        if name == "dot_general":
            total += _dot_general(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        elif name == "scan":
            total += params["length"] * sum(inner)
        elif name == "shard_map":
            total += params["mesh"].size * sum(inner)  # The body is the work of one shard.
        elif name == "cond" and params.get("branches_platforms"):
            total += min(inner)  # Each platform has a branch; the least work gives the result.
        elif name == "cond":
            total += max(inner)
        elif name == "while" and any(inner):
            raise ValueError("a while loop with matmuls has no static FLOP count; use lax.scan")
        else:
            total += sum(inner)
    return total


def _subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Every jaxpr among the parameters of an equation."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                yield item


def _dot_general(equation: Any) -> int:
    """Two FLOPs for each product: every output element sums over the contracted axes."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
    """Two FLOPs for each product: the output size times the window and its input features."""
    numbers = equation.params["dimension_numbers"]
    kernel, out = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
    return 2 * math.prod(out) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]

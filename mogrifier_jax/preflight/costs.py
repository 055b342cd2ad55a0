"""The costs of a compiled program, added up along its call graph.

An instruction counts once for each iteration of the loops around it, and a conditional costs as
much as its most expensive branch. A fusion has its own estimate, which covers everything inside it.
The TPU compiler writes `estimated_cycles` next to the instructions that its cores
execute, but not next to collectives and asynchronous copies, so these are listed with their bytes.
GPU compilers estimate nothing, which is why the FLOPs and the memory traffic of every instruction
are counted as well. `times.py` turns all of this into seconds.
"""

import collections
import dataclasses
import math
import re

from mogrifier_jax.preflight import hlo, instruction_costs, trip_counts

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
    """An instruction, and how often it is executed in one run of the program."""

    name: str
    opcode: str
    op_name: str
    executions: int
    cycles_each: int | None  # None if the compiler gives no estimate.
    bytes_each: int  # The size of the result.
    traffic_each: int  # Bytes read and written.
    flops_each: int  # FLOPs of its matmuls, where they are dots or library calls, as on GPUs.
    single: bool  # Whether one of those matmuls has float32 operands.

    @property
    def cycles(self) -> int:
        """The cycles of all executions together; 0 if there is no estimate."""
        return self.executions * (self.cycles_each or 0)


@dataclasses.dataclass(frozen=True)
class LoopCost:
    """A loop, and how often it runs in one run of the program."""

    name: str
    op_name: str
    trips: int | None  # Iterations each time it is entered; None is unknown, and counts as one.
    entries: int
    cycles: int  # Of all entries together.


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective and its executions; `bytes_each` is the size of the whole array, not a shard."""

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
        """The bytes that each chip sends in all executions together if the group forms a ring."""
        if self.kind == "collective-permute":
            return self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.group_size - 1) // self.group_size


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The costs of one run of a program, on each chip."""

    costs: tuple[Cost, ...]
    loops: tuple[LoopCost, ...]
    collectives: tuple[Collective, ...]
    executions: dict[str, int]  # Of every instruction that is executed, also of those without cost.

    @property
    def cycles(self) -> int:
        """The sum of the compiler's estimates, which do not cover collectives and plain copies."""
        return sum(cost.cycles for cost in self.costs)

    @property
    def copied_bytes(self) -> int:
        """Bytes written by copies without an estimate, most of which overlap with computation."""
        unestimated = (c for c in self.costs if c.opcode in _COPIES and c.cycles_each is None)
        return sum(c.executions * c.bytes_each for c in unestimated)

    @property
    def unknown_loops(self) -> tuple[LoopCost, ...]:
        """Loops whose trip count depends on data, so that their cost is only a lower bound."""
        return tuple(loop for loop in self.loops if loop.trips is None)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """The number of executions and the bytes of each kind of collective."""
        sums: dict[str, tuple[int, int]] = {}
        for one in self.collectives:
            count, size = sums.get(one.kind, (0, 0))
            sums[one.kind] = count + one.executions, size + one.bytes
        return sums


def analyse(text: str) -> Analysis:
    """The costs of a program, given the text that `compiled.as_text()` returns."""
    program = hlo.parse(text)
    walk = _Walk(program)
    walk.computation(program.entry, [], 1)
    return Analysis(
        tuple(walk.costs), tuple(walk.loops), tuple(walk.collectives), dict(walk.executions)
    )


class _Walk:
    """Collects costs along the call graph."""

    def __init__(self, program: hlo.Module):
        self.program = program
        self.costs: list[Cost] = []
        self.loops: list[LoopCost] = []
        self.collectives: list[Collective] = []
        self.executions: collections.Counter[str] = collections.Counter()

    def computation(
        self, computation: hlo.Computation, arguments: list[trip_counts.Value], executions: int
    ) -> None:
        """Adds the costs of a computation that is executed `executions` times."""
        evaluate = trip_counts.Evaluator(self.program, computation, arguments)
        for i in computation.instructions.values():
            self.executions[i.name] += executions
            if i.opcode == "while":
                self._loop(i, evaluate(i.operands[0]), executions)
            elif i.opcode == "conditional":
                self._conditional(i, executions)
            elif i.opcode in ("call", "async-start"):
                inner = self.program.callee(i)
                self.computation(inner, [evaluate(o) for o in i.operands], executions)
            else:
                self._add(computation, i, executions)
                if i.opcode == "fusion":  # Its own estimate covers all but the collectives in it.
                    inside = self._apart(self.program.callee(i), executions)
                    self.collectives += inside.collectives
                if i.opcode.removesuffix("-start") in COLLECTIVES:
                    self.collectives.append(_collective(computation, i, executions))

    def _add(self, computation: hlo.Computation, i: hlo.Instruction, times: int) -> None:
        moved = instruction_costs.traffic(self.program, computation, i)
        if i.cycles is not None or moved:
            dots = instruction_costs.dots(self.program, computation, i)
            count, single = sum(dot.flops for dot in dots), any(dot.single for dot in dots)
            self.costs.append(
                Cost(i.name, i.opcode, i.op_name, times, i.cycles, i.bytes, moved, count, single)
            )

    def _apart(self, computation: hlo.Computation, executions: int) -> "_Walk":
        """The costs of a computation, without adding them to this walk."""
        walk = _Walk(self.program)
        walk.computation(computation, [], executions)
        return walk

    def _loop(self, i: hlo.Instruction, init: trip_counts.Value, executions: int) -> None:
        trips = trip_counts.trip_count(self.program, i, init)
        inside = executions * (1 if trips is None else trips)
        body = self.program.computations[i.called["body"]]
        condition = self.program.computations[i.called["condition"]]
        constant = trip_counts.loop_invariants(body, init)
        first_cost, index = len(self.costs), len(self.loops)
        if inside:
            self.computation(body, [constant], inside)
            if not trip_counts.is_annotated(i):
                self.computation(condition, [constant], inside)
        cycles = sum(cost.cycles for cost in self.costs[first_cost:])
        # An outer loop is listed before the loops inside it.
        self.loops.insert(index, LoopCost(i.name, i.op_name, trips, executions, cycles))

    def _conditional(self, i: hlo.Instruction, executions: int) -> None:
        computations = [self.program.computations[name] for name in i.called.values()]
        branches = [self._apart(branch, executions) for branch in computations]
        most_expensive = max(branches, key=lambda branch: sum(cost.cycles for cost in branch.costs))
        self.costs += most_expensive.costs
        self.loops += most_expensive.loops
        self.collectives += most_expensive.collectives
        self.executions += most_expensive.executions


def _collective(computation: hlo.Computation, i: hlo.Instruction, executions: int) -> Collective:
    kind = i.opcode.removesuffix("-start")
    size = sum(computation.instructions[o].bytes for o in i.operands)
    group = 2 if kind == "collective-permute" else _group_size(i.attributes)
    if kind == "all-gather":
        size *= group
    return Collective(i.name, kind, i.op_name, executions, size, group)


def _group_size(attributes: str) -> int:
    """The number of chips in a replica group, which XLA writes in one of three formats."""
    match = _GROUPS.search(attributes)
    if not match:
        return 1
    groups = match[1]
    if groups.startswith("{{"):
        return groups.count(",") + 1
    if groups.startswith("["):
        return int(groups.strip("[]").split(",")[-1])
    sizes = dict(_AXES.findall(groups))
    used = re.findall(r"'([^']*)'", groups[groups.index("]") :])
    return math.prod(int(sizes[axis]) for axis in used)

"""Reads the text of a compiled program: computations, shapes, loop trip counts.

`parse` turns the optimised HLO text of any backend into instructions, grouped by computation.
`trip_count` finds how often a loop runs: it computes the few integers that the loop's condition
reads. `dots` and `traffic` count the matmul FLOPs and the bytes of one instruction. `costs.py` adds
up costs along the call graph.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-~]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-~]+) = ")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-~]+)")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-~]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

_CONTRACTED = re.compile(r'(?:lhs_contracting_dims=\{|"lhs_contracting_dimensions":\[)([\d,"]*)')
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all iota while conditional call "
    "partition-id replica-id opt-barrier".split()
)
_VIEWS = frozenset({"bitcast", "reshape", "convert", "transpose", "copy"})
# An asynchronous copy has a start and a done. It is counted at the done, which has its shape.
_COPIED = frozenset({"copy-done", "slice-done", "dynamic-slice-done"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})

# A loop that has not ended after so many turns counts as one of unknown length.
MAX_TRIPS = 1_000_000

_PASS_THROUGH = frozenset({"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"})
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
}
_COMPARE: dict[str, Callable[[int, int], int]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}

# What is known of a value: an integer, a tuple of values, or None for nothing.
Value = int | tuple | None


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `attributes` is everything after the operands."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @functools.cached_property
    def cycles(self) -> int | None:
        """XLA's estimate for one execution; None if there is none, as on all GPUs."""
        return int(found) if (found := self._find(_CYCLES)) else None

    @functools.cached_property
    def op_name(self) -> str:
        """The path of the jax operation that this instruction comes from."""
        return self._find(_OP_NAME)

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """The computations that this instruction calls, by role."""
        roles = dict(_CALLED.findall(self.attributes))
        if found := _BRANCHES.search(self.attributes):
            names = _NAME.findall(found[1])
            roles |= {f"branch_{i}": name for i, name in enumerate(names)}
        return roles

    @property
    def bytes(self) -> int:
        """The size of the result; that of a tuple is the sum of its elements."""
        return sum(array.bytes for array in arrays(self.shape))

    def attribute(self, name: str) -> str:
        """The value of a plain attribute, such as `index` or `direction`; empty if absent."""
        return self._find(rf"\b{name}=([\w\-]+)")

    def _find(self, pattern: str | re.Pattern) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in program order, by name."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.literal): i for i in found}


@dataclasses.dataclass(frozen=True)
class Module:
    """All computations of a program."""

    computations: dict[str, Computation]
    entry: Computation

    def callee(self, i: Instruction) -> Computation:
        """The computation that a fusion or a call runs."""
        return self.computations[i.called.get("calls") or i.called["to_apply"]]


@dataclasses.dataclass(frozen=True)
class Array:
    """Element type and dimensions of one array in a shape."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size without padding."""
        return math.ceil(self.size * _bits(self.dtype) / 8)


def _bits(dtype: str) -> int:
    """The bits of an element type; tokens and opaque values have none."""
    if dtype == "pred":
        return 8
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


def arrays(shape: str) -> list[Array]:
    """All arrays in a shape; those of nested tuples, too."""
    return [
        Array(dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(_LAYOUT.sub("", shape))
    ]


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry = None
    name, rows, root = "", {}, None
    for line in text.splitlines():
        if line.startswith("}") and root is not None:
            computations[name] = Computation(name, rows, root)
            rows, root = {}, None
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(found[2], line[found.end() :])
            rows[instruction.name] = instruction
            root = instruction if found[1] else root
        elif found := _HEADER.match(line):
            name, rows, root = found[2], {}, None
            entry = name if found[1] else entry
    if entry is None:
        raise ValueError("the text holds no ENTRY computation: it is not a whole HLO module")
    return Module(computations, computations[entry])


def _instruction(name: str, rest: str) -> Instruction:
    """Splits `shape opcode(operands), attributes`."""
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    found = _OPCODE.match(rest)
    if not found:
        raise ValueError(f"cannot read the instruction {name!r}: {rest[:80]!r}")
    rest = rest[found.end() - 1 :]
    end = _closing(rest)
    inside = rest[1:end]
    return Instruction(name, found[1], shape, tuple(_NAME.findall(inside)), inside, rest[end + 1 :])


def _closing(text: str) -> int:
    """The place of the bracket that closes the first one of `text`."""
    depth = 0
    for found in re.finditer(r'[()]|"(?:[^"\\]|\\.)*"', text):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise ValueError(f"unbalanced brackets: {text[:80]!r}")


class Evaluator:
    """Computes the integers of one computation from what is known of its parameters."""

    def __init__(self, program: Module, computation: Computation, arguments: Sequence[Value]):
        self.program = program
        self.computation = computation
        self.arguments = arguments
        self._known: dict[str, Value] = {}

    def __call__(self, name: str) -> Value:
        """The value of an instruction, or None if it depends on more than integers."""
        if name not in self._known:
            self._known[name] = self._evaluate(self.computation.instructions[name])
        return self._known[name]

    def _evaluate(self, i: Instruction) -> Value:
        if i.opcode == "constant":
            return _literal(i.literal)
        if i.opcode == "parameter":
            number = int(i.literal)
            return self.arguments[number] if number < len(self.arguments) else None
        if i.opcode == "tuple":
            return tuple(self(o) for o in i.operands)
        if i.opcode == "get-tuple-element":
            value, index = self(i.operands[0]), int(i.attribute("index"))
            return value[index] if isinstance(value, tuple) else None
        if i.opcode in _PASS_THROUGH:
            return self(i.operands[0])
        if i.opcode in ("fusion", "call"):
            inner = self.program.callee(i)
            values = [self(o) for o in i.operands]
            return Evaluator(self.program, inner, values)(inner.root.name)
        if i.opcode == "while":
            body = self.program.computations[i.called["body"]]
            return invariants(body, self(i.operands[0]))
        if i.opcode == "not":
            value = self(i.operands[0])
            return int(not value) if isinstance(value, int) else None
        known = _ARITHMETIC.get(i.opcode)
        if i.opcode == "compare":
            known = _COMPARE[i.attribute("direction")]
        if known is None:
            return None
        left, right = (self(o) for o in i.operands)
        if not isinstance(left, int) or not isinstance(right, int):
            return None
        return int(known(left, right))


def _literal(text: str) -> Value:
    """The integer of a scalar constant."""
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def invariants(body: Computation, init: Value) -> Value:
    """The initial tuple of a loop, with None for each value that its body may change."""
    if not isinstance(init, tuple) or body.root.opcode != "tuple":
        return None
    kept = []
    for index, name in enumerate(body.root.operands):
        origin = body.instructions[name]
        while origin.opcode in _PASS_THROUGH:
            origin = body.instructions[origin.operands[0]]
        same = (
            origin.opcode == "get-tuple-element"
            and int(origin.attribute("index")) == index
            and body.instructions[origin.operands[0]].opcode == "parameter"
        )
        kept.append(init[index] if same else None)
    return tuple(kept)


def counted(loop: Instruction) -> bool:
    """Whether the text of a loop has its number of turns.

    On a GPU the host counts the turns of such a loop, and its condition never runs.
    """
    return _TRIPS.search(loop.attributes) is not None


def trip_count(program: Module, loop: Instruction, init: Value) -> int | None:
    """How often a `while` that starts with `init` runs its body; None if it depends on data."""
    if found := _TRIPS.search(loop.attributes):
        return int(found[1])
    condition = program.computations[loop.called["condition"]]
    body = program.computations[loop.called["body"]]
    state = init
    for trips in range(MAX_TRIPS):
        go_on = Evaluator(program, condition, [state])(condition.root.name)
        if not isinstance(go_on, int):
            return None
        if not go_on:
            return trips
        state = _advance(program, body, state)
    return None


def _advance(program: Module, body: Computation, state: Value) -> Value:
    """The integers of a loop after one more turn."""
    evaluate = Evaluator(program, body, [state])
    if body.root.opcode != "tuple" or not isinstance(state, tuple):
        return evaluate(body.root.name)
    # Unknown values stay unknown, so they are not computed.
    return tuple(
        None if old is None else evaluate(name)
        for old, name in zip(state, body.root.operands, strict=True)
    )


class Dot(NamedTuple):
    """A matmul in a compiled program; `single` means float32 operands."""

    flops: int
    single: bool


def dots(program: Module, computation: Computation, i: Instruction) -> list[Dot]:
    """The matmuls of one instruction: a dot, a library call, or those of a fusion."""
    if i.opcode == "fusion":
        inner = program.callee(i)
        return [dot for j in inner.instructions.values() for dot in dots(program, inner, j)]
    found = _CONTRACTED.search(i.attributes)
    if i.opcode not in ("dot", "custom-call") or not found:
        return []
    lhs, out = arrays(computation.instructions[i.operands[0]].shape)[0], arrays(i.shape)[0]
    axes = [int(axis) for axis in found[1].replace('"', "").split(",") if axis]
    return [Dot(2 * out.size * math.prod(lhs.dims[a] for a in axes), lhs.dtype == "f32")]


def traffic(program: Module, computation: Computation, i: Instruction) -> int:
    """The bytes that one instruction reads and writes; of a sliced array only the slice counts."""
    if i.opcode in _COPIED:
        return 2 * i.bytes
    if i.opcode in _FREE or i.opcode.endswith(("-start", "-done", "-update")):
        return 0
    if "AllocateBuffer" in i.attributes:
        return 0
    if i.opcode == "fusion":
        inner = program.callee(i)
        return _read(inner) + _written(inner)
    if i.opcode in _SLICES:
        return 2 * i.bytes
    if i.opcode == "dynamic-update-slice":
        return 2 * computation.instructions[i.operands[1]].bytes
    return i.bytes + sum(computation.instructions[o].bytes for o in i.operands)


def _read(fused: Computation) -> int:
    """The bytes that a fusion reads; of a parameter that is only sliced, the slices count."""
    users: dict[str, list[Instruction]] = {}
    for i in fused.instructions.values():
        for operand in i.operands:
            users.setdefault(operand, []).append(i)

    def read(name: str) -> int:
        total = 0
        for user in users.get(name, []):
            if user.opcode in _SLICES and user.operands[0] == name:
                total += user.bytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # Updated in place.
            elif user.opcode in _VIEWS:
                total += read(user.name)
            else:
                total += fused.instructions[name].bytes
        return total

    return sum(min(read(p.name), p.bytes) for p in fused.parameters.values())


def _written(fused: Computation) -> int:
    """The bytes that a fusion writes; of an array updated in place, the update counts."""
    results = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    total = 0
    for name in results:
        i = origin = fused.instructions[name]
        while origin.opcode in _VIEWS:
            origin = fused.instructions[origin.operands[0]]
        updated = origin.opcode == "dynamic-update-slice"
        total += fused.instructions[origin.operands[1]].bytes if updated else i.bytes
    return total

"""Parses the text of a compiled program into instructions, grouped by computation.

The text is the optimised HLO of `compiled.as_text()`, which all backends write in the same syntax.
`trip_counts.py` finds how often its loops run, `instruction_costs.py` what one instruction computes
and moves, and `costs.py` adds that up along the call graph.
"""

import dataclasses
import functools
import math
import re

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-~]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-~]+) = ")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-~]+)")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-~]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


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
        """The compiler's estimate for one execution; None without one, as on all GPUs."""
        cycles = self._find(_CYCLES)
        return int(cycles) if cycles else None

    @functools.cached_property
    def op_name(self) -> str:
        """The path of the JAX operation from which this instruction was compiled."""
        return self._find(_OP_NAME)

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """The computations that this instruction calls, by role."""
        roles = dict(_CALLED.findall(self.attributes))
        if branches := _BRANCHES.search(self.attributes):
            names = _NAME.findall(branches[1])
            roles |= {f"branch_{i}": name for i, name in enumerate(names)}
        return roles

    @property
    def bytes(self) -> int:
        """The size of the result, summed over the elements if it is a tuple."""
        return sum(array.bytes for array in arrays(self.shape))

    def attribute(self, name: str) -> str:
        """The value of an attribute such as `index` or `direction`; "" if it is absent."""
        return self._find(rf"\b{name}=([\w\-]+)")

    def _find(self, pattern: str | re.Pattern) -> str:
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the program: its instructions by name, in program order."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        parameters = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.literal): i for i in parameters}


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program: all its computations, and the one where it starts."""

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
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match[1]) if match else 0


def arrays(shape: str) -> list[Array]:
    """All arrays in a shape, including those of nested tuples."""
    return [
        Array(dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(_LAYOUT.sub("", shape))
    ]


def parse(text: str) -> Module:
    """Parses the text that `compiled.as_text()` returns."""
    computations: dict[str, Computation] = {}
    entry = None
    name, instructions, root = "", dict[str, Instruction](), None
    for line in text.splitlines():
        if line.startswith("}") and root is not None:
            computations[name] = Computation(name, instructions, root)
            instructions, root = {}, None
        elif match := _INSTRUCTION.match(line):
            instruction = _parse_instruction(match[2], line[match.end() :])
            instructions[instruction.name] = instruction
            root = instruction if match[1] else root
        elif match := _HEADER.match(line):
            name, instructions, root = match[2], {}, None
            entry = name if match[1] else entry
    if entry is None:
        raise ValueError("the text has no ENTRY computation, so it is not a whole HLO module")
    return Module(computations, computations[entry])


def _parse_instruction(name: str, rest: str) -> Instruction:
    """Splits `shape opcode(operands), attributes`."""
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = _OPCODE.match(rest)
    if not opcode:
        raise ValueError(f"cannot read the instruction {name!r}: {rest[:80]!r}")
    rest = rest[opcode.end() - 1 :]
    end = _closing(rest)
    inside = rest[1:end]
    operands = tuple(_NAME.findall(inside))
    return Instruction(name, opcode[1], shape, operands, inside, rest[end + 1 :])


def _closing(text: str) -> int:
    """The index of the bracket that closes the first one of `text`."""
    depth = 0
    for match in re.finditer(r'[()]|"(?:[^"\\]|\\.)*"', text):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced brackets: {text[:80]!r}")

"""Counts of matmul FLOPs and of bytes moved, before and after compilation.

`of_jaxpr` walks a traced function: exact, and the same on every backend, as compilers rewrite
matmuls. `dots` and `traffic` read one instruction of an optimised program, for the roofline of
GPU kernels in `costs.py`.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.extend

from mogrifier_jax.preflight import hlo

_CONTRACTED = re.compile(r'(?:lhs_contracting_dims=\{|"lhs_contracting_dimensions":\[)([\d,"]*)')
_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
        *("while", "conditional", "call", "partition-id", "replica-id", "opt-barrier"),
    }
)
_VIEWS = frozenset({"bitcast", "reshape", "convert", "transpose", "copy"})
# Copies in two halves are counted at the second, whose shape is the copy.
_COPIED = frozenset({"copy-done", "slice-done", "dynamic-slice-done"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


def of_jaxpr(jaxpr: jax.extend.core.ClosedJaxpr) -> int:
    """Matmul and convolution FLOPs of a traced function, loops and recomputation included."""
    return _of_jaxpr(jaxpr.jaxpr)


def _of_jaxpr(jaxpr: jax.extend.core.Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [_of_jaxpr(sub) for sub in _subjaxprs(params)]
        if name == "dot_general":
            total += _dot_general(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        elif name == "scan":
            total += params["length"] * sum(inner)
        elif name == "shard_map":
            total += params["mesh"].size * sum(inner)  # The body is one shard's work.
        elif name == "cond" and params.get("branches_platforms"):
            total += min(inner)  # The same result on each platform; the work it needs anywhere.
        elif name == "cond":
            total += max(inner)
        elif name == "while" and any(inner):
            raise ValueError("a while loop with matmuls has no static FLOP count; use lax.scan")
        else:
            total += sum(inner)
    return total


def _subjaxprs(params: dict[str, Any]) -> Iterator[jax.extend.core.Jaxpr]:
    """Every jaxpr held by an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jax.extend.core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jax.extend.core.Jaxpr):
                yield item


def _dot_general(equation: jax.extend.core.JaxprEqn) -> int:
    """Twice the products: every output element sums over the contracted axes."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = _shape(equation.invars[0]), _shape(equation.outvars[0])
    return 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)


def _convolution(equation: jax.extend.core.JaxprEqn) -> int:
    """Twice the output size times the window and its input features."""
    numbers = equation.params["dimension_numbers"]
    kernel, out = _shape(equation.invars[1]), _shape(equation.outvars[0])
    return 2 * math.prod(out) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


class Dot(NamedTuple):
    """A matmul in a compiled program; `single` if its operands are float32."""

    flops: int
    single: bool


def dots(program: hlo.Module, computation: hlo.Computation, i: hlo.Instruction) -> list[Dot]:
    """Matmuls of one instruction: itself, those it fuses, or a library call."""
    if i.opcode == "fusion":
        inner = program.computations[i.called["calls"]]
        return [dot for j in inner.instructions.values() for dot in dots(program, inner, j)]
    found = _CONTRACTED.search(i.attributes)
    if i.opcode not in ("dot", "custom-call") or not found:
        return []
    (lhs, *_), (out, *_) = (
        hlo.arrays(computation.instructions[i.operands[0]].shape),
        hlo.arrays(i.shape),
    )
    axes = [int(axis) for axis in found[1].replace('"', "").split(",") if axis]
    return [Dot(2 * out.size * math.prod(lhs.dims[a] for a in axes), lhs.dtype == "f32")]


def traffic(program: hlo.Module, computation: hlo.Computation, i: hlo.Instruction) -> int:
    """Bytes one instruction reads and writes, counting only the touched part of what it slices."""
    if i.opcode in _COPIED:
        return 2 * i.bytes
    if i.opcode in _FREE or i.opcode.endswith(("-start", "-done", "-update")):
        return 0
    if "AllocateBuffer" in i.attributes:
        return 0
    if i.opcode == "fusion":
        inner = program.computations[i.called["calls"]]
        return _read(inner) + _written(inner)
    if i.opcode in _SLICES:
        return 2 * i.bytes
    if i.opcode == "dynamic-update-slice":
        return 2 * computation.instructions[i.operands[1]].bytes
    return i.bytes + sum(computation.instructions[o].bytes for o in i.operands)


def _read(fused: hlo.Computation) -> int:
    """Bytes a fusion reads: of a parameter that is only sliced, the slices."""
    users: dict[str, list[hlo.Instruction]] = {}
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


def _written(fused: hlo.Computation) -> int:
    """Bytes a fusion writes: of an array updated in place, the update."""
    results = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    total = 0
    for name in results:
        i = origin = fused.instructions[name]
        while origin.opcode in _VIEWS:
            origin = fused.instructions[origin.operands[0]]
        updated = origin.opcode == "dynamic-update-slice"
        total += fused.instructions[origin.operands[1]].bytes if updated else i.bytes
    return total

"""The matmul FLOPs of one instruction, and the bytes that it reads and writes."""

import math
import re
from typing import NamedTuple

from mogrifier_jax.preflight import hlo

_CONTRACTED = re.compile(r'(?:lhs_contracting_dims=\{|"lhs_contracting_dimensions":\[)([\d,"]*)')
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all iota while conditional call "
    "partition-id replica-id opt-barrier".split()
)
_VIEWS = frozenset({"bitcast", "reshape", "convert", "transpose", "copy"})
# An asynchronous copy consists of a start and a done. It is counted at the done, whose result has
# the shape of the copy.
_COPIED = frozenset({"copy-done", "slice-done", "dynamic-slice-done"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


class Dot(NamedTuple):
    """A matmul in a compiled program; `single` is true if its operands are float32."""

    flops: int
    single: bool


def dots(program: hlo.Module, computation: hlo.Computation, i: hlo.Instruction) -> list[Dot]:
    """The matmuls of one instruction, which may be a dot, a library call or a fusion of several."""
    if i.opcode == "fusion":
        inner = program.callee(i)
        return [dot for j in inner.instructions.values() for dot in dots(program, inner, j)]
    contracted = _CONTRACTED.search(i.attributes)
    if i.opcode not in ("dot", "custom-call") or not contracted:
        return []
    lhs, out = hlo.arrays(computation.instructions[i.operands[0]].shape)[0], hlo.arrays(i.shape)[0]
    axes = [int(axis) for axis in contracted[1].replace('"', "").split(",") if axis]
    return [Dot(2 * out.size * math.prod(lhs.dims[a] for a in axes), lhs.dtype == "f32")]


def traffic(program: hlo.Module, computation: hlo.Computation, i: hlo.Instruction) -> int:
    """The bytes that an instruction reads and writes; a sliced array counts only its slice."""
    if i.opcode in _COPIED:
        return 2 * i.bytes
    if i.opcode in _FREE or i.opcode.endswith(("-start", "-done", "-update")):
        return 0
    if "AllocateBuffer" in i.attributes:
        return 0
    if i.opcode == "fusion":
        inner = program.callee(i)
        return _bytes_read(inner) + _bytes_written(inner)
    if i.opcode in _SLICES:
        return 2 * i.bytes
    if i.opcode == "dynamic-update-slice":
        return 2 * computation.instructions[i.operands[1]].bytes
    return i.bytes + sum(computation.instructions[o].bytes for o in i.operands)


def _bytes_read(fused: hlo.Computation) -> int:
    """The bytes that a fusion reads; a parameter that is only sliced counts only its slices."""
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


def _bytes_written(fused: hlo.Computation) -> int:
    """The bytes that a fusion writes; an array that is updated in place counts only the update."""
    results = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    total = 0
    for name in results:
        i = origin = fused.instructions[name]
        while origin.opcode in _VIEWS:
            origin = fused.instructions[origin.operands[0]]
        updated = origin.opcode == "dynamic-update-slice"
        total += fused.instructions[origin.operands[1]].bytes if updated else i.bytes
    return total

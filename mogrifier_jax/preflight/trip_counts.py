"""How often the loops of a compiled program run.

Some compilers annotate a loop with its trip count. Where the annotation is missing, `trip_count`
executes the loop symbolically: it computes only the few integers that the loop's condition depends
on, iteration by iteration, until the condition is false.
"""

import operator
import re
from collections.abc import Callable, Sequence

from mogrifier_jax.preflight import hlo

# A loop that is still running after this many iterations is treated as one of unknown length.
MAX_TRIPS = 1_000_000
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
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
# What is known about a value: an integer, a tuple of values, or None if it is unknown.
Value = int | tuple | None


class Evaluator:
    """Computes the integers of one computation from what is known about its parameters."""

    def __init__(
        self, program: hlo.Module, computation: hlo.Computation, arguments: Sequence[Value]
    ):
        self.program = program
        self.computation = computation
        self.arguments = arguments
        self._known: dict[str, Value] = {}

    def __call__(self, name: str) -> Value:
        """The value of an instruction; None if it depends on anything but known integers."""
        if name not in self._known:
            self._known[name] = self._evaluate(self.computation.instructions[name])
        return self._known[name]

    def _evaluate(self, i: hlo.Instruction) -> Value:
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
            return loop_invariants(body, self(i.operands[0]))
        if i.opcode == "not":
            value = self(i.operands[0])
            return int(not value) if isinstance(value, int) else None
        function = _ARITHMETIC.get(i.opcode)
        if i.opcode == "compare":
            function = _COMPARE[i.attribute("direction")]
        if function is None:
            return None
        left, right = (self(o) for o in i.operands)
        if not isinstance(left, int) or not isinstance(right, int):
            return None
        return int(function(left, right))


def _literal(text: str) -> Value:
    """The integer of a scalar constant; None for other constants."""
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def loop_invariants(body: hlo.Computation, init: Value) -> Value:
    """The initial tuple of a loop, with None in place of each value that its body may change."""
    if not isinstance(init, tuple) or body.root.opcode != "tuple":
        return None
    values = []
    for index, name in enumerate(body.root.operands):
        origin = body.instructions[name]
        while origin.opcode in _PASS_THROUGH:
            origin = body.instructions[origin.operands[0]]
        same = (
            origin.opcode == "get-tuple-element"
            and int(origin.attribute("index")) == index
            and body.instructions[origin.operands[0]].opcode == "parameter"
        )
        values.append(init[index] if same else None)
    return tuple(values)


def is_annotated(loop: hlo.Instruction) -> bool:
    """Whether the compiler has annotated a loop with its trip count.

    On a GPU the host counts the iterations of such a loop, so its condition never runs.
    """
    return _TRIPS.search(loop.attributes) is not None


def trip_count(program: hlo.Module, loop: hlo.Instruction, init: Value) -> int | None:
    """How often a `while` that starts with `init` runs its body; None if it depends on data."""
    if annotation := _TRIPS.search(loop.attributes):
        return int(annotation[1])
    condition = program.computations[loop.called["condition"]]
    body = program.computations[loop.called["body"]]
    state = init
    for trips in range(MAX_TRIPS):
        proceeds = Evaluator(program, condition, [state])(condition.root.name)
        if not isinstance(proceeds, int):
            return None
        if not proceeds:
            return trips
        state = _advance(program, body, state)
    return None


def _advance(program: hlo.Module, body: hlo.Computation, state: Value) -> Value:
    """The integers of a loop after one more iteration."""
    evaluate = Evaluator(program, body, [state])
    if body.root.opcode != "tuple" or not isinstance(state, tuple):
        return evaluate(body.root.name)
    # Values that are unknown stay unknown, so computing them would be wasted.
    return tuple(
        None if old is None else evaluate(name)
        for old, name in zip(state, body.root.operands, strict=True)
    )

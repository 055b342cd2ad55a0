"""Reads one listing of the TPU compiler: the VLIW bundles of an instruction after scheduling.

A bundle is what a core issues in one cycle if nothing stalls. A listing names its bundles by number
and its branches by their target, and after a branch a fixed number of bundles, the delay slots, is
still executed. Loops over blocks of an array, their pipeline stages and their remainders are all
controlled by integers that are known from the text, so `run` executes exactly these: it follows the
branches and adds up bundles, DMAs that are waited for, and the work of the matrix units. Everything
else in a bundle is skipped.

A branch that depends on data or on an operand is a guess: the code behind it is executed once.
"""

import bisect
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

GRANULE = 32  # Bytes; DMAs are counted in granules.
MAX_EVENTS = 1_000_000  # A listing that needs more is given up, and what was counted is a guess.
_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *:", re.MULTILINE)
_COMMENT = re.compile(r"/\*|\*/")
_STATEMENT = re.compile(r"%(\w+) = ([\w.]+) *(.*)", re.DOTALL)
_VALUE = re.compile(r"%(\w+_\w+)")
_THREAD = re.compile(r"\[thread:[^\]]*\] *")
_PREDICATE = re.compile(r"\((!?)%(\w+)(?:, %(\w+))?\),? *")
_TARGET = re.compile(r"target bundleno = (\d+)")
_MATRIX = re.compile(r"= vmat(push|mul)\d?\.([\w.]*)")
_SPILL = re.compile(r"\[smem:\[(#allocation\w*_spill)\]\]")
_CALL = re.compile(r"= inlined_call [^/]*/\* %([\w.\-~]+) = ")
# What can decide a branch: scalars, predicates, branches and waits.
_INTERESTING = re.compile(r"= (?:s[a-z]|p[a-z]|dma\.done)")
# Cycles of a matrix unit: to load 8 rows of weights, or 16 if they are packed as bfloat16.
_PUSH, _PACKED_PUSH = 2, 4


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _unsigned(value: int) -> int:
    return value % 2**32


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << (b % 32),
    "sshra": lambda a, b: a >> (b % 32),
    "sshrl": lambda a, b: _unsigned(a) >> (b % 32),
    "pand": lambda a, b: a & b,
    "por": lambda a, b: a | b,
    "pxor": lambda a, b: a ^ b,
    "pnand": lambda a, b: 1 - (a & b),
    "pnor": lambda a, b: 1 - (a | b),
}
_COMPARE: dict[str, Callable[[int, int], int]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_COPIES = frozenset({"smov", "pmov"})
Value = int | None  # None is unknown.


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one execution of a listing needs."""

    bundles: int = 0
    dmas: int = 0  # Waits for DMAs; one wait may be for several.
    dma_bytes: int = 0
    pushed: int = 0  # Cycles that all matrix units together load weights.
    multiplied: int = 0  # Rows that all matrix units together multiply.
    guesses: int = 0  # Branches and sizes of DMAs that depend on data.

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(a + b for a, b in pairs))

    def times(self, executions: int) -> "Counts":
        """The counts of several executions; a guess remains one."""
        values = [executions * value for value in dataclasses.astuple(self)]
        return dataclasses.replace(Counts(*values), guesses=self.guesses)


class Statement(NamedTuple):
    """An operation on scalars; `result` and `predicate` are registers, as `s12` and `p3`."""

    name: str
    result: str
    opcode: str
    predicate: tuple[str, bool] | None  # A register, and whether it must be false.
    operands: tuple[str, ...]  # Values, as `s58_s13`, or numbers.
    depends: frozenset[str]  # All values that it reads or may leave in its register.
    target: int | None  # Of a branch.
    spill: str  # The slot of a spilled scalar, or "".


@dataclasses.dataclass(frozen=True)
class Listing:
    """A parsed listing: its bundles that can change its control flow, and sums over the others."""

    bundles: int
    events: dict[int, tuple[Statement, ...]]
    # Indices of the bundles with matrix work, and the running sums of their cycles and rows.
    matrix_at: tuple[int, ...]
    pushed: tuple[int, ...]
    multiplied: tuple[int, ...]
    calls: tuple[tuple[int, str], ...]  # Bundles that run another listing, of this instruction.

    def matrix_work(self, start: int, stop: int) -> tuple[int, int]:
        """Cycles of loading and rows multiplied in the bundles from `start` up to `stop`."""
        first, last = (bisect.bisect_left(self.matrix_at, bundle) for bundle in (start, stop))
        return (
            self.pushed[last] - self.pushed[first],
            self.multiplied[last] - self.multiplied[first],
        )

    def loops(self, delay: int) -> list[range]:
        """The bundles of each loop, delay slots included, in the order of their ends."""
        found = []
        for bundle, statements in sorted(self.events.items()):
            for statement in statements:
                if statement.target is not None and statement.target <= bundle:
                    found.append(range(statement.target, bundle + delay + 1))
        return found


def parse(text: str) -> Listing:
    """Parses the text of a listing."""
    statements: dict[int, list[Statement]] = {}
    matrix_at, pushed, multiplied, calls = list[int](), [0], [0], list[tuple[int, str]]()
    bundle = -1
    for bundle, line in _bundles(text):
        for kind, rest in _MATRIX.findall(line):
            packed = "bf16" in rest.split(".")
            if not matrix_at or matrix_at[-1] != bundle:
                matrix_at.append(bundle)
                pushed.append(pushed[-1])
                multiplied.append(multiplied[-1])
            if kind == "push":
                pushed[-1] += _PACKED_PUSH if packed else _PUSH
            else:
                multiplied[-1] += 16 if packed else 8
        if "inlined_call" in line:
            calls += [(bundle, name) for name in _CALL.findall(line)]
        if _INTERESTING.search(line):
            statements[bundle] = list(_statements(line))
    return Listing(
        bundle + 1,
        _needed(statements),
        tuple(matrix_at),
        tuple(pushed),
        tuple(multiplied),
        tuple(calls),
    )


def _bundles(text: str) -> Iterator[tuple[int, str]]:
    """The number and the text of each bundle, which may have several lines."""
    starts = list(_BUNDLE.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    for match, end in zip(starts, ends, strict=True):
        yield int(match[1], 16), text[match.end() : end]


def _uncommented(text: str) -> str:
    """The text without its comments, which may be nested."""
    kept, depth, position = [], 0, 0
    for match in _COMMENT.finditer(text):
        if depth == 0:
            kept.append(text[position : match.start()])
        depth = depth + 1 if match[0] == "/*" else max(depth - 1, 0)
        position = match.end()
    if depth == 0:
        kept.append(text[position:])
    return "".join(kept)


def _statements(line: str) -> Iterator[Statement]:
    for part in _uncommented(line).strip(" {}\n>").split(";;"):
        match = _STATEMENT.match(part.strip(" {}\n"))
        if not match or not _INTERESTING.match(f"= {match[2]}"):
            continue
        name, opcode, rest = match[1], match[2], _THREAD.sub("", match[3])
        depends = frozenset(_VALUE.findall(rest))
        predicate = None
        if condition := _PREDICATE.match(rest):
            predicate = _register(condition[2]), condition[1] == "!"
            rest = rest[condition.end() :]
        target = _TARGET.search(rest) if opcode.startswith("sbr") else None
        spill = _SPILL.search(rest)
        operands = tuple(operand.strip().lstrip("%") for operand in rest.split(","))
        if opcode == "sst":
            operands = (rest.rpartition("%")[2].strip(),)
        yield Statement(
            name,
            _register(name),
            opcode,
            predicate,
            operands,
            depends,
            int(target[1]) if target else None,
            spill[1] if spill and opcode in ("sld", "sst") else "",
        )


def _register(value: str) -> str:
    """The register of a value: `s13` of `s58_s13`."""
    return value.rpartition("_")[2]


def _is_event(statement: Statement) -> bool:
    return statement.target is not None or statement.opcode == "dma.done.wait"


def _needed(statements: dict[int, list[Statement]]) -> dict[int, tuple[Statement, ...]]:
    """The statements that branches and waits depend on, directly or through others."""
    all_statements = [each for group in statements.values() for each in group]
    # A value is defined once; predicated moves and phis name the values that a register had before.
    defined = {each.name: each for each in all_statements}
    stores: dict[str, list[Statement]] = {}
    for each in all_statements:
        if each.opcode == "sst" and each.spill:
            stores.setdefault(each.spill, []).append(each)
    waiting = [each for each in all_statements if _is_event(each)]
    needed = {each.name for each in waiting}
    while waiting:
        each = waiting.pop()
        found = [defined[value] for value in each.depends if value in defined]
        if each.opcode == "sld":
            found += stores.get(each.spill, [])
        new = [other for other in found if other.name not in needed]
        needed |= {other.name for other in new}
        waiting += new
    kept = {
        bundle: tuple(s for s in group if s.name in needed and s.opcode not in ("sphi", "pphi"))
        for bundle, group in statements.items()
    }
    return {bundle: group for bundle, group in kept.items() if group}


def run(listing: Listing, delay: int) -> Counts:
    """Executes a listing once, on a core whose branches have this many delay slots."""
    return _Core(listing, delay).run()


class _Core:
    """Registers and counts of a core that executes a listing."""

    def __init__(self, listing: Listing, delay: int):
        self.listing = listing
        self.delay = delay
        self.registers: dict[str, Value] = {}
        self.spilled: dict[str, Value] = {}
        self.counts = dict.fromkeys((f.name for f in dataclasses.fields(Counts)), 0)
        self.guessed: set[str] = set()

    def run(self) -> Counts:
        order = sorted(self.listing.events)
        at, jump, budget = 0, None, MAX_EVENTS
        while at < self.listing.bundles and budget:
            budget -= 1
            index = bisect.bisect_left(order, at)
            event = order[index] if index < len(order) else self.listing.bundles
            if jump is not None and event >= jump[0]:
                self._advance(at, jump[0])
                at, jump = jump[1], None
                continue
            stop = min(event + 1, self.listing.bundles)
            self._advance(at, stop)
            at = stop
            if event < self.listing.bundles:
                target = self._execute(event)
                if target is not None:
                    jump = min(event + self.delay + 1, self.listing.bundles), target
        if not budget:
            self.guessed.add("")
        return Counts(**self.counts | {"guesses": len(self.guessed)})

    def _advance(self, start: int, stop: int) -> None:
        pushed, multiplied = self.listing.matrix_work(start, stop)
        self.counts["bundles"] += stop - start
        self.counts["pushed"] += pushed
        self.counts["multiplied"] += multiplied

    def _execute(self, bundle: int) -> int | None:
        """Executes the statements of a bundle; returns the target of a branch that is taken."""
        written: dict[str, Value] = {}
        target = None
        for each in self.listing.events[bundle]:
            allowed = self._predicate(each)
            if each.target is not None:
                if allowed is None:
                    self.guessed.add(each.name)
                elif allowed:
                    target = each.target
            elif each.opcode == "dma.done.wait":
                self._wait(each, allowed)
            elif each.opcode == "sst":
                self.spilled[each.spill] = self._value(each.operands[0]) if allowed else None
            elif allowed is None:
                written[each.result] = None
            elif allowed:
                written[each.result] = self._compute(each)
        self.registers |= written  # All statements of a bundle read the registers of before.
        return target

    def _wait(self, each: Statement, allowed: Value) -> None:
        size = self._value(each.operands[1])
        if allowed is None or (allowed and size is None):
            self.guessed.add(each.name)
        if allowed != 0:
            self.counts["dmas"] += 1
            self.counts["dma_bytes"] += GRANULE * (size or 0)

    def _predicate(self, each: Statement) -> Value:
        if each.predicate is None:
            return 1
        register, negated = each.predicate
        value = self.registers.get(register)
        return value if value is None else int(bool(value) != negated)

    def _value(self, operand: str) -> Value:
        if re.fullmatch(r"\d+", operand):
            return _signed(int(operand))
        return self.registers.get(_register(operand)) if "_" in operand else None

    def _compute(self, each: Statement) -> Value:
        if each.opcode == "sld":
            return self.spilled.get(each.spill)
        values = [self._value(operand) for operand in each.operands]
        kind, *rest = each.opcode.split(".")
        if kind == "scalar_select":
            chosen, on_true, on_false = values
            return None if chosen is None else on_true if chosen else on_false
        if any(value is None for value in values):
            return None
        known = [value for value in values if value is not None]
        if kind in _COPIES:
            return known[0]
        if kind == "pneg":
            return 1 - known[0]
        if kind == "scmp" and len(known) == 2 and rest[0] in _COMPARE and rest[1][0] in "su":
            if rest[1] == "u32":
                known = [_unsigned(value) for value in known]
            return int(_COMPARE[rest[0]](*known))
        if kind in _ARITHMETIC and len(known) == 2 and rest[:1] != ["f32"]:
            return _signed(_ARITHMETIC[kind](*known))
        return None

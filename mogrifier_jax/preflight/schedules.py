"""A second estimate of a program's time on TPUs, from the schedules that the compiler made for it.

With the flags below, which are undocumented, the compiler writes the bundles of each instruction to
a listing of its own (`listings.py`), and one listing, called TLP, for the program that calls them.
Identical instructions share a listing. A `Recording` reads the listings while the compiler is still
at work and removes them, because those of a whole train step have hundreds of megabytes.

How often an instruction is executed is known from the compiled program (`costs.py`). The bundles of
all executions are the cycles of the step if nothing is ever waited for, which makes them the lower
end of a range. At the upper end, nothing overlaps: every DMA is waited for from its start, for its
bytes at the bandwidth of the memory and a latency, and so is every collective.
"""

import atexit
import dataclasses
import math
import os
import pathlib
import re
import shutil
import tempfile
import threading
from types import TracebackType

from mogrifier_jax.preflight import chips, costs, listings

DMA_LATENCY = 0.5e-6  # Seconds until the first byte arrives: a round figure.
DEAREST = 20  # Instructions that a schedule names.
_LABEL = "packed-bundles-post-ra"  # The last listing of the compiler that shows empty bundles.
_MARK = f"static_gap_analysis_{_LABEL}"  # Written after the listing, which is then complete.
_FLAGS = {
    "xla_jf_dump_llo_text": "true",
    "xla_jf_dump_llo_static_gaps": "true",
    "xla_jf_emit_annotations": "true",
    "xla_jf_dump_llo_pass_label_regex": f"{_LABEL}|deduplication-map",
}
_FILE = re.compile(r"\d+-(.+)-\d+-([\w\-]+)\.txt")
_POLL = 0.5  # Seconds between two looks into the folder.
_DELAY_SLOTS = {"v4": 1}  # Bundles that are executed after a branch; 4 on all others.
# Matrix units of a core, and the cycles in which they multiply a row. Others were not looked at.
_MATRIX_UNITS = {"v5e": (4, 1.0), "v6e": (2, 0.5)}
_CORES = {"v4": 2, "v5p": 2}  # Cores that share the bandwidth; the others have one.

_folder: str | None = None  # Where the compiler of this process writes.


def request_listings() -> None:
    """Makes the compiler write listings; it must not be loaded yet, as it reads its flags once."""
    global _folder
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    if _folder is not None or "xla_jf_dump_to" in given:
        return
    _folder = tempfile.mkdtemp(prefix="mogrifier_schedules_")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    flags = {"xla_jf_dump_to": _folder} | _FLAGS
    # Another version may not know some of them, and would end the process over it.
    ignored = f"--undefok={','.join(flags)}"
    added = [*(f"--{name}={value}" for name, value in flags.items()), ignored]
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([given, *added]).strip()


@dataclasses.dataclass(frozen=True)
class Part:
    """An instruction of the program with the counts of one execution."""

    name: str
    op_name: str
    executions: int
    each: listings.Counts


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The counts of one run of a program on each core of a chip."""

    chip: chips.Chip
    parts: tuple[Part, ...]  # The last one is what the program does between its instructions.
    total: listings.Counts

    @property
    def lower_seconds(self) -> float:
        """The time if no DMA and no collective is waited for."""
        return self.total.bundles / self.chip.clock

    @property
    def dma_seconds(self) -> float:
        """The time of all DMAs that are waited for if nothing overlaps with them."""
        bandwidth = self.chip.memory_bandwidth / _CORES.get(self.chip.generation, 1)
        return self.total.dma_bytes / bandwidth + self.total.dmas * DMA_LATENCY

    @property
    def matrix_share(self) -> float:
        """The cycles that loading weights or multiplying takes, whichever is longer, of all.

        It is NaN for chips whose matrix units are unknown.
        """
        if self.chip.generation not in _MATRIX_UNITS or not self.total.bundles:
            return math.nan
        units, cycles = _MATRIX_UNITS[self.chip.generation]
        busy = (max(p.each.pushed, cycles * p.each.multiplied) * p.executions for p in self.parts)
        return sum(busy) / units / self.total.bundles

    def dearest(self) -> list[Part]:
        """The instructions with the most cycles, the first one first."""
        by_cycles = sorted(self.parts, key=lambda part: -part.executions * part.each.bundles)
        return by_cycles[:DEAREST]


class Recording:
    """Reads the listings that the compiler writes inside the `with` statement.

    Args:
      chip: the one that is compiled for.
      folder: where the listings are; by default that of `request_listings`.
    """

    def __init__(self, chip: chips.Chip, folder: str | None = None):
        self.chip = chip
        self.delay = _DELAY_SLOTS.get(chip.generation, 4)
        name = folder or _folder
        self.folder = pathlib.Path(name) if name and chip.kind == "tpu" else None
        self.counts: dict[str, listings.Counts] = {}
        self.same: dict[str, str] = {}  # The instruction whose listing each instruction shares.
        self.top: listings.Listing | None = None
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read_while_compiling, daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> "Recording":
        if self.folder:
            _empty(self.folder)  # Programs may have been compiled without being recorded.
            self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.folder:
            return
        self._ended.set()
        self._reader.join()
        if kind is None and self._failure is None:
            self._attempt(complete=True)
        _empty(self.folder)

    def _read_while_compiling(self) -> None:
        while not self._ended.wait(_POLL):
            if not self._attempt(complete=False):
                break

    def _attempt(self, complete: bool) -> bool:
        """Reads what is there; a format that cannot be read must not end the preflight."""
        try:
            self.read_files(complete)
        except (ValueError, LookupError, OSError, UnicodeError) as error:
            self._failure = error
        return self._failure is None

    def read_files(self, complete: bool) -> None:
        """Reads and removes listings: all of them, or those that the compiler has finished."""
        assert self.folder
        files: dict[tuple[str, str], pathlib.Path] = {}
        for path in self.folder.iterdir():
            if match := _FILE.fullmatch(path.name):
                files[match[1], match[2]] = path
        for (name, label), path in files.items():
            if label == "deduplication-map" and complete:
                self.same = _read_shared(path.read_text())
            elif label == _LABEL and (complete or (name, _MARK) in files):
                listing = listings.parse(path.read_text())
                if name == "TLP":
                    self.top = listing
                else:
                    self.counts[name] = listings.run(listing, self.delay)
                path.unlink()

    def schedule(self, analysis: costs.Analysis) -> Schedule | None:
        """The schedule of the compiled program; None if the compiler wrote none that is known."""
        if self.top is None or not self.counts or self._failure:
            return None
        op_names = {cost.name: cost.op_name for cost in analysis.costs}
        collectives = {one.name for one in analysis.collectives}
        parts = []
        for name in dict.fromkeys(name for _, name in self.top.calls):
            counts = self.counts.get(self.same.get(name, name))
            if counts is None:
                return None  # Without one of its instructions, the sum would be too low.
            if name in collectives:  # Their time is estimated apart.
                counts = dataclasses.replace(counts, dmas=0, dma_bytes=0)
            executions = analysis.executions.get(name, 0)
            if executions:
                parts.append(Part(name, op_names.get(name, ""), executions, counts))
        between = _between(self.top, analysis.executions, self.delay)
        parts.append(Part("between instructions", "", 1, between))
        total = sum((part.each.times(part.executions) for part in parts), listings.Counts())
        return Schedule(self.chip, tuple(parts), total)


def _empty(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read_shared(text: str) -> dict[str, str]:
    """The instruction under whose name the listing of each instruction is written."""
    shared, key = {}, ""
    for line in text.splitlines():
        if line.startswith("key:"):
            key = line.removeprefix("key:")
        elif line.startswith("  "):
            shared[line.strip()] = key
    return shared


def _between(top: listings.Listing, executions: dict[str, int], delay: int) -> listings.Counts:
    """What the program itself executes: its loops, and the DMAs between its instructions.

    Its loops count in memory, so their iterations are those of the instructions inside them. A loop
    without instructions, as those that wait for other chips, counts once for each time it is met.
    """
    # Innermost loops first: a loop ends before the loops around it, or begins after them.
    loops = sorted(top.loops(delay), key=len)

    def innermost(bundle: int) -> int | None:
        return next((i for i, loop in enumerate(loops) if bundle in loop), None)

    times: dict[int | None, int] = {}
    for bundle, name in top.calls:
        loop = innermost(bundle)
        times[loop] = max(times.get(loop, 0), executions.get(name, 0))
    times[None] = 1

    def executed(loop: int | None) -> int:
        while loop is not None and loop not in times:
            inside = loops[loop]
            around = (i for i in range(loop + 1, len(loops)) if inside.start in loops[i])
            loop = next(around, None)
        return times[loop]

    bundles = sum(executed(innermost(bundle)) for bundle in range(top.bundles))
    dmas = size = guesses = 0
    for bundle, statements in top.events.items():
        for each in statements:
            if each.opcode != "dma.done.wait":
                continue
            count = executed(innermost(bundle))
            granules = each.operands[1]
            guesses += not granules.isdecimal()
            dmas += count
            size += count * listings.GRANULE * int(granules) if granules.isdecimal() else 0
    return listings.Counts(bundles=bundles, dmas=dmas, dma_bytes=size, guesses=guesses)

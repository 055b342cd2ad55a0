"""Timing that noise hits alike: contenders take turns, and medians are compared."""

import statistics
import time
from collections.abc import Callable, Mapping

SHORTEST = 0.2  # Seconds: a sample of a quick contender is as many calls as fill this.
PAUSE = 0.02  # Seconds between contenders, for the threads of the last one to go to sleep.


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def take_turns(
    contenders: Mapping[str, Callable[[], object]], repeats: int, clock: str = "wall"
) -> dict[str, float]:
    """Median seconds per call; each contender must return only when its work is done.

    The clock "cpu" counts the process's own seconds: on a busy machine it is the one to use,
    with the process held to one core, as threads that wait for each other count as well.
    """
    now = CLOCKS[clock]
    calls = {}
    for name, run in contenders.items():
        run()  # Compiles.
        calls[name] = max(1, round(SHORTEST / _seconds(now, run, 1)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            time.sleep(PAUSE)
            samples[name].append(_seconds(now, run, calls[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def _seconds(now: Callable[[], float], run: Callable[[], object], calls: int) -> float:
    start = now()
    for _ in range(calls):
        run()
    return (now() - start) / calls


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns under their heads, names to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

"""Formats numbers: cross-entropies as perplexity or bits, large quantities, spans of time."""

import math


def perplexity(nats: float) -> float:
    """Perplexity of a cross-entropy in nats; inf rather than an overflow."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def bits(nats: float) -> float:
    """Bits per token of a cross-entropy in nats."""
    return nats / math.log(2)


def in_unit(nats: float, unit: str) -> float:
    """A cross-entropy in nats, converted to "ppl", "bpc", "bpb" or "nats"."""
    if unit == "nats":
        return nats
    return perplexity(nats) if unit == "ppl" else bits(nats)


# The units in words.
UNITS = {
    "ppl": "perplexity",
    "bpc": "bits per character",
    "bpb": "bits per byte",
    "nats": "nats per token",
}


def digits(unit: str) -> int:
    """How many decimals of a score are shown."""
    return 2 if unit == "ppl" else 4


def number(nats: float, unit: str) -> str:
    """A cross-entropy in a unit, as text without the name of the unit."""
    return f"{in_unit(nats, unit):.{digits(unit)}f}"


def show(nats: float, unit: str) -> str:
    """A cross-entropy with its unit, such as "ppl 52.10" or "1.1480 bpc"."""
    return f"ppl {number(nats, unit)}" if unit == "ppl" else f"{number(nats, unit)} {unit}"


def quantity(number: float) -> str:
    """12345678 as 12.3M."""
    number = float(f"{number:.3g}")  # Rounded first: 999,999 is 1M.
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def span(seconds: float) -> str:
    """A time such as 45s, 3m20s, 5h07m or 2d04h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"

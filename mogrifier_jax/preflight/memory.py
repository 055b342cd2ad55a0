"""The memory that a compiled program needs on each chip, as its compiler reports it."""

import dataclasses
import re
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each chip, by purpose."""

    arguments: int
    outputs: int
    aliased: int  # Outputs that reuse the buffers of donated arguments.
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """The bytes that must fit into memory next to the code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def needed_by(compiled: jax.stages.Compiled) -> Memory:
    """The memory that a compiled program needs."""
    stats: Any = compiled.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    return Memory(*(getattr(stats, f"{kind}_size_in_bytes") for kind in kinds))


_EXHAUSTED = re.compile(
    r"(?:required for HLO temporaries \(|Used )([\d.]+)([KMGT]?)\)?(?: exceeds| of)"
)


def parse_refusal(message: str) -> int | None:
    """The bytes that a program would need, from the error message of a compiler that refused it.

    Returns 0 if the message does not say how many, and None if it is not about memory.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    match = _EXHAUSTED.search(message)
    return round(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")) if match else 0


def show_bytes(count: float) -> str:
    """A number of bytes as text, in GiB or MiB."""
    gib = 1024**3
    return f"{count / gib:.2f} GiB" if count >= gib / 10 else f"{count / 2**20:.2f} MiB"

"""Groups of chips: what a name such as `v5e:4x4` or `h100:8` means, and how its chips communicate.

`chips.py` has the numbers of a single chip, and `topologies.py` asks the vendors' compilers for the
devices of a target.
"""

import dataclasses
import itertools
import math

from mogrifier_jax import errors
from mogrifier_jax.preflight import chips

PLANES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CUBES = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_LARGEST = {"v4": 4096, "v5p": 6144}
_GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Target:
    """Chips of one generation; `shape` is that of a TPU slice, or (hosts, GPUs per host)."""

    chip: chips.Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """The number of chips, each of which is one device."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """The name, as `parse` takes it."""
        if self.chip.kind == "gpu":
            return f"{self.chip.generation}:{self.num_chips}"
        return f"{self.chip.generation}:{'x'.join(map(str, self.shape))}"


def parse(name: str) -> Target:
    """The target of a name `generation:shape`, such as `v5e:4x4`, `v5p:2x2x1` or `h100:8`."""
    generation, _, shape = name.partition(":")
    if generation not in chips.CHIPS:
        raise errors.UsageError(
            f"topology {name!r} names no known chip; use one of {', '.join(chips.CHIPS)}, "
            "such as v5e:4x4, v5p:2x2x1 or h100:8"
        )
    chip = chips.CHIPS[generation]
    try:
        sides = tuple(int(side) for side in shape.split("x"))
    except ValueError:
        sides = ()
    if chip.kind == "gpu":
        return Target(chip, _split_hosts(name, sides))
    allowed = sides in (PLANES if chip.torus == 2 else CUBES)
    if not allowed and not _is_made_of_cubes(chip, sides):
        raise errors.UsageError(
            f"topology {name!r} is not a slice of {generation}; {_list_slices(chip)}"
        )
    return Target(chip, sides)


def _split_hosts(name: str, sides: tuple[int, ...]) -> tuple[int, int]:
    """A number of GPUs as (hosts, GPUs per host)."""
    count = sides[0] if len(sides) == 1 else 0
    if count < 1 or (count > _GPUS_PER_HOST and count % _GPUS_PER_HOST):
        raise errors.UsageError(
            f"topology {name!r} needs a number of GPUs from 1 to {_GPUS_PER_HOST} or a multiple of "
            f"{_GPUS_PER_HOST}, such as {name.partition(':')[0]}:{_GPUS_PER_HOST}"
        )
    return max(count // _GPUS_PER_HOST, 1), min(count, _GPUS_PER_HOST)


def _is_made_of_cubes(chip: chips.Chip, sides: tuple[int, ...]) -> bool:
    """Whether the sides are those of a large 3-D slice, which is built from 4x4x4 cubes."""
    whole = len(sides) == 3 and all(side > 0 and side % 4 == 0 for side in sides)
    return chip.torus == 3 and whole and math.prod(sides) <= _LARGEST[chip.generation]


def _list_slices(chip: chips.Chip) -> str:
    shapes = PLANES if chip.torus == 2 else CUBES
    known = ", ".join("x".join(map(str, shape)) for shape in shapes)
    if chip.torus == 2:
        return f"use one of {known}"
    largest = _LARGEST[chip.generation]
    return f"use one of {known}, or three multiples of 4 with at most {largest} chips"


def splits(target: Target) -> list[tuple[int, int]]:
    """All mesh sizes (data, model) that use every chip, the largest data axis first."""
    chips = target.num_chips
    return [(chips // model, model) for model in range(1, chips + 1) if chips % model == 0]


def ring(target: Target, group: int) -> tuple[float, int]:
    """The bandwidth in bytes per second and the hops of a ring collective among `group` chips.

    On a torus, a group that is larger than a side spans several axes and uses the links of all of
    them, and a side that does not close into a ring has half the bandwidth. GPUs of different hosts
    communicate over the network.
    """
    chip = target.chip
    if chip.kind == "gpu":
        inside = group <= target.shape[-1]
        return (chip.link_bandwidth if inside else chip.network_bandwidth), group - 1
    sides = sorted(target.shape, reverse=True)
    products = itertools.accumulate(sides, lambda a, b: a * b)
    axes = next((n for n, chips in enumerate(products, start=1) if chips >= group), len(sides))
    used = sides[:axes]
    closed = sum(1.0 if side % chip.full_side == 0 else 0.5 for side in used if side > 1)
    hops = math.ceil(axes * (group ** (1 / axes) - 1))
    return chip.link_bandwidth * max(closed, 0.5), hops

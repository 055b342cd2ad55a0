"""Option: the type, default, limits and meaning of a setting, declared in one place.

Every setting of the package is declared as an `Option`. The keys of a config are in
`config_keys.py`, except for the options of models (`nn/model_options.py`) and cells
(`nn/layers.py`); `--eval.*` is in `evaluation/eval_options.py`. Checks, help texts and the flags of
the command line are derived from these declarations.
"""

import difflib
import importlib
import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mogrifier_jax import errors

KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple of numbers",
}
# NumPy's scalars count as numbers, too.
_ACCEPTED: dict[type, Any] = {
    bool: bool | np.bool_,
    int: numbers.Integral,
    float: numbers.Real,
    tuple: tuple | list,
}


class Option(NamedTuple):
    """The values that a setting may have; numbers must be finite."""

    kind: type
    default: Any = None  # None: absent unless set.
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf  # Like low and high, but excluding the limit itself.
    below: float = math.inf
    choices: tuple[str, ...] | str = ()  # Or where the package lists them, as "nn.layers.CELLS".
    required: bool = False
    meaning: str = ""  # For people: what `--mode=config` and `--help` show.

    def refusal(self, value: Any) -> str | None:
        """Why a value is refused, as words that follow "name value"; None if it is accepted."""
        if value is None:
            return "is missing; set it" if self.required else None
        accepted = _ACCEPTED.get(self.kind, self.kind)
        is_bool = isinstance(value, bool | np.bool_)
        if not isinstance(value, accepted) or (is_bool and self.kind is not bool):
            return f"must be {KINDS[self.kind]}"
        if self.kind in (int, float):
            return self._refusal_of_number(value)
        if self.kind is tuple:
            element = self._replace(kind=float, required=True)
            reasons = ((each, element.refusal(each)) for each in value)
            refused = ((errors.show(each), reason) for each, reason in reasons if reason)
            return next((f"of which {each} {reason}" for each, reason in refused), None)
        choices = self.list_choices()
        if not choices or value in choices:
            return None
        near = " or ".join(difflib.get_close_matches(value, choices))
        hint = f" (did you mean {near}?)" if near else ""
        return f"is unknown: choose one of {', '.join(choices)}{hint}"

    def _refusal_of_number(self, value: float) -> str | None:
        alternative = ", or left out" if self.default is None and not self.required else ""
        if not -math.inf < value < math.inf:
            return f"must be a finite number{alternative}"
        rules = (
            (value >= self.low, f"at least {self.low}"),
            (value <= self.high, f"at most {self.high}"),
            (value > self.above, f"above {self.above}"),
            (value < self.below, f"below {self.below}"),
        )
        return next((f"must be {rule}{alternative}" for holds, rule in rules if not holds), None)

    def list_choices(self) -> tuple[str, ...]:
        """The choices; a module that lists them is imported only now."""
        if isinstance(self.choices, tuple):
            return self.choices
        module, _, name = self.choices.rpartition(".")
        return tuple(getattr(importlib.import_module(f"{__package__}.{module}"), name))

    def describe(self) -> str:
        """The meaning, and the choices if there are some."""
        choices = self.list_choices()
        return f"{self.meaning}: {', '.join(choices)}" if choices else self.meaning


SEED = Option(int, 1, low=0, high=2**32 - 1)  # JAX silently truncates larger seeds.
COUNT = Option(int, low=1, high=10**9)


def check_values(
    values: Mapping[str, Any], declared: Mapping[str, Option], prefix: str = ""
) -> None:
    """Refuses the first value that its option does not allow."""
    for name, value in values.items():
        reason = declared[name].refusal(value)
        if reason:
            raise errors.UsageError(f"{prefix}{name} {errors.show(value)} {reason}")

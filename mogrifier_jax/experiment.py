"""What the files in experiments/ share: reading the variant after the colon."""

from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from mogrifier_jax import errors


def choose(variant: str, *groups: Sequence[str]) -> tuple[str, ...]:
    """One name from each group for a comma separated variant; the first name is the default.

    An empty default means "none of these".
    """
    names = [name.strip() for name in variant.split(",") if name.strip()]
    known = [name for group in groups for name in group if name]
    for name in names:
        if name not in known:
            raise errors.UsageError(
                f"variant {name!r} is unknown: this experiment has {', '.join(known)}"
            )
    chosen = []
    for group in groups:
        picks = [name for name in group if name in names]
        if len(picks) > 1:
            raise errors.UsageError(
                f"variants {' and '.join(picks)} exclude each other: choose one of "
                f"{', '.join(name for name in group if name)}"
            )
        chosen.append(picks[0] if picks else group[0])
    return tuple(chosen)


def schedule_options() -> dict[str, Any]:
    """Learning-rate drops and early stopping, off: the command line can switch them on."""
    return dict(
        drop_learning_rate_turns=config_dict.placeholder(int),
        drop_learning_rate_multiplier=1.0,
        drop_learning_rate_at_the_latest=config_dict.placeholder(int),
        early_stopping_turns=config_dict.placeholder(int),
        early_stopping_rampup_turns=0,
        early_stopping_slowest_rate=0.0,
        early_stopping_worst_xe_target=config_dict.placeholder(float),
    )

"""The options of `--mode=evaluate`, set as `--eval.name=value`: types, defaults and limits.

The command line is parsed with these in every mode, so this module imports little.
`methods.py` has the methods that read them.
"""

import math

from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.configs import Key

# Lists are written with commas.
OPTIONS = {
    "which": Key(str, "best", choices=("best", "latest")),
    "methods": Key(
        str, "deterministic"
    ),  # Some of methods.METHODS; empty: only shows known results.
    "splits": Key(str, "valid,test"),
    "text": Key(str),  # A file to score in place of the splits.
    "ensemble": Key(str),  # Token files to average; nothing else is done.
    "output": Key(str),  # A file for the Markdown, or for the tokens of the ensemble.
    "source_dir": Key(str),  # Where the corpus is now,
    "data_dir": Key(str),  # if it is not where the run had it.
    "temperature": Key(str, "search"),  # Or "minimise", "saved" (with the checkpoint), or a number.
    "stripes": Key(int, 1, low=0, high=10**5),  # One gives the final numbers; 0: as in training.
    "window": Key(int, low=1, high=10**6),  # As in training unless set.
    "seed": configs.SEED,  # Of the dropout masks.
    "samples": Key(int, 200, low=1, high=10**6),
    "samples_per_block": Key(int, low=1, high=10**6),  # By memory unless set.
    "average": Key(str, "arithmetic", choices="evaluation.montecarlo.AVERAGES"),
    "power": Key(float, 0.5, low=-1e3, high=1e3),
    "multipliers": Key(str, "1"),  # Of dropout rates; the best on validation is taken.
    "dyneval.window": Key(int, 10, low=1, high=10**6),
    "dyneval.learning_rates": Key(str, "1e-5"),  # The best on validation is taken.
    "dyneval.decay_rates": Key(str, "1e-3"),
    "dyneval.epsilons": Key(str, "1e-5"),
    "dyneval.batch_size": Key(int, 1024, low=1, high=10**6),  # Stripes of gradient statistics,
    "dyneval.max_windows": configs.COUNT._replace(default=500),  # and how many of their windows.
    "dyneval.parallel": Key(int, low=1, high=10**5),  # Adaptations at once; by memory unless set.
}
# The limits of the numbers in these lists.
LISTS = {
    "multipliers": Key(float, low=0.0, high=1e3),
    "dyneval.learning_rates": Key(float, low=0.0, high=1e6),
    "dyneval.decay_rates": Key(float, low=0.0, high=1e6),
    "dyneval.epsilons": Key(float, above=0.0, high=1e6),
}


def defaults() -> config_dict.ConfigDict:
    """All options at their defaults: deterministic, one stream, lamb's temperature search."""
    return configs.make_dict(OPTIONS).lock()


def check(options: config_dict.ConfigDict) -> None:
    """Refuses options with values that are out of range."""
    values = configs.flatten(options)
    configs.check_values(values, OPTIONS, prefix="eval.")
    for name in LISTS:
        parse_numbers(name, values[name])


def parse_numbers(name: str, text: str) -> list[float]:
    """Reads the numbers of an option that is a list, such as "0.6,0.7,0.8"."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise errors.UsageError(
            f"eval.{name} {text!r} is not a list of numbers; write it as 0.6,0.7,0.8"
        ) from None
    for number in numbers:
        configs.check_values({name: number}, LISTS, prefix="eval.")
    return numbers


def parse_temperature(text: str) -> float | None:
    """Reads a temperature, which multiplies the logits; None if the text names a rule."""
    if text in ("search", "minimise", "saved"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 10:
        raise errors.UsageError(
            f"--eval.temperature={text} is out of range: it multiplies the logits, so give a "
            "number in (0, 10], or 'search', 'minimise' or 'saved'"
        )
    return value

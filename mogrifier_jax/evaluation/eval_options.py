"""The methods and options of `--mode=evaluate`, set as `--eval.name=value`, and their limits.

The command line is parsed with these options in every mode, so this module imports little.
`methods.py` reads them.
"""

import math

from ml_collections import config_dict

from mogrifier_jax import configs, errors, options
from mogrifier_jax.options import Option

# The methods of `methods.Scorer`, in the order of tables.
METHODS = ("deterministic", "mc", "dyneval", "mc_dyneval")
# Lists are written with commas.
OPTIONS = {
    "which": Option(str, "best", choices=("best", "latest"), meaning="the checkpoint to score"),
    "methods": Option(str, "deterministic", meaning=f"{', '.join(METHODS)}; empty: show results"),
    "splits": Option(str, "valid,test", meaning="the splits of the corpus to score"),
    "text": Option(str, meaning="a file to score instead of the splits"),
    "ensemble": Option(str, meaning="token files to average, and nothing else"),
    "output": Option(str, meaning="a file for the Markdown, or for the tokens of the ensemble"),
    "source_dir": Option(str, meaning="where the files of the corpus are now, if they were moved"),
    "data_dir": Option(str, meaning="where the prepared corpus is now, if it was moved"),
    "temperature": Option(
        str, "search", meaning="search, minimise, saved (with the checkpoint), or a number"
    ),
    "stripes": Option(
        int, 1, low=0, high=10**5, meaning="1 gives the final numbers; 0 is as in training"
    ),
    "window": Option(int, low=1, high=10**6, meaning="time steps; as in training unless set"),
    "seed": options.SEED._replace(meaning="of the dropout masks"),
    "samples": Option(int, 200, low=1, high=10**6, meaning="mc: dropout samples"),
    "samples_per_block": Option(
        int, low=1, high=10**6, meaning="mc: samples at once; as memory allows unless set"
    ),
    "average": Option(
        str,
        "arithmetic",
        choices="evaluation.montecarlo.AVERAGES",
        meaning="mc: the mean of probabilities",
    ),
    "power": Option(float, 0.5, low=-1e3, high=1e3, meaning="mc: exponent of the power mean"),
    "multipliers": Option(
        str, "1", meaning="mc: factors on the dropout rates; the best on validation is used"
    ),
    "dyneval.window": Option(int, 10, low=1, high=10**6, meaning="time steps per update"),
    "dyneval.learning_rates": Option(str, "1e-5", meaning="the best on validation is used"),
    "dyneval.decay_rates": Option(str, "1e-3", meaning="pull towards the trained weights"),
    "dyneval.epsilons": Option(str, "1e-5", meaning="added to the gradient statistics"),
    "dyneval.batch_size": Option(
        int, 1024, low=1, high=10**6, meaning="stripes of the gradient statistics"
    ),
    "dyneval.max_windows": options.COUNT._replace(
        default=500, meaning="windows of the gradient statistics"
    ),
    "dyneval.parallel": Option(
        int, low=1, high=10**5, meaning="adaptations at once; as memory allows unless set"
    ),
}
# The methods that read an option, if not all do. Sections and single options have an entry.
READ_BY = {
    **dict.fromkeys(("window", "stripes"), ("deterministic", "mc")),
    **dict.fromkeys(("seed", "samples", "samples_per_block", "average"), ("mc", "mc_dyneval")),
    **dict.fromkeys(("power", "multipliers"), ("mc", "mc_dyneval")),
    "dyneval": ("dyneval", "mc_dyneval"),
}
# What tuning of dynamic evaluation reads. The study and its data decide the rest.
TUNING = (
    *("which", "source_dir", "data_dir", "temperature", "seed"),
    *("dyneval.batch_size", "dyneval.max_windows", "dyneval.parallel"),
)
# The limits of the numbers in these lists.
LISTS = {
    "multipliers": Option(float, low=0.0, high=1e3),
    "dyneval.learning_rates": Option(float, low=0.0, high=1e6),
    "dyneval.decay_rates": Option(float, low=0.0, high=1e6),
    "dyneval.epsilons": Option(float, above=0.0, high=1e6),
}


def readers(name: str) -> tuple[str, ...]:
    """The methods that read an option; none are listed if all do."""
    return READ_BY.get(name.partition(".")[0], ())


def defaults() -> config_dict.ConfigDict:
    """All options with their defaults: deterministic, one stream, lamb's temperature search."""
    return configs.make_dict(OPTIONS).lock()


def check(chosen: config_dict.ConfigDict) -> None:
    """Raises a UsageError for the first value that is out of range."""
    values = configs.flatten(chosen)
    options.check_values(values, OPTIONS, prefix="eval.")
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
        options.check_values({name: number}, LISTS, prefix="eval.")
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

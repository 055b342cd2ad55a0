"""Options of `--mode=evaluate`, set as `--eval.name=value`. Lists are written with commas."""

from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.configs import COUNT, SEED, Key

KEYS = {
    "which": Key(str, "best", choices=("best", "latest")),
    "methods": Key(str, "deterministic"),  # Of methods.METHODS; empty: reports what is known.
    "splits": Key(str, "valid,test"),
    "text": Key(str),  # To score in place of the splits.
    "ensemble": Key(str),  # Token files to average; nothing else is done.
    "output": Key(str),  # For Markdown, or the ensemble's token file.
    "source_dir": Key(str),  # Where the corpus is now,
    "data_dir": Key(str),  # if not where the run had it.
    "temperature": Key(str, "search"),  # Or "minimise", "saved" (with the checkpoint), or a number.
    "stripes": Key(int, 1, low=0, high=10**5),  # One gives the final numbers; 0: as in training.
    "window": Key(int, low=1, high=10**6),  # As in training unless set.
    "seed": SEED,  # Of the dropout masks.
    "samples": Key(int, 200, low=1, high=10**6),
    "samples_per_block": Key(int, low=1, high=10**6),  # By memory unless set.
    "average": Key(str, "arithmetic", choices="evaluation.montecarlo.AVERAGES"),
    "power": Key(float, 0.5, low=-1e3, high=1e3),
    "multipliers": Key(str, "1"),  # On dropout rates; of several the best on validation is taken.
    "dyneval.window": Key(int, 10, low=1, high=10**6),
    "dyneval.learning_rates": Key(str, "1e-5"),  # Of several the best on validation is taken.
    "dyneval.decay_rates": Key(str, "1e-3"),
    "dyneval.epsilons": Key(str, "1e-5"),
    "dyneval.batch_size": Key(int, 1024, low=1, high=10**6),  # Stripes of gradient statistics,
    "dyneval.max_windows": COUNT._replace(default=500),  # and how many of their windows.
    "dyneval.parallel": Key(int, low=1, high=10**5),  # Adaptations side by side; by memory.
}
# What their numbers may be.
LISTS = {
    "multipliers": Key(float, low=0.0, high=1e3),
    "dyneval.learning_rates": Key(float, low=0.0, high=1e6),
    "dyneval.decay_rates": Key(float, low=0.0, high=1e6),
    "dyneval.epsilons": Key(float, above=0.0, high=1e6),
}


def evaluation() -> config_dict.ConfigDict:
    """The defaults: deterministic, one stream, the temperature searched as lamb does."""
    return configs.make_dict(KEYS).lock()


def check(options: config_dict.ConfigDict) -> None:
    """Refuses what an option cannot be."""
    values = configs.flatten(options)
    configs.check_values(values, KEYS, prefix="eval.")
    for name in LISTS:
        parse_numbers(name, values[name])


def parse_numbers(name: str, text: str) -> list[float]:
    """A list written with commas."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise errors.UsageError(
            f"eval.{name} {text!r} is not a list of numbers; write it as 0.6,0.7,0.8"
        ) from None
    for number in numbers:
        configs.check_values({name: number}, LISTS, prefix="eval.")
    return numbers

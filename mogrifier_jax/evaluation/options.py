"""Options of `--mode=evaluate`, set as `--eval.name=value`. Lists are written with commas."""

from ml_collections import config_dict


def evaluation() -> config_dict.ConfigDict:
    """The defaults: deterministic, one stream, the temperature searched as lamb does."""
    options = config_dict.ConfigDict()
    options.which = "best"  # Or "latest".
    options.methods = "deterministic"  # Any of scoring.METHODS; empty only reports what is known.
    options.splits = "valid,test"
    options.text = config_dict.placeholder(str)  # A file to score in place of the splits.
    options.ensemble = config_dict.placeholder(str)  # Token files to average; nothing else is done.
    options.output = config_dict.placeholder(str)  # For Markdown, or the ensemble's token file.
    options.source_dir = config_dict.placeholder(str)  # Where the corpus is now,
    options.data_dir = config_dict.placeholder(str)  # if not where the run had it.
    options.temperature = "search"  # Or "minimise", "saved" (with the checkpoint), or a number.
    options.stripes = 1  # One stream gives the final numbers; 0 is as in training.
    options.window = config_dict.placeholder(int)  # As in training unless set.
    options.seed = 1  # Of the dropout masks.
    options.samples = 200
    options.samples_per_block = config_dict.placeholder(int)  # By memory unless set.
    options.average = "arithmetic"  # One of montecarlo.AVERAGES.
    options.power = 0.5
    options.multipliers = "1"  # On the dropout rates; of several the best on validation is taken.
    options.dyneval = dict(
        window=10,
        learning_rates="1e-5",  # Of several settings the best on validation is taken.
        decay_rates="1e-3",
        epsilons="1e-5",
        batch_size=1024,  # Stripes of the gradient statistics,
        max_windows=500,  # and how many of their windows.
        parallel=config_dict.placeholder(int),  # Adaptations side by side; by memory unless set.
    )
    return options.lock()

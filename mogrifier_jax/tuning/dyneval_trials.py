"""Trials of dynamic evaluation of a trained run; those with the same window run side by side."""

import copy
from collections.abc import Sequence

from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.evaluation import dyneval, methods
from mogrifier_jax.tuning import trials


class DynevalTrials:
    """Runs several trials in one program, each with its own adapting weights."""

    shared: tuple[str, ...] = ("window",)

    def __init__(self, trained: str, options: config_dict.ConfigDict):
        self.at_once = options.dyneval.parallel or 1
        self._trained, self._options = trained, options
        self.scorer = methods.Scorer(trained, options)
        self.unit = self.scorer.task.score_unit
        if "valid" not in self.scorer.task.splits:
            raise errors.UsageError(
                "dynamic evaluation is tuned on the validation set; remove --eval.text"
            )

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """Runs the trials of each window together, one window after another."""
        for window in dict.fromkeys(int(trial.params["window"]) for trial in asked):
            self._run_window(window, [t for t in asked if t.params["window"] == window])

    def _run_window(self, window: int, asked: Sequence[trials.Trial]) -> None:
        if self.scorer.options.dyneval.window != window:
            options = copy.deepcopy(self._options)
            with options.unlocked():
                options.dyneval.window = window
            self.scorer = methods.Scorer(self._trained, options)
        scorer, options = self.scorer, self.scorer.options.dyneval
        temperature = scorer.find_temperature(options.batch_size, window)
        settings = [
            dyneval.UpdateRule(*(t.params[name] for name in dyneval.UpdateRule._fields))
            for t in asked
        ]
        title = f"{len(asked)} settings, window {window}"
        outcomes = scorer.adapter("valid", len(settings))(
            scorer.params, settings, temperature, title=title
        )
        for trial, outcome in zip(asked, outcomes, strict=True):
            trial.note(temperature=temperature)
            if outcome.diverged_at is None:
                trial.finish(outcome.mean())
            else:
                trial.fail("diverged", methods.format_outcome(outcome))

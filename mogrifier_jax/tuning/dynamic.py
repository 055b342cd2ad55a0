"""Tuning of dynamic evaluation, on a run that is trained.

    python -m mogrifier_jax.main --mode=tune --study=dyneval --workdir=runs/ptb --parallel=8

Trials that have the window in common run side by side, each with its own adapting weights. All is
kept in `dyneval_study` of the run's workdir; `worker.py` does the rest.
"""

import copy
import os
from collections.abc import Sequence

from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.evaluation import dyneval, methods
from mogrifier_jax.evaluation import options as evaluation_options
from mogrifier_jax.tuning import report, studies, trials, worker


def tune(
    trained: str,
    options: config_dict.ConfigDict,
    *,
    num_trials: int,
    parallel: int = 1,
    storage: str | None = None,
    sampler: str = "gp",
) -> list[trials.Record]:
    """Searches for the best settings on the validation set; `options` are those of evaluation."""
    worker.check_numbers(num_trials, parallel)
    evaluation_options.check(options)
    if not trained:
        raise errors.UsageError("--workdir is missing; give that of a trained run")
    adapting = Adapting(trained, options)
    tuned = studies.load(f"dyneval_{'word' if adapting.unit == 'ppl' else 'character'}")
    workdir = os.path.join(trained, "dyneval_study")
    name = f"{os.path.basename(os.path.abspath(trained))}-{tuned.name}"
    queue = worker.open_queue(
        tuned,
        workdir,
        name=name,
        num_trials=num_trials,
        storage=storage,
        sampler=sampler,
        seed=options.seed,
        step=adapting.scorer.loaded.info["step"],
    )
    worker.work(queue, adapting, parallel, tuned.shapes)
    report.write(name, queue.records(), tuned, workdir, unit=adapting.unit)
    return queue.records()


class Adapting:
    """Runs trials of dynamic evaluation; those of the same window at once."""

    def __init__(self, trained: str, options: config_dict.ConfigDict):
        self._trained, self._options = trained, options
        self.scorer = methods.Scorer(trained, options)
        self.unit = self.scorer.texts.unit
        if "valid" not in self.scorer.texts.names:
            raise errors.UsageError("settings are chosen on the validation set; drop --eval.text")

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """Window by window."""
        for window in dict.fromkeys(trial.params["window"] for trial in asked):
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
                trial.finish(outcome.nats)
            else:
                trial.fail("diverged", methods.show_outcome(outcome))

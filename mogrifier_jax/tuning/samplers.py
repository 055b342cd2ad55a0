"""The samplers that suggest the settings of trials, and the pruner that stops trials early.

They are Optuna's samplers and its median pruner, with two changes: suggestions are reproducible,
and trials without a value count as bad ones instead of being ignored.
"""

import copy
import importlib.util
import math
from collections.abc import Container, Sequence
from typing import Any, cast

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from mogrifier_jax import errors

SAMPLERS = ("gp", "tpe", "random")


def check_sampler(name: str) -> None:
    """Refuses a sampler that is unknown or whose package is not installed."""
    if name not in SAMPLERS:
        raise errors.UsageError(f"--sampler={name} is unknown; use {', '.join(SAMPLERS)}")
    if name == "gp" and importlib.util.find_spec("torch") is None:
        raise errors.UsageError(
            "--sampler=gp needs torch, which is not installed; pip install torch (the CPU build "
            "is enough), or use --sampler=tpe"
        )


def make_pruner(turns: int) -> optuna.pruners.BasePruner:
    """A pruner that stops trials worse than the median, after the first tenth of their turns."""
    return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=max(1, turns // 10))


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """The sampler with this name, whose draws follow from the seed."""
    return _SeededSampler(name, seed)


class _SeededSampler(optuna.samplers.BaseSampler):
    """A sampler whose draws depend only on a seed, the number of the trial and the results so far.

    So a study can be repeated, and workers that start at the same time draw different values.
    """

    def __init__(self, name: str, seed: int):
        self._name, self._seed = name, seed
        self._sampler = _make_optuna_sampler(name, seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        seed = (self._seed << 20) % 2**32 ^ trial.number
        self._sampler = _make_optuna_sampler(self._name, seed)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._sampler.infer_relative_search_space(_count_failures(study), trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler.sample_relative(_count_failures(study), trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._sampler.sample_independent(
            _count_failures(study), trial, param_name, param_distribution
        )

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        self._sampler.after_trial(study, trial, state, values)


def _make_optuna_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)


def _count_failures(study: optuna.Study) -> optuna.Study:
    """The study as samplers should see it."""
    return cast(optuna.Study, _FailuresAsWorst(study))


class _FailuresAsWorst:
    """A view of a study in which diverged and infeasible trials have the worst value of all.

    Optuna's samplers ignore failed trials, so they would keep suggesting such settings.
    """

    def __init__(self, study: optuna.Study):
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        """Overrides the method through which Optuna's samplers read all trials."""
        known = self._study._get_trials(deepcopy, None, use_cache)
        values = [t.value for t in known if t.state == TrialState.COMPLETE and t.value is not None]
        # Worse than every other value, but not so far away that it would flatten the others.
        worst = math.nextafter(max(values, default=0.0), math.inf)
        trials = []
        for trial in known:
            if trial.user_attrs.get("outcome") in ("diverged", "infeasible"):
                trial = copy.copy(trial)
                trial.state, trial.value = TrialState.COMPLETE, worst
            trials.append(trial)
        return [trial for trial in trials if states is None or trial.state in states]

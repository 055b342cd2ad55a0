"""The methods by which `--mode=evaluate` scores the texts of a trained run.

A method first chooses on the validation set what the options leave open: the temperature, the
dropout multiplier, or the settings of dynamic evaluation. Then it returns a function that scores
the text of a given name. `evaluate_command.py` calls the methods and saves their results, and
`eval_options.py` lists the names of the methods and the options.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.sharding import Mesh
from ml_collections import config_dict

from mogrifier_jax import configs, errors, files, partitioning
from mogrifier_jax.evaluation import (
    dyneval,
    eval_options,
    gradient_statistics,
    loading,
    montecarlo,
    scored_texts,
)
from mogrifier_jax.nn import models
from mogrifier_jax.training import host_arrays, runs, scoring, turn_evaluation

TEMPERATURES = (0.5, 1.5)  # The interval that `minimise` searches,
TOLERANCE = 1e-3  # and the width at which it stops.

# From the name of a text to its scores.
ScoreFn = Callable[[str], scoring.TokenScores | dyneval.Outcome]
# Within `Scorer` the name dyneval is its method, so an annotation needs another name for this.
Adapter = dyneval.DynamicEvaluation


class Scorer:
    """A trained run and the texts to score.

    Each method in `eval_options.METHODS` returns the details that are kept with its results, and a
    ScoreFn.
    """

    def __init__(self, folder: str, options: config_dict.ConfigDict):
        self.folder, self.options = folder, options
        # The corpus is read at most once, all methods share the gradient statistics, and compiled
        # programs are used again. The caches belong to this scorer, so they are freed with it.
        for name in ("read_corpus", "sampler", "adapter", "compute_statistics"):
            setattr(self, name, functools.cache(getattr(self, name)))
        self._fixed_temperature = eval_options.parse_temperature(options.temperature)
        self.mesh = partitioning.make_mesh()
        self.loaded = loading.load_run(folder, options.which, self.mesh)
        self.model, self.params = self.loaded.model, self.loaded.params
        if options.text:
            self.task, self.origin = scored_texts.read_file(self.loaded, options.text)
            self.names = self.task.splits
        else:
            self.task, self.origin = self.read_corpus()
            self.names = tuple(options.splits.split(","))
        for name in self.names:
            self.task.check_split(name)
        free = ("source_dir", "data_dir", "text", "output")
        values = {f"eval.{n}": v for n, v in configs.flatten(options).items() if n not in free}
        values |= {"the checkpoint's step": self.loaded.info["step"]}
        texts = {f"the text of {name}": v for name, v in self.task.digests.items()}
        host_arrays.check_same(values | texts)
        config = self.loaded.config
        self.batch_size = config.data.batch_size // config.optimizer.get("accumulate", 1)
        self.window = options.window or config.data.window
        self.dropout = runs.make_dropout(self.model, **config.dropout)
        self.key = jax.random.key(options.seed)

    def read_corpus(self) -> scored_texts.ScoredTexts:
        """Reads the corpus of the run; a file is scored without it, except by `dyneval`."""
        return scored_texts.read_splits(self.loaded, self.options.source_dir, self.options.data_dir)

    def deterministic(self) -> tuple[files.JsonObject, ScoreFn]:
        """One pass without dropout and without adaptation."""
        temperature = self.find_temperature(self.batch_size, self.window)

        def score(name: str) -> scoring.TokenScores:
            stripes = self.num_stripes(name)
            mesh = self.busy_mesh(stripes)
            plan = self.task.plan(name, stripes, window=self.window, mesh=mesh)
            score_plan = scoring.Deterministic(self.model, plan, chunk=64)
            return score_plan(partitioning.replicate(self.params, mesh), temperature, title=name)

        return {"temperature": temperature, "window": self.window}, score

    def mc(self) -> tuple[files.JsonObject, ScoreFn]:
        """Monte-Carlo dropout, with the dropout multiplier that is best on validation."""

        def score(name: str, multiplier: float, temperature: float) -> scoring.TokenScores:
            title = f"mc {name}, dropout times {multiplier:g}"
            sampler = self.sampler(name, self.num_stripes(name), self.window)
            return sampler(self.params, temperature, None, title, multiplier)

        chosen, score_fn = self.choose_multiplier(self.batch_size, self.window, score)
        return chosen | {"window": self.window} | self.sampling_options(), score_fn

    def dyneval(self) -> tuple[files.JsonObject, ScoreFn]:
        """Dynamic evaluation, with the settings that are best on validation."""
        options = self.options.dyneval
        temperature = self.find_temperature(options.batch_size, options.window)
        chosen = self.choose_setting(temperature)

        def score(name: str) -> dyneval.Outcome:
            if name in chosen.outcomes:
                return chosen.outcomes[name]
            adapt, title = self.adapter(name, 1), f"dyneval {name}"
            return adapt(self.params, [chosen.rule], temperature, title=title)[0]

        details = self.adaptation_options() | chosen.rule._asdict()
        details |= self.check_rounding(chosen, temperature)
        return {"temperature": temperature} | details, score

    def mc_dyneval(self) -> tuple[files.JsonObject, ScoreFn]:
        """Monte-Carlo dropout whose samples each adapt; settings are chosen without dropout."""
        if self.options.average != "arithmetic":
            raise errors.UsageError(
                f"mc_dyneval with the {self.options.average} average is not available; "
                "use --eval.average=arithmetic"
            )
        options = self.options.dyneval
        chosen = self.choose_setting(self._fixed_temperature or self.loaded.temperature or 1.0)

        def score(name: str, multiplier: float, temperature: float) -> dyneval.Outcome:
            samples, title = self.options.samples, f"mc_dyneval {name}"
            return self.adapter(name, samples, self.dropout).sample(
                self.params, chosen.rule, self.key, samples, temperature, multiplier, title=title
            )

        best, score_fn = self.choose_multiplier(options.batch_size, options.window, score)
        details = self.adaptation_options() | chosen.rule._asdict()
        details |= self.check_rounding(chosen, best["temperature"])
        return best | details | self.sampling_options(), score_fn

    def check_rounding(self, chosen: "ChosenRule", temperature: float) -> dict[str, bool]:
        """Whether the scores depend on rounding errors, which a warning then says.

        It runs the program that has scored the first text, or will score it; only Monte-Carlo
        samples have another program.
        """
        name = self.names[0]
        count = chosen.num_candidates if name in chosen.outcomes else 1
        adapt = self.adapter(name, count)
        distance = adapt.rounding_nats(self.params, chosen.rule, temperature, count)
        if distance <= dyneval.CHAOTIC_NATS:
            return {"chaotic": False}
        logging.warning(
            "dynamic evaluation at learning rate %g is chaotic: two runs that begin a rounding "
            "apart differ by %.2g nats a token after %d windows or fewer, so other machines and "
            "versions will find other scores; use a lower rate",
            chosen.rule.learning_rate,
            distance,
            dyneval.ROUNDING_WINDOWS,
        )
        return {"chaotic": True}

    def sampling_options(self) -> files.JsonObject:
        """The options of Monte-Carlo samples that are kept with a result."""
        names = ("samples", "average", "seed")
        power = {"power": self.options.power} if self.options.average == "power" else {}
        return {name: self.options[name] for name in names} | power

    def adaptation_options(self) -> files.JsonObject:
        """The options of dynamic evaluation that are kept with a result."""
        losses = self.compute_statistics().losses
        assert losses is not None, "only a DynamicEvaluation drops them"
        return {
            "window": self.options.dyneval.window,
            "stripes": 1,  # The weights adapt along the text, so it is one stream.
            "statistics_windows": len(losses),
        }

    def busy_mesh(self, count: int) -> Mesh:
        """The part of the mesh that `count` stripes or adaptations can keep busy."""
        if jax.process_count() > 1:  # Every process must take part.
            return self.mesh
        return partitioning.shrink(self.mesh, min(count, self.mesh.shape["data"]))

    def num_stripes(self, name: str) -> int:
        """How many stripes a text is divided into."""
        if not self.task.carries:
            return self.batch_size  # Independent examples have the same scores in any batch.
        lines = self.loaded.config.evaluation.lines_per_stripe
        return self.options.stripes or turn_evaluation.num_stripes(
            self.task, name, self.batch_size, lines
        )

    def sampler(self, name: str, stripes: int, window: int) -> montecarlo.MonteCarlo:
        """Monte-Carlo dropout over a text, set up from the options."""
        return montecarlo.MonteCarlo(
            self.model,
            self.task.plan(name, stripes, window=window),
            self.dropout,
            key=self.key,
            samples=self.options.samples,
            average=montecarlo.make_average(self.options.average, self.options.power),
            samples_per_block=self.options.samples_per_block,
            mesh=self.mesh,
        )

    def adapter(self, name: str, count: int, dropout: models.Dropout | None = None) -> Adapter:
        """Dynamic evaluation of a text as one stream, with `count` adaptations."""
        plan = self.task.plan(name, 1, window=self.options.dyneval.window)
        parallel, mesh = self.options.dyneval.parallel, self.busy_mesh(count)
        return dyneval.DynamicEvaluation(
            self.model,
            plan,
            self.compute_statistics(),
            dropout=dropout,
            parallel=parallel,
            mesh=mesh,
        )

    def compute_statistics(self) -> gradient_statistics.Statistics:
        """Gradient statistics from a pass over the training text, or from the workdir."""
        options, corpus = self.options.dyneval, self.read_corpus().task
        plan = corpus.plan("train", options.batch_size, window=options.window, mesh=self.mesh)
        return gradient_statistics.read_or_compute(
            self.folder,
            self.loaded.info["step"],
            self.model,
            self.params,
            plan,
            max_windows=options.max_windows,
        )

    def find_temperature(
        self, batch_size: int, window: int, multiplier: float | None = None
    ) -> float:
        """The logit scale, found by the rule that the options name.

        As in lamb, the search reads short stripes of the validation text.

        Args:
          multiplier: scales the dropout rates of Monte-Carlo samples; None is without dropout.
        """
        if self._fixed_temperature:
            return self._fixed_temperature
        rule = self.options.temperature
        self.require_validation("temperatures", rule == "minimise")
        # A file is scored without the validation set, on which training found the saved value.
        if rule == "saved" or self.options.text:
            if self.loaded.temperature is None:
                raise errors.UsageError(
                    f"the {self.loaded.info['which']} checkpoint of {self.folder} has no "
                    "temperature with it; give --eval.temperature, or use --eval.which=best"
                )
            return self.loaded.temperature
        score = self.score_temperatures(batch_size, window, multiplier)
        if rule == "minimise":
            return minimise(lambda t: score((t,))[0], *TEMPERATURES)
        at_once = turn_evaluation.AT_ONCE if multiplier is None else 1
        return turn_evaluation.search_temperature(score, at_once)

    def score_temperatures(
        self, batch_size: int, window: int, multiplier: float | None = None
    ) -> Callable[[Sequence[float]], Sequence[float]]:
        """A function from logit scales to validation nats."""
        windows = max(1, self.loaded.config.evaluation.temperature_tokens // batch_size // window)
        if multiplier is not None:
            sampler = self.sampler("valid", batch_size, window)
            return lambda scales: [
                sampler(self.params, scale, windows, multiplier=multiplier).mean()
                for scale in scales
            ]
        plan = self.task.plan("valid", batch_size, window=window, mesh=self.mesh)
        score_plan = scoring.Deterministic(self.model, plan)

        def score(scales: Sequence[float]) -> Sequence[float]:
            sums = score_plan.sums(self.params, scales, windows)
            return sums.total / sums.count

        return score

    def choose_multiplier(
        self, batch_size: int, window: int, score: Callable[..., Any]
    ) -> tuple[dict[str, float], ScoreFn]:
        """Fixes the multiplier and temperature of score(name, multiplier, temperature).

        The dropout multiplier is the one that is best on validation, each with its temperature.
        """
        if not jax.tree.leaves(self.dropout):
            logging.warning(
                "%s was trained without dropout, so all samples are the same; the method without "
                "mc gives the same scores sooner",
                self.folder,
            )
        score = functools.cache(score)  # The validation text is one of the texts to score.
        multipliers = eval_options.parse_numbers("multipliers", self.options.multipliers)
        candidates = [(m, self.find_temperature(batch_size, window, m)) for m in multipliers]
        best = 0
        if len(candidates) > 1:
            self.require_validation("multipliers")
            nats = [score("valid", *candidate).mean() for candidate in candidates]
            for (multiplier, temperature), value in zip(candidates, nats, strict=True):
                candidate = f"dropout times {multiplier:g}, temperature {temperature:g}"
                logging.info("%s: %.4f nats on validation", candidate, value)
            best = index_of_best(nats)
        chosen = dict(zip(("multiplier", "temperature"), candidates[best], strict=True))
        return chosen, lambda name: score(name, *candidates[best])

    def choose_setting(self, temperature: float) -> "ChosenRule":
        """The update rule of the grid in the options that is best on validation."""
        lists = self.options.dyneval
        names = ("learning_rates", "decay_rates", "epsilons")
        parse = eval_options.parse_numbers
        grid = itertools.product(*(parse(f"dyneval.{name}", lists[name]) for name in names))
        rules = list(itertools.starmap(dyneval.UpdateRule, grid))
        if len(rules) == 1:
            return ChosenRule(rules[0], {}, 1)
        self.require_validation("dyneval settings")
        adapt = self.adapter("valid", len(rules))
        outcomes = adapt(self.params, rules, temperature, title="dyneval settings")
        for rule, outcome in zip(rules, outcomes, strict=True):
            numbers = ", ".join(f"{name} {value:g}" for name, value in rule._asdict().items())
            logging.info("%s: %s", numbers, format_outcome(outcome))
        best = index_of_best([outcome.mean() for outcome in outcomes])
        return ChosenRule(rules[best], {"valid": outcomes[best]}, len(rules))

    def require_validation(self, what: str, needed: bool = True) -> None:
        """Refuses to choose among values when a file is scored: it has no validation set."""
        if self.options.text and needed:
            raise errors.UsageError(
                f"one of several {what} is chosen on the validation set, which --eval.text leaves "
                "out; give one value"
            )


class ChosenRule(NamedTuple):
    """An update rule of dynamic evaluation, and what is known from choosing it."""

    rule: dyneval.UpdateRule
    outcomes: dict[str, dyneval.Outcome]  # By the name of the text.
    num_candidates: int


def minimise(f: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search for the x at which f, which must be unimodal, is smallest."""
    ratio = (math.sqrt(5) - 1) / 2
    x = [high - ratio * (high - low), low + ratio * (high - low)]
    y = [f(x[0]), f(x[1])]
    while high - low > TOLERANCE:
        if y[0] <= y[1]:
            high = x[1]
            x = [high - ratio * (high - low), x[0]]
            y = [f(x[0]), y[0]]
        else:
            low = x[0]
            x = [x[1], low + ratio * (high - low)]
            y = [y[1], f(x[1])]
    return (low + high) / 2


def index_of_best(nats: Sequence[float]) -> int:
    """The index of the smallest finite value; 0 if no value is finite."""
    return min(range(len(nats)), key=lambda i: nats[i] if math.isfinite(nats[i]) else math.inf)


def format_outcome(outcome: dyneval.Outcome) -> str:
    """The score as text; if it diverged, the window where it did and the score up to it."""
    if outcome.diverged_at is None:
        return f"{outcome.mean():.4f} nats"
    return (
        f"diverged at window {outcome.diverged_at}, after {outcome.scores.mean():.4f} nats over "
        f"{len(outcome.scores.nats):,} tokens"
    )

"""The methods that score the texts of a trained run, and the options of `--mode=evaluate`.

A method first chooses on the validation set what the options leave open: the temperature, the
dropout multiplier, or the settings of dynamic evaluation. Then it returns a function that scores
the text of a given name. `scoring.py` calls the methods and keeps the results.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh
from ml_collections import config_dict

from mogrifier_jax import errors, partitioning
from mogrifier_jax.evaluation import dyneval, eval_options, montecarlo, pretrained
from mogrifier_jax.nn import models
from mogrifier_jax.training import evaluate, runs

METHODS = ("deterministic", "mc", "dyneval", "mc_dyneval")
TEMPERATURES = (0.5, 1.5)  # `minimise` searches between these,
TOLERANCE = 1e-3  # until the interval is this small.

ScoreFn = Callable[[str], evaluate.TokenScores | dyneval.Outcome]  # Of the text with this name.


class Scorer:
    """A trained run and the texts to score; each method returns its details and a ScoreFn."""

    def __init__(self, folder: str, options: config_dict.ConfigDict):
        self.folder, self.options = folder, options
        self._fixed_temperature = eval_options.parse_temperature(options.temperature)
        self.mesh = partitioning.make_mesh()
        self.loaded = pretrained.load_weights(folder, options.which, self.mesh)
        self.model, self.params = self.loaded.model, self.loaded.params
        if options.text:
            self.texts = pretrained.read_file(self.loaded, options.text)
            self.names = self.texts.names
        else:
            self.texts = self.splits
            self.names = tuple(options.splits.split(","))
        for name in self.names:
            self.texts.check(name)
        config = self.loaded.config
        self.batch_size = config.data.batch_size // config.optimizer.get("accumulate", 1)
        self.window = options.window or config.data.window
        self.dropout = runs.make_dropout(self.model, **config.dropout)
        self.key = jax.random.key(options.seed)

    @functools.cached_property
    def splits(self) -> pretrained.Texts:
        """The corpus of the run; it is read only if a method needs it."""
        return pretrained.read_splits(self.loaded, self.options.source_dir, self.options.data_dir)

    def deterministic(self) -> tuple[dict[str, Any], ScoreFn]:
        """One pass without dropout and without adaptation."""
        temperature = self.find_temperature(self.batch_size, self.window)

        def score(name):
            stripes = self.num_stripes(name)
            mesh = self.share(stripes)
            plan = self.texts.plan(name, stripes, window=self.window, mesh=mesh)
            run = evaluate.Deterministic(self.model, plan, chunk=64)
            return run(partitioning.replicate(self.params, mesh), temperature, title=name)

        return {"temperature": temperature, "window": self.window}, score

    def mc(self) -> tuple[dict[str, Any], ScoreFn]:
        """Monte-Carlo dropout, with the multiplier that is best on validation."""

        def score(name, multiplier, temperature):
            title = f"mc {name}, dropout times {multiplier:g}"
            run = self.sampler(name, self.num_stripes(name), self.window)
            return run(self.params, temperature, None, title, multiplier)

        chosen, score_fn = self.choose_multiplier(self.batch_size, self.window, score)
        return chosen | {"window": self.window} | self.sampling, score_fn

    def dyneval(self) -> tuple[dict[str, Any], ScoreFn]:
        """Dynamic evaluation, with the settings that are best on validation."""
        options = self.options.dyneval
        temperature = self.find_temperature(options.batch_size, options.window)
        setting, known = self.choose_setting(temperature)

        def score(name):
            if name in known:
                return known[name]
            run = self.adapter(name, 1)
            return run(self.params, [setting], temperature, title=f"dyneval {name}")[0]

        adapted = self.describe_adaptation(self.compute_statistics())
        return {"temperature": temperature} | adapted | setting._asdict(), score

    def mc_dyneval(self) -> tuple[dict[str, Any], ScoreFn]:
        """Monte-Carlo dropout whose samples each adapt; settings are chosen without dropout."""
        if self.options.average != "arithmetic":
            raise errors.UsageError(
                f"mc_dyneval with the {self.options.average} average is not available; "
                "use --eval.average=arithmetic"
            )
        options = self.options.dyneval
        setting, _ = self.choose_setting(self._fixed_temperature or self.loaded.temperature or 1.0)

        def score(name, multiplier, temperature):
            samples, title = self.options.samples, f"mc_dyneval {name}"
            return self.adapter(name, samples, self.dropout).sample(
                self.params, setting, self.key, samples, temperature, multiplier, title=title
            )

        chosen, score_fn = self.choose_multiplier(options.batch_size, options.window, score)
        adapted = self.describe_adaptation(self.compute_statistics())
        return chosen | adapted | setting._asdict() | self.sampling, score_fn

    @property
    def sampling(self) -> dict[str, Any]:
        """The options of Monte-Carlo samples that are kept with a result."""
        names = ("samples", "average", "seed")
        power = {"power": self.options.power} if self.options.average == "power" else {}
        return {name: self.options[name] for name in names} | power

    def describe_adaptation(self, statistics: Any) -> dict[str, Any]:
        """The options of dynamic evaluation that are kept with a result; it reads one stream."""
        windows = len(statistics.losses)
        return {
            "window": self.options.dyneval.window,
            "stripes": 1,
            "statistics_windows": windows,
        }

    def share(self, count: int) -> Mesh:
        """The part of the mesh that `count` stripes or adaptations keep busy."""
        if jax.process_count() > 1:  # Every process must take part.
            return self.mesh
        return partitioning.shrink(self.mesh, min(count, self.mesh.shape["data"]))

    def num_stripes(self, name: str) -> int:
        """How many stripes a text is cut into."""
        if not self.texts.carries:
            return self.batch_size  # Examples carry no state, so the number changes no score.
        lines = self.loaded.config.evaluation.lines_per_stripe
        return self.options.stripes or evaluate.num_stripes(
            self.texts, name, self.batch_size, lines
        )

    @functools.cache  # noqa: B019  One sampler serves all multipliers and temperatures.
    def sampler(self, name: str, stripes: int, window: int) -> montecarlo.MonteCarlo:
        """Monte-Carlo dropout over a text, set up from the options."""
        return montecarlo.MonteCarlo(
            self.model,
            self.texts.plan(name, stripes, window=window),
            self.dropout,
            key=self.key,
            samples=self.options.samples,
            average=montecarlo.make_average(self.options.average, self.options.power),
            samples_per_block=self.options.samples_per_block,
            mesh=self.mesh,
        )

    def adapter(self, name: str, count: int, dropout: models.Dropout | None = None):
        """Dynamic evaluation of a text as one stream, with `count` adaptations."""
        plan = self.texts.plan(name, 1, window=self.options.dyneval.window)
        parallel, mesh = self.options.dyneval.parallel, self.share(count)
        return dyneval.DynamicEvaluation(
            self.model,
            plan,
            self.compute_statistics(),
            dropout=dropout,
            parallel=parallel,
            mesh=mesh,
        )

    @functools.cache  # noqa: B019  All methods need the same statistics.
    def compute_statistics(self) -> Any:
        """Passes over the training text for the statistics of its gradients, or reads them."""
        options = self.options.dyneval
        size, window, most = options.batch_size, options.window, options.max_windows
        plan = self.splits.plan("train", size, window=window, mesh=self.mesh)
        step = self.loaded.info["step"]
        return dyneval.cached_statistics(
            self.folder, step, self.model, self.params, plan, max_windows=most
        )

    def find_temperature(
        self, batch_size: int, window: int, multiplier: float | None = None
    ) -> float:
        """The logit scale, found by the rule that the options name.

        Like lamb, it searches on short stripes of the validation text.

        Args:
          multiplier: scales the dropout rates of Monte-Carlo samples; None: without dropout.
        """
        if self._fixed_temperature:
            return self._fixed_temperature
        rule = self.options.temperature
        self.require_validation("temperatures", rule == "minimise")
        # A file is scored without the validation set. Training found the saved value on it.
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
        at_once = evaluate.AT_ONCE if multiplier is None else 1
        return evaluate.search_temperature(score, at_once)

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
        plan = self.texts.plan("valid", batch_size, window=window, mesh=self.mesh)
        run = evaluate.Deterministic(self.model, plan)

        def score(scales):
            sums = run.sums(self.params, scales, windows)
            return sums.total / sums.count

        return score

    def choose_multiplier(
        self, batch_size: int, window: int, score: Callable[..., Any]
    ) -> tuple[dict[str, Any], ScoreFn]:
        """Fixes the multiplier and temperature of score(name, multiplier, temperature).

        The dropout multiplier is the one that is best on validation.
        """
        if not jax.tree.leaves(self.dropout):
            logging.warning(
                "%s was trained without dropout, so all samples are the same; the method without "
                "mc gives their scores at once",
                self.folder,
            )
        score = functools.cache(score)  # The validation text may be asked for again.
        multipliers = eval_options.parse_numbers("multipliers", self.options.multipliers)
        candidates = [(m, self.find_temperature(batch_size, window, m)) for m in multipliers]
        best = 0
        if len(candidates) > 1:
            self.require_validation("multipliers")
            nats = [score("valid", *candidate).mean() for candidate in candidates]
            for (multiplier, temperature), value in zip(candidates, nats, strict=True):
                made = f"dropout times {multiplier:g}, temperature {temperature:g}"
                logging.info("%s: %.4f nats on validation", made, value)
            best = best_of(nats)
        chosen = dict(zip(("multiplier", "temperature"), candidates[best], strict=True))
        return chosen, lambda name: score(name, *candidates[best])

    def choose_setting(self, temperature: float):
        """The best setting of dynamic evaluation, and the outcomes that are already known."""
        given = self.options.dyneval
        names = ("learning_rates", "decay_rates", "epsilons")
        parse = eval_options.parse_numbers
        grid = itertools.product(*(parse(f"dyneval.{name}", given[name]) for name in names))
        settings = list(itertools.starmap(dyneval.UpdateRule, grid))
        if len(settings) == 1:
            return settings[0], {}
        self.require_validation("dyneval settings")
        run = self.adapter("valid", len(settings))
        outcomes = run(self.params, settings, temperature, title="dyneval settings")
        for setting, outcome in zip(settings, outcomes, strict=True):
            numbers = ", ".join(f"{name} {value:g}" for name, value in setting._asdict().items())
            logging.info("%s: %s", numbers, show_outcome(outcome))
        best = best_of([outcome.mean() for outcome in outcomes])
        return settings[best], {"valid": outcomes[best]}

    def require_validation(self, what: str, needed: bool = True) -> None:
        """Refuses to choose among values when a file is scored: it has no validation set."""
        if self.options.text and needed:
            raise errors.UsageError(
                f"one of several {what} is chosen on the validation set, which --eval.text leaves "
                "out; give one value"
            )


def minimise(f: Callable[[float], float], low: float, high: float) -> float:
    """The place of the minimum of f by golden-section search; f has one between low and high."""
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


def best_of(nats: Sequence[float]) -> int:
    """The index of the smallest finite value; 0 if no value is finite."""
    return min(range(len(nats)), key=lambda i: nats[i] if math.isfinite(nats[i]) else math.inf)


def show_outcome(outcome: dyneval.Outcome) -> str:
    """The score as text; if it diverged, the window and the score up to it."""
    if outcome.diverged_at is None:
        return f"{outcome.mean():.4f} nats"
    return (
        f"diverged at window {outcome.diverged_at}, after {outcome.scores.mean():.4f} nats over "
        f"{len(outcome.scores.nats):,} tokens"
    )

"""What one compiled pass saves: dynamic evaluation and Monte-Carlo dropout against Python loops.

    python -m benchmarks.evaluation --sizes=tiny,small --repeats=7

Dynamic evaluation is compared with a loop that calls a jitted gradient step, update included,
for each window and reads its loss, as a running score needs. Monte-Carlo dropout of S samples
is compared with S passes one after the other, each of them compiled as a whole, too. Both sides
compute the same numbers, which is checked first. Weights are random.
"""

import argparse
import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from mogrifier_jax.data import tasks, vocabularies
from mogrifier_jax.evaluation import dyneval, gradient_statistics, montecarlo
from mogrifier_jax.nn import models
from mogrifier_jax.training import scoring

SETTING = dyneval.UpdateRule(learning_rate=1e-5, decay_rate=1e-3, epsilon=1e-5)
SETTINGS = 8  # Side by side, as in tuning.
KEY = jax.random.key(0)
DROPOUT = models.Dropout(input=0.1, state=0.1, output=0.1)


class Size(NamedTuple):
    """H hidden, V vocabulary, T window, and how many tokens are scored."""

    hidden: int
    vocab: int
    window: int
    tokens: int


SIZES = {
    "tiny": Size(hidden=16, vocab=50, window=5, tokens=2_000),
    "small": Size(hidden=64, vocab=100, window=10, tokens=2_000),
    "medium": Size(hidden=256, vocab=1_000, window=20, tokens=1_000),
}


def make_model(size: Size):
    """A Mogrifier with weights that no initialiser had to be compiled for."""
    model = models.LanguageModel(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        embedding_size=size.hidden,
        num_layers=2,
        tied_embeddings=True,
        cell_options={"rounds": 5, "rank": 16},
    )
    shapes = jax.eval_shape(lambda: model.init(KEY, **model.example())["params"])
    draw = np.random.default_rng(0)
    return model, jax.tree.map(lambda a: jnp.asarray(draw.normal(0, 0.1, a.shape), a.dtype), shapes)


def make_plan(size: Size) -> tasks.Plan:
    """One stream of random tokens."""
    ids = np.random.default_rng(1).integers(0, size.vocab, size.tokens)
    split = vocabularies.EncodedSplit(ids.astype(np.int32), np.array([0]))
    return tasks.plan_text(split, 0, 1, size.window)


def dynamic_contenders(size: Size, settings: int = 1):
    """The compiled pass, and the loop over windows."""
    model, params = make_model(size)
    plan = make_plan(size)
    # Any statistics will do.
    ones = jax.tree.map(jnp.ones_like, params)
    statistics = gradient_statistics.Statistics(ones, jnp.float32(1), np.zeros(1))
    whole = dyneval.DynamicEvaluation(model, plan, statistics)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(adapted, carry, window):
        batch = plan.batch_at(plan.stream, window)

        def loss_fn(adapted):
            end, nats = model.apply({"params": adapted}, batch, carry, method="batch_nats")
            return nats.sum(), end

        (loss, carry_), grads = jax.value_and_grad(loss_fn, has_aux=True)(adapted)
        return dyneval.update_weights(adapted, params, grads, statistics, SETTING), carry_, loss

    def loop() -> float:
        adapted, carry = jax.tree.map(jnp.copy, params), model.zero_carry(1)
        total = 0.0
        for window in range(plan.num_windows):
            adapted, carry, loss = step(adapted, carry, window)
            total += float(loss)
        return total / size.tokens

    return {
        "loop over windows": lambda: max(loop() for _ in range(settings)),
        "one program": lambda: whole(params, [SETTING] * settings)[0].mean(),
    }


def sampling_contenders(size: Size, samples: int):
    """All samples at once, and one after the other."""
    model, params = make_model(size)
    plan = make_plan(size)
    together = montecarlo.MonteCarlo(model, plan, DROPOUT, key=KEY, samples=samples)
    single = montecarlo.MonteCarlo(model, plan, DROPOUT, key=KEY, samples=1)
    keys = montecarlo.sample_keys(KEY, samples)

    def sequential() -> float:
        parts = []
        for s in range(samples):
            single._blocks = (keys[s].reshape(1, 1), single._blocks[1])
            parts.append(-single(params).nats.astype(np.float64))
        nats = np.log(samples) - np.logaddexp.reduce(parts, axis=0)
        return scoring.TokenScores(np.zeros(len(nats)), nats).mean()

    return {
        f"{samples} passes": sequential,
        f"{samples} samples side by side": lambda: together(params).mean(),
    }


def measure(title: str, contenders, tokens: int, repeats: int, clock: str):
    """Rows of the table; both contenders must agree on the score."""
    scores = [run() for run in contenders.values()]
    if not np.allclose(scores, scores[0], rtol=1e-4):
        raise AssertionError(f"{title}: the contenders disagree: {scores}")
    seconds = timing.take_turns(contenders, repeats, clock)
    first = next(iter(seconds.values()))
    return [
        (
            f"{title}: {name}",
            f"{tokens / value:,.0f}",
            f"{1e3 * value:,.0f}",
            f"{first / value:.2f}x",
        )
        for name, value in seconds.items()
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", default="tiny,small", help=f"any of {', '.join(SIZES)}")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=tuple(timing.CLOCKS), default="wall")
    options = parser.parse_args()
    names = options.sizes.split(",")
    if any(name not in SIZES for name in names) or options.repeats < 1:
        parser.error(f"sizes are any of {', '.join(SIZES)}; repeats >= 1")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, clock {options.clock}")
    rows = [("", "tokens/s", "ms", "ratio")]
    for name in names:
        size = SIZES[name]
        for title, contenders in (
            (f"{name}, dynamic", dynamic_contenders(size)),
            (f"{name}, dynamic, {SETTINGS} settings", dynamic_contenders(size, SETTINGS)),
            (f"{name}, Monte-Carlo", sampling_contenders(size, options.samples)),
        ):
            rows += measure(title, contenders, size.tokens, options.repeats, options.clock)
    print(timing.table(rows))


if __name__ == "__main__":
    main()

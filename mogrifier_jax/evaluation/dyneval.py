"""Dynamic evaluation: the weights adapt to the text while it is scored.

Axes: A adaptations side by side, W windows of one dispatch, B stripes, T time, N tokens.

After each window is scored, with g the gradient of its summed nats, elementwise,

    θ ← θ - η g / (RMS + ε) + min(1, ρ RMS / m) (θ₀ - θ)

where θ₀ are the trained weights, η, ρ, ε are `UpdateRule`, RMS is the root of the mean squared
gradient over windows of the training text (`gradstats.py`) and m the mean of RMS over all
weights. Adaptations differ in their settings or in their dropout masks; each has weights and a
state of its own. They lie over the mesh axis "data".
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import gradstats, montecarlo
from mogrifier_jax.nn import models
from mogrifier_jax.training import evaluate

BLOCK_BYTES = 1 << 31  # Memory of adaptations side by side, about, on each device.
COPIES = 4  # Weight-sized arrays that an adaptation needs: weights, gradient, temporaries.


class UpdateRule(NamedTuple):
    """What is tuned; numbers, or arrays [A]."""

    learning_rate: Any
    decay_rate: Any
    epsilon: Any


class Outcome(NamedTuple):
    """What one adaptation, or the average of several, made of the text."""

    scores: evaluate.TokenScores  # Up to where it diverged, if it did.
    diverged_at: int | None  # The first window whose score is not finite.

    @property
    def nats(self) -> float:
        """Nats per token; nan if it diverged."""
        return math.nan if self.diverged_at is not None else self.scores.mean()

    @property
    def last_finite_nats(self) -> float:
        """Nats per token of the windows before it diverged; nan if there are none."""
        return self.scores.mean()


class DynamicEvaluation:
    """Scores a plan with adapting weights; compiles once for any weights, settings, logit scale.

    Args:
      plan: usually one stripe; on one device or on every device of the mesh.
      dropout: rates for Monte-Carlo samples; without them each adaptation is deterministic.
      parallel: how many adaptations run side by side, at most; by default what fits into about
        two gigabytes per device.
    """

    def __init__(
        self,
        model: Any,
        plan: tasks.Plan,
        statistics: gradstats.Statistics,
        *,
        dropout: models.Dropout | None = None,
        parallel: int | None = None,
        mesh: Mesh | None = None,
        chunk: int = 256,
    ):
        if parallel is not None and parallel < 1:
            raise errors.UsageError(f"{parallel} adaptations side by side: give 1 or more")
        self.model, self.dropout = model, dropout
        self._mesh = mesh
        self.plan = plan._replace(stream=partitioning.replicate(plan.stream, mesh))
        self.targets = evaluate.read_targets(self.plan)
        self._statistics = partitioning.replicate(statistics._replace(losses=None), mesh)
        self._devices = mesh.shape["data"] if mesh else 1
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(statistics.rms))
        self.parallel = parallel or max(1, BLOCK_BYTES // (COPIES * size)) * self._devices
        self._sharding = mesh and NamedSharding(mesh, PartitionSpec("data"))
        self._chunk = min(chunk, plan.num_windows)
        run = functools.partial(
            adapt_windows, model=model, batch_at=plan.batch_at, chunk=self._chunk
        )
        self._copies = jax.jit(
            functools.partial(make_copies, model=model, plan=plan),
            static_argnames="count",
            out_shardings=self._sharding,
        )
        everywhere = mesh and NamedSharding(mesh, PartitionSpec())
        self._run = jax.jit(
            run,
            donate_argnames=("adapted", "carry"),
            out_shardings=(everywhere, (self._sharding, self._sharding)),
        )

    def __call__(
        self,
        params: Any,
        settings: Sequence[UpdateRule],
        logit_scale: float = 1.0,
        max_windows: int | None = None,
        title: str = "",
    ) -> list[Outcome]:
        """The outcome of each setting, all of them side by side."""
        outcomes = []
        for block in self._blocks(len(settings)):
            stacked = stack_settings([settings[i] for i in block])
            keys = montecarlo.sample_keys(jax.random.key(0), len(block))
            nats, _ = self.run(params, stacked, keys, logit_scale, None, max_windows, title)
            outcomes += [self.outcome(nats[:, i]) for i in range(len(block))]
        return outcomes

    def sample(
        self,
        params: Any,
        setting: UpdateRule,
        key: jax.Array,
        samples: int,
        logit_scale: float = 1.0,
        multiplier: float = 1.0,
        max_windows: int | None = None,
        title: str = "",
    ) -> Outcome:
        """The arithmetic average over samples, each adapting by the gradients of its own masks."""
        if self.dropout is None:
            raise errors.UsageError("Monte-Carlo samples need the rates of dropout; give `dropout`")
        rates = montecarlo.scale_dropout(self.dropout, multiplier)
        keys = montecarlo.sample_keys(key, samples)
        log_p: Any = -np.inf
        for block in self._blocks(samples):
            stacked = stack_settings([setting] * len(block))
            label = f"{title}, samples {block[0] + 1} to {block[-1] + 1}" if title else ""
            nats, _ = self.run(
                params, stacked, keys[np.asarray(block)], logit_scale, rates, max_windows, label
            )
            log_p = np.logaddexp(log_p, np.logaddexp.reduce(-nats.astype(np.float64), axis=1))
        mean = math.log(samples) - log_p
        return self.outcome(np.where(self.targets.valid[: len(mean)], mean, 0.0))

    def run(
        self,
        params: Any,
        settings: UpdateRule,
        keys: jax.Array,
        logit_scale: float = 1.0,
        rates: models.Dropout | None = None,
        max_windows: int | None = None,
        title: str = "",
    ) -> tuple[np.ndarray, Any]:
        """Nats [windows, A, B, T] of A adaptations, and their weights [A, ...] at the end."""
        params, count = partitioning.replicate(params, self._mesh), len(keys)
        size = -(-count // self._devices) * self._devices
        # What only fills up the mesh repeats the first ones.
        order = np.arange(size) % count
        settings, keys = jax.tree.map(lambda a: a[order], (settings, keys))
        state = self._copies(params, count=size)

        def run(state, first, windows):
            return self._run(
                *(*state, params, self._statistics, self.plan.stream, first, windows),
                *(settings, logit_scale, rates, keys),
            )

        windows = evaluate.limit(self.plan, max_windows)
        nats, state = evaluate.drive(run, state, self.targets, windows, self._chunk, title)
        return nats[:, :count], jax.tree.map(lambda a: a[:count], state[0])

    def outcome(self, nats: np.ndarray) -> Outcome:
        """What nats [windows, B, T] amount to."""
        finite = np.isfinite(nats).all((1, 2))
        diverged_at = None if finite.all() else int(np.argmin(finite))
        return Outcome(self.targets.in_order(nats[:diverged_at]), diverged_at)

    def _blocks(self, count: int) -> list[range]:
        num_blocks, size = montecarlo.cut_blocks(count, self.parallel, self._devices)
        return [range(i * size, min(count, (i + 1) * size)) for i in range(num_blocks)]


def make_copies(params, *, count, model, plan):
    """Weights and zero carries of so many adaptations."""
    zeros = model.zero_carry(plan.batch_size) if plan.carries else ()
    return jax.tree.map(lambda a: jnp.broadcast_to(a[None], (count, *a.shape)), (params, zeros))


def adapt_windows(
    adapted,
    carry,
    params,
    statistics,
    stream,
    first,
    count,
    settings,
    logit_scale,
    rates,
    keys,
    *,
    model,
    batch_at,
    chunk,
):
    """Nats [W, A, B, T] of `count` windows, and the weights and carries [A, ...] after them."""

    def score(state, batch, index):
        def one(adapted, carry, setting, key):
            def loss_fn(adapted):
                rngs = {"dropout": jax.random.fold_in(key, index)}
                nats, end = model.apply(
                    {"params": adapted},
                    batch,
                    carry,
                    rates,
                    logit_scale,
                    rngs=rngs,
                    method="batch_nats",
                )
                return nats.sum(1).mean(), (nats, end)

            grads, (nats, end) = jax.grad(loss_fn, has_aux=True)(adapted)
            return update_weights(adapted, params, grads, statistics, setting), end, nats

        adapted, carry, nats = side_by_side(one, *state, settings, keys)
        return (adapted, carry), nats

    state = (adapted, carry)
    return evaluate.over_windows(
        score, state, lambda index: batch_at(stream, index), first, count, chunk
    )


def side_by_side(one, *args):
    """vmap, but without the axis of a single one: batched matmuls are slower on a CPU."""
    if jax.tree.leaves(args)[0].shape[0] > 1:
        return jax.vmap(one)(*args)
    alone = one(*jax.tree.map(lambda a: a[0], args))
    return jax.tree.map(lambda a: a[None], alone)


def update_weights(adapted, params, grads, statistics: gradstats.Statistics, setting: UpdateRule):
    """The rule at the top of this module."""

    def update(theta, start, g, rms):
        pull = jnp.minimum(1.0, setting.decay_rate * rms / statistics.mean)
        return theta - setting.learning_rate * g / (rms + setting.epsilon) + pull * (start - theta)

    return jax.tree.map(update, adapted, params, grads, statistics.rms)


def stack_settings(settings: Sequence[UpdateRule]) -> UpdateRule:
    """UpdateRule with arrays [A]; numbers that cannot be are refused."""
    for setting in settings:
        if not (setting.learning_rate >= 0 and setting.decay_rate >= 0 and setting.epsilon > 0):
            raise errors.UsageError(
                f"dynamic evaluation with {setting} cannot be: the learning rate and the decay "
                "rate must be at least 0, epsilon above 0"
            )
    return UpdateRule(*(jnp.asarray(column, jnp.float32) for column in zip(*settings, strict=True)))

"""Dynamic evaluation: after each scored window, its scaled gradient updates the weights.

Axes: A adaptations side by side, W windows of one dispatch, B stripes, T time, N tokens.

After each window has been scored, every weight θ is updated by this rule:

    θ ← θ - η g / (RMS + ε) + min(1, ρ RMS / m) (θ₀ - θ)

g is the gradient of the window's summed nats, θ₀ is the trained weight, and η, ρ, ε are the numbers
of `UpdateRule`. RMS is the root mean square of the gradient over windows of the training text, and
m is the mean of RMS over all weights (`gradient_statistics.py`). Adaptations differ in their update
rules or in their dropout masks. Each has its own weights and its own state, and the mesh axis
"data" splits them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import gradient_statistics, loaded_run, montecarlo
from mogrifier_jax.nn import models, stack
from mogrifier_jax.training import scoring

BLOCK_BYTES = 1 << 31  # About how much memory adaptations side by side may use on each device.
COPIES = 4  # Weight-sized arrays of one adaptation: weights, gradient, temporaries.
# Adaptations whose learning rates differ by the factor ROUNDING differ by a few rounding errors.
# If their scores differ by more than CHAOTIC_NATS within ROUNDING_WINDOWS windows, scores depend on
# rounding, and another machine or another version of a library will compute different ones.
ROUNDING = 1 + 1e-6
ROUNDING_WINDOWS = 256
CHAOTIC_NATS = 1e-3

Params = loaded_run.Params


class UpdateRule(NamedTuple):
    """The numbers of the rule that are tuned, or arrays [A] of them."""

    learning_rate: float | jax.Array  # η
    decay_rate: float | jax.Array  # ρ
    epsilon: float | jax.Array  # ε


class Outcome(NamedTuple):
    """The scores of one adaptation, or of the average of several."""

    scores: scoring.TokenScores  # If it diverged, only the windows before that.
    diverged_at: int | None  # The first window whose score is not finite; None if all are.

    def mean(self) -> float:
        """Nats per token; nan if it diverged."""
        return math.nan if self.diverged_at is not None else self.scores.mean()


class DynamicEvaluation:
    """Scores a plan with adapting weights.

    It compiles once for each number of adaptations, for any weights, update rules and logit scale.

    Args:
      plan: usually of one stripe; on one device or on every device of the mesh.
      dropout: the rates of Monte-Carlo samples; without them each adaptation is deterministic.
      parallel: the largest number of adaptations side by side; by default as many as fit into
        about two gigabytes per device.
    """

    def __init__(
        self,
        model: loaded_run.Model,
        plan: tasks.Plan,
        statistics: gradient_statistics.Statistics,
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
        self.targets = scoring.read_targets(self.plan)
        self._statistics = partitioning.replicate(statistics._replace(losses=None), mesh)
        self._devices = mesh.shape["data"] if mesh else 1
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(statistics.rms))
        self.parallel = parallel or max(1, BLOCK_BYTES // (COPIES * size)) * self._devices
        self._sharding = mesh and NamedSharding(mesh, PartitionSpec("data"))
        self._chunk = min(chunk, plan.num_windows)
        self._copies = jax.jit(self._copy, static_argnames="count", out_shardings=self._sharding)
        replicated = mesh and partitioning.replicated(mesh)
        per_adaptation = (self._sharding, self._sharding)
        self._adapt_jitted = jax.jit(
            self._adapt, donate_argnames="state", out_shardings=(replicated, per_adaptation)
        )

    def __call__(
        self, params: Params, rules: Sequence[UpdateRule], logit_scale: float = 1.0, title: str = ""
    ) -> list[Outcome]:
        """Adapts by all rules side by side and returns the outcome of each."""
        outcomes = []
        for block in self._blocks(len(rules)):
            stacked = stack_rules([rules[i] for i in block])
            keys = montecarlo.sample_keys(jax.random.key(0), len(block))
            nats, _ = self.adapt(params, stacked, keys, logit_scale, None, title)
            outcomes += [self.make_outcome(nats[:, i]) for i in range(len(block))]
        return outcomes

    def sample(
        self,
        params: Params,
        rule: UpdateRule,
        key: jax.Array,
        samples: int,
        logit_scale: float = 1.0,
        multiplier: float = 1.0,
        title: str = "",
    ) -> Outcome:
        """The average probability over samples, each of which adapts under its own masks."""
        if self.dropout is None:
            raise errors.UsageError("Monte-Carlo samples need the rates of dropout; give `dropout`")
        rates = montecarlo.scale_dropout(self.dropout, multiplier)
        keys = montecarlo.sample_keys(key, samples)
        log_p = np.array(-np.inf)
        for block in self._blocks(samples):
            stacked = stack_rules([rule] * len(block))
            label = f"{title}, samples {block[0] + 1} to {block[-1] + 1}" if title else ""
            block_keys = keys[np.asarray(block)]
            nats, _ = self.adapt(params, stacked, block_keys, logit_scale, rates, label)
            log_p = np.logaddexp(log_p, np.logaddexp.reduce(-nats.astype(np.float64), axis=1))
        mean = math.log(samples) - log_p
        return self.make_outcome(np.where(self.targets.valid[: len(mean)], mean, 0.0))

    def rounding_nats(
        self, params: Params, rule: UpdateRule, logit_scale: float = 1.0, count: int = 1
    ) -> float:
        """How much the scores of two adaptations differ whose rates differ by a rounding error.

        The first `ROUNDING_WINDOWS` windows are divided into quarters. The result is the largest of
        the root mean squares, over the tokens of a quarter, of the difference of a token's nats; it
        is infinite if an adaptation diverges.

        Args:
          count: how many adaptations `__call__` has run or will run. As many copies of a rule are
            run here, so that the same compiled program serves.
        """
        windows = min(ROUNDING_WINDOWS, self.plan.num_windows)
        size = len(self._blocks(count)[0])
        keys = montecarlo.sample_keys(jax.random.key(0), size)

        def first_nats(rule: UpdateRule) -> np.ndarray:
            stacked = stack_rules([rule] * size)
            nats, _ = self.adapt(params, stacked, keys, logit_scale, max_windows=windows)
            return nats[:, 0].astype(np.float64)

        close = rule._replace(learning_rate=rule.learning_rate * ROUNDING)
        squares = np.square(first_nats(close) - first_nats(rule))
        valid = self.targets.valid[:windows]
        quarters = zip(np.array_split(squares, 4), np.array_split(valid, 4), strict=True)
        means = [quarter[mask].mean() for quarter, mask in quarters if mask.any()]
        return math.sqrt(max(means)) if np.isfinite(means).all() else math.inf

    def adapt(
        self,
        params: Params,
        rules: UpdateRule,
        keys: jax.Array,
        logit_scale: float = 1.0,
        rates: models.Dropout | None = None,
        title: str = "",
        max_windows: int | None = None,
    ) -> tuple[np.ndarray, Params]:
        """Nats [windows, A, B, T] of A adaptations, and their weights [A, ...] at the end.

        Args:
          rules: one rule with arrays [A], as `stack_rules` makes it.
          keys: [A], of the dropout masks.
          rates: the dropout rates; None is without dropout.
        """
        params, count = partitioning.replicate(params, self._mesh), len(keys)
        size = -(-count // self._devices) * self._devices
        # The first adaptations are repeated to fill up the mesh.
        order = np.arange(size) % count
        per_adaptation = jax.tree.map(lambda a: a[order], (rules, keys))
        state = self._copies(params, count=size)
        start = (params, self._statistics)

        def dispatch(state: PyTree, first: int, count: int) -> tuple[jax.Array, PyTree]:
            stream = self.plan.stream
            return self._adapt_jitted(
                state, start, stream, first, count, per_adaptation, logit_scale, rates
            )

        windows = scoring.limit_windows(self.plan, max_windows)
        nats, state = scoring.collect_nats(
            dispatch, state, self.targets, windows, self._chunk, title
        )
        return nats[:, :count], jax.tree.map(lambda a: a[:count], state[0])

    def make_outcome(self, nats: np.ndarray) -> Outcome:
        """The outcome of one adaptation, given its nats [windows, B, T]."""
        finite = np.isfinite(nats).all((1, 2))
        diverged_at = None if finite.all() else int(np.argmin(finite))
        return Outcome(self.targets.in_order(nats[:diverged_at]), diverged_at)

    def _copy(self, params: Params, *, count: int) -> tuple[Params, stack.Carries]:
        """`count` copies of the trained weights and of zero carries."""
        start = params, scoring.zero_carry(self.model, self.plan)
        return jax.tree.map(lambda a: jnp.broadcast_to(a[None], (count, *a.shape)), start)

    def _adapt(
        self,
        state: tuple[Params, stack.Carries],
        start: tuple[Params, gradient_statistics.Statistics],
        stream: tasks.Stream,
        first: jax.Array,
        count: jax.Array,
        per_adaptation: tuple[UpdateRule, jax.Array],
        logit_scale: jax.Array,
        rates: models.Dropout | None,
    ) -> tuple[jax.Array, tuple[Params, stack.Carries]]:
        """Nats [W, A, B, T] of `count` windows, and the weights and carries [A, ...] after them.

        Args:
          state: the weights and carries [A, ...] before the first window.
          start: the trained weights and the gradient statistics.
          per_adaptation: the rules and the keys [A].
        """
        params, statistics = start

        def score(state: PyTree, batch: tasks.Batch, index: jax.Array) -> PyTree:
            def adapt_one(
                adapted: Params, carry: stack.Carries, rule: UpdateRule, key: jax.Array
            ) -> Any:
                def loss_fn(adapted: Params) -> Any:
                    variables = {"params": adapted}
                    # Without dropout the model draws no random numbers.
                    rngs = {} if rates is None else {"dropout": jax.random.fold_in(key, index)}
                    nats: Any  # Flax annotates the second result of `apply` as variables.
                    end, nats = self.model.apply(
                        variables, batch, carry, rates, logit_scale, rngs=rngs, method="batch_nats"
                    )
                    return nats.sum(1).mean(), (nats, end)

                grads, (nats, end) = jax.grad(loss_fn, has_aux=True)(adapted)
                return update_weights(adapted, params, grads, statistics, rule), end, nats

            adapted, carry, nats = vmap_or_call(adapt_one)(*state, *per_adaptation)
            return (adapted, carry), nats

        batch_at = self.plan.batch_at
        return scoring.over_windows(score, state, batch_at, stream, first, count, self._chunk)

    def _blocks(self, count: int) -> list[range]:
        num_blocks, size = montecarlo.cut_blocks(count, self.parallel, self._devices)
        return [range(i * size, min(count, (i + 1) * size)) for i in range(num_blocks)]


def vmap_or_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """`vmap`, except that a single item is not batched: CPUs are slow at batched matmuls."""

    def call(*args: Any) -> Any:
        if jax.tree.leaves(args)[0].shape[0] > 1:
            return jax.vmap(function)(*args)
        outputs = function(*jax.tree.map(lambda a: a[0], args))
        return jax.tree.map(lambda a: a[None], outputs)

    return call


def update_weights(
    adapted: Params,
    params: Params,
    grads: Params,
    statistics: gradient_statistics.Statistics,
    rule: UpdateRule,
) -> Params:
    """Applies the rule at the top of this module to every weight."""

    def update(theta: jax.Array, start: jax.Array, g: jax.Array, rms: jax.Array) -> jax.Array:
        pull = jnp.minimum(1.0, rule.decay_rate * rms / statistics.mean)
        return theta - rule.learning_rate * g / (rms + rule.epsilon) + pull * (start - theta)

    return jax.tree.map(update, adapted, params, grads, statistics.rms)


def stack_rules(rules: Sequence[UpdateRule]) -> UpdateRule:
    """All rules as one with arrays [A]; refuses impossible numbers."""
    for rule in rules:
        if not (rule.learning_rate >= 0 and rule.decay_rate >= 0 and rule.epsilon > 0):
            raise errors.UsageError(
                f"dynamic evaluation with {rule} is impossible: the learning rate and the decay "
                "rate must be at least 0, epsilon above 0"
            )
    return UpdateRule(*(jnp.asarray(column, jnp.float32) for column in zip(*rules, strict=True)))

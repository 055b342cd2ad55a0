"""Dynamic evaluation: the weights adapt to the text while it is scored.

Axes: A adaptations side by side, W windows of one dispatch, B stripes, T time, N tokens.

After each window is scored, every weight θ changes by this rule:

    θ ← θ - η g / (RMS + ε) + min(1, ρ RMS / m) (θ₀ - θ)

g is the gradient of the window's summed nats, θ₀ the trained weight, and η, ρ, ε are the numbers of
`UpdateRule`. RMS is the root of the mean squared gradient over windows of the training text. m is
the mean of RMS over all weights. These statistics take a pass over much of the training text, so
the workdir keeps them, with a digest of everything that they depend on. Adaptations differ in their
settings or in their dropout masks. Each has its own weights and its own state. They are spread over
the mesh axis "data".
"""

import functools
import math
import os
import pathlib
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import montecarlo, pretrained
from mogrifier_jax.nn import models
from mogrifier_jax.training import evaluate, leaves, workdirs

BLOCK_BYTES = 1 << 31  # About how much memory adaptations side by side may use on each device.
MAX_WINDOWS = 500  # Windows that the gradient statistics use, as in the paper.
COPIES = 4  # Weight-sized arrays that an adaptation needs: weights, gradient, temporaries.


class Statistics(NamedTuple):
    """Root mean squares of the gradients over the training text."""

    rms: Any  # A tree like the weights.
    mean: jax.Array  # m: the mean of `rms` over all weights.
    losses: Any  # [windows]: mean over stripes of the summed nats.


class UpdateRule(NamedTuple):
    """The numbers of the rule that are tuned, or arrays [A] of them."""

    learning_rate: Any
    decay_rate: Any
    epsilon: Any


class Outcome(NamedTuple):
    """The scores of one adaptation, or of the average of several."""

    scores: evaluate.TokenScores  # If it diverged, only the windows before that.
    diverged_at: int | None  # The first window whose score is not finite; None: all are finite.

    def mean(self) -> float:
        """Nats per token; nan if it diverged."""
        return math.nan if self.diverged_at is not None else self.scores.mean()


class DynamicEvaluation:
    """Scores a plan with adapting weights.

    It compiles once for any weights, settings and logit scale.

    Args:
      plan: usually one stripe; on one device or on every device of the mesh.
      dropout: rates for Monte-Carlo samples; without them each adaptation is deterministic.
      parallel: the largest number of adaptations side by side; by default as many as fit into
        about two gigabytes per device.
    """

    def __init__(
        self,
        model: Any,
        plan: tasks.Plan,
        statistics: Statistics,
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
        self._copies = jax.jit(self._copy, static_argnames="count", out_shardings=self._sharding)
        everywhere = mesh and partitioning.replicated(mesh)
        in_place = (self._sharding, self._sharding)
        self._run = jax.jit(
            self._adapt, donate_argnames="state", out_shardings=(everywhere, in_place)
        )

    def __call__(
        self, params: Any, settings: Sequence[UpdateRule], logit_scale: float = 1.0, title: str = ""
    ) -> list[Outcome]:
        """Runs all settings side by side and returns the outcome of each."""
        outcomes = []
        for block in self._blocks(len(settings)):
            stacked = stack_settings([settings[i] for i in block])
            keys = montecarlo.sample_keys(jax.random.key(0), len(block))
            nats, _ = self.run(params, stacked, keys, logit_scale, None, title)
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
        title: str = "",
    ) -> Outcome:
        """The average probability over samples; each adapts by the gradients of its own masks."""
        if self.dropout is None:
            raise errors.UsageError("Monte-Carlo samples need the rates of dropout; give `dropout`")
        rates = montecarlo.scale_dropout(self.dropout, multiplier)
        keys = montecarlo.sample_keys(key, samples)
        log_p: Any = -np.inf
        for block in self._blocks(samples):
            stacked = stack_settings([setting] * len(block))
            label = f"{title}, samples {block[0] + 1} to {block[-1] + 1}" if title else ""
            nats, _ = self.run(params, stacked, keys[np.asarray(block)], logit_scale, rates, label)
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
        title: str = "",
    ) -> tuple[np.ndarray, Any]:
        """Nats [windows, A, B, T] of A adaptations, and their weights [A, ...] at the end."""
        params, count = partitioning.replicate(params, self._mesh), len(keys)
        size = -(-count // self._devices) * self._devices
        # Repetitions of the first adaptations fill up the mesh.
        order = np.arange(size) % count
        each = jax.tree.map(lambda a: a[order], (settings, keys))
        state = self._copies(params, count=size)
        start = (params, self._statistics)

        def run(state, first, windows):
            stream = self.plan.stream
            return self._run(state, start, stream, first, windows, each, logit_scale, rates)

        windows = self.plan.num_windows
        nats, state = evaluate.collect_nats(run, state, self.targets, windows, self._chunk, title)
        return nats[:, :count], jax.tree.map(lambda a: a[:count], state[0])

    def outcome(self, nats: np.ndarray) -> Outcome:
        """The outcome of one adaptation, given its nats [windows, B, T]."""
        finite = np.isfinite(nats).all((1, 2))
        diverged_at = None if finite.all() else int(np.argmin(finite))
        return Outcome(self.targets.in_order(nats[:diverged_at]), diverged_at)

    def _copy(self, params, *, count):
        """The trained weights and zero carries, `count` times."""
        start = params, evaluate.zero_carry(self.model, self.plan)
        return jax.tree.map(lambda a: jnp.broadcast_to(a[None], (count, *a.shape)), start)

    def _adapt(self, state, start, stream, first, count, each, logit_scale, rates):
        """Nats [W, A, B, T] of `count` windows, and the weights and carries [A, ...] after them.

        `start` is the trained weights and the statistics. `each` is the settings and keys [A].
        """
        params, statistics = start

        def score(state, batch, index):
            def one(adapted, carry, setting, key):
                def loss_fn(adapted):
                    variables = {"params": adapted}
                    # Only a model in training has random numbers.
                    rngs = {} if rates is None else {"dropout": jax.random.fold_in(key, index)}
                    nats, end = self.model.apply(
                        variables, batch, carry, rates, logit_scale, rngs=rngs, method="batch_nats"
                    )
                    return nats.sum(1).mean(), (nats, end)

                grads, (nats, end) = jax.grad(loss_fn, has_aux=True)(adapted)
                return update_weights(adapted, params, grads, statistics, setting), end, nats

            adapted, carry, nats = side_by_side(one)(*state, *each)
            return (adapted, carry), nats

        batch_at = self.plan.batch_at
        return evaluate.over_windows(score, state, batch_at, stream, first, count, self._chunk)

    def _blocks(self, count: int) -> list[range]:
        num_blocks, size = montecarlo.cut_blocks(count, self.parallel, self._devices)
        return [range(i * size, min(count, (i + 1) * size)) for i in range(num_blocks)]


def side_by_side(function: Callable[..., Any]) -> Callable[..., Any]:
    """`vmap`, except that one item alone has no extra axis: CPUs are slower at batched matmuls."""

    def call(*args):
        if jax.tree.leaves(args)[0].shape[0] > 1:
            return jax.vmap(function)(*args)
        outputs = function(*jax.tree.map(lambda a: a[0], args))
        return jax.tree.map(lambda a: a[None], outputs)

    return call


def update_weights(adapted, params, grads, statistics: Statistics, setting: UpdateRule):
    """Applies the rule at the top of this module to every weight."""

    def update(theta, start, g, rms):
        pull = jnp.minimum(1.0, setting.decay_rate * rms / statistics.mean)
        return theta - setting.learning_rate * g / (rms + setting.epsilon) + pull * (start - theta)

    return jax.tree.map(update, adapted, params, grads, statistics.rms)


def stack_settings(settings: Sequence[UpdateRule]) -> UpdateRule:
    """All settings as one rule with arrays [A]; refuses impossible numbers."""
    for setting in settings:
        if not (setting.learning_rate >= 0 and setting.decay_rate >= 0 and setting.epsilon > 0):
            raise errors.UsageError(
                f"dynamic evaluation with {setting} is impossible: the learning rate and the decay "
                "rate must be at least 0, epsilon above 0"
            )
    return UpdateRule(*(jnp.asarray(column, jnp.float32) for column in zip(*settings, strict=True)))


def gradient_statistics(
    model: Any,
    params: Any,
    plan: tasks.Plan,
    *,
    max_windows: int = MAX_WINDOWS,
    chunk: int = 16,
) -> Statistics:
    """Root mean squares of the gradients over at most `max_windows` windows; no weight changes."""
    windows = min(plan.num_windows, max_windows)
    if windows < 1:
        raise errors.UsageError(f"statistics over {windows} windows are undefined; take 1 or more")
    chunk = min(chunk, windows)
    squares = functools.partial(square_gradients, model=model, batch_at=plan.batch_at, chunk=chunk)
    step = jax.jit(squares, donate_argnames="state")

    def run(state, first, count):
        return step(params, state, plan.stream, first, count)

    state = jax.tree.map(jnp.zeros_like, params), evaluate.zero_carry(model, plan)
    losses = []
    title = "gradient statistics"
    for found, after in evaluate.dispatches(run, state, windows, chunk, title):
        losses.append(np.asarray(found))
        state = after
    rms, mean = _to_rms(state[0], windows)
    return Statistics(rms, mean, np.concatenate(losses)[:windows])


def square_gradients(params, state, stream, first, count, *, model, batch_at, chunk):
    """Losses [W] of `count` windows, and the state: summed squared gradients and the carry."""
    lengths = batch_at(stream, 0).lengths
    stripes = None if lengths is None else jnp.sum(lengths > 0)  # Empty ones fill up the mesh.

    def loss_fn(params, batch, carry):
        nats, carry = model.apply({"params": params}, batch, carry, method="batch_nats")
        return nats.sum() / (nats.shape[0] if stripes is None else stripes), carry

    def score(state, batch, index):
        del index
        squares, carry = state
        (loss, carry), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, carry)
        squares = jax.tree.map(lambda s, g: s + jnp.square(g), squares, grads)
        return (squares, carry), loss

    return evaluate.over_windows(score, state, batch_at, stream, first, count, chunk)


@jax.jit
def _to_rms(squares, windows):
    rms = jax.tree.map(lambda s: jnp.sqrt(s / windows), squares)
    leaves = jax.tree.leaves(rms)
    return rms, sum(leaf.sum() for leaf in leaves) / sum(leaf.size for leaf in leaves)


def cached_statistics(
    workdir: str | os.PathLike,
    step: int,
    model: Any,
    params: Any,
    plan: tasks.Plan,
    *,
    max_windows: int = MAX_WINDOWS,
) -> Statistics:
    """Reads `gradient_statistics` from the workdir, or computes and keeps them there."""
    if jax.process_count() > 1:
        # Hosts may see different files, and all of them must compute or none.
        return gradient_statistics(model, params, plan, max_windows=max_windows)
    batch, window = jax.eval_shape(plan.batch_at, plan.stream, 0).targets.shape
    path = pathlib.Path(workdir) / "dyneval" / f"statistics_B{batch}_T{window}.npz"
    sizes = (step, batch, window, max_windows)
    digest = pretrained.digest_arrays(repr(sizes), leaves.to_arrays((params, plan.stream)))
    found = _read(path, digest, params)
    if found is None:
        found = gradient_statistics(model, params, plan, max_windows=max_windows)
        _write(path, digest, found)
    return found


def _read(path: pathlib.Path, digest: str, params: Any) -> Statistics | None:
    if not path.exists():
        return None
    try:
        # np.load leaves a damaged file open if it opens the file itself.
        with path.open("rb") as file, np.load(file) as arrays:
            if str(arrays["digest"]) == digest:
                rms = [arrays[f"rms.{name}"] for name in leaves.name_leaves(params)]
                rms = jax.tree.unflatten(jax.tree.structure(params), map(jnp.asarray, rms))
                logging.info("gradient statistics are read from %s", path)
                return Statistics(rms, jnp.asarray(arrays["mean"]), arrays["losses"])
        logging.info("%s belongs to other weights or another text; it is made again", path)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        logging.warning("%s cannot be read (%s); it is made again", path, error)
    return None


def _write(path: pathlib.Path, digest: str, statistics: Statistics) -> None:
    rms = {f"rms.{name}": np.asarray(a) for name, a in leaves.name_leaves(statistics.rms).items()}
    with workdirs.replacing(path) as file:
        np.savez(
            file,
            digest=np.array(digest),
            mean=np.asarray(statistics.mean),
            losses=statistics.losses,
            **rms,  # type: ignore[arg-type]
        )

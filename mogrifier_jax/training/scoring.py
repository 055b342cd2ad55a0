"""Scores a text window by window, in order and without dropout.

Axes: W windows of one dispatch, K logit scales, B stripes, T time, N tokens of the text. A pass is
made of dispatches of W windows, so that it can show its running score. The number of windows is
traced, so the last dispatch, which may have fewer, uses the same program. `turn_evaluation.py`
calls this between turns of training, `montecarlo.py` averages over dropout masks, and `dyneval.py`
adapts the weights.

A logit scale multiplies the logits: it is lamb's softmax temperature, and records call it
"temperature".
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import logging
from jaxtyping import Array, Float, Float32, Integer, PyTree

from mogrifier_jax import partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models, stack
from mogrifier_jax.training import steps

Scored = TypeVar("Scored")
LOG_SECONDS = 30.0  # Between lines where there is no terminal.


class Sum(NamedTuple):
    """A sum and the number of its terms, so that the means of parts combine exactly."""

    total: Any  # Scalar or array; float32 on devices, float64 on the host.
    count: Any

    def mean(self) -> float:
        """The mean over all elements, divided once, in float64; of nothing it is nan."""
        # Converted first, because NumPy would let JAX sum its own array in float32.
        total, count = np.asarray(self.total, np.float64), np.asarray(self.count, np.int64)
        return float(total.sum()) / int(count.sum()) if count.sum() else math.nan


class TokenScores(NamedTuple):
    """The score of each token, in the order of the text."""

    tokens: np.ndarray  # [N] int32.
    nats: np.ndarray  # [N] float32: -log p of each.

    def mean(self) -> float:
        """The cross-entropy: nats per token."""
        return Sum(self.nats, len(self.nats)).mean()


class Targets(NamedTuple):
    """The target tokens of all windows of a plan, on the host."""

    tokens: np.ndarray  # [windows, B, T] int32.
    valid: np.ndarray  # [windows, B, T] bool.
    carries: bool

    def in_order(self, nats: np.ndarray) -> TokenScores:
        """The scores of the first windows without padding, in the order of the text."""
        parts = (a[: len(nats)] for a in (self.tokens, nats, self.valid))
        tokens, nats, valid = (a.swapaxes(0, 1) if self.carries else a for a in parts)
        return TokenScores(tokens[valid], nats[valid].astype(np.float32))


def read_targets(plan: tasks.Plan) -> Targets:
    """Reads the targets of all windows of a plan, without scoring them."""

    def read_window(stream: tasks.Stream, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = plan.batch_at(stream, index)
        steps = jnp.arange(batch.targets.shape[1])[None]
        lengths = jnp.full(plan.batch_size, steps.size) if batch.lengths is None else batch.lengths
        return batch.targets, steps < lengths[:, None]

    def read_windows(stream: tasks.Stream) -> tuple[jax.Array, jax.Array]:
        return jax.lax.map(functools.partial(read_window, stream), jnp.arange(plan.num_windows))

    replicated = plan.mesh and partitioning.replicated(plan.mesh)
    tokens, valid = map(np.asarray, jax.jit(read_windows, out_shardings=replicated)(plan.stream))
    return Targets(tokens, valid, plan.carries)


class WindowScores(NamedTuple):
    """The scores of the W windows of one dispatch; entries past the last window are zero."""

    nats: Float[Array, "W K B T"] | tuple[()]  # () if they are not kept.
    sums: Float32[Array, "W K"]
    counts: Integer[Array, "W"]  # Of tokens.


class Deterministic:
    """Scores weights without dropout; compiles once for each K, whatever the weights.

    Sums have a separate program, because XLA may sum in another order in the program that also
    returns the nats of all tokens, and training would record different numbers.
    """

    def __init__(self, model: models.Model, plan: tasks.Plan, *, chunk: int = 16):
        self.model, self.plan = model, plan
        self.chunk = min(chunk, plan.num_windows)
        make_carry = functools.partial(zero_carry, model, plan)
        replicated = carry_sharding = None
        if plan.mesh:
            replicated = partitioning.replicated(plan.mesh)
            # The same sharding before and after a dispatch avoids a second compilation.
            shapes = {"carry": jax.eval_shape(make_carry)}
            carry_sharding = partitioning.shardings(shapes, plan.mesh)["carry"]
        self._zero_carry = jax.jit(make_carry, out_shardings=carry_sharding)
        jit = functools.partial(
            jax.jit, donate_argnames="carry", out_shardings=(replicated, carry_sharding)
        )
        score = functools.partial(
            score_windows, model=model, batch_at=plan.batch_at, chunk=self.chunk
        )
        self._sum = jit(functools.partial(score, keep=False))
        self._score = jit(functools.partial(score, keep=True))
        self._targets: Targets | None = None  # Sums do not need them.

    def __call__(
        self,
        params: optax.Params,
        logit_scale: float = 1.0,
        max_windows: int | None = None,
        title: str = "",
    ) -> TokenScores:
        """Scores of the tokens of the first `max_windows` windows, or of all."""
        self._targets = targets = self._targets or read_targets(self.plan)
        scales = np.array([logit_scale], np.float32)

        def dispatch(carry: stack.Carries, first: int, count: int) -> tuple[Any, stack.Carries]:
            scores, carry = self._score(params, self.plan.stream, carry, first, count, scales)
            return np.asarray(scores.nats)[:, 0], carry

        windows = limit_windows(self.plan, max_windows)
        nats, _ = collect_nats(dispatch, self._zero_carry(), targets, windows, self.chunk, title)
        return targets.in_order(nats)

    def sums(
        self,
        params: optax.Params,
        logit_scales: Sequence[float],
        max_windows: int | None = None,
        title: str = "",
    ) -> Sum:
        """Nats at each logit scale [K], and the number of tokens.

        All but the softmax is computed once. Each window is summed in float32, and the sums of all
        windows are added in float64.
        """
        scales = np.asarray(logit_scales, np.float32)

        def dispatch(carry: stack.Carries, first: int, count: int) -> tuple[Any, stack.Carries]:
            return self._sum(params, self.plan.stream, carry, first, count, scales)

        total, tokens = np.zeros(len(logit_scales)), 0
        windows = limit_windows(self.plan, max_windows)
        for scores, _ in dispatches(dispatch, self._zero_carry(), windows, self.chunk, title):
            total += np.asarray(scores.sums, np.float64).sum(0)
            tokens += int(np.asarray(scores.counts, np.int64).sum())
        return Sum(total, tokens)


def score_windows(
    params: optax.Params,
    stream: tasks.Stream,
    carry: stack.Carries,
    first: jax.Array | int,
    count: jax.Array | int,
    logit_scales: Float32[Array, "K"],
    *,
    model: models.Model,
    batch_at: tasks.BatchAt,
    chunk: int,
    keep: bool,
) -> tuple[WindowScores, stack.Carries]:
    """The scores of `count` windows from `first` on, and the carry after them.

    Args:
      chunk: W, the number of windows that the results have room for.
      keep: whether to return the nats of all tokens, or only their sums.
    """

    def score(
        carry: stack.Carries, batch: tasks.Batch, index: jax.Array
    ) -> tuple[stack.Carries, WindowScores]:
        del index

        def score_at(logit_scale: jax.Array) -> Any:
            return model.apply(
                {"params": params}, batch, carry, None, logit_scale, method="batch_nats"
            )

        # vmap does not repeat what does not depend on the scale.
        # With JAX_DISABLE_JIT the scales are NumPy's, which vmap of a custom derivative refuses.
        after, nats = jax.vmap(score_at, out_axes=(None, 0))(jnp.asarray(logit_scales))
        return after, WindowScores(
            nats if keep else (), nats.sum((-2, -1)), steps.num_targets(batch)
        )

    return over_windows(score, carry, batch_at, stream, first, count, chunk)


def over_windows(
    score: Callable[..., tuple[PyTree, PyTree]],
    state: PyTree,
    batch_at: tasks.BatchAt,
    stream: tasks.Stream,
    first: jax.Array | int,
    count: jax.Array | int,
    chunk: int,
) -> tuple[Any, Any]:
    """Calls score(state, batch, index) -> (state, scores) for `count` windows from `first` on.

    Returns the scores [W, ...], where W is `chunk` and entries past `count` are zero padding, and
    the state after the last window.
    """

    def score_window(state: PyTree, index: jax.Array) -> tuple[PyTree, PyTree]:
        return score(state, batch_at(stream, index), index)

    def body(i: jax.Array, loop: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, kept = loop
        state, scores = score_window(state, first + i)
        return state, jax.tree.map(lambda a, value: a.at[i].set(value), kept, scores)

    shapes = jax.eval_shape(score_window, state, first)[1]
    kept = jax.tree.map(lambda leaf: jnp.zeros((chunk, *leaf.shape), leaf.dtype), shapes)
    state, kept = jax.lax.fori_loop(0, count, body, (state, kept))
    return kept, state


def dispatches(
    dispatch: Callable[..., tuple[Scored, PyTree]],
    state: PyTree,
    windows: int,
    chunk: int,
    title: str = "",
    show: Callable[[], str] = str,
) -> Iterator[tuple[Scored, PyTree]]:
    """Calls dispatch(state, first, count) -> (scores, state) for all windows; yields both.

    `show()` returns the text beside the bar, after the caller has received the scores.
    """
    logged = time.monotonic()
    with tqdm.tqdm(total=windows, desc=title, disable=None if title else True, leave=False) as bar:
        for first in range(0, windows, chunk):
            count = min(chunk, windows - first)
            scores, state = dispatch(state, first, count)
            yield scores, state
            bar.update(count)
            bar.set_postfix_str(show())
            if title and bar.disable and time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                logging.info("%s: window %d/%d %s", title, first + count, windows, show())


def collect_nats(
    dispatch: Callable[..., tuple[jax.typing.ArrayLike, PyTree]],
    state: PyTree,
    targets: Targets,
    windows: int,
    chunk: int,
    title: str = "",
) -> tuple[np.ndarray, PyTree]:
    """Calls dispatch(state, first, count) -> (nats [W, ..., B, T], state) for all windows.

    It ends early once no result is finite, and the rest is padded with nan.
    """
    parts: list[np.ndarray] = []
    total: Any = np.float64(0)

    def show() -> str:
        # The best of several results is shown.
        best = np.min(np.where(np.isfinite(total), total, np.inf))
        return f"{best / max(1, targets.valid[: len(parts) * chunk].sum()):.4f} nats"

    for nats, after in dispatches(dispatch, state, windows, chunk, title, show):
        state = after
        parts.append(np.asarray(nats))
        total = total + parts[-1].astype(np.float64).sum((0, -2, -1))
        if not np.isfinite(total).any():
            break
    scored = np.concatenate(parts)[:windows]
    padding = [(0, windows - len(scored))] + [(0, 0)] * (scored.ndim - 1)
    return np.pad(scored, padding, constant_values=np.nan), state


def limit_windows(plan: tasks.Plan, max_windows: int | None) -> int:
    """The number of windows to score: all of the plan, or at most `max_windows`."""
    return min(plan.num_windows, max_windows or plan.num_windows)


def zero_carry(model: models.Model, plan: tasks.Plan) -> stack.Carries:
    """The carry of the first window, as new arrays, because dispatches donate them."""
    return jax.tree.map(jnp.copy, model.zero_carry(plan.batch_size)) if plan.carries else ()

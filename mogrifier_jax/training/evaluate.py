"""Scoring a text in order without dropout, and the evaluation before each turn.

Axes: W windows of one dispatch, K logit scales, B stripes, T time, N tokens of the text. A pass is
made of dispatches of W windows, so that it can show its running score. The number of windows is
traced, so the last dispatch, which may have fewer, needs no program of its own. `montecarlo.py`
averages over dropout masks, and `dyneval.py` adapts the weights.

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
from ml_collections import config_dict

from mogrifier_jax import partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models, stack
from mogrifier_jax.training import steps

# lamb's grid of logit scales, in its order,
TEMPERATURES = tuple(round(1.06 - 0.02 * i, 2) for i in range(14))
AT_ONCE = 7  # and how many of them are tried in one pass.
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

    def at(index, stream):
        batch = plan.batch_at(stream, index)
        steps = jnp.arange(batch.targets.shape[1])[None]
        lengths = jnp.full(plan.batch_size, steps.size) if batch.lengths is None else batch.lengths
        return batch.targets, steps < lengths[:, None]

    def read(stream):
        return jax.lax.map(lambda index: at(index, stream), jnp.arange(plan.num_windows))

    everywhere = plan.mesh and partitioning.replicated(plan.mesh)
    tokens, valid = map(np.asarray, jax.jit(read, out_shardings=everywhere)(plan.stream))
    return Targets(tokens, valid, plan.carries)


class WindowScores(NamedTuple):
    """The scores of the W windows of one dispatch; entries past the last window are zero."""

    nats: Float[Array, "W K B T"] | tuple[()]  # () if they are not kept.
    sums: Float32[Array, "W K"]
    counts: Integer[Array, "W"]  # Of tokens.


class Deterministic:
    """Scores weights without dropout; compiles once for each K, whatever the weights.

    Sums have a program of their own, because XLA may sum in another order in the program that also
    returns the nats of all tokens, and training would record other numbers.
    """

    def __init__(self, model: models.Model, plan: tasks.Plan, *, chunk: int = 16):
        self.model, self.plan = model, plan
        self.chunk = min(chunk, plan.num_windows)
        run = functools.partial(
            score_windows, model=model, batch_at=plan.batch_at, chunk=self.chunk
        )
        self._sum = self._jit(functools.partial(run, keep=False))
        self._score = self._jit(functools.partial(run, keep=True))

    def __call__(
        self,
        params: optax.Params,
        logit_scale: float = 1.0,
        max_windows: int | None = None,
        title: str = "",
    ) -> TokenScores:
        """Scores of the tokens of the first `max_windows` windows, or of all."""
        run = self._bind(self._score, params, (logit_scale,))

        def only_nats(carry, first, count):
            scores, carry = run(carry, first, count)
            return np.asarray(scores.nats)[:, 0], carry

        windows = limit_windows(self.plan, max_windows)
        start = self._zero_carry()
        nats, _ = collect_nats(only_nats, start, self.targets, windows, self.chunk, title)
        return self.targets.in_order(nats)

    def sums(
        self,
        params: optax.Params,
        logit_scales: Sequence[float],
        max_windows: int | None = None,
        title: str = "",
    ) -> Sum:
        """Nats at each logit scale [K], and the number of tokens.

        All but the softmax is computed once. The sum of a window is float32, that of all
        windows float64.
        """
        run = self._bind(self._sum, params, logit_scales)
        total, tokens = np.zeros(len(logit_scales)), 0
        windows = limit_windows(self.plan, max_windows)
        for scores, _ in dispatches(run, self._zero_carry(), windows, self.chunk, title):
            total += np.asarray(scores.sums, np.float64).sum(0)
            tokens += int(np.asarray(scores.counts, np.int64).sum())
        return Sum(total, tokens)

    @functools.cached_property
    def targets(self) -> Targets:
        """Read when tokens are asked for: sums need none."""
        return read_targets(self.plan)

    def _bind(self, run, params, logit_scales):
        scales = np.asarray(logit_scales, np.float32)
        return lambda *where: run(params, self.plan.stream, *where, scales)

    def _jit(self, run):
        zeros = functools.partial(zero_carry, self.model, self.plan)
        everywhere = in_place = None
        if mesh := self.plan.mesh:
            everywhere = partitioning.replicated(mesh)
            # The same sharding before and after a dispatch avoids a second compilation.
            in_place = partitioning.shardings({"carry": jax.eval_shape(zeros)}, mesh)["carry"]
        self._zero_carry = jax.jit(zeros, out_shardings=in_place)
        return jax.jit(run, donate_argnames="carry", out_shardings=(everywhere, in_place))


def score_windows(
    params, stream, carry, first, count, logit_scales, *, model, batch_at, chunk, keep
):
    """The `WindowScores` of `count` windows from `first` on, and the carry after them."""

    def score(carry, batch, index):
        del index

        def at(logit_scale):
            return model.apply(
                {"params": params}, batch, carry, None, logit_scale, method="batch_nats"
            )

        # vmap does not repeat what does not depend on the scale.
        after, nats = jax.vmap(at, out_axes=(None, 0))(logit_scales)
        return after, WindowScores(
            nats if keep else (), nats.sum((-2, -1)), steps.num_targets(batch)
        )

    return over_windows(score, carry, batch_at, stream, first, count, chunk)


def over_windows(score, state, batch_at, stream, first, count, chunk):
    """Runs score(state, batch, index) -> (state, scores) on `count` of W windows.

    Returns the scores [W, ...], with zero padding past `count`, and the state.
    """

    def at(state, index):
        return score(state, batch_at(stream, index), index)

    def body(i, loop):
        state, kept = loop
        state, scores = at(state, first + i)
        return state, jax.tree.map(lambda a, value: a.at[i].set(value), kept, scores)

    shapes = jax.eval_shape(at, state, first)[1]
    kept = jax.tree.map(lambda leaf: jnp.zeros((chunk, *leaf.shape), leaf.dtype), shapes)
    state, kept = jax.lax.fori_loop(0, count, body, (state, kept))
    return kept, state


def dispatches(
    run: Callable[..., tuple[Scored, PyTree]],
    state: PyTree,
    windows: int,
    chunk: int,
    title: str = "",
    show: Callable[[], str] = str,
) -> Iterator[tuple[Scored, PyTree]]:
    """Calls run(state, first, count) -> (scores, state) until all windows are done; yields both.

    `show()` returns the text beside the bar, after the caller has received the scores.
    """
    logged = time.monotonic()
    with tqdm.tqdm(total=windows, desc=title, disable=None if title else True, leave=False) as bar:
        for first in range(0, windows, chunk):
            count = min(chunk, windows - first)
            scores, state = run(state, first, count)
            yield scores, state
            bar.update(count)
            bar.set_postfix_str(show())
            if title and bar.disable and time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                logging.info("%s: window %d/%d %s", title, first + count, windows, show())


def collect_nats(
    run: Callable[..., tuple[jax.typing.ArrayLike, PyTree]],
    state: PyTree,
    targets: Targets,
    windows: int,
    chunk: int,
    title: str = "",
) -> tuple[np.ndarray, PyTree]:
    """Calls run(state, first, count) -> (nats [W, ..., B, T], state) for all windows.

    It ends early once no result is finite, and the rest is padded with nan.
    """
    parts: list[np.ndarray] = []
    total: Any = np.float64(0)

    def show():
        # The best of several results is shown.
        best = np.min(np.where(np.isfinite(total), total, np.inf))
        return f"{best / max(1, targets.valid[: len(parts) * chunk].sum()):.4f} nats"

    for nats, after in dispatches(run, state, windows, chunk, title, show):
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


def search_temperature(
    evaluate: Callable[[tuple[float, ...]], Sequence[float]], at_once: int = AT_ONCE
) -> float:
    """lamb's search: down the grid until two successive values fail to beat the best.

    Args:
      evaluate: returns the nats at each of several logit scales.
      at_once: how many scales are tried in one call, which costs little more than one.
    """
    best, best_xe, failures = 1.0, math.inf, 0
    for first in range(0, len(TEMPERATURES), at_once):
        group = TEMPERATURES[first : first + at_once]
        for temperature, xe in zip(group, evaluate(group), strict=True):
            if xe < best_xe:
                best, best_xe, failures = temperature, xe, 0
            else:
                failures += 1
            if failures == 2:
                return best
    return best


class Scores(NamedTuple):
    """The result of the evaluation of a turn, in nats per token."""

    train_nats: float
    valid_nats: float
    temperature: float  # The logit scale.


class TurnEvaluation:
    """The evaluation before each turn, in lamb's order: training data, temperature, validation.

    Args:
      settings: `config.evaluation`.
    """

    def __init__(
        self,
        model: models.Model,
        task: tasks.Task,
        settings: config_dict.ConfigDict,
        *,
        batch_size: int,
        window: int,
    ):
        self._model, self._task, self._settings = model, task, settings
        self._batch_size = batch_size
        self.search_windows = max(1, settings.temperature_tokens // batch_size // window)
        self._train = self._pass("train", batch_size, settings.train_windows)
        # The search reads many short stripes, as training does.
        self.search = self._pass("valid", batch_size, self.search_windows)
        self._splits: dict[str, Deterministic] = {}

    def __call__(self, params: optax.Params) -> Scores:
        """The scores of these weights."""
        train = mean_nats(self._train, params, 1.0, self._settings.train_windows)
        temperature = self._settings.softmax_temperature
        if temperature is None:
            temperature = search_temperature(functools.partial(self.search_nats, params))
        return Scores(train, self.score("valid", params, temperature), float(temperature))

    def search_nats(self, params: optax.Params, logit_scales: Sequence[float]) -> list[float]:
        """Nats per token at each of these logit scales, on the text of the temperature search."""
        sums = self.search.sums(params, logit_scales, self.search_windows)
        return list(sums.total / sums.count)

    def score(self, split: str, params: optax.Params, logit_scale: float) -> float:
        """Nats per token of a whole split, or of as much as the settings allow."""
        windows = self._settings.max_windows
        return mean_nats(self.whole(split), params, logit_scale, windows, split)

    def whole(self, split: str) -> Deterministic:
        """The pass over a whole split."""
        if split not in self._splits:
            lines = self._settings.lines_per_stripe
            stripes = num_stripes(self._task, split, self._batch_size, lines)
            self._splits[split] = self._pass(split, stripes, self._settings.max_windows)
        return self._splits[split]

    def _pass(self, split: str, stripes: int, windows: int | None) -> Deterministic:
        plan = self._task.plan(split, stripes)
        return Deterministic(self._model, plan, chunk=min(windows or 16, 32))


def mean_nats(run: Deterministic, params: optax.Params, logit_scale: float, *args: Any) -> float:
    """Nats per token at one logit scale."""
    sums = run.sums(params, (logit_scale,), *args)
    return float(sums.total[0] / sums.count)


def num_stripes(task: tasks.Task, split: str, batch_size: int, lines_per_stripe: int) -> int:
    """As many stripes as in training, if each has at least `lines_per_stripe` lines."""
    return max(1, min(batch_size, task.num_lines(split) // lines_per_stripe))

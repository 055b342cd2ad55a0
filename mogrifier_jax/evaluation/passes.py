"""Passes over a plan that keep the nats of every token, and the plain one of them.

Axes: W windows of one dispatch, B stripes, T time, N tokens of the text. A pass runs in
dispatches of W windows, so that it can show its running score; how many of them are wanted is
traced, which spares a second program for the last ones. `evaluate.py` has the sums that
training needs, `montecarlo.py` and `dyneval.py` the other ways to score.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax.data import tasks
from mogrifier_jax.training import metrics

LOG_SECONDS = 30.0  # Between lines where there is no terminal.


class TokenScores(NamedTuple):
    """The score of each token, in the order of the text."""

    tokens: np.ndarray  # [N] int32.
    nats: np.ndarray  # [N] float32: -log p of each.

    def mean(self) -> float:
        """The cross-entropy: nats per token."""
        return metrics.Sum(self.nats, len(self.nats)).mean() if len(self.nats) else math.nan


class Targets(NamedTuple):
    """What the windows of a plan ask for, on the host."""

    tokens: np.ndarray  # [windows, B, T] int32.
    valid: np.ndarray  # [windows, B, T] bool.
    carries: bool

    def in_order(self, nats: np.ndarray) -> TokenScores:
        """The nats of the first windows without padding: stripe after stripe, or as they come."""
        parts = (a[: len(nats)] for a in (self.tokens, nats, self.valid))
        tokens, nats, valid = (a.swapaxes(0, 1) if self.carries else a for a in parts)
        return TokenScores(tokens[valid], nats[valid].astype(np.float32))

    def count(self, windows: int) -> int:
        """Tokens in the first so many windows."""
        return int(self.valid[:windows].sum())


def read_targets(plan: tasks.Plan) -> Targets:
    """Cuts all windows of a plan, without scoring them."""

    def at(index, stream):
        batch = plan.batch_at(stream, index)
        steps = jnp.arange(batch.targets.shape[1])[None]
        lengths = jnp.full(plan.batch_size, steps.size) if batch.lengths is None else batch.lengths
        return batch.targets, steps < lengths[:, None]

    def read(stream):
        return jax.lax.map(lambda index: at(index, stream), jnp.arange(plan.num_windows))

    tokens, valid = map(np.asarray, jax.jit(read, out_shardings=_everywhere(plan))(plan.stream))
    return Targets(tokens, valid, plan.carries)


class Deterministic:
    """Scores weights without dropout; compiles once, for any weights and temperature."""

    def __init__(self, model: Any, plan: tasks.Plan, *, chunk: int = 64):
        self.model, self.plan = model, plan
        self.targets = read_targets(plan)
        self._chunk = min(chunk, plan.num_windows)
        run = functools.partial(
            score_windows, model=model, batch_at=plan.batch_at, chunk=self._chunk
        )
        self._run = jax.jit(run, donate_argnames="carry", out_shardings=(_everywhere(plan), None))

    def __call__(
        self,
        params: Any,
        temperature: float = 1.0,
        max_windows: int | None = None,
        title: str = "",
    ) -> TokenScores:
        """Scores of the first `max_windows` windows, or of all."""
        carry = jax.tree.map(
            jnp.copy, self.model.zero_carry(self.plan.batch_size) if self.plan.carries else ()
        )

        def run(carry, first, count):
            return self._run(params, self.plan.stream, carry, first, count, temperature)

        windows = min(self.plan.num_windows, max_windows or self.plan.num_windows)
        nats = drive(run, carry, self.targets, windows, self._chunk, title)[0]
        return self.targets.in_order(nats)


def score_windows(params, stream, carry, first, count, temperature, *, model, batch_at, chunk):
    """Nats [W, B, T] of `count` windows from `first` on, zeros behind them, and the carry."""

    def score(carry, batch, index):
        del index
        nats, carry = model.apply(
            {"params": params}, batch, carry, None, temperature, method="batch_nats"
        )
        return carry, nats

    return over_windows(score, carry, lambda index: batch_at(stream, index), first, count, chunk)


def over_windows(score, state, batch_at, first, count, chunk, several=()):
    """Runs score(state, batch, index) -> (state, nats [*several, B, T]) on `count` of W windows."""
    shape = jax.eval_shape(batch_at, first).targets.shape

    def body(i, loop):
        state, nats = loop
        state, found = score(state, batch_at(first + i), first + i)
        return state, nats.at[i].set(found.astype(nats.dtype))

    start = (state, jnp.zeros((chunk, *several, *shape)))
    state, nats = jax.lax.fori_loop(0, count, body, start)
    return nats, state


def drive(
    run: Callable[..., tuple[jax.Array, Any]],
    state: Any,
    targets: Targets,
    windows: int,
    chunk: int,
    title: str = "",
    show: Callable[[float], str] = "{:.4f} nats".format,
) -> tuple[np.ndarray, Any]:
    """Calls run(state, first, count) -> (nats [W, ..., B, T], state) until all is scored.

    It ends early once nothing finite is left; what comes after is nan then.
    """
    parts, total, done, logged = [], 0.0, 0, time.monotonic()
    bar = tqdm.tqdm(total=windows, desc=title, disable=None if title else True, leave=False)
    for first in range(0, windows, chunk):
        count = min(chunk, windows - first)
        nats, state = run(state, first, count)
        parts.append(np.asarray(nats)[:count])
        done = first + count
        total = total + parts[-1].astype(np.float64).sum((0, -2, -1))
        finite = np.isfinite(total)
        # Of several results at a time the best one is shown.
        score = np.min(np.where(finite, total, np.inf)) / max(1, targets.count(done))
        bar.update(count)
        bar.set_postfix_str(show(score))
        if title and bar.disable and time.monotonic() - logged > LOG_SECONDS:
            logged = time.monotonic()
            logging.info("%s: window %d/%d, %s", title, done, windows, show(score))
        if not finite.any():
            break
    bar.close()
    found = np.concatenate(parts)
    padding = [(0, windows - done)] + [(0, 0)] * (found.ndim - 1)
    return np.pad(found, padding, constant_values=np.nan), state


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """A copy on every device of the mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def _everywhere(plan: tasks.Plan) -> NamedSharding | None:
    """What results are gathered to, if the plan's stripes lie over a mesh."""
    if plan.mesh is not None:
        return NamedSharding(plan.mesh, PartitionSpec())
    for leaf in jax.tree.leaves(plan.stream):
        if isinstance(leaf.sharding, NamedSharding):
            return NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return None

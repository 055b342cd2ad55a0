"""Root mean squares of the gradients over the training text, for dynamic evaluation.

Computing them takes a pass over much of the training text, so they are saved in the workdir, with a
digest of themselves and of everything that they depend on. `dyneval.py` divides gradients by them.
"""

import functools
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import PyTree

from mogrifier_jax import errors, files
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import array_digests, loaded_run
from mogrifier_jax.nn import stack
from mogrifier_jax.training import atomic_files, scoring, state_arrays

MAX_WINDOWS = 500  # As in the paper.

Params = loaded_run.Params


class Statistics(NamedTuple):
    """Root mean squares of the gradients over the training text."""

    rms: Params  # A tree like the weights.
    mean: jax.Array  # m: the mean of `rms` over all weights.
    losses: np.ndarray | None  # [windows]: the mean over stripes of the summed nats.


def compute_statistics(
    model: loaded_run.Model,
    params: Params,
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

    def dispatch(state: PyTree, first: int, count: int) -> tuple[jax.Array, PyTree]:
        return step(params, state, plan.stream, first, count)

    state = jax.tree.map(jnp.zeros_like, params), scoring.zero_carry(model, plan)
    losses = []
    title = "gradient statistics"
    for window_losses, after in scoring.dispatches(dispatch, state, windows, chunk, title):
        losses.append(np.asarray(window_losses))
        state = after
    rms, mean = _to_rms(state[0], windows)
    return Statistics(rms, mean, np.concatenate(losses)[:windows])


def square_gradients(
    params: Params,
    state: tuple[Params, stack.Carries],
    stream: tasks.Stream,
    first: jax.Array,
    count: jax.Array,
    *,
    model: loaded_run.Model,
    batch_at: tasks.BatchAt,
    chunk: int,
) -> tuple[jax.Array, tuple[Params, stack.Carries]]:
    """Losses [W] of `count` windows, and the state: summed squared gradients and the carry."""
    lengths = batch_at(stream, 0).lengths
    # Empty stripes, which fill up the mesh, do not count.
    stripes = None if lengths is None else jnp.sum(lengths > 0)

    def loss_fn(
        params: Params, batch: tasks.Batch, carry: stack.Carries
    ) -> tuple[jax.Array, PyTree]:
        nats: Any  # Flax annotates the second result of `apply` as variables.
        carry, nats = model.apply({"params": params}, batch, carry, method="batch_nats")
        return nats.sum() / (nats.shape[0] if stripes is None else stripes), carry

    def score(state: PyTree, batch: tasks.Batch, index: jax.Array) -> PyTree:
        del index
        squares, carry = state
        (loss, carry), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, carry)
        squares = jax.tree.map(lambda s, g: s + jnp.square(g), squares, grads)
        return (squares, carry), loss

    return scoring.over_windows(score, state, batch_at, stream, first, count, chunk)


@jax.jit
def _to_rms(squares: Params, windows: int | jax.Array) -> tuple[Params, jax.Array]:
    rms = jax.tree.map(lambda s: jnp.sqrt(s / windows), squares)
    leaves = jax.tree.leaves(rms)
    return rms, sum(leaf.sum() for leaf in leaves) / sum(leaf.size for leaf in leaves)


def read_or_compute(
    workdir: str | os.PathLike,
    step: int,
    model: loaded_run.Model,
    params: Params,
    plan: tasks.Plan,
    *,
    max_windows: int = MAX_WINDOWS,
) -> Statistics:
    """Reads the statistics from the workdir, or computes them and saves them there."""
    if jax.process_count() > 1:
        # Hosts may see different files, but either all of them must compute or none.
        return compute_statistics(model, params, plan, max_windows=max_windows)
    batch, window = jax.eval_shape(plan.batch_at, plan.stream, 0).targets.shape
    path = pathlib.Path(workdir) / "dyneval" / f"statistics_B{batch}_T{window}.npz"
    sizes = (step, batch, window, max_windows)
    origin = array_digests.digest_arrays(repr(sizes), state_arrays.to_arrays((params, plan.stream)))
    statistics = _read_statistics(path, origin, params)
    if statistics is None:
        statistics = compute_statistics(model, params, plan, max_windows=max_windows)
        _write_statistics(path, origin, statistics)
    return statistics


_ARRAYS = {
    "digest": files.Array("U", 0),
    "mean": files.Array("f", 0),
    "losses": files.Array("f", 1),
}


def _read_statistics(path: pathlib.Path, origin: str, params: Params) -> Statistics | None:
    """The statistics of this origin; None if there is no such file, or it is of another origin."""
    if not path.exists():
        return None
    try:
        arrays = files.read_arrays(path, _ARRAYS, remedy="")
    except errors.UsageError as error:
        logging.warning("%s; the statistics are computed again", error)
        return None
    digest = str(arrays.pop("digest"))
    if digest != array_digests.digest_arrays(origin, dict(sorted(arrays.items()))):
        logging.warning(
            "%s belongs to other weights or another text, or was changed; "
            "the statistics are computed again",
            path,
        )
        return None
    rms = [jnp.asarray(arrays[f"rms.{name}"]) for name in state_arrays.name_leaves(params)]
    logging.info("gradient statistics were read from %s", path)
    rms = jax.tree.unflatten(jax.tree.structure(params), rms)
    return Statistics(rms, jnp.asarray(arrays["mean"]), arrays["losses"])


def _write_statistics(path: pathlib.Path, origin: str, statistics: Statistics) -> None:
    """Writes statistics with a digest of them and of what they were computed from."""
    arrays = {
        f"rms.{n}": np.asarray(a) for n, a in state_arrays.name_leaves(statistics.rms).items()
    }
    arrays |= {"mean": np.asarray(statistics.mean), "losses": np.asarray(statistics.losses)}
    digest = array_digests.digest_arrays(origin, dict(sorted(arrays.items())))
    with atomic_files.replacing(path) as file:
        np.savez(file, digest=np.array(digest), **arrays)  # type: ignore[arg-type]

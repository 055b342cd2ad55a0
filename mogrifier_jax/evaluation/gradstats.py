"""Root mean squares of gradients over the training text, which `dyneval.py` scales by.

Axes: W windows of one dispatch, B stripes, T time. They take a pass over much of the training
text, so a workdir keeps them, with a digest of all that they follow from.
"""

import functools
import hashlib
import os
import pathlib
import zipfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from mogrifier_jax import errors
from mogrifier_jax.data import tasks
from mogrifier_jax.training import evaluate, leaves, workdirs

BATCH_SIZE, MAX_WINDOWS = 1024, 500  # As in the paper.


class Statistics(NamedTuple):
    """What is known of the gradients."""

    rms: Any  # A tree like the weights.
    mean: jax.Array  # m: the mean of `rms` over all weights.
    losses: Any  # [windows]: mean over stripes of the summed nats.


def gradient_statistics(
    model: Any,
    params: Any,
    plan: tasks.Plan,
    *,
    max_windows: int = MAX_WINDOWS,
    chunk: int = 16,
    title: str = "",
) -> Statistics:
    """Root mean squares of the gradients of up to `max_windows` windows; no weight changes."""
    windows = min(plan.num_windows, max_windows)
    if windows < 1:
        raise errors.UsageError(f"statistics over {windows} windows are undefined; take 1 or more")
    step = jax.jit(
        functools.partial(
            square_gradients, model=model, batch_at=plan.batch_at, chunk=min(chunk, windows)
        ),
        donate_argnames="state",
    )

    def run(state, first, count):
        return step(params, state, plan.stream, first, count)

    state = jax.tree.map(jnp.zeros_like, params), evaluate.zero_carry(model, plan)
    losses = []
    for found, after in evaluate.dispatches(run, state, windows, min(chunk, windows), title):
        losses.append(np.asarray(found))
        state = after
    rms, mean = _to_rms(state[0], windows)
    return Statistics(rms, mean, np.concatenate(losses)[:windows])


def square_gradients(params, state, stream, first, count, *, model, batch_at, chunk):
    """Losses [W] of `count` windows, and the state: summed squared gradients and the carry."""
    lengths = batch_at(stream, 0).lengths
    stripes = None if lengths is None else jnp.sum(lengths > 0)  # Others only fill up the mesh.

    def loss_fn(params, batch, carry):
        nats, carry = model.apply({"params": params}, batch, carry, method="batch_nats")
        return nats.sum() / (nats.shape[0] if stripes is None else stripes), carry

    def score(state, batch, index):
        del index
        squares, carry = state
        (loss, carry), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, carry)
        squares = jax.tree.map(lambda s, g: s + jnp.square(g), squares, grads)
        return (squares, carry), loss

    return evaluate.over_windows(
        score, state, lambda index: batch_at(stream, index), first, count, chunk
    )


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
    title: str = "",
) -> Statistics:
    """`gradient_statistics` from the workdir, or computed and kept there for the next time."""
    if jax.process_count() > 1:
        # Whether to compute must not depend on what each host sees of a file.
        return gradient_statistics(model, params, plan, max_windows=max_windows, title=title)
    batch, window = jax.eval_shape(plan.batch_at, plan.stream, 0).targets.shape
    path = pathlib.Path(workdir) / "dyneval" / f"statistics_B{batch}_T{window}.npz"
    digest = _digest((params, plan.stream), step, batch, window, max_windows)
    found = _read(path, digest, params)
    if found is None:
        found = gradient_statistics(model, params, plan, max_windows=max_windows, title=title)
        _write(path, digest, found)
    return found


def _read(path: pathlib.Path, digest: str, params: Any) -> Statistics | None:
    if not path.exists():
        return None
    try:
        # Opened here: a damaged file would be left open otherwise.
        with path.open("rb") as file, np.load(file) as arrays:
            if str(arrays["digest"]) == digest:
                rms = [arrays[f"rms.{name}"] for name in leaves.name_leaves(params)]
                rms = jax.tree.unflatten(jax.tree.structure(params), map(jnp.asarray, rms))
                logging.info("gradient statistics are those in %s", path)
                return Statistics(rms, jnp.asarray(arrays["mean"]), arrays["losses"])
        logging.info("%s is of other weights or of another text; it is made again", path)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        logging.warning("%s cannot be read (%s); it is made again", path, error)
    return None


def _write(path: pathlib.Path, digest: str, statistics: Statistics) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rms = {f"rms.{name}": np.asarray(a) for name, a in leaves.name_leaves(statistics.rms).items()}
    with workdirs.replacing(path) as file:
        np.savez(
            file,
            digest=np.array(digest),
            mean=np.asarray(statistics.mean),
            losses=statistics.losses,
            **rms,  # type: ignore[arg-type]
        )


def _digest(tree: Any, *numbers: int) -> str:
    """Tells weights, texts and sizes apart."""
    digest = hashlib.sha256(repr(numbers).encode())
    for name, array in leaves.to_arrays(tree).items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()

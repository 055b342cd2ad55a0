"""Refuses a run that does not fit into the memory of this machine."""

import os

import jax
import jax.numpy as jnp

from mogrifier_jax import errors
from mogrifier_jax.training import runs

_BATCH = "data.window or data.batch_size, or set optimizer.accumulate"


def check(run: runs.Run) -> None:
    """Refuses a run that exceeds the memory of this machine; accelerators report it themselves."""
    if jax.default_backend() != "cpu":
        return
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract_state())]
    model = "model.hidden_size, model.num_params or model.num_layers"
    # The outputs of each layer are kept for the backward pass; other residuals depend on the cell.
    outputs = run.model.num_layers * run.model.hidden_size * jnp.dtype(run.model.dtype).itemsize
    groups = 1 if run.program.accumulate_at_once else run.program.accumulate
    batch = jax.eval_shape(run.task.batch_at, run.task.stream, jnp.int32(0))
    samples = run.program.training_samples
    tokens = samples * batch.targets.size // groups // jax.process_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for what, size, remedy in (
        ("the state of this run takes", sum(sizes), model),
        (f"a step over {tokens:,} tokens takes at least", tokens * outputs, _BATCH),
    ):
        if size > memory:
            raise errors.UsageError(
                f"{what} {size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}; "
                f"lower {remedy}"
            )

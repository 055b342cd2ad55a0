"""TrainState and the train step, which resets carries, computes gradients and updates weights.

Both `train_step` and `train_steps`, which makes many steps in one dispatch, are pure functions of
the state. `optimizers.py` has the update rules, and `averaging.py` the averages of the weights.

Axes: B stripes, D dropout samples of a stripe, T time, N groups of stripes whose gradients are
accumulated, S steps. Numbers that are tuned are traced (`Hyperparameters`); whatever determines
shapes and structure is static (`Program`).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from mogrifier_jax.data import streams, tasks
from mogrifier_jax.nn import models, stack
from mogrifier_jax.training import averaging, optimizers


class Hyperparameters(NamedTuple):
    """Scalars that may change without recompilation."""

    learning_rate: float | jax.Array
    l2_penalty: float | jax.Array
    drop_state_probability: float | jax.Array = 0.0  # That a window starts from a zero carry.
    dropout: models.Dropout = models.Dropout()


@flax.struct.dataclass
class TrainState:
    """Everything that a resumed run needs. The step is also the position in the training stream."""

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState
    average: PyTree
    carry: stack.Carries
    key: jax.Array


class Program(NamedTuple):
    """What a train step is compiled from, without the traced hyperparameters."""

    model: models.Model
    optimizer: optax.GradientTransformation
    average: averaging.Averaging
    batch_at: tasks.BatchAt  # (stream, step) to the batch of that step.
    accumulate: int = 1  # Groups that a batch is split into.
    accumulate_reduce: str = "mean"  # "sum", as in lamb, is `accumulate` times larger.
    accumulate_at_once: bool = False  # All groups in parallel: faster, but needs more memory.
    training_samples: int = 1  # Dropout samples of each stripe, whose probabilities are averaged.


def init_state(
    key: jax.Array, *, program: Program, batch_size: int, carries: bool = True
) -> TrainState:
    """The initial state; the parameters depend on the key alone, not on the batch.

    `carries` says whether the state of the recurrence is carried from batch to batch.
    """
    init_key, root_key = jax.random.split(key)
    params = program.model.init(init_key, **program.model.example())["params"]
    return TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=program.optimizer.init(params),
        average=program.average.init(params),
        carry=program.model.zero_carry(batch_size * program.training_samples) if carries else (),
        key=root_key,
    )


def train_step(
    state: TrainState, batch: tasks.Batch, hyper: Hyperparameters, *, program: Program
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update on a batch of windows; the metrics are nats per token and the gradient norm."""
    step_key = jax.random.fold_in(state.key, state.step)
    reset_key, dropout_key = jax.random.split(step_key)
    carry = reset_stripes(state.carry, reset_key, state.step, hyper.drop_state_probability)
    carry = by_stripe(carry, program.training_samples)
    groups = program.accumulate

    def loss_fn(
        params: optax.Params, batch: tasks.Batch, carry: stack.Carries, group: jax.Array | int
    ) -> tuple[jax.Array, tuple[stack.Carries, jax.Array]]:
        rngs = {"dropout": jax.random.fold_in(dropout_key, group)}
        carry, nats = sampled_nats(program, params, batch, carry, hyper.dropout, rngs)
        # A sum over time, as in lamb, which is the scale of clipping and of the L2 penalty.
        return nats.sum(1).mean(), (carry, nats.sum())

    grad_fn = jax.grad(loss_fn, has_aux=True)
    if groups == 1:
        grads, (carry, nats) = grad_fn(state.params, batch, carry, 0)
    else:

        def add_group(total: optax.Updates, inputs: Any) -> tuple[optax.Updates, Any]:
            grads, (carry, nats) = grad_fn(state.params, *inputs)
            return jax.tree.map(jnp.add, total, grads), (carry, nats)

        def sum_of_losses(params: optax.Params, inputs: Any) -> tuple[jax.Array, Any]:
            losses, aux = jax.vmap(functools.partial(loss_fn, params))(*inputs)
            return losses.sum(), aux

        parts = (*into_groups((batch, carry), groups), jnp.arange(groups))
        if program.accumulate_at_once:
            grads, (carry, nats) = jax.grad(sum_of_losses, has_aux=True)(state.params, parts)
        else:
            zeros = jax.tree.map(jnp.zeros_like, state.params)
            grads, (carry, nats) = jax.lax.scan(add_group, zeros, parts)
        carry, nats = from_groups(carry), nats.sum()
        if program.accumulate_reduce == "mean":
            grads = jax.tree.map(lambda g: g / groups, grads)
    carry = by_row(carry, program.training_samples)
    scale = groups if program.accumulate_reduce == "sum" else 1
    grads = optimizers.add_l2(grads, state.params, scale * hyper.l2_penalty)
    direction, opt_state = program.optimizer.update(grads, state.opt_state, state.params)
    params = optimizers.descend(state.params, direction, hyper.learning_rate)
    metrics = {
        "loss_nats": nats / jnp.maximum(num_targets(batch), 1),
        "grad_norm": optax.tree.norm(grads),
    }
    state = dataclasses.replace(
        state,
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        average=program.average.update(state.average, params),
        carry=carry,
    )
    return state, metrics


def sampled_nats(
    program: Program,
    params: optax.Params,
    batch: tasks.Batch,
    carry: stack.Carries,
    dropout: models.Dropout,
    rngs: dict[str, jax.Array],
) -> tuple[stack.Carries, jax.Array]:
    """Nats [B, T] of the mean probability over D dropout samples; the carry is [B, D, ...].

    Each stripe is repeated D times in the batch, and each of these rows has its own masks and its
    own carry. With one sample the carry has no axis D.
    """
    count = program.training_samples
    if count > 1:
        batch, carry = repeat_rows(batch, count), by_row(carry, count)
    nats: Any  # Flax annotates the second result of `apply` as variables.
    carry, nats = program.model.apply(
        {"params": params}, batch, carry, dropout, rngs=rngs, method="batch_nats"
    )
    if count > 1:
        nats = nats.reshape(-1, count, *nats.shape[1:])
        nats = math.log(count) - jax.nn.logsumexp(-nats, axis=1)
        carry = by_stripe(carry, count)
    return carry, nats


def repeat_rows(tree: PyTree, count: int) -> PyTree:
    """[B, ...] to [B D, ...]; copies of a row are adjacent, so that they share its device."""

    def repeat(a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a[:, None], (a.shape[0], count, *a.shape[1:])).reshape(
            -1, *a.shape[1:]
        )

    return jax.tree.map(repeat, tree)


def by_stripe(carry: stack.Carries, samples: int) -> stack.Carries:
    """[B D, ...] to [B, D, ...]; without the axis D for one sample."""
    if samples == 1:
        return carry
    return jax.tree.map(lambda a: a.reshape(-1, samples, *a.shape[1:]), carry)


def by_row(carry: stack.Carries, samples: int) -> stack.Carries:
    """The inverse of `by_stripe`."""
    return carry if samples == 1 else jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), carry)


def train_steps(
    state: TrainState,
    stream: tasks.Stream,
    hyper: Hyperparameters,
    *,
    program: Program,
    num_steps: int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Many steps in one dispatch, with windows sliced on the device; metrics are [S]."""

    def body(state: TrainState, _: None) -> tuple[TrainState, dict[str, jax.Array]]:
        batch = program.batch_at(stream, state.step)
        return train_step(state, batch, hyper, program=program)

    return jax.lax.scan(body, state, length=num_steps)


def reset_stripes(
    carry: stack.Carries, key: jax.Array, step: jax.Array, probability: float | jax.Array
) -> stack.Carries:
    """Zeroes the carry of each stripe with this probability, but never before the first window."""
    leaves = jax.tree.leaves(carry)
    if not leaves:
        return carry
    keep = streams.keep_state(key, step, leaves[0].shape[0], probability)
    return jax.tree.map(lambda a: jnp.where(keep[:, None], a, jnp.zeros_like(a)), carry)


def num_targets(batch: tasks.Batch) -> jax.Array:
    """The number of target tokens of a batch."""
    full = batch.targets.size if batch.lengths is None else batch.lengths.sum()
    return jnp.asarray(full, jnp.float32)


def into_groups(tree: PyTree, groups: int) -> PyTree:
    """[B, ...] to [N, B / N, ...]; groups are interleaved, so that no row changes its device."""
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(a.shape[0] // groups, groups, *a.shape[1:]), 1, 0), tree
    )


def from_groups(tree: PyTree) -> PyTree:
    """The inverse of `into_groups`."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(-1, *a.shape[2:]), tree)

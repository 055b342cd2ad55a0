"""Softmax: from the outputs of the stack to logits or nats, with one distribution or a mixture.

Axes: T time, B batch, H hidden, E embedding, V vocabulary, C components of a mixture.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import layout

from mogrifier_jax.nn import cells, dropout, recurrence

Dtype = Any
# The most logits of a chunk on CPUs. They have 16 MB, so they stay in a cache after their matmul.
CPU_LOGITS = 1 << 22


def normal_by_fan(fan: int, factor: float = 1.0) -> Any:
    """lamb's initialiser of embeddings: a truncated normal of deviation sqrt(factor / fan)."""
    return nn.initializers.truncated_normal((factor / fan) ** 0.5 / 0.87962566)


class Softmax(nn.Module):
    """Turns the outputs [T, B, H] of the stack into logits or nats."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    mixture_components: int
    tied_embeddings: bool
    max_logits: int
    dtype: Dtype

    def setup(self) -> None:
        """Declares the parameters that these sizes need."""
        hidden, size, count = self.hidden_size, self.embedding_size, self.mixture_components
        if count:
            draw = normal_by_fan(hidden)
            self.projection = self.param("projection", draw, (hidden, count, size))
            self.projection_bias = self.param("projection_bias", _zeros, (count, size))
            self.mixture = self.param("mixture", draw, (hidden, count))
        elif size != hidden:
            self.projection = self.param("projection", nn.initializers.orthogonal(), (hidden, size))
        if not self.tied_embeddings:
            self.kernel = self.param("kernel", normal_by_fan(size), (size, self.vocab_size))
        self.bias = self.param("bias", _zeros, (self.vocab_size,))

    def nats(self, hs, targets, embedding, rates, temperature) -> jax.Array:
        """-log p(target) [T, B]; no more than `max_logits` logits are in memory at once."""
        us, log_weights = self.features(hs, rates)
        score = functools.partial(self.score, self.matrix(embedding), temperature)
        chunks = self._count_chunks(targets, self.max_logits)
        in_cache = self._count_chunks(targets, min(self.max_logits, CPU_LOGITS))
        ways = {}
        if in_cache > 1:
            ways["cpu"] = functools.partial(_in_chunks, functools.partial(_flat, score), in_cache)
        default = functools.partial(_in_chunks, score, chunks)
        return jax.lax.platform_dependent(us, log_weights, targets, **ways, default=default)

    def _count_chunks(self, targets, max_logits) -> int:
        steps, batch = targets.shape
        logits_of_step = batch * max(1, self.mixture_components) * self.vocab_size
        steps_at_once = max(1, max_logits // logits_of_step)
        return -(-steps // steps_at_once)

    def logits(self, hs, embedding, temperature, rates=dropout.NO_DROPOUT) -> jax.Array:
        """Unnormalised log-probabilities [T, B, V]."""
        us, log_weights = self.features(hs, rates)
        logits = component_logits(us, self.matrix(embedding), self.bias, temperature)
        if log_weights is None:
            return logits
        return jax.nn.logsumexp(jax.nn.log_softmax(logits) + log_weights[..., None], axis=-2)

    def features(self, hs, rates):
        """The vectors that multiply the embeddings: [T, B, E], or [T, B, C, E] and log weights."""
        if rates.output is not None:
            hs = dropout.drop(rates.output, hs, self.make_rng("dropout"))
        log_weights = None
        if self.mixture_components:
            us = jnp.tanh(
                cells.project(hs, self.projection.astype(self.dtype), self.projection_bias)
            )
            us = us.astype(self.dtype)
            log_weights = jax.nn.log_softmax(cells.project(hs, self.mixture.astype(self.dtype)))
        elif self.embedding_size != self.hidden_size:
            us = jnp.tensordot(hs, self.projection.astype(self.dtype), axes=1)
        else:
            return hs, None
        if rates.downprojected is not None:
            us = dropout.drop(rates.downprojected, us, self.make_rng("dropout"))
        return us, log_weights

    def matrix(self, embedding) -> jax.Array:
        """The output embeddings [V, E] in the compute dtype."""
        table = embedding if self.tied_embeddings else self.kernel.T
        return table.astype(self.dtype)

    def score(self, matrix, temperature, us, log_weights, targets) -> jax.Array:
        """-log p(target) under the softmax or the mixture."""
        if log_weights is not None:
            targets = jnp.broadcast_to(targets[..., None], us.shape[:-1])
        temperature = jnp.asarray(temperature, cells.wide(us.dtype))
        log_p = log_probability(us, matrix, self.bias, temperature, targets)
        return -log_p if log_weights is None else -jax.nn.logsumexp(log_weights + log_p, axis=-1)


def component_logits(us, matrix, bias, temperature) -> jax.Array:
    """The logits [..., V] of us [..., E] and a matrix [V, E], in at least float32."""
    wide = cells.wide(us.dtype)
    contract = (((us.ndim - 1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(us, matrix, contract, preferred_element_type=wide)
    return (logits + cells.stretch(bias, logits)) * jnp.asarray(temperature, wide)


def _in_chunks(score, chunks, us, log_weights, targets) -> jax.Array:
    """Calls `score` on some steps at a time; the backward pass computes their logits again."""
    if chunks == 1:
        return score(us, log_weights, targets)
    steps, batch = targets.shape
    size = -(-steps // chunks)
    padding = chunks * size - steps

    def cut(a):
        a = jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(chunks, size, *a.shape[1:])

    parts = jax.tree.map(cut, (us, log_weights, targets))
    nats = jax.lax.map(jax.checkpoint(lambda part: score(*part)), parts)
    return nats.reshape(chunks * size, batch)[:steps]


def _flat(score, us, log_weights, targets) -> jax.Array:
    """Calls `score` with one leading axis, for which XLA:CPU copies fewer logits than for two.

    The batch comes first in that axis, so each device keeps its part of the batch.
    """

    def flatten(a):
        return a.swapaxes(0, 1).reshape(-1, *a.shape[2:])

    nats = score(*jax.tree.map(flatten, (us, log_weights, targets)))
    return nats.reshape(targets.shape[::-1]).T


@jax.custom_vjp
def log_probability(us, matrix, bias, temperature, targets) -> jax.Array:
    """log softmax(logits)[target] for us [..., E] and targets [...].

    The gradient at the logits is computed once, in the compute dtype. Without this the compiler
    computes it from float32 logits in each of the three places that read it.
    """
    return _log_probability(us, matrix, bias, temperature, targets)[0]


def _log_probability(us, matrix, bias, temperature, targets):
    logits = component_logits(us, matrix, bias, temperature)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    saved = (us, matrix, bias, temperature, targets, logits, normaliser)
    return chosen - normaliser, saved


def _log_probability_backward(saved, d_log_p):
    us, matrix, bias, temperature, targets, logits, normaliser = saved
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    one_hot = (ids == targets[..., None]).astype(logits.dtype)
    d_logits = d_log_p[..., None] * (one_hot - jnp.exp(logits - normaliser[..., None]))
    d_temperature = (d_logits * logits).sum() / temperature

    def spread(d_logits, us, matrix, operand=None):
        d_logits = jax.lax.optimization_barrier(d_logits.astype(operand or us.dtype))
        lead = tuple(range(us.ndim - 1))
        dot = functools.partial(jnp.tensordot, preferred_element_type=us.dtype)
        d_us = dot(d_logits, matrix.astype(d_logits.dtype), axes=1)
        d_matrix = dot(d_logits, us.astype(d_logits.dtype), (lead, lead))
        return d_us, d_matrix, cells.sum_leading(d_logits, len(lead)).astype(bias.dtype)

    def spread_on_tpus(*arguments):
        d_us, d_matrix, d_bias = spread(*arguments, operand=recurrence.TPU_OPERAND)
        # This is the layout of the embeddings. XLA would transpose the gradient. Then it would
        # transpose the embeddings and their optimizer state, too, at each train step.
        d_matrix = layout.with_layout_constraint(d_matrix, layout.Layout((0, 1)))
        # The barrier computes both before the backward loops. Then the gradient of the logits
        # takes no memory during these.
        return *jax.lax.optimization_barrier((d_us, d_matrix)), d_bias

    ways = {"tpu": spread_on_tpus} if recurrence.rounded_on_tpus(us.dtype) else {}
    d_logits = temperature * d_logits
    found = jax.lax.platform_dependent(d_logits, us, matrix, **ways, default=spread)
    return *found, d_temperature, None


log_probability.defvjp(_log_probability, _log_probability_backward)


def _zeros(key, shape, dtype=jnp.float32):
    del key
    return jnp.zeros(shape, dtype)

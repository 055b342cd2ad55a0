"""The softmax over the vocabulary, or a mixture of softmaxes: from the stack to logits or nats.

Axes: T time, B batch, H hidden, E embedding, V vocabulary, C components of a mixture,
*N any leading axes.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from mogrifier_jax.nn import cells, dropout, plans, taps

# (features, log_weights, targets) -> nats
Score = Callable[[Array, Array | None, Array], Array]
# A number, or a traced one.
LogitScale = float | Float[Array, ""]


def normal_by_fan(fan: int, factor: float = 1.0) -> nn.initializers.Initializer:
    """lamb's initialiser of embeddings: a truncated normal with variance factor / fan."""
    return nn.initializers.truncated_normal((factor / fan) ** 0.5 / 0.87962566)


class Softmax(nn.Module):
    """Turns the outputs [T, B, H] of the stack into logits or nats."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    mixture_components: int
    tied_embeddings: bool
    max_logits: int
    dtype: DTypeLike

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

    def nats(
        self,
        hs: Float[Array, "T B H"],
        targets: Integer[Array, "T B"],
        embedding: Float[Array, "V E"],
        rates: dropout.Dropout,
        logit_scale: LogitScale,
    ) -> Float[Array, "T B"]:
        """-log p(target); no more than `max_logits` logits are in memory at once."""
        us, log_weights = self.features(hs, rates)
        score: Score = functools.partial(self.score, self.matrix(embedding), logit_scale)

        def compute(plan: plans.SoftmaxPlan, *arguments: Any) -> Float[Array, "T B"]:
            chunks = self._count_chunks(targets, min(self.max_logits, plan.logits_at_once))
            flat = plan.flatten and chunks > 1
            return _in_chunks(
                functools.partial(_score_flat, score) if flat else score, chunks, *arguments
            )

        make_plan = functools.partial(plans.make_softmax_plan, dtype=us.dtype)
        return plans.follow(make_plan, compute, us, log_weights, targets)

    def _count_chunks(self, targets: Integer[Array, "T B"], max_logits: float) -> int:
        """How many parts the steps are cut into so that a part has at most `max_logits` logits."""
        steps, batch = targets.shape
        logits_of_step = batch * max(1, self.mixture_components) * self.vocab_size
        steps_at_once = max(1, int(max_logits // logits_of_step))
        return -(-steps // steps_at_once)

    def logits(
        self,
        hs: Float[Array, "T B H"],
        embedding: Float[Array, "V E"],
        logit_scale: LogitScale,
        rates: dropout.Dropout = dropout.NO_DROPOUT,
    ) -> Float[Array, "T B V"]:
        """Unnormalised log-probabilities."""
        us, log_weights = self.features(hs, rates)
        logits = component_logits(us, self.matrix(embedding), self.bias, logit_scale)
        if log_weights is None:
            return logits
        return jax.nn.logsumexp(jax.nn.log_softmax(logits) + log_weights[..., None], axis=-2)

    def features(
        self, hs: Float[Array, "T B H"], rates: dropout.Dropout
    ) -> tuple[Float[Array, "T B *C E"], Float[Array, "T B C"] | None]:
        """The vectors that multiply the embeddings, and the log weights of a mixture's components.

        Without a mixture the axis C is absent.
        """
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
            # With a wide result, the gradient of the matrix is accumulated in float32, too.
            wide = cells.wide(self.dtype)
            projection = self.projection.astype(self.dtype)
            us = jnp.tensordot(hs, projection, axes=1, preferred_element_type=wide)
            us = us.astype(self.dtype)
        else:
            return hs, None
        if rates.downprojected is not None:
            us = dropout.drop(rates.downprojected, us, self.make_rng("dropout"))
        return us, log_weights

    def matrix(self, embedding: Float[Array, "V E"]) -> Float[Array, "V E"]:
        """The output embeddings in the compute dtype."""
        table = embedding if self.tied_embeddings else self.kernel.T
        return table.astype(self.dtype)

    def score(
        self,
        matrix: Float[Array, "V E"],
        logit_scale: LogitScale,
        us: Float[Array, "*N E"],
        log_weights: Float[Array, "*N"] | None,
        targets: Integer[Array, "*B"],
    ) -> Float[Array, "*B"]:
        """-log p(target) under the softmax or the mixture."""
        if log_weights is not None:
            targets = jnp.broadcast_to(targets[..., None], us.shape[:-1])
        logit_scale = jnp.asarray(logit_scale, cells.wide(us.dtype))
        log_p = log_probability(us, matrix, self.bias, logit_scale, targets)
        return -log_p if log_weights is None else -jax.nn.logsumexp(log_weights + log_p, axis=-1)


def component_logits(
    us: Float[Array, "*N E"],
    matrix: Float[Array, "V E"],
    bias: Float[Array, "V"],
    logit_scale: LogitScale,
) -> Float[Array, "*N V"]:
    """The logits in at least float32."""
    wide = cells.wide(us.dtype)
    contract = (((us.ndim - 1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(us, matrix, contract, preferred_element_type=wide)
    return (logits + cells.stretch(bias, logits)) * jnp.asarray(logit_scale, wide)


def _in_chunks(
    score: Score,
    chunks: int,
    us: Float[Array, "T B *C E"],
    log_weights: Float[Array, "T B C"] | None,
    targets: Integer[Array, "T B"],
) -> Float[Array, "T B"]:
    """Calls `score` on a few steps at a time; the backward pass recomputes their logits."""
    if chunks == 1:
        return score(us, log_weights, targets)
    steps, batch = targets.shape
    size = -(-steps // chunks)
    padding = chunks * size - steps

    def cut(a: Array) -> Array:
        a = jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(chunks, size, *a.shape[1:])

    parts = jax.tree.map(cut, (us, log_weights, targets))
    nats = jax.lax.map(jax.checkpoint(lambda part: score(*part)), parts)
    return nats.reshape(chunks * size, batch)[:steps]


def _score_flat(
    score: Score,
    us: Float[Array, "T B *C E"],
    log_weights: Float[Array, "T B C"] | None,
    targets: Integer[Array, "T B"],
) -> Float[Array, "T B"]:
    """Calls `score` with time and batch as one axis, for which XLA copies fewer logits.

    The batch is the slower part of that axis, so each device keeps its own rows.
    """

    def flatten(a: Array) -> Array:
        return a.swapaxes(0, 1).reshape(-1, *a.shape[2:])

    nats = score(*jax.tree.map(flatten, (us, log_weights, targets)))
    return nats.reshape(targets.shape[::-1]).T


@jax.custom_vjp
def log_probability(
    us: Float[Array, "*N E"],
    matrix: Float[Array, "V E"],
    bias: Float[Array, "V"],
    logit_scale: Float[Array, ""],
    targets: Integer[Array, "*N"],
) -> Float[Array, "*N"]:
    """log softmax(logits)[target].

    The gradient with respect to the logits is computed once, in the compute dtype. Without this
    custom derivative, the compiler computes it from float32 logits in each of its three uses.
    """
    return _log_probability(us, matrix, bias, logit_scale, targets)[0]


def _log_probability(
    us: Float[Array, "*N E"],
    matrix: Float[Array, "V E"],
    bias: Float[Array, "V"],
    logit_scale: Float[Array, ""],
    targets: Integer[Array, "*N"],
) -> tuple[Float[Array, "*N"], tuple[Array, ...]]:
    logits = component_logits(us, matrix, bias, logit_scale)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    saved = (us, matrix, bias, logit_scale, targets, logits, normaliser)
    return chosen - normaliser, saved


def _log_probability_backward(
    saved: tuple[Array, ...], d_log_p: Float[Array, "*N"]
) -> tuple[Float[Array, "*N E"], Float[Array, "V E"], Float[Array, "V"], Float[Array, ""], None]:
    us, matrix, bias, logit_scale, targets, logits, normaliser = saved
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    one_hot = (ids == targets[..., None]).astype(logits.dtype)
    d_logits = d_log_p[..., None] * (one_hot - jnp.exp(logits - normaliser[..., None]))
    d_logit_scale = (d_logits * logits).sum() / logit_scale

    def backpropagate(
        plan: plans.SoftmaxPlan,
        d_logits: Float[Array, "*N V"],
        us: Float[Array, "*N E"],
        matrix: Float[Array, "V E"],
    ) -> tuple[Float[Array, "*N E"], Float[Array, "V E"], Float[Array, "V"]]:
        operand_dtype = plan.operands_backward or us.dtype
        d_logits = jax.lax.optimization_barrier(d_logits.astype(operand_dtype))
        lead = tuple(range(us.ndim - 1))
        dot = functools.partial(jnp.tensordot, preferred_element_type=us.dtype)
        d_us = dot(d_logits, matrix.astype(d_logits.dtype), axes=1)
        d_matrix = dot(d_logits, us.astype(d_logits.dtype), (lead, lead))
        d_bias = taps.sum_leading(d_logits, len(lead)).astype(bias.dtype)
        return d_us, d_matrix, d_bias

    make_plan = functools.partial(plans.make_softmax_plan, dtype=us.dtype)
    gradients = plans.follow(make_plan, backpropagate, logit_scale * d_logits, us, matrix)
    return *gradients, d_logit_scale, None


log_probability.defvjp(_log_probability, _log_probability_backward)


def _zeros(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
    del key
    return jnp.zeros(shape, dtype)

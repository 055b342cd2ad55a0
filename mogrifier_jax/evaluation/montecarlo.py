"""Monte-Carlo dropout: predictions averaged over dropout masks.

Axes: K blocks of M samples, W windows of one dispatch, B stripes, T time, V vocabulary.

Every sample is a separate pass with its own state and masks. p_s(v) is the probability of v under
the masks of sample s, where the logit scale is applied before the softmax. The averages are

    arithmetic              1/S Σ p_s(v), which sums to one, so only the target's p_s is needed
    geometric               exp(1/S Σ log p_s(v)), renormalised over v; for an ordinary softmax
                            this is the softmax of the mean logits
    power                   (1/S Σ p_s(v)^a)^(1/a), renormalised over v; a = 1 is arithmetic
    unnormalised_geometric  exp(1/S Σ log p_s(v)), whose nats are the mean of the samples' nats

The samples of a block run in parallel, split over the mesh axis "data". The blocks of a window run
one after another, so memory depends on M alone. Every window is averaged before the next one is
read, so no results of single samples are stored.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import streams, tasks
from mogrifier_jax.evaluation import loaded_run
from mogrifier_jax.nn import models, stack
from mogrifier_jax.training import scoring

AVERAGES = ("arithmetic", "geometric", "power", "unnormalised_geometric")
BLOCK_SIZE = 1 << 26  # About how many floats of one block are in memory on each device.


class Average(NamedTuple):
    """How the samples' log-probabilities are averaged."""

    exponent: float  # 0 is the geometric mean.
    whole: bool  # Whether all of V is averaged and renormalised, or only the targets.

    def start(self, shape: tuple[int, ...]) -> jax.Array:
        """The accumulator before any sample has been added."""
        return jnp.full(shape, -jnp.inf) if self.exponent else jnp.zeros(shape)

    def add(self, total: jax.Array, log_p: jax.Array, weights: jax.Array) -> jax.Array:
        """Adds a block: log_p [M, B, T, V or 1]; weights [M], which sum to one over all blocks."""
        if not self.exponent:
            return total + jnp.tensordot(weights, log_p, axes=1)
        log_weights = jnp.log(weights)[:, None, None, None]
        return jnp.logaddexp(total, jax.nn.logsumexp(self.exponent * log_p + log_weights, axis=0))

    def nats(self, total: jax.Array, targets: jax.Array) -> jax.Array:
        """-log of the targets' average probability, [B, T]."""
        log_p = total / self.exponent if self.exponent else total
        if not self.whole:
            return -log_p[..., 0]
        chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(log_p, axis=-1) - chosen


def make_average(kind: str = "arithmetic", power: float = 0.5) -> Average:
    """Returns the average of this kind, one of AVERAGES; `power` is used by kind "power" alone."""
    if kind not in AVERAGES:
        raise errors.UsageError(f"average {kind!r} is unknown; use one of {', '.join(AVERAGES)}")
    if kind == "power" and not 0 < power <= 1:
        raise errors.UsageError(
            f"the power {power} is out of range: give one in (0, 1], where 1 is the arithmetic "
            "average; 'geometric' is the limit at 0"
        )
    return {
        "arithmetic": Average(1.0, False),
        "geometric": Average(0.0, True),
        "power": Average(power, True),
        "unnormalised_geometric": Average(0.0, False),
    }[kind]


class MonteCarlo:
    """Scores weights by S passes with dropout.

    It compiles once, for any weights, logit scale and rates.

    Args:
      plan: on one device or on every device of the mesh; its stripes are not split.
      dropout: the rates of training.
      key: sample s draws from `sample_keys(key, ...)[s]`, whatever the size of the blocks.
      samples_per_block: M; by default as many as fit into about a quarter of a gigabyte per device.
    """

    def __init__(
        self,
        model: loaded_run.Model,
        plan: tasks.Plan,
        dropout: models.Dropout,
        *,
        key: jax.Array,
        samples: int = 200,
        average: Average | None = None,
        samples_per_block: int | None = None,
        mesh: Mesh | None = None,
        chunk: int = 16,
    ):
        if samples < 1 or (samples_per_block or 1) < 1:
            raise errors.UsageError(
                f"{samples} samples in blocks of {samples_per_block}: give 1 or more of both"
            )
        average = average or make_average("arithmetic")
        if average.whole and not isinstance(model, models.LanguageModel):
            raise errors.UsageError(
                "geometric and power averages are for language models; use 'arithmetic' here"
            )
        self.model, self.dropout = model, dropout
        self.plan = plan._replace(stream=partitioning.replicate(plan.stream, mesh))
        self.targets = scoring.read_targets(self.plan)
        devices = mesh.shape["data"] if mesh else 1
        fitting = fitting_samples(model, self.targets.tokens.shape[1:], average) * devices
        self.num_blocks, self.block_size = cut_blocks(
            samples, samples_per_block or fitting, devices
        )
        self._sharding = mesh and NamedSharding(mesh, PartitionSpec(None, "data"))
        weights = np.arange(self.num_blocks * self.block_size) < samples
        keys = sample_keys(key, self.num_blocks * self.block_size)
        # JAX cannot place typed keys on devices of other processes, but it can place their data.
        keys = jax.random.wrap_key_data(self._place(jax.random.key_data(keys)))
        self._blocks = (keys, self._place(jnp.asarray(weights / samples, jnp.float32)))
        self._average, self._chunk = average, min(chunk, plan.num_windows)
        replicated = mesh and partitioning.replicated(mesh)
        self._score_jitted = jax.jit(
            self._score_windows, donate_argnames="carry", out_shardings=(replicated, self._sharding)
        )

    def __call__(
        self,
        params: loaded_run.Params,
        logit_scale: float = 1.0,
        max_windows: int | None = None,
        title: str = "",
        multiplier: float = 1.0,
    ) -> scoring.TokenScores:
        """Scores of the first `max_windows` windows, or of all, with rates times `multiplier`."""
        rates = scale_dropout(self.dropout, multiplier)
        zeros = scoring.zero_carry(self.model, self.plan)
        count = self.num_blocks * self.block_size
        carry = jax.tree.map(lambda a: self._place(jnp.zeros((count, *a.shape), a.dtype)), zeros)

        def dispatch(
            carry: stack.Carries, first: int, count: int
        ) -> tuple[jax.Array, stack.Carries]:
            stream, blocks = self.plan.stream, self._blocks
            return self._score_jitted(
                params, stream, carry, first, count, logit_scale, rates, blocks
            )

        windows = scoring.limit_windows(self.plan, max_windows)
        nats, _ = scoring.collect_nats(dispatch, carry, self.targets, windows, self._chunk, title)
        return self.targets.in_order(nats)

    def _score_windows(
        self,
        params: loaded_run.Params,
        stream: tasks.Stream,
        carry: stack.Carries,
        first: jax.Array,
        count: jax.Array,
        logit_scale: jax.Array,
        rates: models.Dropout,
        blocks: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, stack.Carries]:
        """Nats [W, B, T] of the average over samples, and the carry [K, M, B, ...] of each sample.

        Args:
          blocks: the keys and the weights of the samples, [K, M].
        """
        average, model = self._average, self.model
        method = log_probabilities if average.whole else "batch_nats"

        def score(
            carry: stack.Carries, batch: tasks.Batch, index: jax.Array
        ) -> tuple[stack.Carries, jax.Array]:
            def sample(carry: stack.Carries, key: jax.Array) -> tuple[stack.Carries, jax.Array]:
                rngs = {"dropout": jax.random.fold_in(key, index)}
                outputs: Any  # Flax annotates the second result of `apply` as variables.
                carry, outputs = model.apply(
                    {"params": params}, batch, carry, rates, logit_scale, rngs=rngs, method=method
                )
                return carry, outputs if average.whole else -outputs[..., None]

            def add_block(total: jax.Array, block: Any) -> tuple[jax.Array, stack.Carries]:
                carry, keys, weights = block
                carry, log_p = jax.vmap(sample)(carry, keys)
                return average.add(total, log_p, weights), carry

            width = model.vocab_size if average.whole else 1
            total = average.start((*batch.targets.shape, width))
            total, carry = jax.lax.scan(add_block, total, (carry, *blocks))
            nats = average.nats(total, batch.targets)
            if batch.lengths is not None:
                steps = jnp.arange(nats.shape[1])[None]
                nats = jnp.where(steps < batch.lengths[:, None], nats, 0.0)
            return carry, nats

        batch_at = self.plan.batch_at
        return scoring.over_windows(score, carry, batch_at, stream, first, count, self._chunk)

    def _place(self, array: jax.Array) -> jax.Array:
        """Reshapes [K * M, ...] to [K, M, ...] and splits each block over the devices."""
        array = array.reshape(self.num_blocks, self.block_size, *array.shape[1:])
        return array if self._sharding is None else jax.device_put(array, self._sharding)


def log_probabilities(
    model: models.LanguageModel,
    batch: streams.Window,
    carry: stack.Carries,
    rates: models.Dropout,
    logit_scale: jax.Array,
) -> tuple[stack.Carries, jax.Array]:
    """The carry, and log p [B, T, V] of all tokens under dropout; a `method` of `apply`."""
    start = None if carry == () else carry
    steps = jnp.arange(batch.inputs.shape[1])[:, None]
    valid = None if batch.lengths is None else steps < batch.lengths[None]
    end, hs = model.run(batch.inputs, start, valid, rates)
    log_p = jax.nn.log_softmax(model.softmax.logits(hs, model.embedding, logit_scale, rates))
    return () if start is None else end, jnp.swapaxes(log_p, 0, 1)


def sample_keys(key: jax.Array, count: int) -> jax.Array:
    """The keys [count] of the samples; window w of a sample draws from `fold_in(key, w)`."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))


def scale_dropout(dropout: models.Dropout, multiplier: float) -> models.Dropout:
    """Multiplies all rates; refuses a multiplier that makes a rate 1 or more."""
    largest = max((rate for rate in dropout if rate is not None), default=0.0)
    if not 0 <= multiplier * largest < 1:
        raise errors.UsageError(
            f"dropout multiplier {multiplier} is out of range: with the largest rate {largest:g} "
            f"it must be at least 0 and below {1 / largest if largest else np.inf:g}"
        )
    return jax.tree.map(lambda rate: jnp.float32(rate * multiplier), dropout)


def fitting_samples(model: loaded_run.Model, shape: tuple[int, int], average: Average) -> int:
    """How many samples of a window of this shape, [B, T], fit into a block on one device."""
    per_token = model.vocab_size * (2 if average.whole else 1)
    per_token += 8 * model.num_layers * model.hidden_size
    return max(1, BLOCK_SIZE // (shape[0] * shape[1] * per_token))


def cut_blocks(samples: int, block_size: int, devices: int) -> tuple[int, int]:
    """The number of blocks and their size, which is a multiple of the number of devices.

    The last block may be padded.
    """
    num_blocks = -(-samples // block_size)
    size = -(-samples // num_blocks)
    size = -(-size // devices) * devices
    return -(-samples // size), size

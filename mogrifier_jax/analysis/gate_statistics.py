"""Statistics of the gates of a trained model while it reads a text.

Axes: T time, B stripes, U units of a gate, N bins, L layers, V vocabulary.

The device reduces every window to sums and the host merges them in float64, so memory does not
depend on the length of the text. Gates have the names of `nn/cells.py`; `round1`, `round2`, ... are
the Mogrifier's gates 2σ(.), and their products `x_scale` and `h_scale` are the factors by which all
rounds together scale x and h.
"""

import functools
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mogrifier_jax import errors, files
from mogrifier_jax.data import tasks, vocabularies
from mogrifier_jax.nn import models, stack
from mogrifier_jax.training import scoring

LSTM_GATES = ("f", "i", "o")
BINS = 60
SATURATION = 0.1  # A gate is saturated if it is this close to an end, as a share of its range.
CONTEXT = 8  # Tokens that are kept before a token with strong gating.
_SIGMOIDS, _TANHS = ("f", "i", "o", "r", "u"), ("j", "c", "n", "h")


Array = Any  # A jax.Array on the device, and a np.ndarray after merging on the host.


class Summary(NamedTuple):
    """Sums over the values of a gate; `merge` adds up those of two windows."""

    count: Array  # [] tokens.
    mean: Array  # [U]
    m2: Array  # [U] sum of squared distances from the mean.
    low: Array  # [U] how often the unit was saturated at the lower end of the range.
    high: Array  # [U] how often it was saturated at the upper end.
    minimum: Array  # []
    maximum: Array  # []
    histogram: Array  # [N] of all units, over the range of the gate.


def limits(name: str, rounds: int = 0) -> tuple[float, float]:
    """The lowest and the highest value that a gate can have."""
    if name in _SIGMOIDS:
        return 0.0, 1.0
    if name in _TANHS:
        return -1.0, 1.0
    if name.startswith("round"):
        return 0.0, 2.0
    return 0.0, 2.0 ** (-(-rounds // 2) if name == "x_scale" else rounds // 2)


def name_gates(gates: files.JsonObject) -> dict[str, jax.Array]:
    """The gates of a layer by name, [T, B, U] each, including the rounds and their products."""
    rounds = gates["rounds"]
    named = {name: values for name, values in gates.items() if name != "rounds"}
    named |= {f"round{number}": gate for number, gate in enumerate(rounds, start=1)}
    for side, factors in (("x_scale", rounds[0::2]), ("h_scale", rounds[1::2])):
        if factors:
            named[side] = functools.reduce(jnp.multiply, factors)
    return named


def summarise(
    values: jax.Array, valid: jax.Array, low: float, high: float, bins: int = BINS
) -> Summary:
    """Sums over the values [T, B, U] of a gate in a window, where `valid` [T, B] is true."""
    values = values.astype(jnp.float32)
    weights = jnp.broadcast_to(valid[..., None], values.shape)
    count = valid.sum()
    mean = jnp.where(weights, values, 0.0).sum((0, 1)) / jnp.maximum(count, 1)
    apart = values - mean[None, None]
    margin = SATURATION * (high - low)
    bin_ids = jnp.clip((values - low) / (high - low) * bins, 0, bins - 1).astype(jnp.int32)
    return Summary(
        count=count,
        mean=mean,
        m2=jnp.where(weights, apart**2, 0.0).sum((0, 1)),
        low=(weights & (values < low + margin)).sum((0, 1)),
        high=(weights & (values > high - margin)).sum((0, 1)),
        minimum=jnp.where(weights, values, jnp.inf).min(),
        maximum=jnp.where(weights, values, -jnp.inf).max(),
        histogram=jnp.zeros(bins, jnp.int32).at[bin_ids].add(weights.astype(jnp.int32)),
    )


def merge(one: Summary | None, other: Summary) -> Summary:
    """Merges the sums of two windows on the host (Chan, Golub, LeVeque 1979)."""
    two = Summary(*(np.asarray(field, np.float64) for field in other))
    if one is None or not two.count:
        return one or two
    added = Summary(*map(np.add, one, two))
    shift = two.mean - one.mean
    return added._replace(
        mean=one.mean + shift * two.count / added.count,
        m2=added.m2 + shift**2 * one.count * two.count / added.count,
        minimum=np.minimum(one.minimum, two.minimum),
        maximum=np.maximum(one.maximum, two.maximum),
    )


def compute_statistics(summary: Summary, low: float, high: float) -> dict[str, float]:
    """The statistics of a gate over all tokens and units.

    `variance` is the sum of two parts: the variance over tokens, averaged over units
    (`variance_over_tokens`), and the variance of the means of the units. 90% of all values lie
    between `q05` and `q95`.
    """
    over_tokens = float(np.mean(summary.m2 / summary.count))
    q05, q95 = (quantile(summary.histogram, q, low, high) for q in (0.05, 0.95))
    return {
        "tokens": int(summary.count),
        "units": len(summary.mean),
        "mean": float(np.mean(summary.mean)),
        "variance": over_tokens + float(np.var(summary.mean)),
        "variance_over_tokens": over_tokens,
        "saturated_low": float(np.mean(summary.low / summary.count)),
        "saturated_high": float(np.mean(summary.high / summary.count)),
        "minimum": float(summary.minimum),
        "maximum": float(summary.maximum),
        "q05": q05,
        "q95": q95,
    }


def quantile(histogram: np.ndarray, q: float, low: float, high: float) -> float:
    """The q-quantile of a histogram whose values are spread evenly within each bin."""
    edges = np.linspace(low, high, len(histogram) + 1)
    below = np.concatenate([[0.0], np.cumsum(histogram)])
    return float(np.interp(q * below[-1], below, edges))


class Moment(NamedTuple):
    """A token at which the Mogrifier scaled x and h strongly."""

    strength: float  # Mean of |log2 scale| over layers, over x and h, and over units.
    context: tuple[int, ...]  # Token ids, of which the last one is the token itself.


class GateReport:
    """The statistics of a pass over a text; `rows` and `token_rows` fit a `pandas.DataFrame`."""

    def __init__(self, num_layers: int, vocab_size: int, top: int):
        self.rounds = 0
        self.summaries: dict[tuple[int, str], Summary] = {}
        # How often each token was read, and the sums of |log2 scale| of x and h when it was.
        self.counts = np.zeros(vocab_size, np.int64)
        self.strengths = np.zeros((num_layers, 2, vocab_size))
        self._top, self._moments = top, list[Moment]()

    def add(
        self,
        layers: Sequence[Mapping[str, Summary]],
        strengths: np.ndarray,
        inputs: np.ndarray,
        valid: np.ndarray,
    ) -> None:
        """Adds a window.

        Args:
          layers: the summaries of the gates of each layer, by name.
          strengths: [L, 2, T, B] mean |log2 scale| of x and h.
          inputs: [B, T] token ids.
          valid: [B, T] whether there is a token, rather than padding.
        """
        for layer, gates in enumerate(layers):
            for name, summary in gates.items():
                self.summaries[layer, name] = merge(self.summaries.get((layer, name)), summary)
        self.rounds = sum(name.startswith("round") for name in layers[0])
        ids = inputs[valid]
        np.add.at(self.counts, ids, 1)
        if not self.rounds:
            return
        strengths = strengths.swapaxes(-1, -2)  # [L, 2, B, T]
        for layer, sides in enumerate(strengths):
            for side, values in enumerate(sides):
                np.add.at(self.strengths[layer, side], ids, values[valid])
        total = np.where(valid, strengths.mean((0, 1)), -np.inf)
        for index in np.argsort(total, axis=None)[::-1][: self._top]:
            row, step = np.unravel_index(index, total.shape)
            if valid[row, step]:
                context = tuple(inputs[row, max(0, step - CONTEXT) : step + 1].tolist())
                self._moments.append(Moment(float(total[row, step]), context))
        self._moments = heapq.nlargest(self._top, self._moments)

    def rows(self) -> list[files.JsonObject]:
        """A row for each layer (from 1) and gate, with the numbers of `compute_statistics`."""
        return [
            {
                "layer": layer + 1,
                "gate": name,
                **compute_statistics(summary, *limits(name, self.rounds)),
            }
            for (layer, name), summary in sorted(self.summaries.items())
        ]

    def histogram(self, layer: int, gate: str) -> tuple[np.ndarray, np.ndarray]:
        """Edges [N + 1] of the bins, and the share of values [N] in each; layers count from 1."""
        counts = self.summaries[layer - 1, gate].histogram
        edges = np.linspace(*limits(gate, self.rounds), len(counts) + 1)
        return edges, counts / counts.sum()

    def token_rows(
        self, vocab: vocabularies.Vocabulary, min_count: int = 1
    ) -> list[files.JsonObject]:
        """How strongly x and h were scaled when a token was read, the strongest token first."""
        rows = []
        for token in np.flatnonzero(self.counts >= min_count):
            strengths = self.strengths[:, :, token] / self.counts[token]
            rows.append(
                {
                    "token": vocab.tokens[token],
                    "count": int(self.counts[token]),
                    "strength": float(strengths.mean()),
                    "x_strength": float(strengths[:, 0].mean()),
                    "h_strength": float(strengths[:, 1].mean()),
                }
            )
        return sorted(rows, key=lambda row: -row["strength"])

    def strongest(self) -> list[Moment]:
        """The moments of the strongest gating, the strongest first."""
        return self._moments


class GateAnalysis:
    """Collects statistics over the windows of a plan; compiled once for all weights."""

    def __init__(self, model: models.LanguageModel | models.EncoderDecoder, plan: tasks.Plan):
        if not isinstance(model, models.LanguageModel):
            raise errors.UsageError(
                f"the gates of a {type(model).__name__} cannot be read; give a language model"
            )
        self.model, self.plan = model, plan
        self._step = jax.jit(functools.partial(read_window, model=model, batch_at=plan.batch_at))

    def __call__(
        self,
        params: optax.Params,
        *,
        max_windows: int | None = None,
        top: int = 20,
        title: str = "",
    ) -> GateReport:
        """Reads all windows, or the first `max_windows`; the report keeps `top` moments."""
        model, plan = self.model, self.plan
        report = GateReport(model.num_layers, model.vocab_size, top)
        carry = model.zero_carry(plan.batch_size) if plan.carries else None
        windows = scoring.limit_windows(plan, max_windows)

        def read(carry: Any, index: int, _: int) -> tuple[Any, Any]:
            sums, after = self._step(params, plan.stream, carry, index)
            return sums, after if plan.carries else None

        for sums, _ in scoring.dispatches(read, carry, windows, 1, title):
            report.add(*jax.device_get(sums))
        return report


def read_window(
    params: optax.Params,
    stream: tasks.Stream,
    carry: stack.Carries | None,
    index: jax.Array | int,
    *,
    model: models.LanguageModel,
    batch_at: tasks.BatchAt,
) -> tuple[tuple[Any, ...], stack.Carries]:
    """The arguments of `GateReport.add` for one window, and the carry after it."""
    batch = batch_at(stream, index)
    gates: Any  # Flax annotates the second result of `apply` as variables.
    carry, gates = model.apply({"params": params}, batch.inputs, carry, method="gates")
    valid = jnp.ones(batch.inputs.shape, bool)
    if batch.lengths is not None:
        valid = jnp.arange(valid.shape[1])[None] < batch.lengths[:, None]
    layers, rounds = [name_gates(layer) for layer in gates], len(gates[0]["rounds"])
    summaries = [
        {name: summarise(g, valid.T, *limits(name, rounds)) for name, g in layer.items()}
        for layer in layers
    ]
    none = jnp.zeros(valid.T.shape)
    strengths = jnp.stack(
        [
            jnp.stack([strength(layer[s]) if s in layer else none for s in ("x_scale", "h_scale")])
            for layer in layers
        ]
    )
    return (summaries, strengths, batch.inputs, valid), carry


def strength(scale: jax.Array | np.ndarray) -> jax.Array:
    """Mean |log2 scale| over units: a factor of 2 or of 1/2 counts 1, and none more than 20."""
    return jnp.abs(jnp.log2(jnp.maximum(scale, 2.0**-20))).mean(-1)

"""Gate statistics of a trained model that reads a text, and losses of groups of tokens.

Axes: T time, B stripes, U units of a gate, N bins, L layers, V vocabulary. The device sums up every
window, in two passes. The host merges these sums in float64, and only they are kept. Gates have
the names of `nn/cells.py`. `round1`, `round2`, ... are the Mogrifier's gates 2σ(.). `x_scale` and
`h_scale` are their products: by how much all rounds together scale x and h.

The losses of tokens by frequency, by place in the line and after a large loss show where a model is
wrong. They need the score of every token in the order of the text. `inspection.py` opens workdirs
and draws.
"""

import functools
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.data import corpora, tasks
from mogrifier_jax.nn import models
from mogrifier_jax.training import evaluate

BINS = 60
SATURATION = 0.1  # A gate is saturated within this share of its range from either end.
CONTEXT = 8  # How many tokens before a token with strong gating are kept.
_SIGMOIDS, _TANHS = ("f", "i", "o", "r", "u"), ("j", "c", "n", "h")


class Summary(NamedTuple):
    """Sums over the values of one gate; those of two windows can be merged."""

    count: Any  # [] tokens.
    mean: Any  # [U]
    m2: Any  # [U] sum of squared distances from the mean.
    low: Any  # [U] how often the unit was saturated at the lower end of the range.
    high: Any  # [U] how often it was saturated at the upper end.
    minimum: Any  # []
    maximum: Any  # []
    histogram: Any  # [N] of all units, over the range of the gate.


def limits(name: str, rounds: int = 0) -> tuple[float, float]:
    """The lowest and the highest value that a gate can have."""
    if name in _SIGMOIDS:
        return 0.0, 1.0
    if name in _TANHS:
        return -1.0, 1.0
    if name.startswith("round"):
        return 0.0, 2.0
    return 0.0, 2.0 ** (-(-rounds // 2) if name == "x_scale" else rounds // 2)


def name_gates(gates: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The gates of one layer by name, [T, B, U] each; rounds and their products get names."""
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
    """Sums over the values [T, B, U] of a gate in a window, at the tokens that are valid [T, B]."""
    values = values.astype(jnp.float32)
    weights = jnp.broadcast_to(valid[..., None], values.shape)
    count = valid.sum()
    mean = jnp.where(weights, values, 0.0).sum((0, 1)) / jnp.maximum(count, 1)
    apart = values - mean[None, None]
    margin = SATURATION * (high - low)
    places = jnp.clip((values - low) / (high - low) * bins, 0, bins - 1).astype(jnp.int32)
    return Summary(
        count=count,
        mean=mean,
        m2=jnp.where(weights, apart**2, 0.0).sum((0, 1)),
        low=(weights & (values < low + margin)).sum((0, 1)),
        high=(weights & (values > high - margin)).sum((0, 1)),
        minimum=jnp.where(weights, values, jnp.inf).min(),
        maximum=jnp.where(weights, values, -jnp.inf).max(),
        histogram=jnp.zeros(bins, jnp.int32).at[places].add(weights.astype(jnp.int32)),
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


def describe(summary: Summary, low: float, high: float) -> dict[str, float]:
    """The statistics of one gate, over all tokens and units.

    `variance` has two parts: the variance over tokens, averaged over units
    (`variance_over_tokens`), and the variance of the units' means. Nine of ten values are between
    `q05` and `q95`.
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
    """The q-quantile of a histogram; values are assumed to be even within a bin."""
    edges = np.linspace(low, high, len(histogram) + 1)
    below = np.concatenate([[0.0], np.cumsum(histogram)])
    return float(np.interp(q * below[-1], below, edges))


class Moment(NamedTuple):
    """A token at which the Mogrifier scaled its inputs strongly."""

    strength: float  # Mean of |log2 scale| over layers, x and h, and units.
    context: tuple[int, ...]  # Ids; the last one is the token itself.


class GateReport:
    """Statistics of one pass; a `pandas.DataFrame` can show `rows` and `token_rows`."""

    def __init__(self, num_layers: int, vocab_size: int, top: int):
        self.rounds = 0
        self.summaries: dict[tuple[int, str], Summary] = {}
        # For each token: how often it was read, and the sums of |log2 scale| of x and h then.
        self.counts = np.zeros(vocab_size, np.int64)
        self.strengths = np.zeros((num_layers, 2, vocab_size))
        self._top, self._moments = top, list[Moment]()

    def add(self, found: Any, strengths: np.ndarray, inputs: np.ndarray, valid: np.ndarray) -> None:
        """Adds a window: summaries by layer and gate, strengths [L, 2, T, B], ids [B, T]."""
        for layer, gates in enumerate(found):
            for name, summary in gates.items():
                self.summaries[layer, name] = merge(self.summaries.get((layer, name)), summary)
        self.rounds = sum(name.startswith("round") for name in found[0])
        ids = inputs[valid]
        np.add.at(self.counts, ids, 1)
        if not self.rounds:
            return
        strengths = strengths.swapaxes(-1, -2)  # [L, 2, B, T]
        for layer, sides in enumerate(strengths):
            for side, values in enumerate(sides):
                np.add.at(self.strengths[layer, side], ids, values[valid])
        total = np.where(valid, strengths.mean((0, 1)), -np.inf)
        for place in np.argsort(total, axis=None)[::-1][: self._top]:
            row, step = np.unravel_index(place, total.shape)
            if valid[row, step]:
                context = tuple(inputs[row, max(0, step - CONTEXT) : step + 1].tolist())
                self._moments.append(Moment(float(total[row, step]), context))
        self._moments = heapq.nlargest(self._top, self._moments)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer (from 1) and gate, with the numbers of `describe`."""
        return [
            {"layer": layer + 1, "gate": name, **describe(summary, *limits(name, self.rounds))}
            for (layer, name), summary in sorted(self.summaries.items())
        ]

    def histogram(self, layer: int, gate: str) -> tuple[np.ndarray, np.ndarray]:
        """The edges [N + 1] of the bins, and the share of values [N] in each; layers are from 1."""
        counts = self.summaries[layer - 1, gate].histogram
        edges = np.linspace(*limits(gate, self.rounds), len(counts) + 1)
        return edges, counts / counts.sum()

    def token_rows(self, vocab: corpora.Vocabulary, min_count: int = 1) -> list[dict[str, Any]]:
        """For each token, how strongly x and h were scaled as it was read; strongest first."""
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
        """The moments of strongest gating, the strongest first."""
        return self._moments


class GateAnalysis:
    """Reads the windows of a plan and collects statistics; compiles once for any weights."""

    def __init__(self, model: models.LanguageModel, plan: tasks.Plan):
        if not isinstance(model, models.LanguageModel):
            raise errors.UsageError(
                f"gates of a {type(model).__name__} cannot be read; give a language model"
            )
        self.model, self.plan = model, plan
        self._step = jax.jit(functools.partial(read_window, model=model, batch_at=plan.batch_at))

    def __call__(
        self, params: Any, *, max_windows: int | None = None, top: int = 20, title: str = ""
    ) -> GateReport:
        """Reads the first `max_windows` windows; the report keeps `top` moments."""
        model, plan = self.model, self.plan
        report = GateReport(model.num_layers, model.vocab_size, top)
        carry = model.zero_carry(plan.batch_size) if plan.carries else None
        windows = evaluate.limit_windows(plan, max_windows)

        def run(carry, index, _):
            found, after = self._step(params, plan.stream, carry, index)
            return found, after if plan.carries else None

        for found, _ in evaluate.dispatches(run, carry, windows, 1, title):
            report.add(*jax.device_get(found))
        return report


def read_window(params, stream, carry, index, *, model, batch_at):
    """Summaries of every gate, strengths [L, 2, T, B], ids and valid [B, T], and the carry."""
    batch = batch_at(stream, index)
    gates, carry = model.apply({"params": params}, batch.inputs, carry, method="gates")
    valid = jnp.ones(batch.inputs.shape, bool)
    if batch.lengths is not None:
        valid = jnp.arange(valid.shape[1])[None] < batch.lengths[:, None]
    layers, rounds = [name_gates(layer) for layer in gates], len(gates[0]["rounds"])
    found = [
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
    return (found, strengths, batch.inputs, valid), carry


def strength(scale: jax.Array) -> jax.Array:
    """Mean |log2 scale| over units: 1 means a factor of 2 or 1/2; a factor counts at most 20."""
    return jnp.abs(jnp.log2(jnp.maximum(scale, 2.0**-20))).mean(-1)


FREQUENCIES = (0, 1, 10, 100, 1_000, 10_000)
POSITIONS = (0, 1, 2, 5, 10, 20, 40)
SURPRISES = (1, 2, 4, 6, 8, 10)


def by_frequency(
    scores: evaluate.TokenScores, counts: np.ndarray, edges: Sequence[int] = FREQUENCIES
) -> list[dict[str, Any]]:
    """Mean loss by how often a token occurs in the training text; `counts` is [V]."""
    return group(counts[scores.tokens], scores.nats, edges)


def by_position(
    scores: evaluate.TokenScores, eos_id: int, edges: Sequence[int] = POSITIONS
) -> list[dict[str, Any]]:
    """Mean loss by how many tokens of the line come before a token."""
    return group(positions(scores.tokens, eos_id), scores.nats, edges)


def positions(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """For each token, how many tokens of its line come before it."""
    ends = np.flatnonzero(tokens == eos_id)
    starts = np.concatenate([[0], ends + 1])
    places = np.arange(len(tokens))
    return places - starts[np.searchsorted(starts, places, side="right") - 1]


def recovery(nats: np.ndarray, thresholds: Sequence[float] = SURPRISES) -> list[dict[str, Any]]:
    """Mean loss of a token after one with a loss above a threshold (as in arXiv:1609.07959)."""
    before, after = np.asarray(nats[:-1], np.float64), np.asarray(nats[1:], np.float64)
    return [{"above": least, **_describe(after[before > least])} for least in thresholds]


def group(keys: np.ndarray, nats: np.ndarray, edges: Sequence[float]) -> list[dict[str, Any]]:
    """Mean loss of tokens whose key is in [edge, next edge); the last group has no upper end."""
    if len(keys) != len(nats):
        raise errors.UsageError(f"{len(keys)} keys for {len(nats)} tokens; give one for each")
    if list(edges) != sorted(set(edges)):
        raise errors.UsageError(f"edges {tuple(edges)} must grow")
    nats = np.asarray(nats, np.float64)
    return [
        {"from": low, "below": high, **_describe(nats[(keys >= low) & (keys < high)])}
        for low, high in zip(edges, [*edges[1:], np.inf], strict=True)
    ]


def _describe(nats: np.ndarray) -> dict[str, Any]:
    """The number of losses, their mean and its standard error."""
    count = len(nats)
    return {
        "tokens": count,
        "nats": float(nats.mean()) if count else float("nan"),
        "error": float(nats.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan"),
    }

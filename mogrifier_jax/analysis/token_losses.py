"""Where a model errs: its loss by frequency of the token, by place in the line, after a surprise.

Axes: N tokens of a text, V vocabulary. All functions take the score of every token in the order
of the text, as `--mode=evaluate` writes them (`tokens.read_tokens`), and return rows that go well
into `pandas.DataFrame`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.training import evaluate

FREQUENCIES = (0, 1, 10, 100, 1_000, 10_000)
POSITIONS = (0, 1, 2, 5, 10, 20, 40)
SURPRISES = (0, 1, 2, 4, 6, 8, 10)


def count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs in a text, [V]."""
    return np.bincount(tokens, minlength=vocab_size)


def by_frequency(
    scores: evaluate.TokenScores, counts: np.ndarray, edges: Sequence[int] = FREQUENCIES
) -> list[dict[str, Any]]:
    """Mean loss of tokens by how often they occur in the training text, `counts` [V]."""
    return group(counts[scores.tokens], scores.nats, edges)


def by_position(
    scores: evaluate.TokenScores, eos_id: int, edges: Sequence[int] = POSITIONS
) -> list[dict[str, Any]]:
    """Mean loss by the number of tokens before it in its line."""
    return group(positions(scores.tokens, eos_id), scores.nats, edges)


def positions(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """How many tokens of its line come before each token, [N]."""
    ends = np.flatnonzero(tokens == eos_id)
    starts = np.concatenate([[0], ends + 1])
    places = np.arange(len(tokens))
    return places - starts[np.searchsorted(starts, places, side="right") - 1]


def after_surprise(nats: np.ndarray, edges: Sequence[float] = SURPRISES) -> list[dict[str, Any]]:
    """Mean loss of a token by the loss of the token before it."""
    return group(nats[:-1], nats[1:], edges)


def recovery(nats: np.ndarray, thresholds: Sequence[float] = SURPRISES[1:]) -> list[dict[str, Any]]:
    """Mean loss at t + 1 given a loss above x at t (the test of arXiv:1609.07959)."""
    before, after = np.asarray(nats[:-1], np.float64), np.asarray(nats[1:], np.float64)
    rows = []
    for threshold in thresholds:
        chosen = after[before > threshold]
        rows.append({"above": threshold, **_describe(chosen)})
    return rows


def group(keys: np.ndarray, nats: np.ndarray, edges: Sequence[float]) -> list[dict[str, Any]]:
    """Mean loss of the tokens whose key is in [edge, next edge); the last has no end."""
    if len(keys) != len(nats):
        raise errors.UsageError(f"{len(keys)} keys for {len(nats)} tokens; give one for each")
    if list(edges) != sorted(set(edges)):
        raise errors.UsageError(f"edges {tuple(edges)} must grow")
    nats = np.asarray(nats, np.float64)
    rows = []
    for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
        chosen = nats[(keys >= low) & (keys < high)]
        rows.append({"from": low, "below": high, **_describe(chosen)})
    return rows


def compare(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[float]:
    """By how many nats the loss of the first is above that of the second, row by row."""
    return [a["nats"] - b["nats"] for a, b in zip(one, other, strict=True)]


def _describe(nats: np.ndarray) -> dict[str, Any]:
    """Number, mean and standard error."""
    count = len(nats)
    return {
        "tokens": count,
        "nats": float(nats.mean()) if count else float("nan"),
        "error": float(nats.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan"),
    }

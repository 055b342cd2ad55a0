"""Mean losses of groups of tokens, such as rare ones, which show where a model errs.

Tokens are grouped by their frequency in the training text, by their position in the line, or by the
loss of the token before them.
"""

import math
from collections.abc import Sequence

import numpy as np

from mogrifier_jax import errors, files
from mogrifier_jax.training import scoring

# The edges of the groups.
FREQUENCIES = (0, 1, 10, 100, 1_000, 10_000)
POSITIONS = (0, 1, 2, 5, 10, 20, 40)
SURPRISES = (1, 2, 4, 6, 8, 10)


def by_frequency(
    scores: scoring.TokenScores, counts: np.ndarray, edges: Sequence[int] = FREQUENCIES
) -> list[files.JsonObject]:
    """Mean loss by how often a token occurs in the training text, which is `counts` [V]."""
    return group(counts[scores.tokens], scores.nats, edges)


def by_position(
    scores: scoring.TokenScores, eos_id: int, edges: Sequence[int] = POSITIONS
) -> list[files.JsonObject]:
    """Mean loss by how many tokens of the line precede a token."""
    return group(positions_in_line(scores.tokens, eos_id), scores.nats, edges)


def positions_in_line(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """For each token, how many tokens of its line precede it."""
    ends = np.flatnonzero(tokens == eos_id)
    starts = np.concatenate([[0], ends + 1])
    indices = np.arange(len(tokens))
    return indices - starts[np.searchsorted(starts, indices, side="right") - 1]


def after_losses(
    nats: np.ndarray, thresholds: Sequence[float] = SURPRISES
) -> list[files.JsonObject]:
    """Mean loss of the tokens that follow a loss above a threshold (as in arXiv:1609.07959)."""
    before, after = np.asarray(nats[:-1], np.float64), np.asarray(nats[1:], np.float64)
    return [{"above": least, **_mean_loss(after[before > least])} for least in thresholds]


def group(keys: np.ndarray, nats: np.ndarray, edges: Sequence[float]) -> list[files.JsonObject]:
    """Mean loss of the tokens whose key is in [edge, next edge); the last group is unbounded."""
    if len(keys) != len(nats):
        raise errors.UsageError(f"{len(keys)} keys for {len(nats)} tokens; give one for each")
    if list(edges) != sorted(set(edges)):
        raise errors.UsageError(f"edges {tuple(edges)} must increase")
    nats = np.asarray(nats, np.float64)
    return [
        {"from": low, "below": high, **_mean_loss(nats[(keys >= low) & (keys < high)])}
        for low, high in zip(edges, [*edges[1:], np.inf], strict=True)
    ]


def _mean_loss(nats: np.ndarray) -> files.JsonObject:
    """The number of losses, their mean and its standard error."""
    count = len(nats)
    return {
        "tokens": count,
        "nats": float(nats.mean()) if count else float("nan"),
        "error": float(nats.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan"),
    }


def label_group(row: files.JsonObject, above: str = "above ", to: str = " to ") -> str:
    """The label of a group of tokens; figures pass shorter texts for `above` and `to`."""
    if "above" in row:
        return f"{above}{row['above']:g}"
    if row["below"] == math.inf:
        return f"{row['from']:,}+"
    last = row["below"] - 1
    return f"{last:,}" if last == row["from"] else f"{row['from']:,}{to}{last:,}"

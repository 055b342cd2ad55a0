import math

import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.analysis import token_losses
from mogrifier_jax.training import scoring


def scores(tokens, nats):
    return scoring.TokenScores(np.array(tokens, np.int32), np.array(nats, np.float32))


def test_loss_by_frequency():
    given = scores([0, 1, 2, 1], [1.0, 2.0, 4.0, 3.0])
    rows = token_losses.by_frequency(given, np.array([5, 100, 0]), edges=(0, 1, 10))
    assert [(row["tokens"], row["nats"]) for row in rows] == [(1, 4.0), (1, 1.0), (2, 2.5)]
    assert rows[2]["error"] == pytest.approx(0.5) and math.isnan(rows[0]["error"])


def test_loss_by_position_counts_from_the_beginning_of_the_line():
    tokens = [3, 4, 0, 0, 5, 0, 6]  # The end of a line belongs to it; one line is empty.
    assert token_losses.positions_in_line(np.array(tokens), 0).tolist() == [0, 1, 2, 0, 0, 1, 0]
    rows = token_losses.by_position(scores(tokens, range(7)), 0, edges=(0, 1))
    assert [row["nats"] for row in rows] == [(0 + 3 + 4 + 6) / 4, (1 + 2 + 5) / 3]


def test_recovery_looks_one_token_ahead():
    nats = np.array([9.0, 1.0, 5.0, 2.0, 0.0])
    found = token_losses.after_losses(nats, thresholds=(0.5, 4, 8))
    assert [row["tokens"] for row in found] == [4, 2, 1]
    assert [row["nats"] for row in found] == [2.0, 1.5, 1.0]


def test_wrong_buckets_are_refused():
    with pytest.raises(errors.UsageError, match="must increase"):
        token_losses.group(np.arange(3), np.ones(3), (0, 2, 1))
    with pytest.raises(errors.UsageError, match="3 keys for 2 tokens"):
        token_losses.group(np.arange(3), np.ones(2), (0, 1))

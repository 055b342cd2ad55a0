import math

import pytest

from mogrifier_jax import errors
from mogrifier_jax.training import learning_curves, metrics


@pytest.mark.parametrize("unit", ["ppl", "bpc"])
def test_learning_curve(tmp_path, unit):
    with metrics.MetricWriter(tmp_path) as writer:
        for turn in range(5):
            nats = 4 * math.exp(-turn)
            writer.write(
                turn * 10, "eval", turn=turn, valid_nats=nats, averaged=turn > 2, best=True
            )
            writer.write(turn * 10 + 5, "train", loss_nats=nats if turn < 4 else math.nan)
    content = learning_curves.draw(tmp_path, unit=unit).read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_learning_curve_of_nothing_is_refused(tmp_path):
    with pytest.raises(errors.UsageError, match="nothing to draw"):
        learning_curves.draw(tmp_path)

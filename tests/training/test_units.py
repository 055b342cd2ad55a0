import math

import pytest

from mogrifier_jax.training import units


def test_units():
    assert units.perplexity(math.log(50)) == pytest.approx(50)
    assert units.perplexity(1e4) == math.inf
    assert math.isnan(units.perplexity(math.nan))
    assert units.bits(math.log(2)) == 1
    shown = [units.quantity(n) for n in (0, 9.5, 999, 1000, 12345, 999_999, 2.5e9)]
    assert shown == ["0", "9.5", "999", "1k", "12.3k", "1M", "2.5G"]
    shown = [units.span(s) for s in (5, 59.6, 3599, 3600, 90000)]
    assert shown == ["5s", "1m00s", "59m59s", "1h00m", "1d01h"]

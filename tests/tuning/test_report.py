import pytest

from mogrifier_jax.tuning import report, studies, trials


def test_neighbourhoods_by_hand():
    study = studies.Study("x", {"a": studies.Range(0.0, 1.0), "b": studies.Range(1, 100, "log")})
    values = [(0.5, 10), (0.55, 90), (0.43, 11), (0.9, 9), (0.52, 50)]
    known = [
        trials.Record(i, "complete", 1.0 + i / 10, 1.0, dict(zip("ab", value, strict=True)), {})
        for i, value in enumerate(values)
    ]
    a, b = report.neighbourhoods(known, study)
    assert (a.low, a.high, a.others) == (pytest.approx(0.425), pytest.approx(0.575), 3)
    assert (a.nearest, a.median) == (pytest.approx(1.1), pytest.approx(1.2))
    assert b.others == 2 and b.nearest == pytest.approx(1.2)
    assert b.low == pytest.approx(10 ** (1 - 0.15)) and b.high == pytest.approx(10 ** (1 + 0.15))
    edge = [known[0]._replace(params={"a": 0.99, "b": 1}), *known[1:]]
    a, b = report.neighbourhoods(edge, study)
    assert (a.low, a.high) == (pytest.approx(0.85), pytest.approx(1.0)) and a.others == 1
    assert b.low == 1 and b.nearest is None

"""What the methods of evaluation choose by."""

import pytest

from mogrifier_jax.evaluation import methods


def test_minimise_finds_the_minimum():
    calls = []

    def f(x):
        calls.append(x)
        return (x - 0.93) ** 2

    assert methods.minimise(f, 0.5, 1.5) == pytest.approx(0.93, abs=1e-3)
    assert len(calls) < 20
    assert methods.minimise(lambda x: x, 0.5, 1.5) == pytest.approx(0.5, abs=2e-3)

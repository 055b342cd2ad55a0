"""What the methods of evaluation choose by, and what they keep."""

import gc
import weakref

import pytest

from mogrifier_jax.evaluation import eval_options, methods, model_files


def test_minimise_finds_the_minimum():
    calls = []

    def f(x):
        calls.append(x)
        return (x - 0.93) ** 2

    assert methods.minimise(f, 0.5, 1.5) == pytest.approx(0.93, abs=1e-3)
    assert len(calls) < 20
    assert methods.minimise(lambda x: x, 0.5, 1.5) == pytest.approx(0.5, abs=2e-3)


def test_a_scorer_that_is_no_longer_used_is_freed():
    """A study of dynamic evaluation makes a scorer for each window, with all of its weights."""
    path = model_files.SHIPPED / "pydoc.safetensors"
    scorer = methods.Scorer(str(path), eval_options.defaults())
    assert scorer.read_corpus() is scorer.read_corpus()  # It is cached.
    alive = weakref.ref(scorer)
    del scorer
    gc.collect()
    assert alive() is None

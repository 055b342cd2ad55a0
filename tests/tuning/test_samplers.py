import importlib.util

import pytest

from mogrifier_jax import errors
from mogrifier_jax.tuning import samplers


def without(package):
    """How packages are looked for where this one is not installed."""
    find = importlib.util.find_spec
    return lambda name, *args: None if name == package else find(name, *args)


def test_the_gaussian_process_needs_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("torch"))
    with pytest.raises(errors.UsageError, match=r"torch, which is not installed.*--sampler=tpe"):
        samplers.check_sampler("gp")
    samplers.check_sampler("tpe")

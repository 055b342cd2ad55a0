"""For quick tests: `jit` that compiles or computes faster, a count, parameters marked slow."""

import contextlib
import functools

import jax
import pytest

from mogrifier_jax.nn import plans
from tests import compiler_options

jit = functools.partial(jax.jit, compiler_options=compiler_options.OPTIONS)

# For the few tests that compute more than they compile; conftest.py sets the level to 0.
jit_optimised = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


def on_platform(platform, fn, devices=1):
    """`fn`, traced as if its arrays were on that many devices of a platform."""

    def traced(*args):
        with jax.sharding.use_abstract_mesh(plans.abstract_mesh(platform, devices)):
            return fn(*args)

    return traced


@contextlib.contextmanager
def count_compilations():
    """Yields a list whose only element is how many programs have been compiled since."""
    count = [0]

    def listen(event, duration, **_):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def mostly_slow(values, *fast):
    """Parameters of a test, of which the fast tests have only some."""
    return [
        value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]

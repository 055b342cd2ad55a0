"""`jit` for tests: what it makes runs slower, and compiles eight times faster; and a count."""

import contextlib
import functools

import jax

jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


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

"""`jit` for tests: what it makes runs slower, and compiles eight times faster."""

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

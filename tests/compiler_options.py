"""Options of XLA with which tests compile several times faster; the programs run slower.

conftest.py puts them into XLA_FLAGS before JAX starts, so nothing here may import JAX.
"""

import importlib.metadata

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# XLA has had no other emitters since jaxlib 0.12; this goes when 0.11 is no longer supported.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 12):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False


def as_flags() -> str:
    """The options as the value of XLA_FLAGS."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())

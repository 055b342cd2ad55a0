"""Test set-up: eight CPU devices, strict ranks, no warning goes unseen."""

import os

# Before jax starts. Eight virtual devices on few cores deadlock in collectives unless the
# thread pool (NPROC) is at least twice as large.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "16")
# Tests compile much and compute little: programs that run slower but compile several times faster.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def strict_dtypes():
    """Model code never mixes dtypes by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield

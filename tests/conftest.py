"""Test set-up: eight CPU devices, strict ranks, no warning goes unseen, nothing compiled twice."""

import atexit
import gc
import logging
import os
import pathlib
import shutil
import sys
import tempfile

from tests import compiler_options

# Before jax starts. Eight virtual devices on few cores deadlock in collectives unless the
# thread pool (NPROC) is at least twice as large.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "16")
# Tests compile much and compute little.
os.environ.setdefault("XLA_FLAGS", compiler_options.as_flags())
# What one process has compiled serves the others: workers of pytest, and what the tests start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest

from mogrifier_jax.nn import plans

jax.config.update("jax_numpy_rank_promotion", "raise")

# Files that take long begin first, so that no core is idle at the end.
LONGEST = (
    *("test_distributed", "test_worker", "test_train", "test_flax_users", "test_rnn"),
    *("test_recurrence", "test_runs_in_buckets", "test_circling_back", "test_buckets"),
    *("test_golden_run", "test_notebooks", "test_examples", "test_steps", "test_hostile"),
    *("test_nonsense", "test_estimates", "test_sweeps", "test_readme", "test_checkpoints"),
    *("test_flax_model", "test_api", "test_main", "test_runs", "test_nnx", "test_partitioning"),
    *("test_metrics", "test_site", "test_packaging", "test_dyneval", "test_models"),
)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish():
    # Tracing makes many objects and few cycles; what is imported stays. Looking through it all
    # for garbage, again and again, would take a tenth of the time.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(autouse=True)
def same_log_levels():
    """Keeps a test that runs `main`, which sets absl's verbosity, from silencing later ones."""
    loggers = [logging.getLogger(), logging.getLogger("absl")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command line in this process; returns its exit code and what it wrote to stderr."""
    from absl import flags
    from absl.testing import flagsaver

    from mogrifier_jax import distributed, hardware, jax_settings, main
    from mogrifier_jax.training import logs

    monkeypatch.chdir(pathlib.Path(__file__).parents[1])
    monkeypatch.setattr(logs, "setup_logging", lambda: None)
    monkeypatch.setattr(jax_settings, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(jax_settings, "check_xla_flags", lambda: None)  # It starts a process.
    monkeypatch.setattr(hardware, "describe_unused_accelerator", lambda: None)
    monkeypatch.setattr(distributed, "find_cluster", lambda *numbers: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["main", *arguments])
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as stopped:
            flags.FLAGS.unparse_flags()
            main.run()
        run.printed, said = capsys.readouterr()
        return stopped.value.code, said

    return run


@pytest.fixture
def several_backends(monkeypatch):
    """Lets the process seem to have accelerators, so that programs are traced for each of them."""
    monkeypatch.setattr(plans.backend, "backends", lambda: dict.fromkeys(("cpu", "cuda", "tpu")))


@pytest.fixture
def strict_dtypes():
    """Model code never mixes dtypes by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield

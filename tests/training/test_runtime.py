import jax
import jax.numpy as jnp
import pytest

from mogrifier_jax import errors
from mogrifier_jax.training import runtime


@pytest.fixture
def config(monkeypatch):
    """Undoes changes of the cache's folder."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield monkeypatch
    jax.config.update("jax_compilation_cache_dir", before)


def test_compiled_programs_are_kept_unless_told_where(config, tmp_path):
    config.setenv("MOGRIFIER_CACHE_DIR", str(tmp_path))
    runtime.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
    jax.config.update("jax_compilation_cache_dir", "mine")
    config.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    runtime.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == "mine"


def compile_matmul(options):
    a = jnp.ones((64, 64))
    return jax.jit(jnp.matmul, compiler_options=options).lower(a, a).compile().as_text()


def test_matmuls_on_cpus_go_to_eigen():
    assert "ynn_fusion" in compile_matmul(None)
    assert "ynn_fusion" not in compile_matmul(runtime.compiler_options("cpu"))
    assert runtime.compiler_options("tpu") is None and runtime.compiler_options("gpu") is None


def test_a_compiler_without_the_option_goes_without(monkeypatch):
    runtime.compiler_options.cache_clear()
    real = jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda f, compiler_options: real(f, compiler_options={"xla_cpu_none": "1"})
    )
    assert runtime.compiler_options("cpu") is None
    runtime.compiler_options.cache_clear()


@pytest.mark.parametrize("text", ["5", "5:", "a:b", "0:3", "7:6", "1:2:3", "-1:4"])
def test_steps_that_cannot_be_traced(text):
    with pytest.raises(errors.UsageError, match="is not N:M"):
        runtime.parse_steps(text)


@pytest.mark.parametrize(
    ("steps", "traced"),
    [
        ("1:1", [0]),
        ("4:5", [0, 4]),  # Dispatches of four steps each: 1 to 4, 5 to 8.
        ("5:8", [4]),
        ("6:13", [4, 8, 12]),
        ("99:100", []),
        (None, []),
    ],
)
def test_whole_dispatches_are_traced(steps, traced, monkeypatch, tmp_path):
    running, seen = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", running.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", running.pop)
    trace = runtime.Trace(tmp_path, steps)
    for done in range(0, 20, 4):
        with trace.steps(done, 4):
            seen += [done] * len(running)
    assert seen == traced and not running

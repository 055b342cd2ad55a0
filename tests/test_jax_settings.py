import jax
import pytest

from mogrifier_jax import jax_settings


@pytest.fixture
def config(monkeypatch):
    """Undoes changes of the cache's folder."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield monkeypatch
    jax.config.update("jax_compilation_cache_dir", before)


def test_compiled_programs_are_kept_unless_told_where(config, tmp_path):
    config.setenv("MOGRIFIER_CACHE_DIR", str(tmp_path))
    jax_settings.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
    jax.config.update("jax_compilation_cache_dir", "mine")
    config.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    jax_settings.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == "mine"

import os

import jax
import pytest

from mogrifier_jax import buckets, errors, jax_settings
from mogrifier_jax.data import corpora


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


@pytest.mark.parametrize("cache", [None, "~nobody_of_this_name/cache"])
def test_a_cache_without_a_home_is_refused(config, tmp_path, cache):
    config.chdir(tmp_path)
    config.delenv("HOME", raising=False)
    config.delenv("MOGRIFIER_CACHE_DIR", raising=False)
    if cache:
        config.setenv("MOGRIFIER_CACHE_DIR", cache)
    config.setattr(os, "getuid", lambda: 2**31 - 9)  # As in a container with a user of its own.
    (tmp_path / "text").write_text("some words\n" * 50)
    for use in (
        jax_settings.use_compilation_cache,
        lambda: corpora.load_corpus("text", path="text"),
        lambda: buckets._make_folder("x"),
    ):
        with pytest.raises(errors.UsageError, match="set MOGRIFIER_CACHE_DIR to a folder"):
            use()
    assert os.listdir() == ["text"]


@pytest.mark.parametrize("path", ["~nobody_of_this_name/x.txt", "a\0b"])
def test_a_text_of_nobody_is_refused(path, tmp_path):
    with pytest.raises(errors.UsageError, match="cannot be read"):
        corpora.load_corpus("text", path=path, data_dir=str(tmp_path))
    with pytest.raises(errors.UsageError, match="is not a folder"):
        corpora.load_corpus("ptb", source_dir=path, data_dir=str(tmp_path))

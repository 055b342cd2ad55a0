"""The model that comes with the package: one line loads it, and it scores what its card says."""

import doctest
import pathlib
import re

import jax
import pytest

import mogrifier_jax
from mogrifier_jax import errors
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import model_files, sample_command, text_sampling, trained_model

CARD = pathlib.Path(__file__).parents[2] / "docs" / "model_card.md"


def test_shipped_models_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = model_files.find_shipped("pydoc")
    assert path == model_files.SHIPPED / "pydoc.safetensors"
    assert 1_000_000 < path.stat().st_size < 2_000_000
    assert model_files.find_shipped("pydocs") == "pydocs"
    # A run of the same name is what somebody here means.
    (tmp_path / "pydoc").mkdir()
    assert model_files.find_shipped("pydoc") == "pydoc"
    with pytest.raises(errors.UsageError):
        mogrifier_jax.load("pydoc")


@pytest.mark.slow
def test_the_shipped_model_has_the_score_of_its_card(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = mogrifier_jax.load("pydoc")
    card = CARD.read_text()
    (size,) = re.findall(r"([\d,]+) parameters", card)
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == int(size.replace(",", ""))
    corpus = corpora.load_corpus("pydoc")
    for split in ("valid", "test"):
        (bits,) = re.findall(rf"\| {split} \| ([\d.]+) \|", card)
        text = model.vocabulary.decode(getattr(corpus, split).tokens)
        assert model.score(text).bits_per_token == pytest.approx(float(bits), abs=2e-4)
    sample_command.print_samples("pydoc", text_sampling.Sampling(length=20), "The ")
    assert capsys.readouterr().out.startswith("The ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load", "TrainedModel"])
def test_examples_of_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = doctest.DocTestFinder().find(trained_model)
    (test,) = (t for t in cases if t.name == f"{trained_model.__name__}.{name}")
    assert test.examples and not doctest.DocTestRunner().run(test).failed

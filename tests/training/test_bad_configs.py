"""Configs that cannot be are refused before any work; rates of zero are no rates."""

import copy

import pytest

from experiments import pydoc
from mogrifier_jax import errors
from mogrifier_jax.data import corpora
from mogrifier_jax.training import runs, train


def bad(section, **changes):
    """A config with keys set that it does not have, or to what cannot be."""
    config = pydoc.get_config("tiny")
    with config.unlocked():
        (config[section] if section else config).update(changes)
    return config


def without(section, key):
    config = pydoc.get_config("tiny")
    with config.unlocked():
        del (config[section] if section else config)[key]
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (bad("", sead=1), "config.sead is read by nothing; did you mean seed?"),
        (bad("data", batch_size=7), "batch_size 7 is not a multiple of the data axis (8); try 8"),
        (bad("data", drop_state_probability=2.0), "drop_state_probability 2.0 must be below 1"),
        (bad("model", roundz=1), "config.model.roundz is read by nothing; did you mean rounds"),
        (bad("model", num_layers=0), "num_layers 0 must be at least 1"),
        (bad("model", output="some"), "model.output 'some' is unknown: choose one of sum, resi"),
        (bad("dropout", imput=0.1), "config.dropout.imput is read by nothing; did you mean input"),
        (bad("dropout", input=1.0), "dropout.input 1.0 must be below 1"),
        (bad("optimizer", learning_rat=1.0), "config.optimizer.learning_rat is read by nothing"),
        (bad("optimizer", learning_rate=-1.0), "optimizer.learning_rate -1.0 must be at least 0"),
        (bad("optimizer", name="adamw"), "optimizer.name 'adamw' is unknown"),
        (bad("optimizer", accumulate=0), "optimizer.accumulate 0"),
        (bad("optimizer", accumulate_reduce="max"), "accumulate_reduce 'max'"),
        (bad("averaging", trigger_turn=1), "config.averaging.trigger_turn is read by nothing"),
        (bad("averaging", kind="ema"), "averaging.kind 'ema' is unknown"),
        (bad("schedule", turnz=1), "config.schedule.turnz is read by nothing; did you mean turns"),
        (bad("evaluation", windows=1), "config.evaluation.windows is read by nothing"),
        (bad("evaluation", train_windows=0), "evaluation.train_windows 0 must be at least 1"),
        (bad("mesh", datta=1), "config.mesh.datta is read by nothing; did you mean data"),
        (bad("mesh", devices=1), "config.mesh.devices is read by nothing; did you mean data"),
        (bad("", log_every=0), "log_every 0 must be at least 1"),
        (without("", "optimizer"), "config.optimizer lacks learning_rate"),
        (without("schedule", "turns"), "config.schedule lacks turns"),
        (without("optimizer", "l2_penalty"), "config.optimizer lacks l2_penalty"),
        (without("data", "window"), "config.data lacks window"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_corpus_is_read(config, words, monkeypatch, tmp_path):
    def read(name, **options):
        pytest.fail("a corpus was read")

    monkeypatch.setattr(corpora, "load_corpus", read)
    with pytest.raises(errors.UsageError) as refused:
        train.train_and_evaluate(config, str(tmp_path / "run"))
    assert words in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_options_of_a_corpus_are_refused_before_it_is_read(tmp_path):
    with pytest.raises(errors.UsageError, match="corpus 'pydoc' has no option 'language'"):
        runs.make_run(bad("data", language="fi"))


def test_dropout_rates_of_nothing_are_taken_away():
    config = pydoc.get_config("tiny")
    config.dropout.update(dict(input=0.0, state=0.25, output=0.5))
    dropout = runs.make_run(config).hyper.dropout
    assert dropout.input is None and dropout.state == 0.25
    # Nothing is projected, so there is nothing to drop behind it; with a projection, as output.
    assert dropout.downprojected is None
    projecting = copy.deepcopy(config)
    projecting.model.embedding_ratio = 0.5
    assert runs.make_run(projecting).hyper.dropout.downprojected == 0.5
    projecting.dropout.downprojected = 0.1
    assert runs.make_run(projecting).hyper.dropout.downprojected == 0.1

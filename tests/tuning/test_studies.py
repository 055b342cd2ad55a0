"""What studies tune: the ranges of the paper, the configs of trials, and ranges that cannot be."""

import json
import math

import pytest

from experiments import circling_back, ptb
from mogrifier_jax import errors
from mogrifier_jax.nn import models
from mogrifier_jax.tuning import studies


def test_the_studies_of_the_paper():
    mogrifier = studies.load("appendix_a")
    assert mogrifier.ranges["optimizer.learning_rate"] == (1e-3, 4e-3, "log")
    assert mogrifier.ranges["model.rank"] == (-20, 100, "integer")
    assert mogrifier.ranges["dropout.inter_layer"] == (0.0, 0.95, "linear")
    lstm = studies.load("appendix_a_lstm")
    assert set(mogrifier.ranges) - set(lstm.ranges) == {"model.rounds", "model.rank"}
    large = studies.load("enwik8")
    assert large.ranges["dropout.state"].high == 0.25
    assert set(mogrifier.ranges) - set(large.ranges) == {"model.embedding_ratio"}
    assert not any("dropout" in name for name in studies.load("reverse_copy").ranges)
    highest = {u: studies.load(f"dyneval_{u}").ranges["window"].high for u in ("word", "character")}
    assert highest == {"word": 20, "character": 50}
    assert studies.load("dyneval_word").adapts and not mogrifier.adapts
    fitting = set(studies.PAPER) - {"dyneval_word", "dyneval_character"}
    assert len(fitting) == 6
    for name in fitting:
        studies.check(studies.load(name))


def test_the_studies_of_circling_back():
    words, large = (studies.load(name) for name in ("circling_back", "circling_back_enwik8"))
    for study, before in ((words, "appendix_a"), (large, "enwik8")):
        studies.check(study)
        old = studies.load(before).ranges
        gone = {"model.embedding_ratio", "dropout.inter_layer"}
        assert set(study.ranges) == {*old, "dropout.cell_output", "model.chrono_max"} - gone
        assert study.ranges["dropout.cell_output"] == old["dropout.inter_layer"]
        limits = study.ranges["model.chrono_max"]
        assert (math.log(limits.low), math.log(limits.high)) == pytest.approx((2, 5))
        config = circling_back.get_config()
        assert studies.configure(study, config, {"model.chrono_max": 20.0}).model.chrono_max == 20
    assert words.ranges["dropout.state"] != large.ranges["dropout.state"]


def test_a_trial_has_its_own_hidden_size_and_zero_rank_is_full():
    study, config = studies.load("appendix_a"), ptb.get_config()

    def sizes(**params):
        tried = studies.configure(study, config, params)
        model = models.make_model(10_001, **tried.model)
        assert sum(models.count_parameters(model).values()) <= config.model.num_params
        return tried.model.rank, model.hidden_size

    full, small = ({"model.rounds": 5, "model.rank": rank} for rank in (-7, 40))
    assert sizes(**full)[0] == 0 == sizes(**{"model.rounds": 0, "model.rank": 40})[0]
    assert sizes(**small)[0] == 40 and sizes(**small)[1] > sizes(**full)[1]
    assert sizes(**full) == sizes(**{"model.rounds": 5, "model.rank": -1})
    plain = studies.configure(studies.load("appendix_a_lstm"), config, {})
    assert plain.model.rounds == plain.model.rank == 0 and config.model.rounds == 5
    with pytest.raises(AttributeError):
        plain.model.rouns = 1


@pytest.mark.parametrize("scale", ["log", "linear", "integer"])
def test_places_in_a_range_and_back(scale):
    limits = studies.Range(1, 100, scale)
    assert limits.to_unit(1) == 0 and limits.to_unit(100) == 1
    assert limits.to_unit(10) == pytest.approx(0.5 if scale == "log" else 9 / 99)
    assert limits.from_unit(limits.to_unit(37)) == pytest.approx(37)


def one(**limits):
    return {"optimizer.learning_rate": limits}


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ({}, "has no ranges"),
        (one(low=2, high=1), "is reversed: low 2 is above high 1; swap them"),
        (one(low=1, high=1), "is empty: low and high are both 1"),
        (one(low=0, high=1, scale="log"), "starts at 0, which has no logarithm"),
        (one(low=0, high=1, scale="lag"), "has the scale 'lag'; use linear, log, integer"),
        (one(low=0), "give low, high"),
        (one(low=0, high="many"), "give two numbers"),
        ({"model.rounds": {"low": 0.5, "high": 3, "scale": "integer"}}, "numbers of its scale"),
        ({"model.rank": {"low": 0, "high": 3}}, "model.rank is an integer in the config"),
        ({"model.ronds": {"low": 0, "high": 3}}, "does not have; did you mean model.rounds"),
        ({"model.cell": {"low": 0, "high": 3}}, "model.cell cannot be tuned"),
        ({"seed": {"low": 0, "high": 3, "scale": "integer"}}, "seed cannot be tuned"),
        ({"dropout.input": {"low": 0, "high": 4}}, "dropout.input reaches 4, which must be below"),
    ],
)
def test_ranges_that_cannot_be_are_refused(tmp_path, ranges, words):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(ranges))
    with pytest.raises(errors.UsageError) as refused:
        studies.check(studies.load(str(path)))
    assert words in str(refused.value) and "rates" in str(refused.value)

import math

import pytest
from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.training import learning_curves, metrics, workdirs


@pytest.mark.parametrize("unit", ["ppl", "bpc"])
def test_learning_curve(tmp_path, unit):
    with metrics.MetricWriter(tmp_path) as writer:
        for turn in range(5):
            nats = 4 * math.exp(-turn)
            writer.write(
                turn * 10, "eval", turn=turn, valid_nats=nats, averaged=turn > 2, best=True
            )
            writer.write(turn * 10 + 5, "train", loss_nats=nats if turn < 4 else math.nan)
    content = learning_curves.draw(tmp_path, unit=unit).read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_learning_curve_of_nothing_is_refused(tmp_path):
    with pytest.raises(errors.UsageError, match="nothing to draw"):
        learning_curves.draw(tmp_path)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_picture_names_the_corpus_and_says_whether_there_was_dropout(tmp_path, monkeypatch, rate):
    with metrics.MetricWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.write(step, "train", loss_nats=1.0 / step)
    (tmp_path / "config.json").touch()
    sections = {"data": {"name": "pydoc"}, "dropout": {"input": 0.0, "state": rate}}
    config = config_dict.ConfigDict(sections)
    monkeypatch.setattr(workdirs, "read_config", lambda workdir: config)
    drawn = []
    monkeypatch.setattr(learning_curves, "save_curves", lambda axes, *_: drawn.append(axes))
    learning_curves.draw(tmp_path, unit="bpc")
    (axes,) = drawn
    assert axes.get_title() == "pydoc: loss in nats and bits per character"
    assert ("dropout" in axes.lines[0].get_label()) == (rate > 0)


def test_a_picture_of_an_own_text_names_its_file(tmp_path, monkeypatch):
    with metrics.MetricWriter(tmp_path) as writer:
        writer.write(1, "train", loss_nats=1.0), writer.write(2, "train", loss_nats=0.5)
    (tmp_path / "config.json").touch()
    data = {"name": "text", "path": "books/a_$1_\\frac$\udcff.txt", "train": None}
    config = config_dict.ConfigDict({"data": data})
    monkeypatch.setattr(workdirs, "read_config", lambda workdir: config)
    drawn, save = [], learning_curves.save_curves
    monkeypatch.setattr(
        learning_curves, "save_curves", lambda axes, *rest: drawn.append(axes) or save(axes, *rest)
    )
    assert learning_curves.draw(tmp_path).exists()
    assert drawn[0].get_title() == "a_$1_\\frac$?.txt: loss in nats and perplexity"

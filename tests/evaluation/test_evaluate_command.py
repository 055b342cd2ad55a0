"""`--mode=evaluate` on workdirs that a real training run wrote, and what it says when it cannot."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

from experiments import pydoc
from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import corpora, vocabularies
from mogrifier_jax.data.datasets import text as local_text
from mogrifier_jax.evaluation import (
    eval_options,
    evaluate_command,
    evaluation_json,
    loading,
    methods,
    paper_tables,
    scored_texts,
    token_files,
)
from mogrifier_jax.training import checkpoints, runs, train, workdirs

# The end, where valid and test are, is monotonous: adapting to it helps.
TEXT = "".join(f"{'abcdefgh'[i % 8] * (i % 5 + 1)} {'xyz'[i % 3]}\n" for i in range(110))
TEXT += "hhh y\n" * 40


@pytest.fixture(scope="module", autouse=True)
def small_corpus():
    """The corpus `pydoc` made small."""

    def read():
        parts = local_text.cut(TEXT, (0.8, 0.1, 0.1), "here")
        return corpora._encode("pydoc", "character", "character", iter(parts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "_read_pydoc", read)
        # One device compiles sooner; the tests of the methods have meshes.
        make_mesh = partitioning.make_mesh
        patch.setattr(
            partitioning,
            "make_mesh",
            lambda data=-1, model=1: make_mesh(data, model, jax.devices()[:1]),
        )
        yield


def make_config():
    config = pydoc.get_config("tiny")
    with config.unlocked():
        config.data.update(batch_size=8, window=8)
        config.model.update(num_layers=1, hidden_size=6, rounds=2, rank=2)
        config.dropout.update(input=0.0, inter_layer=0.0, state=0.0, output=0.3)
        config.evaluation.update(temperature_tokens=64, lines_per_stripe=5, softmax_temperature=0.9)
        config.schedule.update(turns=1, steps_per_turn=1)
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A workdir as training leaves it."""
    workdir = tmp_path_factory.mktemp("runs") / "small"
    train.train_and_evaluate(make_config(), str(workdir))
    return workdir


@pytest.fixture
def workdir(trained, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "run")


def make_options(**changes):
    chosen = eval_options.defaults()
    with chosen.unlocked():
        chosen.update({"temperature": "0.9", **changes})
    return chosen


def evaluate(folder, **changes):
    return evaluate_command.evaluate_workdirs([str(folder)], make_options(**changes))[0]


def scores_of(evaluation):
    return {(row["method"], row["text"]): row["nats"] for row in evaluation["results"]}


@pytest.mark.slow
def test_deterministic_scores_are_those_of_training(workdir):
    evaluation = evaluate(workdir, stripes=0)
    results = json.loads((workdir / "results.json").read_text())
    found = scores_of(evaluation)
    assert found["deterministic", "valid"] == pytest.approx(results["valid_nats"], rel=1e-6)
    assert found["deterministic", "test"] == pytest.approx(results["test_nats"], rel=1e-6)
    assert json.loads((workdir / "evaluation.json").read_text()) == evaluation
    row = evaluation["results"][0]
    assert row["bits"] == pytest.approx(row["nats"] / np.log(2))
    assert row["perplexity"] == pytest.approx(np.exp(row["nats"]))
    # One stream is another number, at the place of the first; another method is added.
    again = evaluate(workdir, splits="valid")
    assert len(again["results"]) == 2
    assert abs(scores_of(again)["deterministic", "valid"] - results["valid_nats"]) > 1e-5


@pytest.mark.slow
def test_every_method_leaves_its_rows_and_tokens(workdir):
    grid = dict(
        window=4, batch_size=16, max_windows=2, learning_rates="0,1e-4,1e-3", epsilons="1e-2"
    )
    changes = dict(
        methods=",".join(eval_options.METHODS), splits="valid", samples=2, multipliers="0,1"
    )
    evaluation = evaluate(workdir, dyneval=grid, **changes)
    found = scores_of(evaluation)
    assert set(found) == {(method, "valid") for method in eval_options.METHODS}
    rows = {row["method"]: row for row in evaluation["results"]}
    # Each picked the better of two, of which one is the deterministic pass.
    for method in ("mc", "dyneval"):
        assert found[method, "valid"] <= found["deterministic", "valid"] + 1e-5
    assert rows["dyneval"]["learning_rate"] > 0
    assert found["dyneval", "valid"] < found["deterministic", "valid"] - 1e-4
    assert rows["mc_dyneval"]["samples"] == 2
    for method, row in rows.items():
        scores, about = token_files.read_tokens(row["file"])
        assert scores.mean() == pytest.approx(row["nats"], rel=1e-6)
        assert about["method"] == method
    assert (workdir / "dyneval" / "statistics_B16_T4.npz").exists()
    table = evaluation_json.format_table(evaluation)
    assert all(f"── {method} ─" in table for method in eval_options.METHODS)


@pytest.mark.slow
def test_divergence_is_reported_with_the_last_finite_score(workdir):
    grid = dict(window=4, batch_size=16, max_windows=2, learning_rates="1e6", epsilons="1e-12")
    evaluation = evaluate(workdir, methods="dyneval", splits="valid", dyneval=grid)
    (row,) = evaluation["results"]
    assert row["nats"] is None and row["diverged_at_window"] >= 1
    assert 0 < row["last_finite_nats"] < math.inf
    assert "diverged" in evaluation_json.format_table(evaluation)
    assert "diverged" in paper_tables.to_markdown([evaluation])


@pytest.mark.slow
def test_weights_are_the_averaged_ones_and_need_no_corpus(trained, monkeypatch):
    monkeypatch.setattr(corpora, "load_corpus", None)
    loaded = loading.load_run(trained)
    assert loaded.temperature == 0.9 and loaded.info["finished"]
    shapes = jax.eval_shape(lambda: loaded.model.init(jax.random.key(0), **loaded.model.example()))
    assert jax.tree.structure(loaded.params) == jax.tree.structure(shapes["params"])
    run = runs.make_run(make_config(), task=_no_task(loaded))
    with checkpoints.Checkpoints(trained, read_only=True) as saved:
        state = saved.restore(run.abstract_state(), which="best").state
    expected = run.program.average.value(state.average, state.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)


def _no_task(loaded):
    class Task:
        vocabulary, encoder_decoder, carries = loaded.vocabulary, False, True
        batch_at, digests = None, {}

    return Task


@pytest.mark.slow
def test_any_text_can_be_scored_without_the_corpus(workdir, tmp_path, monkeypatch, caplog):
    valid = local_text.cut(TEXT, (0.8, 0.1, 0.1), "here")[1]
    expected = evaluate(workdir, splits="valid")
    monkeypatch.setattr(corpora, "load_corpus", None)
    path = tmp_path / "some.txt"
    path.write_text(valid)
    evaluation = evaluate(workdir, text=str(path), temperature="search")
    found = scores_of(evaluation)
    assert found["deterministic", "text"] == pytest.approx(
        scores_of(expected)["deterministic", "valid"], rel=1e-6
    )
    path.write_text("Ω" + valid)
    row = evaluate(workdir, text=str(path))["results"][-1]
    assert row["unknown_tokens"] == 1 and row["nats"] != found["deterministic", "text"]
    assert "'Ω'" in caplog.text


@pytest.mark.slow
def test_texts_of_the_same_name_do_not_overwrite_each_other(workdir, tmp_path, monkeypatch):
    texts = {"a": "aa x\n" * 20, "b": "hhh y\n" * 30}
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.txt").write_text(text)
        monkeypatch.chdir(tmp_path / folder)
        rows = evaluate(workdir, text="t.txt")["results"]
    assert len({row["source"] for row in rows}) == len({row["file"] for row in rows}) == 2
    for row, text in zip(rows, texts.values(), strict=True):
        assert len(token_files.read_tokens(row["file"])[0].tokens) == len(text)
    again = evaluate(workdir, text="t.txt")["results"]
    assert [row["file"] for row in again] == [row["file"] for row in rows]  # Control: replaced.


@pytest.mark.slow
def test_minimised_temperature_is_no_worse_than_the_grid(workdir):
    rows = [
        evaluate(workdir, temperature=rule, splits="valid")["results"][0]["temperature"]
        for rule in ("search", "minimise")
    ]
    scorer = methods.Scorer(str(workdir), make_options(temperature="search"))
    score = scorer.score_temperatures(scorer.batch_size, scorer.window)
    grid, minimum, far = score((rows[0], rows[1], rows[1] + 0.3))
    assert minimum <= grid + 1e-6 and far > minimum


@pytest.mark.slow
def test_samples_without_dropout_are_said_to_be_the_same(workdir, caplog):
    scorer = methods.Scorer(str(workdir), make_options())
    scorer.mc()
    assert "without dropout" not in caplog.text
    scorer.dropout = type(scorer.dropout)()
    scorer.mc()
    assert f"{workdir} was trained without dropout, so all samples are the same" in caplog.text


@pytest.mark.slow
def test_a_run_that_is_still_going_on_says_which_step_was_used(workdir, caplog):
    (workdir / "results.json").unlink()
    with checkpoints.Checkpoints(workdir), caplog.at_level("INFO"):  # As the run holds it.
        loaded = loading.load_run(workdir)
    assert not loaded.info["finished"]
    assert f"best checkpoint so far, of step {loaded.info['step']} of 1" in caplog.text


def _damage(folder, what):
    if what == "checkpoints":
        shutil.rmtree(folder / "checkpoints")
    elif what == "vocabulary":
        vocab = vocabularies.Vocabulary.from_json(workdirs.read_vocabulary(folder))
        others = [t for t in vocab.tokens if t not in "xyz"] + ["X", "Y", "Z"]
        changed = vocabularies.Vocabulary.from_tokens(others, "character")
        (folder / "vocabulary.json").write_text(changed.to_json())
    elif what:
        (folder / what).write_bytes(b"" if what == "empty.txt" else b"\xff\xfe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, changes, message",
    [
        ("checkpoints", {}, "no checkpoint yet"),
        ("vocabulary", {}, r"not those that its weights were trained with: vocabulary\.json"),
        ("empty.txt", {"text": "empty.txt"}, "is empty"),
        ("broken.txt", {"text": "broken.txt"}, "not UTF-8"),
        ("", {"text": "missing.txt"}, "missing.txt does not exist; give a file of text"),
        ("", {"text": "config.json", "multipliers": "0.5,1", "methods": "mc"}, "give one value"),
        ("", {"temperature": "0"}, "temperature=0 is out of range"),
        ("", {"temperature": "warm"}, "out of range"),
        ("", {"splits": "exam"}, "split 'exam'"),
        ("", {"methods": "guess"}, "method 'guess'"),
        ("", {"which": "worst"}, "eval.which 'worst'"),
        ("", {"multipliers": "0.5;1", "methods": "mc"}, "not a list of numbers"),
        ("", {"methods": ""}, "evaluate that run first"),
    ],
)
def test_what_cannot_be_is_said_clearly(workdir, damage, changes, message):
    _damage(workdir, damage)
    if "text" in changes:
        changes = {**changes, "text": str(workdir / changes["text"])}
    with pytest.raises(errors.UsageError, match=message):
        evaluate(workdir, **changes)


def test_no_workdir_is_said_clearly(tmp_path):
    for folders, message in (([""], "--workdir is missing"), ([str(tmp_path / "x")], "not exist")):
        with pytest.raises(errors.UsageError, match=message):
            evaluate_command.evaluate_workdirs(folders, make_options())
    with pytest.raises(errors.UsageError, match="has no config"):
        evaluate_command.evaluate_workdirs([str(tmp_path)], make_options())


def test_units_follow_the_corpus():
    assert scored_texts.token_unit("ptb_char", "word") == "character"
    assert scored_texts.token_unit("ptb", "word") == "word"

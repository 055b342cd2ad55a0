"""Sweeps: every variant builds within its budget, runs once, is continued, and is compared."""

import json
import math
import os
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from mogrifier_jax import configs, errors, hardware, partitioning
from mogrifier_jax.analysis import sweep_report, sweep_results, sweeps
from mogrifier_jax.configs import Row, Set
from mogrifier_jax.nn import models
from mogrifier_jax.training import checkpoints, metrics, programs, runs, train, workdirs

ROOT = pathlib.Path(__file__).parents[2]
ABLATION = str(ROOT / "experiments" / "ablation.py")
COPY = str(ROOT / "experiments" / "reverse_copy.py")
PAPER = configs.paper_numbers()
WORDS = {"ptb": 10_001, "ptb_char": 51}


def make_model(config):
    words = config.data.get("vocab_size")
    vocab_size = words + 3 if words else WORDS[config.data.name]
    return models.make_model(vocab_size, encoder_decoder=bool(words), **config.model)


def variants(sweep):
    return dict.fromkeys(row.variant for each in sweep.module.SETS.values() for row in each.rows)


@pytest.mark.parametrize("name", [ABLATION, f"{ABLATION}:small", COPY, f"{COPY}:24m"])
def test_all_variants_have_the_same_number_of_parameters(name):
    sweep = sweeps.Sweep(name)
    for variant in variants(sweep):
        config = sweep.make_job(variant, 1, "x").config
        assert config.is_locked and config.model.hidden_size is None
        model, budget = make_model(config), config.model.num_params
        sizes = {name: getattr(model, name) + 1 for name in ("hidden_size", "embedding_size")}
        larger = model.clone(**sizes)
        count, too_many = (sum(models.count_parameters(m).values()) for m in (model, larger))
        assert count <= budget, variant
        assert count > 0.985 * budget or too_many > budget, variant  # Units are large steps.


def test_the_ablation_has_the_schedule_of_the_paper():
    config = configs.load_config(ABLATION)
    assert (config.data.batch_size, config.data.window) == (64, 35)
    assert (config.schedule.turns, config.schedule.steps_per_turn) == (600, 100)
    assert config.averaging.trigger_at_the_latest == 400
    published = configs.load_config(str(ROOT / "experiments" / "ptb.py"))
    assert config.dropout == published.dropout and config.optimizer == published.optimizer
    config = configs.load_config(f"{ABLATION}:lstm")
    published = configs.load_config(str(ROOT / "experiments" / "ptb.py:lstm"))
    assert config.dropout == published.dropout and config.optimizer == published.optimizer
    assert (config.model.rounds, config.model.rank) == (0, 0)


def test_sets_hold_the_numbers_of_the_paper():
    sets = configs.load_file(ABLATION).SETS
    assert [row.x for row in sets["rounds"].rows] == list(range(7))
    rounds = [configs.load_config(f"{ABLATION}:{r.variant}").model for r in sets["rounds"].rows]
    assert [model.rounds for model in rounds] == list(range(7))
    shown = [round(math.exp(row.paper), 2) for row in sets["rounds"].rows]
    assert shown == [57.5, 56.4, 55.5, 54.82, 54.1, 54.3, 54.6]
    assert [f"{math.exp(row.paper):.1f}" for row in sets["table"].rows] == [
        *("54.1", "54.6", "55.0", "57.5", "57.8"),
    ]
    copies = {(r.label, r.x): r.paper for r in configs.load_file(COPY).SETS["10m_1k"].rows}
    assert copies["LSTM", 150] == 0.62399 and copies["Mogrifier", 200] == 1.39342


@pytest.mark.parametrize("length", ["150", "200"])
def test_copy_sizes_are_those_of_the_best_trials(length):
    """The LSTM's follow from the budget; the Mogrifier's rounds and rank are not published."""
    for cell, tolerance in (("lstm", 0), ("mogrifier", 10)):
        model = make_model(configs.load_config(f"{COPY}:{cell},length{length}"))
        expected = PAPER["reverse_copy"]["sizes"][length][cell]
        assert model.embedding_size == expected[0]
        assert abs(model.hidden_size - expected[1]) <= tolerance


def test_hypotheses_change_what_they_say():
    def load(variant):
        return configs.load_config(f"{ABLATION}:{variant},small")

    assert load("scaling").model.scaling and load("scaling").model.rounds == 0
    assert load("rank3").model.rank == 3 and load("full_rank").model.rank == 0
    assert load("factorised").model.gate_rank > 0 and load("factorised").model.rounds == 0
    assert load("lstm,sgd").optimizer.name == "sgd" != load("lstm").optimizer.name
    assert load("lstm,sgd").optimizer.learning_rate == 1.0
    assert load("rmsprop").optimizer.name == "rmsprop"
    assert load("layer_norm").model.layer_norm and not load("").model.layer_norm
    assert not load("untied").model.tied_embeddings and load("").model.tied_embeddings
    episodic = load("lstm,episodic")
    assert episodic.data.episodic and episodic.model.trainable_initial_state
    assert load("characters").data.name == "ptb_char"
    lstm, mlstm, *gated = (load(v).optimizer for v in ("lstm", "mlstm", "mogrifier", "full_rank"))
    assert lstm == mlstm and gated[0] == gated[1]
    assert lstm == gated[0]  # The same setting was best for both.


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        *("full_rank", "no_zigzag", "mlstm", "scaling", "factorised", "lstm,sgd", "rmsprop"),
        *("layer_norm", "untied", "episodic", "characters"),
    ],
)
def test_variants_can_be_trained(variant):
    """Traced, on a text that needs no download."""
    config = configs.load_config(f"{ABLATION}:{variant},tiny")
    config.data.name = "pydoc"
    run = runs.make_run(config)
    state, found = programs.jit_train_steps(run).eval_shape(
        run.abstract_state(), run.task.stream, run.hyper, num_steps=1
    )
    assert jax.tree.structure(state) == jax.tree.structure(run.abstract_state())
    assert set(found) >= {"loss_nats", "grad_norm"}


FILE = """
from ml_collections import config_dict
from mogrifier_jax.configs import Row, Set, choose

def get_config(variant=""):
    model, condition, _ = choose(variant, ("a", "b"), ("", "cold"), ("", "tiny"))
    config = config_dict.ConfigDict(dict(seed=0, data=dict(name=model), step=1))
    return config.lock()

SETS = {
    "both": Set("Both", [Row("a", "A", paper=1.0), Row("b", "B")]),
    "cold": Set("Cold", [Row("a,cold", "A"), Row("a", "A")]),
}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "trial.py").write_text(FILE)
    return f"{tmp_path / 'trial.py'}:tiny"


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training; notes the folders, and writes what comparisons need."""
    started = []

    def run(config, workdir):
        started.append(f"{pathlib.Path(workdir).parent.name}/{pathlib.Path(workdir).name}")
        if config.data.name == "b" and config.seed == 2:
            raise errors.Diverged("the loss of step 3 is not finite")
        if config.step == 9:
            raise errors.Interrupted("stopped")
        (pathlib.Path(workdir) / "results.json").parent.mkdir(parents=True, exist_ok=True)
        (pathlib.Path(workdir) / "results.json").write_text(
            '{"step": 1, "valid_nats": 1.5, "test_nats": 1.6}'
        )

    monkeypatch.setattr(train, "train_and_evaluate", run)
    monkeypatch.setattr(sweep_report, "write", lambda *args: [])
    return started


@pytest.mark.slow
def test_every_run_is_made_once_seed_by_seed(file, trained, tmp_path, capsys):
    sweeps.sweep(file, "both,cold", "1,3", str(tmp_path / "w"))
    assert trained == [f"{v}/seed{k}" for k in (1, 3) for v in ("a", "b", "a_cold")]
    assert "no run has a result" in capsys.readouterr().out  # The stand-ins write none.
    sweeps.sweep(file, "both,cold", "1,3,4", str(tmp_path / "w"))
    assert trained[6:] == ["a/seed4", "b/seed4", "a_cold/seed4"]
    assert sweep_results.read_record(tmp_path / "w" / "a" / "seed1")["seconds"] >= 0


def test_runs_on_different_texts_are_not_compared(tmp_path, monkeypatch):
    sweep, text = sweeps.Sweep(f"{ABLATION}:tiny"), {"train": "1", "valid": "2"}
    jobs = [sweep.make_job(variant, 1, tmp_path) for variant in ("lstm", "r1", "r2")]

    def begin(job, digests):
        fingerprint = {f"{workdirs.CORPUS}{split}": digest for split, digest in digests.items()}
        with checkpoints.Checkpoints(job.folder, fingerprint=fingerprint) as saved:
            saved.save(1, {"x": jnp.float32(1)}, info={}, best=True)

    def load(digests):
        monkeypatch.setattr(runs, "make_task", lambda *_: types.SimpleNamespace(digests=digests))

    load({"train": "3"})
    sweeps.check_corpora(jobs, jobs)  # Control: nothing was trained yet.
    begin(jobs[0], text)
    with pytest.raises(errors.UsageError, match=f"train, valid for .* {jobs[1]} is not the one"):
        sweeps.check_corpora(jobs, jobs[1:])
    load(text)
    sweeps.check_corpora(jobs, jobs[1:])
    begin(jobs[1], text | {"valid": "3"})
    with pytest.raises(errors.UsageError, match=f"text of valid for the run of {jobs[1]} is not"):
        sweeps.check_corpora(jobs, jobs[2:])


def test_a_run_that_diverges_does_not_end_the_sweep(file, trained, tmp_path):
    sweeps.sweep(file, "both", "2,1", str(tmp_path / "w"))
    assert trained == ["a/seed2", "b/seed2", "a/seed1", "b/seed1"]
    assert "step 3" in sweep_results.read_record(tmp_path / "w" / "b" / "seed2")["diverged"]
    assert sweeps.describe_result(tmp_path / "w" / "b" / "seed2") == "diverged"
    sweeps.sweep(file, "both", "2,1", str(tmp_path / "w"))
    assert len(trained) == 4


def test_a_run_that_is_stopped_ends_the_sweep(file, trained, tmp_path):
    with pytest.raises(errors.Interrupted):
        sweeps.sweep(file, "both", "1", str(tmp_path / "w"), overrides={"step": 9})
    assert trained == ["a/seed1"] and not sweeps.is_finished(tmp_path / "w" / "a" / "seed1")
    sweeps.sweep(file, "both", "1", str(tmp_path / "w"))
    assert trained == ["a/seed1", "a/seed1", "b/seed1"]


SCRIPT = """
import os, pathlib, sys, time
folder = pathlib.Path([a for a in sys.argv if a.startswith("--workdir=")][0][10:])
(folder / "began").touch()
cores = getattr(os, "sched_getaffinity", lambda pid: ())
(folder / "cores").write_text(str(len(cores(0))))
code = {"b/seed2": 3, "a/seed9": 75}.get(f"{folder.parent.name}/{folder.name}", 0)
code = 1 if folder.parent.parent.name == "broken" else code
if not code:
    end = time.monotonic() + 300
    while folder.match("at_once/a/seed1") and not (folder / "../../b/seed1/began").exists():
        time.sleep(0.01)  # Until the other one runs too.
        if time.monotonic() > end:
            sys.exit("it is alone")
    (folder / "results.json").write_text('{"step": 1, "valid_nats": 1.5, "test_nats": 1.6}')
print("some reason")
sys.exit(code)
"""


@pytest.fixture
def beside(monkeypatch):
    """Processes that only write files."""
    real = sweeps.Sweep.command
    seen = []

    def command(self, job):
        seen.append(real(self, job))
        return [sys.executable, "-c", SCRIPT, *seen[-1][3:]]

    monkeypatch.setattr(sweeps.Sweep, "command", command)
    monkeypatch.setattr(sweep_report, "write", lambda *args: [])
    return seen


def test_several_runs_at_once(file, beside, tmp_path):
    workdir = tmp_path / "at_once"
    sweeps.sweep(file, "both", "1,2", str(workdir), parallel=2, overrides={"step": 5})
    assert beside[0][1:] == [
        *("-m", "mogrifier_jax.main", f"--config={tmp_path / 'trial.py'}:a,tiny"),
        *("--config.step=5", "--config.seed=1", f"--workdir={workdir / 'a' / 'seed1'}"),
    ]
    assert "some reason" in sweep_results.read_record(workdir / "b" / "seed2")["diverged"]
    assert len(beside) == 4
    sweeps.sweep(file, "both", "1,2", str(workdir), parallel=2, overrides={"step": 5})
    assert len(beside) == 4


def test_runs_at_once_share_the_cores(file, beside, tmp_path, monkeypatch):
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    sweeps.sweep(file, "both", "1", str(tmp_path / "w"), parallel=2)
    assert bound[::2] == [{0, 2, 7}, {1, 5}]  # Where processes start,
    assert bound[1::2] == [{0, 1, 2, 5, 7}] * 2  # and what is restored.
    noted = [sweep_results.read_record(tmp_path / "w" / v / "seed1")["hardware"] for v in "ab"]
    assert noted == [f"{n} cpu, {n} of {os.cpu_count()} cores" for n in (3, 2)]


@pytest.mark.skipif(len(hardware.usable_cores()) < 2, reason="needs two cores")
def test_a_run_beside_another_sees_its_own_cores_only(file, beside, tmp_path):
    sweeps.sweep(file, "both", "1", str(tmp_path / "w"), parallel=2)
    seen = [int((tmp_path / "w" / v / "seed1" / "cores").read_text()) for v in "ab"]
    assert sum(seen) == len(os.sched_getaffinity(0))


def test_a_process_that_fails_ends_the_sweep_with_its_log(file, beside, tmp_path):
    broken, words = tmp_path / "broken", r"ended with code 1; the reason is in .*log.txt"
    with pytest.raises(errors.UsageError, match=words) as error:
        sweeps.sweep(file, "both", "1", str(broken), parallel=2)
    log = pathlib.Path(str(error.value).rsplit(" in ")[-1])
    assert log in [broken / variant / "seed1" / "log.txt" for variant in "ab"]  # Which ends first.
    assert "some reason" in log.read_text()


def test_processes_that_are_stopped_are_left_for_the_next_time(file, beside, tmp_path):
    with pytest.raises(errors.Interrupted, match="1 runs were stopped or not started"):
        sweeps.sweep(file, "both", "9,1", str(tmp_path / "w"), parallel=2)
    done = [path.parent for path in (tmp_path / "w").glob("*/*/results.json")]
    assert len(done) == 3 and tmp_path / "w" / "a" / "seed9" not in done


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(names="bth"), "--set=bth is not in .* it has both, cold"),
        (dict(seeds="1,x"), "--seeds=1,x must be different numbers"),
        (dict(seeds="1,1"), "--seeds=1,1 must be different numbers"),
        (dict(seeds="1,01"), "--seeds=1,01 must be different numbers"),
        (dict(parallel=0), "--parallel=0 must be the number of runs at a time, at least 1"),
    ],
)
def test_mistakes_are_named_before_any_run(file, trained, tmp_path, options, words):
    with pytest.raises(errors.UsageError, match=words):
        sweeps.sweep(
            file,
            options.get("names", "both"),
            options.get("seeds", "1"),
            str(tmp_path / "w"),
            parallel=options.get("parallel", 1),
        )
    assert not trained


def test_the_title_of_a_set_names_its_corpora():
    sweep = sweeps.Sweep(f"{ABLATION}:small")
    assert sweep.title_of(sweep.module.SETS["rounds"]) == "Rounds of gating, ptb"
    assert sweep.title_of(sweep.module.SETS["characters"]).endswith(", ptb_char")
    copy = sweeps.Sweep(COPY)
    assert copy.title_of(copy.module.SETS["10m_1k"]) == "Reverse copy"


def test_a_file_without_sets_is_refused():
    with pytest.raises(errors.UsageError, match="has no sets to sweep over"):
        sweeps.Sweep(str(ROOT / "experiments" / "mwc.py"))
    with pytest.raises(errors.UsageError, match="not the name of an experiment"):
        configs.load_config("none.py")


@pytest.mark.slow
def test_a_real_sweep_from_the_first_run_to_the_figure(tmp_path, monkeypatch):
    """Two runs, of which the second is made later; the first is not made again.

    They learn from the reverse copy task.
    """
    mesh = partitioning.make_mesh(1, 1, devices=jax.devices()[:1])
    monkeypatch.setattr(partitioning, "make_mesh", lambda data, model: mesh)
    rates = {"optimizer.learning_rate": 0.03, "evaluation.softmax_temperature": 1.0}
    options = dict(overrides={"data.length": 3, "data.window": 4} | rates)
    sweep = sweeps.Sweep(f"{COPY}:tiny", **options)
    rows = [Row("lstm", "LSTM", 3), Row("mogrifier", "Mogrifier", 3)]
    pair = Set("Pair", rows, unit="nats")
    jobs = [sweep.make_job(variant, 1, tmp_path) for variant in ("lstm", "mogrifier")]
    list(sweeps.run_in_turn(jobs[:1]))
    before = (jobs[0].folder / "results.json").stat().st_mtime_ns
    assert [sweeps.is_finished(job.folder) for job in jobs] == [True, False]
    list(sweeps.run_in_turn(jobs[1:]))
    written = sweep_report.write(tmp_path, "pair", pair, [1], "Pair of copies")
    assert (jobs[0].folder / "results.json").stat().st_mtime_ns == before
    rows = json.loads((tmp_path / "pair.json").read_text())
    assert [row["label"] for row in rows] == ["LSTM", "Mogrifier"]
    for row, job in zip(rows, jobs, strict=True):
        result = json.loads((job.folder / "results.json").read_text())
        assert row["valid"]["mean"] == row["valid"]["nats"] == result["valid_nats"]
        assert row["num_params"] == sum(models.count_parameters(make_model(job.config)).values())
        assert 1.5 < row["valid"]["mean"] < 3.0 and row["seconds"] > 0
        words = job.config.data.vocab_size + 3
        valid = [r["valid_nats"] for r in metrics.read_metrics(job.folder) if r["kind"] == "eval"]
        assert valid[0] == pytest.approx(math.log(words), rel=0.01) and valid[-1] < valid[0]
        assert result["test_ppl"] < words
    assert rows[0]["valid"]["mean"] != rows[1]["valid"]["mean"]
    assert "| LSTM | 3 |" in (tmp_path / "pair.md").read_text()
    assert (tmp_path / "pair.png").read_bytes().startswith(b"\x89PNG")
    assert written == [tmp_path / f"pair{end}" for end in (".json", ".md", ".png", "_curves.png")]
    shown = sweep_report.show(written)
    assert shown.startswith("Pair of copies, nats per token\n\nmodel ")
    assert all(str(path) in shown for path in written)


@pytest.mark.parametrize("score", ["1.5", None, float("nan"), [1.5]])
def test_results_that_are_not_as_they_were_written_are_named(score, tmp_path):
    good = {"step": 4, "valid_nats": 1.5, "test_nats": 1.6, "valid_ppl": 4.5}
    (tmp_path / "results.json").write_text(json.dumps(good))
    assert sweeps.describe_result(tmp_path) == "valid 1.5000 nats, 0s"  # Control.
    (tmp_path / "results.json").write_text(json.dumps(good | {"valid_nats": score}))
    with pytest.raises(errors.UsageError, match=r"results.json .*valid_nats.* delete that folder"):
        sweeps.describe_result(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps({"seconds": score}))
    with pytest.raises(errors.UsageError, match=r"sweep.json .*seconds"):
        sweep_results.read_record(tmp_path)

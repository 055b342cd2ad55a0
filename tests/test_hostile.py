"""What a hostile week finds: odd paths, damaged files, full disks, others at the same files."""

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import json
import logging
import os
import pathlib
import pkgutil
import resource
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from mogrifier_jax import command_process, errors, files, partitioning
from mogrifier_jax.analysis import explore
from mogrifier_jax.data import corpora, streams, tasks
from mogrifier_jax.evaluation import (
    eval_options,
    evaluate_command,
    evaluation_json,
    loading,
    methods,
    paper_tables,
    scored_texts,
)
from mogrifier_jax.training import (
    atomic_files,
    checkpoints,
    learning_curves,
    logs,
    memory,
    metrics,
    run_record,
    schedule,
    signals,
    train,
    workdirs,
)
from tests import test_files
from tests import workdir as written

STATE = {"params": {"w": jnp.arange(4.0)}, "opt_state": {"m": jnp.zeros(4)}}
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    return written.write(folder, "some text\nof letters\n", num_layers=1, rounds=1)


@pytest.fixture
def folder(made, tmp_path):
    return pathlib.Path(shutil.copytree(made, tmp_path / "run"))


# Paths.


@pytest.mark.parametrize(
    "name",
    [
        "run[1]",
        "a b",
        "\u00fcn\u00ef \u6587",
        "x" * 200,
        "*?",
        "p%41#|",
        "--x",
        "a,b",
        "run/",
        "link",
        "rel",
    ],
)
def test_any_path_is_taken(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = name if name == "rel" else f"{tmp_path}/{name}"
    if name == "link":
        (tmp_path / "target").mkdir()
        (tmp_path / "link").symlink_to("target")
    workdirs.check_place(path)
    with checkpoints.Checkpoints(path) as saved:
        saved.save(1, STATE, info={}, best=True)
        assert saved.restore(ABSTRACT).step == 1
    assert metrics.MetricWriter(path).close() is None
    assert (tmp_path / name / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize("path", ["gs://bucket/run", "a\\b", "file/run", "x\0", "\udcff"])
def test_a_path_that_cannot_be_is_refused_and_nothing_is_made(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(errors.UsageError):
        workdirs.check_place(path)
    assert os.listdir() == ["file"]


# Seals.


def change_config(folder, section, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[section] |= changes
    path.write_text(json.dumps(config))


def swap_letters(folder):
    path = folder / "vocabulary.json"
    content = json.loads(path.read_text())
    content["tokens"][-1], content["tokens"][-2] = content["tokens"][-2:]
    path.write_text(json.dumps(content))


CHANGES = {
    "rounds": lambda folder: change_config(folder, "model", rounds=4),
    "cap_input_gate": lambda folder: change_config(folder, "model", cap_input_gate=False),
    "output": lambda folder: change_config(folder, "model", output="last"),
    "kind": lambda folder: change_config(folder, "averaging", kind="none"),
    "vocabulary.json": swap_letters,
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_that_the_weights_were_not_trained_with_are_refused(folder, name):
    loading.load_run(folder)  # Control.
    CHANGES[name](folder)
    with pytest.raises(errors.UsageError, match=rf"not those that its weights.*{name}"):
        loading.load_run(folder)


def test_what_may_change_may_change(folder):
    change_config(folder, "data", source_dir="elsewhere")
    assert loading.load_run(folder).info["step"] == 3


DIGESTS = {"train": "a", "valid": "b", "test": "c"}


@pytest.mark.parametrize("split", DIGESTS)
def test_a_run_does_not_go_on_with_another_corpus(folder, split, tmp_path):
    config, vocab = workdirs.read_config(folder), workdirs.read_vocabulary(folder)

    def restore(saved_with, now):
        workdir = tmp_path / "digests"
        shutil.rmtree(workdir, ignore_errors=True)
        for digests, works in ((saved_with, save), (now, lambda saved: saved.restore(ABSTRACT))):
            fingerprint = workdirs.make_fingerprint(config, vocab, digests)
            with checkpoints.Checkpoints(workdir, fingerprint=fingerprint) as saved:
                found = works(saved)
        return found

    def save(saved):
        saved.save(1, STATE, info={}, best=True)

    # Controls: the same corpus, one that is not read, and a checkpoint of an early version.
    for saved_with, now in ((DIGESTS, DIGESTS), (DIGESTS, None), (None, DIGESTS)):
        assert restore(saved_with, now).step == 1
    with pytest.raises(errors.UsageError, match=f"text of {split} has changed; restore the text"):
        restore(DIGESTS, DIGESTS | {split: "x"})


def test_the_digest_of_a_split_is_that_of_its_tokens(tmp_path):
    def digests(text, **options):
        (tmp_path / "text").write_text(text)
        place = dict(path=str(tmp_path / "text"), data_dir=str(tmp_path / "data"))
        corpus = corpora.load_corpus("text", **place, **options)
        return corpus.digests()

    lines = [f"{'abc'[i % 3] * (i % 7 + 1)}\n" for i in range(100)]
    first = digests("".join(lines))
    assert digests("".join(lines)) == first and len(set(first.values())) == 3
    reversed_lines = digests("".join(lines[::-1]))
    assert all(reversed_lines[split] != first[split] for split in first)
    lines[-1] = "b\n"
    last = digests("".join(lines))
    assert [split for split in first if last[split] != first[split]] == ["test"]


def test_scores_of_another_corpus_are_named(folder, tmp_path, monkeypatch, caplog):
    lines = ["some text\n", "of letters\n"] * 20
    change_config(folder, "data", name="text", path=str(tmp_path / "text"))
    monkeypatch.setenv(files.CACHE_VARIABLE, str(tmp_path / "cache"))
    loaded = loading.load_run(reseal(folder, {}))

    def read(text, **known):
        (tmp_path / "text").write_text(text)
        return scored_texts.read_splits(loaded._replace(info=loaded.info | known)).origin

    whole = "".join(lines)
    (tmp_path / "text").write_text(whole)
    digests = corpora.load_corpus("text", path=str(tmp_path / "text")).digests()
    assert read(whole, corpus=digests) == {"corpus": "text"}  # Controls.
    assert read("of letters\n" + whole, corpus={}) == {"corpus": "text"}
    assert not caplog.messages or "was trained on" not in caplog.text
    about = read("of letters\n" + whole, corpus=digests)
    assert about["changed_splits"] and "text of train" in caplog.text
    loaded = loading.load_run(reseal(folder, digests))
    assert loaded.info["corpus"] == digests


def reseal(folder, digests):
    """As if the run had been trained on another corpus."""
    fingerprint = workdirs.make_fingerprint(
        workdirs.read_config(folder), workdirs.read_vocabulary(folder), digests
    )
    for path in (folder / "checkpoints").glob("*/info/info.json"):
        content = json.loads(path.read_text())["content"]
        path.write_text(json.dumps(checkpoints._add_digest(content | {"seal": fingerprint})))
    return folder


def test_a_part_is_never_restored_in_pieces(tmp_path):
    with checkpoints.Checkpoints(tmp_path) as saved:  # Without a seal, as before there were any.
        saved.save(
            1,
            {"params": {"a": jnp.ones(2), "b": jnp.ones(2)}, "m": jnp.ones(2)},
            info={},
            best=True,
        )
        one = {"params": {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}}
        with pytest.raises(errors.UsageError, match=r"params.b: .* vs absent"):
            saved.restore(one, partial=True)
        both = {"params": {name: jax.ShapeDtypeStruct((2,), jnp.float32) for name in "ab"}}
        assert saved.restore(both, partial=True).step == 1


# Steps.


def save_steps(folder, *steps):
    with checkpoints.Checkpoints(folder) as saved:
        for step in steps:
            saved.save(step, STATE, info={}, best=True)


@pytest.mark.parametrize("which", ["best", "latest"])
@pytest.mark.parametrize("damage", ["empty", "missing", "copy"])
def test_whatever_is_passed_over_is_named(tmp_path, caplog, which, damage):
    save_steps(tmp_path, 1, 2)
    info = tmp_path / "checkpoints" / "2" / "info" / "info.json"
    if damage == "empty":
        info.write_text("")
    elif damage == "missing":
        info.unlink()
    else:
        shutil.rmtree(tmp_path / "checkpoints" / "2")
        shutil.copytree(tmp_path / "checkpoints" / "1", tmp_path / "checkpoints" / "2")
    with checkpoints.Checkpoints(tmp_path, read_only=True) as saved:
        assert saved.restore(ABSTRACT, which=which).step == 1
    assert caplog.text.count("checkpoint of step 2 is damaged") == 1
    (tmp_path / "checkpoints" / "007").mkdir()  # Foreign names are not steps.
    assert saved.steps == [1, 2]


@pytest.mark.parametrize("name", ["1", "2", "1.replaced", "7.removed", "8.orbax-checkpoint-tmp"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_a_link_in_place_of_a_checkpoint_does_not_stop_the_run(tmp_path, name, kind):
    save_steps(tmp_path / "run", 1, 2)
    path, elsewhere = tmp_path / "run" / "checkpoints" / name, tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)  # As when a disk was full.
    else:
        elsewhere.mkdir()
    (elsewhere / "precious").touch()
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    with checkpoints.Checkpoints(tmp_path / "run", keep=1) as saved:
        restored = saved.restore(ABSTRACT)
        assert restored.step == (1 if name == "2" and kind != "link" else 2)
        for step in (2, 3, 4):
            saved.save(step, STATE, info={}, best=True)
        saved.wait()
        assert saved.steps == [4]
        assert saved.restore(ABSTRACT).step == 4
    assert (elsewhere / "precious").exists()  # What a link leads to is not ours.


def test_reads_that_fail_late_print_nothing(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    source = (
        "async def f(wait):\n  try:\n    await wait\n  except GeneratorExit:\n    raise OSError"
    )
    exec(compile(source, "/x/orbax/x.py", "exec"), made := {})

    def free_a_read():
        made["f"](types.coroutine(lambda: (yield))()).send(None)
        return len(heard)

    assert free_a_read() == 1  # Control.
    save_steps(tmp_path, 1, 2)
    for path in (tmp_path / "checkpoints" / "2" / "state").rglob("d/*"):
        os.truncate(path, path.stat().st_size // 2)
    with checkpoints.Checkpoints(tmp_path, read_only=True) as saved:
        assert saved.restore(ABSTRACT).step == 1
    assert free_a_read() == 1


@pytest.mark.parametrize(
    "source, message",
    [(None, "Event loop is closed"), (asyncio.BaseEventLoop.__del__, "no attribute '_ssock'")],
)
@pytest.mark.parametrize("succeeds", [True, False])
def test_saves_that_fail_late_print_nothing(tmp_path, monkeypatch, succeeds, source, message):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    failure = types.SimpleNamespace(object=source, exc_value=RuntimeError(message))
    try:
        with checkpoints.Checkpoints(tmp_path) as saved:
            if not succeeds:
                monkeypatch.setattr(saved._checkpointer, "save", lambda *_, **__: 1 / 0)
            saved.save(1, STATE, info={}, best=False)
            sys.unraisablehook(failure)  # While it goes on.
            assert not heard
    except errors.UsageError:
        assert not succeeds
    sys.unraisablehook(failure)  # After a failure, until the process ends.
    assert len(heard) == succeeds


def test_a_strangers_folder_is_not_written_to(folder, tmp_path, monkeypatch):
    """A config.json may name any folder as the place of prepared corpora."""
    (tmp_path / "text").write_text("some text\nof letters\n" * 20)
    evil = tmp_path / "evil"
    change_config(folder, "data", name="text", path=str(tmp_path / "text"), data_dir=str(evil))
    monkeypatch.setenv(files.CACHE_VARIABLE, str(tmp_path / "cache"))
    splits = scored_texts.read_splits(loading.load_run(reseal(folder, {})))
    assert splits.task.splits == ("train", "valid", "test")
    assert not evil.exists() and (tmp_path / "cache").is_dir()


def test_results_of_another_step_are_noticed(folder, caplog):
    workdirs.write_json(folder, "results.json", {"step": 3})
    loading.load_run(folder)
    assert "results.json" not in caplog.text
    workdirs.write_json(folder, "results.json", {"step": 9})
    loading.load_run(folder)
    assert (
        "the scores of step 9, but the best checkpoint, which is used, is of step 3" in caplog.text
    )


def test_a_run_whose_checkpoints_were_deleted_does_not_begin_again(tmp_path):
    run = types.SimpleNamespace(abstract_state=lambda: ABSTRACT)
    path = tmp_path / "metrics.jsonl"

    def restore():
        with checkpoints.Checkpoints(tmp_path) as saved:
            record = run_record.RunRecord(run, str(tmp_path), saved)
            with contextlib.closing(record):
                return record.restore()

    assert restore() is None
    path.write_text('{"step": 0, "kind": "eval"}\n')  # Control: a kill before the first save.
    assert restore() is None
    path.write_text(known := '{"step": 20, "kind": "train"}\n')
    with pytest.raises(errors.UsageError, match="metrics up to step 20 but no checkpoint"):
        restore()
    assert path.read_text() == known


# Disks.


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_full_disk_is_one_sentence_and_keeps_what_was_saved(tmp_path, monkeypatch, moment):
    save_steps(tmp_path, 1)
    with checkpoints.Checkpoints(tmp_path) as saved:
        with monkeypatch.context() as patch:
            if moment == "before":
                patch.setattr(checkpoints.Checkpoints, "_free", lambda self: 1000)
            else:

                def fail(*_, **__):
                    raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

                patch.setattr(saved._checkpointer, "save", fail)
            with pytest.raises(errors.UsageError, match=r"needs 1 MiB.*resumes from step 1"):
                saved.save(2, STATE, info={}, best=False)
        assert saved.restore(ABSTRACT).step == 1


def test_other_limits_than_room_are_named(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("OUT_OF_RANGE: File too large")

    save_steps(tmp_path, 1)
    with checkpoints.Checkpoints(tmp_path) as saved, monkeypatch.context() as patch:
        patch.setattr(saved._checkpointer, "save", fail)
        for change, words in (
            ({}, "check its quota"),
            ({"RLIMIT_FSIZE": 4096}, r"than 4,096 bytes; raise that limit \(ulimit -f\), then"),
        ):
            if change:
                patch.setattr(checkpoints.resource, "getrlimit", lambda _: (4096, 4096))
            with pytest.raises(errors.UsageError, match=words) as refused:
                saved.save(2, STATE, info={}, best=False)
            assert "MiB are free" not in str(refused.value)
        long = "RESOURCE_EXHAUSTED: Error opening\nError opening x: Too many open files [errno 24]"
        with pytest.raises(errors.UsageError, match=r"raise that limit \(ulimit -n\), then"):
            with saved._saving():
                raise ValueError(long)


@pytest.mark.parametrize("limit, refused", [(16, True), (resource.RLIM_INFINITY, False)])
def test_too_few_open_files_are_refused_before_the_work(monkeypatch, limit, refused):
    """Orbax and asyncio hang with so few, or print tracebacks."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    expected = pytest.raises(errors.UsageError, match=r"only 16 files .* ulimit -n 1024")
    with expected if refused else contextlib.nullcontext():
        command_process.check_open_files()


def test_failures_of_the_background_are_not_logged_too():
    def record(name, path, trouble):
        return logging.LogRecord(name, logging.ERROR, path, 1, "x", (), trouble)

    trouble = (ValueError, ValueError(), None)
    assert not logs._is_for_people(record("absl", "/x/orbax/y.py", trouble))
    assert not logs._is_for_people(record("asyncio", "/x/y.py", trouble))
    assert logs._is_for_people(record("absl", "/x/orbax/y.py", None))  # Controls.
    assert logs._is_for_people(record("absl", "/x/mogrifier_jax/y.py", trouble))


@pytest.mark.parametrize("trouble", ["read-only", "a file for a folder", "a folder for a file"])
def test_a_workdir_that_keeps_no_results_is_refused_before_the_work(folder, monkeypatch, trouble):
    asked = eval_options.defaults()
    for work in (methods.Scorer, explore.make_page):
        monkeypatch.setattr(sys.modules[work.__module__], work.__name__, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # Controls.
        evaluate_command.evaluate_workdirs([str(folder)], asked)
    with pytest.raises(ZeroDivisionError):
        explore.write_page([str(folder)], prompt="some")
    if trouble == "read-only":

        def refuse(*_, **__):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(atomic_files.tempfile, "TemporaryFile", refuse)
    elif trouble == "a file for a folder":
        (folder / "tokens").touch()
    else:
        (folder / "evaluation.json").mkdir()
    (folder / "explore.html").mkdir()
    with pytest.raises(errors.UsageError, match="cannot keep results"):
        evaluate_command.evaluate_workdirs([str(folder)], asked)
    with pytest.raises(errors.UsageError, match="cannot keep results"):
        explore.write_page([str(folder)], prompt="some")


@pytest.mark.parametrize(
    "features, window, refused",
    [(10, 10, None), (10**13, 10, "the state .* GiB"), (10, 2**40, "a step over .* GiB.*window")],
)
def test_what_no_machine_holds_is_refused(features, window, refused):
    run = types.SimpleNamespace(
        abstract_state=lambda: jax.ShapeDtypeStruct((features,), jnp.float32),
        model=types.SimpleNamespace(num_layers=2, hidden_size=16, dtype=jnp.float32),
        program=types.SimpleNamespace(accumulate=1, accumulate_at_once=False, training_samples=1),
        task=types.SimpleNamespace(
            stream=(), batch_at=lambda _, i: streams.Window(i, jnp.broadcast_to(i, (1, window)))
        ),
    )
    with pytest.raises(errors.UsageError, match=refused) if refused else contextlib.nullcontext():
        memory.check(run)


@pytest.mark.parametrize("episodic", [False, True])
def test_a_window_that_no_text_fills_is_refused(tmp_path, episodic):
    (tmp_path / "text").write_text("some words\n" * 30)
    place = dict(data_dir=str(tmp_path / "data"), path=str(tmp_path / "text"))

    def make(window):
        options = dict(name="text", batch_size=2, window=window, episodic=episodic, **place)
        return tasks.make_task(jax.random.key(0), None, **options)

    task = make(1000)  # Control: a short text is read in the window of training.
    task.plan("valid", 1, window=1000)
    with pytest.raises(errors.UsageError, match=r"1,000,000 tokens is longer than .* take at most"):
        task.plan("valid", 1, window=10**6)
    with contextlib.nullcontext() if episodic else pytest.raises(errors.UsageError, match="longer"):
        make(10**6)  # Of lines it is the longest that counts.


# Small files.


def test_a_file_is_replaced_whole_and_by_no_trick(tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "evaluation.json"
    precious.write_text("old")
    (tmp_path / "evaluation.json.tmp").symlink_to(precious)
    path.symlink_to(precious)
    atomic_files.replace_text(path, "new")
    assert (path.read_text(), precious.read_text()) == ("new", "old")
    assert path.stat().st_mode & 0o777 == (tmp_path / "precious").stat().st_mode & 0o777
    with pytest.raises(OSError, match="full"), atomic_files.replacing(path) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "full")
    assert path.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["evaluation.json", "evaluation.json.tmp", "precious"]


@pytest.mark.parametrize("seconds", [1, 2**32], ids=["1970", "2106"])
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path, seconds):
    path = tmp_path / "model[1].safetensors"
    left, others = (tmp_path / f".{name}.0123abcd.tmp" for name in (path.name, "x"))
    mine = tmp_path / f".{path.name}.fedcba98.tmp"
    for each in (left, others, mine):
        each.touch()
        os.utime(each, (seconds, seconds))
    with mine.open("rb") as file:
        assert atomic_files.lock(file)  # As somebody who is still writing it.
        (tmp_path / f".{path.name}.00000000.tmp").touch()  # Or has just begun.
        atomic_files.replace_text(path, "new")
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {path.name, others.name, mine.name, f".{path.name}.00000000.tmp"}


def test_a_device_that_somebody_names_is_written_to_and_stays_one():
    atomic_files.write_output("/dev/null", "gone")
    assert pathlib.Path("/dev/null").is_char_device()


def test_what_is_written_to_a_workdir_is_there_afterwards(tmp_path):
    (tmp_path / "results.json").symlink_to("/dev/zero")
    atomic_files.write_output(tmp_path / "results.json", "gone")  # Control.
    assert (tmp_path / "results.json").is_symlink()
    workdirs.write_json(tmp_path, "results.json", {"step": 1})
    assert json.loads((tmp_path / "results.json").read_text()) == {"step": 1}
    os.mkfifo(tmp_path / "version.json")
    with pytest.raises(errors.UsageError, match=r"version\.json is not a regular file"):
        workdirs.write_json(tmp_path, "version.json", {})


@pytest.mark.parametrize("place", ["folder", "file/x", "/proc/nothing/x", "gs://b/x", "y" * 300])
def test_outputs_are_checked_before_the_work(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(errors.UsageError, match="cannot be written"):
        atomic_files.check_output(place, "--json")
    atomic_files.check_output("new/fine.json", "--json")  # Control.


ROW = {"method": "mc", "text": "valid", "nats": 1.5, "tokens": 3}
EVALUATION = {
    **{"workdir": "x", "which": "best", "step": 1, "unit": "bpc", "finished": True},
    "run": {"corpus": "text", "model": "lstm", "params": "1k"},
    "results": [ROW],
}


def test_parallel_evaluations_keep_each_others_results(tmp_path):
    def evaluate(number):
        evaluation = EVALUATION | {"results": []}
        row = ROW | {"method": f"m{number}"}
        evaluation_json.add_result(str(tmp_path), evaluation, row)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(evaluate, range(24)))
    assert len(evaluation_json.read_evaluation(str(tmp_path))["results"]) == 24


@pytest.mark.parametrize(
    "changed",
    [
        *({"results": rows} for rows in (5, [5], [{}], [{"method": "x"}])),
        *({"results": [ROW | change]} for change in ({"nats": "1"}, {"tokens": None})),
        *({"step": "1"}, {"unit": "bits"}, {"run": []}, {"run": {}}, {"workdir": None}),
    ],
)
def test_damaged_evaluations_are_named(tmp_path, changed):
    workdirs.write_json(tmp_path, "evaluation.json", EVALUATION)
    paper_tables.to_markdown([evaluation_json.read_evaluation(str(tmp_path))])  # Control.
    workdirs.write_json(tmp_path, "evaluation.json", EVALUATION | changed)
    with pytest.raises(errors.UsageError, match=r"evaluation.json is not as it was.*; delete it"):
        evaluation_json.read_evaluation(str(tmp_path))


GARBAGE = {
    "empty": b"",
    "list": b"[1, 2]",
    "number": b"5",
    "not UTF-8": b"\xff\xfe{}",
    "deep": b"[" * 100_000,
    "cut": b'{"a": ',
    "other": b'{"model": 5, "_types": {"model": "x"}}',
}


@pytest.mark.parametrize("name", ["config.json", "vocabulary.json", "results.json"])
def test_a_device_in_place_of_a_file_is_named(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/null")
    with pytest.raises(errors.UsageError, match=f"{name} is not a file"):
        loading.load_run(folder)


def test_a_device_is_no_corpus(tmp_path):
    place = dict(data_dir=str(tmp_path), path="/dev/null")
    with pytest.raises(errors.UsageError, match=r"/dev/null cannot be read \(it is not a file"):
        corpora.load_corpus("text", **place)


PREPARED = ("dataset_info.json", "features.json", "metadata.json")


@pytest.fixture
def load_book(tmp_path):
    """Loads a small text from its prepared form, which is below tmp_path."""
    (tmp_path / "book.txt").write_text("some words\n" * 50)
    load = functools.partial(
        corpora.load_corpus, "text", data_dir=str(tmp_path), path=str(tmp_path / "book.txt")
    )
    load()
    return load


@pytest.mark.parametrize("name", PREPARED)
def test_a_device_in_a_prepared_corpus_is_named(tmp_path, load_book, name):
    (file,) = tmp_path.glob(f"text/*/1.0.0/{name}")
    file.unlink()
    os.mkfifo(file)  # Of /dev/zero the memory would be filled.
    found = test_files.in_time(load_book)
    assert isinstance(found, errors.UsageError) and f"{name}, part of the prepared" in str(found)


@pytest.mark.parametrize("name", ["dataset_info.json", "metadata.json"])
@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "5", "{}{}", '{"sha256": 5}', '{"sha256": {"train": []}}']
)
def test_damaged_metadata_of_a_prepared_corpus_are_named(tmp_path, load_book, name, content):
    load_book()  # Control.
    (file,) = tmp_path.glob(f"text/*/1.0.0/{name}")
    file.write_text(content)
    with pytest.raises(errors.UsageError, match=r"is damaged( \(.*\))?; delete"):
        load_book()


@pytest.mark.parametrize("name", ["config.json", "vocabulary.json", "results.json"])
@pytest.mark.parametrize("content", GARBAGE)
def test_a_damaged_file_is_named(folder, name, content):
    (folder / name).write_bytes(GARBAGE[content])
    if (name, content) == ("results.json", "other"):
        return
    with pytest.raises(errors.UsageError, match=rf"{name}|vocabulary"):
        loading.load_run(folder)


@pytest.mark.parametrize("content", [c for c in GARBAGE if c != "other"])
def test_damaged_notes_on_a_corpus_are_one_sentence(tmp_path, content):
    (tmp_path / "text").write_text("some words\n" * 30)
    place = dict(data_dir=str(tmp_path / "data"), path=str(tmp_path / "text"))
    corpora.load_corpus("text", **place)  # Control.
    (notes,) = (tmp_path / "data").rglob("dataset_info.json")
    notes.write_bytes(GARBAGE[content])
    with pytest.raises(errors.UsageError, match=r"data is damaged .*delete its folder"):
        corpora.load_corpus("text", **place)


@pytest.mark.parametrize("content", GARBAGE)
def test_what_no_run_depends_on_is_begun_anew(folder, content, caplog):
    (folder / "version.json").write_bytes(GARBAGE[content])
    config, vocab = workdirs.read_config(folder), workdirs.read_vocabulary(folder)
    workdirs.write_run_files(folder, config, vocab)
    starts = json.loads((folder / "version.json").read_text())
    assert starts[-1]["mogrifier_jax"]
    kept = content == "list" or (folder / "version.json.damaged").read_bytes() == GARBAGE[content]
    assert kept and (content == "list" or "version.json" in caplog.text)


@pytest.mark.parametrize(
    "line",
    [
        *(b"\xff\n", b"5\n", b"{}\n", b'{"step": "x", "kind": "eval"}\n'),
        b'{"step": 1, "kind": "eval", "valid_nats": [1.0]}\n',
        b'{"step": 1, "kind": "eval", "valid_nats": "much"}\n',
        b'{"step": -1, "kind": "train"}\n',
        b'{"step": 1, "kind": ["train"]}\n',
        b'{"step": 1, "kind": "eval", "turn": {}}\n',
    ],
)
def test_damaged_metrics_are_named_and_kept(tmp_path, caplog, line):
    good = b'{"step": 1, "kind": "train"}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line)
    metrics.MetricWriter(tmp_path, 1).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == good
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == good + line
    assert "not a record" in caplog.text


def test_metrics_without_scores_are_drawn_as_far_as_they_go(tmp_path):
    lines = ({"step": 1, "kind": "eval", "best": True}, {"step": 2, "kind": "train"})
    lines += ({"step": 3, "kind": "train", "loss_nats": "nan"}, {"step": 4, "kind": "new", "x": []})
    lines += ({"step": 3, "kind": "train", "loss_nats": 2.5},)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert learning_curves.draw(tmp_path).exists()


FILES = ("checkpoints/3/info/info.json", "checkpoints/3/state/manifest.ocdbt", "results.json")
FILES += ("config.json", "vocabulary.json")


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_does_not_hang(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    error = test_files.in_time(loading.load_run, folder)
    assert isinstance(error, errors.UsageError) and path.name in str(error)


@pytest.mark.parametrize("name", ["speed.jsonl", "metrics.jsonl"])
def test_a_pipe_in_place_of_metrics_does_not_hang(tmp_path, name, caplog):
    os.mkfifo(tmp_path / name)
    found = test_files.in_time(metrics.MetricWriter, tmp_path, 1)
    if name == "metrics.jsonl":
        assert isinstance(found, errors.UsageError) and "metrics.jsonl is not a file" in str(found)
    else:
        found.close()
        assert (tmp_path / "speed.jsonl.damaged").is_fifo() and "speed.jsonl" in caplog.text


@pytest.mark.parametrize("check", [atomic_files.check_output, atomic_files.write_output])
def test_a_pipe_that_nobody_reads_is_no_output(tmp_path, check):
    os.mkfifo(tmp_path / "pipe")
    assert isinstance(test_files.in_time(check, tmp_path / "pipe", "--json"), Exception)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # Control.
    assert test_files.in_time(check, tmp_path / "pipe", "--json") is None
    os.close(reader)


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("step", "1"),
        ("best_step", "[]"),
        ("info", "5"),
        ("info", DEEP),
        ("leaves", "{}"),
        ("leaves", '{"params": 5}'),
        ("leaves", '{"params": {"shape": 5, "dtype": 1, "checksum": 1}}'),
        ("seal", "[1]"),
        ("info", '{"temperature": "x"}'),
        ("info", '{"temperature": -1}'),
        ("info", '{"temperature": 0}'),
        ("info", '{"temperature": NaN}'),
    ],
)
def test_wrong_content_with_a_right_digest_is_refused(folder, name, content):
    """As somebody who edits the file, and its digest, would leave it."""
    path = folder / "checkpoints" / "3" / "info" / "info.json"
    sealed = json.loads(path.read_text())
    sealed["content"][name] = json.loads(content)
    path.write_text(json.dumps(checkpoints._add_digest(sealed["content"])))
    with pytest.raises(errors.UsageError, match=r"info.json|does not match the config|copy of"):
        loading.load_run(folder)


PROGRESS = schedule.Progress(history=(1.0,)).to_dict()


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"progress": []},
        {"progress": {}},
        {"progress": PROGRESS | {"history": None}},
        {"progress": PROGRESS | {"history": ["x"]}},
        {"progress": PROGRESS | {"learning_rate_factor": "1"}},
        {"progress": PROGRESS | {"turn": -1}},
        {"progress": PROGRESS, "metrics": []},
        {"progress": PROGRESS, "metrics": {"lines": 1, "sha256": "", "parts": [[1]]}},
        {"progress": PROGRESS, "metrics": {"lines": 1, "sha256": "", "parts": [["x", 1]]}},
        {"progress": PROGRESS, "temperature": "x"},
    ],
)
def test_a_checkpoint_whose_notes_do_not_fit_is_passed_over(tmp_path, caplog, info):
    with checkpoints.Checkpoints(tmp_path) as saved:
        saved.save(1, STATE, info={"progress": PROGRESS | {"new": 1}}, best=True)
        saved.save(2, STATE, info=info, best=False)
    with checkpoints.Checkpoints(tmp_path, info=run_record.INFO) as saved:
        restored = saved.restore(ABSTRACT)
    assert restored.step == 1 and "step 2 is damaged" in caplog.text
    assert schedule.Progress.from_dict(restored.info["progress"]).history == (1.0,)


# The rest.


def test_the_budget_of_a_report_is_the_models_own():
    config = written.experiment.get_config("tiny")
    with config.unlocked():
        config.model.num_params, config.model.hidden_size = 24_000_000, 16
    assert paper_tables.name_run(config, 9_096)["params"] == "9k"
    with config.unlocked():
        config.model.hidden_size = None
    assert paper_tables.name_run(config, 23_400_000)["params"] == "24M"


def test_a_stop_before_the_first_step_is_seen():
    with signals.StopRequests() as stop_requests:
        stop_requests.check()  # Control.
        signals.signal.raise_signal(signals.signal.SIGTERM)
        assert stop_requests.requested()
        with pytest.raises(errors.Interrupted, match="before the first step"):
            stop_requests.check()
    with signals.StopRequests() as later:
        assert not later.requested()


@pytest.mark.parametrize(
    "storage",
    [
        "postgresql://user:SECRET@host/db",
        "postgresql://host/db?user=u&password=SECRET",
        "postgresql:/user:SECRET@host/db",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BPWD%3DSECRET",
        "postgresql://user:a@SECRET@host/db",
        "://user:SECRET",
        "vizier://u:SECRET@h:80",
        "vizier://SECRET@h",
        "user:SECRET@host/x.journal",
        "user:SECRET@x.journal",
        "postgresql://user:SECRET/with/slashes@host/db",
        "a://user:SECRET://x@host",
        "postgresql://host:SECRET",
    ],
)
def test_no_password_is_shown(storage):
    redaction = pytest.importorskip("mogrifier_jax.tuning.redaction")
    assert "SECRET" not in redaction.hide_password(storage)
    assert redaction.hide_password("sqlite:///a.db") == "sqlite:///a.db"
    assert redaction.hide_password("study.journal") == "study.journal"
    assert redaction.hide_password("a@b/study.journal") == "a@b/study.journal"
    assert redaction.hide_password("vizier://host:80/x") == "vizier://host:80/x"
    assert redaction.hide_password("sqlite:////a:b/c") == "sqlite:////a:b/c"
    shown = redaction.hide_password("postgresql+psycopg://me:SECRET@host:5432/db")
    assert shown == "postgresql+psycopg://me:***@host:5432/db"


def test_the_chaos_script_knows_where_work_begins():
    chaos = pytest.importorskip("benchmarks.chaos")
    for path in chaos.WORK:
        assert callable(pkgutil.resolve_name(f"mogrifier_jax.{path}"))
    with pytest.raises(ImportError):  # Control.
        pkgutil.resolve_name("mogrifier_jax.moved:gone")


@pytest.mark.slow
def test_two_evaluations_and_a_training_at_once_leave_all_results(tmp_path, monkeypatch):
    root = pathlib.Path(__file__).parents[1]
    (tmp_path / "corpus.txt").write_text("the gates of x\nand those of h\n" * 60)
    monkeypatch.setenv("MOGRIFIER_CACHE_DIR", str(tmp_path / "cache"))
    place = f"--workdir={tmp_path / 'run'}"
    changes = {
        "data.path": str(tmp_path / "corpus.txt"),
        "data.batch_size": 2,
        "data.window": 8,
        "evaluation.softmax_temperature": 1.0,
    }
    config = written.experiment.get_config("tiny")
    config.update_from_flattened_dict(changes)
    mesh = partitioning.make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr(partitioning, "make_mesh", lambda data, model: mesh)
    train.train_and_evaluate(config, str(tmp_path / "run"))
    (tmp_path / "run" / "results.json").rename(tmp_path / "results.json")

    def start(*flags):
        command = [sys.executable, "-m", "mogrifier_jax.main", place, *flags]
        return subprocess.Popen(command, cwd=root, env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"})

    overrides = [f"--config.{name}={value}" for name, value in changes.items()]
    evaluate = ("--mode=evaluate", "--eval.temperature=1", "--eval.stripes=0")
    together = [
        start("--config=experiments/text.py:tiny", *overrides),
        *(start(*evaluate, f"--eval.splits={split}") for split in ("valid", "test")),
    ]
    assert [process.wait() for process in together] == [0, 0, 0]
    rows = evaluation_json.read_evaluation(str(tmp_path / "run"))["results"]
    assert sorted(row["text"] for row in rows) == ["test", "valid"]
    results = (tmp_path / "run" / "results.json").read_bytes()
    assert results == (tmp_path / "results.json").read_bytes()

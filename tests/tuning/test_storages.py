"""Storages of trials that are damaged, emptied or gone: named, mended, never begun anew."""

import contextlib
import json
import os
import shutil
import sqlite3

import pytest
import sqlalchemy.exc

from mogrifier_jax import errors
from mogrifier_jax.tuning import queues, storages, studies, vizier_queue

STUDY = studies.Study("one", {"x": studies.Range(-1.0, 1.0)})


@pytest.fixture(params=["sqlite", "journal"])
def storage(request, tmp_path):
    return {"sqlite": f"sqlite:///{tmp_path}/x.db", "journal": f"{tmp_path}/x.journal"}[
        request.param
    ]


def open_queue(tmp_path, storage, target=2):
    workdir = str(tmp_path / "work")
    options = dict(name="test", num_trials=target, seed=1, sampler="random")
    return queues.open_queue(STUDY, workdir, storage=storage, **options)


def run_trials(tmp_path, storage, count=2):
    """What tuning leaves: trials in the storage, and their folders."""
    queue = open_queue(tmp_path, storage)
    for trial in queue.ask(count):
        folder = tmp_path / "work" / trial.folder
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        trial.finish(1.0)


def file_of(storage):
    return storage.removeprefix("sqlite:///")


LOSSES = {
    "emptied": lambda path, folder: os.truncate(path, 0),
    "deleted": lambda path, folder: os.unlink(path),
    "deleted, with study.json": lambda path, folder: (
        os.unlink(path),
        (folder / "work" / "study.json").unlink(),
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_storage_that_lost_its_trials_is_refused(tmp_path, storage, loss):
    run_trials(tmp_path, storage)
    assert len(open_queue(tmp_path, storage).records()) == 2  # Control.
    LOSSES[loss](file_of(storage), tmp_path)
    for _ in range(2):  # A refusal leaves nothing that would be taken for the study.
        with pytest.raises(errors.UsageError, match=r"knows nothing about .*from a copy"):
            open_queue(tmp_path, storage)


def test_folders_that_are_no_trials_are_no_matter(tmp_path, storage):
    for name in ("notes", "0007"):
        (tmp_path / "work" / "trials" / name).mkdir(parents=True)
    run_trials(tmp_path, storage)
    assert len(open_queue(tmp_path, storage).records()) == 2


def test_half_a_line_of_a_journal_is_cut_off_and_kept(tmp_path, caplog):
    path = f"{tmp_path}/x.journal"
    run_trials(tmp_path, path)
    with open(path, "rb") as file:
        whole = file.read()
    for cut in (1, 5):
        with open(path, "wb") as file:
            file.write(whole[:-cut])
        assert len(open_queue(tmp_path, path).records()) == 2
        assert ("an incomplete line" in caplog.text) == (cut == 5)
    with open(f"{path}.damaged", "rb") as file:
        assert file.read() == whole[:-5]
    with open(path, "rb") as file:  # What follows is lines again.
        assert all(isinstance(json.loads(line), dict) for line in file)


@pytest.mark.parametrize(
    "line", [b"garbage", b"\xff\xfe", b"5", b"", b"{}", b'{"op_code": 99}', b"[" * 100_000]
)
def test_a_damaged_line_of_a_journal_is_named(tmp_path, line):
    path = f"{tmp_path}/x.journal"
    run_trials(tmp_path, path)
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    lines[3] = line
    with open(path, "wb") as file:
        file.write(b"\n".join(lines))
    with pytest.raises(errors.UsageError, match=r"x\.journal .*restore it from a copy") as refused:
        open_queue(tmp_path, path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("change", ["lost", "repeated"])
@pytest.mark.parametrize("operation", [0, 4])  # The creation of the study, and of a trial.
def test_a_line_of_a_journal_is_missed(tmp_path, operation, change):
    path = tmp_path / "x.journal"
    run_trials(tmp_path, str(path))
    shutil.rmtree(tmp_path / "work")  # As a worker on another machine sees it.
    assert len(open_queue(tmp_path, str(path)).records()) == 2  # Control.
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if json.loads(line)["op_code"] == operation)
    lines[place : place + 1] = {"lost": [], "repeated": [lines[place]] * 2}[change]
    path.write_bytes(b"".join(lines))
    with pytest.raises(errors.UsageError, match=r"lost or repeated: line \d+ .* from a copy"):
        open_queue(tmp_path, str(path))


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_damaged_database_is_one_sentence(tmp_path, size):
    storage = f"sqlite:///{tmp_path}/x.db"
    run_trials(tmp_path, storage)
    os.truncate(file_of(storage), size)
    with pytest.raises(errors.UsageError, match=r"cannot be reached.*from a copy") as refused:
        open_queue(tmp_path, storage)
    assert "\n" not in str(refused.value)


EDITS = {
    "folder": (
        "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'folder'",
        {
            "outside": '"../../evil"',
            "absolute": '"/tmp/evil"',
            "number": "5",
            "null": "null",
            "not JSON": "{",
            "above": '"trials/../../x"',
            "another name": '"checkpoints"',
        },
    ),
    "worker": (
        "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'worker'",
        {"list": "[]", "number": "5"},
    ),
    "heartbeat": (
        "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'heartbeat'",
        {"text": '"soon"', "NaN": "NaN"},
    ),
    "about": (
        "UPDATE study_user_attributes SET value_json = ? WHERE key = 'about'",
        {
            "list": "[]",
            "number": "5",
            "config": '{"config": 5}',
            "study": '{"study": []}',
            "not JSON": "{",
        },
    ),
    "value": ("UPDATE trial_values SET value = ?", {"text": "x"}),
    "param": ("UPDATE trial_params SET param_value = ?", {"text": "x", "far off": 1e9}),
    "distribution": (
        "UPDATE trial_params SET distribution_json = ?",
        {"not JSON": "{", "list": "[]", "other": '{"name": "X", "attributes": {}}'},
    ),
    "state": ("UPDATE trials SET state = ?", {"unknown": "DONE"}),
    "number": ("UPDATE trials SET number = ?", {"text": "x"}),
    "direction": ("UPDATE study_directions SET direction = ?", {"unknown": "UP"}),
}


@pytest.fixture(scope="module", params=["RUNNING", "COMPLETE"])
def studied(request, tmp_path_factory):
    """A folder with a database and a workdir, whose trials are in this state."""
    folder = tmp_path_factory.mktemp("studied") / "folder"
    folder.mkdir()
    run_trials(folder, f"sqlite:///{folder}/x.db")
    with contextlib.closing(sqlite3.connect(folder / "x.db")) as base, base:
        base.execute("UPDATE trials SET state = ?", (request.param,))
        if request.param == "RUNNING":
            base.execute("DELETE FROM trial_values")
    return folder


@pytest.mark.parametrize(
    ("edit", "kind"), [(edit, kind) for edit, (_, kinds) in EDITS.items() for kind in kinds]
)
def test_wrong_content_of_a_database_is_one_sentence(studied, tmp_path, edit, kind):
    """Nothing of it is used: no folder outside the workdir is made."""
    shutil.copytree(studied, tmp_path, dirs_exist_ok=True)
    storage = f"sqlite:///{tmp_path}/x.db"
    command, kinds = EDITS[edit]
    if (edit, kind) == ("folder", "outside"):
        assert open_queue(tmp_path, storage, target=3).records()  # Control.
    with contextlib.closing(sqlite3.connect(file_of(storage))) as base, base:
        changed = base.execute(command, (kinds[kind],)).rowcount
    if not changed:
        return
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(errors.UsageError) as refused, storages.explain_errors():
        queue = open_queue(tmp_path, storage, target=3)
        queue.records()
        queue.ask(3)
        queue.study.best_trial  # noqa: B018
    assert "\n" not in str(refused.value)
    assert any(word in str(refused.value) for word in ("damaged", "copy", "failed"))
    assert sorted(os.listdir(tmp_path)) == before


JOURNAL_EDITS = {
    "folder": (b'"folder":"trials/0000"', b'"folder":"../../evil"'),
    "folder of a number": (b'"folder":"trials/0000"', b'"folder":5'),
    "operation": (b'"op_code":4', b'"op_code":"x"'),
    "study": (b'"study_id":0', b'"study_id":7'),
    "state": (b'"state":1', b'"state":17'),
}


@pytest.mark.parametrize("name", JOURNAL_EDITS)
def test_wrong_content_of_a_journal_is_one_sentence(tmp_path, name):
    path = tmp_path / "x.journal"
    run_trials(tmp_path, str(path))
    assert open_queue(tmp_path, str(path)).records()  # Control.
    content = path.read_bytes()
    assert JOURNAL_EDITS[name][0] in content
    path.write_bytes(content.replace(*JOURNAL_EDITS[name]))
    with pytest.raises(errors.UsageError, match="copy") as refused, storages.explain_errors():
        open_queue(tmp_path, str(path)).records()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("storage", ["{}/u:SECRET@host/x.journal", "vizier://u:SECRET@localhost:1"])
def test_no_message_has_a_password(tmp_path, storage, monkeypatch):
    monkeypatch.setattr(vizier_queue.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.UsageError) as refused:
        open_queue(tmp_path, storage.format(tmp_path))
    assert "SECRET" not in str(refused.value) and "--storage" in str(refused.value)


def test_a_device_is_no_journal(tmp_path):
    with pytest.raises(errors.UsageError, match="is not a file"):
        open_queue(tmp_path, "/dev/zero")


def test_a_storage_that_fails_while_trials_run_is_one_sentence():
    failure = sqlalchemy.exc.OperationalError("INSERT", {}, OSError("disk is full"))
    with (
        pytest.raises(errors.UsageError, match="failed: disk is full; once it works again"),
        storages.explain_errors(),
    ):
        raise failure
    with pytest.raises(KeyError), storages.explain_errors():  # Control: a bug keeps its traceback.
        raise KeyError

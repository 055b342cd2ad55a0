"""Storages of trials that are damaged, emptied or gone: named, mended, never begun anew."""

import json
import os

import pytest
import sqlalchemy.exc

from mogrifier_jax import errors
from mogrifier_jax.tuning import storages, studies

STUDY = studies.Study("one", {"x": studies.Range(-1.0, 1.0)})


@pytest.fixture(params=["sqlite", "journal"])
def storage(request, tmp_path):
    return {"sqlite": f"sqlite:///{tmp_path}/x.db", "journal": f"{tmp_path}/x.journal"}[
        request.param
    ]


def open_queue(tmp_path, storage, target=2):
    workdir = str(tmp_path / "work")
    options = dict(name="test", num_trials=target, seed=1, sampler="random")
    return storages.open_queue(STUDY, workdir, storage=storage, **options)


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
        with pytest.raises(errors.UsageError, match=r"knows nothing of .*back from a copy"):
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
        assert ("half a line" in caplog.text) == (cut == 5)
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
    with pytest.raises(errors.UsageError, match=r"x\.journal .*put it back from a copy") as refused:
        open_queue(tmp_path, path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_damaged_database_is_one_sentence(tmp_path, size):
    storage = f"sqlite:///{tmp_path}/x.db"
    run_trials(tmp_path, storage)
    os.truncate(file_of(storage), size)
    with pytest.raises(errors.UsageError, match=r"cannot be reached.*from a copy") as refused:
        open_queue(tmp_path, storage)
    assert "\n" not in str(refused.value)


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

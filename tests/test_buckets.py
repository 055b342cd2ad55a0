import contextlib
import errno
import fcntl
import importlib
import json
import os
import pathlib
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request

import jax
import numpy as np
import pytest
import safetensors.numpy

import mogrifier_jax
from experiments import text as experiments_text
from mogrifier_jax import buckets, configs, errors
from mogrifier_jax.data import corpora, vocabularies
from mogrifier_jax.training import runs, train
from tests import object_store, workdir

ROOT = pathlib.Path(__file__).parents[1]
RUN = "gs://runs/some/run"


@pytest.fixture
def store(monkeypatch, tmp_path):
    with object_store.serving("runs") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MOGRIFIER_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(buckets, "_RETRIES", 1)
        yield server
        for mirror in list(buckets._mirrors.values()):
            mirror.remove()


def contents(store, prefix="some/run/"):
    found = list(store.objects["runs"].items())
    return {name.removeprefix(prefix): content for name, (content, _) in found}


def put(store, prefix="some/run/", **files):
    for name, content in files.items():
        store.objects["runs"][prefix + name.replace("__", "/")] = (content, 1)


def cached(tmp_path):
    return [path for path in (tmp_path / "cache" / "buckets").glob("*")]


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("gs://bucket/run", True),
        ("s3://bucket", True),
        (pathlib.Path("gs://bucket/run"), True),
        ("runs/gs", False),
        ("/runs/gs:/x", False),
        ("gs:", False),
        (None, False),
    ],
)
def test_what_is_in_a_bucket(path, is_one):
    assert buckets.is_bucket(path) == is_one


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("gs://", "gs://. names no place in a bucket"),
        ("gs:///run", "gs:///run. names no place in a bucket"),
        ("s3://runs/a/../b", "s3://runs/a/../b. names no place in a bucket"),
        ("s3://runs/a\nb", "b. names no place in a bucket"),
        ("hdfs://x/y", "hdfs://x/y is neither a path.*begin with gs:// or s3://"),
    ],
)
def test_an_address_that_is_none_is_refused(path, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (buckets.mounted, buckets.copied):
        with pytest.raises(errors.UsageError, match=said):
            with use(path):
                raise AssertionError
    with pytest.raises(errors.UsageError):
        with buckets.output(f"{path}/report.md"):
            raise AssertionError
    assert not list(tmp_path.iterdir())


def test_a_path_of_a_disk_is_handed_through(tmp_path):
    with buckets.mounted(str(tmp_path)) as folder, buckets.output(None) as nothing:
        assert folder == str(tmp_path) and nothing is None
        assert not buckets.is_mirror(folder)
    assert buckets.local_copy(tmp_path) is tmp_path


def test_files_come_and_go(store, tmp_path):
    put(store, **{"config.json": b"{}", "sub__old": b"old", "gone": b"x"})
    with buckets.mounted(RUN) as folder:
        folder = pathlib.Path(folder)
        assert folder.name == "run" and buckets.is_mirror(folder / "sub")
        assert (folder / "sub" / "old").read_bytes() == b"old"
        (folder / "sub" / "old").write_bytes(b"new")
        (folder / "empty").touch()
        (folder / "gone").unlink()
        (folder / ".lock").touch()
        (folder / ".results.json.12345678.tmp").touch()
        assert buckets.show(f"see {folder}/x") == f"see {RUN}/x"
    assert contents(store) == {"config.json": b"{}", "sub/old": b"new", "empty": b""}
    assert not cached(tmp_path)


def test_slashes_too_many_change_nothing(store):
    with buckets.mounted("gs://runs//some/run//") as folder:
        pathlib.Path(folder, "a").write_bytes(b"a")
    assert contents(store) == {"a": b"a"}


@pytest.mark.parametrize("name", ["../../outside", "/{place}/outside", "a//b", "a/b"])
def test_objects_that_cannot_be_files_of_the_folder_are_refused(store, tmp_path, name):
    put(store, **{"a": b"a", name.format(place=tmp_path): b"outside"})
    for use in (buckets.mounted, buckets.copied):
        with pytest.raises(errors.UsageError, match="which cannot be a file beside the others"):
            with use(RUN):
                raise AssertionError
    assert not list(tmp_path.rglob("outside")) and len(contents(store)) == 2


def test_nobody_trains_in_an_object(store):
    put(store, "some/", run=b"model")
    with pytest.raises(errors.UsageError, match="gs://runs/some/run is an object and no folder"):
        with buckets.mounted(RUN, exclusive=True):
            raise AssertionError
    assert contents(store, "some/") == {"run": b"model"}


def test_half_a_copy_is_not_written_back(store, monkeypatch):
    """The local disk is full while the folder is copied."""
    put(store, a=b"a", results=b"whole")
    write = pathlib.Path.write_bytes

    def write_half(path, content):
        write(path, content[: len(content) // 2])
        if path.name == "results":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(pathlib.Path, "write_bytes", write_half)
    for use in (buckets.mounted(RUN, exclusive=True), buckets.output(f"{RUN}/results")):
        with pytest.raises(OSError, match="No space left"):
            with use:
                raise AssertionError
    assert contents(store) == {"a": b"a", "results": b"whole"}


def test_only_what_has_changed_is_written(store):
    put(store, a=b"a", b=b"b")
    with buckets.mounted(RUN) as folder:
        pathlib.Path(folder, "b").write_bytes(b"bb")
        store.requests.clear()
    assert store.requests == [("POST", "some/run/b")]


def test_changes_are_written_while_the_block_runs(store, monkeypatch):
    monkeypatch.setattr(buckets, "PAUSE", 0.05)
    with buckets.mounted(RUN) as folder:
        pathlib.Path(folder, "metrics.jsonl").write_bytes(b"1\n")
        end = time.monotonic() + 20
        while contents(store) != {"metrics.jsonl": b"1\n"} and time.monotonic() < end:
            time.sleep(0.05)
        assert contents(store) == {"metrics.jsonl": b"1\n"}


# Checkpoints.


def save(folder, step, best, keep=2):
    """What a run does at the end of a turn, without its arrays."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(f"{step}\n")
    new = folder / "checkpoints" / str(step)
    temporary = new.with_name(f"{step}.orbax-checkpoint-tmp-1")
    for name in ("state/d/array", "state/manifest", "info/info.json"):
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_text(f"{step} {best}")
    yield  # Something may look here.
    temporary.rename(new)
    yield
    steps = sorted(int(p.name) for p in new.parent.glob("*") if p.name.isdecimal())
    newest = steps[-keep:]
    bests = [int((new.parent / str(s) / "info/info.json").read_text().split()[1]) for s in newest]
    for old in sorted(set(steps) - {*newest, *bests}, reverse=True):
        place = new.with_name(f"{old}.removed")
        (new.parent / str(old)).rename(place)
        yield
        for path in sorted(place.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        place.rmdir()
        yield


HISTORY = [(0, 0), (10, 10), (20, 10), (30, 10), (40, 40), (50, 40)]


def check_usable(files):
    """What somebody who resumes from these files relies on."""
    groups = {buckets._group(name) for name in files} - {None}
    whole = [group for group in groups if f"{group}info/info.json" in files]
    lines = files.get("metrics.jsonl", b"").decode().split()
    for group in whole:
        step, best = files[f"{group}info/info.json"].decode().split()
        assert step in lines
        for name in ("state/d/array", "state/manifest"):
            assert files.get(group + name) == f"{step} {best}".encode()
        assert f"checkpoints/{best}/info/info.json" in files
    return sorted(int(group.split("/")[-2]) for group in whole)


def record_states(store, monkeypatch):
    """A list that gets the files of the store after each request."""
    states = []
    answer = object_store.Handler.answer

    def note(handler, act):
        answer(handler, act)
        states.append(contents(store))

    monkeypatch.setattr(object_store.Handler, "answer", note)
    return states


def test_a_kill_at_any_request_leaves_what_a_disk_might_hold(store, monkeypatch):
    """The mirror writes after each change of the files; every prefix of its requests is usable."""
    states = record_states(store, monkeypatch)
    monkeypatch.setattr(buckets, "_AT_ONCE", 1)
    with buckets.mounted(RUN) as folder:
        (mirror,) = buckets._mirrors.values()
        for step, best in HISTORY:
            for _ in save(pathlib.Path(folder), step, best):
                mirror.push()
    resumable = [check_usable(files) for files in states]
    assert resumable[-1] == [40, 50]
    newest = [max(steps, default=-1) for steps in resumable]
    assert newest == sorted(newest)  # What was saved once stays until something newer is.
    assert len(states) > 30


def test_a_checkpoint_that_appears_during_a_look_waits_for_its_metrics(store, monkeypatch):
    states = record_states(store, monkeypatch)
    with buckets.mounted(RUN) as folder:
        (mirror,) = buckets._mirrors.values()
        turns = iter([(10, 10)])
        list(save(pathlib.Path(folder), 0, 0))
        mirror.push()

        def sign_late(path, sign=buckets._sign):
            found = sign(path)
            if path.name == "metrics.jsonl":
                for step, best in turns:
                    list(save(pathlib.Path(folder), step, best))
            return found

        monkeypatch.setattr(buckets, "_sign", sign_late)
        mirror.push()
    assert [check_usable(files) for files in states][-1] == [0, 10]


def test_the_check_above_finds_what_is_wrong():
    files = {"metrics.jsonl": b"10\n"}
    for name in ("state/d/array", "state/manifest", "info/info.json"):
        files[f"checkpoints/10/{name}"] = b"10 10"
    assert check_usable(files) == [10]
    for name in files:
        if not name.endswith("info.json"):
            with pytest.raises(AssertionError):
                check_usable({key: value for key, value in files.items() if key != name})
    with pytest.raises(AssertionError):
        check_usable(files | {"checkpoints/10/info/info.json": b"10 0"})


def test_half_of_a_checkpoint_is_not_copied(store):
    put(store, **{"checkpoints__10__state__x": b"x", "checkpoints__10__info__info.json": b"{}"})
    put(store, **{"checkpoints__20__state__x": b"x", "checkpoints__20.damaged__y": b"y"})
    with buckets.mounted(RUN) as folder:
        found = {p.relative_to(folder).as_posix() for p in pathlib.Path(folder).rglob("*")}
    assert "checkpoints/10/state/x" in found and "checkpoints/20.damaged/y" in found
    assert "checkpoints/20" not in found


# Two runs.


def test_a_second_run_is_refused_while_the_first_one_lives(store, monkeypatch):
    for name, value in dict(BEAT=0.1, PAUSE=0.1, PATIENCE=0.5, EXPIRY=60.0).items():
        monkeypatch.setattr(buckets, name, value)
    with buckets.mounted(RUN, exclusive=True):
        assert ".lease" in contents(store)
        with pytest.raises(errors.UsageError, match="another run is writing to gs://runs/some/run"):
            with buckets.mounted(RUN, exclusive=True):
                raise AssertionError
        with buckets.mounted(RUN):  # To look is always possible.
            pass
    assert ".lease" not in contents(store)
    with buckets.mounted(RUN, exclusive=True):
        pass


def test_the_lease_of_a_run_that_was_killed_is_free(store, monkeypatch):
    """At once if it ran on this machine, else when it was not renewed for a while."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    holder = buckets._identify(dead.pid)
    dead.wait()
    put(store, **{".lease": json.dumps(holder).encode()})
    started = time.monotonic()
    with buckets.mounted(RUN, exclusive=True):
        assert time.monotonic() - started < 10
    monkeypatch.setattr(buckets, "EXPIRY", 2.0)
    monkeypatch.setattr(buckets, "PATIENCE", 1.0)  # Which is for runs that are seen to live.
    put(store, **{".lease": json.dumps(holder | {"machine": "another"}).encode()})
    started = time.monotonic()
    with buckets.mounted(RUN, exclusive=True):
        assert time.monotonic() - started >= 2.0


def test_of_many_that_come_at_once_one_gets_the_lease(store, monkeypatch):
    for name, value in dict(BEAT=0.1, PATIENCE=0.3).items():
        monkeypatch.setattr(buckets, name, value)
    outcomes, entered = [], threading.Barrier(4)

    def take():
        kv = buckets._open(RUN)
        entered.wait()
        try:
            outcomes.append(buckets._Lease(kv, RUN))
        except errors.UsageError:
            outcomes.append(None)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (winner,) = [each for each in outcomes if each]
    winner.release()
    assert len(outcomes) == 4


def test_a_run_whose_lease_was_taken_writes_no_more(store, tmp_path):
    with pytest.raises(
        errors.UsageError, match=r"taken over gs://runs/some/run.*; what is not"
    ) as e:
        with buckets.mounted(RUN, exclusive=True) as folder:
            (mirror,) = buckets._mirrors.values()
            mirror._lease._renewed = 0.0
            put(store, **{".lease": b"{}"})
            pathlib.Path(folder, "metrics.jsonl").write_bytes(b"1\n")
    assert contents(store) == {".lease": b"{}"}
    kept = pathlib.Path(str(e.value).rpartition(" is in ")[2])
    assert (kept / "metrics.jsonl").read_bytes() == b"1\n"


def test_a_lease_is_renewed_while_a_large_file_is_copied(store, monkeypatch):
    for name, value in dict(BEAT=0.1, PATIENCE=0.5, EXPIRY=1.5).items():
        monkeypatch.setattr(buckets, name, value)
    put(store, large_input=b"x")
    answer = object_store.Handler.answer

    def answer_late(handler, act):
        time.sleep(4.0 * ("large" in handler.path))
        answer(handler, act)

    monkeypatch.setattr(object_store.Handler, "answer", answer_late)

    def use():
        with buckets.mounted(RUN, exclusive=True) as folder:
            pathlib.Path(folder, "large_output").write_bytes(b"y")

    thread = threading.Thread(target=use)
    thread.start()
    refused = 0
    while thread.is_alive():
        if ".lease" in contents(store):
            with contextlib.suppress(errors.UsageError):
                lease = buckets._Lease(buckets._open(RUN), RUN)
                if not thread.is_alive():  # It waited for the end, as it should.
                    lease.release()
                    break
                raise AssertionError("two runs have the lease")
            refused += 1
    thread.join()
    assert refused > 1 and contents(store)["large_output"] == b"y"


def test_a_store_that_takes_no_conditions_is_refused(store, monkeypatch):
    monkeypatch.setattr(object_store.Handler, "matches", lambda *_: False)
    for name in ("EXPIRY", "PATIENCE"):
        monkeypatch.setattr(buckets, name, 0.2)
    with pytest.raises(errors.UsageError, match="has no run, but refuses one"):
        with buckets.mounted(RUN, exclusive=True):
            raise AssertionError


# Stores that are slow, fail or refuse.


def test_failures_are_tried_again(store):
    put(store, a=b"a")
    store.failures = [503, "reset"]
    with buckets.mounted(RUN) as folder:
        assert pathlib.Path(folder, "a").read_bytes() == b"a"
        pathlib.Path(folder, "b").write_bytes(b"b")
        store.failures = [503]
    assert contents(store) == {"a": b"a", "b": b"b"}


def test_what_cannot_be_written_is_kept(store, tmp_path):
    with pytest.raises(errors.UsageError, match="cannot be written") as e:
        with buckets.mounted(RUN) as folder:
            pathlib.Path(folder, "results.json").write_bytes(b"{}")
            store.denied = True
    kept = pathlib.Path(str(e.value).rpartition(" is in ")[2])
    assert (kept / "results.json").read_bytes() == b"{}"
    assert "token" not in str(e.value) and "http" not in str(e.value)
    store.denied = False
    with buckets.mounted(RUN):  # A later run removes what others left, but not this.
        pass
    assert (kept / "results.json").exists()


def test_a_store_that_repeats_credentials_is_not_quoted(store, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not/to+be=told")

    def repeat(handler, *_):
        found = handler.headers["Authorization"]
        assert found == "Bearer token"
        message = {"error": {"message": f"{found}, not/to+be=told may not"}}
        handler.send(403, json.dumps(message).encode())

    for name in ("read", "write"):
        monkeypatch.setattr(object_store.Handler, name, repeat)
    with pytest.raises(errors.UsageError, match=r"PERMISSION_DENIED.*may not") as e:
        with buckets.mounted(RUN, exclusive=True):
            raise AssertionError
    assert "token" not in str(e.value) and "told" not in str(e.value)


def test_what_an_impatient_user_interrupts_is_kept(store, tmp_path, monkeypatch):
    """The thread that copies files has not ended yet."""
    with pytest.raises(KeyboardInterrupt):
        with buckets.mounted(RUN) as folder:
            (mirror,) = buckets._mirrors.values()
            pathlib.Path(folder, "results.json").write_bytes(b"{}")

            def interrupt():
                raise KeyboardInterrupt

            monkeypatch.setattr(mirror._thread, "join", interrupt)
    (kept,) = cached(tmp_path)
    assert kept.name.startswith("kept_") and (kept / "run" / "results.json").exists()


@pytest.mark.parametrize("url", ["gs://missing/run", RUN])
def test_a_bucket_that_cannot_be_used_is_refused_before_any_work(store, tmp_path, url):
    store.denied = url == RUN
    with pytest.raises(errors.UsageError, match=rf"{url} cannot be (read|written) \("):
        with buckets.mounted(url, exclusive=True):
            raise AssertionError
    assert not cached(tmp_path)


@pytest.mark.parametrize("url", ["gs://missing/run", RUN])
def test_a_bucket_that_cannot_get_a_file_is_refused_before_any_work(
    store, tmp_path, monkeypatch, url
):
    def forbid(handler, *_):
        handler.send(403, b"{}")

    monkeypatch.setattr(object_store.Handler, "write", forbid)  # Reading is permitted.
    with pytest.raises(errors.UsageError, match=rf"{url} cannot be written \("):
        with buckets.output(f"{url}/report.md"):
            raise AssertionError
    assert not cached(tmp_path)


def test_what_fails_in_the_block_matters_more(store):
    with pytest.raises(ZeroDivisionError):
        with buckets.mounted(RUN) as folder:
            pathlib.Path(folder, "x").write_bytes(b"x")
            store.denied = True
            raise ZeroDivisionError


def test_copies_of_killed_processes_are_removed(store, tmp_path):
    left = tmp_path / "cache" / "buckets" / "0123abcd"
    (left / "run").mkdir(parents=True)
    (left / "guard").touch()
    with buckets.mounted(RUN):
        assert not left.exists() and len(cached(tmp_path)) == 1


def test_a_copy_that_is_being_made_is_not_removed(store, monkeypatch):
    """Another process looks for those of killed processes before this one has locked its own."""
    lock, others = fcntl.flock, []

    def lock_late(file, operation):
        if not others and not operation & fcntl.LOCK_NB:
            others.append(None)
            others.append(buckets.Mirror("gs://runs/other"))
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with buckets.mounted(RUN) as folder:
        assert others and pathlib.Path(folder).with_name("guard").exists()


# Single files, and what is only read.


def test_a_file_is_written_to_a_bucket(store):
    put(store, **{"report.md": b"old"})
    with buckets.output(f"{RUN}/report.md") as path:
        assert pathlib.Path(path).read_bytes() == b"old"
        pathlib.Path(path).write_bytes(b"new")
        pathlib.Path(path).with_name("picture.png").write_bytes(b"png")
    assert contents(store) == {"report.md": b"new", "picture.png": b"png"}


def test_a_folder_and_a_file_are_copied_to_be_read(store):
    put(store, **{"a__b": b"b"})
    folder = buckets.local_copy(RUN)
    assert pathlib.Path(folder, "a", "b").read_bytes() == b"b"
    assert buckets.local_copy(RUN) == folder  # Once.
    file = buckets.local_copy(f"{RUN}/a/b")
    assert pathlib.Path(file).read_bytes() == b"b" and file.endswith("/b")
    with pytest.raises(errors.UsageError, match="gs://runs/some/runs does not exist"):
        buckets.local_copy(f"{RUN}s")
    store.objects["runs"].clear()
    with pytest.raises(errors.UsageError, match="gs://runs does not exist"):
        buckets.local_copy("gs://runs")


@pytest.mark.slow
def test_corpora_are_read_from_a_bucket_and_prepared_in_one(store, tmp_path):
    put(store, prefix="corpora/", **{"ptb__ptb.train.txt": b"a b"})
    folder = corpora._resolve_source_dir("gs://runs/corpora")
    assert (folder / "ptb" / "ptb.train.txt").read_bytes() == b"a b"
    text = tmp_path / "text.txt"
    text.write_text("one two three\n" * 100)
    options = dict(data_dir="gs://runs/prepared", path=str(text))
    first = corpora.load_corpus("text", **options)
    prepared = {name for name in store.objects["runs"] if name.startswith("prepared/")}
    assert any(name.endswith("dataset_info.json") for name in prepared)
    store.requests.clear()
    second = corpora.load_corpus("text", **options)
    assert first.vocabulary.to_json() == second.vocabulary.to_json()
    assert {method for method, _ in store.requests} == {"GET"}  # Nothing is prepared again.


# S3, if its stand-in is installed: pip install "moto[server]".


@pytest.fixture
def s3(monkeypatch, tmp_path):
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "MOGRIFIER_CACHE_DIR": str(tmp_path / "cache"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buckets, "_RETRIES", 1)
    request = urllib.request.Request(f"http://{host}:{port}/runs", method="PUT")
    urllib.request.urlopen(request).close()
    yield
    server.stop()


def test_s3_has_files_a_lease_and_missing_buckets(s3, monkeypatch):
    for name, value in dict(BEAT=0.1, PATIENCE=0.5).items():
        monkeypatch.setattr(buckets, name, value)
    address = "s3://runs/some/run"
    with buckets.mounted(address, exclusive=True) as folder:
        pathlib.Path(folder, "a").write_bytes(b"a")
        pathlib.Path(folder, "empty").touch()
        with pytest.raises(errors.UsageError, match="another run is writing"):
            with buckets.mounted(address, exclusive=True):
                raise AssertionError
    with buckets.mounted(address, exclusive=True) as folder:
        assert pathlib.Path(folder, "a").read_bytes() == b"a"
        pathlib.Path(folder, "a").unlink()
    assert buckets._open(address).list().result() == [b"empty"]
    with pytest.raises(errors.UsageError, match=r"s3://missing/run cannot be written \(NOT_FOUND"):
        with buckets.mounted("s3://missing/run", exclusive=True):
            raise AssertionError


# Commands and Python.


def stored(address):
    """Every object under an address, of either kind of store."""
    store = buckets._open(address)
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


@pytest.fixture
def run_in_bucket(tmp_path):
    """Makes a run at an address whose corpus is a small text; returns its files."""

    def make(address):
        text = "The lambda form creates a function.\n" * 60
        (tmp_path / "text.txt").write_text(text)
        config = experiments_text.get_config("tiny")
        with config.unlocked():
            config.data.window, config.data.path = 8, str(tmp_path / "text.txt")
            config.data.data_dir = str(tmp_path / "prepared")
        vocab = vocabularies.Vocabulary.from_text(text, "character")
        with buckets.mounted(address) as folder:
            workdir.write_run(folder, config, vocab)
        return stored(address)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "place"), [("store", "gs://runs"), ("s3", "s3://runs")])
def test_every_mode_reads_and_writes_a_bucket(
    fixture, place, request, command, run_in_bucket, tmp_path
):
    # It defines flags, which would be gone after the first command.
    importlib.import_module("array_record.python.array_record_data_source")
    request.getfixturevalue(fixture)
    before = run_in_bucket(f"{place}/run")
    run, out = f"--workdir={place}/run", f"{place}/out"
    printed = ""
    for flags in [
        ["--mode=evaluate", run, f"--eval.output={out}/table.md"],
        ["--mode=sample", run, "--length=5"],
        ["--mode=export", run],
        ["--mode=export", run, f"--output={out}/model.safetensors"],
        ["--mode=sample", f"--workdir={out}/model.safetensors", "--length=5"],
        ["--mode=explore", run, "--length=10"],
        ["--mode=inspect", run, f"--report={out}/gates.md", f"--json={out}/gates.json"],
        ["--mode=config", "--config=pydoc", f"--json={out}/config.json"],
    ]:
        code, said = command(*flags)
        assert not code, said
        printed += command.printed
    after = stored(f"{place}/run")
    assert before.items() <= after.items()
    assert {"evaluation.json", "model.safetensors", "explore.html"} <= after.keys()
    written = stored(out)
    names = {"table.md", "model.safetensors", "gates.md", "gates.json", "config.json"}
    assert names <= written.keys()
    models = [safetensors.numpy.load(each["model.safetensors"]) for each in (written, after)]
    # The order of the metadata in the files is arbitrary.
    jax.tree.map(np.testing.assert_array_equal, *models)
    # Nobody is told of the copies on this disk. Orbax's own note in a checkpoint is not read.
    told = {name for name, content in (after | written).items() if b"/cache/buckets/" in content}
    assert all(name.endswith("commit_success.txt") for name in told), told
    assert f"{place}/run" in printed and "/cache/buckets/" not in printed
    assert not cached(tmp_path)


@pytest.mark.slow
def test_a_sweep_is_in_a_bucket(store, command, tmp_path):
    size = ["--config.model.num_layers=1", "--config.schedule.turns=1"]
    code, said = command(
        *("--mode=sweep", "--config=pydoc:tiny", "--set=models", f"--workdir={RUN}", *size),
        f"--report={RUN}.md",
    )
    assert not code, said
    assert "mogrifier/seed1/results.json" in contents(store)
    assert f"{RUN}/models.md" in command.printed and "/cache/buckets/" not in command.printed
    assert contents(store, "some/")["run.md"] and not cached(tmp_path)


@pytest.mark.slow
def test_models_and_pages_are_saved_to_a_bucket_and_loaded_anew(store, run_in_bucket):
    run_in_bucket(RUN)
    model = mogrifier_jax.load(RUN)
    assert model.info["workdir"] == RUN and not buckets._mirrors
    model.save("gs://runs/shared/model.safetensors")
    page = model.explore("The lambda").save("gs://runs/shared/page.html")
    assert "The lambda form" not in page.name
    shared = stored("gs://runs/shared")
    assert shared.keys() == {"model.safetensors", "page.html"}
    copy = mogrifier_jax.load("gs://runs/shared/model.safetensors")
    text = "The lambda form.\n"
    assert copy.score(text).nats.sum() == model.score(text).nats.sum()
    # What a run writes meanwhile is seen: the second load is not that of the first one's copy.
    store.objects["runs"].clear()
    with pytest.raises(errors.UsageError, match=f"{RUN} does not exist"):
        mogrifier_jax.load(RUN)


@pytest.mark.parametrize("path", ["gs://runs", "gs://runs/", "gs://runs/folder/"])
def test_an_address_without_a_name_is_no_file(path):
    with pytest.raises(errors.UsageError, match="gs://bucket/name"):
        with buckets.output("gs://"):
            raise AssertionError
    with pytest.raises(errors.UsageError, match=f"{path} names no file"):
        with buckets.output(path):
            raise AssertionError


def test_training_from_python_takes_an_address(store, monkeypatch, tmp_path):
    def stop(config):
        (mirror,) = buckets._mirrors.values()
        assert mirror.url == RUN and ".lease" in contents(store)
        raise errors.UsageError(f"no run in {mirror.folder}")

    monkeypatch.setattr(runs, "make_run", stop)
    with pytest.raises(errors.UsageError, match=f"no run in {RUN}"):
        train.train_and_evaluate(configs.load_config("pydoc:tiny"), RUN)
    assert not contents(store) and not cached(tmp_path)


def test_a_comma_belongs_to_the_name_of_a_run(store, command, monkeypatch):
    def stop(config, workdir, **_):
        pathlib.Path(workdir, "results.json").write_bytes(b"{}")
        raise errors.UsageError(f"trains in {workdir}")

    monkeypatch.setattr(train, "train_and_evaluate", stop)
    code, said = command("--config=pydoc:tiny", "--workdir=gs://runs/some/run,2")
    assert code == 2 and "trains in gs://runs/some/run,2" in said
    assert contents(store, "some/") == {"run,2/results.json": b"{}"}


def test_errors_name_the_address_and_not_the_copy(store, command, tmp_path):
    put(store, **{"config.json": b"{"})
    for mode in ("evaluate", "sample", "explore"):
        code, said = command(f"--mode={mode}", f"--workdir={RUN}")
        assert code == 2 and RUN in said and str(tmp_path) not in said
    with pytest.raises(errors.UsageError, match=RUN):
        mogrifier_jax.load(RUN)


def test_other_processes_name_the_address_too(store):
    program = "import sys; from mogrifier_jax import buckets; print(buckets.show(sys.argv[1]))"
    with buckets.mounted(RUN) as folder:
        command = [sys.executable, "-c", program, f"{folder}/x"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == f"{RUN}/x\n"
    assert buckets.show(folder) == folder


# What changes while it is copied.


def test_a_run_that_goes_on_can_be_copied(store, monkeypatch):
    """A checkpoint that disappears between the list and its files is replaced by its successor."""

    def add(step):
        for name in ("state/d", "info/info.json"):
            put(store, **{f"checkpoints/{step}/{name}": b"%d" % step})

    add(10)
    read, left = object_store.Handler.read, [1]

    def read_late(handler, objects, name, query, body):
        if name.endswith("10/state/d") and left:
            left.clear()
            add(20)
            for old in ("state/d", "info/info.json"):
                objects.pop(f"some/run/checkpoints/10/{old}", None)
        read(handler, objects, name, query, body)

    monkeypatch.setattr(object_store.Handler, "read", read_late)
    with buckets.copied(RUN) as folder:
        found = sorted(p.relative_to(folder).as_posix() for p in pathlib.Path(folder).rglob("*/*"))
    assert not left
    assert found == [
        *("checkpoints/20", "checkpoints/20/info", "checkpoints/20/info/info.json"),
        *("checkpoints/20/state", "checkpoints/20/state/d"),
    ]


def test_a_database_is_copied_between_two_transactions(store):
    with buckets.mounted(RUN) as folder:
        (mirror,) = buckets._mirrors.values()
        path = pathlib.Path(folder, "study.db")
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("create table trials (number integer)")
            database.execute("insert into trials values (1)")
            database.commit()
            database.execute("pragma cache_size = 1")  # So that changes are written at once.
            database.executemany("insert into trials values (?)", [(7,)] * 100_000)
            assert path.with_name("study.db-journal").exists()
            torn = path.read_bytes()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(buckets, "_BUSY", 0.1)
                mirror.push()
            assert contents(store).get("study.db") != torn
            database.rollback()
        (pathlib.Path(folder) / "no.db").write_bytes(b"not a database")
    found = contents(store)
    assert found.keys() == {"study.db", "no.db"} and found["no.db"] == b"not a database"
    with contextlib.closing(sqlite3.connect(":memory:")) as copy:
        copy.deserialize(found["study.db"])
        assert copy.execute("select * from trials").fetchall() == [(1,)]


def test_one_machine_tunes_with_a_database_in_the_bucket(store, command, monkeypatch):
    """Two copies of it would replace each other; workers elsewhere need a --storage."""
    for name, value in dict(BEAT=0.1, PAUSE=0.1, PATIENCE=0.5).items():
        monkeypatch.setattr(buckets, name, value)
    tune = ["--mode=tune", "--config=pydoc:tiny", "--study=appendix_a", f"--workdir={RUN}"]
    with buckets.mounted(RUN, exclusive=True):
        code, said = command(*tune, "--trials=1")
        assert code == 2 and "another run is writing to gs://runs/some/run" in said
        code, said = command(*tune, "--trials=1", "--storage=/nowhere/x.journal")
        assert code == 2 and "another run" not in said  # Control: refused for its storage alone.

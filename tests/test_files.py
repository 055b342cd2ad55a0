"""Files that are read back: what does not fit its schema, or is no file, is one sentence."""

import functools
import io
import json
import os
import threading

import numpy as np
import pytest

from mogrifier_jax import errors, files

SCHEMA = {
    "step": files.COUNT,
    "rate?": files.Number(float, 0.0, 1.0),
    "name": (str, None),
    "unit": ("ppl", "bpc"),
    "rows": [{"nats": float, "best?": bool}],
    "more?": {str: int},
    "pair?": [int, str],
}
GOOD = {"step": 3, "name": None, "unit": "ppl", "rows": [{"nats": 1}, {"nats": 0.5, "x": []}]}
BAD = {
    "it is a list instead of an object": [],
    "it lacks 'step'": {"name": None},
    "step is a bool instead of a int": GOOD | {"step": True},
    "step is a float instead of a int": GOOD | {"step": 3.0},
    "step is -1, which is out of range": GOOD | {"step": -1},
    "step is 1000": GOOD | {"step": 10**30},
    "rate is 1.5, which is out": GOOD | {"rate": 1.5},
    "rate is nan, which is out": GOOD | {"rate": float("nan")},
    "name is a int instead of a str": GOOD | {"name": 5},
    "unit is a str instead of 'ppl'": GOOD | {"unit": "nats"},
    "rows is a dict instead of a list": GOOD | {"rows": {}},
    r"rows\[1\] lacks 'nats'": GOOD | {"rows": [{"nats": 1}, {}]},
    r"rows\[0\].nats is null": GOOD | {"rows": [{"nats": None}]},
    r"rows\[0\].best is a int instead of a bool": GOOD | {"rows": [{"nats": 1, "best": 1}]},
    "more.a is a str": GOOD | {"more": {"a": "x"}},
    "pair has 1 values instead of 2": GOOD | {"pair": [1]},
    r"pair\[1\] is a int instead of a str": GOOD | {"pair": [1, 2]},
}


@pytest.mark.parametrize("reason", BAD)
def test_json_that_does_not_fit_is_named_with_the_reason_and_the_remedy(reason, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(GOOD | {"rate": 0.5, "more": {"a": 1}, "pair": [1, "a"]}))
    assert files.read_json(path, SCHEMA)["step"] == 3  # Control.
    path.write_text(json.dumps(BAD[reason]))
    with pytest.raises(errors.UsageError, match=f"x.json is not as it was.*{reason}.*; delete it"):
        files.read_json(path, SCHEMA, "delete it")


@pytest.mark.parametrize("depth", [200, 900, 100_000])
@pytest.mark.parametrize("kind", ["[", '{"a":'])
def test_json_that_is_nested_deeply_is_refused(depth, kind, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(kind * depth + "1" + {"[": "]"}.get(kind, "}") * depth)
    with pytest.raises(errors.UsageError, match=r"x.json is .*(deep|recursion)"):
        files.read_json(path)


def test_other_bytes_are_refused(tmp_path):
    path = tmp_path / "x.json"
    for content in (b"", b"\xff{}", b"{", b'{"a": 1e5', b"9" * 5000, b'[{"a": 1, "b": 2, "a": 1}]'):
        path.write_bytes(content)
        with pytest.raises(errors.UsageError, match=r"x.json is not valid JSON"):
            files.read_json(path)


def make_pipe(path):
    os.mkfifo(path)
    return path


IRREGULAR = {
    "a pipe": make_pipe,
    "a folder": lambda path: path.mkdir() or path,
    "a device": lambda path: path.symlink_to("/dev/zero") or path,
    "a dangling link": lambda path: path.symlink_to("nowhere") or path,
    "nothing": lambda path: path,
    "a long name": lambda path: path.with_name("x" * 300),
}


def in_time(function, *arguments):
    """What a function returns or raises; fails if that takes long."""
    found = []

    def run():
        try:
            found.append(function(*arguments))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("read", [files.read_bytes, files.read_json, files.read_text])
def test_only_regular_files_are_read(kind, read, tmp_path):
    path = IRREGULAR[kind](tmp_path / "x")
    error = in_time(functools.partial(read, path, remedy="mend it"))
    assert isinstance(error, errors.UsageError)
    assert "mend it" in str(error) and str(tmp_path) in str(error)


def test_a_pipe_is_written_to_only_if_somebody_reads_it(tmp_path):
    path = make_pipe(tmp_path / "pipe")
    assert isinstance(in_time(files.open_to_write, path), OSError)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with files.open_to_write(path) as file:
        file.write(b"text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_what_is_not_regular_in_a_folder_is_found(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    assert files.find_irregular(tmp_path) is None
    pipe = make_pipe(tmp_path / "a" / "b" / "pipe")
    assert files.find_irregular(tmp_path) == pipe


def test_what_is_not_regular_is_found_behind_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").mkdir()
    link = tmp_path / "folder" / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert files.find_irregular(tmp_path / "folder") is None
    make_pipe(tmp_path / "elsewhere" / "pipe")
    assert files.find_irregular(tmp_path / "folder") == link / "pipe"
    (tmp_path / "elsewhere" / "pipe").unlink()
    circle = tmp_path / "elsewhere" / "circle"
    circle.symlink_to(tmp_path / "folder")
    assert files.find_irregular(tmp_path / "folder") == link / "circle"


ARRAYS = {"tokens": files.Array("iu", 1), "about": files.Array("U", 0)}


def npz(**arrays):
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def test_arrays_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "x.npz"
    good = dict(tokens=np.arange(5), about=np.array("text"))
    path.write_bytes(npz(**good))
    assert files.read_arrays(path, ARRAYS)["tokens"][4] == 4  # Control.
    for change in (
        {"tokens": np.ones(5)},
        {"tokens": np.ones((5, 1), int)},
        {"about": np.array(5)},
        {"tokens": np.array([{}], object)},
    ):
        path.write_bytes(npz(**good | change))
        with pytest.raises(errors.UsageError, match=r"x.npz .*; make it again"):
            files.read_arrays(path, ARRAYS, "make it again")
    path.write_bytes(npz(tokens=np.arange(5)))
    with pytest.raises(errors.UsageError, match="lacks the array 'about'"):
        files.read_arrays(path, ARRAYS)


def test_no_flipped_bit_of_an_npz_file_is_a_traceback(tmp_path):
    path = tmp_path / "x.npz"
    whole = npz(tokens=np.arange(5), about=np.array("text"))
    refused = 0
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            found = files.read_arrays(path, ARRAYS)
            assert found["tokens"].tolist() == list(range(5)) and found["about"] == "text"
        except errors.UsageError:
            refused += 1
    assert refused > len(whole) / 2

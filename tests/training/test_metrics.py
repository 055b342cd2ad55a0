"""The files of metrics: exact over kills and resumes, legal JSON, the same in TensorBoard."""

import json
import math
import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from mogrifier_jax.training import learning_curves, metrics


def write_steps(writer, steps):
    for step in steps:
        writer.write(step, "train", loss_nats=np.float32(1 / (step + 1)), grad_norm=jnp.float32(2))
        if step % 3 == 0:
            writer.write(step, "eval", turn=step // 3, valid_nats=1.0, best=step == 3)


@pytest.mark.slow
def test_a_resumed_file_equals_an_unbroken_one(tmp_path):
    with metrics.MetricWriter(tmp_path / "unbroken") as writer:
        write_steps(writer, range(1, 11))
    with metrics.MetricWriter(tmp_path / "broken") as writer:
        write_steps(writer, range(1, 8))
    path = tmp_path / "broken" / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])  # Killed in the middle of a line, last saved at step 3.
    with metrics.MetricWriter(tmp_path / "broken", resume_step=3) as writer:
        writer.write(3, "eval", turn=1, valid_nats=1.0, best=True)  # Evaluated again.
        write_steps(writer, range(4, 11))
    unbroken = (tmp_path / "unbroken" / "metrics.jsonl").read_text()
    assert path.read_text() == unbroken
    assert [json.loads(line)["step"] for line in unbroken.splitlines()][:4] == [1, 2, 3, 3]
    with metrics.MetricWriter(tmp_path / "broken", resume_step=4):  # Control: it does drop.
        pass
    assert path.read_text() != unbroken and unbroken.startswith(path.read_text())
    with metrics.MetricWriter(tmp_path / "broken"):
        assert path.read_text() == ""


@pytest.mark.slow
def test_lines_can_be_read_while_the_run_goes_on(tmp_path):
    with metrics.MetricWriter(tmp_path) as writer:
        writer.write(1, "train", loss_nats=0.5)
        writer.write_speed(1, tokens_per_second=10.0)
        assert metrics.read_metrics(tmp_path) == [{"step": 1, "kind": "train", "loss_nats": 0.5}]
        speed = json.loads((tmp_path / "speed.jsonl").read_text())
        assert speed == {"step": 1, "tokens_per_second": 10.0}


@pytest.mark.slow
def test_numbers_are_short_exact_and_legal_json(tmp_path):
    values = [np.float32(0.1), 0.1 + 0.2, jnp.int32(3), float("nan"), np.float32("-inf"), True]
    with metrics.MetricWriter(tmp_path) as writer:
        writer.write(1, "train", **{f"v{i}": value for i, value in enumerate(values)})
        with pytest.raises(TypeError, match=r"shape \(2,\)"):
            writer.write(2, "train", loss_nats=np.ones(2))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"v0": 0.1, "v1": 0.30000000000000004, "v2": 3, "v3": "nan", "v4": "-inf"' in text

    def refuse(name):
        raise AssertionError(name)

    record = json.loads(text, parse_constant=refuse)
    assert np.float32(record["v0"]) == values[0]
    assert math.isnan(float(record["v3"])) and float(record["v4"]) == -math.inf


def test_without_a_number_there_is_no_tensorboard_file(tmp_path):
    """As when a run that has ended is started again."""
    metrics.MetricWriter(tmp_path).close()
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_has_the_same_numbers(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    with metrics.MetricWriter(tmp_path) as writer:
        writer.write(7, "eval", valid_nats=1.5, best=True)
        writer.write_speed(7, tokens_per_second=12.0)
    (file,) = (tmp_path / "tensorboard").iterdir()
    content, place, scalars = file.read_bytes(), 0, {}
    while place < len(content):  # Records are: length 8, checksum 4, data, checksum 4.
        size = int.from_bytes(content[place : place + 8], "little")
        event = event_pb2.Event.FromString(content[place + 12 : place + 12 + size])
        scalars |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        place += size + 16
    assert scalars[("eval/valid_nats", 7)] == 1.5
    assert scalars[("speed/tokens_per_second", 7)] == 12.0


def test_without_tensorboardx_there_is_one_line_about_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    logging.set_verbosity(logging.INFO)
    with metrics.MetricWriter(tmp_path) as writer:
        writer.write(1, "train", loss_nats=1.0)
    assert caplog.text.count("tensorboardX is not installed") == 1
    assert not (tmp_path / "tensorboard").exists()


# The history of a run, which a checkpoint remembers.


def write_turns(folder, turns=4, offset=0.0, writer=None, first=0):
    """Metrics as a run writes them; returns what the last checkpoint knows of them."""
    writer = writer or metrics.MetricWriter(folder)
    for turn in range(first, turns):
        if turn:
            for step in (2 * turn - 1, 2 * turn):
                writer.write(step, "train", loss_nats=1.0 / step + offset)
        writer.write(2 * turn, "eval", turn=turn, valid_nats=5.0 - turn + offset)
        sealed = writer.digest_lines()
    writer.close()
    return sealed


def evaluations(turns=4):
    return [
        {"step": 2 * turn, "kind": "eval", "turn": turn, "valid_nats": 5.0 - turn}
        for turn in range(turns)
    ]


def change_lines(change):
    def apply(path, other):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(change(lines)))

    return apply


DAMAGES = {
    "deleted": lambda path, other: path.unlink(),
    "emptied": lambda path, other: path.write_text(""),
    "cut": lambda path, other: os.truncate(path, path.stat().st_size // 2),
    "a line gone": change_lines(lambda lines: lines[:4] + lines[5:]),
    "the first gone": change_lines(lambda lines: lines[1:]),
    "a line doubled": change_lines(lambda lines: lines[:4] + lines[3:]),
    "all doubled": change_lines(lambda lines: [line for line in lines for _ in range(2)]),
    "two swapped": change_lines(lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]]),
    "reversed": change_lines(lambda lines: lines[::-1]),
    "of another run": lambda path, other: path.write_bytes(other.read_bytes()),
    "a digit": lambda path, other: path.write_text(path.read_text().replace("4.0", "4.1")),
    "a link to nothing": lambda path, other: (path.unlink(), path.symlink_to("nowhere")),
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
    "a pipe": lambda path, other: (path.unlink(), os.mkfifo(path)),
    "garbage": lambda path, other: path.write_bytes(b"\xff\n" * 10),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_history_that_is_not_the_runs_is_named_and_restored(damage, tmp_path, caplog):
    run, path = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    sealed = json.loads(json.dumps(write_turns(run)))  # As a checkpoint keeps it.
    write_turns(tmp_path / "other", offset=0.5)
    whole = path.read_bytes()
    with path.open("ab") as file:  # What came after the checkpoint comes again.
        file.write(b'{"step": 7, "kind": "train", "loss_nats": 0.1}\n{"st')
    metrics.MetricWriter(run, 6, sealed, evaluations()).close()
    assert path.read_bytes() == whole and not caplog.text  # Control.
    DAMAGES[damage](path, tmp_path / "other" / "metrics.jsonl")
    writer = metrics.MetricWriter(run, 6, sealed, evaluations())
    assert "has changed since the checkpoint was saved" in caplog.text
    left = [p.name for p in run.iterdir() if ".damaged" in p.name]
    assert left == ([] if damage == "deleted" else ["metrics.jsonl.damaged"])
    records = metrics.read_metrics(run)
    assert [r["valid_nats"] for r in records if r["kind"] == "eval"] == [5.0, 4.0, 3.0, 2.0]
    assert [r["step"] for r in records] == sorted(r["step"] for r in records)
    good = whole.splitlines()
    train = [line for line in path.read_bytes().splitlines() if b"train" in line]
    assert set(train) <= set(good) and len(set(train)) == len(train)
    if damage in ("a line gone", "a line doubled", "two swapped", "a digit"):
        assert len(train) >= 4  # The other turns are as they were.
    # It goes on, and a second checkpoint knows the file as it is now.
    again = write_turns(run, turns=5, writer=writer, first=4)
    caplog.clear()
    metrics.MetricWriter(run, 8, again, evaluations(5)).close()
    assert not caplog.text and len(metrics.read_metrics(run)) == len(records) + 3


EDITORS = {
    "other line ends": lambda text: text.replace(b"\n", b"\r\n"),
    "old line ends": lambda text: text.replace(b"\n", b"\r"),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "empty lines": lambda text: text.replace(b"\n", b"\n \n"),
    "no end of the last line": lambda text: text[:-1],
}


@pytest.mark.parametrize("editor", EDITORS)
def test_what_an_editor_leaves_is_restored_whole(editor, tmp_path, caplog):
    path, sealed = tmp_path / "metrics.jsonl", write_turns(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(changed := EDITORS[editor](whole))
    metrics.MetricWriter(tmp_path, 6, sealed, evaluations()).close()
    assert path.read_bytes() == whole and "10 of its 10 lines are good" in caplog.text
    assert path.with_suffix(".jsonl.damaged").read_bytes() == changed


@pytest.mark.parametrize("damage", ["changed", "deleted", "all deleted", "inserted", "moved"])
def test_long_turns_after_a_damaged_one_are_kept(damage, tmp_path):
    path, length = tmp_path / "metrics.jsonl", 1200
    with metrics.MetricWriter(tmp_path) as writer:
        for step in range(4 * length):
            writer.write(step, "train", loss_nats=1.5)
            if step % length == length - 1:
                sealed = writer.digest_lines()
    lines = path.read_bytes().splitlines(keepends=True)
    at, end = length + 7, 2 * length  # In the second turn.
    changed = {
        "changed": [*lines[:at], lines[at].replace(b"1.5", b"1.6"), *lines[at + 1 :]],
        "deleted": lines[:at] + lines[at + 1 :],
        "all deleted": lines[:length] + lines[end:],
        "inserted": lines[: at + 1] + lines[at:],
        "moved": lines[:at] + lines[at + 1 :] + lines[at : at + 1],
    }
    path.write_bytes(b"".join(changed[damage]))
    metrics.MetricWriter(tmp_path, 4 * length, sealed).close()
    assert path.read_bytes() == b"".join(lines[:length] + lines[end:])


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, caplog):
    path, sealed = tmp_path / "metrics.jsonl", write_turns(tmp_path)
    whole, size = path.read_bytes(), 1 << 26
    with path.open("wb") as file:
        file.truncate(size)  # Of zeros.
        file.seek(size)
        file.write(b"\n" + whole)
    tracemalloc.start()
    try:
        assert len(metrics.read_metrics(tmp_path)) == 10
        metrics.MetricWriter(tmp_path, 6, sealed, evaluations()).close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 8 and path.read_bytes() == whole
    assert caplog.text.count("skipped a line that is not a record") == 1


def test_a_second_damage_does_not_replace_what_the_first_left(tmp_path):
    sealed = write_turns(tmp_path)
    for content in ("first\n", "second\n"):
        (tmp_path / "metrics.jsonl").write_text(content)
        metrics.MetricWriter(tmp_path, 6, sealed, evaluations()).close()
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == "first\n"
    assert (tmp_path / "metrics.jsonl.damaged.2").read_text() == "second\n"


def test_a_long_history_is_read_as_a_stream(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(50_000):
            print(json.dumps({"step": step, "kind": "train", "loss_nats": 1.5}), file=file)
    writer = metrics.MetricWriter(tmp_path, 50_000)
    sealed = writer.digest_lines()
    writer.close()
    tracemalloc.start()
    try:
        metrics.MetricWriter(tmp_path, 50_000, sealed).close()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        metrics.read_metrics(tmp_path)
        _, of_a_list = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20 < of_a_list  # Control: all records at once.
    with metrics.MetricWriter(tmp_path, 50_000, sealed) as writer:
        assert writer.digest_lines() == sealed


def test_a_long_history_is_drawn_as_a_stream(tmp_path):
    lines = [f'{{"step": {i}, "kind": "train", "loss_nats": 1.5}}\n' for i in range(30_000)]
    lines.append('{"step": 30000, "kind": "eval", "valid_nats": 1.25, "best": true}\n')
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    tracemalloc.start()
    try:
        points, records = learning_curves.read_curves(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert points.shape == (2, 30_000) and len(records) == 1
    assert peak < 4 * points.nbytes
    assert learning_curves.find_points(
        metrics.read_metrics(tmp_path), "train", "loss_nats"
    ).tolist() == (points.tolist())

"""The files of metrics: exact over kills and resumes, legal JSON, the same in TensorBoard."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from mogrifier_jax.training import metrics


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

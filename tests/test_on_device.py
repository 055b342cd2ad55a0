"""`benchmarks/on_device.py` on sizes that take seconds."""

import json
import math
import types

import jax
import pytest

from mogrifier_jax import configs
from mogrifier_jax.preflight import estimates, targets

on_device = pytest.importorskip("benchmarks.on_device")
rnn = pytest.importorskip("benchmarks.rnn")
H100 = targets.parse("h100:1")


@pytest.mark.parametrize(
    ("kind", "count", "name"),
    [
        ("TPU v5 lite", 1, "v5e:1x1"),
        ("TPU v5 lite", 8, "v5e:2x4"),
        ("TPU v5", 4, "v5p:2x2x1"),
        ("TPU v6 lite", 4, "v6e:2x2"),
        ("NVIDIA A100-SXM4-80GB", 8, "a100-80g:8"),
        ("NVIDIA A100-SXM4-40GB", 1, "a100:1"),
        ("NVIDIA H100 80GB HBM3", 2, "h100:2"),
        ("NVIDIA L4", 1, "l4:1"),
        ("NVIDIA L40S", 1, None),
        ("TPU v5 lite", 3, None),
        ("TPU7x", 4, None),
        ("cpu", 1, None),
    ],
)
def test_devices_as_preflight_knows_them(kind, count, name):
    found = on_device.find_target([types.SimpleNamespace(device_kind=kind)] * count)
    assert (found.name if found else None) == name


def test_how_far_off():
    def off(seconds):
        return on_device.how_far_off(
            on_device.Row("", seconds, estimates.Seconds(0.005, 0.002, 0.004))
        )

    assert [off(s) for s in (0.001, 0.003, 0.006)] == [
        "0.50x the lower end",
        "inside",
        "1.50x the upper end",
    ]
    cells = on_device.to_cells(on_device.Row("a", 0.01, estimates.Seconds(0.005), "b"))
    assert cells == ("a", "10.00", "", "", "5.00", "2.00x", "b")
    assert on_device.to_cells(on_device.Row("a", 0.01))[2:] == ("",) * 5


@pytest.fixture
def small_ptb(monkeypatch):
    """Experiments are small ones of Penn Treebank, whose corpus is not read."""
    load = configs.load_config

    def small(name):
        config = load(name)
        config.update(dict(data=dict(batch_size=16, window=5)))
        config.update(dict(model=dict(num_layers=1, hidden_size=8, rounds=0, rank=0)))
        return config

    monkeypatch.setattr(configs, "load_config", small)


@pytest.mark.slow
def test_a_step_is_measured_and_estimated(small_ptb):
    # This is not an H100, but its program is analysed as if it were.
    row = on_device.measure_experiment("ptb", targets.parse("h100:8"), repeats=1)
    assert row.name == "ptb, step, B 16, T 5" and row.remark == ""
    assert 0 < row.seconds < 10 and 0 < row.estimate.estimate < row.seconds
    assert math.isnan(row.estimate.lower)


@pytest.mark.slow
def test_a_batch_is_made_smaller_where_a_step_takes_too_long(small_ptb, monkeypatch):
    monkeypatch.setattr(on_device, "LONGEST", 1e-9)
    row = on_device.measure_experiment("ptb", None, repeats=1)
    assert len(jax.devices()) == 8  # Each has one row at least.
    assert row.name == "ptb, step, B 8, T 5" and row.remark == "batch 8 instead of 16"
    assert row.estimate is None and row.seconds > 0


@pytest.mark.slow
def test_layers_beside_flax(monkeypatch):
    monkeypatch.setitem(rnn.SIZES, "tiny", (8, 2, 3))
    rows = list(on_device.measure_layers("tiny", H100, repeats=1))
    names = [row.name.partition(", H")[0] for row in rows]
    assert names[0] == "layer of nn.RNN, OptimizedLSTMCell" and "layer of RNN, Mogrifier" in names
    assert "layer of nnx.RNN, OptimizedLSTMCell" in names
    assert all(row.seconds > 0 and row.estimate.estimate > 0 for row in rows)
    assert rows[0].remark == "1.00x the first"


def test_what_takes_too_long_is_left_out(tmp_path):
    rows = list(on_device.measure_all(["ptb"], ["small"], minutes=-1, repeats=1))
    assert [row.name for row in rows] == ["layers, small", "ptb, step"]
    assert all(math.isnan(row.seconds) and "left out" in row.remark for row in rows)
    on_device.write_json(str(tmp_path / "a.json"), "here", rows)
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["machine"] == "here" and written["rows"][0]["seconds"] is None

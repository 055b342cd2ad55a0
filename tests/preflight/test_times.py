"""Programs in tests/data come from real compilers; `test_costs.py` says which."""

import pathlib

import pytest

from mogrifier_jax.preflight import chips, costs, targets, times

DATA = pathlib.Path(__file__).parents[1] / "data"


def read(name):
    return (DATA / f"{name}.hlo.txt").read_text()


def test_gpu_time_is_a_roofline():
    chip = chips.CHIPS["h100"]
    analysis = costs.analyse(read("scan_h100"))
    seconds = times.compute_seconds(analysis, chip)
    launches = sum(c.executions for c in analysis.costs) * chip.launch
    moved = sum(c.executions * c.traffic_each for c in analysis.costs) / chip.memory_bandwidth
    assert launches < seconds <= launches + moved * 1.001


def test_tpu_time_is_cycles_over_clock():
    analysis = costs.analyse(read("nested_v5e"))
    chip = chips.CHIPS["v5e"]
    assert times.compute_seconds(analysis, chip) == pytest.approx(142_639 / 1.503e9, rel=1e-3)


def test_collective_time_grows_with_bytes_and_hops():
    target = targets.parse("v5e:2x2")
    analysis = costs.analyse(read("nested_model_v5e"))
    gathers = 23 * 64 * 256 * 2 * 3 / 4 / 90e9 + 23 * 2e-6
    sums = 2 * 4 * 2 * 3 / 4 / 90e9 + 2 * 2 * 2e-6
    assert times.collective_seconds(analysis, target) == pytest.approx(gathers + sums, rel=1e-3)

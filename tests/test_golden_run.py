"""Whole tiny runs give the numbers that were recorded: see `golden_run.py`."""

import json

import pytest

from tests import golden_run

GOLDEN = json.loads(golden_run.PATH.read_text())
# Of numbers of a run, by the dtype of its matmuls.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
MOVED = """

Numbers of a whole run have moved: losses, gradient norms, scores or weights; the order of random
numbers may have changed. Find out why. Only if CHANGELOG.md names the change is it right to record
them anew: python -m tests.golden_run"""


def failures(found, name):
    """What differs by more than the tolerance from the recorded numbers of a case."""
    dtype, _ = golden_run.CASES[name]
    gaps = golden_run.differences(found, GOLDEN[name])
    return {key: gap for key, gap in gaps.items() if not gap <= TOLERANCES[dtype]}


@pytest.mark.slow
@pytest.mark.parametrize("name", golden_run.CASES)
def test_a_run_gives_the_recorded_numbers(tmp_path, name):
    failed = failures(golden_run.run(tmp_path, name), name)
    assert not failed, f"{failed}{MOVED}"


def test_the_recorded_runs_are_what_they_should_be():
    for numbers in GOLDEN.values():
        records = {kind: [] for kind in ("train", "eval")}
        for record in numbers["metrics"]:
            records[record["kind"]].append(record)
        assert [record["step"] for record in records["train"]] == [2, 4, 6, 8]
        assert [record["averaged"] for record in records["eval"]] == [False, False, True]
        assert len({record["temperature"] for record in records["eval"]}) > 1
        weights = numbers["weights"]
        assert weights["average.average.n"][0] == 4
        # The average is no copy of the weights.
        assert weights["params.embedding"] != weights["average.average.mean.embedding"]


@pytest.mark.slow
def test_another_seed_is_far_from_the_recorded_numbers(tmp_path):
    found = golden_run.run(tmp_path, "float32", seed=3)
    for name, (dtype, _) in golden_run.CASES.items():
        gaps = golden_run.differences(found, GOLDEN[name])
        for kind in ("loss_nats", "grad_norm", "valid_nats", "params."):
            worst = max(gap for key, gap in gaps.items() if kind in key)
            assert worst > (1e3 if dtype == "float32" else 1) * TOLERANCES[dtype], (name, kind)
        assert max(gaps.values()) > 10 * TOLERANCES[dtype]

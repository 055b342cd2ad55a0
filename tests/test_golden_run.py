"""Whole tiny runs give the numbers that were recorded: see `golden_run.py`."""

import json

import pytest

from tests import golden_run

GOLDEN = json.loads(golden_run.PATH.read_text())
# By the dtype of the matmuls. At full optimisation all numbers move by at most 2e-7, and float32
# ones by as much from one device to four. There another order of sums flips roundings to bfloat16,
# which moves these numbers by 1.5e-3, as another processor may; float32 is 3e-3 away from them.
TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-3}
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


def test_one_dtype_does_not_pass_for_the_other():
    assert not failures(GOLDEN["float32 2x2"], "float32")
    assert not failures(GOLDEN["bfloat16 2x2"], "bfloat16")
    assert failures(GOLDEN["float32"], "bfloat16") and failures(GOLDEN["bfloat16"], "float32")


@pytest.mark.slow
def test_another_seed_is_far_from_the_recorded_numbers(tmp_path):
    found = golden_run.run(tmp_path, "float32", seed=3)
    for name, (dtype, _) in golden_run.CASES.items():
        gaps = golden_run.differences(found, GOLDEN[name])
        for kind in ("loss_nats", "grad_norm", "valid_nats", "params."):
            worst = max(gap for key, gap in gaps.items() if kind in key)
            assert worst > (1e3 if dtype == "float32" else 1) * TOLERANCES[dtype], (name, kind)
        assert max(gaps.values()) > 10 * TOLERANCES[dtype]

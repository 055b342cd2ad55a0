import math

import pytest

from mogrifier_jax.analysis import documents, sweep_results, sweep_tables
from tests.analysis.sweep_rows import make_rows


def test_a_table_has_mean_spread_paper_and_what_it_was_made_with():
    rows = make_rows(
        {"LSTM": [5.0, 5.2], "Mogrifier": [4.9]}, paper={"LSTM": 4.0, "Mogrifier": None}
    )
    lines = sweep_tables.to_markdown("Title", rows).splitlines()
    assert lines[0] == "**Title**, perplexity"
    assert lines[4].startswith(
        "| LSTM | 2,000,000 | 150 | 2 | 164.84 ± 1.25 | 164.84 | 54.60 | 1.0 |"
    )
    assert lines[5].startswith("| Mogrifier | 2,000,000 | 150 | 1 | **134.29 ± 1.25** |")
    assert lines[-1] == (
        "1,000 steps of 16 x 35 tokens. Commit 0123456+; 1 cpu, 2 cores; 3 runs, 3m00s in all."
    )


def test_the_best_is_that_of_all_or_of_each_place():
    nats = {"LSTM": [5.0], "Mogrifier": [4.9]}
    short, long = (make_rows(nats, x=dict.fromkeys(nats, x)) for x in (5, 10))
    assert [sweep_tables.is_best(row, short + long) for row in short + long] == [0, 1, 0, 1]
    rounds = make_rows(nats, x={"LSTM": 0, "Mogrifier": 1}, label=dict.fromkeys(nats, "Mogrifier"))
    assert [sweep_tables.is_best(row, rounds) for row in rounds] == [False, True]
    assert not sweep_tables.is_best(short[0], short[:1])
    long[0]["window"] = 70
    assert sweep_tables.describe_runs(short + long).startswith("1,000 steps of 16 x 35, 70 tokens.")


def test_two_models_with_seeds_are_told_apart_by_a_standard_error():
    rows = make_rows({"LSTM": [5.0, 5.2], "Mogrifier": [4.9, 4.9, 4.9]})
    for row, nats in zip(rows, ([5.0, 5.2], [4.9, 4.9, 4.9]), strict=True):
        row["runs"] = nats
        row["valid"] = row["test"] = {"nats_of_seeds": nats}
    # The variance of the first is 0.02, so that of its mean is 0.01; the second has none.
    assert sweep_tables.compare(rows) == (
        "LSTM − Mogrifier: 0.2000 nats on valid data (standard error 0.1000), "
        "0.2000 nats on test data (standard error 0.1000)."
    )
    rows[1]["runs"] = [4.9]
    assert sweep_tables.compare(rows) == "" == sweep_tables.compare(rows[:1])


def test_more_rows_are_compared_with_the_first_or_at_the_same_x():
    def row(label, nats, x=None):
        split = {"nats_of_seeds": nats}
        return {"label": label, "x": x, "runs": nats, "valid": split, "test": split}

    table = [row("Mogrifier", [4.0, 4.2]), row("LSTM", [5.0, 5.0]), row("mLSTM", [6.0])]
    line = "Mogrifier − LSTM: -0.9000 nats on valid data (standard error 0.1000), "
    assert sweep_tables.compare(table).startswith(line)  # One seed has no standard error.
    table[2] = row("mLSTM", [6.0, 6.0])
    head, _, first, second = sweep_tables.compare(table).splitlines()
    assert head == "| difference in nats ± standard error | valid | test |"
    assert first == "| Mogrifier − LSTM | -0.9000 ± 0.1000 | -0.9000 ± 0.1000 |"
    assert second.startswith("| Mogrifier − mLSTM | -1.9000 ± 0.1000 |")
    rounds = [row("Mogrifier", [float(x), float(x)], x) for x in (0, 1)]
    assert sweep_tables.compare(rounds, "rounds").startswith("rounds: 0 − 1: -1.0000 nats on valid")
    curves = [row(name, [x + k, x + k], x) for x in (5.0, 9.0) for k, name in enumerate("AB")]
    *_, first, second = sweep_tables.compare(curves, "length").splitlines()
    assert first.startswith("| A − B, length 5 | -1.0000 ± ")
    assert second.startswith("| A − B, length 9 | -1.0000 ± ")


def test_rows_of_earlier_versions_are_converted_to_nats():
    scores = {"ppl": 2.0, "bpc": 1.0, "nats": math.log(2)}
    for unit, score in scores.items():
        row = {"unit": unit, "valid": {"scores": [score]}}
        assert sweep_results.nats_of_seeds(row, "valid") == [pytest.approx(math.log(2))]
    kept = {"unit": "ppl", "valid": {"scores": [2.0], "nats_of_seeds": [5.0]}}
    assert sweep_results.nats_of_seeds(kept, "valid") == [5.0]
    gap, error = sweep_results.difference(kept, kept, "valid")
    assert gap == 0.0 and math.isnan(error)


def test_a_table_is_aligned_for_a_terminal():
    table = documents.make_table(["model", "nats"], [["LSTM", 5.25], ["A long name", 10]])
    assert documents.align_table(table).splitlines() == [
        "model        nats",
        "───────────  ────",
        "LSTM         5.25",
        "A long name    10",
    ]

"""Runs side by side: averages over seeds, tables, and what is refused."""

import json

import pytest

from mogrifier_jax import errors
from mogrifier_jax.analysis import inspection


def gate(mean, **others):
    numbers = {key: 0.25 for key in ("variance", "variance_over_tokens", "q05", "q95")}
    numbers |= {"saturated_low": 0.5, "saturated_high": 0.125}
    return {"layer": 1, "gate": "f", "tokens": 10, "units": 3, "mean": mean, **numbers, **others}


def bucket(nats, low=0, below=float("inf")):
    return {"from": low, "below": below, "tokens": 4, "nats": nats, "error": 0.5}


def test_runs_of_one_model_are_averaged_row_by_row():
    rows = inspection.average([[gate(0.5), gate(1.0)], [gate(0.7), gate(2.0)]])
    assert [row["mean"] for row in rows] == [pytest.approx(0.6), 1.5]
    assert all(row["runs"] == 2 and row["tokens"] == 10 for row in rows)
    rows = inspection.average([[bucket(1.0)], [bucket(4.0)]])
    assert rows[0]["nats"] == 2.5 and rows[0]["below"] == float("inf")


def test_tables_show_all_models(monkeypatch, tmp_path, capsys):
    found = {
        "a": ("LSTM", {"gates": [gate(0.5)], "recovery": [{**bucket(3.0), "above": 2}]}),
        "b": ("Mogrifier", {"gates": [gate(0.25)], "recovery": [{**bucket(2.5), "above": 2}]}),
        "c": ("Mogrifier", {"gates": [gate(0.75)], "recovery": [{**bucket(1.5), "above": 2}]}),
    }
    monkeypatch.setattr(inspection, "measure", lambda workdir, max_windows: found[workdir])
    document, numbers = tmp_path / "RESULTS.md", tmp_path / "numbers.json"
    document.write_text("<!-- inspect gates -->\nold\n<!-- end -->\n\nrest\n")
    inspection.inspect(["a", "b", "c"], document=str(document), json_path=str(numbers))
    shown = capsys.readouterr().out
    assert "| 1, f | LSTM | 0.5 | 0.25 | 0.25 | 0.5 | 0.125 | 0.25 | 0.25 |" in shown
    assert "| 1, f | Mogrifier | 0.5 |" in shown
    assert "| loss of the token before it | tokens | LSTM | Mogrifier | LSTM − Mogrifier |" in shown
    assert "| above 2 | 4 | 3 | 2 | 1 |" in shown
    assert "Runs: 1 of LSTM, 2 of Mogrifier." in shown
    text = document.read_text()
    assert "old" not in text and "| 1, f | LSTM |" in text and "\n\nrest\n" in text
    (row,) = json.loads(numbers.read_text())["recovery"]["Mogrifier"]
    assert row["nats"] == 2.0 and row["below"] is None


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([bucket(1.0, 0, 1)], "| 0 | 4 | 1 |"),
        ([bucket(1.0, 1, 10)], "| 1 to 9 | 4 | 1 |"),
        ([bucket(1.0, 1000)], "| 1,000+ | 4 | 1 |"),
    ],
)
def test_buckets_have_names(rows, words):
    assert words in inspection.to_markdown("frequency", {"LSTM": inspection.average([rows])})


def test_empty_buckets_are_left_out():
    rows = inspection.average([[bucket(2.0), {**bucket(float("nan")), "tokens": 0}]])
    table = inspection.to_markdown("frequency", {"LSTM": rows})
    assert "| 2 |" in table and "nan" not in table


def test_what_is_no_workdir_is_refused(tmp_path):
    with pytest.raises(errors.UsageError, match="does not exist"):
        inspection.inspect([str(tmp_path / "none")])
    with pytest.raises(errors.UsageError, match="it has no config"):
        inspection.inspect([str(tmp_path)])

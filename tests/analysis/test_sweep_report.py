from mogrifier_jax.analysis import sweep_report


def test_a_document_keeps_everything_but_the_table(tmp_path):
    report, made = tmp_path / "RESULTS.md", tmp_path / "work" / "both"
    made.parent.mkdir()
    made.with_suffix(".md").write_text("first\n")
    made.with_suffix(".json").write_text("[]")
    report.write_text("# Results\n\nbefore\n<!-- sweep trial:tiny both -->\n<!-- end -->\nafter\n")
    sweep_report.insert_table(report, "trial:tiny both", made)
    assert (
        "before\n<!-- sweep trial:tiny both -->\nfirst\n<!-- end -->\nafter" in report.read_text()
    )
    made.with_suffix(".md").write_text("second\n")
    made.with_suffix(".png").write_bytes(b"picture")
    sweep_report.insert_table(report, "trial:tiny both", made)
    text = report.read_text()
    assert "first" not in text and text.startswith("# Results") and text.endswith("after\n")
    assert "second\n\n![trial:tiny both](docs/results/trial_tiny_both.png)\n<!-- end -->" in text
    assert (tmp_path / "docs" / "results" / "trial_tiny_both.json").read_text() == "[]"
    sweep_report.insert_table(report, "trial:tiny other", made)
    assert report.read_text().startswith(text)

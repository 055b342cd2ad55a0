from mogrifier_jax.training import summaries


def test_table_is_aligned():
    text = summaries.table(
        {"model": [("parameters", 24_000_123), ("rounds", 5)], "mesh": [("data", "8 devices")]}
    )
    assert text.splitlines() == [
        "── model ───────────────",
        "  parameters  24,000,123",
        "  rounds      5",
        "── mesh ────────────────",
        "  data        8 devices",
        "────────────────────────",
    ]

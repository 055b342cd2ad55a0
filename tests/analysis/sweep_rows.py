"""Rows of a sweep, made up for the tests of tables and figures."""

import math


def make_rows(values, **options):
    """Rows as `collect` makes them, of seeds' nats."""
    rows = []
    for label, nats in values.items():
        scores = [math.exp(value) for value in nats]
        mean = sum(scores) / len(scores)
        summary = {
            **{"variant": label, "label": label, "x": None, "paper": None, "unit": "ppl"},
            **{"runs": [""] * len(nats), "num_params": 2_000_000, "hidden_size": 150},
            **{"batch_size": 16, "window": 35, "steps": 1000, "seconds": 60.0 * len(nats)},
            **{"hardware": ["1 cpu, 2 cores"], "commits": ["0123456789+changes"]},
            "valid": {
                "scores": scores,
                "mean": mean,
                "spread": 1.25,
                "nats": sum(nats) / len(nats),
            },
            "test": {"scores": scores, "mean": mean, "spread": None, "nats": nats[0]},
        }
        rows.append({**summary, **{key: value[label] for key, value in options.items()}})
    return rows

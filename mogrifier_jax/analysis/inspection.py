"""`--mode=inspect`: gates and losses of trained runs, side by side.

Runs of the same model, with other seeds, count as one: their numbers are averaged. What is measured
is in `analysis.py` and `losses.py`.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from mogrifier_jax import errors
from mogrifier_jax.analysis import comparisons, gating, token_losses
from mogrifier_jax.data import corpora, tasks
from mogrifier_jax.evaluation import pretrained, report, texts
from mogrifier_jax.nn import models
from mogrifier_jax.training import evaluate
from mogrifier_jax.training import workdirs as files

NAMES = {"lstm": "LSTM", "mogrifier": "Mogrifier", "mlstm": "mLSTM"}
GATES = ("f", "i", "o")


def open_split(
    workdir: str | os.PathLike, split: str, source_dir: str | None = None
) -> tuple[pretrained.Pretrained, tasks.Plan]:
    """The best weights of a run, and a split of its corpus in stripes as training evaluates it."""
    loaded = pretrained.load_weights(workdir)
    found = texts.read_splits(loaded, source_dir)
    if split not in found.names:
        raise errors.UsageError(f"split {split!r} is unknown; use {', '.join(found.names)}")
    lines = loaded.config.evaluation.lines_per_stripe
    stripes = evaluate.num_stripes(found, split, loaded.config.data.batch_size, lines)
    return loaded, found.plan(split, stripes, window=loaded.config.data.window)


def read_gates(
    workdir: str | os.PathLike,
    split: str = "valid",
    *,
    max_windows: int | None = None,
    source_dir: str | None = None,
) -> gating.Report:
    """Gate statistics of the best weights of a run on a split of its corpus."""
    loaded, plan = open_split(workdir, split, source_dir)
    read = gating.GateAnalysis(loaded.model, plan)
    return read(loaded.params, max_windows=max_windows, title=split)


def read_scores(
    workdir: str | os.PathLike,
    split: str = "valid",
    *,
    max_windows: int | None = None,
    source_dir: str | None = None,
) -> evaluate.TokenScores:
    """The nats of every token of a split under the best weights of a run, for `losses.py`."""
    loaded, plan = open_split(workdir, split, source_dir)
    run = evaluate.Deterministic(loaded.model, plan)
    return run(loaded.params, loaded.temperature or 1.0, max_windows, split)


def run(
    workdirs: Sequence[str],
    *,
    document: str | None = None,
    json_path: str | None = None,
    max_windows: int | None = None,
) -> dict[str, Any]:
    """Inspects runs on their validation data, and shows tables.

    Args:
      document: a Markdown file whose tables, between comments, are renewed.
      json_path: a file for all numbers.
    """
    found: dict[str, dict[str, list]] = {}
    for workdir in workdirs:
        name, tables = inspect(workdir, max_windows)
        logging.info("%s: %s is inspected", name, workdir)
        for kind, rows in tables.items():
            found.setdefault(kind, {}).setdefault(name, []).append(rows)
    merged = {
        kind: {name: average(runs) for name, runs in by_model.items()}
        for kind, by_model in found.items()
    }
    shown = {kind: to_markdown(kind, by_model) for kind, by_model in merged.items()}
    for kind, table in shown.items():
        print(f"{table}\n")
        if document:
            comparisons.replace_section(pathlib.Path(document), f"inspect {kind}", f"{table}\n")
    if json_path:
        files.replace_text(json_path, json.dumps(_finite(merged), indent=1) + "\n")
    return merged


def inspect(workdir: str, max_windows: int | None = None) -> tuple[str, dict[str, list[dict]]]:
    """The name of a run's model, and its rows by kind of table."""
    loaded = pretrained.load_weights(workdir)
    config, vocab = loaded.config, loaded.vocabulary
    if config.data.get("episodic"):
        raise errors.UsageError(f"{workdir} models lines that stand alone; inspect one of a stream")
    model = report.describe_run(config, sum(models.count_parameters(loaded.model).values()))[
        "model"
    ]
    gates = read_gates(workdir, max_windows=max_windows).rows()
    scores = read_scores(workdir, max_windows=max_windows)
    corpus = corpora.load_corpus(config.data.name, **tasks.corpus_options(config.data))
    counts = token_losses.count_tokens(corpus.train.tokens, len(vocab))
    return NAMES.get(model, model), {
        "gates": [row for row in gates if row["gate"] in GATES],
        "rounds": [row for row in gates if row["gate"] not in (*GATES, "j", "c")],
        "frequency": token_losses.by_frequency(scores, counts),
        "position": token_losses.by_position(scores, vocab.eos_id),
        "recovery": token_losses.recovery(scores.nats),
    }


def average(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Row by row, the mean of all numbers; what is no number is the same in all."""
    rows = []
    for same in zip(*runs, strict=True):
        row = dict(same[0])
        for key, value in row.items():
            if isinstance(value, float) and key not in ("below", "above"):
                row[key] = sum(each[key] for each in same) / len(same)
        rows.append(row | {"runs": len(same)})
    return rows


def to_markdown(kind: str, by_model: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One table of a kind, all models in it."""
    runs = ", ".join(f"{len_runs(rows)} of {name}" for name, rows in by_model.items() if rows)
    if kind in ("gates", "rounds"):
        columns = ["mean", "variance", "variance_over_tokens", "saturated_low", "saturated_high"]
        columns += ["q05", "q95"]
        head = ["layer, gate", "model", *(column.replace("_", " ") for column in columns)]
        lines = [
            [f"{row['layer']}, {row['gate']}", name, *(row[column] for column in columns)]
            for place in range(max(map(len, by_model.values())))
            for name, rows in by_model.items()
            for row in rows[place : place + 1]
        ]
    else:
        first, *others = by_model
        head = [_TITLES[kind], "tokens", *by_model, *(f"{first} − {name}" for name in others)]
        lines = []
        for same in zip(*by_model.values(), strict=True):
            if not any(row["tokens"] for row in same):
                continue
            gaps = [same[0]["nats"] - row["nats"] for row in same[1:]]
            lines.append([_bucket(same[0]), same[0]["tokens"], *(r["nats"] for r in same), *gaps])
    return f"{comparisons.markdown(head, lines)}\n\nRuns: {runs}."


def len_runs(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many runs an average is made of."""
    return rows[0]["runs"]


def _bucket(row: Mapping[str, Any]) -> str:
    if "above" in row:
        return f"above {row['above']:g}"
    if row["below"] == math.inf:
        return f"{row['from']:,}+"
    last = row["below"] - 1  # Of numbers of tokens.
    return f"{last:,}" if last == row["from"] else f"{row['from']:,} to {last:,}"


def _finite(value: Any) -> Any:
    """JSON has no words for numbers that are not finite: null stands for them."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_TITLES = {
    "frequency": "times in the training text",
    "position": "tokens before it in the line",
    "recovery": "loss of the token before it",
}

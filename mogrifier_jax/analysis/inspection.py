"""`--mode=inspect`: tables that compare the gates and the losses of trained runs.

The numbers of runs of the same model with different seeds are averaged. `gate_statistics.py` and
`token_losses.py` make the measurements.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import errors, files
from mogrifier_jax.analysis import documents, gate_statistics, token_losses
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import loaded_run, loading, paper_tables, scored_texts
from mogrifier_jax.training import atomic_files, scoring, turn_evaluation

NAMES = {
    "lstm": "LSTM",
    "mogrifier": "Mogrifier",
    "mlstm": "mLSTM",
    "rlstm": "RLSTM",
    "mogrifier_rlstm": "Mogrifier RLSTM",
}


def plan_splits(loaded: loaded_run.LoadedRun, *splits: str) -> list[tasks.Plan]:
    """Splits of the run's corpus, each in as many stripes as training evaluates it with."""
    task, config = scored_texts.read_splits(loaded).task, loaded.config
    lines = config.evaluation.lines_per_stripe
    plans = []
    for split in splits:
        task.check_split(split)
        stripes = turn_evaluation.num_stripes(task, split, config.data.batch_size, lines)
        plans.append(task.plan(split, stripes, window=config.data.window))
    return plans


def measure_gates(
    loaded: loaded_run.LoadedRun, plan: tasks.Plan, max_windows: int | None = None
) -> gate_statistics.GateReport:
    """The gate statistics of a run on a text."""
    analyse = gate_statistics.GateAnalysis(loaded.model, plan)
    return analyse(loaded.params, max_windows=max_windows, title="gates")


def score_tokens(
    loaded: loaded_run.LoadedRun, plan: tasks.Plan, max_windows: int | None = None
) -> scoring.TokenScores:
    """The nats of every token of a text, without dropout."""
    score = scoring.Deterministic(loaded.model, plan)
    return score(loaded.params, loaded.temperature or 1.0, max_windows, "scores")


def inspect(
    folders: Sequence[str],
    *,
    document: str | None = None,
    json_path: str | None = None,
    max_windows: int | None = None,
) -> dict[str, dict[str, list[files.JsonObject]]]:
    """Measures runs on their validation data, and prints tables.

    Args:
      folders: the workdirs of the runs.
      document: a Markdown file in which the tables are replaced.
      json_path: a file for all numbers.

    Returns:
      The rows of each kind of table, by the name of the model.
    """
    measured: dict[str, dict[str, list[documents.Rows]]] = {}
    for folder in folders:
        name, tables = measure(folder, max_windows)
        logging.info("%s: measured %s", name, folder)
        for kind, rows in tables.items():
            measured.setdefault(kind, {}).setdefault(name, []).append(rows)
    merged = {
        kind: {name: average(runs) for name, runs in by_model.items()}
        for kind, by_model in measured.items()
    }
    for kind, by_model in merged.items():
        table = to_markdown(kind, by_model)
        print(f"{table}\n")
        if document:
            documents.replace_section(pathlib.Path(document), f"inspect {kind}", f"{table}\n")
    if json_path:
        atomic_files.write_output(json_path, json.dumps(_finite(merged), indent=1) + "\n")
    return merged


def measure(
    workdir: str, max_windows: int | None = None
) -> tuple[str, dict[str, list[files.JsonObject]]]:
    """The name of the model of a run, and its rows by kind of table."""
    loaded = loading.load_run(workdir)
    config, vocab = loaded.config, loaded.vocabulary
    if config.data.get("episodic"):
        raise errors.UsageError(
            f"the run in {workdir} models independent lines, without a state that is carried from "
            "one to the next; give a run of a stream of text"
        )
    valid, train = plan_splits(loaded, "valid", "train")
    gates = measure_gates(loaded, valid, max_windows).rows()
    scores = score_tokens(loaded, valid, max_windows)
    counts = np.bincount(np.asarray(train.stream.tokens), minlength=len(vocab))
    return name_model(config), {
        "gates": [row for row in gates if row["gate"] in gate_statistics.LSTM_GATES],
        "rounds": [
            row for row in gates if row["gate"] not in (*gate_statistics.LSTM_GATES, "j", "c")
        ],
        "frequency": token_losses.by_frequency(scores, counts),
        "position": token_losses.by_position(scores, vocab.eos_id),
        "recovery": token_losses.after_losses(scores.nats),
    }


def name_model(config: config_dict.ConfigDict) -> str:
    """The name of the model of a config in tables and figures, such as LSTM or Mogrifier."""
    name = paper_tables.name_model(config)
    return NAMES.get(name, name)


def average(runs: Sequence[documents.Rows]) -> list[files.JsonObject]:
    """Averages the floats of several runs, row by row; other values are those of the first run."""
    rows = []
    for same in zip(*runs, strict=True):
        row = dict(same[0])
        for key, value in row.items():
            if isinstance(value, float) and key not in ("below", "above"):
                row[key] = sum(each[key] for each in same) / len(same)
        rows.append(row | {"runs": len(same)})
    return rows


def to_markdown(kind: str, by_model: Mapping[str, documents.Rows]) -> str:
    """The table of one kind, with all models."""
    runs = ", ".join(f"{rows[0]['runs']} of {name}" for name, rows in by_model.items() if rows)
    if kind in ("gates", "rounds"):
        columns = ["mean", "variance", "variance_over_tokens", "saturated_low", "saturated_high"]
        columns += ["q05", "q95"]
        head = ["layer, gate", "model", *(column.replace("_", " ") for column in columns)]
        lines = [
            [f"{row['layer']}, {row['gate']}", name, *(row[column] for column in columns)]
            for index in range(max(map(len, by_model.values())))
            for name, rows in by_model.items()
            for row in rows[index : index + 1]
        ]
    else:
        first, *others = by_model
        head = [_TITLES[kind], "tokens", *by_model, *(f"{first} − {name}" for name in others)]
        lines = []
        for same in zip(*by_model.values(), strict=True):
            if not any(row["tokens"] for row in same):
                continue
            gaps = [same[0]["nats"] - row["nats"] for row in same[1:]]
            lines.append(
                [
                    token_losses.label_group(same[0]),
                    same[0]["tokens"],
                    *(r["nats"] for r in same),
                    *gaps,
                ]
            )
    return f"{documents.make_table(head, lines)}\n\nRuns: {runs}."


def _finite(value: object) -> object:
    """Replaces numbers that are not finite by None, because JSON cannot represent them."""
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

"""Results beside the paper's: which of its rows a run repeats, and Markdown of several runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from mogrifier_jax import configs
from mogrifier_jax.training import metrics

# Columns of the paper's tables, and which rows of evaluation.json they are, without and with MC.
COLUMNS = (
    ("valid", ("deterministic", "mc"), "valid"),
    ("test", ("deterministic", "mc"), "test"),
    ("valid, dyneval", ("dyneval", "mc_dyneval"), "valid"),
    ("test, dyneval", ("dyneval", "mc_dyneval"), "test"),
)
KINDS = ("deterministic", "mc")


def describe_run(config: config_dict.ConfigDict, num_params: int) -> dict[str, str]:
    """The names under which the paper may have this run."""
    corpus = config.data.name
    if corpus == "mwc":
        corpus = f"mwc_{config.data.get('language') or 'en'}"
    cell, rounds = config.model.get("cell", "mogrifier_lstm"), config.model.get("rounds", 0)
    if cell == "mogrifier_lstm":
        cell = "mogrifier" if rounds else "lstm"
    # A model whose hidden size is set does not use the budget.
    solved = config.model.get("num_params") and not config.model.get("hidden_size")
    budget = config.model.num_params if solved else num_params
    # As the paper writes it; small models are named by their thousands.
    params = f"{budget / 1e6:.0f}M" if budget >= 1e6 else f"{budget / 1e3:.0f}k"
    return {"corpus": corpus, "model": cell, "params": params}


def paper_nats(run: Mapping[str, str], kind: str) -> list[float | None]:
    """The paper's nats in the four columns, None where it has nothing."""
    for row in configs.paper_numbers()["tables"].get(run["corpus"], {"rows": []})["rows"]:
        same = all(row.get(key) == run[key] for key in ("model", "params"))
        if same and row.get("evaluation") == kind and "nats" in row:
            return row["nats"]
    return [None] * len(COLUMNS)


def to_markdown(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """One table for each corpus of these contents of evaluation.json files."""
    sections = []
    for corpus in dict.fromkeys(e["run"]["corpus"] for e in evaluations):
        chosen = [e for e in evaluations if e["run"]["corpus"] == corpus]
        unit = {"ppl": "perplexity", "bpc": "bits per character", "bpb": "bits per byte"}
        head = ["model", "parameters", "evaluation", *(name for name, *_ in COLUMNS), "run"]
        lines = [
            f"## {corpus}, {unit[chosen[0]['unit']]}",
            "",
            "Ours, then in parentheses the paper's and the difference.",
            "",
            f"| {' | '.join(head)} |",
            f"| {' | '.join(['---'] * 3 + ['---:'] * len(COLUMNS) + ['---'])} |",
        ]
        for evaluation in chosen:
            lines += [_row(evaluation, kind) for kind in KINDS if _has(evaluation, kind)]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def _has(evaluation, kind: str) -> bool:
    methods = {methods[KINDS.index(kind)] for _, methods, _ in COLUMNS}
    return any(row["method"] in methods for row in evaluation["results"])


def _row(evaluation, kind: str) -> str:
    run, unit = evaluation["run"], evaluation["unit"]
    ours = {(row["method"], row["text"]): row for row in evaluation["results"]}
    cells = []
    for (_, methods, split), paper in zip(COLUMNS, paper_nats(run, kind), strict=True):
        row = ours.get((methods[KINDS.index(kind)], split))
        cells.append(_cell(row, paper, unit))
    workdir = f"`{evaluation['workdir']}`, step {evaluation['step']:,}"
    if not evaluation["finished"]:
        workdir += ", not ended"
    return f"| {' | '.join([run['model'], run['params'], kind, *cells, workdir])} |"


def _cell(row: Mapping[str, Any] | None, paper: float | None, unit: str) -> str:
    theirs = "" if paper is None else f" ({show(paper, unit)})"
    if row is None:
        return f"–{theirs}"
    if row["nats"] is None:
        return f"diverged{theirs}"
    ours = show(row["nats"], unit)
    if paper is None:
        return ours
    difference = value(row["nats"], unit) - value(paper, unit)
    sign = "−" if difference < 0 else "+"
    digits = 2 if unit == "ppl" else 4
    return f"{ours} ({show(paper, unit)}, {sign}{abs(difference):.{digits}f})"


def value(nats: float, unit: str) -> float:
    """A cross-entropy in the unit that people read it in."""
    return metrics.perplexity(nats) if unit == "ppl" else metrics.bits(nats)


def show(nats: float | None, unit: str) -> str:
    """The same as text, without the name of the unit."""
    if nats is None or not math.isfinite(nats):
        return "diverged"
    return f"{value(nats, unit):.{2 if unit == 'ppl' else 4}f}"

"""Tables of the results of a sweep, beside the paper's numbers, and differences between rows."""

from mogrifier_jax import files
from mogrifier_jax.analysis import documents, sweep_results
from mogrifier_jax.training import units


def show(score: files.JsonObject, unit: str) -> str:
    """The mean of a score, and its standard deviation if there are several seeds."""
    digits = units.digits(unit)
    spread = "" if score["spread"] is None else f" ± {score['spread']:.{digits}f}"
    return f"{score['mean']:.{digits}f}{spread}"


def to_markdown(title: str, rows: documents.Rows, x_label: str | None = None) -> str:
    """A table of the rows, their differences, and how their runs were made."""
    unit = rows[0]["unit"]
    has_x, has_paper = (any(row[key] is not None for row in rows) for key in ("x", "paper"))
    head = ["model", *([x_label or "setting"] if has_x else []), "parameters", "hidden", "seeds"]
    head += ["valid", "test", *(["paper, valid"] if has_paper else []), "minutes a run"]
    lines = []
    for row in rows:
        cells = [row["label"], *([_show_x(row["x"])] if has_x else [])]
        cells += [f"{row['num_params']:,}", str(row["hidden_size"]), str(len(row["runs"]))]
        scores = [show(row[split], unit) for split in sweep_results.SPLITS]
        if is_best(row, rows):
            scores[0] = f"**{scores[0]}**"
        cells += scores
        if has_paper:
            paper = row["paper"]
            cells.append("" if paper is None else units.number(paper, unit))
        cells.append(f"{row['seconds'] / len(row['runs']) / 60:.1f}")
        lines.append(cells)
    below = "\n\n".join(filter(None, [compare(rows, x_label), describe_runs(rows)]))
    return f"**{title}**, {units.UNITS[unit]}\n\n{documents.make_table(head, lines)}\n\n{below}\n"


def compare(rows: documents.Rows, x_label: str | None = None) -> str:
    """The differences between the first row and each other one, with their standard errors.

    If rows are points of several curves, those with the same x are compared with each other. Rows
    of fewer than two seeds have no standard error, so they are left out.
    """
    pairs = [
        (first, other)
        for first, *others in _group(rows)
        for other in others
        if min(len(first["runs"]), len(other["runs"])) > 1
    ]
    gaps = [
        [sweep_results.difference(*pair, split) for split in sweep_results.SPLITS] for pair in pairs
    ]
    if len(pairs) == 1:
        parts = [
            f"{gap:.4f} nats on {split} data (standard error {error:.4f})"
            for split, (gap, error) in zip(sweep_results.SPLITS, gaps[0], strict=True)
        ]
        return f"{_name_pair(*pairs[0], x_label)}: {', '.join(parts)}."
    lines = [
        [_name_pair(*pair, x_label), *(f"{gap:.4f} ± {error:.4f}" for gap, error in both)]
        for pair, both in zip(pairs, gaps, strict=True)
    ]
    head = ["difference in nats ± standard error", *sweep_results.SPLITS]
    return documents.make_table(head, lines) if lines else ""


def _name_pair(first: files.JsonObject, other: files.JsonObject, x_label: str | None) -> str:
    if first["label"] == other["label"]:
        return f"{x_label or 'setting'}: {_show_x(first['x'])} − {_show_x(other['x'])}"
    pair = f"{first['label']} − {other['label']}"
    same_x = first["x"] is not None and first["x"] == other["x"]
    return f"{pair}, {x_label or 'setting'} {_show_x(first['x'])}" if same_x else pair


def _group(rows: documents.Rows) -> list[list[files.JsonObject]]:
    """The rows that are compared with each other: all of them, or those with the same x."""
    labels, positions = {row["label"] for row in rows}, {row["x"] for row in rows}
    if len(labels) == len(rows) or len(positions) == len(rows):
        return [list(rows)]
    return [[row for row in rows if row["x"] == x] for x in dict.fromkeys(r["x"] for r in rows)]


def is_best(row: files.JsonObject, rows: documents.Rows) -> bool:
    """Whether a row has the best validation score of those that it is compared with."""
    (rivals,) = (group for group in _group(rows) if any(row is each for each in group))
    return len(rivals) > 1 and row["valid"]["nats"] == min(r["valid"]["nats"] for r in rivals)


def describe_runs(rows: documents.Rows) -> str:
    """The steps, batches, commits, hardware and time of all runs in a few words."""
    windows: dict[str, set[int]] = {}
    for row in rows:
        steps = f"{row['steps']:,} steps of {row['batch_size']} x"
        windows.setdefault(steps, set()).add(row["window"])
    shapes = [f"{s} {', '.join(map(str, sorted(w)))} tokens" for s, w in sorted(windows.items())]
    commits = {
        commit[:7] + "+" * commit.endswith("+changes") for r in rows for commit in r["commits"]
    }
    hardware = {each for row in rows for each in row["hardware"]}
    seconds = sum(row["seconds"] for row in rows)
    runs = sum(len(row["runs"]) for row in rows)
    return (
        f"{'; '.join(shapes)}. Commit {', '.join(sorted(commits)) or 'unknown'}; "
        f"{', '.join(sorted(hardware)) or 'hardware unknown'}; {runs} runs, "
        f"{units.span(seconds)} in all."
    )


def _show_x(x: float | str | None) -> str:
    if x is None:
        return ""
    return x if isinstance(x, str) else f"{x:g}"

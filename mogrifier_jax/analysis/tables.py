"""Tables and figures of sweeps, beside the paper's numbers: mean and spread over seeds.

For each set, a sweep writes `<set>.json` (the rows of `collect`), `<set>.md`, `<set>.png` and
`<set>_curves.png` (learning curves) into its workdir. A document such as RESULTS.md has tables
between two comments,

    <!-- sweep ablation:small rounds -->
    <!-- end -->

and `--report` replaces them. Spread is the standard deviation of the sample. Figures are
made without pyplot, which may open windows.
"""

import math
import os
import pathlib
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from mogrifier_jax import configs, errors, files
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import scoring
from mogrifier_jax.nn import models
from mogrifier_jax.training import learning_curves, metrics, runs, units, workdirs

SPLITS = ("valid", "test")
REMEDY = "restore it from a copy, or delete that folder to run it again"
RESULTS = workdirs.RESULTS | dict.fromkeys(("valid_nats", "test_nats"), files.Number(float))
RECORD = {"seconds?": files.Number(float), "hardware?": str, "diverged?": str}  # Of sweep.json.
_SCORES = {f"valid_{unit}" for unit in ("ppl", "bpc", "bpb")}

Rows = Sequence[Mapping[str, Any]]


def run_folder(workdir: str | os.PathLike, variant: str, seed: int) -> pathlib.Path:
    """The workdir of the run of a variant and a seed."""
    return pathlib.Path(workdir) / variant.replace(",", "_") / f"seed{seed}"


def collect(each: configs.Set, folders: Mapping[str, Sequence[pathlib.Path]]) -> list[dict]:
    """One row for each variant of a set that has a finished run; `folders` has all its runs.

    A row has the fields of `configs.Row` and those of `summarise`. Its `valid` and `test` have the
    `scores` of the seeds with their `mean` and `spread`, in `unit`. Their `nats` is the mean in
    nats, and `nats_of_seeds` are the scores in nats.
    """
    rows = []
    for row in each.rows:
        done = [f for f in folders[row.variant] if (f / "results.json").exists()]
        if done:
            rows.append({**row._asdict(), **summarise(done, each.unit)})
    return rows


def summarise(folders: Sequence[pathlib.Path], unit: str | None = None) -> dict[str, Any]:
    """Scores, sizes and costs of several runs of one config."""
    results = [read_results(folder) for folder in folders]
    found = [key.removeprefix("valid_") for key in results[0] if key in _SCORES]
    if not (unit or found):
        raise errors.UsageError(f"{folders[0] / 'results.json'} has no score; {REMEDY}")
    unit = unit or found[0]
    config = workdirs.read_config(folders[0])
    vocab = corpora.Vocabulary.from_json(workdirs.read_vocabulary(folders[0]))
    model = runs.make_model(config, len(vocab))
    records = [read_record(folder) for folder in folders]
    starts = [start for folder in folders for start in _read_starts(folder / "version.json")]
    summary: dict[str, Any] = {
        "unit": unit,
        "runs": ["/".join(folder.parts[-2:]) for folder in folders],
        "num_params": sum(models.count_parameters(model).values()),
        "hidden_size": model.hidden_size,
        "embedding_size": model.embedding_size,
        "batch_size": config.data.batch_size,
        "window": config.data.get("length") or config.data.window,
        "steps": config.schedule.turns * config.schedule.steps_per_turn,
        "seconds": sum(record.get("seconds", 0.0) for record in records),
        "hardware": sorted({record["hardware"] for record in records if "hardware" in record}),
        "commits": sorted({start["commit"] for start in starts if start.get("commit")}),
    }
    summary["curves"] = [_read_curve(folder) for folder in folders]
    for split in SPLITS:
        nats = [result[f"{split}_nats"] for result in results]
        scores = [units.in_unit(value, unit) for value in nats]
        spread = statistics.stdev(scores) if len(scores) > 1 else None
        mean = statistics.fmean(scores)
        summary[split] = {"scores": scores, "mean": mean, "spread": spread}
        summary[split] |= {"nats": statistics.fmean(nats), "nats_of_seeds": nats}
    return summary


def show(score: Mapping[str, Any], unit: str) -> str:
    """Mean and spread of a score as text."""
    digits = units.digits(unit)
    spread = "" if score["spread"] is None else f" ± {score['spread']:.{digits}f}"
    return f"{score['mean']:.{digits}f}{spread}"


def to_markdown(title: str, rows: Rows, x_label: str | None = None) -> str:
    """A table of the rows, then the steps, commits and hardware of their runs."""
    unit = rows[0]["unit"]
    has_x, has_paper = (any(row[key] is not None for row in rows) for key in ("x", "paper"))
    head = ["model", *([x_label or "setting"] if has_x else []), "parameters", "hidden", "seeds"]
    head += ["valid", "test", *(["paper, valid"] if has_paper else []), "minutes a run"]
    lines = []
    for row in rows:
        cells = [row["label"], *([_show_x(row["x"])] if has_x else [])]
        cells += [f"{row['num_params']:,}", str(row["hidden_size"]), str(len(row["runs"]))]
        scores = [show(row[split], unit) for split in SPLITS]
        if is_best(row, rows):
            scores[0] = f"**{scores[0]}**"
        cells += scores
        if has_paper:
            paper = row["paper"]
            cells.append("" if paper is None else units.number(paper, unit))
        cells.append(f"{row['seconds'] / len(row['runs']) / 60:.1f}")
        lines.append(cells)
    below = "\n\n".join(filter(None, [compare_two(rows), describe(rows)]))
    return f"**{title}**, {units.UNITS[unit]}\n\n{markdown(head, lines)}\n\n{below}\n"


def compare_two(rows: Rows) -> str:
    """A sentence with the difference of two rows and its standard error, if both have seeds."""
    if len(rows) != 2 or any(len(row["runs"]) < 2 for row in rows):
        return ""
    parts = []
    for split in SPLITS:
        first, second = (row[split]["nats_of_seeds"] for row in rows)
        difference = statistics.fmean(first) - statistics.fmean(second)
        error = math.sqrt(sum(statistics.variance(nats) / len(nats) for nats in (first, second)))
        parts.append(f"{difference:.4f} nats on {split} data (standard error {error:.4f})")
    return f"{rows[0]['label']} − {rows[1]['label']}: {', '.join(parts)}."


def is_best(row: Mapping[str, Any], rows: Rows) -> bool:
    """Whether a row is the best of all rows, or of those with the same x if rows make curves."""
    labels, places = {each["label"] for each in rows}, {each["x"] for each in rows}
    curves = len(labels) < len(rows) and len(places) < len(rows)
    rivals = [each for each in rows if not curves or each["x"] == row["x"]]
    return len(rivals) > 1 and row["valid"]["nats"] == min(r["valid"]["nats"] for r in rivals)


def describe(rows: Rows) -> str:
    """A sentence with the steps, batches, commits, hardware and time of all runs."""
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


def write(
    sweep: Any,
    sets: Mapping[str, configs.Set],
    workdir: str | os.PathLike,
    seeds: Sequence[int],
    report: str | None = None,
) -> None:
    """Writes tables and figures of the sets of a `sweeps.Sweep` into the workdir."""
    for name, each in sets.items():
        variants = [row.variant for row in each.rows]
        rows = collect(
            each, {v: [run_folder(workdir, v, seed) for seed in seeds] for v in variants}
        )
        if not rows:
            continue
        path = pathlib.Path(workdir) / name
        table = to_markdown(each.title, rows, each.x_label)
        workdirs.write_json(workdir, f"{name}.json", rows)
        workdirs.replace_text(path.with_suffix(".md"), table)
        try:
            learning_curves.save_figure(figure_of_set(each, rows), pathlib.Path(f"{path}.png"))
            curves = pathlib.Path(f"{path}_curves.png")
            learning_curves.save_figure(draw_curves(rows, each.title), curves)
        except ImportError:
            logging.info("no pictures of %s: matplotlib is not installed", name)
        if report:
            insert(report, f"{sweep.name} {name}", path)


def insert(report: str | os.PathLike, name: str, made: pathlib.Path) -> None:
    """Puts a table in its place in a document, or at the end of the document.

    Args:
      made: path of the table without its ending. JSON and pictures beside it are copied to
        docs/results.
    """
    report = pathlib.Path(report)
    kept = report.parent / "docs" / "results"
    kept.mkdir(parents=True, exist_ok=True)
    table = made.with_suffix(".md").read_text(encoding="utf-8")
    for ending, what in ((".json", ""), (".png", name), ("_curves.png", f"{name}, curves")):
        source, target = pathlib.Path(f"{made}{ending}"), re.sub(r"\W+", "_", name) + ending
        if source.exists():
            shutil.copyfile(source, kept / target)
            table += f"\n![{what}](docs/results/{target})\n" if what else ""
    replace_section(report, f"sweep {name}", table)


def replace_section(report: pathlib.Path, name: str, content: str) -> None:
    """Puts Markdown between the comments of this name; adds them at the end if they are missing."""
    section = f"<!-- {name} -->\n{content}<!-- end -->"
    place = re.compile(rf"<!-- {re.escape(name)} -->.*?<!-- end -->", re.DOTALL)
    with workdirs.locked(report.parent):
        text = files.read_text(report, "give another document") if report.is_file() else ""
        if place.search(text):
            text = place.sub(lambda _: section, text)
        else:
            text += f"{section}\n"
        workdirs.replace_text(report, text)


def markdown(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; numbers have four digits, and only the first column is left-aligned."""
    rows = [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in line] for line in lines]
    return scoring.markdown_table(head, rows, right=range(1, len(head)))


def _read_curve(folder: pathlib.Path) -> list[tuple[int, float]]:
    """Steps and validation nats of every evaluation of a run."""
    steps, nats = learning_curves.find_points(metrics.read_metrics(folder), "eval", "valid_nats")
    return list(zip(map(int, steps), map(float, nats), strict=True))


def read_results(folder: pathlib.Path) -> dict[str, Any]:
    """The results.json of a run that has ended."""
    return files.read_json(folder / "results.json", RESULTS, REMEDY)


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """The record that a sweep keeps of a run: seconds, hardware, and whether it diverged."""
    path = folder / "sweep.json"
    return files.read_json(path, RECORD, REMEDY) if path.exists() else {}


def _read_starts(path: pathlib.Path) -> list[dict[str, Any]]:
    schema = [{"commit?": (str, None)}]
    return files.read_json(path, schema, "delete it") if path.exists() else []


def _show_x(x: float | str | None) -> str:
    if x is None:
        return ""
    return x if isinstance(x, str) else f"{x:g}"


COLOURS = {"LSTM": "tab:orange", "Mogrifier": "tab:blue", "Mogrifier RLSTM": "tab:green"}


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns]; each panel has this size in inches."""
    from matplotlib import figure

    fig = figure.Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    return fig, axes


def figure_of_set(each: configs.Set, rows: Rows) -> Any:
    """The Matplotlib figure of a set: a panel for measured scores and one for the paper's."""
    unit = rows[0]["unit"] if rows else each.unit or "ppl"
    shown = rows or [row._asdict() for row in each.rows]
    paper = [
        (row, {"mean": units.in_unit(row["paper"], unit), "spread": None, "scores": ()})
        for row in shown
        if row["paper"] is not None
    ]
    columns = bool(rows) + bool(paper)
    fig, axes = panels(1, columns, width=4.5 if columns == 2 else 6, height=3.8)
    fig.suptitle(each.title)
    first, last = axes[0, 0], axes[0, -1]
    if paper:
        _draw(last, each, paper, unit)
        last.set_title("paper")
    if not rows:
        return fig
    _draw(first, each, [(row, row["valid"]) for row in rows], unit)
    budget = units.quantity(max(row["num_params"] for row in rows))
    seeds = sorted({len(row["runs"]) for row in rows})
    counts = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else seeds[0]
    plural = "" if seeds == [1] else "s"
    first.set_title(f"measured: {budget} parameters, {counts} seed{plural}")
    return fig


def draw_curves(rows: Rows, title: str = "") -> Any:
    """Draws validation loss over the tokens read; each seed has a line, dashed for the LSTM."""
    fig, ((axes,),) = panels(1, 1, width=7, height=3.8)
    places = dict.fromkeys(row["label"] if row["x"] is None else row["x"] for row in rows)
    others = [place for place in places if place not in COLOURS]
    colours = {place: f"C{2 + others.index(place)}" for place in others} | COLOURS
    for row in rows:
        place = row["label"] if row["x"] is None else row["x"]
        name = row["label"] if row["x"] is None else f"{row['label']}, {row['x']}"
        style = ".--" if row["label"] == "LSTM" else ".-"
        for seed, curve in enumerate(row["curves"]):
            trained = curve[1:]  # The first is from before training.
            read = [step * row["batch_size"] * row["window"] / 1e6 for step, _ in trained]
            nats = [value for _, value in trained]
            label = None if seed else name
            axes.plot(read, nats, style, color=colours[place], linewidth=1.2, label=label)
    axes.set_xlabel("tokens read, millions")
    axes.set_ylabel("validation, nats per token")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), edgecolor="none", fontsize=8)
    return fig


def _draw(axes, each: configs.Set, points, unit: str) -> None:
    """Draws one panel; `points` are pairs of a row and its score with mean, spread and seeds."""
    name = f"validation, {units.UNITS[unit]}"
    if all(row["x"] is None for row, _ in points):
        _draw_list(axes, points)
        axes.set_xlabel(name)
        axes.grid(axis="x", alpha=0.25)
    else:
        _draw_curves(axes, points)
        axes.set_ylabel(name)
        axes.set_xlabel(each.x_label or "")
        axes.grid(alpha=0.25)


def _draw_list(axes, points) -> None:
    """Draws labels from top to bottom, with a dot for each mean and a tick for each seed."""
    for place, (row, score) in enumerate(points):
        colour, seeds = COLOURS.get(row["label"], "0.4"), score["scores"]
        if len(seeds) > 1:
            axes.plot(seeds, [place] * len(seeds), "|", color=colour, alpha=0.6, markersize=9)
        mean, spread = score["mean"], score["spread"]
        axes.errorbar(mean, place, xerr=spread, fmt="o", color=colour, capsize=3)
    axes.set_yticks(range(len(points)), [row["label"] for row, _ in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.margins(x=0.12)


def _draw_curves(axes, points) -> None:
    """Draws a curve for each label; if x values are words, they are spaced in their order."""
    words = list(dict.fromkeys(row["x"] for row, _ in points if isinstance(row["x"], str)))
    labels = list(dict.fromkeys(row["label"] for row, _ in points))
    for number, label in enumerate(labels):
        chosen = [(row["x"], score) for row, score in points if row["label"] == label]
        shift = 0.12 * (number - (len(labels) - 1) / 2) if words else 0.0
        places = [words.index(x) + shift if words else x for x, _ in chosen]
        spreads = [score["spread"] or 0.0 for _, score in chosen]
        axes.errorbar(
            places,
            [score["mean"] for _, score in chosen],
            yerr=spreads if any(spreads) else None,
            fmt="o" if words else "o-",
            color=COLOURS.get(label, f"C{number + 2}"),
            capsize=3,
            label=label,
        )
    if words:
        axes.set_xticks(range(len(words)), words)
        axes.set_xlim(-0.5, len(words) - 0.5)
    else:
        axes.set_xticks(sorted({row["x"] for row, _ in points}))
    if len(labels) > 1:
        axes.legend(framealpha=0.9, edgecolor="none")

"""Pictures of comparisons: a set of variants beside the paper's numbers.

Figures are made without pyplot, which may open windows; `plots.py` has those of a single run and
`gate_plots.py` those of an analysis.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mogrifier_jax import configs
from mogrifier_jax.training import metrics

Rows = Sequence[Mapping[str, Any]]
COLOURS = {"LSTM": "tab:orange", "Mogrifier": "tab:blue"}
LABELS = {
    "ppl": "perplexity",
    "bpc": "bits per character",
    "bpb": "bits per byte",
    "nats": "nats per token",
}


def in_unit(nats: float, unit: str) -> float:
    """A cross-entropy in the unit that people read."""
    if unit == "nats":
        return nats
    return metrics.perplexity(nats) if unit == "ppl" else metrics.bits(nats)


def draw_set(each: configs.Set, rows: Rows, path: str | os.PathLike) -> None:
    """Draws the rows of `comparisons.collect`; what the paper has stands in a panel beside them."""
    fig = figure_of_set(each, rows)
    fig.savefig(path, dpi=150)


def figure_of_set(each: configs.Set, rows: Rows) -> Any:
    """The Matplotlib figure of a set: what was measured and what the paper has, or one of them."""
    from matplotlib import figure

    unit = rows[0]["unit"] if rows else each.unit or "ppl"
    shown = rows or [row._asdict() for row in each.rows]
    paper = [(r, in_unit(r["paper"], unit), None, None) for r in shown if r["paper"] is not None]
    columns = bool(rows) + bool(paper)
    fig = figure.Figure(figsize=(9 if columns == 2 else 6, 3.8), layout="constrained")
    panels = fig.subplots(1, columns, squeeze=False)[0]
    fig.suptitle(each.title)
    if paper:
        _draw(panels[-1], each, paper, unit)
        panels[-1].set_title("paper")
    if not rows:
        return fig
    ours = [(row, row["valid"]["mean"], row["valid"]["spread"], row["valid"]) for row in rows]
    _draw(panels[0], each, ours, unit)
    budget = max(row["num_params"] for row in rows)
    seeds = sorted({len(row["runs"]) for row in rows})
    counts = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else seeds[0]
    plural = "" if seeds == [1] else "s"
    panels[0].set_title(f"measured: {_millions(budget)} parameters, {counts} seed{plural}")
    return fig


def draw_curves(rows: Rows, title: str = "") -> Any:
    """Validation loss at every evaluation, a line for each seed; the LSTM's are dashed."""
    from matplotlib import figure

    fig = figure.Figure(figsize=(7, 3.8), layout="constrained")
    axes = fig.add_subplot()
    places = list(dict.fromkeys(row["variant"] if row["x"] is None else row["x"] for row in rows))
    for row in rows:
        place = row["variant"] if row["x"] is None else row["x"]
        name = row["label"] if row["x"] is None else f"{row['label']}, {row['x']}"
        style = ".--" if row["label"] == "LSTM" else ".-"
        for seed, curve in enumerate(row["curves"]):
            steps, nats = zip(*curve[1:], strict=True)  # What comes before training is noise.
            colour, label = f"C{places.index(place)}", None if seed else name
            axes.plot(steps, nats, style, color=colour, linewidth=1.2, label=label)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("validation, nats per token")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), edgecolor="none", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return fig


def _draw(axes, each: configs.Set, points, unit: str) -> None:
    """One panel; `points` are (row, mean, spread, scores of the seeds or None)."""
    name = f"validation, {LABELS[unit]}"
    if all(row["x"] is None for row, *_ in points):
        _draw_list(axes, points)
        axes.set_xlabel(name)
        axes.grid(axis="x", alpha=0.25)
    else:
        _draw_curves(axes, points)
        axes.set_ylabel(name)
        axes.set_xlabel(each.x_label or "")
        axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_list(axes, points) -> None:
    """Labels from top to bottom, a dot for each mean, small ones for the seeds."""
    for place, (row, mean, spread, scores) in enumerate(points):
        colour = COLOURS.get(row["label"], "0.4")
        if scores and len(scores["scores"]) > 1:
            seeds = scores["scores"]
            axes.plot(seeds, [place] * len(seeds), "|", color=colour, alpha=0.6, markersize=9)
        axes.errorbar(mean, place, xerr=spread, fmt="o", color=colour, capsize=3)
    axes.set_yticks(range(len(points)), [row["label"] for row, *_ in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.margins(x=0.12)


def _draw_curves(axes, points) -> None:
    """A curve for each label; words on the x axis are places in their order."""
    words = list(dict.fromkeys(row["x"] for row, *_ in points if isinstance(row["x"], str)))
    labels = list(dict.fromkeys(row["label"] for row, *_ in points))
    for number, label in enumerate(labels):
        chosen = [point for point in points if point[0]["label"] == label]
        shift = 0.12 * (number - (len(labels) - 1) / 2) if words else 0.0
        places = [words.index(r["x"]) + shift if words else r["x"] for r, *_ in chosen]
        means = [mean for _, mean, *_ in chosen]
        spreads = [spread or 0.0 for _, _, spread, _ in chosen]
        axes.errorbar(
            places,
            means,
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
        axes.set_xticks(sorted({row["x"] for row, *_ in points}))
    if len(labels) > 1:
        axes.legend(framealpha=0.9, edgecolor="none")


def _millions(count: int) -> str:
    return f"{count / 1e6:.3g}M" if count >= 1e6 else f"{count / 1e3:.3g}k"

"""Figures of the results of a sweep: scores beside the paper's, and learning curves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mogrifier_jax import configs, files
from mogrifier_jax.analysis import documents, figures
from mogrifier_jax.training import units

if TYPE_CHECKING:
    from matplotlib import axes as matplotlib_axes
    from matplotlib import figure as matplotlib_figure


def draw_scores(
    variants: configs.Set, rows: documents.Rows, title: str | None = None
) -> "matplotlib_figure.Figure":
    """Draws the scores of a set: a panel for those that were measured, and one for the paper's.

    Args:
      rows: as `sweep_results.collect` returns them; without any, only the paper's are drawn.
      title: by default the title of the set.
    """
    unit = rows[0]["unit"] if rows else variants.unit or "ppl"
    shown = rows or [row._asdict() for row in variants.rows]
    paper = [
        (row, {"mean": units.in_unit(row["paper"], unit), "spread": None, "scores": ()})
        for row in shown
        if row["paper"] is not None
    ]
    columns = bool(rows) + bool(paper)
    fig, axes = figures.make_panels(1, columns, width=4.5 if columns == 2 else 6, height=3.8)
    title = title or variants.title
    first, last = axes[0, 0], axes[0, -1]
    if paper:
        _draw_panel(last, variants, paper, unit)
        last.set_title("paper" if rows else title)
    if not rows:
        return fig
    _draw_panel(first, variants, [(row, row["valid"]) for row in rows], unit)
    budget = units.quantity(max(row["num_params"] for row in rows))
    seeds = sorted({len(row["runs"]) for row in rows})
    counts = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else seeds[0]
    plural = "" if seeds == [1] else "s"
    measured = f"measured: {budget} parameters, {counts} seed{plural}"
    if paper:
        fig.suptitle(title)
        first.set_title(measured)
    else:  # The middle of one panel is not that of the figure.
        first.set_title(f"{title}\n{measured}")
    return fig


def draw_learning_curves(rows: documents.Rows, title: str = "") -> "matplotlib_figure.Figure":
    """Draws validation loss over tokens read, with a line for each seed, dashed for the LSTM."""
    fig, ((axes,),) = figures.make_panels(1, 1, width=7, height=3.8)
    variants = dict.fromkeys(row["label"] if row["x"] is None else row["x"] for row in rows)
    others = [variant for variant in variants if variant not in figures.COLOURS]
    colours = {
        variant: f"C{len(figures.COLOURS) + k}" for k, variant in enumerate(others)
    } | figures.COLOURS
    for row in rows:
        variant = row["label"] if row["x"] is None else row["x"]
        name = row["label"] if row["x"] is None else f"{row['label']}, {row['x']}"
        style = ".--" if row["label"] == "LSTM" else ".-"
        for seed, curve in enumerate(row["curves"]):
            trained = curve[1:]  # The first point is from before training.
            millions = [step * row["batch_size"] * row["window"] / 1e6 for step, _ in trained]
            nats = [value for _, value in trained]
            label = None if seed else name
            axes.plot(millions, nats, style, color=colours[variant], linewidth=1.2, label=label)
    axes.set_xlabel("tokens read, millions")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), edgecolor="none", fontsize=8)
    return fig


Points = Sequence[tuple[files.JsonObject, files.JsonObject]]  # Rows, each with its score.


def _draw_panel(
    axes: "matplotlib_axes.Axes", variants: configs.Set, points: Points, unit: str
) -> None:
    """Draws a list of scores, or curves if the rows have an x."""
    name = f"validation, {units.UNITS[unit]}"
    if all(row["x"] is None for row, _ in points):
        _draw_list(axes, points)
        axes.set_xlabel(name)
        axes.grid(axis="x", alpha=0.25)
    else:
        _draw_curves(axes, points)
        axes.set_ylabel(name)
        axes.set_xlabel(variants.x_label or "")
        axes.grid(alpha=0.25)


def _draw_list(axes: "matplotlib_axes.Axes", points: Points) -> None:
    """Draws a line for each label, with a dot at the mean and a tick at each seed."""
    for y, (row, score) in enumerate(points):
        colour, seeds = figures.colour_of(row["label"]), score["scores"]
        if len(seeds) > 1:
            axes.plot(seeds, [y] * len(seeds), "|", color=colour, alpha=0.6, markersize=9)
        mean, spread = score["mean"], score["spread"]
        axes.errorbar(mean, y, xerr=spread, fmt="o", color=colour, capsize=3)
    axes.set_yticks(range(len(points)), [row["label"] for row, _ in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.margins(x=0.12)


def _draw_curves(axes: "matplotlib_axes.Axes", points: Points) -> None:
    """Draws a curve for each label; x values that are words are spaced evenly, in their order."""
    words = list(dict.fromkeys(row["x"] for row, _ in points if isinstance(row["x"], str)))
    labels = list(dict.fromkeys(row["label"] for row, _ in points))
    for number, label in enumerate(labels):
        chosen = [(row["x"], score) for row, score in points if row["label"] == label]
        shift = 0.12 * (number - (len(labels) - 1) / 2) if words else 0.0
        xs = [words.index(x) + shift if words else x for x, _ in chosen]
        spreads = [score["spread"] or 0.0 for _, score in chosen]
        axes.errorbar(
            xs,
            [score["mean"] for _, score in chosen],
            yerr=spreads if any(spreads) else None,
            fmt="o" if words else "o-",
            color=figures.COLOURS.get(label, f"C{len(figures.COLOURS) + number}"),
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

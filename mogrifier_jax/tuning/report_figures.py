"""Figures of a study: parallel coordinates and learning curves.

Optuna's `plot_parallel_coordinate` and `plot_intermediate_values` are not used, because they are
hard to read for studies of this size (labels overlap or are cut off, the colours of more than 20
trials repeat, and a single bad trial flattens all others), and because they read only Optuna's
storages and change pyplot's global style.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mogrifier_jax.training import learning_curves, metrics, units
from mogrifier_jax.tuning import studies, trials

NEAR = 0.15  # A trial is near the best if every setting is within this share of its range.
AT_LEAST = 3  # At least this many count as near: those with the smallest mean distance.


def draw_parallel_coordinates(
    complete: Sequence[trials.Record],
    ranges: Mapping[str, studies.Range],
    unit: str,
    folder: pathlib.Path,
) -> None:
    """Draws a line for each trial, in red if its settings are close to those of the best trial.

    Args:
      complete: the trials that have a value, the best one first.
    """
    from matplotlib import figure

    if len(complete) < 2:
        return
    best = complete[0]
    positions = np.array([[r.to_unit(t.params[n]) for n, r in ranges.items()] for t in complete])
    values = np.array([trial.nats for trial in complete])
    low, high = values.min(), np.quantile(values, 0.9)
    score = np.clip((values - low) / max(high - low, 1e-9), 0, 1)  # 0 is the best.
    distances = np.abs(positions - positions[0])
    closest = np.argsort(distances.mean(1), kind="stable")[:AT_LEAST]
    near = distances.max(1) <= NEAR
    near[closest] = True

    fig = figure.Figure(figsize=(1.5 * (len(ranges) + 1) + 1, 5), layout="constrained")
    axes = fig.add_subplot()
    xs = list(range(len(ranges) + 1))
    for i in reversed(range(len(complete))):
        line = [*positions[i], 1 - score[i]]
        style: dict[str, Any] = (
            dict(color="tab:red", linewidth=2.2 if i == 0 else 1.3, zorder=3, alpha=0.95)
            if near[i]
            else dict(color=str(0.35 + 0.5 * score[i]), linewidth=0.8, alpha=0.8)
        )
        axes.plot(xs, line, **style)
    for x in xs:
        axes.plot([x, x], [0, 1], color="0.3", linewidth=0.8, zorder=2)
    for x, limits in enumerate(ranges.values()):
        for position, y, align in ((0, -0.03, "top"), (1, 1.03, "bottom")):
            text = f"{limits.from_unit(position):g}"
            axes.text(x, y, text, ha="center", va=align, fontsize=8, color="0.3")
    for nats, y, align in ((low, 1.03, "bottom"), (high, -0.03, "top")):
        text = units.show(nats, unit) if y > 1 else f"≥ {units.show(nats, unit)}"
        axes.text(xs[-1], y, text, ha="center", va=align, fontsize=8, color="0.3")
    labels = [name.replace(".", ".\n").replace("_", " ") for name in ranges]
    axes.set_xticks(xs, [*labels, "validation\n(best on top)"], fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(-0.1, 1.1)
    axes.set_xlim(-0.3, xs[-1] + 0.4)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=10)
    axes.set_title(
        f"{len(complete)} trials; red: settings closest to the best, trial {best.number} "
        f"({best.nats:.4f} nats); darker: better",
        fontsize=10,
    )
    learning_curves.save_figure(fig, folder / "parallel_coordinates.png")


def draw_learning_curves(records: Sequence[trials.Record], unit: str, folder: pathlib.Path) -> None:
    """Draws validation cross-entropy over steps, for all trials whose folder is on this machine."""
    from matplotlib import figure

    curves = []
    for trial in records:
        lines = metrics.read_metrics(folder / trial.notes.get("folder", "-"))
        points = learning_curves.find_points(lines, "eval", "valid_nats")
        if points.size:
            curves.append((trial, points))
    if not curves:
        return
    fig = figure.Figure(figsize=(8, 4.8), layout="constrained")
    axes = fig.add_subplot()
    best = next(iter(trials.best_first([trial for trial, _ in curves])), None)
    drawn: set[str] = set()
    for trial, points in curves:
        whole = trial.outcome == "complete"
        label = "trials" if whole else "stopped early or without a value"
        style: dict[str, Any] = dict(
            color="0.65", linewidth=0.9, linestyle="-" if whole else ":", zorder=1
        )
        if best is not None and trial.number == best.number:
            style = dict(color="tab:red", linewidth=2, linestyle="-", zorder=3)
            label = f"best: trial {best.number}, {best.nats:.4f} nats, "
            label += units.show(best.nats, unit)
        axes.plot(*points, label=None if label in drawn else label, **style)
        drawn.add(label)
    # The first evaluation is of untrained weights, far above all others.
    shown = np.concatenate([nats[1:] if len(nats) > 1 else nats for _, (_, nats) in curves])
    low, high = shown.min(), np.quantile(shown, 0.98, method="lower")
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.spines["right"].set_visible(False)
    path = folder / "learning_curves.png"
    learning_curves.save_curves(axes, "validation, nats per token", path)

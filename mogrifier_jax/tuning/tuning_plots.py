"""Pictures of a study: settings in parallel coordinates, and the learning curves of its trials."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mogrifier_jax.training import metrics
from mogrifier_jax.tuning import studies, trials

NEAR = 0.15  # As close to the best as this share of every range is near it,
AT_LEAST = 3  # and so are as many of the closest, by the mean over all settings.


def parallel_coordinates(
    folder: pathlib.Path, complete: Sequence[trials.Record], studied: studies.Study, *, unit: str
) -> pathlib.Path | None:
    """One line for each trial, best first given; red are those with settings near the best."""
    from matplotlib import figure

    if len(complete) < 2:
        return None
    names, best = list(studied.ranges), complete[0]
    places = np.array([[studied.ranges[n].place(t.params[n]) for n in names] for t in complete])
    values = np.array([trial.nats for trial in complete])
    low, high = values.min(), np.quantile(values, 0.9)
    score = np.clip((values - low) / max(high - low, 1e-9), 0, 1)  # 0 is the best.
    apart = np.abs(places - places[0])
    closest = np.argsort(apart.mean(1), kind="stable")[:AT_LEAST]
    near = apart.max(1) <= NEAR
    near[closest] = True

    fig = figure.Figure(figsize=(1.5 * (len(names) + 1) + 1, 5), layout="constrained")
    axes = fig.add_subplot()
    at = list(range(len(names) + 1))
    for i in reversed(range(len(complete))):
        line = [*places[i], 1 - score[i]]
        style: dict[str, Any] = (
            dict(color="tab:red", linewidth=2.2 if i == 0 else 1.3, zorder=3, alpha=0.95)
            if near[i]
            else dict(color=str(0.35 + 0.5 * score[i]), linewidth=0.8, alpha=0.8)
        )
        axes.plot(at, line, **style)
    for x in at:
        axes.plot([x, x], [0, 1], color="0.3", linewidth=0.8, zorder=2)
    for x, name in enumerate(names):
        limits = studied.ranges[name]
        for place, side, align in ((0, -0.03, "top"), (1, 1.03, "bottom")):
            text = f"{limits.at(place):g}"
            axes.text(x, side, text, ha="center", va=align, fontsize=8, color="0.3")
    for place, side, align in ((low, 1.03, "bottom"), (high, -0.03, "top")):
        text = metrics.show(place, unit) if side > 1 else f"≥ {metrics.show(place, unit)}"
        axes.text(at[-1], side, text, ha="center", va=align, fontsize=8, color="0.3")
    labels = [name.replace(".", ".\n").replace("_", " ") for name in names]
    axes.set_xticks(at, [*labels, "validation\n(best on top)"], fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(-0.1, 1.1)
    axes.set_xlim(-0.3, at[-1] + 0.4)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=10)
    axes.set_title(
        f"{len(complete)} trials; red: settings closest to the best, trial {best.number} "
        f"({best.nats:.4f} nats); darker: better",
        fontsize=10,
    )
    path = folder / "parallel_coordinates.png"
    fig.savefig(path, dpi=150)
    return path


def learning_curves(
    folder: pathlib.Path, known: Sequence[trials.Record], *, unit: str
) -> pathlib.Path | None:
    """Validation cross-entropy over steps, of all trials whose folder is here."""
    from matplotlib import figure

    curves = {}
    for trial in known:
        records = metrics.read_metrics(folder / trial.notes.get("folder", "-"))
        points = [(r["step"], float(r["valid_nats"])) for r in records if r["kind"] == "eval"]
        points = [point for point in points if math.isfinite(point[1])]
        if points:
            curves[trial.number] = (trial, points)
    if not curves:
        return None
    fig = figure.Figure(figsize=(8, 4.8), layout="constrained")
    axes = fig.add_subplot()
    complete = [t for t, _ in curves.values() if t.outcome == "complete"]
    best = min(complete, key=lambda t: t.nats, default=None)
    drawn: set[str] = set()
    for trial, points in curves.values():
        whole = trial.outcome == "complete"
        label = "trials" if whole else "stopped early or without a value"
        style: dict[str, Any] = dict(
            color="0.65", linewidth=0.9, linestyle="-" if whole else ":", zorder=1
        )
        if best is not None and trial.number == best.number:
            style = dict(color="tab:red", linewidth=2, linestyle="-", zorder=3)
            label = f"best: trial {best.number}, {best.nats:.4f} nats, "
            label += metrics.show(best.nats, unit)
        axes.plot(*zip(*points, strict=True), label=None if label in drawn else label, **style)
        drawn.add(label)
    ends = sorted(nats for _, points in curves.values() for _, nats in points)
    low, high = ends[0], ends[int(0.98 * (len(ends) - 1))]
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("validation, nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", framealpha=0.9, edgecolor="none")
    path = folder / "learning_curves.png"
    fig.savefig(path, dpi=150)
    return path

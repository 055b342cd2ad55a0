"""Pictures of a run, made from `metrics.jsonl` (described in `metrics.py`)."""

import math
import os
import pathlib
from typing import Any

from mogrifier_jax import errors
from mogrifier_jax.training import metrics


def learning_curve(workdir: str | os.PathLike, *, unit: str = "ppl") -> pathlib.Path:
    """Draws training and validation loss over steps; returns the path of the PNG.

    Args:
      unit: of the axis on the right: "ppl", or the name of bits per token such as "bpc".
    """
    # Matplotlib is slow to import; the figure is made without pyplot, which may open windows.
    from matplotlib import figure

    workdir = pathlib.Path(workdir)
    records = metrics.read_metrics(workdir)
    train = _points(records, "train", "loss_nats")
    seen = _points(records, "eval", "train_nats")
    valid = _points(records, "eval", "valid_nats")
    if not valid and not train:
        raise errors.UsageError(f"{workdir / 'metrics.jsonl'} has no numbers yet; nothing to draw")

    fig = figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = fig.add_subplot()
    if train:
        axes.plot(*_unzip(train), color="0.75", linewidth=0.8, label="training, with dropout")
    if seen:
        axes.plot(*_unzip(seen), color="tab:orange", linewidth=1.4, label="training, evaluated")
    if valid:
        axes.plot(
            *_unzip(valid),
            color="tab:blue",
            linewidth=1.8,
            marker="." if len(valid) < 50 else None,
            label="validation",
        )
    _mark_averaging(axes, records)
    _mark_best(axes, records, unit)
    _limit(axes, train, [*seen, *valid])
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    right = axes.twinx()  # Shares the limits below, so that its ticks can be round numbers.
    right.spines["top"].set_visible(False)
    _mirror(axes, right, unit)
    right.legend(
        *axes.get_legend_handles_labels(), loc="upper right", framealpha=0.9, edgecolor="none"
    )
    path = workdir / "learning_curve.png"
    fig.savefig(path, dpi=150)
    return path


def _points(records: list[dict[str, Any]], kind: str, key: str) -> list[tuple[int, float]]:
    points = [(r["step"], float(r[key])) for r in records if r["kind"] == kind and key in r]
    return [(step, nats) for step, nats in points if math.isfinite(nats)]


def _unzip(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [nats for _, nats in points]


def _mark_averaging(axes, records: list[dict[str, Any]]) -> None:
    """A line where averaging began: at the evaluation before the first averaged one."""
    start = 0
    for record in (r for r in records if r["kind"] == "eval"):
        if record.get("averaged"):
            axes.axvline(start, color="tab:green", linestyle="--", linewidth=1, label="averaging")
            return
        start = record["step"]


def _mark_best(axes, records: list[dict[str, Any]], unit: str) -> None:
    best = [r for r in records if r["kind"] == "eval" and r.get("best")]
    if not best:
        return
    step, nats = best[-1]["step"], float(best[-1]["valid_nats"])
    label = f"best: {nats:.4f} nats, {_score(nats, unit)}"
    if "turn" in best[-1]:
        label += f", turn {best[-1]['turn']}"
    axes.plot([step], [nats], "*", markersize=11, color="tab:red", label=label, zorder=3)


def _limit(axes, train: list[tuple[int, float]], evaluated: list[tuple[int, float]]) -> None:
    """Leaves out the first fall of the loss, which would flatten all the rest."""
    curves = [sorted(nats for _, nats in points) for points in (train, evaluated) if points]
    low = min(curve[0] for curve in curves)
    high = max(curve[int(0.9 * (len(curve) - 1))] for curve in curves)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + 3 * margin)


def _mirror(axes, right, unit: str) -> None:
    """Labels the right axis in perplexity or bits, at round values."""
    from matplotlib import ticker

    low, high = axes.get_ylim()
    right.set_ylim(low, high)
    locator: ticker.Locator = ticker.MaxNLocator(7, steps=[1, 2, 5, 10])
    if unit == "ppl":
        if high - low > 1.5:
            locator = ticker.LogLocator(subs=(1, 2, 5))
        shown = locator.tick_values(math.exp(low), math.exp(high))
        ticks = [(math.log(value), f"{value:g}") for value in shown if value > 0]
        right.set_ylabel("perplexity")
    else:
        shown = locator.tick_values(metrics.bits(low), metrics.bits(high))
        ticks = [(value * math.log(2), f"{value:g}") for value in shown]
        right.set_ylabel(f"bits per token ({unit})")
    ticks = [(place, text) for place, text in ticks if low <= place <= high]
    right.set_yticks([place for place, _ in ticks], [text for _, text in ticks])


def _score(nats: float, unit: str) -> str:
    if unit == "ppl":
        return f"perplexity {metrics.perplexity(nats):.2f}"
    return f"{metrics.bits(nats):.4f} {unit}"

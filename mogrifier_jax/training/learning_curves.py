"""The picture `learning_curve.png` of a run, drawn from its `metrics.jsonl`."""

import array
import math
import os
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import config_dict

from mogrifier_jax import errors, files
from mogrifier_jax.training import atomic_files, metrics, units, workdirs

if TYPE_CHECKING:
    from matplotlib import axes as matplotlib_axes
    from matplotlib import figure as matplotlib_figure


def draw(workdir: str | os.PathLike, *, unit: str = "ppl") -> pathlib.Path:
    """Draws training and validation loss over steps; returns the path of the PNG.

    Args:
      unit: of the axis on the right: "ppl", or the name of bits per token such as "bpc".
    """
    # Matplotlib is slow to import; the figure is made without pyplot, which may open windows.
    from matplotlib import figure

    workdir = pathlib.Path(workdir)
    train, records = read_curves(workdir)
    seen = find_points(records, "eval", "train_nats")
    valid = find_points(records, "eval", "valid_nats")
    if not valid.size and not train.size:
        raise errors.UsageError(f"{workdir / 'metrics.jsonl'} has no numbers yet; nothing to draw")

    path = workdir / "config.json"
    config = workdirs.read_config(workdir) if path.exists() else config_dict.ConfigDict()
    fig = figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = fig.add_subplot()
    if "data" in config:
        title = f"{_name_text(config.data)}: loss in nats and {units.UNITS[unit]}"
        axes.set_title(title, parse_math=False)  # Names of files may have dollar signs.
    if train.size:
        label = "training, with dropout" if _has_dropout(config) else "training, step by step"
        axes.plot(*train, color="0.75", linewidth=0.8, label=label)
    if seen.size:
        axes.plot(*seen, color="tab:orange", linewidth=1.4, label="training, evaluated")
    if valid.size:
        marker = "." if valid.shape[1] < 50 else None
        axes.plot(*valid, color="tab:blue", linewidth=1.8, marker=marker, label="validation")
    _mark_averaging(axes, records)
    _mark_best(axes, records, unit)
    _limit(axes, train[1], np.concatenate([seen[1], valid[1]]))
    _add_right_axis(axes, unit)
    return save_curves(axes, "nats per token", workdir / "learning_curve.png")


def _name_text(data: config_dict.ConfigDict) -> str:
    """The name of the corpus, or of the file that is somebody's own text."""
    path = data.get("path") or data.get("train")
    name = pathlib.Path(path).name if data.name == "text" and path else data.name
    return name.encode(errors="replace").decode()  # Fonts have no surrogates.


def _has_dropout(config: config_dict.ConfigDict) -> bool:
    return any(config.get("dropout", {}).values())


def read_curves(workdir: pathlib.Path) -> tuple[np.ndarray, list[files.JsonObject]]:
    """Steps and finite losses of training, [2, N], and all other records, which are few."""
    path, points, records = workdir / "metrics.jsonl", array.array("d"), []
    for _, record in metrics.read_lines(path) if path.exists() else ():
        if record["kind"] != "train":
            records.append(record)
        elif "loss_nats" in record:
            points.extend((record["step"], float(record["loss_nats"])))
    pairs = np.array(points).reshape(-1, 2).T
    return pairs[:, np.isfinite(pairs[1])], records


def save_curves(axes: "matplotlib_axes.Axes", label: str, path: pathlib.Path) -> pathlib.Path:
    """Labels the axes of curves over steps, and writes the picture."""
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.legend(loc="upper right", framealpha=0.9, edgecolor="none")
    figure: Any = axes.figure  # Which may be part of a larger figure, but is not here.
    return save_figure(figure, path)


def save_figure(figure: "matplotlib_figure.Figure", path: pathlib.Path) -> pathlib.Path:
    """Writes a picture, whole or not at all."""
    with atomic_files.replacing(path) as file:
        figure.savefig(file, dpi=150, format="png")
    return path


def find_points(records: list[files.JsonObject], kind: str, key: str) -> np.ndarray:
    """Steps and finite nats of the records of a kind, [2, N]."""
    points = [(r["step"], float(r[key])) for r in records if r["kind"] == kind and key in r]
    pairs = np.array(points).reshape(-1, 2).T
    return pairs[:, np.isfinite(pairs[1])]


def _mark_averaging(axes: "matplotlib_axes.Axes", records: list[files.JsonObject]) -> None:
    """A line where averaging began: at the evaluation before the first averaged one."""
    start = 0
    for record in (r for r in records if r["kind"] == "eval"):
        if record.get("averaged"):
            axes.axvline(start, color="tab:green", linestyle="--", linewidth=1, label="averaging")
            return
        start = record["step"]


def _mark_best(axes: "matplotlib_axes.Axes", records: list[files.JsonObject], unit: str) -> None:
    best = [r for r in records if r["kind"] == "eval" and r.get("best") and "valid_nats" in r]
    if not best:
        return
    step, nats = best[-1]["step"], float(best[-1]["valid_nats"])
    label = f"best: {nats:.4f} nats, {units.show(nats, unit)}"
    if "turn" in best[-1]:
        label += f", turn {best[-1]['turn']}"
    axes.plot([step], [nats], "*", markersize=11, color="tab:red", label=label, zorder=3)


def _limit(axes: "matplotlib_axes.Axes", *curves: np.ndarray) -> None:
    """Leaves out the first fall of the loss, which would flatten all the rest."""
    curves = tuple(nats for nats in curves if nats.size)
    low = min(nats.min() for nats in curves)
    high = max(np.quantile(nats, 0.9, method="lower") for nats in curves)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + 3 * margin)


def _add_right_axis(axes: "matplotlib_axes.Axes", unit: str) -> None:
    """The same scale in perplexity or bits, with ticks at round values."""
    from matplotlib import ticker

    def to_nats(score: Any) -> Any:
        if unit == "ppl":
            return np.log(np.maximum(score, 1e-9))  # A tick at 0 is asked for, and not shown.
        return score * math.log(2)

    to_score: Any = np.exp if unit == "ppl" else units.bits
    right = axes.secondary_yaxis("right", functions=(to_score, to_nats))
    right.set_ylabel("perplexity" if unit == "ppl" else f"bits per token ({unit})")
    low, high = axes.get_ylim()
    if unit == "ppl" and high - low > 1.5:
        right.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    else:
        right.yaxis.set_major_locator(ticker.MaxNLocator(7, steps=[1, 2, 5, 10]))
    right.yaxis.set_major_formatter("{x:g}")

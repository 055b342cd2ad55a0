"""Pictures of an analysis: gates, what they do to a sentence, and where models err.

Each function returns a Matplotlib figure, made without pyplot. Where several models are compared
they come as a mapping from name to result, and names have the colours of `figures.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mogrifier_jax.analysis import figures, gating

Rows = Sequence[Mapping[str, Any]]


def draw_histograms(
    reports: Mapping[str, gating.Report], gates: Sequence[str] = ("f", "i", "o")
) -> Any:
    """The distribution of each gate's values, layers from top to bottom."""
    layers = sorted({layer + 1 for report in reports.values() for layer, _ in report.summaries})
    fig, panels = _panels(len(layers), len(gates), width=3.0, height=2.2)
    for row, layer in enumerate(layers):
        for column, gate in enumerate(gates):
            axes = panels[row][column]
            for name, report in reports.items():
                edges, shares = report.histogram(layer, gate)
                density = shares / np.diff(edges)
                axes.stairs(density, edges, color=_colour(name), label=name, linewidth=1.5)
            axes.set_title(f"layer {layer}, {_NAMES.get(gate, gate)}", fontsize=10)
            axes.set_yticks([])
            axes.set_ylim(bottom=0)
            axes.spines["left"].set_visible(False)
            if row == len(layers) - 1:
                axes.set_xlabel("value of the gate")
    _legend(panels[0][-1])
    return fig


def draw_saturation(
    reports: Mapping[str, gating.Report], gates: Sequence[str] = ("f", "i", "o"), layer: int = 1
) -> Any:
    """How much of the time each unit is saturated: closed to the right, open upwards."""
    fig, panels = _panels(1, len(gates), width=3.0, height=3.0)
    for axes, gate in zip(panels[0], gates, strict=True):
        for name, report in reports.items():
            found = report.summaries[layer - 1, gate]
            shares = found.low / found.count, found.high / found.count
            axes.plot(*shares, ".", color=_colour(name), label=name, alpha=0.6, markersize=5)
        axes.set_title(f"layer {layer}, {_NAMES.get(gate, gate)}", fontsize=10)
        axes.set_xlabel("time closed (below 0.1)")
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.plot([0, 1], [1, 0], color="0.8", linewidth=0.8, zorder=0)
    panels[0][0].set_ylabel("time open (above 0.9)")
    _legend(panels[0][-1])
    return fig


def draw_ranges(report: gating.Report) -> Any:
    """Where the gates of each round work nine times of ten, and their means."""
    names = [*(f"round{number + 1}" for number in range(report.rounds)), "x_scale", "h_scale"]
    rows = [row for row in report.rows() if row["gate"] in names]
    rows.sort(key=lambda row: names.index(row["gate"]))
    layers = sorted({row["layer"] for row in rows})
    fig, panels = _panels(1, len(layers), width=4.0, height=2.8)
    for axes, layer in zip(panels[0], layers, strict=True):
        chosen = [row for row in rows if row["layer"] == layer]
        for place, row in enumerate(chosen):
            scale = row["gate"].endswith("scale")
            colour = "tab:blue" if scale else "0.4"
            axes.barh(place, row["q95"] - row["q05"], 0.4, row["q05"], color=colour, alpha=0.4)
            axes.plot(row["mean"], place, "o", color=colour)
        axes.axvline(1, color="0.7", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(chosen)), [_label_round(row["gate"]) for row in chosen])
        axes.set_ylim(len(chosen) - 0.5, -0.5)
        axes.set_xlabel("factor: mean, 5% to 95%")
        axes.set_title(f"layer {layer}", fontsize=10)
    return fig


def draw_heat_map(tokens: Sequence[str], scale: np.ndarray, *, units: int = 40) -> Any:
    """By how much the units that vary most are scaled while a text is read; scale [N, U]."""
    from matplotlib import colors

    logs = np.log2(np.maximum(scale, 2.0**-20))
    chosen = np.argsort(logs.var(0))[::-1][:units]
    shown = logs[:, chosen[np.argsort(logs[:, chosen].mean(0))]].T
    reach = min(4.0, float(np.abs(shown).max())) or 1.0  # Beyond 16 times, more is the same.
    fig, panels = _panels(1, 1, width=min(12.0, 2.5 + 0.16 * len(tokens)), height=3.6)
    axes = panels[0][0]
    norm = colors.TwoSlopeNorm(0.0, -reach, reach)
    image = axes.imshow(shown, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    axes.set_xticks(range(len(tokens)), [token.replace(" ", "␣") for token in tokens])
    axes.tick_params(axis="x", length=0, labelsize=8, rotation=90 if _long(tokens) else 0)
    axes.set_yticks([])
    axes.set_ylabel(f"{shown.shape[0]} units, sorted")
    bar = fig.colorbar(image, ax=axes, pad=0.01, extend="both")
    bar.set_label("log2 of the factor")
    return fig


def draw_strengths(rows: Rows, top: int = 15) -> Any:
    """The tokens with the strongest and the weakest gating, of `Report.token_rows`."""
    chosen = [*rows[:top], *rows[-top:]] if len(rows) > 2 * top else list(rows)
    fig, panels = _panels(1, 1, width=6.0, height=0.9 + 0.2 * len(chosen))
    axes = panels[0][0]
    places = np.arange(len(chosen))
    for key, colour, label in (("x_strength", "tab:blue", "x"), ("h_strength", "tab:green", "h")):
        axes.plot([row[key] for row in chosen], places, "o", color=colour, label=label)
    axes.set_yticks(places, [f"{row['token']!r}  ({row['count']:,})" for row in chosen], fontsize=8)
    axes.set_ylim(len(chosen) - 0.5, -0.5)
    if len(chosen) < len(rows):
        axes.axhline(top - 0.5, color="0.7", linewidth=0.8)
    axes.set_xlabel("mean |log2 factor| when the token is read")
    _legend(axes)
    return fig


def draw_losses(losses: Mapping[str, Rows], x_label: str) -> Any:
    """Mean loss by bucket on the left; what the others lose to the last model on the right.

    Bars are standard errors as of independent means: the models err together, so they are wide.
    """
    fig, panels = _panels(1, 2, width=4.2, height=3.0)
    left, right = panels[0]
    *others, last = losses
    labels = [_bucket(row) for row in losses[last]]
    places = np.arange(len(labels))
    for name, rows in losses.items():
        left.plot(places, [row["nats"] for row in rows], "o-", color=_colour(name), label=name)
    for name in others:
        gaps = [a["nats"] - b["nats"] for a, b in zip(losses[name], losses[last], strict=True)]
        errors = [
            np.hypot(a["error"], b["error"])
            for a, b in zip(losses[name], losses[last], strict=True)
        ]
        right.errorbar(places, gaps, yerr=errors, fmt="o", color=_colour(name), capsize=3)
    right.axhline(0, color="0.7", linewidth=0.8)
    left.set_ylabel("nats per token")
    right.set_ylabel(f"{', '.join(others)} minus {last}, nats")
    for axes in (left, right):
        axes.set_xticks(places, labels, rotation=30, ha="right", fontsize=8)
        axes.set_xlabel(x_label)
    _legend(left)
    return fig


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib import figure

    fig = figure.Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = fig.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return fig, panels


def _legend(axes) -> None:
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9)


def _colour(name: str) -> str:
    return figures.COLOURS.get(name, "0.4")


def _bucket(row: Mapping[str, Any]) -> str:
    if "above" in row:
        return f"> {row['above']:g}"
    low, high = row["from"], row["below"]
    if high == np.inf:
        return f"{low:,}+"
    return f"{low:,}" if high == low + 1 else f"{low:,}–{high - 1:,}"


def _label_round(gate: str) -> str:
    if gate.startswith("round"):
        number = int(gate.removeprefix("round"))
        return f"round {number}, of {'x' if number % 2 else 'h'}"
    return f"all rounds, of {gate[0]}"


def _long(tokens: Sequence[str]) -> bool:
    return max(map(len, tokens)) > 2


_NAMES = {"f": "forget gate f", "i": "input gate i", "o": "output gate o", "j": "candidate j"}

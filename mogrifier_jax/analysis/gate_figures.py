"""Figures of gate statistics. One that compares models takes a mapping from name to report."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mogrifier_jax.analysis import documents, figures, gate_statistics

if TYPE_CHECKING:
    from matplotlib import figure as matplotlib_figure


_NAMES = {"f": "forget gate f", "i": "input gate i", "o": "output gate o", "j": "candidate j"}


def draw_histograms(
    reports: Mapping[str, gate_statistics.GateReport],
    gates: Sequence[str] = gate_statistics.LSTM_GATES,
    title: str = "",
) -> "matplotlib_figure.Figure":
    """Draws the distribution of the values of each gate, with a row of panels for each layer."""
    layers = sorted({layer + 1 for report in reports.values() for layer, _ in report.summaries})
    fig, panels = figures.make_panels(len(layers), len(gates), width=3.0, height=2.2)
    fig.suptitle(title)
    for row, layer in enumerate(layers):
        for column, gate in enumerate(gates):
            axes = panels[row][column]
            for name, report in reports.items():
                edges, shares = report.histogram(layer, gate)
                density = shares / np.diff(edges)
                axes.stairs(
                    density, edges, color=figures.colour_of(name), label=name, linewidth=1.5
                )
            axes.set_title(f"layer {layer}, {_NAMES.get(gate, gate)}", fontsize=10)
            axes.set_yticks([])
            axes.set_ylim(bottom=0)
            axes.spines["left"].set_visible(False)
            if row == len(layers) - 1:
                axes.set_xlabel("value of the gate")
    figures.add_legend(panels[0][-1])
    return fig


def draw_saturation(
    reports: Mapping[str, gate_statistics.GateReport], layer: int = 1, title: str = ""
) -> "matplotlib_figure.Figure":
    """Draws each unit as a dot: the share of tokens at which it is closed, and at which open."""
    gates = gate_statistics.LSTM_GATES
    fig, panels = figures.make_panels(1, len(gates), width=3.0, height=3.0)
    fig.suptitle(title)
    for axes, gate in zip(panels[0], gates, strict=True):
        for name, report in reports.items():
            summary = report.summaries[layer - 1, gate]
            shares = summary.low / summary.count, summary.high / summary.count
            axes.plot(
                *shares, ".", color=figures.colour_of(name), label=name, alpha=0.6, markersize=5
            )
        axes.set_title(f"layer {layer}, {_NAMES.get(gate, gate)}", fontsize=10)
        axes.set_xlabel("share of tokens, closed (< 0.1)")
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.plot([0, 1], [1, 0], color="0.8", linewidth=0.8, zorder=0)
    panels[0][0].set_ylabel("share of tokens, open (> 0.9)")
    figures.add_legend(panels[0][-1])
    return fig


def draw_ranges(report: gate_statistics.GateReport, title: str = "") -> "matplotlib_figure.Figure":
    """Draws the mean of the gates of each round and the range that holds 90% of their values."""
    names = [*(f"round{number + 1}" for number in range(report.rounds)), "x_scale", "h_scale"]
    rows = [row for row in report.rows() if row["gate"] in names]
    rows.sort(key=lambda row: names.index(row["gate"]))
    layers = sorted({row["layer"] for row in rows})
    fig, panels = figures.make_panels(1, len(layers), width=4.0, height=2.8)
    fig.suptitle(title)
    for axes, layer in zip(panels[0], layers, strict=True):
        chosen = [row for row in rows if row["layer"] == layer]
        for y, row in enumerate(chosen):
            scale = row["gate"].endswith("scale")
            colour = "tab:blue" if scale else "0.4"
            axes.barh(y, row["q95"] - row["q05"], 0.4, row["q05"], color=colour, alpha=0.4)
            axes.plot(row["mean"], y, "o", color=colour)
        axes.axvline(1, color="0.7", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(chosen)), [_label_round(row["gate"]) for row in chosen])
        axes.set_ylim(len(chosen) - 0.5, -0.5)
        axes.set_xlabel("factor: mean, 5% to 95%")
        axes.set_title(f"layer {layer}", fontsize=10)
    return fig


def draw_heat_map(
    tokens: Sequence[str], scale: np.ndarray, *, units: int = 40, title: str = ""
) -> "matplotlib_figure.Figure":
    """Draws the factors `scale` [N, U] at each of N tokens, for the units that vary most."""
    from matplotlib import colors

    logs = np.log2(np.maximum(scale, 2.0**-20))
    chosen = np.argsort(logs.var(0))[::-1][:units]
    shown = logs[:, chosen[np.argsort(logs[:, chosen].mean(0))]].T
    reach = min(4.0, float(np.abs(shown).max())) or 1.0  # Colours saturate at a factor of 16.
    fig, panels = figures.make_panels(1, 1, width=min(12.0, 2.5 + 0.16 * len(tokens)), height=3.6)
    axes = panels[0][0]
    norm = colors.TwoSlopeNorm(0.0, -reach, reach)
    image = axes.imshow(shown, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    axes.set_xticks(range(len(tokens)), [token.replace(" ", "␣") for token in tokens])
    long = max(map(len, tokens)) > 2
    axes.tick_params(axis="x", length=0, labelsize=8, rotation=90 if long else 0)
    axes.set_yticks([])
    axes.set_title(title)
    axes.set_ylabel(f"{shown.shape[0]} units, sorted by mean")
    bar = fig.colorbar(image, ax=axes, pad=0.01, extend="both")
    bar.set_label("log2 of the factor")
    return fig


def draw_strengths(
    rows: documents.Rows, top: int = 15, title: str = ""
) -> "matplotlib_figure.Figure":
    """Draws the first and the last `top` tokens of `GateReport.token_rows`."""
    chosen = [*rows[:top], *rows[-top:]] if len(rows) > 2 * top else list(rows)
    fig, panels = figures.make_panels(1, 1, width=6.0, height=0.9 + 0.2 * len(chosen))
    axes = panels[0][0]
    ys = np.arange(len(chosen))
    axes.set_title(title)
    for key, colour, label in (("x_strength", "tab:blue", "x"), ("h_strength", "tab:green", "h")):
        axes.plot([row[key] for row in chosen], ys, "o", color=colour, label=label)
    axes.set_yticks(ys, [f"{row['token']!r}  ({row['count']:,})" for row in chosen], fontsize=8)
    axes.set_ylim(len(chosen) - 0.5, -0.5)
    if len(chosen) < len(rows):
        axes.axhline(top - 0.5, color="0.7", linewidth=0.8)
    axes.set_xlabel("mean |log2 factor| when the token is read")
    figures.add_legend(axes)
    return fig


def _label_round(gate: str) -> str:
    if gate.startswith("round"):
        number = int(gate.removeprefix("round"))
        return f"round {number}, of {'x' if number % 2 else 'h'}"
    return f"all rounds, of {gate[0]}"

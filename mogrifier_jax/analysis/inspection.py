"""`--mode=inspect`: gates and losses of trained runs, side by side.

The numbers of runs of the same model with different seeds are averaged. `gating.py` measures. The
figures are made without pyplot. A figure that compares models takes a mapping from name to result.
`tables.COLOURS` gives the colour of each name.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.analysis import gating, tables
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import pretrained, scoring
from mogrifier_jax.training import evaluate, workdirs

NAMES = {
    "lstm": "LSTM",
    "mogrifier": "Mogrifier",
    "mlstm": "mLSTM",
    "rlstm": "RLSTM",
    "mogrifier_rlstm": "Mogrifier RLSTM",
}
GATES = ("f", "i", "o")


class Opened(NamedTuple):
    """The best weights of a run, and the splits of its corpus."""

    loaded: pretrained.Pretrained
    texts: pretrained.Texts

    def plan(self, split: str) -> tasks.Plan:
        """A split in as many stripes as training evaluates it with."""
        self.texts.check(split)
        config = self.loaded.config
        lines = config.evaluation.lines_per_stripe
        stripes = evaluate.num_stripes(self.texts, split, config.data.batch_size, lines)
        return self.texts.plan(split, stripes, window=config.data.window)

    def gates(self, split: str = "valid", max_windows: int | None = None) -> gating.GateReport:
        """Gate statistics on a split."""
        read = gating.GateAnalysis(self.loaded.model, self.plan(split))
        return read(self.loaded.params, max_windows=max_windows, title=split)

    def scores(self, split: str = "valid", max_windows: int | None = None) -> evaluate.TokenScores:
        """The nats of every token of a split, without dropout."""
        run = evaluate.Deterministic(self.loaded.model, self.plan(split))
        return run(self.loaded.params, self.loaded.temperature or 1.0, max_windows, split)


def open_run(workdir: str | os.PathLike) -> Opened:
    """Loads the weights of a run and reads its corpus."""
    loaded = pretrained.load_weights(workdir)
    return Opened(loaded, pretrained.read_splits(loaded))


def run(
    folders: Sequence[str],
    *,
    document: str | None = None,
    json_path: str | None = None,
    max_windows: int | None = None,
) -> dict[str, Any]:
    """Inspects runs on their validation data and prints tables.

    Args:
      document: a Markdown file; its tables between comments are replaced.
      json_path: a file to which all numbers are written.
    """
    found: dict[str, dict[str, list]] = {}
    for folder in folders:
        name, measured = inspect(folder, max_windows)
        logging.info("%s: %s is inspected", name, folder)
        for kind, rows in measured.items():
            found.setdefault(kind, {}).setdefault(name, []).append(rows)
    merged = {
        kind: {name: average(runs) for name, runs in by_model.items()}
        for kind, by_model in found.items()
    }
    shown = {kind: to_markdown(kind, by_model) for kind, by_model in merged.items()}
    for kind, table in shown.items():
        print(f"{table}\n")
        if document:
            tables.replace_section(pathlib.Path(document), f"inspect {kind}", f"{table}\n")
    if json_path:
        workdirs.replace_text(json_path, json.dumps(_finite(merged), indent=1) + "\n")
    return merged


def inspect(workdir: str, max_windows: int | None = None) -> tuple[str, dict[str, list[dict]]]:
    """The name of a run's model, and its rows by kind of table."""
    opened = open_run(workdir)
    config, vocab = opened.loaded.config, opened.loaded.vocabulary
    if config.data.get("episodic"):
        raise errors.UsageError(f"{workdir} models lines that stand alone; give a run of a stream")
    gates = opened.gates("valid", max_windows).rows()
    scores = opened.scores("valid", max_windows)
    train = np.asarray(opened.plan("train").stream.tokens)
    counts = np.bincount(train, minlength=len(vocab))
    return name_model(config), {
        "gates": [row for row in gates if row["gate"] in GATES],
        "rounds": [row for row in gates if row["gate"] not in (*GATES, "j", "c")],
        "frequency": gating.by_frequency(scores, counts),
        "position": gating.by_position(scores, vocab.eos_id),
        "recovery": gating.recovery(scores.nats),
    }


def name_model(config: config_dict.ConfigDict) -> str:
    """The name of a run's model in tables, such as LSTM or Mogrifier."""
    name = scoring.name_model(config)
    return NAMES.get(name, name)


def average(runs: Sequence[tables.Rows]) -> list[dict[str, Any]]:
    """Averages the numbers of several runs, row by row; other values are the same in all runs."""
    rows = []
    for same in zip(*runs, strict=True):
        row = dict(same[0])
        for key, value in row.items():
            if isinstance(value, float) and key not in ("below", "above"):
                row[key] = sum(each[key] for each in same) / len(same)
        rows.append(row | {"runs": len(same)})
    return rows


def to_markdown(kind: str, by_model: Mapping[str, tables.Rows]) -> str:
    """The table of one kind with all models."""
    runs = ", ".join(f"{rows[0]['runs']} of {name}" for name, rows in by_model.items() if rows)
    if kind in ("gates", "rounds"):
        columns = ["mean", "variance", "variance_over_tokens", "saturated_low", "saturated_high"]
        columns += ["q05", "q95"]
        head = ["layer, gate", "model", *(column.replace("_", " ") for column in columns)]
        lines = [
            [f"{row['layer']}, {row['gate']}", name, *(row[column] for column in columns)]
            for place in range(max(map(len, by_model.values())))
            for name, rows in by_model.items()
            for row in rows[place : place + 1]
        ]
    else:
        first, *others = by_model
        head = [_TITLES[kind], "tokens", *by_model, *(f"{first} − {name}" for name in others)]
        lines = []
        for same in zip(*by_model.values(), strict=True):
            if not any(row["tokens"] for row in same):
                continue
            gaps = [same[0]["nats"] - row["nats"] for row in same[1:]]
            lines.append([_bucket(same[0]), same[0]["tokens"], *(r["nats"] for r in same), *gaps])
    return f"{tables.markdown(head, lines)}\n\nRuns: {runs}."


def _bucket(row: Mapping[str, Any], above: str = "above ", to: str = " to ") -> str:
    """The label of a row's group of tokens; figures give shorter words for `above` and `to`."""
    if "above" in row:
        return f"{above}{row['above']:g}"
    if row["below"] == math.inf:
        return f"{row['from']:,}+"
    last = row["below"] - 1
    return f"{last:,}" if last == row["from"] else f"{row['from']:,}{to}{last:,}"


def _finite(value: Any) -> Any:
    """Replaces numbers that are not finite by None, because JSON has no words for them."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_TITLES = {
    "frequency": "times in the training text",
    "position": "tokens before it in the line",
    "recovery": "loss of the token before it",
}


def draw_histograms(reports: Mapping[str, gating.GateReport], gates: Sequence[str] = GATES) -> Any:
    """Draws the distribution of each gate's values, layers from top to bottom."""
    layers = sorted({layer + 1 for report in reports.values() for layer, _ in report.summaries})
    fig, panels = tables.panels(len(layers), len(gates), width=3.0, height=2.2)
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


def draw_saturation(reports: Mapping[str, gating.GateReport], layer: int = 1) -> Any:
    """Draws each unit as a dot: share of time closed to the right, share of time open upwards."""
    fig, panels = tables.panels(1, len(GATES), width=3.0, height=3.0)
    for axes, gate in zip(panels[0], GATES, strict=True):
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


def draw_ranges(report: gating.GateReport) -> Any:
    """Draws the range of nine of ten values of each round's gates, and their means."""
    names = [*(f"round{number + 1}" for number in range(report.rounds)), "x_scale", "h_scale"]
    rows = [row for row in report.rows() if row["gate"] in names]
    rows.sort(key=lambda row: names.index(row["gate"]))
    layers = sorted({row["layer"] for row in rows})
    fig, panels = tables.panels(1, len(layers), width=4.0, height=2.8)
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
    """Draws by how much a text scales the units that vary most; `scale` is [N, U]."""
    from matplotlib import colors

    logs = np.log2(np.maximum(scale, 2.0**-20))
    chosen = np.argsort(logs.var(0))[::-1][:units]
    shown = logs[:, chosen[np.argsort(logs[:, chosen].mean(0))]].T
    reach = min(4.0, float(np.abs(shown).max())) or 1.0  # The colours end at a factor of 16.
    fig, panels = tables.panels(1, 1, width=min(12.0, 2.5 + 0.16 * len(tokens)), height=3.6)
    axes = panels[0][0]
    norm = colors.TwoSlopeNorm(0.0, -reach, reach)
    image = axes.imshow(shown, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    axes.set_xticks(range(len(tokens)), [token.replace(" ", "␣") for token in tokens])
    long = max(map(len, tokens)) > 2
    axes.tick_params(axis="x", length=0, labelsize=8, rotation=90 if long else 0)
    axes.set_yticks([])
    axes.set_ylabel(f"{shown.shape[0]} units, sorted")
    bar = fig.colorbar(image, ax=axes, pad=0.01, extend="both")
    bar.set_label("log2 of the factor")
    return fig


def draw_strengths(rows: tables.Rows, top: int = 15) -> Any:
    """Draws the strongest and the weakest tokens of `GateReport.token_rows`."""
    chosen = [*rows[:top], *rows[-top:]] if len(rows) > 2 * top else list(rows)
    fig, panels = tables.panels(1, 1, width=6.0, height=0.9 + 0.2 * len(chosen))
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


def draw_losses(losses: Mapping[str, tables.Rows], x_label: str) -> Any:
    """Draws mean losses by group on the left, and differences to the last model on the right.

    The bars are standard errors of independent means. They are too wide, because the models
    make errors at the same tokens.
    """
    fig, panels = tables.panels(1, 2, width=4.2, height=3.0)
    left, right = panels[0]
    *others, last = losses
    labels = [_bucket(row, "> ", "–") for row in losses[last]]
    places = np.arange(len(labels))
    for name, rows in losses.items():
        left.plot(places, [row["nats"] for row in rows], "o-", color=_colour(name), label=name)
    for name in others:
        pairs = list(zip(losses[name], losses[last], strict=True))
        gaps = [a["nats"] - b["nats"] for a, b in pairs]
        errors = [np.hypot(a["error"], b["error"]) for a, b in pairs]
        right.errorbar(places, gaps, yerr=errors, fmt="o", color=_colour(name), capsize=3)
    right.axhline(0, color="0.7", linewidth=0.8)
    left.set_ylabel("nats per token")
    right.set_ylabel(f"{', '.join(others)} minus {last}, nats")
    for axes in (left, right):
        axes.set_xticks(places, labels, rotation=30, ha="right", fontsize=8)
        axes.set_xlabel(x_label)
    _legend(left)
    return fig


def _legend(axes) -> None:
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9)


def _colour(name: str) -> str:
    return tables.COLOURS.get(name, "0.4")


def _label_round(gate: str) -> str:
    if gate.startswith("round"):
        number = int(gate.removeprefix("round"))
        return f"round {number}, of {'x' if number % 2 else 'h'}"
    return f"all rounds, of {gate[0]}"


_NAMES = {"f": "forget gate f", "i": "input gate i", "o": "output gate o", "j": "candidate j"}

"""The report of a study: tables, the best settings as an experiment file, pictures.

trials.csv                every trial with its settings and its value, or why it has none
report.md                 the best trials, and how much each setting matters around the best
best.py                   the best trial as an experiment, ready for --config
parallel_coordinates.png  the settings and the value of every trial
learning_curves.png       the validation cross-entropy of every trial
"""

import collections
import csv
import io
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from ml_collections import config_dict

from mogrifier_jax.evaluation import scoring
from mogrifier_jax.training import learning_curves, metrics, summaries, units, workdirs
from mogrifier_jax.tuning import studies, trials

WINDOW = 0.15  # The width of the window around the best value, as a share of the range.
SHOWN = 20  # Trials in the Markdown table.
NEAR = 0.15  # A trial is near the best if every setting is within this share of its range.
AT_LEAST = 3  # At least this many count as near: those with the smallest mean distance.
NOTES = ("hidden_size", "num_params", "best_turn", "temperature", "test_nats", "folder", "reason")


class Neighbourhood(NamedTuple):
    """The trials whose value of one setting is near the best trial's."""

    name: str
    best: float
    low: float
    high: float
    others: int  # The number of such trials, without the best trial itself.
    nearest: float | None  # The best score among them.
    median: float | None  # The median of their scores.


class Report(NamedTuple):
    """A study and its trials; `write` leaves all files of the report in the folder."""

    name: str
    known: Sequence[trials.Record]
    studied: studies.Study
    folder: pathlib.Path
    unit: str  # Of scores that people read.
    config: config_dict.ConfigDict | None = None  # Of the experiment, if training is tuned.

    @property
    def complete(self) -> list[trials.Record]:
        """The trials that have a value, the best one first."""
        return complete_trials(self.known)

    def write(self) -> None:
        """Writes all files, and shows what was found."""
        workdirs.replace_text(self.folder / "trials.csv", self.to_csv())
        if self.complete and self.config is not None:
            workdirs.replace_text(self.folder / "best.py", self.experiment_source(self.config))
        workdirs.replace_text(self.folder / "report.md", self.to_markdown())
        try:
            self.draw_parallel_coordinates()
            self.draw_learning_curves()
        except ImportError:
            logging.info("no pictures of the study: matplotlib is not installed")
        logging.info("\n%s", self.describe())

    def to_csv(self) -> str:
        """The content of trials.csv, in the order of the trials."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        names = self.studied.ranges
        writer.writerow(["number", "outcome", "valid_nats", "seconds", *names, *NOTES])
        for trial in self.known:
            seconds = "" if math.isnan(trial.seconds) else f"{trial.seconds:.1f}"
            value = None if math.isnan(trial.nats) else trial.nats
            settings = [trial.params.get(name) for name in names]
            notes = [trial.notes.get(name) for name in NOTES]
            writer.writerow([trial.number, trial.outcome, value, seconds, *settings, *notes])
        return out.getvalue()

    def to_markdown(self) -> str:
        """The content of report.md."""
        counts = collections.Counter(trial.outcome for trial in self.known)
        summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        lines = [f"# Study {self.name}", "", f"{len(self.known)} trials: {summary or 'none yet'}."]
        if self.complete:
            lines += self._best_trials(self.complete)
        failed = [t for t in self.known if "reason" in t.notes]
        if failed:
            lines += ["", "## Without a value", ""]
            rows = [[t.number, t.outcome, _line(t.notes["reason"])] for t in failed]
            lines.append(scoring.markdown_table(["trial", "outcome", "reason"], rows))
        return "\n".join(lines) + "\n"

    def _best_trials(self, complete: Sequence[trials.Record]) -> list[str]:
        best, names = complete[0], self.studied.ranges
        lines = ["", f"Best: {self._show(best)} on validation, trial {best.number}.", ""]
        if self.studied.adapts:
            flags = " ".join(
                f"--eval.dyneval.{name if name == 'window' else f'{name}s'}={value:.4g}"
                for name, value in best.params.items()
            )
            lines += [f"    --mode=evaluate --eval.methods=dyneval {flags}", ""]
        header = ["trial", "valid nats", self.unit, *names]
        rows: list[list[Any]] = []
        for t in complete[:SHOWN]:
            settings = [f"{t.params[name]:.4g}" for name in names]
            rows.append([t.number, f"{t.nats:.4f}", units.number(t.nats, self.unit), *settings])
        lines += ["## Best trials", "", scoring.markdown_table(header, rows)]
        lines += [
            "",
            "## Around the best",
            "",
            f"Each setting in turn is held within {WINDOW:.0%} of its range around its best value. "
            "The other trials in that window are compared with the best one, in nats.",
            "",
        ]
        rows = [
            [
                n.name,
                f"{n.best:.4g}",
                f"{n.low:.4g} to {n.high:.4g}",
                n.others,
                "" if n.nearest is None else f"+{n.nearest - best.nats:.4f}",
                "" if n.median is None else f"+{n.median - best.nats:.4f}",
            ]
            for n in neighbourhoods(complete, self.studied)
        ]
        header = ["setting", "best", "window", "others", "best of them", "median"]
        return [*lines, scoring.markdown_table(header, rows)]

    def experiment_source(self, config: config_dict.ConfigDict) -> str:
        """The source of a Python file whose `get_config` returns the config of the best trial."""
        best = self.complete[0]
        tried = studies.configure(self.studied, config, best.params)
        # A user has chosen the name. Nothing in it may end the docstring.
        title = self.name.encode("unicode_escape").decode().replace('"', "'")
        lines = [
            f'"""The best trial of the study {title}: {self._show(best)} on validation.',
            "",
            f"Trial {best.number}; seed {config.seed}.",
            '"""',
            "",
            "from ml_collections import config_dict",
            "",
            "",
            'def get_config(variant=""):',
            '    """The one config there is."""',
            '    assert not variant, "this experiment has no variants"',
            "    config = config_dict.ConfigDict()",
        ]
        for key in tried:
            value = tried[key]
            if isinstance(value, config_dict.ConfigDict):
                lines.append(f"    config.{key} = dict(")
                lines += [f"        {name}={_literal(value, name)}," for name in value]
                lines.append("    )")
            else:
                lines.append(f"    config.{key} = {_literal(tried, key)}")
        return "\n".join([*lines, "    return config.lock()", ""])

    def describe(self) -> str:
        """The table that is shown when the study ends."""
        sections: dict[str, list[tuple[str, Any]]] = {
            "study": [("name", self.name), ("trials", len(self.known))]
        }
        for best in self.complete[:1]:
            sections[f"best: trial {best.number}"] = [
                ("validation", self._show(best)),
                *((key, best.params[key]) for key in self.studied.ranges),
            ]
        pictures = ("parallel_coordinates.png", "learning_curves.png")
        paths = [self.folder / file for file in ("report.md", "trials.csv", "best.py", *pictures)]
        sections["saved"] = [(path.name, str(path)) for path in paths if path.exists()]
        return summaries.table(sections)

    def _show(self, trial: trials.Record) -> str:
        """A score in nats, and in the unit that people read."""
        return f"{trial.nats:.4f} nats ({units.show(trial.nats, self.unit)})"

    def draw_parallel_coordinates(self) -> None:
        """Draws a line for each trial; trials with settings near the best trial's are red."""
        from matplotlib import figure

        complete, ranges = self.complete, self.studied.ranges
        if len(complete) < 2:
            return
        best = complete[0]
        places = np.array([[r.place(t.params[n]) for n, r in ranges.items()] for t in complete])
        values = np.array([trial.nats for trial in complete])
        low, high = values.min(), np.quantile(values, 0.9)
        score = np.clip((values - low) / max(high - low, 1e-9), 0, 1)  # 0 is the best.
        apart = np.abs(places - places[0])
        closest = np.argsort(apart.mean(1), kind="stable")[:AT_LEAST]
        near = apart.max(1) <= NEAR
        near[closest] = True

        fig = figure.Figure(figsize=(1.5 * (len(ranges) + 1) + 1, 5), layout="constrained")
        axes = fig.add_subplot()
        at = list(range(len(ranges) + 1))
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
        for x, limits in enumerate(ranges.values()):
            for place, side, align in ((0, -0.03, "top"), (1, 1.03, "bottom")):
                text = f"{limits.at(place):g}"
                axes.text(x, side, text, ha="center", va=align, fontsize=8, color="0.3")
        for place, side, align in ((low, 1.03, "bottom"), (high, -0.03, "top")):
            text = units.show(place, self.unit) if side > 1 else f"≥ {units.show(place, self.unit)}"
            axes.text(at[-1], side, text, ha="center", va=align, fontsize=8, color="0.3")
        labels = [name.replace(".", ".\n").replace("_", " ") for name in ranges]
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
        fig.savefig(self.folder / "parallel_coordinates.png", dpi=150)

    def draw_learning_curves(self) -> None:
        """Draws validation cross-entropy over steps, for all trials whose folder is here."""
        from matplotlib import figure

        curves = []
        for trial in self.known:
            records = metrics.read_metrics(self.folder / trial.notes.get("folder", "-"))
            points = learning_curves.find_points(records, "eval", "valid_nats")
            if points.size:
                curves.append((trial, points))
        if not curves:
            return
        fig = figure.Figure(figsize=(8, 4.8), layout="constrained")
        axes = fig.add_subplot()
        best = next(iter(complete_trials([trial for trial, _ in curves])), None)
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
                label += units.show(best.nats, self.unit)
            axes.plot(*points, label=None if label in drawn else label, **style)
            drawn.add(label)
        # The first evaluation is of untrained weights, far above what tells the trials apart.
        shown = np.concatenate([nats[1:] if len(nats) > 1 else nats for _, (_, nats) in curves])
        low, high = shown.min(), np.quantile(shown, 0.98, method="lower")
        margin = 0.05 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
        axes.spines["right"].set_visible(False)
        path = self.folder / "learning_curves.png"
        learning_curves.save_curves(axes, "validation, nats per token", path)


def complete_trials(known: Sequence[trials.Record]) -> list[trials.Record]:
    """The trials that have a value, the best one first."""
    return sorted((t for t in known if t.outcome == "complete"), key=lambda t: t.nats)


def neighbourhoods(
    complete: Sequence[trials.Record], studied: studies.Study
) -> list[Neighbourhood]:
    """For each setting, the scores of the trials that are near the best in this setting."""
    best, others = complete[0], complete[1:]
    found = []
    for name, limits in studied.ranges.items():
        value = best.params[name]
        # The window keeps its width when the best value is at an end of the range.
        start = min(max(limits.place(value) - WINDOW / 2, 0.0), 1 - WINDOW)
        low, high = limits.at(start), limits.at(start + WINDOW)
        inside = [t.nats for t in others if low <= t.params[name] <= high]
        nearest = min(inside, default=None)
        median = statistics.median_high(inside) if inside else None
        found.append(Neighbourhood(name, value, low, high, len(inside), nearest, median))
    return found


def _literal(section: config_dict.ConfigDict, key: str) -> str:
    value = section[key]
    if value is None:
        return f"config_dict.placeholder({section.get_type(key).__name__})"
    return repr(value)


def _line(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")

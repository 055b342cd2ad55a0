"""The report of a study, in its workdir.

trials.csv                every trial with its settings and its value, or why it has none
report.md                 the best trials, and how much each setting matters around the best
best.py                   the best trial as an experiment for --config (`best_experiment.py`)
parallel_coordinates.png  the settings and the value of every trial (`report_figures.py`)
learning_curves.png       the validation cross-entropy of every trial
"""

import collections
import csv
import io
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from absl import logging
from ml_collections import config_dict

from mogrifier_jax.evaluation import paper_tables
from mogrifier_jax.training import atomic_files, summaries, units
from mogrifier_jax.tuning import best_experiment, report_figures, studies, trials

WINDOW = 0.15  # The width of the window around the best value, as a share of the range.
SHOWN = 20  # Trials in the Markdown table.
NOTES = ("hidden_size", "num_params", "best_turn", "temperature", "test_nats", "folder", "reason")


class Neighbourhood(NamedTuple):
    """The trials in which one setting is close to its value in the best trial."""

    name: str
    best: float
    low: float
    high: float
    others: int  # The number of such trials, without the best trial itself.
    nearest: float | None  # The best score among them.
    median: float | None  # The median of their scores.


class Report(NamedTuple):
    """A study and its trials; `write` writes all files of the report."""

    name: str
    records: Sequence[trials.Record]
    study: studies.Study
    folder: pathlib.Path
    unit: str  # Of scores: "ppl", "bpc" or "bpb".
    config: config_dict.ConfigDict | None = None  # Of the experiment, if training is tuned.

    @property
    def complete(self) -> list[trials.Record]:
        """The trials that have a value, the best one first."""
        return trials.best_first(self.records)

    def write(self) -> None:
        """Writes all files, and logs a summary."""
        atomic_files.replace_text(self.folder / "trials.csv", self.to_csv())
        if self.complete and self.config is not None:
            source = self.best_experiment(self.config)
            atomic_files.replace_text(self.folder / "best.py", source)
        atomic_files.replace_text(self.folder / "report.md", self.to_markdown())
        try:
            report_figures.draw_parallel_coordinates(
                self.complete, self.study.ranges, self.unit, self.folder
            )
            report_figures.draw_learning_curves(self.records, self.unit, self.folder)
        except ImportError:
            logging.info("no pictures of the study, because matplotlib is not installed")
        logging.info("\n%s", self.to_table())

    def to_csv(self) -> str:
        """The content of trials.csv, in the order of the trials."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        names = self.study.ranges
        writer.writerow(["number", "outcome", "valid_nats", "seconds", *names, *NOTES])
        for trial in self.records:
            seconds = "" if math.isnan(trial.seconds) else f"{trial.seconds:.1f}"
            value = None if math.isnan(trial.nats) else trial.nats
            settings = [trial.params.get(name) for name in names]
            notes = [trial.notes.get(name) for name in NOTES]
            writer.writerow([trial.number, trial.outcome, value, seconds, *settings, *notes])
        return out.getvalue()

    def to_markdown(self) -> str:
        """The content of report.md."""
        counts = collections.Counter(trial.outcome for trial in self.records)
        summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        lines = [
            f"# Study {self.name}",
            "",
            f"{len(self.records)} trials: {summary or 'none yet'}.",
        ]
        if self.complete:
            lines += self._describe_best(self.complete)
        failed = [t for t in self.records if "reason" in t.notes]
        if failed:
            lines += ["", "## Trials without a value", ""]
            rows = [[t.number, t.outcome, _in_one_line(t.notes["reason"])] for t in failed]
            lines.append(paper_tables.markdown_table(["trial", "outcome", "reason"], rows))
        return "\n".join(lines) + "\n"

    def _describe_best(self, complete: Sequence[trials.Record]) -> list[str]:
        best, names = complete[0], self.study.ranges
        lines = ["", f"Best: {self._show(best)} on validation, trial {best.number}.", ""]
        if self.study.adapts:
            flags = " ".join(
                f"--eval.dyneval.{name if name == 'window' else f'{name}s'}={value:.4g}"
                for name, value in best.params.items()
            )
            lines += [f"    --mode=evaluate --eval.methods=dyneval {flags}", ""]
        header = ["trial", "valid nats", self.unit, *names]
        rows: list[list[object]] = []
        for t in complete[:SHOWN]:
            settings = [f"{t.params[name]:.4g}" for name in names]
            rows.append([t.number, f"{t.nats:.4f}", units.number(t.nats, self.unit), *settings])
        lines += ["## Best trials", "", paper_tables.markdown_table(header, rows)]
        lines += [
            "",
            "## Around the best",
            "",
            f"For each setting, the trials in which it lies within a window of {WINDOW:.0%} of its "
            "range around the best value are compared with the best trial, in nats.",
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
            for n in neighbourhoods(complete, self.study)
        ]
        header = ["setting", "best", "window", "others", "best of them", "median"]
        return [*lines, paper_tables.markdown_table(header, rows)]

    def best_experiment(self, config: config_dict.ConfigDict) -> str:
        """The content of best.py."""
        best = self.complete[0]
        docstring = (
            f"The best trial of the study {self.name}: {self._show(best)} on validation.\n\n"
            f"Trial {best.number}; seed {config.seed}.\n"
        )
        tried = studies.configure(self.study, config, best.params)
        return best_experiment.write_source(tried, docstring)

    def to_table(self) -> str:
        """The summary that is shown when the study ends."""
        sections: dict[str, list[tuple[str, object]]] = {
            "study": [("name", self.name), ("trials", len(self.records))]
        }
        for best in self.complete[:1]:
            sections[f"best: trial {best.number}"] = [
                ("validation", self._show(best)),
                *((key, best.params[key]) for key in self.study.ranges),
            ]
        pictures = ("parallel_coordinates.png", "learning_curves.png")
        paths = [self.folder / file for file in ("report.md", "trials.csv", "best.py", *pictures)]
        sections["saved"] = [(path.name, str(path)) for path in paths if path.exists()]
        return summaries.table(sections)

    def _show(self, trial: trials.Record) -> str:
        """A score in nats and in the usual unit of the task."""
        return f"{trial.nats:.4f} nats ({units.show(trial.nats, self.unit)})"


def neighbourhoods(complete: Sequence[trials.Record], study: studies.Study) -> list[Neighbourhood]:
    """For each setting, the scores of the trials in which it is close to its best value."""
    best, others = complete[0], complete[1:]
    result = []
    for name, limits in study.ranges.items():
        value = best.params[name]
        # The window keeps its width when the best value is at an end of the range.
        start = min(max(limits.to_unit(value) - WINDOW / 2, 0.0), 1 - WINDOW)
        low, high = limits.from_unit(start), limits.from_unit(start + WINDOW)
        inside = [t.nats for t in others if low <= t.params[name] <= high]
        nearest = min(inside, default=None)
        median = statistics.median_high(inside) if inside else None
        result.append(Neighbourhood(name, value, low, high, len(inside), nearest, median))
    return result


def _in_one_line(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")

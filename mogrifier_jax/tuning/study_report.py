"""What a study has found: tables, the best settings as an experiment file, pictures.

trials.csv                every trial with its settings, value or reason
report.md                 the best trials, and how much each setting matters around the best
best.py                   the best trial as an experiment, ready for --config
parallel_coordinates.png  and learning_curves.png, from `tuning_plots.py`
"""

import collections
import csv
import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging
from ml_collections import config_dict

from mogrifier_jax.training import metrics, progress, workdirs
from mogrifier_jax.tuning import studies, trials, tuning_plots

WINDOW = 0.15  # Of a setting's range, around the best.
SHOWN = 20  # Trials in the Markdown table.
NOTES = ("hidden_size", "num_params", "best_turn", "temperature", "test_nats", "folder", "reason")


class Neighbourhood(NamedTuple):
    """The trials left when one setting is held near its best value."""

    name: str
    best: float
    low: float
    high: float
    others: int  # Beside the best trial itself.
    nearest: float | None  # The best value among them,
    median: float | None  # and the middle one.


def write(
    name: str,
    known: Sequence[trials.Record],
    studied: studies.Study,
    workdir: str | os.PathLike,
    *,
    unit: str,
    config: config_dict.ConfigDict | None = None,
) -> str:
    """Writes all files into the workdir and returns the Markdown."""
    folder = pathlib.Path(workdir)
    workdirs.replace_text(folder / "trials.csv", to_csv(known, studied))
    complete = complete_trials(known)
    if complete and config is not None:
        source = experiment_source(name, complete[0], studied, config, unit)
        workdirs.replace_text(folder / "best.py", source)
    text = to_markdown(name, known, studied, unit)
    workdirs.replace_text(folder / "report.md", text)
    try:
        tuning_plots.parallel_coordinates(folder, complete, studied, unit=unit)
        tuning_plots.learning_curves(folder, known, unit=unit)
    except ImportError:
        logging.info("no pictures of the study: matplotlib is not installed")
    logging.info("\n%s", describe(name, known, studied, folder, unit))
    return text


def complete_trials(known: Sequence[trials.Record]) -> list[trials.Record]:
    """Those with a value, the best first."""
    return sorted((t for t in known if t.outcome == "complete"), key=lambda t: t.nats)


def to_csv(known: Sequence[trials.Record], studied: studies.Study) -> str:
    """All trials, in their order."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["number", "outcome", "valid_nats", "seconds", *studied.ranges, *NOTES])
    for trial in known:
        seconds = "" if math.isnan(trial.seconds) else f"{trial.seconds:.1f}"
        value = None if math.isnan(trial.nats) else trial.nats
        settings = [trial.params.get(name) for name in studied.ranges]
        notes = [trial.notes.get(name) for name in NOTES]
        writer.writerow([trial.number, trial.outcome, value, seconds, *settings, *notes])
    return out.getvalue()


def to_markdown(
    name: str, known: Sequence[trials.Record], studied: studies.Study, unit: str
) -> str:
    """The report for people."""
    complete = complete_trials(known)
    counts = collections.Counter(trial.outcome for trial in known)
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    lines = [f"# Study {name}", "", f"{len(known)} trials: {summary or 'none yet'}."]
    if complete:
        best = complete[0]
        lines += ["", f"Best: {show(best.nats, unit)} on validation, trial {best.number}.", ""]
        if studied.adapts:
            flags = " ".join(
                f"--eval.dyneval.{name if name == 'window' else f'{name}s'}={_show(value)}"
                for name, value in best.params.items()
            )
            lines += [f"    --mode=evaluate --eval.methods=dyneval {flags}", ""]
        lines += ["## Best trials", ""]
        header = ["trial", "valid nats", unit, *studied.ranges]
        rows = [
            [t.number, f"{t.nats:.4f}", _score(t.nats, unit), *_settings(t, studied)]
            for t in complete[:SHOWN]
        ]
        lines += _table(header, rows)
        lines += ["", "## Around the best", ""]
        lines += [
            f"Each setting in turn is held within {WINDOW:.0%} of its range around its best value; "
            "the trials left beside the best one are compared with it, in nats.",
            "",
        ]
        rows = [
            [
                n.name,
                _show(n.best),
                f"{_show(n.low)} to {_show(n.high)}",
                n.others,
                "" if n.nearest is None else f"+{n.nearest - best.nats:.4f}",
                "" if n.median is None else f"+{n.median - best.nats:.4f}",
            ]
            for n in neighbourhoods(complete, studied)
        ]
        lines += _table(["setting", "best", "window", "others", "best of them", "median"], rows)
    failed = [t for t in known if "reason" in t.notes]
    if failed:
        lines += ["", "## Without a value", ""]
        rows = [[t.number, t.outcome, _line(t.notes.get("reason", ""))] for t in failed]
        lines += _table(["trial", "outcome", "reason"], rows)
    return "\n".join(lines) + "\n"


def neighbourhoods(
    complete: Sequence[trials.Record], studied: studies.Study
) -> list[Neighbourhood]:
    """How good the trials are that share one setting with the best, for each setting."""
    best, others = complete[0], complete[1:]
    found = []
    for name, limits in studied.ranges.items():
        value = best.params[name]
        # As wide as elsewhere when the best lies at an end of the range.
        start = min(max(limits.place(value) - WINDOW / 2, 0.0), 1 - WINDOW)
        low, high = limits.at(start), limits.at(start + WINDOW)
        inside = [t.nats for t in others if low <= t.params[name] <= high]
        nearest = min(inside, default=None)
        median = sorted(inside)[len(inside) // 2] if inside else None
        found.append(Neighbourhood(name, value, low, high, len(inside), nearest, median))
    return found


def experiment_source(
    name: str,
    best: trials.Record,
    studied: studies.Study,
    config: config_dict.ConfigDict,
    unit: str,
) -> str:
    """A Python file whose get_config is the config of a trial."""
    tried = studies.configure(studied, config, best.params)
    # The name is a user's: nothing in it may end the docstring.
    title = name.encode("unicode_escape").decode().replace('"', "'")
    lines = [
        f'"""The best trial of the study {title}: {show(best.nats, unit)} on validation.',
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


def _literal(section: config_dict.ConfigDict, key: str) -> str:
    value = section[key]
    if value is None:
        return f"config_dict.placeholder({section.get_type(key).__name__})"
    return repr(value)


def describe(
    name: str,
    known: Sequence[trials.Record],
    studied: studies.Study,
    folder: pathlib.Path,
    unit: str,
) -> str:
    """The table at the end."""
    sections: dict[str, list[tuple[str, Any]]] = {"study": [("name", name), ("trials", len(known))]}
    complete = complete_trials(known)
    if complete:
        best = complete[0]
        settings: Mapping[str, Any] = best.params
        sections[f"best: trial {best.number}"] = [
            ("validation", show(best.nats, unit)),
            *((key, settings[key]) for key in studied.ranges),
        ]
    pictures = ("parallel_coordinates.png", "learning_curves.png")
    paths = [folder / file for file in ("report.md", "trials.csv", "best.py", *pictures)]
    sections["saved"] = [(path.name, str(path)) for path in paths if path.exists()]
    return progress.table(sections)


def show(nats: float, unit: str) -> str:
    """Nats, and the unit that people read."""
    return f"{nats:.4f} nats ({metrics.show(nats, unit)})"


def _score(nats: float, unit: str) -> str:
    return f"{metrics.perplexity(nats):.2f}" if unit == "ppl" else f"{metrics.bits(nats):.4f}"


def _settings(trial: trials.Record, studied: studies.Study) -> list[str]:
    return [_show(trial.params[name]) for name in studied.ranges]


def _show(value: float) -> str:
    return f"{value:.4g}"


def _line(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def _table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(map(str, row))} |" for row in lines]

"""What a run shows to people: log lines, a bar, a table at the start and the end, a picture.

On a terminal the bar stays below the log lines; elsewhere progress is a line now and then.
"""

import array
import contextlib
import logging as python_logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from absl import logging

from mogrifier_jax import errors
from mogrifier_jax.nn import models
from mogrifier_jax.training import metrics, workdirs


class _BarHandler(python_logging.Handler):
    """Prints above the bar instead of into it."""

    def emit(self, record: python_logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # No log line is worth a run: stderr may be full.
            tqdm.tqdm.write(self.format(record), file=sys.stderr)


def setup_logging() -> None:
    """Short log lines that go well with a progress bar; other processes than 0 only warn."""
    handler = _BarHandler()
    process = f"[process {jax.process_index()}] " if jax.process_count() > 1 else ""
    handler.setFormatter(
        python_logging.Formatter(f"%(asctime)s {process}%(prefix)s%(message)s", datefmt="%H:%M:%S")
    )
    handler.addFilter(_is_for_people)
    root = python_logging.getLogger()
    root.handlers = [handler]
    logging.set_verbosity(logging.INFO if jax.process_index() == 0 else logging.WARNING)


def _is_for_people(record: python_logging.LogRecord) -> bool:
    """Leaves out what libraries tell of every step they take, and names the level of warnings."""
    # Of what fails in the background of a save or a read, the caller hears too, in one sentence.
    if record.exc_info and ("/orbax/" in record.pathname or record.name == "asyncio"):
        return False
    warns = record.levelno >= python_logging.WARNING
    record.prefix = f"{record.levelname.lower()}: " if warns else ""
    return warns or not any(f"/{name}/" in record.pathname for name in ("orbax", "jax", "etils"))


class Bar:
    """Shows loss, perplexity or bits, tokens per second and the time left.

    Args:
      total_steps: of the whole run; `first_step` is where this start of it begins.
      unit: "ppl" for words; "bpc" for characters.
      seconds: how often a line is logged where there is no terminal.
    """

    def __init__(
        self,
        total_steps: int,
        tokens_per_step: int,
        *,
        first_step: int = 0,
        unit: str = "ppl",
        seconds: float = 30.0,
    ):
        self._total_steps = total_steps
        self._tokens_per_step = tokens_per_step
        self._unit = unit
        self._seconds = seconds
        self._step = first_step
        self._time = self._logged = time.perf_counter()
        self._rate = 0.0  # Steps per second, smoothed.
        self._bar = tqdm.tqdm(
            total=total_steps,
            initial=first_step,
            # None: only on a terminal. Other processes than 0 never.
            disable=None if jax.process_index() == 0 else True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            dynamic_ncols=True,
            leave=False,
        )

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    @property
    def tokens_per_second(self) -> float:
        """Smoothed over the last updates; time in `paused` does not count."""
        return self._rate * self._tokens_per_step

    def update(self, step: int, loss_nats: float) -> None:
        """Shows that the run has reached `step`."""
        now = time.perf_counter()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
        self._bar.update(step - self._step)
        self._step, self._time = step, now
        text = self._text(float(loss_nats))
        self._bar.set_postfix_str(text)
        if self._bar.disable and now - self._logged >= self._seconds:
            self._logged = now
            logging.info("step %d/%d %s", step, self._total_steps, text)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what is done meanwhile, such as an evaluation, out of the speed."""
        before = time.perf_counter()
        yield
        self._time += time.perf_counter() - before

    def _text(self, loss_nats: float) -> str:
        score = f"{self._unit} {metrics.number(loss_nats, self._unit)}"
        left = (self._total_steps - self._step) / self._rate if self._rate else 0
        speed = f"{quantity(self.tokens_per_second)} tok/s"
        return f"loss {loss_nats:.4f}  {score}  {speed}  {span(left)} left"


def table(sections: Mapping[str, Sequence[tuple[str, Any]]]) -> str:
    """Sections of (label, value) rows, aligned, as text."""
    rows = [(label, _show(value)) for section in sections.values() for label, value in section]
    labels = max((len(label) for label, _ in rows), default=0)
    width = labels + 2 + max((len(value) for _, value in rows), default=0)
    lines = []
    for title, section in sections.items():
        lines.append(f"── {title} ".ljust(width + 2, "─"))
        lines += [f"  {label.ljust(labels)}  {_show(value)}" for label, value in section]
    return "\n".join([*lines, "─" * (width + 2)])


def quantity(number: float) -> str:
    """12345678 as 12.3M."""
    number = float(f"{number:.3g}")  # Rounded first: 999,999 is 1M.
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def span(seconds: float) -> str:
    """A time such as 45s, 3m20s, 5h07m or 2d04h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


def _show(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def describe_run(run: Any, workdir: str) -> str:
    """Sizes, parameters, memory, mesh and data of a `runs.Run`."""
    model, rules, state = run.model, run.rules, run.abstract_state()
    parts = models.count_parameters(model)
    options = dict(model.cell_options)
    arrays = (state.params, state.opt_state, state.average, state.carry)
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    if run.mesh.size < jax.device_count():
        devices = f"{run.mesh.size} of {devices}, to divide the batch"
    sections = {
        "model": [
            ("cell", model.cell),
            ("layers x hidden", f"{model.num_layers} x {model.hidden_size}"),
            ("embedding", model.embedding_size),
            ("rounds, rank", f"{options.get('rounds', 0)}, {options.get('rank', 0)}"),
            ("parameters", sum(parts.values())),
            *((f"  {name}", count) for name, count in parts.items()),
        ],
        "data": [
            *run.task.summary,
            ("batch x window", f"{run.batch_size} x {run.config.data.window}"),
        ],
        "run": [
            ("steps", f"{rules.turns} turns x {rules.steps_per_turn}"),
            ("memory of the weights", mebibytes(state.params)),
            ("memory of the state", mebibytes(arrays)),
            ("mesh", ", ".join(f"{name} {size}" for name, size in run.mesh.shape.items())),
            ("devices", devices),
            ("workdir", workdir),
        ],
    }
    return table(sections)


def describe_results(results: dict[str, Any], unit: str, workdir: str) -> str:
    """The scores of the best weights, and where everything is."""
    files = {
        "weights": "checkpoints",
        "scores": "results.json",
        "metrics": "metrics.jsonl",
        "TensorBoard": "tensorboard",
        "picture": "learning_curve.png",
    }
    paths = [(label, os.path.join(workdir, name)) for label, name in files.items()]
    nats = {split: results[f"{split}_nats"] for split in ("valid", "test")}
    sections = {
        "result": [
            ("best turn", f"{results['best_turn']}, step {results['step']:,}"),
            ("temperature", f"{results['temperature']:.2f}"),
            *((k, f"{v:.4f} nats, {metrics.show(v, unit)}") for k, v in nats.items()),
        ],
        "saved": [(label, path) for label, path in paths if os.path.exists(path)],
    }
    return table(sections)


def mebibytes(tree: Any) -> str:
    """How much memory the arrays take, all copies on all devices counted once."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return f"{size / 2**20:,.1f} MiB"


def learning_curve(workdir: str | os.PathLike, *, unit: str = "ppl") -> pathlib.Path:
    """Draws training and validation loss over steps; returns the path of the PNG.

    Args:
      unit: of the axis on the right: "ppl", or the name of bits per token such as "bpc".
    """
    # Matplotlib is slow to import; the figure is made without pyplot, which may open windows.
    from matplotlib import figure

    workdir = pathlib.Path(workdir)
    train, records = _read_curves(workdir)
    seen = find_points(records, "eval", "train_nats")
    valid = find_points(records, "eval", "valid_nats")
    if not valid.size and not train.size:
        raise errors.UsageError(f"{workdir / 'metrics.jsonl'} has no numbers yet; nothing to draw")

    fig = figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = fig.add_subplot()
    if train.size:
        axes.plot(*train, color="0.75", linewidth=0.8, label="training, with dropout")
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


def _read_curves(workdir: pathlib.Path) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Steps and finite losses of training, [2, N], and all other records, which are few."""
    path, points, records = workdir / "metrics.jsonl", array.array("d"), []
    for _, record in metrics.read_lines(path) if path.exists() else ():
        if record["kind"] != "train":
            records.append(record)
        elif "loss_nats" in record:
            points.extend((record["step"], float(record["loss_nats"])))
    found = np.array(points).reshape(-1, 2).T
    return found[:, np.isfinite(found[1])], records


def save_curves(axes, label: str, path: pathlib.Path) -> pathlib.Path:
    """Labels the axes of curves over steps, and writes the picture."""
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.legend(loc="upper right", framealpha=0.9, edgecolor="none")
    return save_figure(axes.figure, path)


def save_figure(figure, path: pathlib.Path) -> pathlib.Path:
    """Writes a picture, whole or not at all."""
    with workdirs.replacing(path) as file:
        figure.savefig(file, dpi=150, format="png")
    return path


def find_points(records: list[dict[str, Any]], kind: str, key: str) -> np.ndarray:
    """Steps and finite nats of the records of a kind, [2, N]."""
    points = [(r["step"], float(r[key])) for r in records if r["kind"] == kind and key in r]
    found = np.array(points).reshape(-1, 2).T
    return found[:, np.isfinite(found[1])]


def _mark_averaging(axes, records: list[dict[str, Any]]) -> None:
    """A line where averaging began: at the evaluation before the first averaged one."""
    start = 0
    for record in (r for r in records if r["kind"] == "eval"):
        if record.get("averaged"):
            axes.axvline(start, color="tab:green", linestyle="--", linewidth=1, label="averaging")
            return
        start = record["step"]


def _mark_best(axes, records: list[dict[str, Any]], unit: str) -> None:
    best = [r for r in records if r["kind"] == "eval" and r.get("best") and "valid_nats" in r]
    if not best:
        return
    step, nats = best[-1]["step"], float(best[-1]["valid_nats"])
    label = f"best: {nats:.4f} nats, {metrics.show(nats, unit)}"
    if "turn" in best[-1]:
        label += f", turn {best[-1]['turn']}"
    axes.plot([step], [nats], "*", markersize=11, color="tab:red", label=label, zorder=3)


def _limit(axes, *curves: np.ndarray) -> None:
    """Leaves out the first fall of the loss, which would flatten all the rest."""
    curves = tuple(nats for nats in curves if nats.size)
    low = min(nats.min() for nats in curves)
    high = max(np.quantile(nats, 0.9, method="lower") for nats in curves)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + 3 * margin)


def _add_right_axis(axes, unit: str) -> None:
    """The same scale in perplexity or bits, with ticks at round values."""
    from matplotlib import ticker

    def to_nats(score):
        if unit == "ppl":
            return np.log(np.maximum(score, 1e-9))  # A tick at 0 is asked for, and not shown.
        return score * math.log(2)

    to_score = np.exp if unit == "ppl" else metrics.bits
    right = axes.secondary_yaxis("right", functions=(to_score, to_nats))
    right.set_ylabel("perplexity" if unit == "ppl" else f"bits per token ({unit})")
    low, high = axes.get_ylim()
    if unit == "ppl" and high - low > 1.5:
        right.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    else:
        right.yaxis.set_major_locator(ticker.MaxNLocator(7, steps=[1, 2, 5, 10]))
    right.yaxis.set_major_formatter("{x:g}")

"""What a run shows to people: log lines, a progress bar, a table of sizes.

On a terminal the bar stays below the log lines; elsewhere progress is a line now and then.
"""

import contextlib
import logging as python_logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import tqdm
from absl import logging

from mogrifier_jax.training import metrics


class _BarHandler(python_logging.Handler):
    """Prints above the bar instead of into it."""

    def emit(self, record: python_logging.LogRecord) -> None:
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
    warns = record.levelno >= python_logging.WARNING
    record.prefix = f"{record.levelname.lower()}: " if warns else ""
    return warns or not any(f"/{name}/" in record.pathname for name in ("orbax", "jax", "etils"))


class Progress:
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

    def __enter__(self) -> "Progress":
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
        if self._unit == "ppl":
            score = f"ppl {metrics.perplexity(loss_nats):.2f}"
        else:
            score = f"{self._unit} {metrics.bits(loss_nats):.4f}"
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

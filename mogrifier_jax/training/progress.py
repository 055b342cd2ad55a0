"""The progress of a run: its speed and the time that is left.

On a terminal a bar stays below the log lines. Elsewhere a line is logged now and then.
"""

import contextlib
import time
from collections.abc import Iterator

import jax
import tqdm
from absl import logging

from mogrifier_jax.training import units


class Bar:
    """Shows loss, perplexity or bits, tokens per second and the time left.

    The first dispatch of each length compiles a program, so it does not count towards the speed.

    Args:
      total_steps: the number of steps of the whole run.
      first_step: the step from which it starts or resumes.
      unit: the unit of the score that is shown beside the loss, such as "ppl" or "bpc".
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
        self._rate = 0.0  # Steps per second, smoothed; 0 is not known yet.
        self._compiled: set[int] = set()  # Lengths of dispatches.
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
        """The speed over the last updates, smoothed, without compilation and `paused` blocks."""
        return self._rate * self._tokens_per_step

    def update(self, step: int, loss_nats: float) -> None:
        """Shows that the run has reached `step`."""
        now, count = time.perf_counter(), step - self._step
        if count in self._compiled:
            rate = count / max(now - self._time, 1e-9)
            self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
        self._compiled.add(count)
        self._bar.update(count)
        self._step, self._time = step, now
        text = self._text(float(loss_nats))
        self._bar.set_postfix_str(text)
        if self._bar.disable and now - self._logged >= self._seconds:
            self._logged = now
            logging.info("step %d/%d %s", step, self._total_steps, text)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time that its block takes, such as an evaluation, from the speed."""
        before = time.perf_counter()
        yield
        self._time += time.perf_counter() - before

    def _text(self, loss_nats: float) -> str:
        score = f"{self._unit} {units.number(loss_nats, self._unit)}"
        text = f"loss {loss_nats:.4f}  {score}"
        if not self._rate:
            return text
        left = (self._total_steps - self._step) / self._rate
        speed = f"{units.quantity(self.tokens_per_second)} tok/s"
        return f"{text}  {speed}  {units.span(left)} left"

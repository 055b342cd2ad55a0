"""Trains N runs in one program to their ends (`stacked.py`), each with a book of its own.

Every run gets the numbers, decisions and checkpoints that it would get alone, so that its workdir
can be used like any other. One that ends early stays in the program, and is left out of the rest.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.training import bookkeeping, progress, signals, stacked

Outcome = dict[str, Any] | errors.Diverged | errors.Abandoned  # Results, or why there are none.


class Loop:
    """The turns of N runs that are at the same step; those that end early are left out."""

    def __init__(self, books: Sequence[bookkeeping.Book], functions: stacked.Functions):
        self.books, self._compiled = list(books), functions
        self.outcomes: list[Outcome | None] = [None] * len(books)
        self._log_every = functions.run.config.get("log_every", 20)

    @property
    def active(self) -> list[int]:
        """Which runs go on."""
        return [
            i
            for i, book in enumerate(self.books)
            if self.outcomes[i] is None and not (book.done.history and book.stop)
        ]

    def train(self, state: stacked.Stack) -> None:
        """Turn after turn, until all have come to an end."""
        run = self._compiled.run
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(signals.StopRequests())
            self._bar = stack.enter_context(
                progress.Progress(
                    run.rules.turns * run.rules.steps_per_turn,
                    run.tokens_per_step * len(self.books),
                    first_step=int(state.shared["step"]),
                    unit=run.task.score_unit,
                )
            )
            while active := self.active:
                if stop.requested():
                    raise self.interrupted(state)
                if int(state.shared["step"]) >= self.books[active[0]].end_of_turn:
                    state = self.evaluate_turn(state)
                else:
                    state = self.train_some(state)

    def train_some(self, state: stacked.Stack) -> stacked.Stack:
        """One dispatch: `log_every` steps, or those that are left of the turn."""
        step, active = int(state.shared["step"]), self.active
        count = min(self._log_every, self.books[active[0]].end_of_turn - step)
        hyper = self._compiled.hyper([book.hyper for book in self.books])
        started = time.perf_counter()
        state, losses, norms = self._compiled.steps(state, hyper, count)
        seconds, mean = time.perf_counter() - started, []
        for i in active:
            with self.outcome_of(i):
                mean.append(self.books[i].note_steps(step, losses[i], norms[i], seconds))
        self._bar.update(step + count, float(np.mean(mean)) if mean else math.nan)
        return state

    def evaluate_turn(self, state: stacked.Stack) -> stacked.Stack:
        """Evaluates, decides, saves."""
        step, decided = int(state.shared["step"]), {}
        with self._bar.paused():
            # By candidate, then by run.
            scores = [self._compiled.evaluate(w) for w in self._compiled.candidates(state)]
        averaged = is_averaged(state.stacked["average"], self._compiled.count)
        for i in self.active:
            with self.outcome_of(i):
                found = [candidate[i] for candidate in scores]
                decided[i] = self.books[i].decide(step, found, averaged=bool(averaged[i]))
        start = [i in decided and decided[i][0].start_averaging for i in range(len(averaged))]
        xes = [[score.valid_nats for score in candidate] for candidate in scores]
        state = self._compiled.after_evaluation(state, start, xes)
        states = self._compiled.unstack(state, len(self.books))
        for i, (decision, best) in decided.items():
            with self.outcome_of(i):
                self.books[i].save_turn(states[i], decision, best)
        return state

    def score_best(self) -> None:
        """Scores of the best weights of those that came to the end."""
        ended = [i for i, outcome in enumerate(self.outcomes) if outcome is None]
        if not ended:
            return
        bests = [self.books[i].restore_best() for i in ended]
        # They need not be of the same step, which does not matter for their weights.
        weights = self._compiled.value(self._compiled.stack([best.state for best in bests]))
        temperatures = [best.info["temperature"] for best in bests]
        temperatures += [1.0] * (self._compiled.count - len(bests))
        nats = {
            split: self._compiled.evaluate.score(split, weights, temperatures)
            for split in ("valid", "test")
        }
        for place, (i, best) in enumerate(zip(ended, bests, strict=True)):
            own = {split: float(values[place]) for split, values in nats.items()}
            self.outcomes[i] = self.books[i].results(best, own)

    @contextlib.contextmanager
    def outcome_of(self, i: int) -> Iterator[None]:
        """What ends one run does not end the others."""
        try:
            yield
        except (errors.Diverged, errors.Abandoned) as ended:
            self.outcomes[i] = ended

    def interrupted(self, state: stacked.Stack) -> errors.Interrupted:
        """Saves those that go on."""
        states = self._compiled.unstack(state, len(self.books))
        for i in self.active:
            with self.outcome_of(i):
                self.books[i].interrupted(states[i])
        step = int(state.shared["step"])
        return errors.Interrupted(f"stopped at step {step}, all saved; the same command goes on")


def train(books: Sequence[bookkeeping.Book], functions: stacked.Functions) -> list[Outcome]:
    """Trains runs to their ends, those together that are at the same point of the schedule."""
    restored = [book.restore() for book in books]
    outcomes: dict[int, Any] = {}
    points = [
        (0 if state is None else int(state.step), len(book.done.history))
        for state, book in zip(restored, books, strict=True)
    ]
    for point in sorted(set(points)):
        group = [i for i, other in enumerate(points) if other == point]
        loop = Loop([books[i] for i in group], functions)
        states = [state for i in group if (state := restored[i]) is not None]
        loop.train(functions.stack(states) if states else functions.init())
        loop.score_best()
        outcomes |= dict(zip(group, loop.outcomes, strict=True))
    return [outcomes[i] for i in range(len(books))]


def is_averaged(average: Any, count: int) -> np.ndarray:
    """Of which runs any running mean has weights in it, [N]."""
    paths = jax.tree_util.tree_leaves_with_path(average)
    counts = [leaf for path, leaf in paths if getattr(path[-1], "name", "") == "n"]
    return np.any([np.asarray(n) > 0 for n in counts] or [np.zeros(count, bool)], axis=0)

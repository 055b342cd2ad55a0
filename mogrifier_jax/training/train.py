"""Training from top to bottom: one run in its workdir, or many in one program.

A run is `turns` x `steps_per_turn` optimizer steps with an evaluation before each turn. It
resumes by itself in the same workdir, exactly: the state holds everything, and dispatches
are cut at the same steps whether or not a run was interrupted. `runs.py` reads the config,
`bookkeeping.py` keeps what comes out.

One run is a stack of one: `Loop` trains any number of runs that are at the same step, each with a
book of its own. What they compile differs: `Alone` is one run on all devices, `stacked.Together`
many runs side by side.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.training import (
    bookkeeping,
    evaluate,
    progress,
    runs,
    runtime,
    stacked,
    steps,
    workdirs,
)

Outcome = dict[str, Any] | errors.Diverged | errors.Abandoned  # Results, or why there are none.


def train_and_evaluate(
    config: config_dict.ConfigDict, workdir: str, *, profile_steps: str | None = None
) -> dict[str, Any]:
    """Trains to the end of the schedule, or until it is told to stop; returns the results."""
    trace = runtime.Trace(workdir, profile_steps)
    workdirs.check_place(workdir)
    workdirs.check_config(workdir, config, ignore=runs.FREE_KEYS)
    with contextlib.ExitStack() as stack:
        # Before anything compiles: what a handler raises inside the compiler would be lost.
        with runtime.StopRequests() as stop:
            run = runs.make_run(config)
            stop.check()
            book = stack.enter_context(bookkeeping.open_book(run, workdir))
            logging.info("\n%s", progress.describe_run(run, workdir))
            loops = train_turns([book], Alone(run), trace)
        (results,) = score_best(loops)
    if isinstance(results, Exception):
        raise results
    if jax.process_index() == 0:
        workdirs.write_json(workdir, "results.json", results)
        draw_learning_curve(run, workdir)
        logging.info("\n%s", progress.describe_results(results, run.task.score_unit, workdir))
    return results


def draw_learning_curve(run: runs.Run, workdir: str) -> None:
    """Leaves a picture, if there is anything to draw it with."""
    try:
        progress.learning_curve(workdir, unit=run.task.score_unit)
    except ImportError:
        logging.info("no learning_curve.png: matplotlib is not installed")


def train(books: Sequence[bookkeeping.Book], compiled: "Alone | stacked.Together") -> list[Outcome]:
    """Trains runs to their ends; returns what came out, by book."""
    return score_best(train_turns(books, compiled))


def train_turns(
    books: Sequence[bookkeeping.Book],
    compiled: "Alone | stacked.Together",
    trace: runtime.Trace | None = None,
) -> dict[int, "Loop"]:
    """All turns, those runs together that are at the same point; returns the loop of each book."""
    with runtime.StopRequests() as stop:
        restored = [book.restore() for book in books]
        stop.check()
        points = [
            (0 if state is None else int(state.step), len(book.done.history))
            for state, book in zip(restored, books, strict=True)
        ]
        loops: dict[int, Loop] = {}
        for point in sorted(set(points)):
            group = [i for i, other in enumerate(points) if other == point]
            loop = Loop([books[i] for i in group], compiled, trace or runtime.Trace("."))
            states = [state for i in group if (state := restored[i]) is not None]
            loop.train(compiled.stack(states) if states else compiled.init())
            loops |= dict.fromkeys(group, loop)
    return loops


def score_best(loops: dict[int, "Loop"]) -> list[Outcome]:
    """The outcome of each book of `train_turns`."""
    outcomes: dict[int, Any] = {}
    for loop in dict.fromkeys(loops.values()):
        loop.score_best()
        group = sorted(i for i, other in loops.items() if other is loop)
        outcomes |= dict(zip(group, loop.outcomes, strict=True))
    return [outcomes[i] for i in sorted(outcomes)]


class Loop:
    """The turns of runs that are at the same step; one that ends early is left out of the rest."""

    def __init__(
        self,
        books: Sequence[bookkeeping.Book],
        compiled: "Alone | stacked.Together",
        trace: runtime.Trace,
    ):
        self.books, self._compiled, self._trace = list(books), compiled, trace
        self.outcomes: list[Outcome | None] = [None] * len(books)
        self._log_every = compiled.run.config.get("log_every", 20)

    @property
    def active(self) -> list[int]:
        """Which runs go on."""
        return [
            i
            for i, book in enumerate(self.books)
            if self.outcomes[i] is None and not (book.done.history and book.stop)
        ]

    def train(self, state: Any) -> None:
        """Turn after turn, until all have come to an end."""
        run = self._compiled.run
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(runtime.StopRequests())
            self._bar = stack.enter_context(
                progress.Bar(
                    run.rules.turns * run.rules.steps_per_turn,
                    run.tokens_per_step * len(self.books),
                    first_step=self._compiled.step_of(state),
                    unit=run.task.score_unit,
                )
            )
            while active := self.active:
                if stop.requested():
                    raise self.interrupted(state)
                if self._compiled.step_of(state) >= self.books[active[0]].end_of_turn:
                    state = self.evaluate_turn(state)
                else:
                    state = self.train_some(state)
        if len(self.books) == 1 and (reason := self.books[0].stop):
            logging.info("stopping: %s", reason.message)

    def train_some(self, state: Any) -> Any:
        """One dispatch: `log_every` steps, or those that are left of the turn."""
        step, active = self._compiled.step_of(state), self.active
        count = min(self._log_every, self.books[active[0]].end_of_turn - step)
        hyper = [book.hyper for book in self.books]
        started = time.perf_counter()
        with self._trace.steps(step, count):
            state, losses, norms = self._compiled.train_steps(state, hyper, count)
        seconds, mean = time.perf_counter() - started, []
        for i in active:
            with self.outcome_of(i):
                mean.append(self.books[i].note_steps(step, losses[i], norms[i], seconds))
        self._bar.update(step + count, float(np.mean(mean)) if mean else math.nan)
        return state

    def evaluate_turn(self, state: Any) -> Any:
        """Evaluates, decides, saves."""
        step, decided = self._compiled.step_of(state), {}
        with self._bar.paused():
            scores, averaged = self._compiled.evaluate_turn(state)
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
        """Validation and test scores of the best weights, at the temperature of their turn."""
        ended = [i for i, outcome in enumerate(self.outcomes) if outcome is None]
        if not ended:
            return
        bests = [self.books[i].restore_best() for i in ended]
        temperatures = [best.info["temperature"] for best in bests]
        nats = self._compiled.score([best.state for best in bests], temperatures)
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

    def interrupted(self, state: Any) -> errors.Interrupted:
        """Saves those that go on."""
        states = self._compiled.unstack(state, len(self.books))
        if len(self.books) == 1:
            return self.books[0].interrupted(states[0])
        for i in self.active:
            with self.outcome_of(i):
                self.books[i].interrupted(states[i])
        step = self._compiled.step_of(state)
        return errors.Interrupted(f"stopped at step {step}, all saved; the same command goes on")


class Alone:
    """What one run compiles; runs that differ only in numbers that are traced may share it."""

    def __init__(self, run: runs.Run):
        self.run = run
        average = run.program.average
        in_place = runs.shardings_of(run.abstract_state())
        self.init = jax.jit(run.init_state, out_shardings=in_place)
        self._steps = run.jit_steps()
        # An average that changed its place would have the train step compiled again.
        self._candidates = jax.jit(average.candidates)
        self._value = jax.jit(average.value)
        self._is_on = jax.jit(average.is_on)
        self._after_evaluation = jax.jit(average.after_evaluation, out_shardings=in_place.average)
        self._start_averaging = jax.jit(average.start, out_shardings=in_place.average)
        self._evaluate = run.turn_evaluation()

    def stack(self, states: Sequence[steps.TrainState]) -> steps.TrainState:
        """The only one."""
        (state,) = states
        return state

    def unstack(self, state: steps.TrainState, number: int) -> list[steps.TrainState]:
        """The inverse of `stack`."""
        del number
        return [state]

    def step_of(self, state: steps.TrainState) -> int:
        """How many steps have been made."""
        return int(state.step)

    def train_steps(
        self, state: steps.TrainState, hyper: Sequence[steps.Hyperparameters], num_steps: int
    ) -> tuple[steps.TrainState, np.ndarray, np.ndarray]:
        """Some steps; losses and gradient norms are [1, S]."""
        stream = self.run.task.stream
        state, found = self._steps(state, stream, hyper[0], num_steps=num_steps)
        return state, np.asarray(found["loss_nats"])[None], np.asarray(found["grad_norm"])[None]

    def evaluate_turn(
        self, state: steps.TrainState
    ) -> tuple[list[list[evaluate.Scores]], np.ndarray]:
        """Scores by candidate, and whether any of them is an average."""
        weights = self._candidates(state.average, state.params)
        scores = [[self._evaluate(candidate)] for candidate in weights]
        return scores, np.asarray([self._is_on(state.average)])

    def after_evaluation(
        self, state: steps.TrainState, start: Sequence[bool], xes: Sequence[Sequence[float]]
    ) -> steps.TrainState:
        """The average after its candidates have been scored; `start` says whether it begins."""
        average = self._after_evaluation(state.average, *(xe for (xe,) in xes))
        if start[0]:
            average = self._start_averaging(average)
        return dataclasses.replace(state, average=average)

    def score(
        self, states: Sequence[steps.TrainState], temperatures: Sequence[float]
    ) -> dict[str, list[float]]:
        """Nats per token of the averaged weights on validation and test data."""
        weights = self._value(states[0].average, states[0].params)
        return {
            split: [self._evaluate.score(split, weights, temperatures[0])]
            for split in ("valid", "test")
        }

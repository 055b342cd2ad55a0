"""train_and_evaluate(config, workdir): the whole run, from top to bottom.

A run is `turns` x `steps_per_turn` optimizer steps with an evaluation before each turn. It
resumes by itself in the same workdir, exactly: the state holds everything, and dispatches
are cut at the same steps whether or not a run was interrupted. `runs.py` reads the config,
`bookkeeping.py` keeps what comes out.
"""

import contextlib
import time
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import config_dict

from mogrifier_jax.training import (
    bookkeeping,
    evaluate,
    plots,
    progress,
    runs,
    runtime,
    signals,
    steps,
    summaries,
    workdirs,
)


def train_and_evaluate(
    config: config_dict.ConfigDict, workdir: str, *, profile_steps: str | None = None
) -> dict[str, Any]:
    """Trains to the end of the schedule, or until it is told to stop; returns the results."""
    trace = runtime.Trace(workdir, profile_steps)
    workdirs.check_place(workdir)
    workdirs.check_config(workdir, config, ignore=runs.FREE_KEYS)
    with contextlib.ExitStack() as stack:
        # Before anything compiles: what a handler raises inside the compiler would be lost.
        with signals.StopRequests() as stop:
            run = runs.make_run(config)
            stop.check()
            book = stack.enter_context(bookkeeping.open_book(run, workdir))
            loop = Loop(run, book, Functions(run), trace)
            state = loop.restore_or_init()
            stop.check()
            logging.info("\n%s", summaries.describe_run(run, state, workdir))
            loop.train(state)
        results = loop.score_best()
    if jax.process_index() == 0:
        workdirs.write_json(workdir, "results.json", results)
        draw_learning_curve(run, workdir)
        logging.info("\n%s", summaries.describe_results(results, run.task.score_unit, workdir))
    return results


def draw_learning_curve(run: runs.Run, workdir: str) -> None:
    """Leaves a picture, if there is anything to draw it with."""
    try:
        plots.learning_curve(workdir, unit=run.task.score_unit)
    except ImportError:
        logging.info("no learning_curve.png: matplotlib is not installed")


class Functions:
    """What a run compiles; runs that differ only in numbers that are traced may share it."""

    def __init__(self, run: runs.Run):
        average = run.program.average
        in_place = runs.shardings_of(run.abstract_state())
        self.init = jax.jit(run.init_state, out_shardings=in_place)
        self.steps = run.jit_steps()
        # An average that changed its place would have the train step compiled again.
        self.candidates = jax.jit(average.candidates)
        self.value = jax.jit(average.value)
        self.after_evaluation = jax.jit(average.after_evaluation, out_shardings=in_place.average)
        self.start_averaging = jax.jit(average.start, out_shardings=in_place.average)
        self.evaluate = evaluate.TurnEvaluation(
            run.model,
            run.task,
            run.evaluation,
            batch_size=run.batch_size // run.program.accumulate,
            window=run.config.data.window,
        )


class Loop:
    """The turns of a run."""

    def __init__(
        self, run: runs.Run, book: bookkeeping.Book, functions: Functions, trace: runtime.Trace
    ):
        self.run, self.book, self._compiled, self._trace = run, book, functions, trace
        self._log_every = run.config.get("log_every", 20)

    def restore_or_init(self) -> steps.TrainState:
        """The newest good state of the workdir, or a fresh one."""
        state = self.book.restore()
        return self._compiled.init() if state is None else state

    def train(self, state: steps.TrainState) -> None:
        """Turn after turn, until a rule says stop."""
        rules, book = self.run.rules, self.book
        with contextlib.ExitStack() as stack:
            self._stop = stack.enter_context(signals.StopRequests())
            self._bar = stack.enter_context(
                progress.Progress(
                    rules.turns * rules.steps_per_turn,
                    self.run.tokens_per_step,
                    first_step=int(state.step),
                    unit=self.run.task.score_unit,
                )
            )
            while not (reason := book.stop):
                if self._stop.requested():
                    raise book.interrupted(state)
                if int(state.step) >= book.end_of_turn:
                    state = self.evaluate_turn(state)
                else:
                    state = self.train_some(state)
        logging.info("stopping: %s", reason.message)

    def train_some(self, state) -> steps.TrainState:
        """One dispatch: `log_every` steps, or those that are left of the turn."""
        step = int(state.step)
        count = min(self._log_every, self.book.end_of_turn - step)
        hyper, stream = self.book.hyper, self.run.task.stream
        started = time.perf_counter()
        with self._trace.steps(step, count):
            state, found = self._compiled.steps(state, stream, hyper, num_steps=count)
            losses, norms = np.asarray(found["loss_nats"]), np.asarray(found["grad_norm"])
        loss = self.book.note_steps(step, losses, norms, time.perf_counter() - started)
        self._bar.update(step + count, loss)
        return state

    def evaluate_turn(self, state) -> steps.TrainState:
        """Evaluates, decides, saves."""
        with self._bar.paused():
            weights = self._compiled.candidates(state.average, state.params)
            scores = [self._compiled.evaluate(candidate) for candidate in weights]
        averaged = is_averaged(state.average)
        decision, best = self.book.decide(int(state.step), scores, averaged=averaged)
        xes = [score.valid_nats for score in scores]
        average = self._compiled.after_evaluation(state.average, *xes)
        if decision.start_averaging:
            average = self._compiled.start_averaging(average)
        state = state.replace(average=average)
        self.book.save_turn(state, decision, best)
        return state

    def score_best(self) -> dict[str, Any]:
        """Validation and test scores of the best weights, at the temperature of their turn."""
        best = self.book.restore_best()
        weights = self._compiled.value(best.state.average, best.state.params)
        score, temperature = self._compiled.evaluate.score, best.info["temperature"]
        nats = {split: score(split, weights, temperature) for split in ("valid", "test")}
        return self.book.results(best, nats)


def is_averaged(average: Any) -> bool:
    """Whether any running mean has weights in it."""
    paths = jax.tree_util.tree_leaves_with_path(average)
    return any(int(leaf) > 0 for path, leaf in paths if getattr(path[-1], "name", "") == "n")

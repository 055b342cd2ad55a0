"""Training from top to bottom: one run in its workdir, or many in one program.

A run is `turns` x `steps_per_turn` optimizer steps with an evaluation before each turn. It
resumes by itself in the same workdir, exactly: the state holds everything, and dispatches
are cut at the same steps whether or not a run was interrupted. `runs.py` reads the config.

One run is a stack of one: `Loop` trains any number of runs that are at the same step, each with a
`Book` of its own. `programs.py` has what they compile.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.training import (
    checkpoints,
    evaluate,
    learning_curves,
    memory,
    metrics,
    profiling,
    programs,
    progress,
    runs,
    schedule,
    signals,
    steps,
    summaries,
    units,
    workdirs,
)

Compiled = programs.Alone | programs.Together
_norm = jax.jit(optax.tree.norm)
Outcome = dict[str, Any] | errors.Diverged | errors.Abandoned  # Results, or why there are none.


def train_and_evaluate(
    config: config_dict.ConfigDict, workdir: str, *, profile_steps: str | None = None
) -> dict[str, Any]:
    """Trains to the end of the schedule, or until it is told to stop; returns the results."""
    trace = profiling.Trace(workdir, profile_steps)
    workdirs.check_place(workdir)
    workdirs.check_config(workdir, config)
    with contextlib.ExitStack() as stack:
        # Before anything compiles: what a handler raises inside the compiler would be lost.
        with signals.StopRequests() as stop:
            run = runs.make_run(config)
            stop.check()
            book = stack.enter_context(open_book(run, workdir))
            logging.info("\n%s", summaries.describe_run(run, workdir))
            (loop,) = train_turns([book], programs.Alone(run), trace)
        loop.score_best()
    results = book.outcome
    if not isinstance(results, dict):
        raise results
    if jax.process_index() == 0:
        workdirs.write_json(workdir, "results.json", results)
        try:
            learning_curves.draw(workdir, unit=run.task.score_unit)
        except ImportError:
            logging.info("no learning_curve.png: matplotlib is not installed")
        logging.info("\n%s", summaries.describe_results(results, run.task.score_unit, workdir))
    return results


def train(books: Sequence["Book"], compiled: Compiled) -> list[Outcome]:
    """Trains runs to their ends; returns what came out, by book."""
    for loop in train_turns(books, compiled):
        loop.score_best()
    return [book.outcome for book in books]


def train_turns(
    books: Sequence["Book"], compiled: Compiled, trace: profiling.Trace | None = None
) -> list["Loop"]:
    """All turns; runs that are at the same point share a loop."""
    with signals.StopRequests() as stop:
        restored = [book.restore() for book in books]
        stop.check()
        groups: dict[tuple[int, int], list[tuple[Book, Any]]] = {}
        for book, state in zip(books, restored, strict=True):
            point = (0 if state is None else int(state.step), len(book.done.history))
            groups.setdefault(point, []).append((book, state))
        loops = []
        for _, group in sorted(groups.items()):
            loop = Loop([book for book, _ in group], compiled, trace or profiling.Trace("."))
            states = [state for _, state in group if state is not None]
            loop.train(compiled.stack(states) if states else compiled.init())
            loops.append(loop)
    return loops


class Book:
    """What is kept of a run in its workdir: numbers, decisions and checkpoints.

    Args:
      on_turn: called after each evaluation with its turn and the best cross-entropy so far; a line
        is logged without it.
    """

    def __init__(
        self,
        run: runs.Run,
        workdir: str,
        saved: checkpoints.Checkpoints,
        on_turn: Callable[[int, float], None] | None = None,
    ):
        self.run, self.workdir, self.saved = run, workdir, saved
        self.done = schedule.Progress()
        self.outcome: Any = None  # An `Outcome` once the run has ended.
        self._on_turn = on_turn
        self._writer: Any = None

    def restore(self) -> steps.TrainState | None:
        """The newest good state of the workdir, if there is one; the numbers go on from there."""
        restored = self.saved.restore(self.run.abstract_state())
        step = None
        if restored is not None:
            logging.info("resuming at step %d", restored.step)
            self.done = schedule.Progress.from_dict(restored.info["progress"])
            step = restored.step if restored.step or self.done.history else None
        elif known := max((r["step"] for r in metrics.read_metrics(self.workdir)), default=0):
            # The first save is waited for, so there was a checkpoint.
            raise errors.UsageError(
                f"{self.workdir} has metrics up to step {known} but no checkpoint: put the folder "
                "checkpoints back from a copy, or use another workdir; to start from zero here, "
                "delete metrics.jsonl"
            )
        self._writer = metrics.MetricWriter(self.workdir, step)
        return None if restored is None else restored.state

    def close(self) -> None:
        """Closes the files."""
        if self._writer is not None:
            self._writer.close()

    @contextlib.contextmanager
    def keep_end(self) -> Iterator[None]:
        """What ends this run is kept as its outcome, and does not end the others."""
        try:
            yield
        except (errors.Diverged, errors.Abandoned) as ended:
            self.outcome = ended

    @property
    def stop(self) -> schedule.Stop | None:
        """Why the run has ended, or None; it follows from what is saved, also after a resume."""
        return schedule.should_stop(self.done, self.run.rules) if self.done.history else None

    @property
    def end_of_turn(self) -> int:
        """The step at which the next evaluation is due."""
        return len(self.done.history) * self.run.rules.steps_per_turn

    @property
    def hyper(self) -> steps.Hyperparameters:
        """The numbers of the coming steps."""
        rate = self.run.hyper.learning_rate * self.done.learning_rate_factor
        return self.run.hyper._replace(learning_rate=rate)

    def note_steps(self, step: int, found: Mapping[str, np.ndarray], seconds: float) -> float:
        """Records the metrics [S] of the steps after `step`; returns the mean loss."""
        means = {name: float(values.mean(dtype=np.float64)) for name, values in found.items()}
        loss, count = means.pop("loss_nats"), len(found["loss_nats"])
        means["learning_rate"] = self.hyper.learning_rate
        self._writer.write(step + count, "train", loss_nats=loss, **means)
        finite = np.isfinite(list(found.values())).all(0)
        if not finite.all():
            raise self.diverged(f"the loss of step {step + int(np.argmin(finite)) + 1}")
        speed = count * self.run.tokens_per_step / seconds
        self._writer.write_speed(step + count, tokens_per_second=speed)
        return loss

    def decide(
        self, step: int, scores: Sequence[evaluate.Scores], *, averaged: bool
    ) -> tuple[schedule.Decision, evaluate.Scores]:
        """Records the scores of all candidates; the best one decides what is to be done."""
        best = scores[int(np.argmin([score.valid_nats for score in scores]))]
        self.done, decision = schedule.decide(self.done, self.run.rules, best.valid_nats)
        turn = self.done.turn
        self._writer.write(
            step, "eval", turn=turn, **best._asdict(), averaged=averaged, best=decision.improved
        )
        if not math.isfinite(best.valid_nats):
            raise self.diverged(f"the validation cross-entropy of turn {turn}")
        if self._on_turn is None:
            logging.info("%s", self.turn_line(turn, best, decision))
        return decision, best

    def save_turn(self, state, decision: schedule.Decision, scores: evaluate.Scores) -> None:
        """Saves the state that the coming turn begins with."""
        self.save(state, best=decision.improved, temperature=scores.temperature)
        if self._on_turn is not None:
            self._on_turn(self.done.turn, self.done.best_xe)

    def save(self, state, *, best: bool, **info: Any) -> None:
        """Saves in the background, but nothing that is broken."""
        if not np.isfinite(_norm(state.params)):
            raise self.diverged("a weight")
        info["progress"] = self.done.to_dict()
        first = self.saved.latest_step is None
        self.saved.save(int(state.step), state, info=info, best=best)
        if first:
            self.saved.wait()  # A place that cannot be written to shows before the first step.

    def restore_best(self) -> checkpoints.Restored:
        """The best state of the run."""
        best = self.saved.restore(self.run.abstract_state(), which="best")
        assert best is not None, "every run saves its first evaluation"
        return best

    def results(self, best: checkpoints.Restored, nats: dict[str, float]) -> dict[str, Any]:
        """For results.json: the scores of the best weights on each split."""
        temperature = best.info["temperature"]
        results = {"best_turn": self.done.best_turn, "step": best.step, "temperature": temperature}
        unit = self.run.task.score_unit
        for split, value in nats.items():
            score = units.in_unit(value, unit)
            results |= {f"{split}_nats": value, f"{split}_{unit}": score}
        return results

    def interrupted(self, state) -> errors.Interrupted:
        """Saves what the last evaluation has not saved already."""
        step = int(state.step)
        self.saved.wait()
        if self.saved.latest_step != step:
            self.save(state, best=False)
            self.saved.wait()
        return errors.Interrupted(
            f"stopped at step {step}, saved in {self.workdir}; the same command goes on"
        )

    def diverged(self, what: str) -> errors.Diverged:
        """What to say when a number is not finite."""
        self.saved.wait()
        good = self.saved.latest_step
        kept = f"the last good checkpoint is that of step {good}" if good is not None else "none"
        rate, clip = (self.run.config.optimizer.get(k) for k in ("learning_rate", "clip_norm"))
        return errors.Diverged(
            f"{what} is not finite; {kept} in {self.workdir}. Try, in another workdir, a lower "
            f"optimizer.learning_rate (now {rate:g}), model.layer_norm=True or a lower "
            f"optimizer.clip_norm (now {clip})"
        )

    def turn_line(self, turn, scores, decision) -> str:
        """One line for people."""
        unit = self.run.task.score_unit
        marks = " *" if decision.improved else ""
        marks += ", averaging starts" if decision.start_averaging else ""
        marks += ", learning rate drops" if decision.drop_learning_rate else ""
        return (
            f"turn {turn}/{self.run.rules.turns}: valid {units.show(scores.valid_nats, unit)}, "
            f"train {units.show(scores.train_nats, unit)}, "
            f"temperature {scores.temperature:.2f}{marks}"
        )


@contextlib.contextmanager
def open_book(
    run: runs.Run, workdir: str, on_turn: Callable[[int, float], None] | None = None
) -> Iterator[Book]:
    """The book of a run, with the files that a workdir begins with."""
    memory.check(run)
    vocabulary = run.task.vocabulary.to_json()
    seal = workdirs.seal(run.config, vocabulary)
    workdirs.check_place(workdir)
    with checkpoints.Checkpoints(workdir, seal=seal) as saved:
        workdirs.write_run_files(workdir, run.config, vocabulary)
        book = Book(run, workdir, saved, on_turn)
        with contextlib.closing(book):
            yield book


class Loop:
    """The turns of runs that are at the same step; one that ends early is left out of the rest."""

    def __init__(self, books: Sequence[Book], compiled: Compiled, trace: profiling.Trace):
        self.books, self._compiled, self._trace = list(books), compiled, trace

    @property
    def active(self) -> list[int]:
        """Which runs go on."""
        return [i for i, book in enumerate(self.books) if not (book.outcome or book.stop)]

    def train(self, state: Any) -> None:
        """Turn after turn, until all have come to an end."""
        run = self._compiled.run
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(signals.StopRequests())
            self._bar = stack.enter_context(
                progress.Bar(
                    run.rules.turns * run.rules.steps_per_turn,
                    run.tokens_per_step * len(self.books),
                    first_step=int(state.step),
                    unit=run.task.score_unit,
                )
            )
            while active := self.active:
                if stop.requested():
                    raise self.interrupted(state)
                if int(state.step) >= self.books[active[0]].end_of_turn:
                    state = self.evaluate_turn(state)
                else:
                    state = self.train_some(state)
        if len(self.books) == 1 and (reason := self.books[0].stop):
            logging.info("stopping: %s", reason.message)

    def train_some(self, state: Any) -> Any:
        """One dispatch: `log_every` steps, or those that are left of the turn."""
        step, active = int(state.step), self.active
        left = self.books[active[0]].end_of_turn - step
        count = min(self._compiled.run.config.log_every, left)
        hyper = [book.hyper for book in self.books]
        started = time.perf_counter()
        with self._trace.steps(step, count):
            state, found = self._compiled.train_steps(state, hyper, count)
        seconds, mean = time.perf_counter() - started, []
        for i in active:
            with self.books[i].keep_end():
                own = {name: values[i] for name, values in found.items()}
                mean.append(self.books[i].note_steps(step, own, seconds))
        self._bar.update(step + count, float(np.mean(mean)) if mean else math.nan)
        return state

    def evaluate_turn(self, state: Any) -> Any:
        """Evaluates, decides, saves."""
        step, decided = int(state.step), {}
        with self._bar.paused():
            scores, averaged = self._compiled.evaluate_turn(state)
        for i in self.active:
            with self.books[i].keep_end():
                found = [candidate[i] for candidate in scores]
                decided[i] = self.books[i].decide(step, found, averaged=bool(averaged[i]))
        start = [i in decided and decided[i][0].start_averaging for i in range(len(averaged))]
        xes = [[score.valid_nats for score in candidate] for candidate in scores]
        state = self._compiled.after_evaluation(state, start, xes)
        states = self._compiled.unstack(state, len(self.books))
        for i, (decision, best) in decided.items():
            with self.books[i].keep_end():
                self.books[i].save_turn(states[i], decision, best)
        return state

    def score_best(self) -> None:
        """Validation and test scores of the best weights, at the temperature of their turn."""
        ended = [book for book in self.books if book.outcome is None]
        if not ended:
            return
        bests = [book.restore_best() for book in ended]
        temperatures = [best.info["temperature"] for best in bests]
        nats = self._compiled.score([best.state for best in bests], temperatures)
        for i, (book, best) in enumerate(zip(ended, bests, strict=True)):
            own = {split: float(values[i]) for split, values in nats.items()}
            book.outcome = book.results(best, own)

    def interrupted(self, state: Any) -> errors.Interrupted:
        """Saves those that go on."""
        states = self._compiled.unstack(state, len(self.books))
        if len(self.books) == 1:
            return self.books[0].interrupted(states[0])
        for i in self.active:
            with self.books[i].keep_end():
                self.books[i].interrupted(states[i])
        step = int(state.step)
        return errors.Interrupted(f"stopped at step {step}, all saved; the same command goes on")

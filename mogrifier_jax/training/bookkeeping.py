"""What is kept of a run in its workdir: numbers, decisions and checkpoints.

`train.py` has one book, of its run; `stacked.py` has one for each of the runs it makes at once.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import logging

from mogrifier_jax import errors
from mogrifier_jax.training import checkpoints, evaluate, metrics, runs, schedule, steps, workdirs

_norm = jax.jit(optax.tree.norm)


class Book:
    """What is kept of a run in its workdir: numbers, decisions and checkpoints.

    Args:
      on_turn: called after each evaluation with its turn and the best cross-entropy so far, in
        place of a line for people.
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

    @property
    def stop(self) -> schedule.Stop | None:
        """Why the run has come to its end, if it has; asked of what is saved, it stays there."""
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

    def note_steps(self, step: int, losses: np.ndarray, norms: np.ndarray, seconds: float) -> float:
        """Records the steps after `step`, whose losses and norms are [S]; returns the mean loss."""
        last, loss = step + len(losses), float(losses.mean(dtype=np.float64))
        self._writer.write(
            last,
            "train",
            loss_nats=loss,
            grad_norm=norms.mean(dtype=np.float64),
            learning_rate=self.hyper.learning_rate,
        )
        finite = np.isfinite(losses) & np.isfinite(norms)
        if not finite.all():
            raise self.diverged(f"the loss of step {step + int(np.argmin(finite)) + 1}")
        speed = len(losses) * self.run.tokens_per_step / seconds
        self._writer.write_speed(last, tokens_per_second=speed)
        return loss

    def decide(
        self, step: int, scores: Sequence[evaluate.Scores], *, averaged: bool
    ) -> tuple[schedule.Decision, evaluate.Scores]:
        """Records the scores of all candidates; the best one decides what is to be done."""
        turn = len(self.done.history)
        best = scores[int(np.argmin([score.valid_nats for score in scores]))]
        self.done, decision = schedule.decide(
            self.done, self.run.rules, turn=turn, xe=best.valid_nats
        )
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
            score = metrics.in_unit(value, unit)
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
            f"optimizer.learning_rate (now {rate:g}) or optimizer.clip_norm (now {clip})"
        )

    def turn_line(self, turn, scores, decision) -> str:
        """One line for people."""
        unit = self.run.task.score_unit
        marks = " *" if decision.improved else ""
        marks += ", averaging starts" if decision.start_averaging else ""
        marks += ", learning rate drops" if decision.drop_learning_rate else ""
        return (
            f"turn {turn}/{self.run.rules.turns}: valid {metrics.show(scores.valid_nats, unit)}, "
            f"train {metrics.show(scores.train_nats, unit)}, "
            f"temperature {scores.temperature:.2f}{marks}"
        )


@contextlib.contextmanager
def open_book(
    run: runs.Run, workdir: str, on_turn: Callable[[int, float], None] | None = None
) -> Iterator[Book]:
    """The book of a run, with the files that a workdir begins with."""
    vocabulary = run.task.vocabulary.to_json()
    seal = workdirs.seal(run.config, vocabulary, ignore=runs.FREE_KEYS)
    workdirs.check_place(workdir)
    with checkpoints.Checkpoints(workdir, seal=seal) as saved:
        workdirs.write_run_files(workdir, run.config, vocabulary)
        book = Book(run, workdir, saved, on_turn)
        with contextlib.closing(book):
            yield book

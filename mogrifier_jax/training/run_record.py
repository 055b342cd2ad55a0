"""Passes what training measures to metrics, checkpoints and results; refuses NaN and infinity.

The loop of `train.py` reports its measurements and decisions to the record, which saves metrics,
checkpoints and results.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from mogrifier_jax import errors, files
from mogrifier_jax.training import (
    checkpoints,
    memory,
    metrics,
    runs,
    schedule,
    steps,
    turn_evaluation,
    units,
    workdirs,
)

_norm = jax.jit(optax.tree.norm)
TEMPERATURE = files.Number(float, 1e-6)  # Logits are divided by it.
INFO = {  # Of a checkpoint of a run. Early versions did not remember metrics.
    "progress": schedule.PROGRESS,
    "temperature?": (TEMPERATURE, None),
    "metrics?": (metrics.DIGEST_SCHEMA, None),
}


@contextlib.contextmanager
def open_record(run: runs.Run, workdir: str) -> Iterator["RunRecord"]:
    """Opens the record of a run, and writes the files that describe the run."""
    memory.check(run)
    vocabulary = run.task.vocabulary.to_json()
    fingerprint = workdirs.make_fingerprint(run.config, vocabulary, run.task.digests)
    workdirs.check_place(workdir)
    with checkpoints.Checkpoints(workdir, fingerprint=fingerprint, info=INFO) as saved:
        workdirs.write_run_files(workdir, run.config, vocabulary)
        with contextlib.closing(RunRecord(run, workdir, saved)) as record:
            yield record


class RunRecord:
    """The metrics, progress, checkpoints and results of one run."""

    def __init__(self, run: runs.Run, workdir: str, saved: checkpoints.Checkpoints):
        self.run, self.workdir, self.saved = run, workdir, saved
        self.progress = schedule.Progress()
        self._writer: metrics.MetricWriter | None = None

    def restore(self) -> steps.TrainState | None:
        """The newest good state of the workdir, or None; metrics continue from there."""
        restored = self.saved.restore(self.run.abstract_state())
        step = None
        if restored is not None:
            logging.info("resuming at step %d", restored.step)
            self.progress = schedule.Progress.from_dict(restored.info["progress"])
            step = restored.step if restored.step or self.progress.history else None
        elif known := max((r["step"] for r in metrics.read_metrics(self.workdir)), default=0):
            # Training starts after the first save, so there was a checkpoint.
            raise errors.UsageError(
                f"{self.workdir} has metrics up to step {known} but no checkpoint: put the folder "
                "checkpoints back from a copy, or use another workdir; to start from zero here, "
                "delete metrics.jsonl"
            )
        digest = None if restored is None else restored.info.get("metrics")
        self._writer = metrics.MetricWriter(self.workdir, step, digest, self.evaluations)
        return None if restored is None else restored.state

    @property
    def evaluations(self) -> list[files.JsonObject]:
        """The evaluations that the progress remembers, as records of metrics."""
        return [
            {
                "step": turn * self.run.rules.steps_per_turn,
                "kind": "eval",
                "turn": turn,
                "valid_nats": nats if math.isfinite(nats) else str(nats),
            }
            for turn, nats in enumerate(self.progress.history)
        ]

    def close(self) -> None:
        """Closes the files of metrics."""
        if self._writer is not None:
            self._writer.close()

    @property
    def writer(self) -> metrics.MetricWriter:
        """The files of metrics, which `restore` opens at the right line."""
        assert self._writer is not None, "restore comes first"
        return self._writer

    @property
    def ended(self) -> schedule.Stop | None:
        """Why the run has ended, or None; it follows from the saved progress alone."""
        progress = self.progress
        return schedule.should_stop(progress, self.run.rules) if progress.history else None

    @property
    def end_of_turn(self) -> int:
        """The step at which the next evaluation is due."""
        return len(self.progress.history) * self.run.rules.steps_per_turn

    @property
    def hyper(self) -> steps.Hyperparameters:
        """The hyperparameters of the next steps; the learning rate includes its drops so far."""
        rate = self.run.hyper.learning_rate * self.progress.learning_rate_factor
        return self.run.hyper._replace(learning_rate=rate)

    def write_steps(self, step: int, measured: Mapping[str, np.ndarray], seconds: float) -> float:
        """Records the metrics [S] of the steps after `step`; returns the mean loss.

        The result is NaN if a metric is not finite and the run may restart from its best state.
        """
        means: dict[str, Any] = {
            name: float(values.mean(dtype=np.float64)) for name, values in measured.items()
        }
        loss, count = means.pop("loss_nats"), len(measured["loss_nats"])
        means["learning_rate"] = self.hyper.learning_rate
        self.writer.write(step + count, "train", loss_nats=loss, **means)
        finite = np.isfinite(list(measured.values())).all(0)
        if not finite.all():
            restarted = schedule.restart(self.progress, self.run.rules)
            if restarted is None:
                raise self.diverged(f"the loss of step {step + int(np.argmin(finite)) + 1}")
            self.progress = restarted
            return math.nan
        speed = count * self.run.tokens_per_step / seconds
        self.writer.write_speed(step + count, tokens_per_second=speed)
        return loss

    def decide(
        self, step: int, scores: turn_evaluation.Scores, *, averaged: bool
    ) -> schedule.Decision:
        """Records the evaluation of a turn, and decides what follows from it."""
        self.progress, decision = schedule.decide(self.progress, self.run.rules, scores.valid_nats)
        turn, best = self.progress.turn, decision.improved
        self.writer.write(step, "eval", turn=turn, **scores._asdict(), averaged=averaged, best=best)
        if not math.isfinite(scores.valid_nats) and not decision.restart:
            raise self.diverged(f"the validation cross-entropy of turn {turn}")
        return decision

    def save(self, state: steps.TrainState, *, best: bool, **info: Any) -> None:
        """Saves the state in the background, unless a weight is not finite."""
        if not np.isfinite(_norm(state.params)):
            raise self.diverged("a weight")
        info["progress"] = self.progress.to_dict()
        info["metrics"] = self.writer.digest_lines()
        first = self.saved.latest_step is None
        self.saved.save(int(state.step), state, info=info, best=best)
        if first:
            self.saved.wait()  # If nothing can be written there, fail before the first step.

    def save_now(self, state: steps.TrainState) -> None:
        """Saves the state of a run that is about to stop, unless it is saved already."""
        self.saved.wait()
        if self.saved.latest_step != int(state.step):
            self.save(state, best=False)
            self.saved.wait()

    def restore_best(self) -> checkpoints.Restored:
        """The state with the best validation score."""
        best = self.saved.restore(self.run.abstract_state(), which="best")
        assert best is not None, "every run saves its first evaluation"
        errors.check(
            best.info.get("temperature") is not None,
            f"the best checkpoint in {self.workdir}, of step {best.step}, has no temperature, so "
            "it is not as it was written; restore it from a copy or use another workdir",
        )
        return best

    def restart(self, step: int) -> steps.TrainState:
        """The best state, from which a run that has diverged continues at this step.

        The carry is reset to zeros, because the carry of the best state belongs to another position
        in the text. The state is saved, so that a run that is killed now resumes from it.
        """
        self.saved.wait()
        best = self.restore_best()
        carry = jax.tree.map(jnp.zeros_like, best.state.carry)
        state = dataclasses.replace(
            best.state, step=jnp.full_like(best.state.step, step), carry=carry
        )
        rate = self.hyper.learning_rate
        values = dict(restarts=self.progress.restarts, best_step=best.step, learning_rate=rate)
        self.writer.write(step, "restart", **values)
        logging.warning(
            "diverged by step %d: continuing from the weights of step %d at a learning rate of %g",
            *(step, best.step, rate),
        )
        if step < self.end_of_turn:  # Otherwise the evaluation that follows saves it.
            self.save(state, best=False, temperature=best.info["temperature"])
        return state

    def write_results(
        self, best: checkpoints.Restored, nats: Mapping[str, float]
    ) -> files.JsonObject:
        """Writes results.json, the scores of the best weights on each split, and returns it."""
        temperature, unit = best.info["temperature"], self.run.task.score_unit
        results: files.JsonObject = {
            "best_turn": self.progress.best_turn,
            "step": best.step,
            "temperature": temperature,
        }
        for split, value in nats.items():
            results |= {f"{split}_nats": value, f"{split}_{unit}": units.in_unit(value, unit)}
        if jax.process_index() == 0:
            workdirs.write_json(self.workdir, "results.json", results)
        return results

    def diverged(self, what: str) -> errors.Diverged:
        """The error for a number that is not finite."""
        self.saved.wait()
        kept, good = f"{self.workdir} has no checkpoint yet", self.saved.latest_step
        if good is not None:
            kept = f"the last good checkpoint, in {self.workdir}, is from step {good}"
        rate, clip = (self.run.config.optimizer.get(k) for k in ("learning_rate", "clip_norm"))
        return errors.Diverged(
            f"{what} is not finite; {kept}. Try, in another workdir, a lower "
            f"optimizer.learning_rate (now {rate:g}), model.layer_norm=True or a lower "
            f"optimizer.clip_norm (now {clip})"
        )

    def describe_turn(self, scores: turn_evaluation.Scores, decision: schedule.Decision) -> str:
        """One line about the turn that was just evaluated."""
        unit = self.run.task.score_unit
        marks = ", best so far" if decision.improved else ""
        marks += ", averaging starts" if decision.start_averaging else ""
        marks += ", learning rate drops" if decision.drop_learning_rate else ""
        return (
            f"turn {self.progress.turn}/{self.run.rules.turns}: "
            f"valid {units.show(scores.valid_nats, unit)}, "
            f"train {units.show(scores.train_nats, unit)}, "
            f"temperature {scores.temperature:.2f}{marks}"
        )

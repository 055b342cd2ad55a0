"""train_and_evaluate(config, workdir): the whole run, from top to bottom.

A run is `turns` x `steps_per_turn` optimizer steps with an evaluation before each turn. It
resumes by itself in the same workdir, exactly: the state holds everything, and dispatches
are cut at the same steps whether or not a run was interrupted. `runs.py` reads the config.
"""

import contextlib
import math
import time
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import (
    checkpoints,
    errors,
    evaluate,
    metrics,
    plots,
    progress,
    runs,
    runtime,
    schedule,
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
    workdirs.check_config(workdir, config, ignore=runs.FREE_KEYS)
    run = runs.make_run(config)
    with checkpoints.Checkpoints(workdir) as saved:
        workdirs.write_run_files(workdir, config, run.task.vocabulary.to_json())
        state, done = restore_or_init(run, saved)
        logging.info("\n%s", summaries.describe_run(run, state, workdir))
        loop = Loop(run, workdir, saved, trace)
        results = loop.score_best(loop.train(state, done))
    if jax.process_index() == 0:
        workdirs.write_json(workdir, "results.json", results)
        draw_learning_curve(run, workdir)
        logging.info("\n%s", summaries.describe_results(results, run.task.score_unit, workdir))
    return results


def restore_or_init(
    run: runs.Run, saved: checkpoints.Checkpoints
) -> tuple[steps.TrainState, schedule.Progress]:
    """The newest good state of the workdir with its progress, or a fresh one."""
    abstract = run.abstract_state()
    restored = saved.restore(abstract)
    if restored is not None:
        logging.info("resuming at step %d", restored.step)
        return restored.state, schedule.Progress.from_dict(restored.info["progress"])
    return jax.jit(run.init_state, out_shardings=runs.shardings_of(abstract))(), schedule.Progress()


def draw_learning_curve(run: runs.Run, workdir: str) -> None:
    """Leaves a picture, if there is anything to draw it with."""
    try:
        plots.learning_curve(workdir, unit=run.task.score_unit)
    except ImportError:
        logging.info("no learning_curve.png: matplotlib is not installed")


def is_averaged(average: Any) -> bool:
    """Whether any running mean has weights in it."""
    paths = jax.tree_util.tree_leaves_with_path(average)
    return any(int(leaf) > 0 for path, leaf in paths if getattr(path[-1], "name", "") == "n")


class Loop:
    """The turns of a run."""

    def __init__(
        self, run: runs.Run, workdir: str, saved: checkpoints.Checkpoints, trace: runtime.Trace
    ):
        self.run, self.workdir, self.saved, self._trace = run, workdir, saved, trace
        self._log_every = run.config.get("log_every", 20)
        self._steps = run.jit_steps()
        average = run.program.average
        # An average that changed its place would have the train step compiled again.
        in_place = runs.shardings_of(run.abstract_state().average)
        self._candidates = jax.jit(average.candidates)
        self._value = jax.jit(average.value)
        self._after_evaluation = jax.jit(average.after_evaluation, out_shardings=in_place)
        self._start_averaging = jax.jit(average.start, out_shardings=in_place)
        self._norm = jax.jit(optax.tree.norm)
        self._evaluate = evaluate.TurnEvaluation(
            run.model,
            run.task,
            run.evaluation,
            batch_size=run.batch_size // run.program.accumulate,
            window=run.config.data.window,
        )

    def train(self, state: steps.TrainState, done: schedule.Progress) -> schedule.Progress:
        """Turn after turn, until a rule says stop."""
        rules = self.run.rules
        first = int(state.step)
        fresh = first == 0 and not done.history
        with contextlib.ExitStack() as stack:
            self._stop = stack.enter_context(signals.StopRequests())
            self._writer = stack.enter_context(
                metrics.MetricWriter(self.workdir, None if fresh else first)
            )
            self._bar = stack.enter_context(
                progress.Progress(
                    rules.turns * rules.steps_per_turn,
                    self.run.tokens_per_step,
                    first_step=first,
                    unit=self.run.task.score_unit,
                )
            )
            # Asked of what is saved, so that a run that had come to its end stays there.
            while not (done.history and (reason := schedule.should_stop(done, rules))):
                if self._stop.requested():
                    raise self.interrupted(state, done)
                if int(state.step) >= self.end_of_turn(done):
                    state, done = self.evaluate_turn(state, done)
                else:
                    state = self.train_some(state, done)
        logging.info("stopping: %s", reason.message)
        return done

    def end_of_turn(self, done: schedule.Progress) -> int:
        """The step at which the next evaluation is due."""
        return len(done.history) * self.run.rules.steps_per_turn

    def train_some(self, state, done) -> steps.TrainState:
        """One dispatch: `log_every` steps, or those that are left of the turn."""
        step = int(state.step)
        count = min(self._log_every, self.end_of_turn(done) - step)
        rate = self.run.hyper.learning_rate * done.learning_rate_factor
        hyper = self.run.hyper._replace(learning_rate=rate)
        started = time.perf_counter()
        with self._trace.steps(step, count):
            state, found = self._steps(state, self.run.task.stream, hyper, num_steps=count)
            losses, norms = np.asarray(found["loss_nats"]), np.asarray(found["grad_norm"])
        seconds = time.perf_counter() - started
        loss = losses.mean(dtype=np.float64)
        self._writer.write(
            step + count,
            "train",
            loss_nats=loss,
            grad_norm=norms.mean(dtype=np.float64),
            learning_rate=rate,
        )
        finite = np.isfinite(losses) & np.isfinite(norms)
        if not finite.all():
            raise self.diverged(f"the loss of step {step + int(np.argmin(finite)) + 1}")
        self._bar.update(step + count, loss)
        speed = count * self.run.tokens_per_step / seconds
        self._writer.write_speed(step + count, tokens_per_second=speed)
        return state

    def evaluate_turn(self, state, done) -> tuple[steps.TrainState, schedule.Progress]:
        """Evaluates, decides, saves."""
        step, turn = int(state.step), len(done.history)
        with self._bar.paused():
            weights = self._candidates(state.average, state.params)
            scores = [self._evaluate(candidate) for candidate in weights]
        xes = [score.valid_nats for score in scores]
        best = scores[int(np.argmin(xes))]
        done, decision = schedule.decide(done, self.run.rules, turn=turn, xe=best.valid_nats)
        self._writer.write(
            step,
            "eval",
            turn=turn,
            **best._asdict(),
            averaged=is_averaged(state.average),
            best=decision.improved,
        )
        if not math.isfinite(best.valid_nats):
            raise self.diverged(f"the validation cross-entropy of turn {turn}")
        logging.info("%s", self.turn_line(turn, best, decision))
        average = self._after_evaluation(state.average, *xes)
        if decision.start_averaging:
            average = self._start_averaging(average)
        state = state.replace(average=average)
        self.save(state, done, best=decision.improved, temperature=best.temperature)
        return state, done

    def save(self, state, done, *, best: bool, **info: Any) -> None:
        """Saves in the background, but nothing that is broken."""
        if not np.isfinite(self._norm(state.params)):
            raise self.diverged("a weight")
        info["progress"] = done.to_dict()
        self.saved.save(int(state.step), state, info=info, best=best)

    def score_best(self, done: schedule.Progress) -> dict[str, Any]:
        """Validation and test scores of the best weights, at the temperature of their turn."""
        best = self.saved.restore(self.run.abstract_state(), which="best")
        assert best is not None, "every run saves its first evaluation"
        weights = self._value(best.state.average, best.state.params)
        temperature = best.info["temperature"]
        results = {"best_turn": done.best_turn, "step": best.step, "temperature": temperature}
        unit = self.run.task.score_unit
        for split in ("valid", "test"):
            nats = self._evaluate.score(split, weights, temperature)
            score = metrics.perplexity(nats) if unit == "ppl" else metrics.bits(nats)
            results |= {f"{split}_nats": nats, f"{split}_{unit}": score}
        return results

    def interrupted(self, state, done) -> errors.Interrupted:
        """Saves what the last evaluation has not saved already."""
        step = int(state.step)
        self.saved.wait()
        if self.saved.latest_step != step:
            self.save(state, done, best=False)
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

"""train_and_evaluate(config, workdir): the whole run, from top to bottom.

A run is `turns` x `steps_per_turn` optimizer steps with an evaluation before each turn. It
resumes by itself in the same workdir, exactly: the state holds everything, and dispatches
are cut at the same steps whether or not a run was interrupted.
"""

import contextlib
import dataclasses
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import (
    averaging,
    checkpoints,
    errors,
    evaluate,
    metrics,
    models,
    optim,
    partitioning,
    plots,
    progress,
    schedule,
    signals,
    steps,
    tasks,
    workdirs,
)

# Sections that may differ when a run is resumed, as they do not move its numbers.
FREE_SECTIONS = ("mesh", "log_every", "data.source_dir", "data.data_dir")
SECTIONS = (
    *("seed", "log_every", "data", "model", "dropout", "optimizer"),
    *("averaging", "schedule", "evaluation", "mesh"),
)


class Run(NamedTuple):
    """A config made concrete: what is trained, on what, where, by which rules."""

    config: config_dict.ConfigDict
    mesh: jax.sharding.Mesh
    task: tasks.Task
    model: Any
    program: steps.Program
    hyper: steps.Hyperparameters
    rules: schedule.Rules

    @property
    def batch_size(self) -> int:
        """Global number of stripes."""
        return self.config.data.batch_size

    def init_state(self) -> steps.TrainState:
        """A fresh state; trace it under jit or eval_shape."""
        key = jax.random.key(self.config.seed)
        return steps.init_state(
            key, program=self.program, batch_size=self.batch_size, carries=self.task.carries
        )

    def abstract_state(self) -> steps.TrainState:
        """Shapes, dtypes and shardings of the state."""
        return partitioning.with_shardings(jax.eval_shape(self.init_state), self.mesh)

    def jit_steps(self) -> jax.stages.Wrapped:
        """(state, stream, hyper, num_steps=...) to (state, metrics), compiled as training runs it."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        return jax.jit(
            functools.partial(steps.train_steps, program=self.program),
            static_argnames="num_steps",
            donate_argnames="state",
            out_shardings=(shardings, partitioning.replicated(self.mesh)),
        )


def make_run(config: config_dict.ConfigDict, mesh: Any = None, task: Any = None) -> Run:
    """Reads every section of a config; what does not fit is an error before any compute."""
    for name in config:
        if name not in SECTIONS:
            raise errors.UsageError(f"config.{name} is read by nothing; remove it")
    mesh = mesh or partitioning.make_mesh(**config.mesh)
    data_options = {k: v for k, v in config.data.items() if k != "drop_state_probability"}
    stream_key = jax.random.fold_in(jax.random.key(config.seed), 1)
    task = task or tasks.make_task(stream_key, mesh, **data_options)
    model = models.make_model(
        len(task.vocabulary), encoder_decoder=task.encoder_decoder, **config.model
    )
    optimizer = dict(config.optimizer)
    learning_rate, l2_penalty = optimizer.pop("learning_rate"), optimizer.pop("l2_penalty")
    groups = optimizer.pop("accumulate", 1)
    reduce = optimizer.pop("accumulate_reduce", "mean")
    if groups < 1 or reduce not in ("sum", "mean"):
        raise errors.UsageError(
            f"optimizer.accumulate {groups} with accumulate_reduce {reduce!r} cannot be: give a "
            "number of groups of 1 or more, and 'sum' or 'mean'"
        )
    partitioning.check_fits(
        mesh,
        batch_size=config.data.batch_size,
        groups=groups,
        hidden_size=model.hidden_size,
    )
    average = dict(config.averaging)
    kind = average.pop("kind")
    triggers = (average.pop("trigger_turns", None), average.pop("trigger_at_the_latest", None))
    reject_unread("averaging", average)
    if kind != "triggered":
        triggers = (None, None)
    program = steps.Program(
        model,
        make(optim.make_optimizer, "optimizer", **optimizer),
        averaging.make_averaging(kind),
        task.batch_at,
        groups,
        reduce,
    )
    hyper = steps.Hyperparameters(
        learning_rate=learning_rate,
        l2_penalty=l2_penalty,
        drop_state_probability=config.data.get("drop_state_probability", 0.0),
        dropout=make_dropout(model, **config.dropout),
    )
    rules = make(
        schedule.Rules,
        "schedule",
        **config.schedule,
        averaging_turns=triggers[0],
        averaging_at_the_latest=triggers[1],
    )
    return Run(config, mesh, task, model, program, hyper, rules)


def make(function, section: str, **options):
    """Calls a constructor with a config section; a key that it lacks is named."""
    try:
        return function(**options)
    except TypeError as error:
        raise errors.UsageError(f"config.{section}: {error}; remove or correct it") from error


def reject_unread(section: str, left: dict[str, Any]) -> None:
    """Whatever is left of a section was misspelt."""
    if left:
        raise errors.UsageError(f"config.{section} has {', '.join(left)}, read by nothing")


def make_dropout(model: Any, **rates: float | None) -> models.Dropout:
    """The rates of `config.dropout`; a rate of zero takes the operation away."""
    unknown = rates.keys() - set(models.Dropout._fields)
    reject_unread("dropout", dict.fromkeys(unknown))
    for name, rate in rates.items():
        if rate is not None and not 0 <= rate < 1:
            raise errors.UsageError(
                f"dropout.{name} {rate} is not a probability of dropping: give 0 <= rate < 1"
            )
    projects = getattr(model, "mixture_components", 0) or model.embedding_size != model.hidden_size
    if rates.get("downprojected") is None:
        rates["downprojected"] = rates.get("output")
    if not projects:
        rates["downprojected"] = None
    return models.Dropout(**{name: rate or None for name, rate in rates.items()})


def train_and_evaluate(config: config_dict.ConfigDict, workdir: str) -> dict[str, Any]:
    """Trains to the end of the schedule, or until it is told to stop; returns the results."""
    workdirs.check_config(workdir, config, ignore=FREE_SECTIONS)
    run = make_run(config)
    with checkpoints.Checkpoints(workdir) as saved:
        workdirs.write_run_files(workdir, config, run.task.vocabulary.to_json())
        state, done = restore_or_init(run, saved)
        logging.info("\n%s", describe(run, state, workdir))
        done = Loop(run, workdir, saved).train(state, done)
        results = final_scores(run, saved, done)
    if jax.process_index() == 0:
        workdirs.write_json(workdir, "results.json", results)
        plots.learning_curve(workdir, unit=run.task.score_unit)
    return results


def restore_or_init(run: Run, saved: checkpoints.Checkpoints):
    """The newest good state of the workdir with its progress, or a fresh one."""
    abstract = run.abstract_state()
    restored = saved.restore(abstract)
    if restored is not None:
        logging.info("resuming at step %d", restored.step)
        return restored.state, schedule.Progress.from_dict(restored.info["progress"])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(run.init_state, out_shardings=shardings)(), schedule.Progress()


class Loop:
    """The turns of a run."""

    def __init__(self, run: Run, workdir: str, saved: checkpoints.Checkpoints):
        self.run, self.workdir, self.saved = run, workdir, saved
        config = run.config
        self._log_every = config.get("log_every", 20)
        if self._log_every < 1:
            raise errors.UsageError(f"log_every {self._log_every} must be at least 1 step")
        self._steps = run.jit_steps()
        average = run.program.average
        self._candidates = jax.jit(average.candidates)
        self._after_evaluation = jax.jit(average.after_evaluation)
        self._start_averaging = jax.jit(average.start)
        groups = run.program.accumulate
        self._evaluate = make(
            functools.partial(
                evaluate.TurnEvaluation,
                run.model,
                run.task,
                batch_size=run.batch_size // groups,
                window=config.data.window,
            ),
            "evaluation",
            **config.evaluation,
        )

    def train(self, state: steps.TrainState, done: schedule.Progress) -> schedule.Progress:
        """Turn after turn, until a rule says stop."""
        rules = self.run.rules
        config = self.run.config
        first = int(state.step)
        fresh = first == 0 and not done.history
        total = rules.turns * rules.steps_per_turn
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(signals.StopRequests())
            self._writer = stack.enter_context(
                metrics.MetricWriter(self.workdir, None if fresh else first)
            )
            self._bar = stack.enter_context(
                progress.Progress(
                    total,
                    config.data.batch_size * config.data.window,
                    first_step=first,
                    unit=self.run.task.score_unit,
                )
            )
            while True:
                step = int(state.step)
                if len(done.history) * rules.steps_per_turn <= step:
                    state, done, decision = self.evaluate_turn(state, done)
                    if decision.stop:
                        logging.info("stopping: %s", decision.stop.message)
                        return self.finish(decision, done)
                state = self.train_turn(state, done, stop)

    def evaluate_turn(self, state, done):
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
            averaged=bool(averaged(state.average)),
            best=decision.improved,
        )
        logging.info("%s", self.turn_line(turn, best, decision))
        average = self._after_evaluation(state.average, *xes)
        if decision.start_averaging:
            average = self._start_averaging(average)
        state = state.replace(average=average)
        if not math.isnan(best.valid_nats):
            info = {"progress": done.to_dict(), "temperature": best.temperature}
            self.saved.save(step, state, info=info, best=decision.improved)
        return state, done, decision

    def train_turn(self, state, done, stop):
        """The steps of a turn, in dispatches of `log_every`; stops in order when asked to."""
        rules, hyper = self.run.rules, self.run.hyper
        rate = hyper.learning_rate * done.learning_rate_factor
        hyper = hyper._replace(learning_rate=rate)
        end = len(done.history) * rules.steps_per_turn
        step = int(state.step)
        while step < end:
            if stop.requested():
                self.saved.save(step, state, info={"progress": done.to_dict()}, best=False)
                self.saved.wait()
                raise errors.Interrupted(
                    f"stopped at step {step}, saved in {self.workdir}; the same command goes on"
                )
            count = min(self._log_every, end - step)
            started = time.perf_counter()
            state, found = self._steps(state, self.run.task.stream, hyper, num_steps=count)
            losses = np.asarray(found["loss_nats"])
            if not np.isfinite(losses).all():
                raise self.diverged(step + int(np.argmin(np.isfinite(losses))) + 1)
            step += count
            self._writer.write(
                step,
                "train",
                loss_nats=losses.mean(dtype=np.float64),
                grad_norm=np.asarray(found["grad_norm"]).mean(dtype=np.float64),
                learning_rate=rate,
            )
            self._bar.update(step, float(losses.mean()))
            seconds = time.perf_counter() - started
            tokens = count * self.run.batch_size * self.run.config.data.window
            self._writer.write_speed(step, tokens_per_second=tokens / seconds)
        return state

    def diverged(self, step: int) -> errors.Diverged:
        """What to say when a loss is not finite."""
        self.saved.wait()
        return errors.Diverged(
            f"the loss is not finite at step {step}; the last good checkpoint is that of step "
            f"{self.saved.latest_step} in {self.workdir}. Try a lower optimizer.learning_rate "
            f"(now {self.run.hyper.learning_rate:g}) or optimizer.clip_norm"
        )

    def finish(self, decision, done):
        """NaN is a failure, anything else the end of the run."""
        self.saved.wait()
        if decision.stop.kind == "nan":
            raise errors.Diverged(
                f"{decision.stop.message}; the last good checkpoint is that of step "
                f"{self.saved.latest_step} in {self.workdir}. Try a lower optimizer.learning_rate"
            )
        return done

    def turn_line(self, turn, scores, decision) -> str:
        """One line for people."""
        unit = self.run.task.score_unit
        marks = " *" if decision.improved else ""
        marks += ", averaging starts" if decision.start_averaging else ""
        return (
            f"turn {turn}/{self.run.rules.turns}: valid {metrics.show(scores.valid_nats, unit)}, "
            f"train {metrics.show(scores.train_nats, unit)}, "
            f"temperature {scores.temperature:.2f}{marks}"
        )


def averaged(state: Any) -> bool:
    """Whether an average has anything in it."""
    counts = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if is_count(path)]
    return any(int(count) > 0 for count in counts)


def is_count(path) -> bool:
    """Whether a leaf is the number of weights in a running mean."""
    return getattr(path[-1], "name", "") == "n"


def final_scores(run: Run, saved: checkpoints.Checkpoints, done: schedule.Progress) -> dict:
    """Validation and test scores of the best weights, at the temperature of their turn."""
    abstract = run.abstract_state()
    best = saved.restore(abstract, which="best")
    weights = run.program.average.value(best.state.average, best.state.params)
    temperature = best.info["temperature"]
    config = run.config
    results = {"best_turn": done.best_turn, "step": best.step, "temperature": temperature}
    batch_size = run.batch_size // run.program.accumulate
    for split in ("valid", "test"):
        stripes = evaluate.num_stripes(
            run.task, split, batch_size, config.evaluation.lines_per_stripe
        )
        score = evaluate.Evaluation(run.model, run.task.plan(split, stripes))
        results[f"{split}_nats"] = score(weights, temperature, title=split).mean()
    return results


def describe(run: Run, state: steps.TrainState, workdir: str) -> str:
    """The table before the first step: sizes, parameters, memory, mesh, data."""
    model, rules = run.model, run.rules
    parts = models.count_parameters(model)
    options = dict(model.cell_options)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
    whole = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((state.params, state.opt_state, state.average, state.carry))
    )
    config = run.config
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
            ("batch x window", f"{run.batch_size} x {config.data.window}"),
        ],
        "run": [
            ("steps", f"{rules.turns} turns x {rules.steps_per_turn}"),
            ("memory of the weights", f"{total / 2**20:,.1f} MiB"),
            ("memory of the state", f"{whole / 2**20:,.1f} MiB"),
            ("mesh", ", ".join(f"{k} {v}" for k, v in run.mesh.shape.items())),
            ("devices", f"{jax.device_count()} {jax.devices()[0].device_kind}"),
            ("workdir", workdir),
        ],
    }
    return progress.table(sections)

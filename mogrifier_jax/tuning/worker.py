"""Tuning: a worker that asks for trials, runs them and reports their values until all are done.

    python -m mogrifier_jax.main --mode=tune --config=experiments/ptb.py --study=appendix_a \
        --trials=100 --parallel=4 --workdir=runs/tune_ptb
    python -m mogrifier_jax.main --mode=tune --study=dyneval --workdir=runs/ptb --parallel=2

The first command tunes training, the second dynamic evaluation of a trained run. A trial is a run
like any other. Any number of workers may share a storage, and `--parallel` starts several on this
machine. `studies.py` says what is tuned, `optuna_queue.py` hands out suggestions, and `report.py`
writes the report. The objective is the best validation cross-entropy, in nats per token. Compiled
programs are kept for the next trial of the same shape.
"""

import collections
import contextlib
import copy
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import jax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import dyneval, eval_options, methods
from mogrifier_jax.nn import models
from mogrifier_jax.training import (
    processes,
    programs,
    run_record,
    runs,
    signals,
    train,
    units,
    workdirs,
)
from mogrifier_jax.tuning import report, storages, studies, trials

POLL_SECONDS = 2.0  # Between looks at the trials of other workers.


class Executor(Protocol):
    """Runs trials, and notes the value of each or why it has none."""

    unit: str  # The unit of scores that people read.
    at_once: int  # How many trials it is given at a time,
    shared: tuple[str, ...]  # and the settings that are the same in all of them.

    def run(self, asked: Sequence[Any]) -> None:
        """Runs these trials."""


def tune(
    config: config_dict.ConfigDict,
    workdir: str,
    *,
    study: str,
    name: str,
    num_trials: int,
    prune: bool = False,
    **where: Any,
) -> list[trials.Record]:
    """Tunes the training of a config; `name` is the name of the experiment in the storage.

    `where` has the storage and the sampler: see `storages.open_queue`.
    """
    check_numbers(num_trials)
    tuned = check_study(study)
    with signals.postponed():
        queue = storages.open_queue(
            tuned,
            workdir,
            name=f"{name}-{tuned.name}",
            num_trials=num_trials,
            seed=config.seed,
            prune=config.schedule.turns if prune else None,
            config=plain_config(config),
            **where,
        )
        training = Training(tuned, config, workdir)
    return work(queue, training, tuned, workdir, config)


def tune_dyneval(
    run: str, options: config_dict.ConfigDict, *, num_trials: int, **where: Any
) -> list[trials.Record]:
    """Tunes dynamic evaluation of a trained run on its validation set.

    The study is in `dyneval_study` of the run. `options` are those of evaluation. As many trials
    as `options.dyneval.parallel` run side by side, each with its own adapting weights.
    """
    check_numbers(num_trials)
    errors.check(run != "", "--workdir is missing; give that of a trained run")
    eval_options.check(options)
    adapting = Adapting(run, options)
    tuned = studies.load(f"dyneval_{'word' if adapting.unit == 'ppl' else 'character'}")
    workdir = dyneval_workdir(run)
    queue = storages.open_queue(
        tuned,
        workdir,
        name=f"{os.path.basename(os.path.abspath(run))}-{tuned.name}",
        num_trials=num_trials,
        seed=options.seed,
        step=adapting.scorer.loaded.info["step"],
        **where,
    )
    return work(queue, adapting, tuned, workdir)


def dyneval_workdir(run: str) -> str:
    """The folder of a study of dynamic evaluation."""
    return os.path.join(run, "dyneval_study")


def check_numbers(num_trials: int, parallel: int = 1) -> None:
    """Refuses numbers below 1, and a worker of several processes."""
    if num_trials < 1:
        raise errors.UsageError(f"--trials={num_trials} must be at least 1")
    processes.check_parallel(parallel)
    if jax.process_count() > 1:
        raise errors.UsageError(
            "--mode=tune runs in one process: start one worker on each host, without "
            "--coordinator, all with the same --storage"
        )


def check_study(name: str) -> studies.Study:
    """The study of training with this name, or in this file; refuses one that is impossible."""
    tuned = studies.load(name)
    studies.check(tuned)
    return tuned


def start_workers(flags: Sequence[str], workdir: str, parallel: int) -> None:
    """Starts the command with these flags as several workers; waits until the study is complete.

    The first worker shows what it does, and the others write to files in the workdir.
    """
    logs = pathlib.Path(workdir) / "workers"
    command = [sys.executable, "-m", "mogrifier_jax.main", *flags]
    jobs = [
        processes.Job(f"worker {index}", command, logs / f"{index}.txt" if index else None)
        for index in range(parallel)
    ]
    codes = []
    with contextlib.closing(processes.run_side_by_side(jobs, parallel)) as ends:
        for job, code, _, _ in ends:
            codes.append(code)
            if code is not None and 0 < code != errors.Interrupted.exit_code:
                where = f"the reason is in {job.log}" if job.log else "it says why above"
                raise errors.UsageError(f"{job.name} ended with code {code}; {where}")
            if code is not None and code < 0:
                killer = signal.Signals(-code).name
                logging.warning("%s was ended by %s; the others take over", job.name, killer)
    if 0 not in codes:  # A worker that ends by itself has seen the whole study complete.
        raise errors.Interrupted("all workers were stopped; the same command goes on")


def work(
    queue: Any,
    executor: Executor,
    study: studies.Study,
    workdir: str,
    config: config_dict.ConfigDict | None = None,
) -> list[trials.Record]:
    """Runs trials until the study is complete, also those that other workers leave behind."""
    with storages.explain_errors():
        while True:
            with signals.postponed():
                asked = queue.ask(executor.at_once, executor.shared)
                if asked:
                    logging.info("%s", describe_progress(queue))
                others = any(trial.outcome == "running" for trial in queue.records())
            if asked:
                with queue.hold(asked):
                    executor.run(asked)
            elif others:
                time.sleep(POLL_SECONDS)
            else:
                break
        logging.info("%s", describe_progress(queue))
        known, folder = queue.records(), pathlib.Path(workdir)
        report.Report(queue.name, known, study, folder, executor.unit, config).write()
        return known


def describe_progress(queue: Any) -> str:
    """One line: how many trials are done and running, the best value, and the time left."""
    known = queue.records()
    over = [trial for trial in known if trial.outcome not in ("running", "waiting")]
    running = sum(trial.outcome == "running" for trial in known)
    kinds = collections.Counter(t.outcome for t in over if t.outcome != "complete")
    others = "".join(f", {count} {kind}" for kind, count in kinds.items())
    line = f"trials: {len(over)} of {queue.target} done{others}; {running} running"
    complete = report.complete_trials(known)
    if complete:
        line += f"; best {complete[0].nats:.4f} nats (trial {complete[0].number})"
    if over and running:
        mean = sum(trial.seconds for trial in over) / len(over)
        line += f"; about {units.span((queue.target - len(over)) * mean / running)} left"
    return line


KEPT_PROGRAMS = 4  # Shapes whose compiled programs are kept for the next trial.


class Training:
    """Trains a trial at a time; keeps compiled programs for the next trial of the same shape."""

    at_once = 1
    shared: tuple[str, ...] = ()

    def __init__(self, study: studies.Study, config: config_dict.ConfigDict, workdir: str):
        self._study, self._config, self._workdir = study, config, workdir
        names = (name.split(".") for name in study.ranges)
        self._tuned = tuple(key for section, key in names if section == "dropout")
        self._mesh = runs.make_mesh(config)
        self._tasks: dict[str, tasks.Task] = {}
        self._programs: dict[Hashable, programs.Programs] = {}
        # This refuses an impossible experiment before any trial.
        self.unit = self._make_run(studies.configure(study, config, {})).task.score_unit

    def run(self, asked: Sequence[Any]) -> None:
        """Trains the trials one after the other, and notes the value of each."""
        for trial in asked:
            config = studies.configure(self._study, self._config, trial.params)
            with signals.postponed():
                try:
                    run = self._make_run(config)
                except errors.UsageError as error:
                    trial.fail("infeasible", str(error))
                    continue
                trial.note(
                    hidden_size=run.model.hidden_size,
                    num_params=sum(models.count_parameters(run.model).values()),
                )
            try:
                self._train(trial, run)
            except errors.Diverged as error:
                trial.fail("diverged", str(error))

    def _train(self, trial: Any, run: runs.Run) -> None:
        folder, compiled = os.path.join(self._workdir, trial.folder), self._compile(run)
        workdirs.check_config(folder, run.config)
        with run_record.open_record(run, folder) as record:
            with signals.StopRequests() as stop_requests:
                ended = train.train_turns(record, compiled, stop_requests, on_turn=trial.report)
            if ended.kind == "pruned":
                trial.fail("pruned", ended.message)
            elif ended.kind != "lost":  # Another worker finishes a trial that it has taken over.
                results = train.score_best(record, compiled)
                trial.note(
                    **{key: results[key] for key in ("best_turn", "temperature", "test_nats")}
                )
                trial.finish(results["valid_nats"])

    def _make_run(self, config: config_dict.ConfigDict) -> runs.Run:
        return runs.make_run(config, self._mesh, tuned=self._tuned, load_task=self._load_task)

    def _load_task(self, config: config_dict.ConfigDict, mesh: jax.sharding.Mesh) -> tasks.Task:
        """The task of a config; trials with the same data share one task."""
        options = {k: v for k, v in config.data.items() if k != "drop_state_probability"}
        key = json.dumps([config.seed, options], sort_keys=True, default=str)
        if key not in self._tasks:
            self._tasks[key] = runs.make_task(config, mesh)
        return self._tasks[key]

    def _compile(self, run: runs.Run) -> programs.Programs:
        """The programs of runs of this shape, which may be there already."""
        key = shape_of(run)
        # The shape that was used last comes last; the first ones are forgotten.
        compiled = self._programs.pop(key, None) or programs.Programs(run)
        self._programs[key] = compiled
        while len(self._programs) > KEPT_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return compiled


class Adapting:
    """Runs trials of dynamic evaluation; those with the same window run at once."""

    shared: tuple[str, ...] = ("window",)

    def __init__(self, trained: str, options: config_dict.ConfigDict):
        self.at_once = options.dyneval.parallel or 1
        self._trained, self._options = trained, options
        self.scorer = methods.Scorer(trained, options)
        self.unit = self.scorer.texts.unit
        if "valid" not in self.scorer.texts.names:
            raise errors.UsageError("settings are chosen on the validation set; drop --eval.text")

    def run(self, asked: Sequence[Any]) -> None:
        """Runs the trials of each window together, one window after the other."""
        for window in dict.fromkeys(trial.params["window"] for trial in asked):
            self._run_window(window, [t for t in asked if t.params["window"] == window])

    def _run_window(self, window: int, asked: Sequence[Any]) -> None:
        if self.scorer.options.dyneval.window != window:
            options = copy.deepcopy(self._options)
            with options.unlocked():
                options.dyneval.window = window
            self.scorer = methods.Scorer(self._trained, options)
        scorer, options = self.scorer, self.scorer.options.dyneval
        temperature = scorer.find_temperature(options.batch_size, window)
        settings = [
            dyneval.UpdateRule(*(t.params[name] for name in dyneval.UpdateRule._fields))
            for t in asked
        ]
        title = f"{len(asked)} settings, window {window}"
        outcomes = scorer.adapter("valid", len(settings))(
            scorer.params, settings, temperature, title=title
        )
        for trial, outcome in zip(asked, outcomes, strict=True):
            trial.note(temperature=temperature)
            if outcome.diverged_at is None:
                trial.finish(outcome.mean())
            else:
                trial.fail("diverged", methods.show_outcome(outcome))


def shape_of(run: runs.Run) -> Hashable:
    """A key that is equal for runs which can share a program: all but the traced numbers."""
    # repr(run.model) stands for the section `model`. It also has the solved sizes.
    free = ("model", *studies.TRACED)
    values = configs.flatten(plain_config(run.config))
    values = {name: value for name, value in values.items() if not configs.is_among(name, free)}
    structure = jax.tree.structure(run.hyper)
    return repr(run.model), structure, json.dumps(values, sort_keys=True)


def plain_config(config: config_dict.ConfigDict) -> dict[str, Any]:
    """A config as plain values, without the keys that cannot change the result."""
    values = json.loads(config.to_json_best_effort())
    for name in workdirs.FREE_KEYS:
        section, _, key = name.rpartition(".")
        (values[section] if section else values).pop(key, None)
    return values

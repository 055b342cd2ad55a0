"""Tuning: a worker that asks for trials, runs them and reports their values until all are done.

    python -m mogrifier_jax.main --mode=tune --config=experiments/ptb.py --study=appendix_a \
        --trials=100 --parallel=4 --workdir=runs/tune_ptb
    python -m mogrifier_jax.main --mode=tune --study=dyneval --workdir=runs/ptb --parallel=8

The first command tunes training. The second tunes dynamic evaluation of a trained run. Any number
of workers may share a storage. `studies.py` says what is tuned, `trials.py` hands out suggestions,
and `report.py` writes the report. The objective is the best validation cross-entropy, in nats per
token. Trials of the same shape train in one program, others one after the other. Compiled programs
are kept for the next trial of the same shape.
"""

import collections
import contextlib
import copy
import functools
import json
import os
import pathlib
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import dyneval, methods
from mogrifier_jax.nn import models
from mogrifier_jax.training import programs, runs, train, units, workdirs
from mogrifier_jax.tuning import report, storages, studies, trials

POLL_SECONDS = 2.0  # Between looks at the trials of other workers.


class Executor(Protocol):
    """Runs trials, and notes the value of each or why it has none."""

    unit: str  # The unit of scores that people read.

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """Runs all of these trials, together where that is possible."""


def tune(
    config: config_dict.ConfigDict,
    workdir: str,
    *,
    study: str,
    name: str,
    num_trials: int,
    parallel: int = 1,
    prune: bool = False,
    **where: Any,
) -> list[trials.Record]:
    """Tunes the training of a config; `name` is the name of the experiment in the storage.

    `where` has the storage and the sampler: see `storages.open_queue`.
    """
    check_numbers(num_trials, parallel)
    tuned = studies.load(study)
    studies.check(tuned)
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
    training = Training(tuned, config, workdir, parallel)
    return work(queue, training, tuned, workdir, parallel, config)


def tune_dyneval(
    run: str, options: config_dict.ConfigDict, *, num_trials: int, parallel: int = 1, **where: Any
) -> list[trials.Record]:
    """Tunes dynamic evaluation of a trained run on its validation set.

    The study is in `dyneval_study` of the run. `options` are those of evaluation. Trials with the
    same window run side by side, each with its own adapting weights.
    """
    check_numbers(num_trials, parallel)
    methods.check_options(options)
    adapting = Adapting(run, options)
    tuned = studies.load(f"dyneval_{'word' if adapting.unit == 'ppl' else 'character'}")
    workdir = os.path.join(run, "dyneval_study")
    queue = storages.open_queue(
        tuned,
        workdir,
        name=f"{os.path.basename(os.path.abspath(run))}-{tuned.name}",
        num_trials=num_trials,
        seed=options.seed,
        step=adapting.scorer.loaded.info["step"],
        **where,
    )
    return work(queue, adapting, tuned, workdir, parallel)


def check_numbers(num_trials: int, parallel: int) -> None:
    """Refuses numbers below 1, and a worker of several processes."""
    for flag, value in (("trials", num_trials), ("parallel", parallel)):
        if value < 1:
            raise errors.UsageError(f"--{flag}={value} must be at least 1")
    if jax.process_count() > 1:
        raise errors.UsageError(
            "--mode=tune runs in one process: start one worker on each host, without "
            "--coordinator, all with the same --storage"
        )


def work(
    queue: Any,
    executor: Executor,
    study: studies.Study,
    workdir: str,
    parallel: int,
    config: config_dict.ConfigDict | None = None,
) -> list[trials.Record]:
    """Runs trials until the study is complete, also those that other workers leave behind."""
    with storages.sentences():
        while True:
            asked = queue.ask(parallel, study.shapes)
            if asked:
                logging.info("%s", describe_progress(queue))
                with queue.hold(asked):
                    executor.run(asked)
            elif any(trial.outcome == "running" for trial in queue.records()):
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
    """Trains the trials; keeps compiled programs for the next trial of the same shape."""

    def __init__(
        self, study: studies.Study, config: config_dict.ConfigDict, workdir: str, parallel: int
    ):
        self._study, self._config = study, config
        self._workdir, self._parallel = workdir, parallel
        names = (name.split(".") for name in study.ranges)
        self._tuned = tuple(key for section, key in names if section == "dropout")
        self._programs: collections.OrderedDict[Hashable, train.Compiled] = (
            collections.OrderedDict()
        )
        self._alone = Site(runs.make_mesh(config))
        self._together = Site(programs.make_mesh(parallel)) if parallel > 1 else self._alone
        # This refuses an impossible experiment before any trial.
        run = self._make_run(studies.configure(study, config, {}), self._together)
        self.unit = run.task.score_unit

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """Trains trials of the same shape in one program, and these groups one after the other."""
        groups: dict[Hashable, list[tuple[trials.Trial, runs.Run]]] = {}
        for trial in asked:
            config = studies.configure(self._study, self._config, trial.params)
            try:
                run = self._make_run(config, self._together)
            except errors.UsageError as error:
                trial.fail("infeasible", str(error))
                continue
            trial.note(
                hidden_size=run.model.hidden_size,
                num_params=sum(models.count_parameters(run.model).values()),
            )
            groups.setdefault(shape_of(run), []).append((trial, run))
        for group in groups.values():
            self._train(*zip(*group, strict=True))

    def _train(self, asked: Sequence[trials.Trial], made: Sequence[runs.Run]) -> None:
        """Trains trials of one shape in one program; one alone uses all devices."""
        size = self._parallel if len(asked) > 1 else 1
        if size == 1 and self._alone is not self._together:
            made = [self._make_run(made[0].config, self._alone)]
        folders = [os.path.join(self._workdir, trial.folder) for trial in asked]
        with contextlib.ExitStack() as stack:
            books = []
            for trial, run, folder in zip(asked, made, folders, strict=True):
                workdirs.check_config(folder, run.config)
                books.append(stack.enter_context(train.open_book(run, folder, trial.report)))
            outcomes = train.train(books, self._program(made[0], size))
        for told in zip(asked, folders, outcomes, strict=True):
            self._tell(*told)

    def _make_run(self, config: config_dict.ConfigDict, place: "Site") -> runs.Run:
        return runs.make_run(config, place.of_runs, place.task(config), tuned=self._tuned)

    def _program(self, run: runs.Run, size: int) -> train.Compiled:
        """The kept program for `size` runs of this shape, or a new one."""
        key = size, shape_of(run)
        if key not in self._programs:
            together = functools.partial(programs.Together, count=size, mesh=self._together.mesh)
            self._programs[key] = programs.Alone(run) if size == 1 else together(run)
        self._programs.move_to_end(key)
        if len(self._programs) > KEPT_PROGRAMS:
            self._programs.popitem(last=False)
        return self._programs[key]

    def _tell(self, trial: trials.Trial, folder: str, outcome: train.Outcome) -> None:
        """Notes the value of a trial, or why it has none."""
        if isinstance(outcome, Mapping):
            workdirs.write_json(folder, "results.json", outcome)
            names = ("best_turn", "temperature", "test_nats")
            trial.note(**{name: outcome[name] for name in names})
            trial.finish(outcome["valid_nats"])
        elif isinstance(outcome, trials.Pruned):
            trial.fail("pruned", str(outcome))
        elif isinstance(outcome, trials.Lost):
            logging.warning("%s", outcome)
        else:
            trial.fail("diverged", str(outcome))


class Adapting:
    """Runs trials of dynamic evaluation; those with the same window run at once."""

    def __init__(self, trained: str, options: config_dict.ConfigDict):
        self._trained, self._options = trained, options
        self.scorer = methods.Scorer(trained, options)
        self.unit = self.scorer.texts.unit
        if "valid" not in self.scorer.texts.names:
            raise errors.UsageError("settings are chosen on the validation set; drop --eval.text")

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """Runs the trials of each window together, one window after the other."""
        for window in dict.fromkeys(trial.params["window"] for trial in asked):
            self._run_window(window, [t for t in asked if t.params["window"] == window])

    def _run_window(self, window: int, asked: Sequence[trials.Trial]) -> None:
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


class Site:
    """The devices that trials run on, and the tasks that are loaded there."""

    def __init__(self, mesh: jax.sharding.Mesh):
        self.mesh = mesh
        # Each of several runs side by side is on one device, perhaps with others.
        self.of_runs = programs.home(mesh) if "trial" in mesh.shape else mesh
        self._tasks: dict[str, tasks.Task] = {}

    def task(self, config: config_dict.ConfigDict) -> tasks.Task:
        """The task of a config; trials with the same data share one task."""
        options = {k: v for k, v in config.data.items() if k != "drop_state_probability"}
        key = json.dumps([config.seed, options], sort_keys=True, default=str)
        if key not in self._tasks:
            self._tasks[key] = runs.make_task(config, self.mesh)
        return self._tasks[key]


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

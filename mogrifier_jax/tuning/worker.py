"""Tuning: a worker that asks for trials, runs them and tells what came out, until all are done.

    python -m mogrifier_jax.main --mode=tune --config=experiments/ptb.py --study=appendix_a \
        --trials=100 --parallel=4 --workdir=runs/tune_ptb

Any number of workers may share a storage. `studies.py` says what is tuned, `trials.py` hands out
suggestions, `report.py` tells what was found. The objective is the best validation cross-entropy,
in nats per token. Trials of the same shape train in one program, others one by one, and what was
compiled is kept for the next trial of the same shape.
"""

import collections
import contextlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import errors
from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models
from mogrifier_jax.training import programs, progress, runs, train, workdirs
from mogrifier_jax.tuning import report, storages, studies, trials, vizier

POLL_SECONDS = 2.0  # Between looks at what other workers do.


class Executor(Protocol):
    """Runs trials, and tells each of them how it went."""

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """All of them, together where that is possible."""


def tune(
    config: config_dict.ConfigDict,
    workdir: str,
    *,
    study: str,
    name: str,
    num_trials: int,
    parallel: int = 1,
    storage: str | None = None,
    sampler: str = "gp",
    prune: bool = False,
) -> list[trials.Record]:
    """Tunes the training of a config; `name` is what the experiment is called in the storage."""
    check_numbers(num_trials, parallel)
    tuned = studies.load(study)
    studies.check(tuned)
    name = f"{name}-{tuned.name}"
    queue = open_queue(
        tuned,
        workdir,
        name=name,
        num_trials=num_trials,
        storage=storage,
        sampler=sampler,
        seed=config.seed,
        prune=config.schedule.turns if prune else None,
        config=plain_config(config),
    )
    training = Training(tuned, config, workdir, parallel)
    work(queue, training, parallel, tuned.shapes)
    report.write(name, queue.records(), tuned, workdir, unit=training.unit, config=config)
    return queue.records()


def open_queue(
    study: studies.Study,
    workdir: str,
    *,
    name: str,
    num_trials: int,
    storage: str | None,
    sampler: str,
    seed: int,
    prune: int | None = None,
    **about: Any,
) -> Any:
    """The trials of a study in its storage; `prune` is the number of turns, None is never."""
    about = {"study": study.to_json(), **about}
    check_workdir(workdir, name)
    os.makedirs(workdir, exist_ok=True)
    queue: Any
    if storage is not None and storage.startswith("vizier://"):
        queue = vizier.VizierQueue(
            storage,
            name,
            study.ranges,
            num_trials,
            workdir=workdir,
            about=about,
            prune=prune is not None,
        )
    else:
        storages.check_sampler(sampler)
        opened = storages.open_study(
            storage or storages.default(workdir),
            name,
            about,
            sampler=sampler,
            seed=seed,
            pruner=None if prune is None else storages.make_pruner(prune),
        )
        queue = trials.Queue(opened, study.ranges, num_trials)
    workdirs.write_json(workdir, "study.json", {"name": name})
    return queue


def check_numbers(num_trials: int, parallel: int) -> None:
    """Refuses what cannot be counted, and workers that are parts of one run."""
    for flag, value in (("trials", num_trials), ("parallel", parallel)):
        if value < 1:
            raise errors.UsageError(f"--{flag}={value} must be at least 1")
    if jax.process_count() > 1:
        raise errors.UsageError(
            "--mode=tune runs in one process: start one worker on each host, without "
            "--coordinator, all with the same --storage"
        )


def check_workdir(workdir: str, name: str) -> None:
    """Refuses the workdir of another study."""
    path = pathlib.Path(workdir) / "study.json"
    if path.exists():
        there = workdirs.read_json(path, dict, "delete it, or use another --workdir").get("name")
        if there != name:
            raise errors.UsageError(
                f"{workdir} belongs to the study {there!r}, this one is {name!r}; use another "
                "--workdir"
            )


def work(queue: Any, executor: Executor, parallel: int, shapes: Sequence[str] = ()) -> None:
    """Runs trials until the study has all it wants, also those that other workers leave behind."""
    while True:
        asked = queue.ask(parallel, shapes)
        if asked:
            logging.info("%s", describe_progress(queue))
            with queue.hold(asked):
                executor.run(asked)
        elif any(trial.outcome == "running" for trial in queue.records()):
            time.sleep(POLL_SECONDS)
        else:
            logging.info("%s", describe_progress(queue))
            return


def describe_progress(queue: Any) -> str:
    """Done, running, best so far and the time left, in a line."""
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
        line += f"; about {progress.span((queue.target - len(over)) * mean / running)} left"
    return line


KEPT_PROGRAMS = 4  # Shapes whose compiled programs are kept for the next trial.


class Training:
    """Trains the trials; what was compiled is kept for the next of the same shape."""

    def __init__(
        self,
        study: studies.Study,
        config: config_dict.ConfigDict,
        workdir: str,
        parallel: int,
    ):
        self._study, self._config, self._workdir = study, config, workdir
        self._parallel = parallel
        names = (name.split(".") for name in study.ranges)
        self._tuned = tuple(key for section, key in names if section == "dropout")
        self._programs: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._alone = Site.alone(config)
        self._together = Site.together(parallel) if parallel > 1 else self._alone
        # What is wrong with the experiment itself is no matter of trials.
        run = self._make_run(studies.configure(study, config, {}), self._together)
        self.unit = run.task.score_unit

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """Those of the same shape in one program, the groups one after the other."""
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
        for shape, group in groups.items():
            if len(group) == 1:
                self._run_alone(*group[0])
            else:
                self._run_together(shape, *zip(*group, strict=True))

    def _run_alone(self, trial: trials.Trial, run: runs.Run) -> None:
        """One trial on all devices, as `train.py` does it."""
        if self._alone is not self._together:
            run = self._make_run(run.config, self._alone)
        compiled = self._program((1, shape_of(run)), lambda: programs.Alone(run))
        self._train([trial], [run], compiled)

    def _run_together(
        self, shape: Hashable, asked: Sequence[trials.Trial], made: Sequence[runs.Run]
    ) -> None:
        """Several trials of one shape."""
        mesh, size = self._together.mesh, self._parallel
        compiled = self._program((size, shape), lambda: programs.Together(made[0], size, mesh))
        self._train(asked, made, compiled)

    def _train(
        self, asked: Sequence[trials.Trial], made: Sequence[runs.Run], compiled: Any
    ) -> None:
        folders = [self._folder(*pair) for pair in zip(asked, made, strict=True)]
        with contextlib.ExitStack() as stack:
            books = [
                stack.enter_context(train.open_book(run, folder, trial.report))
                for trial, run, folder in zip(asked, made, folders, strict=True)
            ]
            outcomes = train.train(books, compiled)
        for told in zip(asked, folders, outcomes, strict=True):
            self._tell(*told)

    def _make_run(self, config: config_dict.ConfigDict, place: "Site") -> runs.Run:
        return runs.make_run(config, place.of_runs, place.task(config), tuned=self._tuned)

    def _program(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What was compiled for a shape, or is now."""
        if key not in self._programs:
            self._programs[key] = make()
        self._programs.move_to_end(key)
        if len(self._programs) > KEPT_PROGRAMS:
            self._programs.popitem(last=False)
        return self._programs[key]

    def _folder(self, trial: trials.Trial, run: runs.Run) -> str:
        """Where a trial is kept; a folder of another run is refused."""
        folder = os.path.join(self._workdir, trial.folder)
        workdirs.check_config(folder, run.config, ignore=runs.FREE_KEYS)
        return folder

    def _tell(self, trial: trials.Trial, folder: str, outcome: train.Outcome) -> None:
        """Numbers are numbers; all else has a reason instead."""
        if isinstance(outcome, Mapping):
            workdirs.write_json(folder, "results.json", outcome)
            names = ("best_turn", "temperature", "test_nats")
            trial.note(**{name: outcome[name] for name in names})
            trial.finish(outcome["valid_nats"])
        elif isinstance(outcome, trials.Pruned):
            trial.prune(str(outcome))
        elif isinstance(outcome, trials.Lost):
            logging.warning("%s", outcome)
        else:
            trial.fail("diverged", str(outcome))


class Site:
    """Where runs are made: their mesh, and the tasks on it."""

    def __init__(self, mesh: jax.sharding.Mesh, of_runs: jax.sharding.Mesh):
        self.mesh, self.of_runs = mesh, of_runs
        self._tasks: dict[str, tasks.Task] = {}

    @classmethod
    def alone(cls, config: config_dict.ConfigDict) -> "Site":
        """The mesh of the config, for one run on all devices."""
        mesh = runs.make_mesh(config)
        return cls(mesh, mesh)

    @classmethod
    def together(cls, count: int) -> "Site":
        """Runs side by side, each on one device or a part of it."""
        mesh = programs.make_mesh(count)
        return cls(mesh, programs.home(mesh))

    def task(self, config: config_dict.ConfigDict) -> tasks.Task:
        """The task of a config, which most trials share."""
        options = {k: v for k, v in config.data.items() if k != "drop_state_probability"}
        key = json.dumps([config.seed, options], sort_keys=True, default=str)
        if key not in self._tasks:
            self._tasks[key] = runs.make_task(config, self.mesh)
        return self._tasks[key]


def shape_of(run: runs.Run) -> Hashable:
    """What two runs must have in common to share a program: all but what is traced."""
    values = plain_config(run.config)
    for name in studies.TRACED:
        section, key = name.split(".")
        values.get(section, {}).pop(key, None)
    del values["model"]  # The model itself has it all, and the sizes as well.
    structure = jax.tree.structure(run.hyper)
    return repr(run.model), structure, json.dumps(values, sort_keys=True)


def plain_config(config: config_dict.ConfigDict) -> dict[str, Any]:
    """A config as plain values, without what does not move the result."""
    values = json.loads(config.to_json_best_effort())
    for name in runs.FREE_KEYS:
        *sections, key = name.split(".")
        part = values
        for section in sections:
            part = part.get(section, {})
        part.pop(key, None)
    return values

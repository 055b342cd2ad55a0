"""Trials that train a model: each is a run like any other, in its own folder."""

import json
import os
import pathlib
from collections.abc import Hashable, Mapping, Sequence

import jax
from ml_collections import config_dict

from mogrifier_jax import configs, errors, files
from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models
from mogrifier_jax.training import (
    checkpoints,
    programs,
    run_record,
    runs,
    signals,
    train,
    workdirs,
)
from mogrifier_jax.tuning import studies, trials

KEPT_PROGRAMS = 4  # How many shapes keep their compiled programs for later trials.


class TrainingTrials:
    """Trains one trial at a time, and keeps its programs for later trials of the same shape."""

    at_once = 1
    shared: tuple[str, ...] = ()

    def __init__(self, study: studies.Study, config: config_dict.ConfigDict, workdir: str):
        self._study, self._config, self._workdir = study, config, workdir
        names = (name.split(".") for name in study.ranges)
        self._tuned = tuple(key for section, key in names if section == "dropout")
        self._mesh = runs.make_mesh(config)
        self._tasks: dict[str, tasks.Task] = {}
        self._programs: dict[Hashable, programs.Programs] = {}
        # An impossible experiment is refused here, before any trial.
        task = self._make_run(studies.configure(study, config, {})).task
        self.unit = task.score_unit
        check_corpus(workdir, task.digests)

    def run(self, asked: Sequence[trials.Trial]) -> None:
        """Trains trials one after another, and notes the value of each."""
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

    def _train(self, trial: trials.Trial, run: runs.Run) -> None:
        folder, compiled = os.path.join(self._workdir, trial.folder), self._compile(run)
        workdirs.check_config(folder, run.config)
        with run_record.open_record(run, folder) as record:
            with signals.StopRequests() as stop_requests:
                ended = train.train_turns(record, compiled, stop_requests, on_turn=trial.report)
            if ended.kind == "pruned":
                trial.fail("pruned", ended.message)
            elif ended.kind != "lost":  # A lost trial is finished by the worker that took it over.
                results = train.score_best(record, compiled)
                trial.note(
                    **{key: results[key] for key in ("best_turn", "temperature", "test_nats")}
                )
                trial.finish(results["valid_nats"])

    def _make_run(self, config: config_dict.ConfigDict) -> runs.Run:
        return runs.make_run(config, self._mesh, tuned=self._tuned, load_task=self._load_task)

    def _load_task(self, config: config_dict.ConfigDict, mesh: jax.sharding.Mesh) -> tasks.Task:
        """The task of a config, which trials with the same data share."""
        options = {k: v for k, v in config.data.items() if k != "drop_state_probability"}
        key = json.dumps([config.seed, options], sort_keys=True, default=str)
        if key not in self._tasks:
            self._tasks[key] = runs.make_task(config, mesh)
        return self._tasks[key]

    def _compile(self, run: runs.Run) -> programs.Programs:
        """The programs of runs of this shape, which may have been compiled already."""
        key = shape_of(run)
        # The most recently used shape comes last, and the first ones are dropped.
        compiled = self._programs.pop(key, None) or programs.Programs(run)
        self._programs[key] = compiled
        while len(self._programs) > KEPT_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return compiled


def shape_of(run: runs.Run) -> Hashable:
    """A key that is equal for runs that can share a program: all but the traced numbers."""
    # repr(run.model) covers the section `model`, including the sizes that were solved for.
    free = ("model", *studies.TRACED)
    values = configs.flatten(plain_config(run.config))
    values = {name: value for name, value in values.items() if not configs.is_among(name, free)}
    structure = jax.tree.structure(run.hyper)
    return repr(run.model), structure, json.dumps(values, sort_keys=True)


def plain_config(config: config_dict.ConfigDict) -> files.JsonObject:
    """A config as plain values, without the keys that do not affect the result."""
    values = json.loads(config.to_json_best_effort())
    for name in workdirs.FREE_KEYS:
        section, _, key = name.rpartition(".")
        (values[section] if section else values).pop(key, None)
    return values


def check_corpus(workdir: str, digests: Mapping[str, str]) -> None:
    """Refuses to continue a study whose trials were trained on another text."""
    for folder in sorted(pathlib.Path(workdir, "trials").glob("*")):
        before = workdirs.corpus_digests(checkpoints.read_fingerprint(folder))
        if changed := [split for split in before if digests.get(split) != before[split]]:
            raise errors.UsageError(
                f"the corpus is not the one of the trial in {folder}: the text of "
                f"{', '.join(changed)} has changed, so new trials could not be compared with it; "
                "restore the text, or use another --storage and --workdir for a new study"
            )

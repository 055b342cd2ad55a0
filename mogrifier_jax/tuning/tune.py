"""`--mode=tune`: searches for the settings with the best validation cross-entropy.

    python -m mogrifier_jax.main --mode=tune --config=experiments/ptb.py --study=appendix_a \
        --trials=100 --parallel=4 --workdir=runs/tune_ptb
    python -m mogrifier_jax.main --mode=tune --study=dyneval --workdir=runs/ptb --parallel=2

The first command tunes training, and the second one dynamic evaluation of a trained run. The
objective is the best validation cross-entropy, in nats per token. `studies.py` says what is tuned,
`queues.py` hands out trials, `worker.py` runs them, and `report.py` writes the report.
"""

import os
from typing import Any

import jax
from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.evaluation import eval_options
from mogrifier_jax.training import processes, signals
from mogrifier_jax.tuning import (
    dyneval_trials,
    queues,
    studies,
    training_trials,
    trials,
    worker,
)

# The options of evaluation on which the scores of dynamic evaluation depend.
MEASURING = ("temperature", "dyneval.batch_size", "dyneval.max_windows")


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
    """Tunes the training of a config, and returns the records of all trials.

    Args:
      config: the config of the experiment.
      workdir: the folder of the study.
      study: the name of a study, or a JSON file.
      name: the name of the experiment, with which the name of the study in the storage begins.
      num_trials: how many trials the study is to have, of all workers together.
      prune: whether trials worse than the median are stopped.
      where: the storage and the sampler, as `queues.open_queue` takes them.
    """
    check_numbers(num_trials)
    tuned = check_study(study)
    queue = queues.open_queue(
        tuned,
        workdir,
        name=f"{name}-{tuned.name}",
        num_trials=num_trials,
        seed=config.seed,
        prune=config.schedule.turns if prune else None,
        config=training_trials.plain_config(config),
        **where,
    )
    with signals.postponed():
        executor = training_trials.TrainingTrials(tuned, config, workdir)
    return worker.work(queue, executor, tuned, workdir, config)


def tune_dyneval(
    run: str, options: config_dict.ConfigDict, *, num_trials: int, **where: Any
) -> list[trials.Record]:
    """Tunes dynamic evaluation of a trained run on its validation set.

    Args:
      run: the workdir of the run. The study has a folder in it, `dyneval_study`.
      options: the options of evaluation. `options.dyneval.parallel` trials run side by side, each
        with its own adapting weights.
      num_trials: how many trials the study is to have, of all workers together.
      where: the storage and the sampler, as `queues.open_queue` takes them.
    """
    check_numbers(num_trials)
    errors.check(run != "", "--workdir is missing; give the workdir of a trained run")
    eval_options.check(options)
    executor = dyneval_trials.DynevalTrials(run, options)
    tuned = studies.load(f"dyneval_{'word' if executor.unit == 'ppl' else 'character'}")
    workdir, flat = dyneval_workdir(run), configs.flatten(options)
    queue = queues.open_queue(
        tuned,
        workdir,
        name=f"{os.path.basename(os.path.abspath(run))}-{tuned.name}",
        num_trials=num_trials,
        seed=options.seed,
        step=executor.scorer.loaded.info["step"],
        eval={name: flat[name] for name in MEASURING},
        corpus=dict(executor.scorer.task.digests),
        **where,
    )
    return worker.work(queue, executor, tuned, workdir)


def dyneval_workdir(run: str) -> str:
    """The workdir of the study of dynamic evaluation of a run."""
    return os.path.join(run, "dyneval_study")


def check_numbers(num_trials: int, parallel: int = 1) -> None:
    """Refuses numbers below 1, and a worker that consists of several processes."""
    if num_trials < 1:
        raise errors.UsageError(f"--trials={num_trials} must be at least 1")
    processes.check_parallel(parallel)
    if jax.process_count() > 1:
        raise errors.UsageError(
            "--mode=tune runs in one process: start one worker on each host, without "
            "--coordinator, all with the same --storage"
        )


def check_study(name: str) -> studies.Study:
    """The study with this name or in this file; refuses settings that cannot be tuned."""
    tuned = studies.load(name)
    studies.check(tuned)
    return tuned

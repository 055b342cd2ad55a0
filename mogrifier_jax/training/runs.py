"""Makes a run from a config: model, data, devices, optimizer and schedule.

`make_run` reads every section of a config, and refuses what does not fit before anything is
computed. `programs.py` compiles a run, and `train.py` trains it.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
from ml_collections import config_dict

from mogrifier_jax import configs, hardware, partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models
from mogrifier_jax.training import averaging, host_arrays, optimizers, schedule, steps

FEW_ROWS = 32  # On a device; docs/performance_notes.md, "enwik8".


class Run(NamedTuple):
    """A config made concrete: the model and its task, on a mesh, with optimizer and schedule."""

    config: config_dict.ConfigDict
    mesh: jax.sharding.Mesh
    task: tasks.Task
    model: models.Model
    program: steps.Program
    hyper: steps.Hyperparameters
    rules: schedule.Rules

    @property
    def batch_size(self) -> int:
        """The number of stripes, over all devices."""
        return self.config.data.batch_size

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens that a step reads."""
        return self.batch_size * self.config.data.window

    def init_state(self) -> steps.TrainState:
        """The initial state; call it under jit or eval_shape."""
        key = jax.random.key(self.config.seed)
        return steps.init_state(
            key, program=self.program, batch_size=self.batch_size, carries=self.task.carries
        )

    def abstract_state(self) -> steps.TrainState:
        """Shapes, dtypes and shardings of the state."""
        return partitioning.with_shardings(jax.eval_shape(self.init_state), self.mesh)


def make_run(
    config: config_dict.ConfigDict,
    mesh: jax.sharding.Mesh | None = None,
    task: tasks.Task | None = None,
    *,
    tuned: Collection[str] = (),
    load_task: Callable[[config_dict.ConfigDict, jax.sharding.Mesh], tasks.Task] | None = None,
) -> Run:
    """Makes the run of a config; refuses one that cannot work, before anything is computed.

    Args:
      mesh: by default the mesh that the config describes.
      task: by default the task that the config describes, which is loaded. It must be on the mesh.
      tuned: dropout rates that are inputs of the program even if they are zero, unlike all others.
      load_task: called instead of `make_task`, so that trials can share a task.
    """
    config = configs.base(config)
    configs.check(config)
    mesh = mesh or make_mesh(config)
    optimizer = dict(config.optimizer)
    learning_rate, l2_penalty = optimizer.pop("learning_rate"), optimizer.pop("l2_penalty")
    accumulation = {name: optimizer.pop(name) for name in list(optimizer) if "accumulate" in name}
    groups, at_once = accumulation["accumulate"], accumulation["accumulate_at_once"]
    samples = optimizer.pop("training_samples")
    if at_once is None:
        accumulation["accumulate_at_once"] = few_rows(mesh, config.data.batch_size * samples)
    optimizer = optimizers.make_optimizer(**optimizer)
    rules = schedule.Rules(**config.schedule)
    if config.averaging.kind == "triggered":
        turns, latest = config.averaging.trigger_turns, config.averaging.trigger_at_the_latest
        rules = dataclasses.replace(rules, averaging_turns=turns, averaging_at_the_latest=latest)
    average = averaging.make_averaging(
        config.averaging.kind, config.averaging.stagnating_evaluations
    )
    # Most errors do not depend on the vocabulary, so a tiny one finds them before a corpus is read.
    small = make_model(config, 3)
    jax.eval_shape(small.init, jax.random.key(0), **small.example())
    partitioning.check_batch(mesh, batch_size=config.data.batch_size, groups=groups)

    task = task or (load_task or make_task)(config, mesh)
    free = ("data.source_dir", "data.data_dir")  # The text must be the same, not its place.
    values = {f"config.{n}": v for n, v in configs.flatten(config).items() if n not in free}
    host_arrays.check_same(values | {f"the text of {n}": v for n, v in task.digests.items()})
    model = make_model(config, len(task.vocabulary))
    partitioning.check_hidden_size(mesh, model.hidden_size)
    dropout = make_dropout(model, tuned, **config.dropout)
    drop_state = config.data.drop_state_probability
    hyper = steps.Hyperparameters(learning_rate, l2_penalty, drop_state, dropout)
    program = steps.Program(
        model, optimizer, average, task.batch_at, **accumulation, training_samples=samples
    )
    return Run(config, mesh, task, model, program, hyper, rules)


def few_rows(mesh: jax.sharding.Mesh, batch_size: int) -> bool:
    """Whether an accelerator takes as long for one group of a batch as for the whole batch."""
    accelerated = mesh.devices.flat[0].platform != "cpu"
    return accelerated and batch_size <= FEW_ROWS * mesh.shape["data"]


def make_mesh(config: config_dict.ConfigDict) -> jax.sharding.Mesh:
    """The mesh of a config.

    If `hardware.use_cores` chose the number of devices, it has as many of them as divide the batch.
    """
    mesh = partitioning.make_mesh(**config.mesh)
    if config.mesh.data == -1 and hardware.counted_cores():
        batch_size = config.data.batch_size // config.optimizer.accumulate
        sizes = range(1, mesh.shape["data"] + 1)
        mesh = partitioning.shrink(mesh, max(n for n in sizes if batch_size % n == 0))
    return mesh


def make_model(config: config_dict.ConfigDict, vocab_size: int) -> models.Model:
    """The model of a config, of the kind that its task needs."""
    encoder_decoder = tasks.kind_of(config.data).encoder_decoder
    return models.make_model(vocab_size, encoder_decoder=encoder_decoder, **config.model)


def make_task(config: config_dict.ConfigDict, mesh: jax.sharding.Mesh) -> tasks.Task:
    """The task of a config; its offsets and jitter follow from the seed."""
    stream_key = jax.random.fold_in(jax.random.key(config.seed), 1)
    return tasks.make_task(stream_key, mesh, **config.data)


def make_dropout(
    model: models.Model, tuned: Collection[str] = (), **rates: float | None
) -> models.Dropout:
    """The rates of `config.dropout`; a rate of zero removes the operation, unless it is tuned."""
    projects = getattr(model, "mixture_components", 0) or model.embedding_size != model.hidden_size
    if rates.get("downprojected") is None:
        rates["downprojected"] = rates.get("output")
        tuned = {*tuned, "downprojected"} if "output" in tuned else tuned
    if not projects:
        rates["downprojected"] = None
    kept = {name: rate if name in tuned else rate or None for name, rate in rates.items()}
    return models.Dropout(**kept)

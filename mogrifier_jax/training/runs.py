"""A config made concrete: what is trained, on what, where, by which rules.

`make_run` reads every section of a config, and what does not fit is an error that names the key.
`train.py` carries a run out.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Set
from typing import Any, NamedTuple, TypeVar

import jax
from ml_collections import config_dict

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models
from mogrifier_jax.training import averaging, evaluate, optim, runtime, schedule, steps

# What may differ when a run is resumed, as it does not move its numbers.
FREE_KEYS = ("mesh", "log_every", "data.source_dir", "data.data_dir")
SECTIONS = (
    *("seed", "log_every", "data", "model", "dropout", "optimizer"),
    *("averaging", "schedule", "evaluation", "mesh"),
)


Made = TypeVar("Made")


class Run(NamedTuple):
    """A config made concrete: what is trained, on what, where, by which rules."""

    config: config_dict.ConfigDict
    mesh: jax.sharding.Mesh
    task: tasks.Task
    model: Any
    program: steps.Program
    hyper: steps.Hyperparameters
    rules: schedule.Rules
    evaluation: evaluate.Settings

    @property
    def batch_size(self) -> int:
        """Global number of stripes."""
        return self.config.data.batch_size

    @property
    def tokens_per_step(self) -> int:
        """How many tokens a step reads."""
        return self.batch_size * self.config.data.window

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
        """(state, stream, hyper, num_steps=...) to (state, metrics), as training compiles it."""
        in_place = shardings_of(self.abstract_state())
        return jax.jit(
            functools.partial(steps.train_steps, program=self.program),
            static_argnames="num_steps",
            donate_argnames="state",
            out_shardings=(in_place, partitioning.replicated(self.mesh)),
            compiler_options=runtime.compiler_options(self.mesh.devices.flat[0].platform),
        )


def make_run(
    config: config_dict.ConfigDict, mesh: Any = None, task: Any = None, tuned: Collection[str] = ()
) -> Run:
    """Reads every section of a config; what does not fit is an error before any compute.

    Args:
      tuned: dropout rates that stay in the program when they are zero, as they are elsewhere not.
    """
    check_keys("config", config, known=SECTIONS, required=set(SECTIONS) - {"log_every"})
    needed = {"name", "batch_size", "window"}
    check_keys("config.data", config.data, known=config.data, required=needed)
    check_keys("config.mesh", config.mesh, known=("data", "model"), required=set())
    mesh = mesh or make_mesh(config)
    optimizer = dict(config.optimizer)
    learning_rate, l2_penalty, groups, reduce = pop_step_options(optimizer)
    optimizer = make(optim.make_optimizer, "optimizer", **optimizer)
    rules = make(schedule.Rules, "schedule", **config.schedule, **averaging_rules(config.averaging))
    average = averaging.make_averaging(config.averaging.kind)
    evaluation = make(evaluate.Settings, "evaluation", **config.evaluation)
    if config.get("log_every", 1) < 1:
        raise errors.UsageError(f"log_every {config.log_every} must be at least 1 step")
    # A vocabulary of three shows what is wrong with the model before a corpus is read.
    copies = config.data.name == "reverse_copy"
    trial = models.make_model(3, encoder_decoder=copies, **config.model)
    jax.eval_shape(trial.init, jax.random.key(0), **trial.example())
    make_dropout(trial, **config.dropout)
    partitioning.check_batch(mesh, batch_size=config.data.batch_size, groups=groups)

    drop_state = config.data.get("drop_state_probability", 0.0)
    check_probability("data.drop_state_probability", drop_state)
    task = task or make_task(config, mesh)
    model = models.make_model(
        len(task.vocabulary), encoder_decoder=task.encoder_decoder, **config.model
    )
    partitioning.check_hidden_size(mesh, model.hidden_size)
    hyper = steps.Hyperparameters(
        learning_rate, l2_penalty, drop_state, make_dropout(model, tuned, **config.dropout)
    )
    program = steps.Program(model, optimizer, average, task.batch_at, groups, reduce)
    return Run(config, mesh, task, model, program, hyper, rules, evaluation)


def make_mesh(config: config_dict.ConfigDict) -> jax.sharding.Mesh:
    """The mesh of a config: of CPU cores that nobody counted, as many as divide the batch."""
    mesh = partitioning.make_mesh(**config.mesh)
    if config.mesh.get("data", -1) == -1 and partitioning.counted_cores():
        batch_size = config.data.batch_size // max(1, config.optimizer.get("accumulate", 1))
        sizes = range(1, mesh.shape["data"] + 1)
        mesh = partitioning.shrink(mesh, max(n for n in sizes if batch_size % n == 0))
    return mesh


def make_task(config: config_dict.ConfigDict, mesh: jax.sharding.Mesh) -> tasks.Task:
    """The task of a config; its offsets and jitter follow from the seed."""
    stream_key = jax.random.fold_in(jax.random.key(config.seed), 1)
    options = {k: v for k, v in config.data.items() if k != "drop_state_probability"}
    return tasks.make_task(stream_key, mesh, **options)


def make(function: Callable[..., Made], section: str, **options: Any) -> Made:
    """Calls a constructor with a config section; a key that it lacks is named."""
    parameters = inspect.signature(function).parameters
    required = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    check_keys(f"config.{section}", options, known=parameters, required=required)
    return function(**options)


def check_keys(
    section: str, given: Iterable[str], known: Iterable[str], required: Set[str]
) -> None:
    """Refuses keys that nothing reads, and asks for those that are needed."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known) or known
            raise errors.UsageError(
                f"{section}.{name} is read by nothing; did you mean {' or '.join(near)}?"
            )
    missing = required - set(given)
    if missing:
        raise errors.UsageError(f"{section} lacks {', '.join(sorted(missing))}; add it")


def pop_step_options(optimizer: dict[str, Any]) -> tuple[float, float, int, str]:
    """Takes out of `config.optimizer` what the train step reads: rate, L2, groups and reduction."""
    required = {"learning_rate", "l2_penalty"}
    check_keys("config.optimizer", required & optimizer.keys(), required, required)
    rates = {name: optimizer.pop(name) for name in ("learning_rate", "l2_penalty")}
    for name, value in rates.items():
        if not 0 <= value < math.inf:
            raise errors.UsageError(f"optimizer.{name} {value} must be 0 or more, and finite")
    groups, reduce = optimizer.pop("accumulate", 1), optimizer.pop("accumulate_reduce", "mean")
    if groups < 1 or reduce not in ("sum", "mean"):
        raise errors.UsageError(
            f"optimizer.accumulate {groups} with accumulate_reduce {reduce!r} cannot be: give a "
            "number of groups of 1 or more, and 'sum' or 'mean'"
        )
    return *rates.values(), groups, reduce


def averaging_rules(section: config_dict.ConfigDict) -> dict[str, int | None]:
    """The triggers of `config.averaging`, as `schedule.Rules` names them."""
    known = ("kind", "trigger_turns", "trigger_at_the_latest")
    check_keys("config.averaging", section, known=known, required={"kind"})
    if section.kind != "triggered":
        return {}
    return {
        "averaging_turns": section.get("trigger_turns"),
        "averaging_at_the_latest": section.get("trigger_at_the_latest"),
    }


def check_probability(name: str, value: float | None) -> None:
    """Refuses what is not a probability of dropping."""
    if value is not None and not 0 <= value < 1:
        raise errors.UsageError(
            f"{name} {value} is not a probability of dropping: give 0 <= rate < 1"
        )


def make_dropout(model: Any, tuned: Collection[str] = (), **rates: float | None) -> models.Dropout:
    """The rates of `config.dropout`; a rate of zero takes the operation away, unless tuned."""
    check_keys("config.dropout", rates, known=models.Dropout._fields, required=set())
    for name, rate in rates.items():
        check_probability(f"dropout.{name}", rate)
    projects = getattr(model, "mixture_components", 0) or model.embedding_size != model.hidden_size
    if rates.get("downprojected") is None:
        rates["downprojected"] = rates.get("output")
        tuned = {*tuned, "downprojected"} if "output" in tuned else tuned
    if not projects:
        rates["downprojected"] = None
    kept = {name: rate if name in tuned else rate or None for name, rate in rates.items()}
    return models.Dropout(**kept)


def shardings_of(tree: Any) -> Any:
    """The sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)

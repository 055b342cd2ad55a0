"""A run before it starts, and what surrounds it: requests to stop, a trace, the compiler's cache.

`make_run` reads every section of a config; `configs.py` refuses what does not fit.
`train.py` carries a run out.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax.experimental import multihost_utils
from ml_collections import config_dict

from mogrifier_jax import configs, errors, partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models
from mogrifier_jax.training import evaluate, schedule, steps

FEW_ROWS = 32  # On a device; docs/performance.md, "enwik8".
_BATCH = "data.window or data.batch_size, or set optimizer.accumulate"


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

    def turn_evaluation(self, **options: Any) -> evaluate.TurnEvaluation:
        """The evaluation before each turn; its stripes are those of one group of a batch."""
        return evaluate.TurnEvaluation(
            self.model,
            self.task,
            self.config.evaluation,
            batch_size=self.batch_size // self.program.accumulate,
            window=self.config.data.window,
            **options,
        )

    def jit_steps(self) -> jax.stages.Wrapped:
        """(state, stream, hyper, num_steps=...) to (state, metrics), as training compiles it."""
        in_place = shardings_of(self.abstract_state())

        def train_steps(state, stream, hyper, num_steps):
            # The recurrence asks for the mesh: how many rows a device has decides how it runs.
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return steps.train_steps(
                    state, stream, hyper, program=self.program, num_steps=num_steps
                )

        return jax.jit(
            train_steps,
            static_argnames="num_steps",
            donate_argnames="state",
            out_shardings=(in_place, partitioning.replicated(self.mesh)),
        )


def make_run(
    config: config_dict.ConfigDict, mesh: Any = None, task: Any = None, tuned: Collection[str] = ()
) -> Run:
    """Reads every section of a config; what does not fit is an error before any compute.

    Args:
      tuned: dropout rates that stay in the program even when they are zero; others are left out.
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
    optimizer = steps.make_optimizer(**optimizer)
    rules = schedule.Rules(**config.schedule)
    if config.averaging.kind == "triggered":
        turns, latest = config.averaging.trigger_turns, config.averaging.trigger_at_the_latest
        rules = dataclasses.replace(rules, averaging_turns=turns, averaging_at_the_latest=latest)
    average = schedule.make_averaging(
        config.averaging.kind, config.averaging.stagnating_evaluations
    )
    # A vocabulary of three shows what is wrong with the model before a corpus is read.
    trial = make_model(config, 3)
    jax.eval_shape(trial.init, jax.random.key(0), **trial.example())
    partitioning.check_batch(mesh, batch_size=config.data.batch_size, groups=groups)

    task = task or make_task(config, mesh)
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
    """Whether an accelerator takes as long for one group of a batch as for all of its rows."""
    accelerated = mesh.devices.flat[0].platform != "cpu"
    return accelerated and batch_size <= FEW_ROWS * mesh.shape["data"]


def make_mesh(config: config_dict.ConfigDict) -> jax.sharding.Mesh:
    """The mesh of a config.

    If `use_cores` chose the number of devices, the batch is split over as many as divide it.
    """
    mesh = partitioning.make_mesh(**config.mesh)
    if config.mesh.data == -1 and partitioning.counted_cores():
        batch_size = config.data.batch_size // config.optimizer.accumulate
        sizes = range(1, mesh.shape["data"] + 1)
        mesh = partitioning.shrink(mesh, max(n for n in sizes if batch_size % n == 0))
    return mesh


def make_model(config: config_dict.ConfigDict, vocab_size: int) -> Any:
    """The model of a config, of the kind that its task needs."""
    encoder_decoder = tasks.kind_of(config.data).encoder_decoder
    return models.make_model(vocab_size, encoder_decoder=encoder_decoder, **config.model)


def make_task(config: config_dict.ConfigDict, mesh: jax.sharding.Mesh) -> tasks.Task:
    """The task of a config; its offsets and jitter follow from the seed."""
    stream_key = jax.random.fold_in(jax.random.key(config.seed), 1)
    return tasks.make_task(stream_key, mesh, **config.data)


def make_dropout(model: Any, tuned: Collection[str] = (), **rates: float | None) -> models.Dropout:
    """The rates of `config.dropout`; a rate of zero takes the operation away, unless tuned."""
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


def check_memory(run: Run) -> None:
    """Refuses what no CPU of this machine can hold; accelerators say so themselves."""
    if jax.default_backend() != "cpu":
        return
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract_state())]
    model = "model.hidden_size, model.num_params or model.num_layers"
    # What each layer hands on is kept for the backward pass; the rest depends on the cell.
    outputs = run.model.num_layers * run.model.hidden_size * jnp.dtype(run.model.dtype).itemsize
    groups = 1 if run.program.accumulate_at_once else run.program.accumulate
    batch = jax.eval_shape(run.task.batch_at, run.task.stream, jnp.int32(0))
    samples = run.program.training_samples
    tokens = samples * batch.targets.size // groups // jax.process_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for what, size, remedy in (
        ("the state of this run takes", sum(sizes), model),
        (f"a step over {tokens:,} tokens takes at least", tokens * outputs, _BATCH),
    ):
        if size > memory:
            raise errors.UsageError(
                f"{what} {size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}; "
                f"lower {remedy}"
            )


def use_compilation_cache() -> None:
    """Keeps compiled programs in ~/.cache, unless JAX_COMPILATION_CACHE_DIR names another folder.

    JAX_ENABLE_COMPILATION_CACHE=false switches it off.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        base = os.environ.get("MOGRIFIER_CACHE_DIR") or "~/.cache/mogrifier_jax"
        folder = pathlib.Path(base).expanduser() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))


def check_flags() -> None:
    """Refuses XLA_FLAGS that the library does not know: reading them, it would end the process."""
    value = os.environ.get("XLA_FLAGS")
    if not value:
        return
    read = "x.CompileOptions().executable_build_options.debug_options"
    command = [sys.executable, "-c", f"from jaxlib import xla_client as x; {read}"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        reason = found.stderr.strip().partition("\n")[0].rpartition("] ")[2]
        raise errors.UsageError(
            f"XLA_FLAGS={value!r} cannot be read ({reason}); correct or unset the variable"
        )


class Trace:
    """A `jax.profiler` trace of the dispatches that hold steps N to M, in <workdir>/profile."""

    def __init__(self, workdir: str | os.PathLike, steps: str | None = None):
        self._folder = pathlib.Path(workdir) / "profile"
        self._first, self._last = parse_steps(steps) if steps else (0, 0)
        self._running = False

    @contextlib.contextmanager
    def steps(self, done: int, count: int) -> Iterator[None]:
        """Put this around the dispatch of `count` steps that follow the first `done` ones."""
        wanted = done < self._last and done + count >= self._first
        if wanted and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True
        yield
        if self._running and done + count >= self._last:
            jax.profiler.stop_trace()
            self._running = False
            logging.info(
                "a trace of steps %d to %d is in %s", self._first, self._last, self._folder
            )


def parse_steps(text: str) -> tuple[int, int]:
    """Reads "N:M", counted from 1, both included."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise errors.UsageError(
            f"--profile_steps={text} is not N:M with 1 <= N <= M; give two steps, such as 101:120"
        )
    return int(first), int(last)


class StopRequests:
    """Notes requests to stop; ask `requested()` between dispatches, equally often in all processes.

    With `jax.distributed` the runtime itself listens for SIGTERM and makes every process stop at
    the same call. Without it SIGTERM and the first Ctrl-C are caught here; a second Ctrl-C
    interrupts at once. An inner `with` gives the object of the outer one.
    """

    _listening: "StopRequests | None" = None

    def __init__(self) -> None:
        self._calls = 0
        self._signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if StopRequests._listening is not None:
            return StopRequests._listening
        StopRequests._listening = self
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and not jax.distributed.is_initialized():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if StopRequests._listening is self:
            StopRequests._listening = None

    def check(self) -> None:
        """Stops at once, if asked to, where there is nothing to save yet; for one process alone."""
        if self._signal is not None:
            raise errors.Interrupted("stopped before the first step; the same command goes on")

    def requested(self) -> bool:
        """Whether to save and stop now; the same answer in every process."""
        if jax.distributed.is_initialized():
            # The runtime names one call at which all stop, so they are counted one by one.
            self._calls += 1
            return multihost_utils.reached_preemption_sync_point(self._calls)
        return self._signal is not None

    def _note(self, number: int, _) -> None:
        if self._signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self._signal = number
        hint = "; again to stop at once" if number == signal.SIGINT else ""
        logging.warning("%s: saving and stopping%s", signal.Signals(number).name, hint)

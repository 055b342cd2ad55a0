"""Estimates the memory and the speed of an experiment on chips that this machine does not have.

`examine` compiles the program that training runs, `log_every` steps in one dispatch, with the
shardings of `partitioning.py` on the described chips, and reports every number for one of these
steps. It also compiles the programs of the evaluation before each turn, because their time is part
of the whole and because a run fits only if they fit next to the training state. No data are needed:
an abstract task (`data/abstract_tasks.py`) takes their place. `times.py` and `schedules.py` turn a
compiled program into seconds.
"""

import dataclasses
import functools
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import logging
from jaxtyping import PyTree
from ml_collections import config_dict

from mogrifier_jax import errors, files, partitioning
from mogrifier_jax.data import abstract_tasks, tasks
from mogrifier_jax.nn import models, plans
from mogrifier_jax.preflight import costs, flops, memory, schedules, targets, times, topologies
from mogrifier_jax.training import programs, runs, scoring, steps, turn_evaluation

NO_SCHEDULE = (
    "the TPU compiler wrote no schedule that can be read, so the time is the sum of its own "
    "estimates alone"
)
_SAVED_PER_SECOND = 1e9  # Bytes of a checkpoint that a host writes per second: a round figure.


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """A step by the schedule of the TPU compiler (`schedules.py`), on each chip."""

    lower_seconds: float  # If no DMA and no collective is waited for.
    upper_seconds: float  # If nothing overlaps with DMAs and collectives.
    cycles: float  # The bundles of all executions.
    dmas: float  # Waits for DMAs.
    dma_bytes: float
    dma_seconds: float
    matrix_share: float  # Of the cycles in which matrix units work; NaN if they are unknown.
    guesses: int  # Branches and sizes that depend on data.
    evaluation_seconds: tuple[float, float]  # Of one turn, the lower and the upper end.
    # Instructions with the most cycles: name, path in JAX, executions and cycles in one step.
    dearest: tuple[tuple[str, str, float, float], ...]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What an experiment costs on a mesh: seconds of one optimizer step, and bytes on each chip."""

    topology: str
    chips: int
    data: int
    model: int
    batch_size: int
    window: int
    turns: int  # Of the whole schedule.
    steps: int  # Of the whole schedule.
    dtype: str
    vocab_size: int
    parameters: int
    flops: int  # Of the matmuls of a step, on all chips together.
    fits: bool
    memory: int  # Bytes that a chip has for a program.
    needed: int  # Bytes for training; 0 if the compiler refused and did not say how many.
    bytes: dict[str, int]  # For training, by kind; empty if the compiler refused.
    evaluation_needed: int = 0  # Bytes for an evaluation, together with the training state.
    evaluation_seconds: float = math.nan  # Of one turn, including the temperature search.
    saving_seconds: float = math.nan  # Of one checkpoint.
    compute_seconds: float = math.nan
    collective_seconds: float = math.nan
    # The number and the bytes of the collectives of a step, by kind.
    collectives: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    time_from: str = ""  # What the times are derived from.
    kernels: float = math.nan  # Launched in a step on each GPU; TPUs have none.
    peak_share: float = math.nan  # FLOPs per second, as a share of the chips' bfloat16 peak.
    compile_seconds: float = 0.0
    schedule: ScheduledStep | None = None  # Of TPUs whose compiler wrote one.
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The time of a step if no collective overlaps with computation.

        For TPUs this is the compiler's own estimate, and `schedule` has a range of its own.
        """
        return self.compute_seconds + self.collective_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second that all chips together train on."""
        return self.batch_size * self.window / self.seconds

    @property
    def days(self) -> float:
        """The time of the whole schedule, including its evaluations and checkpoints."""
        return self._days(self.seconds, self.evaluation_seconds)

    @property
    def scheduled_days(self) -> tuple[float, float] | None:
        """The same by the lower and the upper end of the schedule."""
        if self.schedule is None:
            return None
        ends = self.schedule.lower_seconds, self.schedule.upper_seconds
        lower, upper = map(self._days, ends, self.schedule.evaluation_seconds)
        return lower, upper

    def _days(self, step: float, evaluation: float) -> float:
        between = self.turns * (evaluation + self.saving_seconds)
        return (self.steps * step + between) / 86_400

    def to_dict(self) -> files.JsonObject:
        """The fields and the properties above as plain values; None where a number is unknown."""
        derived = ("seconds", "tokens_per_second", "days", "scheduled_days")
        values = dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
        return _without_unknown(values)

    def in_one_line(self) -> str:
        """The split of the chips, whether it fits, and how fast it is."""
        return (
            f"data {self.data} x model {self.model}: {'fits' if self.fits else 'does not fit'}, "
            f"{memory.show_bytes(self.needed)}, {1e3 * self.seconds:.1f} ms a step, "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )


def _without_unknown(values: files.JsonObject) -> files.JsonObject:
    """The values with None in place of numbers that are not finite."""
    known = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = _without_unknown(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = None
        known[key] = value
    return known


class Seconds(NamedTuple):
    """The time of a program, collectives included, as it is estimated in two ways."""

    estimate: float  # TPUs: the compiler's own. GPUs: by rooflines.
    lower: float = math.nan  # By the schedule, if everything overlaps; NaN without a schedule.
    upper: float = math.nan  # The same, if nothing overlaps.


class CompiledProgram(NamedTuple):
    """A program, its costs, and its schedule if the compiler wrote one."""

    program: jax.stages.Compiled
    analysis: costs.Analysis
    schedule: schedules.Schedule | None

    def seconds(self, target: targets.Target) -> Seconds:
        """The time of one run on the target that it was compiled for."""
        collective = times.collective_seconds(self.analysis, target)
        estimate = times.compute_seconds(self.analysis, target.chip) + collective
        if self.schedule is None:
            return Seconds(estimate)
        lower = self.schedule.lower_seconds
        return Seconds(estimate, lower, lower + self.schedule.dma_seconds + collective)


def compile_program(lowered: jax.stages.Lowered, target: targets.Target) -> CompiledProgram:
    """Compiles a program for a target, which it was lowered for, and analyses it."""
    with schedules.Recording(target.chip) as recording:
        program = lowered.compile()
    analysis = costs.analyse(str(program.as_text()))
    return CompiledProgram(program, analysis, recording.schedule(analysis))


def examine(config: config_dict.ConfigDict, target: targets.Target) -> Estimate:
    """Compiles the train step of a config for a target and estimates its costs."""
    mesh = topologies.make_mesh(target, config.mesh.data, config.mesh.model)
    task = abstract_tasks.make_abstract_task(config.data, mesh)
    made = runs.make_run(config, mesh, task)
    state, count = made.abstract_state(), max(1, config.get("log_every", 20))
    traced = programs.jit_train_steps(made).trace(state, task.stream, made.hyper, num_steps=count)
    common = dict(
        topology=target.name,
        chips=target.num_chips,
        data=mesh.shape["data"],
        model=mesh.shape["model"],
        batch_size=made.batch_size,
        window=config.data.window,
        turns=made.rules.turns,
        steps=made.rules.turns * made.rules.steps_per_turn,
        dtype=str(config.model.dtype),
        vocab_size=len(task.vocabulary),
        parameters=sum(models.count_parameters(made.model).values()),
        flops=model_flops(made, state, task.stream),
        memory=target.chip.memory,
    )
    assumed = abstract_tasks.ASSUMED.get(config.data.name)
    notes = [assumed] if assumed else []
    started = time.perf_counter()
    try:
        compiled = compile_program(traced.lower(), target)
    except jax.errors.JaxRuntimeError as error:
        needed = memory.parse_refusal(str(error))
        if needed is None:
            raise
        notes.append("the compiler refused the program because its temporaries exceed the memory")
        return Estimate(**common, fits=False, needed=needed, bytes={}, notes=tuple(notes))
    compile_seconds = time.perf_counter() - started
    sizes, analysis = memory.needed_by(compiled.program), compiled.analysis
    if analysis.unknown_loops:
        names = ", ".join(loop.op_name or loop.name for loop in analysis.unknown_loops)
        notes.append(
            "times are lower bounds, because loops of unknown length count as one iteration: "
            f"{names}"
        )
    compute = times.compute_seconds(analysis, target.chip) / count
    collective = times.collective_seconds(analysis, target) / count
    per_chip, gpu = common["flops"] / target.num_chips, target.chip.kind == "gpu"
    kinds = _bytes_by_kind(state, task.stream, sizes)
    try:
        evaluation = _evaluation(made, state.params, target, held=sizes.arguments)
    except jax.errors.JaxRuntimeError as error:
        if memory.parse_refusal(str(error)) is None:
            raise
        notes.append(
            "the compiler refused the evaluation because its temporaries exceed the memory"
        )
        evaluation = _Evaluation(target.chip.memory + 1, math.nan)
    needed = max(sizes.peak + sizes.code, evaluation.needed)
    schedule = None
    if compiled.schedule:
        schedule = _scheduled_step(compiled.schedule, count, collective, evaluation.scheduled)
    elif not gpu:
        notes.append(NO_SCHEDULE)
    return Estimate(
        **common,
        fits=needed <= target.chip.memory,
        needed=sizes.peak + sizes.code,
        bytes=kinds,
        evaluation_needed=evaluation.needed,
        evaluation_seconds=evaluation.seconds,
        saving_seconds=shard_bytes(state) / _SAVED_PER_SECOND,
        compute_seconds=compute,
        collective_seconds=collective,
        collectives={k: (n / count, b / count) for k, (n, b) in analysis.by_kind().items()},
        time_from="the roofline of each kernel" if gpu else "the compiler's own estimates",
        schedule=schedule,
        kernels=sum(c.executions for c in analysis.costs) / count if gpu else math.nan,
        peak_share=per_chip / (compute + collective) / target.chip.peak_flops,
        compile_seconds=round(compile_seconds, 1),
        notes=tuple(notes),
    )


def model_flops(made: runs.Run, state: PyTree, stream: tasks.Stream) -> int:
    """The matmul FLOPs of the equations of a step, without what a platform's plan recomputes."""
    # Shardings would name the chips, and with them a platform.
    state, stream = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, stream)
    )
    step = functools.partial(steps.train_steps, program=made.program, num_steps=1)
    with plans.of_no_platform():
        return flops.count_flops(jax.make_jaxpr(step)(state, stream, made.hyper))


def _scheduled_step(
    whole: schedules.Schedule,
    count: int,
    collective: float,
    evaluation: tuple[float, float],
) -> ScheduledStep:
    """One of the `count` steps of a scheduled program, with the seconds of its collectives."""
    lower, dma_seconds = whole.lower_seconds / count, whole.dma_seconds / count
    return ScheduledStep(
        lower_seconds=lower,
        upper_seconds=lower + dma_seconds + collective,
        cycles=whole.total.bundles / count,
        dmas=whole.total.dmas / count,
        dma_bytes=whole.total.dma_bytes / count,
        dma_seconds=dma_seconds,
        matrix_share=whole.matrix_share,
        guesses=whole.total.guesses,
        evaluation_seconds=evaluation,
        dearest=tuple(
            (
                part.name,
                part.op_name,
                part.executions / count,
                part.executions * part.each.bundles / count,
            )
            for part in whole.dearest()
        ),
    )


class _Evaluation(NamedTuple):
    """The costs of the evaluation before a turn."""

    needed: int  # Bytes on each chip.
    seconds: float
    scheduled: tuple[float, float] = (math.nan, math.nan)  # The same by both ends of the schedule.


def _evaluation(
    made: runs.Run, params: optax.Params, target: targets.Target, held: int
) -> _Evaluation:
    """The costs of the evaluation before a turn, next to `held` bytes of training.

    The windows of training data are scored at one temperature, but their time is taken from the
    program of the temperature search, which tries several at once. So it is an upper bound.
    """
    if tasks.kind_of(made.config.data).encoder_decoder:
        return _Evaluation(held, 0.0, (0.0, 0.0))
    turn, settings = programs.make_turn_evaluation(made), made.config.evaluation
    valid = turn.whole("valid")
    passes = (
        0
        if settings.softmax_temperature
        else len(turn_evaluation.TEMPERATURES) // turn_evaluation.AT_ONCE
    )
    short = settings.train_windows + passes * turn.search_windows
    whole = scoring.limit_windows(valid.plan, settings.max_windows)
    needed, seconds, lower, upper = held, 0.0, 0.0, 0.0
    for each_pass, temperatures, windows in (
        (turn.search, turn_evaluation.AT_ONCE, short),
        (valid, 1, whole),
    ):
        plan, chunk = each_pass.plan, each_pass.chunk
        carry = ()
        if plan.carries:
            carry = jax.eval_shape(lambda plan=plan: made.model.zero_carry(plan.batch_size))
            carry = partitioning.with_shardings({"carry": carry}, made.mesh)["carry"]
        # The number of windows is a constant here, which makes the trip count of the loop known.
        run = functools.partial(
            scoring.score_windows,
            count=chunk,
            model=made.model,
            batch_at=plan.batch_at,
            chunk=chunk,
            keep=False,
        )
        at = jax.ShapeDtypeStruct((temperatures,), jnp.float32)
        lowered = jax.jit(run).lower(params, plan.stream, carry, 0, logit_scales=at)
        compiled = compile_program(lowered, target)
        sizes, each = memory.needed_by(compiled.program), compiled.seconds(target)
        seconds += windows * each.estimate / chunk
        lower, upper = lower + windows * each.lower / chunk, upper + windows * each.upper / chunk
        # The evaluated weights may be averages, which exist in addition to those of training.
        needed = max(needed, held + sizes.peak + sizes.code)
    return _Evaluation(needed, seconds, (lower, upper))


def examine_splits(config: config_dict.ConfigDict, target: targets.Target) -> list[Estimate]:
    """The estimates of all splits that the config allows: those that fit first, then by speed."""
    examined, refusals = [], []
    splits = targets.splits(target)
    for number, (data_size, model_size) in enumerate(splits, start=1):
        tried = config.copy_and_resolve_references()
        tried.mesh.data, tried.mesh.model = data_size, model_size
        try:
            examined.append(examine(tried.lock(), target))
        except errors.UsageError as error:
            refusals.append(f"{data_size} x {model_size}: {error}")
            logging.info("%d/%d: refused, %s", number, len(splits), refusals[-1])
            continue
        logging.info("%d/%d: %s", number, len(splits), examined[-1].in_one_line())
    if not examined:
        raise errors.UsageError(
            f"no split of {target.name} works for this config: {'; '.join(refusals)}"
        )
    return sorted(examined, key=lambda each: (not each.fits, each.seconds, each.needed))


def _bytes_by_kind(state: PyTree, stream: tasks.Stream, needed: memory.Memory) -> dict[str, int]:
    """The bytes on each chip during training, by kind."""
    kinds = {
        "weights": state.params,
        "optimizer": state.opt_state,
        "averages": state.average,
        "carry": state.carry,
        "tokens": stream,
    }
    sizes = {name: shard_bytes(tree) for name, tree in kinds.items()}
    held = needed.arguments + needed.outputs - needed.aliased
    return sizes | {
        "layout and rest": held - sum(sizes.values()),
        "temporaries": needed.temporaries,
        "code": needed.code,
    }


def shard_bytes(tree: PyTree) -> int:
    """The bytes of the arrays of an abstract tree on each chip, without padding."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        total += math.prod(shape) * leaf.dtype.itemsize
    return total

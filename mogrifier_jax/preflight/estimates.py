"""`--mode=preflight`: whether a run fits on chips that are not here, and how fast it will be.

    python -m mogrifier_jax.main --mode=preflight --config=experiments/enwik8.py --topology=v5e:2x2

It compiles the program that training runs: `log_every` steps in one dispatch, with the shardings of
`partitioning.py` on the described chips. Every number is for one of these steps. It also compiles
the programs of the evaluation before each turn. Their time is part of the whole time. A run fits
only if they fit beside the state of training. An abstract task takes the place of the data.
`targets.py` describes the chips. `costs.py` counts FLOPs and reads the program.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from ml_collections import config_dict

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import tasks
from mogrifier_jax.nn import models
from mogrifier_jax.preflight import costs, targets
from mogrifier_jax.training import evaluate, programs, runs, summaries, units, workdirs

_GIB = 1024**3
_SAVING = 1e9  # Bytes of a checkpoint that a host writes in a second: a round figure.


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one experiment costs on one mesh. Times are of one optimizer step; bytes per chip."""

    topology: str
    chips: int
    data: int
    model: int
    batch_size: int
    window: int
    turns: int  # In the whole schedule.
    steps: int  # In the whole schedule.
    dtype: str
    vocab_size: int
    parameters: int
    flops: int  # Of the matmuls of a step, all chips together.
    fits: bool
    memory: int  # Bytes that a chip has for a program.
    needed: int  # Bytes of training; 0 if the compiler refused without saying how much.
    bytes: dict[str, int]  # Of training, by kind; empty if the compiler refused.
    evaluation_needed: int = 0  # Bytes of an evaluation, with the state of training beside it.
    evaluation_seconds: float = math.nan  # For one turn, with the search of the temperature.
    saving_seconds: float = math.nan  # For one checkpoint.
    compute_seconds: float = math.nan
    collective_seconds: float = math.nan
    collectives: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    time_from: str = ""
    kernels: float = math.nan  # Started in a step on each GPU; TPUs have none.
    peak_share: float = math.nan  # FLOPs per second, as a share of the chips' bfloat16 peak.
    compile_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The time of a step if no collective runs beside the computation."""
        return self.compute_seconds + self.collective_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all chips together train on in a second."""
        return self.batch_size * self.window / self.seconds

    @property
    def days(self) -> float:
        """The time of the whole schedule, with its evaluations and checkpoints."""
        between = self.turns * (self.evaluation_seconds + self.saving_seconds)
        return (self.steps * self.seconds + between) / 86_400

    def to_dict(self) -> dict[str, Any]:
        """The fields and the properties above as plain values; None where a number is unknown."""
        derived = ("seconds", "tokens_per_second", "days")
        values = dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
        unknown = {k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        return values | dict.fromkeys(unknown)


def run(
    config: config_dict.ConfigDict,
    topology: str,
    *,
    search: bool = False,
    json_path: str | None = None,
) -> list[Estimate]:
    """Prints the report of a config on a topology.

    With `search` it tries all splits of the chips, reports the best and lists the others.
    """
    target = targets.parse(topology)
    reports = examine_splits(config, target) if search else [examine(config, target)]
    print(describe(reports[0]))
    if search:
        print("\n  ".join(["splits of the chips, best first:", *map(_row, reports)]))
    if json_path:
        write_json(json_path, reports)
    return reports


def examine(config: config_dict.ConfigDict, target: targets.Target) -> Estimate:
    """Compiles the train step of a config for a target and estimates its costs."""
    mesh = targets.mesh(target, config.mesh.data, config.mesh.model)
    task = tasks.make_abstract_task(config.data, mesh)
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
        flops=costs.count_flops(traced.jaxpr) // count,
        memory=target.chip.memory,
    )
    assumed = tasks.ASSUMED.get(config.data.name)
    notes = [assumed] if assumed else []
    started = time.perf_counter()
    try:
        program = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = costs.exhausted(str(error))
        if needed is None:
            raise
        notes.append("the compiler refused it: temporaries alone exceed the memory")
        return Estimate(**common, fits=False, needed=needed, bytes={}, notes=tuple(notes))
    seconds = time.perf_counter() - started
    memory = costs.memory(program)
    analysis = costs.analyse(program.as_text())
    if analysis.unknown_loops:
        names = ", ".join(loop.op_name or loop.name for loop in analysis.unknown_loops)
        notes.append(f"loops of unknown length counted once, so times are lower bounds: {names}")
    compute = costs.compute_seconds(analysis, target.chip) / count
    collective = costs.collective_seconds(analysis, target) / count
    per_chip, gpu = common["flops"] / target.num_chips, target.chip.kind == "gpu"
    kinds = _bytes_by_kind(state, task.stream, memory)
    try:
        evaluation = _evaluation(made, state.params, target, held=memory.arguments)
    except jax.errors.JaxRuntimeError as error:
        if costs.exhausted(str(error)) is None:
            raise
        notes.append("the compiler refused the evaluation: its temporaries exceed the memory")
        evaluation = _Evaluation(target.chip.memory + 1, math.nan)
    needed = max(memory.peak + memory.code, evaluation.needed)
    return Estimate(
        **common,
        fits=needed <= target.chip.memory,
        needed=memory.peak + memory.code,
        bytes=kinds,
        evaluation_needed=evaluation.needed,
        evaluation_seconds=evaluation.seconds,
        saving_seconds=shard_bytes(state) / _SAVING,
        compute_seconds=compute,
        collective_seconds=collective,
        collectives={k: (n / count, b / count) for k, (n, b) in analysis.by_kind().items()},
        time_from="roofline of each kernel" if gpu else "XLA's cycles",
        kernels=sum(c.executions for c in analysis.costs) / count if gpu else math.nan,
        peak_share=per_chip / (compute + collective) / target.chip.peak_flops,
        compile_seconds=round(seconds, 1),
        notes=tuple(notes),
    )


class _Evaluation(NamedTuple):
    """The costs of the evaluation before a turn."""

    needed: int  # Bytes on each chip.
    seconds: float


def _evaluation(made: runs.Run, params: Any, target: targets.Target, held: int) -> _Evaluation:
    """The costs of the evaluation before a turn, which is that of training.

    The program of the temperature search also scores training data, at one temperature. Its time
    at all temperatures is counted, which is too much.
    """
    if tasks.kind_of(made.config.data).encoder_decoder:
        return _Evaluation(held, 0.0)
    turn, settings = programs.make_turn_evaluation(made), made.config.evaluation
    valid = turn.whole("valid")
    passes = 0 if settings.softmax_temperature else len(evaluate.TEMPERATURES) // evaluate.AT_ONCE
    short = settings.train_windows + passes * turn.search_windows
    whole = evaluate.limit_windows(valid.plan, settings.max_windows)
    needed, seconds = held, 0.0
    for each_pass, temperatures, windows in (
        (turn.search, evaluate.AT_ONCE, short),
        (valid, 1, whole),
    ):
        plan, chunk = each_pass.plan, each_pass.chunk
        carry = ()
        if plan.carries:
            carry = jax.eval_shape(lambda plan=plan: made.model.zero_carry(plan.batch_size))
            carry = partitioning.with_shardings({"carry": carry}, made.mesh)["carry"]
        # The number of windows is a constant here, so that the turns of the loop can be counted.
        run = functools.partial(
            evaluate.score_windows,
            count=chunk,
            model=made.model,
            batch_at=plan.batch_at,
            chunk=chunk,
            keep=False,
        )
        at = jax.ShapeDtypeStruct((temperatures,), jnp.float32)
        program = jax.jit(run).lower(params, plan.stream, carry, 0, logit_scales=at).compile()
        memory = costs.memory(program)
        analysis = costs.analyse(str(program.as_text()))
        each = costs.compute_seconds(analysis, target.chip)
        each += costs.collective_seconds(analysis, target)
        seconds += windows * each / chunk
        # The weights may be averages, which are beside those of training.
        needed = max(needed, held + memory.peak + memory.code)
    return _Evaluation(needed, seconds)


def examine_splits(config: config_dict.ConfigDict, target: targets.Target) -> list[Estimate]:
    """The reports of all splits that the config allows: those that fit first, then by speed."""
    reports, refusals = [], []
    splits = targets.splits(target)
    for number, (data_size, model_size) in enumerate(splits, start=1):
        tried = config.copy_and_resolve_references()
        tried.mesh.data, tried.mesh.model = data_size, model_size
        try:
            reports.append(examine(tried.lock(), target))
        except errors.UsageError as error:
            refusals.append(f"{data_size} x {model_size}: {error}")
            logging.info("%d/%d: refused, %s", number, len(splits), refusals[-1])
            continue
        logging.info("%d/%d: %s", number, len(splits), _row(reports[-1]))
    if not reports:
        raise errors.UsageError(
            f"no split of {target.name} works for this config: {'; '.join(refusals)}"
        )
    return sorted(reports, key=lambda r: (not r.fits, r.seconds, r.needed))


def _bytes_by_kind(state: Any, stream: Any, memory: costs.Memory) -> dict[str, int]:
    """The bytes on each chip while training runs, by kind."""
    kinds = {
        "weights": state.params,
        "optimizer": state.opt_state,
        "averages": state.average,
        "carry": state.carry,
        "tokens": stream,
    }
    sizes = {name: shard_bytes(tree) for name, tree in kinds.items()}
    held = memory.arguments + memory.outputs - memory.aliased
    return sizes | {
        "layout and rest": held - sum(sizes.values()),
        "temporaries": memory.temporaries,
        "code": memory.code,
    }


def shard_bytes(tree: Any) -> int:
    """The bytes that the arrays of an abstract tree have on each chip, without padding."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def describe(report: Estimate) -> str:
    """The report as a table for the terminal."""
    verdict = "fits" if report.fits else "DOES NOT FIT"
    asked = _size(report.needed) if report.needed else "more"
    sections: dict[str, list[tuple[str, Any]]] = {
        "program": [
            ("chips", f"{report.topology}, data {report.data} x model {report.model}"),
            ("batch x window", f"{report.batch_size} x {report.window}"),
            ("parameters", report.parameters),
            ("matmul FLOPs of a step", units.quantity(report.flops)),
        ],
        f"memory of each chip: {verdict}": [
            ("needed, of", f"{asked}, {_size(report.memory)}"),
            *((f"  {kind}", _size(size)) for kind, size in report.bytes.items()),
            ("while evaluating", _size(report.evaluation_needed)),
        ],
    }
    if report.time_from:
        share = report.collective_seconds / report.seconds
        sections[f"time of a step, estimated ({report.time_from})"] = [
            ("milliseconds", f"{1e3 * report.seconds:.1f}"),
            ("  in collectives", f"{1e3 * report.collective_seconds:.1f} ({share:.0%})"),
            *(
                (f"  {kind}", f"{times:,.0f} times, {_size(size)}")
                for kind, (times, size) in report.collectives.items()
            ),
            *([("kernels started", f"{report.kernels:,.0f}")] if report.kernels > 0 else []),
            ("tokens per second", f"{report.tokens_per_second:,.0f}"),
            ("  of each chip", f"{report.tokens_per_second / report.chips:,.0f}"),
            ("share of the peak", f"{report.peak_share:.1%}"),
            ("seconds of an evaluation", f"{report.evaluation_seconds:.2f}"),
            ("  of a checkpoint", f"{report.saving_seconds:.2f}"),
            (
                "days in all",
                f"{report.days:.2f} for {report.steps:,} steps, {report.turns:,} turns",
            ),
        ]
    return "\n".join([summaries.table(sections), *report.notes])


def _row(report: Estimate) -> str:
    """One line about a split."""
    verdict = "fits" if report.fits else "does not fit"
    return (
        f"data {report.data} x model {report.model}: {verdict}, {_size(report.needed)}, "
        f"{1e3 * report.seconds:.1f} ms a step, {report.tokens_per_second:,.0f} tokens/s"
    )


def _size(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.2f} MiB"


def write_json(path: str, reports: list[Estimate]) -> None:
    """Writes all reports to a file, with the date and the versions of JAX and the compilers."""
    names = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
    found = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    content = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in names if name in found},
        "reports": [report.to_dict() for report in reports],
    }
    workdirs.replace_text(path, json.dumps(content, indent=1) + "\n")

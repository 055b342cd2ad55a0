"""Measures the device that is here, and says how far off the estimate of preflight was.

    python -m benchmarks.on_device                      # Under ten minutes, on any device.
    python -m benchmarks.on_device --json=on_device.json

Rows are the train steps of published experiments, and one layer beside Flax's `nn.RNN` and
`nnx.RNN` and, where PyTorch has CUDA, cuDNN's LSTM. The corpora need not be here: tokens are
random. A CPU takes too long for the larger ones, so their batch is made smaller, and nothing is
begun after `--minutes`; both is said in the row.

The estimate is made from the very program that is measured. TPUs and the GPUs of
`preflight/chips.py` have one. H hidden, B batch, T window.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import config_dict

from benchmarks import rnn, timing
from mogrifier_jax import configs
from mogrifier_jax.data import abstract_tasks, streams
from mogrifier_jax.preflight import chips, estimates, schedules, targets
from mogrifier_jax.training import programs, runs

EXPERIMENTS = ("ptb", "ptb:lstm", "enwik8", "wikitext2")
LAYERS = ("small", "middle", "ptb")
# How JAX calls the devices whose chips are in `preflight/chips.py`, the more special ones first.
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "A100-SXM4-80GB": "a100-80g",
    "A100 80GB": "a100-80g",
    "A100": "a100",
    "H100": "h100",
    "NVIDIA L4": "l4",
}
STEPS = 20  # In a dispatch; on CPUs it is one.
LONGEST = 5.0  # Seconds that a step may take on a CPU before its batch is made smaller.


class Row(NamedTuple):
    """A measurement; seconds are NaN if it was left out."""

    name: str
    seconds: float = math.nan
    estimate: estimates.Seconds | None = None
    remark: str = ""


def find_target(devices: list[jax.Device]) -> targets.Target | None:
    """The chips as preflight knows them; None if it does not."""
    kind = devices[0].device_kind
    name = next((chip for part, chip in KINDS.items() if re.search(rf"{part}\b", kind)), None)
    if name is None:
        return None
    chip, count = chips.CHIPS[name], len(devices)
    if chip.kind == "gpu":
        return targets.parse(f"{name}:{count}")
    shapes = targets.PLANES if chip.torus == 2 else targets.CUBES
    shape = next((shape for shape in shapes if math.prod(shape) == count), None)
    return targets.Target(chip, shape) if shape else None


def random_stream(stream: streams.TrainStream, vocab_size: int) -> streams.TrainStream:
    """The stream of an abstract task with random tokens, in lines of the same length."""
    draw = np.random.default_rng(0)
    (total,), (lines,), (batch,) = (
        array.shape for array in (stream.tokens, stream.line_starts, stream.stripes)
    )
    made = streams.TrainStream(
        tokens=draw.integers(vocab_size, size=total).astype(stream.tokens.dtype),
        line_starts=np.arange(lines, dtype=np.int32) * np.int32(total // lines),
        stripes=np.arange(batch, dtype=np.int32),
        bases=np.arange(batch, dtype=np.int32) * np.int32(lines // batch),
        key=jax.random.key(0),
        eos=np.int32(0),
    )
    return jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), made, stream)


def cpu_flops_per_second() -> float:
    """The rate of a float32 matmul on this machine."""
    matrix = jnp.ones((1024, 1024))
    multiply = jax.jit(lambda a: a @ a)
    seconds = timing.take_turns({"": lambda: multiply(matrix).block_until_ready()}, 3)[""]
    return 2 * 1024**3 / seconds


def make_experiment(
    config: config_dict.ConfigDict,
) -> tuple[runs.Run, streams.TrainStream]:
    """A run on the devices that are here, and its stream with random tokens."""
    config = configs.base(config)
    mesh = runs.make_mesh(config)
    task = abstract_tasks.make_abstract_task(config.data, mesh)
    return runs.make_run(config, mesh, task), task.stream


def measure_experiment(name: str, target: targets.Target | None, repeats: int) -> Row:
    """The time of a train step, with the batch as published unless a CPU is too slow for it."""
    config = configs.load_config(name)
    run, stream = make_experiment(config)
    count, remark, published = STEPS, "", run.batch_size
    if jax.default_backend() == "cpu":
        count = 1
        flops = estimates.model_flops(run, run.abstract_state(), stream)
        seconds = 2 * flops / cpu_flops_per_second()  # About half of the rate is reached.
        if seconds > LONGEST:
            unit = config.optimizer.get("accumulate", 1) * len(jax.devices())
            batch = max(1, round(published * LONGEST / seconds / unit)) * unit
            with config.unlocked():
                config.data.batch_size = batch
            run, stream = make_experiment(config)
            remark = f"batch {batch} instead of {published}"
    full = f"{name}, step, B {run.batch_size}, T {config.data.window}"
    state = jax.jit(run.init_state, out_shardings=programs.shardings_of(run.abstract_state()))()
    source = random_stream(stream, len(run.task.vocabulary))
    lowered = programs.jit_train_steps(run).lower(state, source, run.hyper, num_steps=count)
    step, estimate = compile_and_estimate(lowered, target)
    held = [state]

    def go() -> None:
        held[0], metrics = step(held[0], source, run.hyper)
        jax.block_until_ready(metrics)

    seconds = timing.take_turns({name: go}, repeats)[name] / count
    return Row(full, seconds, estimate and per_step(estimate, count), remark)


def per_step(seconds: estimates.Seconds, count: int) -> estimates.Seconds:
    """The time of one of several steps."""
    return estimates.Seconds(*(each / count for each in seconds))


def compile_and_estimate(
    lowered: jax.stages.Lowered, target: targets.Target | None
) -> tuple[Callable, estimates.Seconds | None]:
    """The compiled program, and its estimate if there is one for this device."""
    if target is None:
        return lowered.compile(), None
    compiled = estimates.compile_program(lowered, target)
    return compiled.program, compiled.seconds(target)


def measure_layers(size: str, target: targets.Target | None, repeats: int) -> Iterator[Row]:
    """The gradients of one layer of each kind."""
    hidden, batch, window = rnn.SIZES[size]
    contenders: dict[str, Callable[[], object]] = {}
    found: dict[str, estimates.Seconds | None] = {}
    single = targets.Target(target.chip, (1,) * len(target.shape)) if target else None
    for name, layer in rnn.rows(hidden).items():
        if "GRU" in name or "RLSTM" in name:
            continue
        compute, arguments = rnn.make_compute(layer, "gradient", hidden, batch, window)
        step, found[name] = compile_and_estimate(compute.lower(*arguments), single)
        contenders[name] = lambda step=step, args=arguments: jax.block_until_ready(step(*args))
    if cudnn := make_cudnn(hidden, batch, window):
        contenders["torch.nn.LSTM by cuDNN"] = cudnn
    seconds = timing.take_turns(contenders, repeats)
    first = next(iter(seconds.values()))
    for name, each in seconds.items():
        full = f"layer of {name}, H {hidden}, B {batch}, T {window}"
        yield Row(full, each, found.get(name), f"{first / each:.2f}x the first")


def make_cudnn(hidden: int, batch: int, window: int) -> Callable[[], object] | None:
    """The gradients of PyTorch's LSTM on the GPU; None without PyTorch or CUDA."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return None
    layer = torch.nn.LSTM(hidden, hidden).cuda()
    xs = torch.randn(window, batch, hidden, device="cuda", requires_grad=True)

    def run() -> None:
        torch.autograd.grad(layer(xs)[0].sin().sum(), [xs, *layer.parameters()])
        torch.cuda.synchronize()

    return run


def how_far_off(row: Row) -> str:
    """The measurement beside both estimates."""
    if row.estimate is None or math.isnan(row.seconds):
        return ""
    _, lower, upper = row.estimate
    if math.isnan(lower):
        return ""
    if row.seconds < lower:
        return f"{row.seconds / lower:.2f}x the lower end"
    return "inside" if row.seconds <= upper else f"{row.seconds / upper:.2f}x the upper end"


def to_cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""

    def milliseconds(value: float) -> str:
        return "" if math.isnan(value) else f"{1e3 * value:.2f}"

    estimate, lower, upper = row.estimate or estimates.Seconds(math.nan)
    ends = "" if math.isnan(lower) else f"{milliseconds(lower)} to {milliseconds(upper)}"
    ratio = row.seconds / estimate
    return (
        row.name,
        milliseconds(row.seconds),
        ends,
        how_far_off(row),
        milliseconds(estimate),
        "" if math.isnan(ratio) else f"{ratio:.2f}x",
        row.remark,
    )


def describe_machine(target: targets.Target | None) -> str:
    """The devices and the versions, and whether there are estimates for them."""
    devices = jax.devices()
    names = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch")
    versions = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    known = f"estimates for {target.name}" if target else "preflight has no estimate for it"
    return f"{len(devices)} x {devices[0].device_kind}, {known}; {', '.join(versions)}"


def measure_all(
    experiments: list[str], layers: list[str], minutes: float, repeats: int | None
) -> Iterator[Row]:
    """All rows, the most telling first; those for which no time is left have none."""
    target = find_target(jax.devices())
    slow = jax.default_backend() == "cpu"
    repeats = repeats or (1 if slow else 5)
    end = time.monotonic() + 60 * minutes

    def of_layers(size: str) -> tuple[str, Callable[[], Iterator[Row]]]:
        return f"layers, {size}", lambda: measure_layers(size, target, repeats)

    def of_experiment(name: str) -> tuple[str, Callable[[], Iterator[Row]]]:
        return f"{name}, step", lambda: iter([measure_experiment(name, target, repeats)])

    jobs = [of_layers(size) for size in layers[:1]]
    jobs += [of_experiment(name) for name in experiments]
    jobs += [of_layers(size) for size in layers[1:]]
    for name, job in jobs:
        if time.monotonic() > end:
            yield Row(name, remark=f"left out: the {minutes:g} minutes were over")
        else:
            yield from job()


def write_json(path: str, machine: str, rows: list[Row]) -> None:
    """Writes all numbers to a file; None where there is none."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value

    content = [
        {
            "name": row.name,
            "seconds": plain(row.seconds),
            "remark": row.remark,
            **{
                f"estimated_{key}": plain(value)
                for key, value in (row.estimate._asdict() if row.estimate else {}).items()
            },
        }
        for row in rows
    ]
    with open(path, "w") as file:
        json.dump({"machine": machine, "rows": content}, file, indent=1)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiments", default=";".join(EXPERIMENTS), help="separated by ;")
    parser.add_argument("--layers", default=",".join(LAYERS), help="any of %(default)s")
    parser.add_argument("--minutes", type=float, default=6.0, help="nothing is begun after them")
    parser.add_argument("--repeats", type=int, help="samples of each; 5, on CPUs 1")
    parser.add_argument("--json", help="a file for all numbers")
    options = parser.parse_args()
    schedules.request_listings()  # Before JAX loads the TPU's compiler.
    machine = describe_machine(find_target(jax.devices()))
    print(machine, flush=True)
    rows = []
    experiments = [name for name in options.experiments.split(";") if name]
    layers = [name for name in options.layers.split(",") if name]
    for row in measure_all(experiments, layers, options.minutes, options.repeats):
        rows.append(row)
        print(" ".join(filter(None, to_cells(row))), flush=True)
    head = ("", "ms", "by schedule", "", "by estimate", "measured / estimate", "")
    print("\n" + timing.table([head, *map(to_cells, rows)]))
    if options.json:
        write_json(options.json, machine, rows)


if __name__ == "__main__":
    main()

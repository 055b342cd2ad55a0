"""The recurrence compiled for accelerators that are not here: ours, plain `nn.scan`, Flax's LSTM.

    python -m benchmarks.accelerators --chips=v5e --sizes=small,large,ptb,enwik8  # Minutes.

Needs the extra `preflight`, and no accelerator. Prints the estimated time
(`preflight/estimates.py` says from what), for TPUs both ends of the range by the schedule of the
compiler (`preflight/schedules.py`), and the memory of a chip. `small` and `large` are the
gradients of one layer; `ptb` and `enwik8` are whole train steps as published, enwik8 on four chips.
A size that the compiler refuses for its memory has no time. `--only='r = 0|fast'` leaves out the
rows that do not match.
"""

import argparse
import functools
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import timing, training
from mogrifier_jax.nn import layers, rnn
from mogrifier_jax.preflight import estimates, memory, targets, topologies


class Size(NamedTuple):
    """One layer: H hidden and input features, B batch, T window, r rounds, k rank."""

    hidden: int
    batch: int
    window: int
    rounds: int = 5
    rank: int = 85


LAYERS = {"small": Size(256, 32, 64, rank=32), "large": Size(1024, 64, 128)}
# Experiment, and how many chips it is for.
STEPS = {"ptb": ("experiments/ptb.py", 1), "enwik8": ("experiments/enwik8.py", 4)}
TOPOLOGIES = {
    ("v5e", 1): "v5e:1x1",
    ("v5e", 4): "v5e:2x2",
    ("h100", 1): "h100:1",
    ("h100", 4): "h100:4",
}


def our_cells(size: Size, dtype: Any) -> dict[str, layers.Cell]:
    """The LSTM, the Mogrifier LSTM with all rounds and with one, the mLSTM."""
    make = functools.partial(layers.MogrifierLSTMCell, size.hidden, dtype=dtype)
    found: dict[str, layers.Cell] = {
        f"r = {rounds}": make(rounds=rounds, rank=size.rank) for rounds in (size.rounds, 1)
    }
    return found | {"mLSTM": layers.MLSTMCell(size.hidden, dtype=dtype), "r = 0": make(rounds=0)}


def ours(cell: layers.Cell, fast: bool) -> tuple[Callable, Any]:
    """(params, xs) -> ys of our layer, and its parameters."""
    layer = rnn.RNN(cell, time_major=True, fast=fast)
    return layer.apply, lambda xs: layer.init(jax.random.key(0), xs)


def linen_lstm(size: Size, dtype: Any) -> tuple[Callable, Any]:
    """The same of Flax's `nn.RNN`."""
    layer = nn.RNN(nn.OptimizedLSTMCell(size.hidden, dtype=dtype), time_major=True)
    return layer.apply, lambda xs: layer.init(jax.random.key(0), xs)


def nnx_lstm(size: Size, dtype: Any) -> tuple[Callable, Any]:
    """The same of Flax's `nnx.RNN`."""

    def make():
        rngs = nnx.Rngs(0)
        cell = nnx.OptimizedLSTMCell(size.hidden, size.hidden, dtype=dtype, rngs=rngs)
        return nnx.RNN(cell, time_major=True, rngs=rngs)

    graph, _ = nnx.split(nnx.eval_shape(make))
    return lambda state, xs: nnx.merge(graph, state)(xs), lambda xs: nnx.state(make())


def contenders(size: Size, dtype: Any) -> dict[str, tuple[Callable, Any]]:
    """All that a layer is compared with."""
    found = {}
    for name, cell in our_cells(size, dtype).items():
        found[f"{name}, plain"] = ours(cell, fast=False)
        found[f"{name}, fast"] = ours(cell, fast=True)
    found["r = 0, Flax nn.RNN"] = linen_lstm(size, dtype)
    found["r = 0, Flax nnx.RNN"] = nnx_lstm(size, dtype)
    return found


def examine_layer(
    size: Size, dtype: Any, apply: Callable, init: Callable, target: targets.Target
) -> tuple[estimates.Seconds, float]:
    """Seconds and bytes of the output and all gradients of a layer."""
    replicated = jax.sharding.NamedSharding(
        topologies.make_mesh(target, 1, 1), jax.sharding.PartitionSpec()
    )

    def place(tree):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), tree
        )

    def gradients(params, xs, d_ys):
        ys, pull = jax.vjp(apply, params, xs)
        return ys, pull(d_ys.astype(ys.dtype))  # Flax's may be wider than xs.

    xs = jax.ShapeDtypeStruct((size.window, size.batch, size.hidden), dtype)
    arguments = place((jax.eval_shape(init, xs), xs, xs))
    compiled = estimates.compile_program(jax.jit(gradients).lower(*arguments), target)
    return compiled.seconds(target), memory.needed_by(compiled.program).peak


def examine_step(
    path: str, topology: str, dtype: str, fast: bool
) -> tuple[estimates.Seconds, float]:
    """Seconds and bytes of a whole train step."""
    config = training.load_config(path)
    with config.unlocked():
        config.model.fast = fast
        config.model.dtype = dtype
    report = estimates.examine(config, targets.parse(topology))
    ends = ()
    if report.schedule:
        ends = report.schedule.lower_seconds, report.schedule.upper_seconds
    return estimates.Seconds(report.seconds, *ends), report.needed


def measure(name: str, chip: str, dtype: str, only: str) -> list[tuple[str, ...]]:
    """Rows of one size: those whose kind matches a regular expression."""
    examine: dict[str, Callable[[], tuple[estimates.Seconds, float]]]
    if name in STEPS:
        path, chips = STEPS[name]
        examine = {
            kind: functools.partial(
                examine_step, path, TOPOLOGIES[chip, chips], dtype, kind == "fast"
            )
            for kind in ("plain", "fast")
        }
    else:
        size, target = LAYERS[name], targets.parse(TOPOLOGIES[chip, 1])
        examine = {
            kind: functools.partial(examine_layer, size, jnp.dtype(dtype), *functions, target)
            for kind, functions in contenders(size, jnp.dtype(dtype)).items()
        }
    rows = []
    for kind in filter(re.compile(only).search, examine):
        seconds, needed = examine[kind]()
        times = (f"{1e3 * each:.2f}" if each == each else "" for each in seconds)
        rows.append((f"{chip}, {name}, {dtype}: {kind}", *times, f"{needed / 1e9:.2f}"))
        print(*rows[-1], flush=True)
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default="v5e,h100", help="of v5e and h100")
    parser.add_argument("--sizes", default=",".join([*LAYERS, *STEPS]), help="any of: %(default)s")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--only", default="", help="regular expression on rows, as in 'r = 0'")
    options = parser.parse_args()
    rows = [("", "ms", "at least", "at most", "GB a chip")]
    for chip in options.chips.split(","):
        for name in options.sizes.split(","):
            for dtype in options.dtypes.split(","):
                rows += measure(name, chip, dtype, options.only)
    print(timing.table(rows))


if __name__ == "__main__":
    main()

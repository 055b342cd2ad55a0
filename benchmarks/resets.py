"""`RNN(cell)(xs, resets=...)` beside the scan over Flax's cell that recurrent agents usually have.

    python -m benchmarks.resets
    taskset -c 0 python -m benchmarks.resets --clock=cpu      # one core, on a machine that is busy
    python -m benchmarks.resets --chips=v5e,h100              # estimates, with the extras tpu, cuda

A call computes the outputs and all gradients of a window of T = 128 steps in float32, in which one
step in 32 starts an episode. Before the clock starts, the outputs and gradients of each contender
are compared with those of the first one that has the same parameters. H hidden and input features,
B environments.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import mogrifier_jax
from benchmarks import timing

TIME = 128
EPISODE = 32  # The mean number of steps between two resets.
CELLS: dict[str, tuple[type[nn.RNNCellBase], Callable[[int], nn.RNNCellBase]]] = {
    "GRU": (nn.GRUCell, lambda hidden: mogrifier_jax.GRUCell(hidden)),
    "LSTM": (
        nn.OptimizedLSTMCell,
        lambda hidden: mogrifier_jax.LSTMCell(hidden, cap_input_gate=False),
    ),
}


class ScannedRNN(nn.Module):
    """A scan over a cell of Flax, whose carry is made anew where an episode starts."""

    cell_type: type[nn.RNNCellBase]
    features: int

    @functools.partial(
        nn.scan,
        variable_broadcast="params",
        split_rngs={"params": False},
        in_axes=0,
        out_axes=0,
    )
    @nn.compact
    def __call__(self, carry: Any, step: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        """One step: x [B, H] and resets [B]."""
        x, resets = step
        cell = self.cell_type(self.features, name="cell")  # type: ignore[call-arg]
        fresh = cell.initialize_carry(jax.random.key(0), x.shape)
        carry = jax.tree.map(lambda new, old: jnp.where(resets[:, None], new, old), fresh, carry)
        return cell(carry, x)

    def run(self, xs: jax.Array, resets: jax.Array) -> jax.Array:
        """xs [T, B, H] and resets [T, B] to outputs [T, B, H]."""
        cell = self.cell_type(self.features, parent=None)  # type: ignore[call-arg]
        carry = cell.initialize_carry(jax.random.key(0), xs.shape[1:])
        return self(carry, (xs, resets))[1]


Apply = Callable[[Any, jax.Array, jax.Array], jax.Array]


def contenders(kind: str, hidden: int) -> dict[str, tuple[Apply, Callable]]:
    """For each contender, (params, xs, resets) -> outputs, and (xs, resets) -> params."""
    flax_cell, make_ours = CELLS[kind]
    scanned = ScannedRNN(flax_cell, hidden)

    def run(module: nn.Module) -> tuple[Apply, Callable]:
        def apply(params: Any, xs: jax.Array, resets: jax.Array) -> jax.Array:
            return module.apply(params, xs, resets=resets)

        return apply, lambda xs, resets: module.init(jax.random.key(0), xs, resets=resets)

    name = flax_cell.__name__
    make_flax: Any = flax_cell
    return {
        f"ScannedRNN, nn.{name}": (
            lambda params, xs, resets: scanned.apply(params, xs, resets, method="run"),
            lambda xs, resets: scanned.init(jax.random.key(0), xs, resets, method="run"),
        ),
        f"RNN, nn.{name}": run(mogrifier_jax.RNN(make_flax(hidden), time_major=True)),
        f"RNN, {kind}Cell of ours": run(mogrifier_jax.RNN(make_ours(hidden), time_major=True)),
    }


def compute_gradients(
    apply: Apply, params: Any, xs: jax.Array, resets: jax.Array
) -> tuple[jax.Array, Any]:
    """The outputs, and the gradients of the sum of their sines with respect to params and xs."""

    def loss(params: Any, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        ys = apply(params, xs, resets)
        return jnp.sin(ys).sum(), ys

    gradients, ys = jax.grad(loss, (0, 1), has_aux=True)(params, xs)
    return ys, gradients


def measure(kind: str, hidden: int, batch: int, repeats: int, clock: str) -> dict[str, float]:
    """Median seconds of each contender."""
    data_key, reset_key = jax.random.split(jax.random.key(0))
    xs = jax.random.normal(data_key, (TIME, batch, hidden))
    resets = jax.random.bernoulli(reset_key, 1 / EPISODE, (TIME, batch))
    runs: dict[str, Callable[[], object]] = {}
    results: dict[Any, Any] = {}
    for name, (apply, init) in contenders(kind, hidden).items():
        params = jax.jit(init)(xs[:1], resets[:1])
        compute = jax.jit(functools.partial(compute_gradients, apply))
        # The order of the sums differs, and a gradient of a weight is a sum of B T terms.
        first = results.setdefault(jax.tree.structure(params), compute(params, xs, resets))
        jax.tree.map(_check_close, compute(params, xs, resets), first)
        runs[name] = functools.partial(_wait, compute, params, xs, resets)
    return timing.take_turns(runs, repeats, clock)


def _check_close(found: jax.Array, expected: jax.Array) -> None:
    scale = float(abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=1e-5 * scale, rtol=1e-5)


def _wait(compute: Callable, *arguments: Any) -> object:
    return jax.block_until_ready(compute(*arguments))


def estimate(kind: str, hidden: int, batch: int, chip: str) -> dict[str, float]:
    """Seconds on an accelerator that is not here, by its compiler's costs."""
    from benchmarks import accelerators
    from mogrifier_jax.preflight import costs, targets, times, topologies

    target = targets.parse(accelerators.TOPOLOGIES[chip, 1])
    place = jax.sharding.NamedSharding(
        topologies.make_mesh(target, 1, 1), jax.sharding.PartitionSpec()
    )
    xs = jax.ShapeDtypeStruct((TIME, batch, hidden), jnp.float32)
    resets = jax.ShapeDtypeStruct((TIME, batch), bool)
    seconds = {}
    for name, (apply, init) in contenders(kind, hidden).items():
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
            (jax.eval_shape(init, xs, resets), xs, resets),
        )
        compute = jax.jit(functools.partial(compute_gradients, apply))
        program = compute.lower(*arguments).compile()
        seconds[name] = times.compute_seconds(costs.analyse(program.as_text()), target.chip)
    return seconds


def main() -> None:
    """Prints a table for each cell and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--hidden", default="128,512")
    parser.add_argument("--batch", default="64,1024")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=tuple(timing.CLOCKS), default="wall")
    parser.add_argument("--chips", default="", help="estimate for v5e, h100 instead of measuring")
    options = parser.parse_args()
    sizes = itertools.product(
        options.chips.split(","),
        options.cells.split(","),
        map(int, options.hidden.split(",")),
        map(int, options.batch.split(",")),
    )
    for chip, kind, hidden, batch in sizes:
        if chip:
            seconds = estimate(kind, hidden, batch, chip)
        else:
            seconds = measure(kind, hidden, batch, options.repeats, options.clock)
        first = next(iter(seconds.values()))
        head = (f"{chip or 'here'}: H {hidden}, B {batch}, T {TIME}", "ms", "speed")
        rows = [(name, f"{1e3 * s:.2f}", f"{first / s:.2f}x") for name, s in seconds.items()]
        print(timing.table([head, *rows]), flush=True)


if __name__ == "__main__":
    main()

"""Forward and backward of one layer on this machine, Flax's RNN beside ours, in one table.

    python -m benchmarks.rnn
    taskset -c 0 python -m benchmarks.rnn --clock=cpu    # one core, on a machine that is busy

All have the same number of hidden units, float32 inputs and weights, and XLA's default options:
those of training (`runtime.py`) are made for our backward pass. H hidden, B batch, T window.
"""

import argparse
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

import mogrifier_jax
from benchmarks import timing

SIZES = {"small": (128, 16, 35), "ptb": (912, 64, 70)}  # H, B, T.


def rows(hidden: int) -> dict[str, nn.RNN]:
    """What is compared; the ratios are to the first."""
    mogrifier = mogrifier_jax.MogrifierLSTMCell(hidden, rounds=5, rank=hidden // 12)
    return {
        "nn.RNN, OptimizedLSTMCell": nn.RNN(nn.OptimizedLSTMCell(hidden)),
        "RNN, OptimizedLSTMCell": mogrifier_jax.RNN(nn.OptimizedLSTMCell(hidden)),
        "RNN, LSTMCell of ours": mogrifier_jax.RNN(mogrifier_jax.LSTMCell(hidden)),
        "nn.RNN, GRUCell": nn.RNN(nn.GRUCell(hidden)),
        "RNN, GRUCell": mogrifier_jax.RNN(nn.GRUCell(hidden)),
        "nn.RNN, Mogrifier": nn.RNN(mogrifier),
        "RNN, Mogrifier": mogrifier_jax.RNN(mogrifier),
    }


def make_run(rnn: nn.RNN, hidden: int, batch: int, window: int) -> Callable[[], object]:
    """A function that computes the gradients once."""
    xs = jax.random.normal(jax.random.key(0), (batch, window, hidden))
    variables = jax.jit(rnn.init)(jax.random.key(1), xs)

    def loss(variables, xs):
        return jnp.sin(rnn.apply(variables, xs)).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    return lambda: jax.block_until_ready(gradient(variables, xs))


def main() -> None:
    """Prints a table for each size."""
    parser = argparse.ArgumentParser(description="Flax's RNN beside ours.")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments = parser.parse_args()
    for name in arguments.sizes.split(","):
        hidden, batch, window = SIZES[name]
        runs = {row: make_run(rnn, *SIZES[name]) for row, rnn in rows(hidden).items()}
        seconds = timing.take_turns(runs, arguments.repeats, arguments.clock)
        first = next(iter(seconds.values()))
        head = (f"{name}: H {hidden}, B {batch}, T {window}", "ms", "speed")
        found = [(row, f"{1e3 * s:.1f}", f"{first / s:.2f}x") for row, s in seconds.items()]
        print(timing.table([head, *found]), flush=True)


if __name__ == "__main__":
    main()

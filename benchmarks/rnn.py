"""One layer on this machine, Flax's RNN beside ours: gradients, and the forward pass alone.

    python -m benchmarks.rnn
    taskset -c 0 python -m benchmarks.rnn --clock=cpu    # one core, on a machine that is busy

All layers have the same number of hidden units, and float32 inputs and weights. H hidden, B batch,
T window.
"""

import argparse
import itertools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

import mogrifier_jax
from benchmarks import flax_lstm, timing

SIZES = {"small": (128, 16, 35), "middle": (512, 64, 70), "ptb": (912, 64, 70)}  # H, B, T.


def rows(hidden: int) -> dict[str, nn.Module]:
    """The layers that are compared; speeds are relative to the first."""
    mogrifier = mogrifier_jax.MogrifierLSTMCell(hidden, rounds=5, rank=hidden // 12)
    rewired = mogrifier_jax.RewiredLSTMCell(hidden, rounds=5, rank=hidden // 12)
    return {
        "nn.RNN, OptimizedLSTMCell": nn.RNN(nn.OptimizedLSTMCell(hidden)),
        "nnx.RNN, OptimizedLSTMCell": NnxRNN(hidden),
        "RNN, OptimizedLSTMCell": mogrifier_jax.RNN(nn.OptimizedLSTMCell(hidden)),
        "RNN, LSTMCell of ours": mogrifier_jax.RNN(mogrifier_jax.LSTMCell(hidden)),
        "nn.RNN, GRUCell": nn.RNN(nn.GRUCell(hidden)),
        "RNN, GRUCell": mogrifier_jax.RNN(nn.GRUCell(hidden)),
        "nn.RNN, Mogrifier": nn.RNN(mogrifier),
        "RNN, Mogrifier": mogrifier_jax.RNN(mogrifier),
        "nn.RNN, Mogrifier RLSTM": nn.RNN(rewired),
        "RNN, Mogrifier RLSTM": mogrifier_jax.RNN(rewired),
    }


class NnxRNN(nn.Module):
    """`nnx.RNN` as a linen module, like the others."""

    hidden: int

    @nn.compact
    def __call__(self, xs: jax.Array) -> jax.Array:
        """[B, T, H] to [B, T, H]."""
        stack = flax_lstm.Stack(1, self.hidden, "nnx", name="stack")
        ys = stack(stack.initial_carry(len(xs)), jnp.swapaxes(xs, 0, 1))[1]
        return jnp.swapaxes(ys, 0, 1)


def make_run(rnn: nn.Module, what: str, hidden: int, batch: int, window: int) -> Callable:
    """Returns a function that computes the gradients or the outputs once."""
    compute, arguments = make_compute(rnn, what, hidden, batch, window)
    return lambda: jax.block_until_ready(compute(*arguments))


def make_compute(
    rnn: nn.Module, what: str, hidden: int, batch: int, window: int
) -> tuple[jax.stages.Wrapped, tuple]:
    """Returns the jitted gradients or outputs, and their arguments."""
    xs = jax.random.normal(jax.random.key(0), (batch, window, hidden))
    variables = jax.jit(rnn.init)(jax.random.key(1), xs)

    def loss(variables, xs):
        return jnp.sin(rnn.apply(variables, xs)).sum()

    compute = jax.jit(jax.grad(loss, (0, 1)) if what == "gradient" else rnn.apply)
    return compute, (variables, xs)


def main() -> None:
    """Prints a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--what", default="gradient,forward")
    arguments = parser.parse_args()
    for name, what in itertools.product(arguments.sizes.split(","), arguments.what.split(",")):
        hidden, batch, window = SIZES[name]
        runs = {row: make_run(rnn, what, *SIZES[name]) for row, rnn in rows(hidden).items()}
        seconds = timing.take_turns(runs, arguments.repeats, arguments.clock)
        first = next(iter(seconds.values()))
        head = (f"{name}: H {hidden}, B {batch}, T {window}, {what}", "ms", "speed")
        lines = [(row, f"{1e3 * s:.1f}", f"{first / s:.2f}x") for row, s in seconds.items()]
        print(timing.table([head, *lines]), flush=True)


if __name__ == "__main__":
    main()

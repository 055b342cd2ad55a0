"""Tokens per second of the fast recurrence, the plain one, Flax's and PyTorch, in one table.

    python -m benchmarks.recurrence --sizes=small,ptb --repeats=9

For 0 rounds Flax's `RNN` with its `OptimizedLSTMCell` runs too, of `flax.linen` and of `flax.nnx`,
in a model with our embedding, softmax and optimizer.

A train step is forward, loss, backward, gradient clip and Adam, of a model with two layers
and a tied softmax, without dropout. The same computation stands on all sides: uncapped input
gates, the output of the last layer, a first moment in Adam. As in training, ours takes several
steps in one dispatch.
`--only=recurrence` times the layers' forward and backward pass alone. The share of peak is what
the model's matmuls would take at the machine's float32 matmul peak, measured in the same run,
over what the step takes.

PyTorch's threads wait for each other at every operation, so that on a busy machine its wall
time says little. There, compare one core's CPU time:

    taskset -c 0 python -m benchmarks.recurrence --clock=cpu
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import flax_lstm, timing
from mogrifier_jax.data import streams
from mogrifier_jax.nn import models, stack
from mogrifier_jax.preflight import flops
from mogrifier_jax.training import averaging, optimizers, steps

try:
    import torch

    from benchmarks import pytorch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit("benchmarks.recurrence needs PyTorch: pip install 'mogrifier-jax[bench]'")

NUM_STEPS = 4  # In one dispatch; a real run has 20 to 100.
LEARNING_RATE = 1e-4
CLIP_NORM = 10.0
BUSY = 0.5  # Load per core above which wall times are doubtful.
PEAK_SIZE = 2048  # Matrices of this side are large enough to reach the peak.


class Size(NamedTuple):
    """What is measured: H hidden, B batch, T window, r rounds, k rank, V vocabulary."""

    hidden: int
    batch: int
    window: int
    rounds: int
    rank: int
    vocab: int
    num_layers: int = 2


SIZES = {
    "ptb": Size(hidden=912, batch=64, window=70, rounds=5, rank=84, vocab=10_001),
    "ptb_lstm": Size(hidden=912, batch=64, window=70, rounds=0, rank=0, vocab=10_001),
    "small": Size(hidden=128, batch=16, window=35, rounds=5, rank=20, vocab=1_000),
    "small_lstm": Size(hidden=128, batch=16, window=35, rounds=0, rank=0, vocab=1_000),
}


FLAX = {"Flax nn.RNN": "linen", "Flax nnx.RNN": "nnx"}


def make_model(size: Size, contender: str) -> models.LanguageModel:
    """A model of this size: "fast" or "plain nn.scan" with our layers, or one of Flax's."""
    sizes: Any = dict(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        embedding_size=size.hidden,
        num_layers=size.num_layers,
        tied_embeddings=True,
        output="last",
    )
    if contender in FLAX:
        return flax_lstm.LanguageModel(**sizes, api=FLAX[contender])
    return models.LanguageModel(
        **sizes,
        cell_options=dict(rounds=size.rounds, rank=size.rank, cap_input_gate=False),
        fast=contender == "fast",
    )


def make_batch(size: Size) -> streams.Window:
    """Random tokens."""
    tokens = jax.random.randint(jax.random.key(0), (size.batch, size.window + 1), 0, size.vocab)
    return streams.Window(tokens[:, :-1], tokens[:, 1:])


def jax_step(size: Size, contender: str) -> Callable[[], object]:
    """Our train steps, whole; the state moves on from call to call."""
    program = steps.Program(
        model=make_model(size, contender),
        optimizer=optimizers.make_optimizer("adam", b1=0.9, clip_norm=CLIP_NORM),
        average=averaging.make_averaging("none"),
        batch_at=lambda stream, step: stream,
    )
    take = functools.partial(steps.train_steps, program=program, num_steps=NUM_STEPS)
    take = jax.jit(take, donate_argnums=0)
    init = functools.partial(steps.init_state, program=program, batch_size=size.batch)
    state = jax.jit(init)(jax.random.key(0))
    hyper = steps.Hyperparameters(learning_rate=LEARNING_RATE, l2_penalty=0.0)
    batch = make_batch(size)

    def run():
        nonlocal state
        state, metrics = take(state, batch, hyper)
        return jax.block_until_ready(metrics)

    return run


def jax_recurrence(size: Size, contender: str) -> Callable[[], object]:
    """Gradients of the layers alone."""
    model = make_model(size, contender)
    carry = model.zero_carry(size.batch)
    module: Any
    if contender in FLAX:
        module = flax_lstm.Stack(size.num_layers, size.hidden, FLAX[contender])
    else:
        options: Any = dict(cell_options=model.cell_options, output="last", fast=model.fast)
        module = stack.Stack(size.num_layers, size.hidden, **options)
    xs = jax.random.normal(jax.random.key(1), (size.window, size.batch, size.hidden))
    params = jax.jit(module.init)(jax.random.key(0), carry, xs)["params"]

    def loss(params, xs):
        return jnp.square(module.apply({"params": params}, carry, xs)[1]).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    return lambda: jax.block_until_ready(gradient(params, xs))


def torch_step(size: Size) -> Callable[[], object]:
    """Train steps in PyTorch, whole."""
    layers = pytorch.make_layers(size.num_layers, size.hidden, size.rounds, size.rank)
    model = pytorch.LanguageModel(size.vocab, size.hidden, layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    tokens = torch.randint(size.vocab, (size.window + 1, size.batch))

    def run():
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model(tokens[:-1], tokens[1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
        return loss.item()

    return run


def torch_recurrence(size: Size) -> Callable[[], object]:
    """Gradients of the stack alone in PyTorch."""
    stack = torch.nn.Sequential(
        *pytorch.make_layers(size.num_layers, size.hidden, size.rounds, size.rank)
    )
    xs = torch.randn(size.window, size.batch, size.hidden, requires_grad=True)
    inputs = [xs, *stack.parameters()]
    return lambda: torch.autograd.grad(stack(xs).square().sum(), inputs)


def train_flops(size: Size, only: str) -> int:
    """Matmul FLOPs of a step: forward once, and twice that on the way back."""
    model = make_model(size, "fast")
    batch = make_batch(size)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch.inputs))
    nats = functools.partial(model.apply, method="nats")
    whole = flops.count_flops(jax.make_jaxpr(nats)(params, batch.inputs, batch.targets))
    if only == "recurrence":
        whole -= 2 * size.hidden * size.vocab * size.batch * size.window
    return 3 * whole


def peak_contenders() -> dict[str, Callable[[], object]]:
    """A large square matmul in both libraries."""
    a = torch.randn(PEAK_SIZE, PEAK_SIZE)
    b = jnp.asarray(a.numpy())
    multiply = jax.jit(jnp.matmul)
    return {
        "torch matmul": lambda: a @ a,
        "jax matmul": lambda: jax.block_until_ready(multiply(b, b)),
    }


def measure(name: str, size: Size, repeats: int, only: str, clock: str) -> list[tuple[str, ...]]:
    """Rows of the table for one size."""
    make_jax, make_torch = {
        "step": (jax_step, torch_step),
        "recurrence": (jax_recurrence, torch_recurrence),
    }[only]
    rival = "torch.nn.LSTM" if size.rounds == 0 else "torch LSTMCell loop"
    names = [*(() if size.rounds else FLAX), "plain nn.scan", "fast"]
    seconds = timing.take_turns(
        {
            rival: make_torch(size),
            **{contender: make_jax(size, contender) for contender in names},
            **peak_contenders(),
        },
        repeats,
        clock,
    )
    matmuls = [seconds.pop(key) for key in peak_contenders()]
    peak = 2 * PEAK_SIZE**3 / min(matmuls)
    if only == "step":
        seconds = {contender: value / NUM_STEPS for contender, value in seconds.items()}
    work = train_flops(size, only)
    rows = []
    for contender, value in seconds.items():
        rows.append(
            (
                f"{name}: {contender}",
                f"{size.batch * size.window / value:,.0f}",
                f"{1e3 * value:,.1f}",
                f"{seconds[rival] / value:.2f}x",
                f"{seconds['plain nn.scan'] / value:.2f}x",
                f"{work / value / peak:.2f}",
            )
        )
    giga = [2 * PEAK_SIZE**3 / value / 1e9 for value in matmuls]
    print(f"{name}: matmul peak {giga[0]:.0f} GFLOP/s in torch, {giga[1]:.0f} in jax", flush=True)
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="any of: %(default)s")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=("step", "recurrence"), default="step")
    parser.add_argument("--clock", choices=tuple(timing.CLOCKS), default="wall")
    options = parser.parse_args()
    if options.clock == "wall" and os.getloadavg()[0] > BUSY * os.cpu_count():
        print(f"The machine is busy (load {os.getloadavg()[0]:.1f}): see --clock in the docstring.")
    names = options.sizes.split(",")
    unknown = [name for name in names if name not in SIZES]
    if unknown or options.repeats < 1:
        parser.error(f"unknown sizes {unknown}; choose from {', '.join(SIZES)}; repeats >= 1")
    rows = [("", "tokens/s", "ms", "vs torch", "vs plain", "share of peak")]
    for name in names:
        rows += measure(name, SIZES[name], options.repeats, options.only, options.clock)
    print(timing.table(rows))


if __name__ == "__main__":
    main()

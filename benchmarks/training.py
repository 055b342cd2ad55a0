"""What the training loop costs beside its arithmetic, on a real experiment.

    python -m benchmarks.training --config=experiments/pydoc.py

Three contenders take turns in one run: the bare step (loss, gradient, clipping and Adam on one
batch that is already there), the loop's own dispatch (windows cut on the device, state resets,
averaging, metrics read by the host), and the input side of that dispatch alone. The loop should
reach 0.9 of the bare step's speed, and feeding should cost less than 1 % of a step. On a busy
machine use `--clock=cpu`.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from mogrifier_jax.configs import load_config
from mogrifier_jax.data import streams
from mogrifier_jax.training import averaging, runs, steps


def make_contenders(run: runs.Run, num_steps: int) -> dict:
    fresh = jax.jit(run.init_state)
    stream, batch_size = run.task.stream, run.batch_size
    batch = jax.jit(run.task.batch_at)(stream, jnp.int32(1))
    bare_program = run.program._replace(
        batch_at=lambda batch, step: batch, average=averaging.make_averaging("none")
    )
    bare_hyper = run.hyper._replace(drop_state_probability=0.0)

    def stepper(program, source, hyper, state):
        run_steps = jax.jit(
            functools.partial(steps.train_steps, program=program, num_steps=num_steps),
            donate_argnums=0,
        )
        held = [state]

        def go():
            held[0], metrics = run_steps(held[0], source, hyper)
            return np.asarray(metrics["loss_nats"])

        return go

    @jax.jit
    def feed(stream, key):
        def body(total, index):
            batch = run.task.batch_at(stream, index)
            kept = streams.keep_state(key, index, batch_size, 0.01)
            # Every token has to be there, or the compiler would leave its lookup out.
            return total + batch.inputs.sum() + batch.targets.sum() + kept.sum(), None

        return jax.lax.scan(body, jnp.int32(0), 1000 + jnp.arange(num_steps))[0]

    state = fresh()
    return {
        "bare step": stepper(bare_program, batch, bare_hyper, state.replace(average=())),
        "training loop": stepper(run.program, stream, run.hyper, fresh()),
        "feeding alone": lambda: feed(stream, jax.random.key(0)).block_until_ready(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="experiments/pydoc.py")
    parser.add_argument("--num-steps", type=int, default=20, help="steps in one dispatch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", default="wall", choices=timing.CLOCKS)
    args = parser.parse_args()
    run = runs.make_run(load_config(args.config))
    contenders = make_contenders(run, args.num_steps)
    seconds = timing.take_turns(contenders, args.repeats, args.clock)
    tokens = run.batch_size * run.config.data.window * args.num_steps
    bare, loop = seconds["bare step"], seconds["training loop"]
    rows = [("", "ms per step", "tokens/s", "speed vs bare", "share of loop")]
    for name, value in seconds.items():
        rows.append(
            (
                name,
                f"{1e3 * value / args.num_steps:.3f}",
                f"{tokens / value:,.0f}",
                f"{bare / value:.2f}x",
                f"{value / loop:.2%}",
            )
        )
    print(timing.table(rows))


if __name__ == "__main__":
    main()

"""What the input side of a training step costs: windows cut inside a compiled loop.

    python -m benchmarks.feeding --batch-size=32 --window=64 --step-ms=20

Times `data.train_window` with the random state resets, many steps in one dispatch as in
training, for a corpus in memory. Given the milliseconds of a whole training step it prints the
share; below 1 % feeding is never the limit. On a busy machine use `--clock=cpu`.
"""

import argparse

import jax
import jax.numpy as jnp

from benchmarks import timing
from mogrifier_jax import corpora, data


def make_feeder(corpus: corpora.Corpus, batch_size: int, window: int, num_steps: int):
    """A function that cuts `num_steps` windows and returns when they are there."""
    key = jax.random.key(0)
    stream = data.make_train_stream(corpus.train, batch_size, key, corpus.vocabulary.eos_id)

    @jax.jit
    def feed(stream, first):
        def body(total, index):
            batch = data.train_window(stream, index, window=window)
            kept = data.keep_state(stream.key, index, batch_size, 0.01)
            # Every token has to be there, or the compiler would leave its lookup out.
            return total + batch.inputs.sum() + batch.targets.sum() + kept.sum(), None

        return jax.lax.scan(body, jnp.int32(0), first + jnp.arange(num_steps))[0]

    return lambda: feed(stream, 1000).block_until_ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", default="pydoc", choices=corpora.NAMES)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--step-ms", type=float, help="a whole training step, to compare with")
    parser.add_argument("--num-steps", type=int, default=1000, help="windows in one dispatch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=timing.CLOCKS)
    args = parser.parse_args()
    corpus = corpora.load_corpus(args.corpus)
    feed = make_feeder(corpus, args.batch_size, args.window, args.num_steps)
    seconds = timing.take_turns({"feed": feed}, args.repeats, args.clock)["feed"] / args.num_steps
    tokens = args.batch_size * args.window
    print(f"{args.corpus}: {seconds * 1e6:.1f} us a window of {args.batch_size} x {args.window}")
    print(f"{tokens / seconds / 1e6:.1f} million tokens a second")
    if args.step_ms:
        print(f"{seconds * 1e3 / args.step_ms:.3%} of a step of {args.step_ms} ms")


if __name__ == "__main__":
    main()

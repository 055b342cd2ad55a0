r"""Eight trials in one program against eight one after the other, in one process.

    python -m benchmarks.stacked --config=experiments/pydoc.py:tiny --trials=8

Both are whole runs as tuning makes them: training, evaluations, checkpoints, scores of the best
weights. Programs are compiled before the clock starts, once for each way.
"""

import argparse
import contextlib
import pathlib
import tempfile
import time
from typing import Any

import jax
from ml_collections import config_dict

from mogrifier_jax import configs
from mogrifier_jax.training import programs, runs, train


def make_configs(config: config_dict.ConfigDict, count: int) -> list[config_dict.ConfigDict]:
    """The same but for learning rates and dropout."""
    made = []
    for i in range(count):
        tried = config.copy_and_resolve_references()
        tried.optimizer.learning_rate = config.optimizer.learning_rate / (1 + i / count)
        tried.dropout.input = 0.1 + 0.5 * i / count
        made.append(tried.lock())
    return made


def run_sequentially(made: list[runs.Run], compiled: programs.Alone, folder: pathlib.Path):
    return [run_together([run], compiled, folder / str(i))[0] for i, run in enumerate(made)]


def run_together(made: list[runs.Run], compiled: Any, folder: pathlib.Path):
    with contextlib.ExitStack() as stack:
        books = [
            stack.enter_context(train.open_book(run, str(folder / str(i)), lambda *_: None))
            for i, run in enumerate(made)
        ]
        return train.train(books, compiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="experiments/pydoc.py:tiny")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps_per_turn", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is timed")
    args = parser.parse_args()
    base = configs.load_config(args.config)
    with base.unlocked():
        base.schedule.turns, base.schedule.steps_per_turn = args.turns, args.steps_per_turn
    tried = make_configs(base, args.trials)
    mesh = programs.make_mesh(args.trials)
    alone = programs.home(mesh)
    here, there = runs.make_task(base, alone), runs.make_task(base, mesh)
    single = [runs.make_run(config, alone, here) for config in tried]
    made = [runs.make_run(config, alone, there) for config in tried]
    ways = {
        "sequential": (run_sequentially, single, programs.Alone(single[0])),
        "stacked": (run_together, made, programs.Together(made[0], args.trials, mesh)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for turn in range(args.rounds + 1):  # The first compiles.
        for name, (way, trials, compiled) in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                found[name] = way(trials, compiled, pathlib.Path(folder))
                if turn:
                    seconds[name].append(time.perf_counter() - started)
    for name, times in seconds.items():
        print(f"{name:12} {min(times):6.2f} s at best, of {[round(t, 2) for t in times]}")
    ratio = min(seconds["sequential"]) / min(seconds["stacked"])
    apart = max(
        abs(a["valid_nats"] - b["valid_nats"]) for a, b in zip(*found.values(), strict=True)
    )
    print(
        f"{args.trials} trials on {jax.device_count()} {jax.devices()[0].device_kind}: stacked is "
        f"{ratio:.2f}x as fast; validation nats differ by {apart:.1e} at most"
    )


if __name__ == "__main__":
    main()

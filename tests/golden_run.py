"""Tiny whole runs through the real training, whose numbers are kept in `data/golden_run.json`.

    python -m tests.golden_run

records them anew. That is right only if CHANGELOG.md names the change that moves them.
"""

import contextlib
import json
import os
import pathlib
import tempfile
from unittest import mock

from tests import conftest as conftest  # Before jax starts.

# isort: split

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import text as experiment
from mogrifier_jax import partitioning
from mogrifier_jax.training import train

PATH = pathlib.Path(__file__).parent / "data" / "golden_run.json"
# By name: dtype of the matmuls, and the (data, model) mesh.
CASES = {
    "float32": ("float32", (1, 1)),
    "float32 2x2": ("float32", (2, 2)),
    "bfloat16": ("bfloat16", (1, 1)),
    "bfloat16 2x2": ("bfloat16", (2, 2)),
}
# Everything random is on, and averaging starts after the first of two turns of two dispatches.
CHANGES = {
    "seed": 2,
    "log_every": 2,
    "data.fractions": (0.7, 0.15, 0.15),
    "data.batch_size": 8,
    "data.window": 6,
    "data.drop_state_probability": 0.3,
    "model.num_layers": 2,
    "model.hidden_size": 12,
    "model.embedding_ratio": 0.5,
    "model.rounds": 3,
    "model.rank": 2,
    "dropout.input": 0.1,
    "dropout.inter_layer": 0.2,
    "dropout.state": 0.3,
    "dropout.output": 0.15,
    "dropout.downprojected": 0.25,
    "optimizer.learning_rate": 0.4,
    "optimizer.eps": 0.1,  # Steps follow gradients, not the signs of those that are mere rounding.
    "optimizer.accumulate": 2,
    "averaging.trigger_at_the_latest": 1,
    "evaluation.temperature_tokens": 96,
    "evaluation.lines_per_stripe": 5,
    "evaluation.train_windows": 2,
}


def make_text(num_lines=120):
    """Lines of words drawn by a formula; the same everywhere."""
    words = "the mogrifier gates x with h and then gates h with what became of x".split()
    state, lines = 1, []
    for _ in range(num_lines):
        line = []
        for _ in range(4):
            state = (1103515245 * state + 12345) % 2**31
            line.append(words[(state >> 16) % len(words)])
        lines.append(" ".join(line) + "\n")
    return "".join(lines)


def make_config(**changes):
    """The config of the runs, which read corpus.txt in the current folder."""
    config = experiment.get_config("tiny")
    config.data.path = "corpus.txt"
    config.update_from_flattened_dict(CHANGES | changes)
    return config


@contextlib.contextmanager
def inside(folder, data=1, model=1):
    """The current folder has corpus.txt and the cache, and meshes are of the first devices."""
    folder = pathlib.Path(folder)
    (folder / "corpus.txt").write_text(make_text())
    mesh = partitioning.make_mesh(data, model, devices=jax.devices()[: data * model])
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, MOGRIFIER_CACHE_DIR=str(folder / "cache")),
        mock.patch.object(partitioning, "make_mesh", lambda *sizes, **named: mesh),
    ):
        yield folder


def run(folder, name, **changes):
    """Trains a case in a folder; returns what `data/golden_run.json` keeps of it."""
    dtype, sizes = CASES[name]
    with inside(folder, *sizes) as folder:
        config = make_config(**{"model.dtype": dtype, **changes})
        train.train_and_evaluate(config, "run")
        last = max(int(path.name) for path in pathlib.Path("run/checkpoints").glob("[0-9]*"))
        return {
            "metrics": read_metrics(folder / "run"),
            "weights": summarise(read_arrays(folder / "run" / "checkpoints" / str(last))),
        }


def read_metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def read_arrays(checkpoint):
    """The weights and their averages, by their names in the checkpoint."""
    description = json.loads((checkpoint / "info" / "info.json").read_text())
    names = description["content"]["leaves"]
    kept = {name: 0 for name in names if name.startswith(("params.", "average."))}
    restore = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in kept}
    return ocp.PyTreeCheckpointHandler().restore(
        checkpoint / "state",
        args=ocp.args.PyTreeRestore(item=kept, restore_args=restore, partial_restore=True),
    )


def summarise(arrays):
    """For each array its sum, a sum that depends on the order, and the root of its squares' sum."""
    found = {}
    for name, array in sorted(arrays.items()):
        flat = np.asarray(array, np.float64).ravel()
        order = np.cos(np.arange(flat.size))
        found[name] = [flat.sum(), flat @ order, np.sqrt(flat @ flat)]
    return found


def differences(found, expected):
    """The relative difference of every number, by its name; infinite where there is none."""
    worst = {}
    for kind in ("train", "eval"):
        pairs = [[r for r in runs["metrics"] if r["kind"] == kind] for runs in (found, expected)]
        assert [r["step"] for r in pairs[0]] == [r["step"] for r in pairs[1]]
        for ours, theirs in zip(*pairs, strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                name = f"{kind} {theirs['step']} {key}"
                if isinstance(value, float):
                    worst[name] = abs(ours[key] - value) / abs(value)
                else:
                    worst[name] = 0.0 if ours[key] == value else np.inf
    assert found["weights"].keys() == expected["weights"].keys()
    for name, theirs in expected["weights"].items():
        # Sums may cancel, and small biases are sums of much larger terms: the scale is the norm
        # of the array, or that of an ordinary one.
        gaps = np.abs(np.subtract(found["weights"][name], theirs))
        worst[name] = float(gaps.max() / max(theirs[-1], 1.0))
    return worst


def record():
    """Writes the numbers of all cases."""
    numbers = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            numbers[name] = run(folder, name)
    PATH.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    record()

"""What a run says of itself: a table before the first step, and one at the end."""

import os
from typing import Any

import jax

from mogrifier_jax.nn import models
from mogrifier_jax.training import metrics, progress


def describe_run(run: Any, workdir: str) -> str:
    """Sizes, parameters, memory, mesh and data of a `runs.Run`."""
    model, rules, state = run.model, run.rules, run.abstract_state()
    parts = models.count_parameters(model)
    options = dict(model.cell_options)
    arrays = (state.params, state.opt_state, state.average, state.carry)
    sections = {
        "model": [
            ("cell", model.cell),
            ("layers x hidden", f"{model.num_layers} x {model.hidden_size}"),
            ("embedding", model.embedding_size),
            ("rounds, rank", f"{options.get('rounds', 0)}, {options.get('rank', 0)}"),
            ("parameters", sum(parts.values())),
            *((f"  {name}", count) for name, count in parts.items()),
        ],
        "data": [
            *run.task.summary,
            ("batch x window", f"{run.batch_size} x {run.config.data.window}"),
        ],
        "run": [
            ("steps", f"{rules.turns} turns x {rules.steps_per_turn}"),
            ("memory of the weights", mebibytes(state.params)),
            ("memory of the state", mebibytes(arrays)),
            ("mesh", ", ".join(f"{name} {size}" for name, size in run.mesh.shape.items())),
            ("devices", describe_devices(run.mesh.size)),
            ("workdir", workdir),
        ],
    }
    return progress.table(sections)


def describe_devices(used: int) -> str:
    """How many there are of which kind, and why not all are used, if so."""
    count, kind = jax.device_count(), jax.devices()[0].device_kind
    return f"{count} {kind}" if used == count else f"{used} of {count} {kind}, to divide the batch"


def describe_results(results: dict[str, Any], unit: str, workdir: str) -> str:
    """The scores of the best weights, and where everything is."""
    files = {
        "weights": "checkpoints",
        "scores": "results.json",
        "metrics": "metrics.jsonl",
        "TensorBoard": "tensorboard",
        "picture": "learning_curve.png",
    }
    paths = [(label, os.path.join(workdir, name)) for label, name in files.items()]
    sections = {
        "result": [
            ("best turn", f"{results['best_turn']}, step {results['step']:,}"),
            ("temperature", f"{results['temperature']:.2f}"),
            *(
                (split, f"{nats:.4f} nats, {metrics.show(nats, unit)}")
                for split in ("valid", "test")
                for nats in (results[f"{split}_nats"],)
            ),
        ],
        "saved": [(label, path) for label, path in paths if os.path.exists(path)],
    }
    return progress.table(sections)


def mebibytes(tree: Any) -> str:
    """How much memory the arrays take, all copies on all devices counted once."""
    return (
        f"{sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 2**20:,.1f} MiB"
    )

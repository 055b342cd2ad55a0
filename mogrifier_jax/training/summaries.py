"""The tables that a run logs: its sizes and data before it starts, and its results at the end."""

import os
from collections.abc import Mapping, Sequence

import jax
from jaxtyping import PyTree

from mogrifier_jax import files
from mogrifier_jax.nn import models
from mogrifier_jax.training import runs, units


def table(sections: Mapping[str, Sequence[tuple[str, object]]]) -> str:
    """Sections of (label, value) rows, aligned, as text."""
    rows = [(label, _show(value)) for section in sections.values() for label, value in section]
    labels = max((len(label) for label, _ in rows), default=0)
    width = labels + 2 + max((len(value) for _, value in rows), default=0)
    lines = []
    for title, section in sections.items():
        lines.append(f"── {title} ".ljust(width + 2, "─"))
        lines += [f"  {label.ljust(labels)}  {_show(value)}" for label, value in section]
    return "\n".join([*lines, "─" * (width + 2)])


def _show(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def describe_run(run: runs.Run, workdir: str) -> str:
    """The table at the start: sizes, parameters, data, memory and mesh."""
    model, rules, state = run.model, run.rules, run.abstract_state()
    parts = models.count_parameters(model)
    options = dict(model.cell_options)
    arrays = (state.params, state.opt_state, state.average, state.carry)
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    if run.mesh.size < jax.device_count():
        devices = f"{run.mesh.size} of {devices}, to divide the batch"
    sections: dict[str, list[tuple[str, object]]] = {
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
            ("devices", devices),
            ("workdir", workdir),
        ],
    }
    return table(sections)


def describe_results(results: files.JsonObject, unit: str, workdir: str) -> str:
    """The table at the end: the scores of the best weights, and the paths of all files."""
    files = {
        "weights": "checkpoints",
        "scores": "results.json",
        "metrics": "metrics.jsonl",
        "TensorBoard": "tensorboard",
        "picture": "learning_curve.png",
        "log": "run.log",
    }
    paths = [(label, os.path.join(workdir, name)) for label, name in files.items()]
    nats = {split: results[f"{split}_nats"] for split in ("valid", "test")}
    sections: dict[str, list[tuple[str, object]]] = {
        "result": [
            ("best turn", f"{results['best_turn']}, step {results['step']:,}"),
            ("temperature", f"{results['temperature']:.2f}"),
            *((k, f"{v:.4f} nats, {units.show(v, unit)}") for k, v in nats.items()),
        ],
        "saved": [(label, path) for label, path in paths if os.path.exists(path)],
    }
    return table(sections)


def mebibytes(tree: PyTree) -> str:
    """The memory that the arrays take, counting replicated ones once."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return f"{size / 2**20:,.1f} MiB"

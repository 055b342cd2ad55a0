"""The workdir of a run that was stopped after two of three turns, kept in `data/workdir_v1`.

Every later version must read, evaluate and go on with it, to the numbers in
`data/workdir_v1_expected.json`. Both were made by

    python -m tests.old_workdir

before the package had rooms. Do not make them anew: a new format gets a workdir beside this one.
"""

import json
import pathlib
import shutil
import signal
import tempfile
from unittest import mock

from tests import golden_run  # Before jax starts.

# isort: split

import numpy as np

import mogrifier_jax
from mogrifier_jax import errors
from mogrifier_jax.evaluation import eval_options, evaluate_command
from mogrifier_jax.training import metrics, train

WORKDIR = pathlib.Path(__file__).parent / "data" / "workdir_v1"
EXPECTED = WORKDIR.with_name("workdir_v1_expected.json")
TEXT = "the gates gate x\nand then what became of h\nwith the mogrifier x and h" * 2
OPTIONS = {
    "methods": "deterministic,mc,dyneval",
    "splits": "valid",
    "temperature": "saved",
    "samples": 3,
    "dyneval.window": 5,
    "dyneval.learning_rates": "1e-2",  # At this rate rounding decides the score.
    "dyneval.batch_size": 8,
    "dyneval.max_windows": 4,
}


def make_config():
    """The config that the run was started with, as an experiment of today makes it."""
    return golden_run.make_config(**{"schedule.turns": 3})


def make(folder):
    """Trains until the second turn is evaluated."""
    write = metrics.MetricWriter.write

    def write_and_stop(self, step, kind, **values):
        write(self, step, kind, **values)
        if (step, kind) == (8, "eval"):
            signal.raise_signal(signal.SIGTERM)

    with (
        golden_run.inside(folder) as folder,
        mock.patch.object(metrics.MetricWriter, "write", write_and_stop),
    ):
        try:
            train.train_and_evaluate(make_config(), "workdir_v1")
        except errors.Interrupted:
            pass
    made = folder / "workdir_v1"
    # Where it was made, and the checkpoint before the last, are of no use.
    for path in (*made.glob("**/commit_success.txt"), made / "checkpoints" / "lock"):
        path.unlink()
    for name in ("checkpoints/4", "tensorboard"):
        shutil.rmtree(made / name)
    (made / "speed.jsonl").unlink()
    shutil.copytree(made, WORKDIR)


def use(workdir):
    """What the Python interface says of the weights."""
    model = mogrifier_jax.load(workdir)
    draw = dict(prompt="the ", length=40)
    layers = model.gates(TEXT[:20]).layers
    return {
        "nats": model.score(TEXT).nats.tolist(),
        "greedy": model.generate(**draw, top_k=1),
        "drawn": model.generate(**draw, temperature=0.8, num_samples=2, seed=3),
        "gates": [{name: _flatten(gates) for name, gates in layer.items()} for layer in layers],
    }


def _flatten(gates):
    """A gate [N, H], or a list of them, as a mean for each token."""
    each = gates if isinstance(gates, list | tuple) else [gates]
    return np.concatenate([np.asarray(gate, np.float64).mean(1) for gate in each]).tolist()


def evaluate(workdir, **changes):
    """Nats on validation data by each method of `--mode=evaluate`."""
    chosen = eval_options.defaults()
    chosen.update_from_flattened_dict(OPTIONS | changes)
    (evaluation,) = evaluate_command.evaluate_workdirs([str(workdir)], chosen)
    return {row["method"]: row["nats"] for row in evaluation["results"]}


def evaluate_at_a_lower_rate(workdir):
    """The same, at a rate at which dynamic evaluation gives one score on every machine."""
    return evaluate(workdir, **{"dyneval.learning_rates": "1e-3"})


def resume(workdir):
    """The metrics of the whole run, the last turn of which is trained here; its results."""
    results = train.train_and_evaluate(make_config(), str(workdir))
    return {"metrics": golden_run.read_metrics(workdir), "results": results}


def record():
    """Writes the numbers of all that is done with the workdir."""
    numbers = {}
    for function in (use, evaluate, evaluate_at_a_lower_rate, resume):
        with tempfile.TemporaryDirectory() as folder, golden_run.inside(folder) as folder:
            numbers[function.__name__] = function(shutil.copytree(WORKDIR, folder / "run"))
    EXPECTED.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(folder)
    record()

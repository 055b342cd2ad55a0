"""evaluation.json, which collects all scores of a run in its workdir.

Results of several commands are kept together as long as they are scores of the same checkpoint.
"""

import math
import pathlib

from mogrifier_jax import errors, files
from mogrifier_jax.evaluation import eval_options, methods, paper_tables
from mogrifier_jax.nn import models
from mogrifier_jax.training import atomic_files, summaries, units, workdirs

FILE = "evaluation.json"
SCHEMA = {
    **dict.fromkeys(("workdir", "which"), str),
    "step": files.COUNT,
    "unit": tuple(units.UNITS),
    "finished": bool,
    "run": {"corpus": str, "model": str, "params": str},
    "results": [
        {
            "method": str,
            "text": str,
            "nats": (files.Number(float), None),
            "tokens": files.COUNT,
            "last_finite_nats?": float,
            "source?": str,
        }
    ],
}
# Keys of a result that `format_table` does not list among its options.
_NOT_OPTIONS = ("method", "text", "nats", "tokens", "seconds", "file", "perplexity", "bits")


def start_evaluation(scorer: methods.Scorer) -> files.JsonObject:
    """The content of evaluation.json, with the earlier results of the same checkpoint."""
    info = scorer.loaded.info
    num_params = sum(models.count_parameters(scorer.model).values())
    evaluation = {
        **{key: info[key] for key in ("workdir", "which", "step", "total_steps", "finished")},
        "unit": scorer.task.score_unit,
        "run": paper_tables.name_run(scorer.loaded.config, num_params),
        "num_params": num_params,
        "versions": workdirs.versions(),
        "results": [],
    }
    _copy_earlier_results(scorer.folder, evaluation)
    return evaluation


def add_result(folder: str, evaluation: files.JsonObject, result: files.JsonObject) -> None:
    """Adds a result to the file, to which other processes may add theirs at the same time."""
    with atomic_files.locked(folder):
        _copy_earlier_results(folder, evaluation)
        same = ("method", "text", "source")  # An earlier result with these values is replaced.
        evaluation["results"] = [
            *(r for r in evaluation["results"] if any(r.get(k) != result.get(k) for k in same)),
            result,
        ]
        workdirs.write_json(folder, FILE, evaluation)


def _copy_earlier_results(folder: str, evaluation: files.JsonObject) -> None:
    """Copies the results in the workdir, if they are of the same checkpoint."""
    if (pathlib.Path(folder) / FILE).exists():
        earlier = read_evaluation(folder)
        if all(earlier.get(key) == evaluation[key] for key in ("which", "step", "unit")):
            evaluation["results"] = earlier["results"]


def read_evaluation(folder: str) -> files.JsonObject:
    """The content of evaluation.json in a workdir."""
    path = pathlib.Path(folder) / FILE
    if not path.exists():
        raise errors.UsageError(
            f"{path} does not exist; evaluate that run first, with --eval.methods"
        )
    return files.read_json(path, SCHEMA, "delete it and evaluate again")


def format_table(evaluation: files.JsonObject) -> str:
    """The table on the terminal: the scores of each method, then the options that it used."""
    sections: dict[str, list[tuple[str, object]]] = {
        "run": [
            ("workdir", evaluation["workdir"]),
            ("checkpoint", f"{evaluation['which']}, step {evaluation['step']:,}"),
            *evaluation["run"].items(),
        ]
    }
    unit = evaluation["unit"]
    for method in eval_options.METHODS:
        results = [result for result in evaluation["results"] if result["method"] == method]
        if not results:
            continue
        rows: list[tuple[str, object]] = []
        for result in results:
            diverged = result["nats"] is None
            score = "diverged" if diverged else units.show(result["nats"], unit)
            nats = result.get("last_finite_nats", math.nan) if diverged else result["nats"]
            tokens = f"{result['tokens']:,} tokens"
            rows.append((result["text"], f"{score}  ({nats:.5f} nats, {tokens})"))
        options = {k: v for result in results for k, v in result.items() if k not in _NOT_OPTIONS}
        sections[method] = rows + [(f"  {key}", value) for key, value in options.items()]
    return summaries.table(sections)

"""The results of the runs of a sweep: mean and standard deviation over seeds.

`sweep_tables.py` and `sweep_figures.py` show what `collect` returns.
"""

import math
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from mogrifier_jax import configs, errors, files
from mogrifier_jax.data import vocabularies
from mogrifier_jax.nn import models
from mogrifier_jax.training import learning_curves, metrics, runs, units, workdirs

SPLITS = ("valid", "test")
REMEDY = "restore it from a copy, or delete that folder to run it again"
RESULTS = workdirs.RESULTS | dict.fromkeys(("valid_nats", "test_nats"), files.Number(float))
RECORD = {"seconds?": files.Number(float), "hardware?": str, "diverged?": str}  # sweep.json.
_SCORES = {f"valid_{unit}" for unit in ("ppl", "bpc", "bpb")}


def run_folder(workdir: str | os.PathLike, variant: str, seed: int) -> pathlib.Path:
    """The workdir of the run of a variant and a seed."""
    return pathlib.Path(workdir) / variant.replace(",", "_") / f"seed{seed}"


def collect(
    variants: configs.Set, folders: Mapping[str, Sequence[pathlib.Path]]
) -> list[files.JsonObject]:
    """One row for each variant of a set that has a finished run.

    A row has the fields of `configs.Row` and those of `summarise`.

    Args:
      folders: the workdirs of all runs of each variant.
    """
    rows = []
    for row in variants.rows:
        finished = [f for f in folders[row.variant] if (f / "results.json").exists()]
        if finished:
            rows.append({**row._asdict(), **summarise(finished, variants.unit)})
    return rows


def summarise(folders: Sequence[pathlib.Path], unit: str | None = None) -> files.JsonObject:
    """Scores, sizes and costs of several runs of one config.

    `valid` and `test` have the `scores` of the seeds in `unit`, their `mean`, and their sample
    standard deviation `spread`; `nats_of_seeds` and `nats` are the scores and their mean in nats.
    """
    results = [read_results(folder) for folder in folders]
    known_units = [key.removeprefix("valid_") for key in results[0] if key in _SCORES]
    if not (unit or known_units):
        raise errors.UsageError(f"{folders[0] / 'results.json'} has no score; {REMEDY}")
    unit = unit or known_units[0]
    config = workdirs.read_config(folders[0])
    vocab = vocabularies.Vocabulary.from_json(workdirs.read_vocabulary(folders[0]))
    model = runs.make_model(config, len(vocab))
    records = [read_record(folder) for folder in folders]
    starts = [start for folder in folders for start in _read_starts(folder / "version.json")]
    summary: files.JsonObject = {
        "unit": unit,
        "runs": ["/".join(folder.parts[-2:]) for folder in folders],
        "num_params": sum(models.count_parameters(model).values()),
        "hidden_size": model.hidden_size,
        "embedding_size": model.embedding_size,
        "batch_size": config.data.batch_size,
        "window": config.data.get("length") or config.data.window,
        "steps": config.schedule.turns * config.schedule.steps_per_turn,
        "seconds": sum(record.get("seconds", 0.0) for record in records),
        "hardware": sorted({record["hardware"] for record in records if "hardware" in record}),
        "commits": sorted({start["commit"] for start in starts if start.get("commit")}),
    }
    summary["curves"] = [_read_curve(folder) for folder in folders]
    for split in SPLITS:
        nats = [result[f"{split}_nats"] for result in results]
        scores = [units.in_unit(value, unit) for value in nats]
        summary[split] = {
            "scores": scores,
            "mean": statistics.fmean(scores),
            "spread": statistics.stdev(scores) if len(scores) > 1 else None,
            "nats": statistics.fmean(nats),
            "nats_of_seeds": nats,
        }
    return summary


def difference(first: files.JsonObject, other: files.JsonObject, split: str) -> tuple[float, float]:
    """The difference between the mean nats of two rows, and its standard error.

    The standard error is nan if one of them has fewer than two seeds.
    """
    samples = [nats_of_seeds(row, split) for row in (first, other)]
    gap = statistics.fmean(samples[0]) - statistics.fmean(samples[1])
    if min(map(len, samples)) < 2:
        return gap, math.nan
    return gap, math.sqrt(sum(statistics.variance(nats) / len(nats) for nats in samples))


def nats_of_seeds(row: files.JsonObject, split: str) -> list[float]:
    """The scores of a row in nats; files of earlier versions have them only in their unit."""
    score = row[split]
    if "nats_of_seeds" in score:
        return score["nats_of_seeds"]
    if row["unit"] == "ppl":
        return [math.log(value) for value in score["scores"]]
    scale = 1.0 if row["unit"] == "nats" else math.log(2)
    return [value * scale for value in score["scores"]]


def _read_curve(folder: pathlib.Path) -> list[tuple[int, float]]:
    """(step, validation nats) of every evaluation of a run."""
    steps, nats = learning_curves.find_points(metrics.read_metrics(folder), "eval", "valid_nats")
    return list(zip(map(int, steps), map(float, nats), strict=True))


def read_results(folder: pathlib.Path) -> files.JsonObject:
    """The results.json of a finished run."""
    return files.read_json(folder / "results.json", RESULTS, REMEDY)


def read_record(folder: pathlib.Path) -> files.JsonObject:
    """What a sweep has noted about a run: seconds, hardware, and why it diverged."""
    path = folder / "sweep.json"
    return files.read_json(path, RECORD, REMEDY) if path.exists() else {}


def _read_starts(path: pathlib.Path) -> list[files.JsonObject]:
    schema = [{"commit?": (str, None)}]
    return files.read_json(path, schema, "delete it") if path.exists() else []

"""Loads a trained run from its workdir, or from a model file; no corpus is needed."""

import os
import pathlib
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from mogrifier_jax import buckets, errors, files
from mogrifier_jax.data import vocabularies
from mogrifier_jax.evaluation import loaded_run, model_files
from mogrifier_jax.training import averaging, checkpoints, runs, workdirs


def load_run(
    workdir: str | os.PathLike, which: checkpoints.Which = "best", mesh: Mesh | None = None
) -> loaded_run.LoadedRun:
    """Loads the best or the latest checkpoint of a run, which may still be training.

    Args:
      workdir: a workdir, or a model file, which has only one checkpoint. It may be in a bucket.
      mesh: the weights are copied to each of its devices. By default they are on the first device,
        or on all devices if there are several processes.
    """
    if not isinstance(which, str) or which not in ("best", "latest"):
        raise errors.UsageError(
            f"checkpoint {errors.show(which)} is unknown; use 'best' or 'latest'"
        )
    if not isinstance(workdir, str | os.PathLike):
        raise errors.UsageError(
            f"workdir {errors.show(workdir)} is not a path; give the workdir of a trained run, as "
            "'runs/pydoc'"
        )
    if not os.fspath(workdir):
        raise errors.UsageError("workdir is an empty text; give the workdir of a trained run")
    with buckets.copied(workdir) as place:
        # pathlib raises an OSError for a name that is too long.
        if os.path.isfile(place):
            return model_files.load_file(place, mesh)
        if not os.path.isdir(place):
            raise errors.UsageError(
                f"workdir {place} does not exist; give the workdir of a trained run"
            )
        return _load_workdir(place, which, mesh)


def _load_workdir(
    workdir: str | os.PathLike, which: checkpoints.Which, mesh: Mesh | None
) -> loaded_run.LoadedRun:
    config = workdirs.read_config(workdir)
    vocabulary_json = workdirs.read_vocabulary(workdir)
    vocab = vocabularies.Vocabulary.from_json(vocabulary_json)
    model = runs.make_model(config, len(vocab))
    average = averaging.make_averaging(
        config.averaging.kind, config.averaging.stagnating_evaluations
    )
    fingerprint = workdirs.make_fingerprint(config, vocabulary_json)
    about = {"temperature?": model_files.METADATA["temperature"]}
    with checkpoints.Checkpoints(
        workdir, read_only=True, fingerprint=fingerprint, info=about
    ) as saved:
        restored = saved.restore(_abstract_weights(model, average, mesh), which=which, partial=True)
    total_steps = config.schedule.turns * config.schedule.steps_per_turn
    path = pathlib.Path(workdir) / "results.json"
    finished = path.exists()
    results = files.read_json(path, workdirs.RESULTS) if finished else {}
    if restored is None:
        raise errors.UsageError(
            f"{workdir} has no checkpoint yet: the first one is written after the first "
            "evaluation; wait for it, or start the run again if it was stopped"
        )
    if not finished:
        used = f"its {which} checkpoint so far, of step {restored.step} of {total_steps}"
        logging.info("the run in %s has not ended; using %s", workdir, used)
    elif which == "best" and results["step"] != restored.step:
        logging.warning(
            "%s has the scores of step %d, but the best checkpoint, which is used, is of step %d",
            path,
            results["step"],
            restored.step,
        )
    return loaded_run.LoadedRun(
        config=config,
        model=model,
        vocabulary=vocab,
        params=average.value(restored.state["average"], restored.state["params"]),
        temperature=restored.info.get("temperature"),
        info={
            "workdir": buckets.show(str(workdir)),
            "which": which,
            "step": restored.step,
            "total_steps": total_steps,
            "finished": finished,
            "corpus": workdirs.corpus_digests(restored.fingerprint),
        },
    )


def _abstract_weights(
    model: loaded_run.Model, average: averaging.Averaging, mesh: Mesh | None
) -> dict[str, Any]:
    """The weights of a training state, under the names by which checkpoints save them."""

    def init() -> dict[str, Any]:
        params = loaded_run.init_params(model)
        return {"params": params, "average": average.init(params)}

    sharding = loaded_run.weights_sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init),
    )

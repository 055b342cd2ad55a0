"""Trained weights from a workdir: config, model, vocabulary and weights, without the corpus."""

import os
import pathlib
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.sharding import Mesh, SingleDeviceSharding
from ml_collections import config_dict

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import vocabulary
from mogrifier_jax.training import averaging, checkpoints, runs, workdirs


class Pretrained(NamedTuple):
    """What a run has learned."""

    config: config_dict.ConfigDict
    model: Any
    vocabulary: vocabulary.Vocabulary
    params: Any  # The averaged weights, if the checkpoint has any.
    temperature: float | None  # Found on the validation set when the checkpoint was made.
    info: dict[str, Any]  # workdir, which, step, total_steps, finished.


def load_weights(
    workdir: str | os.PathLike, which: checkpoints.Which = "best", mesh: Mesh | None = None
) -> Pretrained:
    """Loads the best or the latest checkpoint of a run, which may still be going on.

    Args:
      mesh: devices that each get a copy of the weights; by default the first device.
    """
    if which not in ("best", "latest"):
        raise errors.UsageError(f"checkpoint {which!r} is unknown; use 'best' or 'latest'")
    if not pathlib.Path(workdir).is_dir():
        raise errors.UsageError(f"workdir {workdir} does not exist; give that of a trained run")
    config = workdirs.read_config(workdir)
    vocab = vocabulary.Vocabulary.from_json(workdirs.read_vocabulary(workdir))
    model = runs.make_model(config, len(vocab))
    average = averaging.make_averaging(config.averaging.kind)
    with checkpoints.Checkpoints(workdir, read_only=True) as saved:
        restored = saved.restore(_abstract_weights(model, average, mesh), which=which, partial=True)
    total = config.schedule.turns * config.schedule.steps_per_turn
    finished = (pathlib.Path(workdir) / "results.json").exists()
    if restored is None:
        raise errors.UsageError(
            f"{workdir} has no checkpoint yet: the first one is written after the first "
            "evaluation; wait for it, or start the run again if it was stopped"
        )
    if not finished:
        logging.info(
            "the run in %s has not ended; using its %s checkpoint so far, of step %d of %d",
            *(workdir, which, restored.step, total),
        )
    return Pretrained(
        config=config,
        model=model,
        vocabulary=vocab,
        params=average.value(restored.state["average"], restored.state["params"]),
        temperature=restored.info.get("temperature"),
        info={
            "workdir": str(workdir),
            "which": which,
            "step": restored.step,
            "total_steps": total,
            "finished": finished,
        },
    )


def _abstract_weights(model, average, mesh) -> dict[str, Any]:
    """The part of a training state that is the weights, by the names that it is saved under."""

    def init():
        params = model.init(jax.random.key(0), **model.example())["params"]
        return {"params": params, "average": average.init(params)}

    sharding = partitioning.replicated(mesh) if mesh else SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init),
    )

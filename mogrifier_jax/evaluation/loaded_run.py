"""A trained run in memory: its config, its model with weights, and its vocabulary."""

from typing import NamedTuple

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from ml_collections import config_dict

from mogrifier_jax import files, partitioning
from mogrifier_jax.data import vocabularies
from mogrifier_jax.nn import cells, models

Model = models.Model
Params = cells.Params


class LoadedRun(NamedTuple):
    """The model of a run with its weights, its vocabulary and its config."""

    config: config_dict.ConfigDict
    model: Model
    vocabulary: vocabularies.Vocabulary
    params: Params  # The averaged weights, if the checkpoint has any.
    temperature: float | None  # The logit scale that training found on the validation set.
    info: files.JsonObject  # workdir, which, step, total_steps, finished, digests of the corpus.


def weights_sharding(mesh: Mesh | None) -> Sharding:
    """Where weights are put: on every device of the mesh, or on the first device without one."""
    if mesh is None and jax.process_count() > 1:  # Every process needs the weights.
        mesh = partitioning.make_mesh()
    return partitioning.replicated(mesh) if mesh else SingleDeviceSharding(jax.devices()[0])


def init_params(model: Model) -> Params:
    """Initial weights; under `jax.eval_shape`, their shapes and dtypes."""
    return model.init(jax.random.key(0), **model.example())["params"]

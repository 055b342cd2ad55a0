"""The workdir of a run, as far as it is read, made without training."""

import jax
import numpy as np

from experiments import text as experiment
from mogrifier_jax.data import vocabularies
from mogrifier_jax.nn import models
from mogrifier_jax.training import averaging, checkpoints, workdirs
from tests import quick


def write(folder, text, **model_options):
    """One of `experiments/text.py:tiny` on this text, with weights that have opinions."""
    config = experiment.get_config("tiny")
    with config.unlocked():
        config.model.update(model_options)
        config.data.window = 8
    return write_run(folder, config, vocabularies.Vocabulary.from_text(text, config.data.level))


def write_run(folder, config, vocab):
    """One of any language model."""
    model = models.make_model(len(vocab), **config.model)

    @quick.jit
    def make_state(key):
        params = model.init(key, **model.example())["params"]
        params = jax.tree.map(lambda leaf: np.float32(2) * leaf, params)
        return {"params": params, "average": averaging.make_averaging("triggered").init(params)}

    workdirs.write_run_files(folder, config, vocab.to_json())
    fingerprint = workdirs.make_fingerprint(config, vocab.to_json())
    with checkpoints.Checkpoints(folder, fingerprint=fingerprint) as saved:
        saved.save(3, make_state(jax.random.key(0)), info={"temperature": 0.9}, best=True)
    return folder


def latest_step(folder):
    """The newest step with a checkpoint."""
    with checkpoints.Checkpoints(folder, read_only=True) as saved:
        return saved.latest_step

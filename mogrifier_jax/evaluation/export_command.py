"""`--mode=export`: writes the best weights of a run to one file to share."""

import os

from mogrifier_jax import buckets, errors
from mogrifier_jax.evaluation import loading, model_files


def export(workdir: str, output: str | None = None) -> None:
    """Writes a model file to `output`, or to model.safetensors in the workdir."""
    if not workdir:
        raise errors.UsageError("--workdir is missing; give the workdir of a trained run")
    path = output or os.path.join(workdir, "model.safetensors")
    model_files.save_file(loading.load_run(workdir), path)
    size = os.path.getsize(path) / 2**20
    place = buckets.show(path)
    print(f'{place}: {size:.1f} MiB; mogrifier_jax.load("{place}") reads it')

"""Model files: a trained model in one safetensors file, to be shared without its workdir.

The file contains the weights by name (`embedding`, `layer_0.kernel`, ...). Its metadata are
strings: `format`, `version`, `config`, `info` and `temperature` (these three are JSON),
`vocabulary` (the content of vocabulary.json) and `digest`, the SHA-256 of everything else. The
folder `shipped` has the model files that come with the package (docs/model_card.md).
"""

import json
import os
import pathlib
from collections.abc import Mapping

import jax
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh

from mogrifier_jax import buckets, errors, files
from mogrifier_jax.data import vocabularies
from mogrifier_jax.evaluation import array_digests, loaded_run
from mogrifier_jax.training import atomic_files, run_record, runs, state_arrays, workdirs

FORMAT, VERSION = "mogrifier_jax", "1"
METADATA = {  # The schemas of those metadata that are JSON.
    "config": dict,
    "vocabulary": dict,
    "temperature": (run_record.TEMPERATURE, None),
    "info": {
        "which": ("best", "latest"),
        "step": files.COUNT,
        "total_steps": files.COUNT,
        "finished": bool,
        "corpus?": {str: str},
    },
}


SHIPPED = pathlib.Path(__file__).parent / "shipped"


def find_shipped(name: str | os.PathLike) -> str | os.PathLike:
    """The file of a model that comes with the package, or `name` itself if it is a path."""
    shipped = {path.stem: path for path in SHIPPED.glob("*.safetensors")}
    if isinstance(name, str) and name in shipped and not os.path.lexists(name):
        return shipped[name]
    return name


def save_file(loaded: loaded_run.LoadedRun, path: str | os.PathLike) -> None:
    """Writes a model file, whole or not at all, here or in a bucket.

    It mentions no folder of this machine.
    """
    if not buckets.is_bucket(path):
        atomic_files.check_output(path, "path")
    errors.check(bool(path), f"path {path!r} names no file; give one")
    config = loaded.config.copy_and_resolve_references()
    with config.unlocked():
        config.data.source_dir = config.data.data_dir = None
    arrays = {
        name: np.asarray(leaf) for name, leaf in state_arrays.name_leaves(loaded.params).items()
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": workdirs.config_to_json(config),
        "vocabulary": loaded.vocabulary.to_json(),
        "temperature": json.dumps(loaded.temperature),
        "info": json.dumps({k: v for k, v in loaded.info.items() if k != "workdir"}),
    }
    metadata["digest"] = digest_file(arrays, metadata)
    with buckets.output(path) as place, atomic_files.writing_output(place) as file:
        file.write(safetensors.numpy.save(arrays, metadata))


def load_file(path: str | os.PathLike, mesh: Mesh | None = None) -> loaded_run.LoadedRun:
    """Reads a model file; refuses one that is damaged or contains something else."""
    arrays, metadata = _read_file(path)
    try:
        parts = {
            name: files.parse_json(metadata[name], schema, f"its {name}", remedy="")
            for name, schema in METADATA.items()
        }
        config = workdirs.config_from_json(parts["config"])
        vocab = vocabularies.Vocabulary.from_json(metadata["vocabulary"])
        info = {**parts["info"], "workdir": buckets.show(str(path))}
        model = runs.make_model(config, len(vocab))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.UsageError(
            f"{path} describes a model that cannot be made here ({error}); export it again with "
            "this version"
        ) from None
    abstract = jax.eval_shape(lambda: loaded_run.init_params(model))
    expected = {n: (a.shape, a.dtype) for n, a in state_arrays.name_leaves(abstract).items()}
    stored = {n: (a.shape, a.dtype) for n, a in arrays.items()}
    for name in sorted(expected | stored):
        if expected.get(name) != stored.get(name):
            raise errors.UsageError(
                f"{path} does not have the weights that its config asks for: {name} differs in "
                "name, shape or dtype; export the model again"
            )
    params = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[n] for n in expected])
    params = jax.device_put(params, loaded_run.weights_sharding(mesh))
    return loaded_run.LoadedRun(config, model, vocab, params, parts["temperature"], info)


def _read_file(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and metadata of a model file, without its digest, which is checked."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    # NumPy lacks some of the dtypes, which raises an AttributeError, and damage may raise anything.
    except Exception as error:
        raise errors.UsageError(
            f"{path} cannot be read as a safetensors file ({error}); copy or export it again"
        ) from None
    if metadata.get("format") != FORMAT:
        raise errors.UsageError(
            f"{path} holds no model of this package; give a file that --mode=export has made"
        )
    if metadata.get("version") != VERSION:
        raise errors.UsageError(
            f"{path} has version {metadata.get('version')} of the format, and this package reads "
            f"{VERSION}; use a newer mogrifier_jax, or export the model again"
        )
    if metadata.pop("digest", None) != digest_file(arrays, metadata):
        raise errors.UsageError(f"{path} is damaged: its digest is another; copy it again")
    return arrays, metadata


def digest_file(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """The digest that a model file with these arrays and metadata must have."""
    ordered = {name: arrays[name] for name in sorted(arrays)}
    return array_digests.digest_arrays(json.dumps(metadata, sort_keys=True), ordered)

"""Trained weights, from a workdir or from a file to share, and the texts that they can score.

A file to share is a safetensors file. It holds the weights by name (`embedding`, `layer_0.kernel`,
...). Its metadata are texts: `format`, `version`, `config`, `info` and `temperature` (all three
JSON), `vocabulary` (the content of vocabulary.json) and `digest`, the SHA-256 of all the rest.

A model can score the splits of its corpus, or any file.
"""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy
from absl import logging
from jax.sharding import Mesh, SingleDeviceSharding
from ml_collections import config_dict

from mogrifier_jax import errors, files, partitioning
from mogrifier_jax.data import corpora, tasks
from mogrifier_jax.training import averaging, checkpoints, leaves, runs, workdirs

FORMAT, VERSION = "mogrifier_jax", "1"
METADATA = {  # What is JSON in the metadata of a file to share.
    "config": dict,
    "vocabulary": dict,
    "temperature": (files.Number(float, 0.0), None),
    "info": {
        "which": ("best", "latest"),
        "step": files.COUNT,
        "total_steps": files.COUNT,
        "finished": bool,
        "corpus?": {str: str},
    },
}


class Pretrained(NamedTuple):
    """The model of a run with its weights, its vocabulary and its config."""

    config: config_dict.ConfigDict
    model: Any
    vocabulary: corpora.Vocabulary
    params: Any  # The averaged weights, if the checkpoint has any.
    temperature: float | None  # Training found it on the validation set for this checkpoint.
    info: dict[str, Any]  # workdir, which, step, total_steps, finished, digests of the corpus.


def load_weights(
    workdir: str | os.PathLike, which: checkpoints.Which = "best", mesh: Mesh | None = None
) -> Pretrained:
    """Loads the best or the latest checkpoint of a run; the run may still be going on.

    Args:
      workdir: a workdir, or a file of `save_file`, which holds only one checkpoint.
      mesh: every device of it gets a copy of the weights. By default it is the first device, or
        all devices if there are several processes.
    """
    if which not in ("best", "latest"):
        raise errors.UsageError(f"checkpoint {which!r} is unknown; use 'best' or 'latest'")
    if not isinstance(workdir, str | os.PathLike):
        raise errors.UsageError(
            f"workdir {errors.show(workdir)} is not a path; give that of a trained run, as "
            "'runs/pydoc'"
        )
    if not os.fspath(workdir):
        raise errors.UsageError("workdir is an empty text; give that of a trained run")
    if pathlib.Path(workdir).is_file():
        return load_file(workdir, mesh)
    if not pathlib.Path(workdir).is_dir():
        raise errors.UsageError(f"workdir {workdir} does not exist; give that of a trained run")
    config = workdirs.read_config(workdir)
    text = workdirs.read_vocabulary(workdir)
    vocab = corpora.Vocabulary.from_json(text)
    model = runs.make_model(config, len(vocab))
    average = averaging.make_averaging(
        config.averaging.kind, config.averaging.stagnating_evaluations
    )
    seal = workdirs.seal(config, text)
    with checkpoints.Checkpoints(workdir, read_only=True, seal=seal) as saved:
        restored = saved.restore(_abstract_weights(model, average, mesh), which=which, partial=True)
    total = config.schedule.turns * config.schedule.steps_per_turn
    path = pathlib.Path(workdir) / "results.json"
    finished = path.exists()
    results = files.read_json(path, workdirs.RESULTS) if finished else {}
    if restored is None:
        raise errors.UsageError(
            f"{workdir} has no checkpoint yet: the first one is written after the first "
            "evaluation; wait for it, or start the run again if it was stopped"
        )
    if not finished:
        used = f"its {which} checkpoint so far, of step {restored.step} of {total}"
        logging.info("the run in %s has not ended; using %s", workdir, used)
    elif which == "best" and results["step"] != restored.step:
        left = f"{path} is of the best checkpoint of step {results['step']}"
        logging.warning("%s, and that of step %d is used", left, restored.step)
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
            "corpus": workdirs.sealed_digests(restored.seal),
        },
    )


def save_file(loaded: Pretrained, path: str | os.PathLike) -> None:
    """Writes everything to one safetensors file, whole or not at all.

    The file names no folder of this machine.
    """
    workdirs.check_output(path, "path")
    errors.check(bool(path), f"path {path!r} names no file; give one")
    config = loaded.config.copy_and_resolve_references()
    with config.unlocked():
        config.data.source_dir = config.data.data_dir = None
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.name_leaves(loaded.params).items()}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": workdirs.config_to_json(config),
        "vocabulary": loaded.vocabulary.to_json(),
        "temperature": json.dumps(loaded.temperature),
        "info": json.dumps({k: v for k, v in loaded.info.items() if k != "workdir"}),
    }
    metadata["digest"] = _digest(arrays, metadata)
    with workdirs.replacing(path) as file:
        file.write(safetensors.numpy.save(arrays, metadata))


def load_file(path: str | os.PathLike, mesh: Mesh | None = None) -> Pretrained:
    """Reads a file of `save_file`; refuses one that is damaged or holds something else."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (safetensors.SafetensorError, OSError, TypeError, ValueError) as error:
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
    if metadata.pop("digest", None) != _digest(arrays, metadata):
        raise errors.UsageError(f"{path} is damaged: its digest is another; copy it again")
    try:
        parts = {
            name: files.parse_json(metadata[name], schema, f"its {name}", remedy="")
            for name, schema in METADATA.items()
        }
        config = workdirs.config_from_json(parts["config"])
        vocab = corpora.Vocabulary.from_json(metadata["vocabulary"])
        info = {**parts["info"], "workdir": str(path)}
        model = runs.make_model(config, len(vocab))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.UsageError(
            f"{path} describes a model that cannot be made here ({error}); export it again with "
            "this version"
        ) from None
    abstract = jax.eval_shape(lambda: _init(model))
    expected = {n: (a.shape, a.dtype) for n, a in leaves.name_leaves(abstract).items()}
    found = {n: (a.shape, a.dtype) for n, a in arrays.items()}
    for name in sorted(expected | found):
        if expected.get(name) != found.get(name):
            raise errors.UsageError(
                f"{path} does not have the weights that its config asks for: {name} differs in "
                "name, shape or dtype; export the model again"
            )
    params = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[n] for n in expected])
    params = jax.device_put(params, _place(mesh))
    return Pretrained(config, model, vocab, params, parts["temperature"], info)


def export(workdir: str, output: str | None = None) -> None:
    """`--mode=export`: writes the best weights of a run to one file to share."""
    if not workdir:
        raise errors.UsageError("--workdir is missing; give that of a trained run")
    path = output or os.path.join(workdir, "model.safetensors")
    save_file(load_weights(workdir), path)
    size = os.path.getsize(path) / 2**20
    print(f'{path}: {size:.1f} MiB; mogrifier_jax.load("{path}") reads it')


def _digest(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    ordered = {name: arrays[name] for name in sorted(arrays)}
    return digest_arrays(json.dumps(metadata, sort_keys=True), ordered)


def digest_arrays(about: str, arrays: Mapping[str, Any]) -> str:
    """SHA-256 of a text and of the names, shapes, dtypes and contents of arrays."""
    digest = hashlib.sha256(about.encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def _place(mesh: Mesh | None) -> Any:
    if mesh is None and jax.process_count() > 1:  # Every process needs the weights.
        mesh = partitioning.make_mesh()
    return partitioning.replicated(mesh) if mesh else SingleDeviceSharding(jax.devices()[0])


def _init(model: Any) -> Any:
    return model.init(jax.random.key(0), **model.example())["params"]


def _abstract_weights(model, average, mesh) -> dict[str, Any]:
    """The weights in a training state, under the names by which checkpoints save them."""

    def init():
        params = _init(model)
        return {"params": params, "average": average.init(params)}

    sharding = _place(mesh)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init),
    )


class Texts(NamedTuple):
    """Texts that a model can score, by name."""

    names: tuple[str, ...]
    unit: str  # The unit of scores that people read: "ppl", "bpc" or "bpb".
    plan: Callable[..., tasks.Plan]  # plan(name, num_stripes, window=..., mesh=None)
    num_lines: Callable[[str], int]
    carries: bool  # Whether the state is carried from window to window.
    about: Mapping[str, Any]  # Kept with each result.

    def check(self, name: str) -> None:
        """Refuses a name that none of the texts has."""
        if name not in self.names:
            known = ", ".join(self.names)
            raise errors.UsageError(f"split {name!r} is unknown; use any of {known}")


def read_splits(
    loaded: Pretrained, source_dir: str | None = None, data_dir: str | None = None
) -> Texts:
    """The splits of the corpus that the run was trained on; refuses another vocabulary.

    A corpus that is not prepared yet goes to `data_dir` or to the cache. The folder that the run's
    config names is only read: the run may be somebody else's.
    """
    options = dict(loaded.config.data)
    options |= {"data_dir": data_dir, "prepared_dir": options["data_dir"]}
    if source_dir:
        options["source_dir"] = source_dir
    task = tasks.make_task(jax.random.key(loaded.config.seed), None, **options)
    if task.vocabulary.to_json() != loaded.vocabulary.to_json():
        raise errors.UsageError(
            f"the corpus {options['name']} here has another vocabulary ({len(task.vocabulary):,} "
            f"tokens) than the run in {loaded.info['workdir']} ({len(loaded.vocabulary):,}): it is "
            "not the text that the run was trained on; set --eval.source_dir to that, or score "
            "the file itself with --eval.text"
        )
    about: dict[str, Any] = {"corpus": options["name"]}
    known = loaded.info.get("corpus", {})
    changed = [split for split in known if known[split] != task.digests.get(split, known[split])]
    if changed:
        # Scores of another text may still be wanted, but nobody should take them for the run's.
        about["changed_splits"] = ",".join(changed)
        logging.warning(
            "the corpus %s is not the one that the run in %s was trained on: the text of %s is "
            "another, and scores are of the text that is here now; it may have lines in its valid "
            "and test that were trained on",
            options["name"],
            loaded.info["workdir"],
            " and ".join(changed),
        )
    return Texts(
        ("train", "valid", "test"),
        task.score_unit,
        task.plan,
        task.num_lines,
        task.carries,
        about,
    )


def read_file(loaded: Pretrained, path: str | os.PathLike) -> Texts:
    """Any text file as one text named "text"; a warning lists the unknown tokens."""
    config, vocab = loaded.config, loaded.vocabulary
    if not tasks.kind_of(config.data).carries:
        raise errors.UsageError(
            f"the run in {loaded.info['workdir']} models no stream of text; "
            "a file can be scored only by a language model that carries its state"
        )
    text = read_text(vocab, path)
    if not text:
        raise errors.UsageError(f"{path} is empty; there is nothing to score")
    split = vocab.encode_split(text)
    unknown = int((split.tokens == vocab.unknown_id).sum())
    if unknown:
        some = vocab.find_unknown(text)
        total, share = len(split.tokens), f"{unknown / len(split.tokens):.2%}"
        logging.warning(
            f"{path}: {unknown} of {total} tokens ({share}) are not in the vocabulary, "
            f"{len(some)} different ones: {list_some(some)}"
        )
    plan = functools.partial(tasks.plan_text, split, vocab.eos_id)
    unit = unit_of(config.data.name, vocab.level)
    return Texts(
        ("text",),
        unit,
        lambda name, *args, **options: plan(*args, **options),
        lambda name: len(split.line_starts),
        True,
        {"source": os.path.abspath(path), "unknown_tokens": unknown},
    )


def list_some(unknown: Sequence[str]) -> str:
    """The first ten tokens, as a message shows them."""
    return ", ".join(map(repr, unknown[:10])) + (", ..." if len(unknown) > 10 else "")


def unit_of(corpus: str, level: str) -> str:
    """The unit of scores on this corpus, from the level of its vocabulary."""
    # The words of ptb_char are single characters.
    level = "character" if corpus == "ptb_char" else level
    return tasks.SCORE_UNITS[level]


def read_text(vocab: corpora.Vocabulary, path: str | os.PathLike) -> str | bytes:
    """The content of a file: bytes for a vocabulary of bytes, otherwise UTF-8 text."""
    content = files.read_bytes(path, "give a file of text")
    if vocab.level == "byte":
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.UsageError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        ) from error

"""config.json, vocabulary.json and version.json, the files that say what a run is.

config.json       the resolved config; `_types` names what JSON cannot express
vocabulary.json   the vocabulary
version.json      for every start of the run: versions, commit and date
.lock             held while a file that several processes change is read and written

`atomic_files.py` writes them. `make_fingerprint` is what checkpoints remember of config, vocabulary
and corpus.
"""

import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from ml_collections import config_dict

import mogrifier_jax
from mogrifier_jax import config_keys, configs, errors, files
from mogrifier_jax.data import vocabularies
from mogrifier_jax.training import atomic_files

# What the weights mean and what their scores depend on; the rest is how the weights were trained.
_FINGERPRINTED = ("model", "data", "dropout", "averaging.kind", "averaging.stagnating_evaluations")
# What may differ when a run is resumed, because it does not change the numbers.
FREE_KEYS = (
    *("mesh", "log_every", "data.source_dir", "data.data_dir"),
    "optimizer.accumulate_at_once",
)
CORPUS = "corpus: "  # The prefix of the names of splits in a fingerprint.
RESULTS = {"step": files.COUNT}  # Of results.json; sweeps need the scores too.


def check_place(workdir: str | os.PathLike) -> None:
    """Refuses a workdir that cannot be written to, before any work."""
    name = os.fspath(workdir)
    atomic_files.refuse_address(name, "--workdir")
    # TensorStore takes a backslash for a slash, and needs names in UTF-8.
    if "\\" in name or "\0" in name or name != name.encode(errors="replace").decode():
        raise errors.UsageError(
            f"--workdir={name!r} has a backslash or is not UTF-8, so checkpoints cannot be saved "
            "there; give another folder"
        )
    folder = pathlib.Path(workdir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise errors.UsageError(
            f"--workdir={name} cannot be made: {existing} is not a folder that can be written to; "
            "give another one"
        )


def write_run_files(
    workdir: str | os.PathLike, config: config_dict.ConfigDict, vocabulary_json: str
) -> None:
    """Writes the files above; refuses to resume a run with another vocabulary."""
    workdir = pathlib.Path(workdir)
    path = workdir / "vocabulary.json"
    if os.path.lexists(path) and files.read_bytes(path) != vocabulary_json.encode():
        raise errors.UsageError(
            f"the vocabulary of the corpus is not the one in {path}; use the corpus that the run "
            "was started with, restore the file if it is damaged, or use another workdir"
        )
    if jax.process_index() != 0:
        return
    atomic_files.replace_text(workdir / "config.json", config_to_json(config))
    atomic_files.replace_text(path, vocabulary_json)
    write_json(workdir, "version.json", [*_earlier_starts(workdir / "version.json"), versions()])


def _earlier_starts(path: pathlib.Path) -> list[Any]:
    """The content of version.json; a damaged one is set aside, because no run depends on it."""
    if not path.exists():
        return []
    try:
        return files.read_json(path, [dict])
    except errors.UsageError as error:
        os.replace(path, path.with_name("version.json.damaged"))
        logging.warning("%s; it was renamed to version.json.damaged, and a new one begins", error)
        return []


def read_config(workdir: str | os.PathLike) -> config_dict.ConfigDict:
    """The locked config of the run in a workdir; keys that it lacks have their defaults."""
    workdir = pathlib.Path(workdir)
    path = workdir / "config.json"
    if not path.exists():
        raise errors.UsageError(
            f"{workdir} is not the workdir of a run: it has no config.json; "
            "give the --workdir of a run that was started"
        )
    try:
        return config_from_json(files.read_json(path, dict))
    except errors.UsageError as error:
        raise errors.UsageError(
            f"{path} is not a config as runs write it ({error}); restore it from a copy or use "
            "another workdir"
        ) from None


def config_to_json(config: config_dict.ConfigDict) -> str:
    """The text of config.json; `_types` names the types of absent values, and tuples."""
    types = {
        name: config_keys.keys()[name].kind.__name__
        for name, value in configs.flatten(config).items()
        if name in config_keys.keys() and (value is None or isinstance(value, tuple))
    }
    values = json.loads(config.to_json_best_effort()) | {"_types": types}
    return json.dumps(values, indent=2) + "\n"


def config_from_json(values: files.JsonObject) -> config_dict.ConfigDict:
    """The config of the content of config.json, locked and checked."""
    values.pop("_types", None)  # For other programs; `config_keys.py` knows the types.
    config = configs.base(values)
    configs.check(config)
    return config


def read_vocabulary(workdir: str | os.PathLike) -> str:
    """The JSON text of the vocabulary of the run in a workdir."""
    path = pathlib.Path(workdir) / "vocabulary.json"
    text = files.read_text(path, "give the --workdir of a started run, or restore it from a copy")
    files.parse_json(text, vocabularies.JSON_SCHEMA, str(path))
    return text


def make_fingerprint(
    config: config_dict.ConfigDict,
    vocabulary_json: str,
    digests: Mapping[str, str] | None = None,
) -> files.JsonObject:
    """What a checkpoint remembers, by name, so that it is not used with another config or corpus.

    Args:
      digests: the digests of the splits, if the corpus was read. They are compared only with a
        fingerprint that has them, too.
    """
    # Without defaults, so that a key of a later version does not change fingerprints.
    defaults = {name: key.default for name, key in config_keys.keys().items()}
    values = {
        f"config.json: {name}": list(value) if isinstance(value, tuple) else value
        for name, value in configs.flatten(config).items()
        if value != defaults.get(name)
        and configs.is_among(name, _FINGERPRINTED)
        and not configs.is_among(name, FREE_KEYS)
    }
    vocabulary = json.dumps(json.loads(vocabulary_json), sort_keys=True).encode()
    values["vocabulary.json: sha256"] = hashlib.sha256(vocabulary).hexdigest()
    return values | {f"{CORPUS}{split}": digest for split, digest in (digests or {}).items()}


def corpus_digests(fingerprint: files.JsonObject) -> dict[str, str]:
    """The digests of the splits in a fingerprint; empty if it was made without them."""
    return {n.removeprefix(CORPUS): v for n, v in fingerprint.items() if n.startswith(CORPUS)}


def check_config(workdir: str | os.PathLike, config: config_dict.ConfigDict) -> None:
    """Refuses to resume a run with a config other than the one in its workdir."""
    workdir = pathlib.Path(workdir)
    if not (workdir / "config.json").exists():
        if any(path.name.isdecimal() for path in (workdir / "checkpoints").glob("*")):
            raise errors.UsageError(
                f"{workdir} has checkpoints but no config.json; restore that from a copy, or use "
                "another workdir"
            )
        return
    differences = configs.differences(read_config(workdir), configs.base(config), FREE_KEYS)
    if differences:
        listing = "".join(
            f"\n  {name}: {saved} (in the workdir) vs {requested} (requested)"
            for name, saved, requested in differences
        )
        raise errors.UsageError(
            f"{workdir} holds a run with another config:{listing}\n"
            "Use another --workdir for a new run, or the same config to continue this one."
        )


def versions() -> files.JsonObject:
    """The versions, commit, date and devices of this process."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "mogrifier_jax": mogrifier_jax.__version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }


def git_commit() -> str | None:
    """The commit of a checkout, with "+changes" if files differ from it; None if installed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(pathlib.Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # The package may be installed inside the checkout of something else.
        git("ls-files", "--error-unmatch", "__init__.py")
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(workdir: str | os.PathLike, name: str, values: Any) -> None:
    """Writes a small JSON file of the run atomically."""
    atomic_files.replace_text(pathlib.Path(workdir) / name, json.dumps(values, indent=2) + "\n")


def check_results(workdir: str | os.PathLike, *names: str) -> None:
    """Refuses a workdir in which these files cannot be written, before they are computed."""
    for path in (pathlib.Path(workdir) / name for name in names):
        try:
            atomic_files.check_output(path, "file")
        except errors.UsageError as error:
            raise errors.UsageError(
                f"{workdir} cannot keep results: {error}, such as a copy of the workdir"
            ) from None

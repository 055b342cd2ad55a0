"""What a run leaves in its workdir beside checkpoints and metrics: all that reading it again needs.

config.json       the resolved config; `_types` names what JSON cannot express
vocabulary.json   the vocabulary
version.json      for every start of the run: versions, commit and date
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Collection
from typing import Any

import jax
from ml_collections import config_dict

import mogrifier_jax
from mogrifier_jax import configs, errors


def write_run_files(
    workdir: str | os.PathLike, config: config_dict.ConfigDict, vocabulary_json: str
) -> None:
    """Writes the files above; a resumed run with another vocabulary is refused."""
    workdir = pathlib.Path(workdir)
    path = workdir / "vocabulary.json"
    if path.exists() and path.read_text() != vocabulary_json:
        raise errors.UsageError(
            f"the vocabulary of the corpus is not the one in {path}; use the corpus that the run "
            "was started with, restore the file if it is damaged, or use another workdir"
        )
    if jax.process_index() != 0:
        return
    workdir.mkdir(parents=True, exist_ok=True)
    types = {
        name: configs.keys()[name].kind.__name__
        for name, value in configs.flatten(config).items()
        if name in configs.keys() and (value is None or isinstance(value, tuple))
    }
    values = json.loads(config.to_json_best_effort()) | {"_types": types}
    replace_text(workdir / "config.json", json.dumps(values, indent=2) + "\n")
    replace_text(path, vocabulary_json)
    starts = _read_json(workdir / "version.json") if (workdir / "version.json").exists() else []
    replace_text(workdir / "version.json", json.dumps([*starts, versions()], indent=2) + "\n")


def read_config(workdir: str | os.PathLike) -> config_dict.ConfigDict:
    """The config of the run in a workdir, locked; keys that it lacks have their defaults."""
    workdir = pathlib.Path(workdir)
    if not (workdir / "config.json").exists():
        raise errors.UsageError(
            f"{workdir} is not the workdir of a run: it has no config.json; "
            "give the --workdir of a run that was started"
        )
    values = _read_json(workdir / "config.json")
    values.pop("_types", None)  # For others: `configs` knows the types.
    try:
        return configs.base(values)
    except errors.UsageError as error:
        raise errors.UsageError(
            f"{workdir / 'config.json'} is not the config of a run: {error}"
        ) from None


def read_vocabulary(workdir: str | os.PathLike) -> str:
    """The JSON text of the vocabulary of the run in a workdir."""
    path = pathlib.Path(workdir) / "vocabulary.json"
    if not path.exists():
        raise errors.UsageError(f"{path} does not exist; give the --workdir of a started run")
    return path.read_text()


def check_config(
    workdir: str | os.PathLike, config: config_dict.ConfigDict, *, ignore: Collection[str] = ()
) -> None:
    """Refuses to go on with another config than the one in the workdir, if there is one.

    Args:
      ignore: keys, or sections such as "mesh", that may change: they do not move the result.
    """
    workdir = pathlib.Path(workdir)
    if not (workdir / "config.json").exists():
        if any(path.name.isdecimal() for path in (workdir / "checkpoints").glob("*")):
            raise errors.UsageError(
                f"{workdir} has checkpoints but no config.json that says of what run; restore it "
                "from a copy, or use another workdir"
            )
        return
    differences = configs.differences(read_config(workdir), configs.base(config), ignore)
    if differences:
        listing = "".join(
            f"\n  {name}: {saved} (in the workdir) vs {requested} (requested)"
            for name, saved, requested in differences
        )
        raise errors.UsageError(
            f"{workdir} holds a run with another config:{listing}\n"
            "Use another --workdir for a new run, or the same config to continue this one."
        )


def versions() -> dict[str, Any]:
    """What is running here, for the record."""
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
        # An environment may lie inside the checkout of something else.
        git("ls-files", "--error-unmatch", "__init__.py")
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(workdir: str | os.PathLike, name: str, values: Any) -> None:
    """Writes a small JSON file of the run, whole or not at all."""
    replace_text(pathlib.Path(workdir) / name, json.dumps(values, indent=2) + "\n")


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes a file such that a reader, or a kill, finds the old text or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise errors.UsageError(
            f"{path} is not valid JSON ({error}); restore it from a copy or use another workdir"
        ) from None

"""Flags and dispatch: `python -m mogrifier_jax.main --config=experiments/pydoc.py`.

Flags are defined here and nowhere else; each mode is a function of another module, imported
when it is used.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from mogrifier_jax import errors, options

FLAGS = flags.FLAGS
MODES = ("train", "evaluate", "sample", "preflight", "sweep", "inspect", "explore", "tune")
# What a missing module belongs to: the package alone is enough for the cells.
EXTRAS = {
    **dict.fromkeys(("tensorflow_datasets", "importlib_resources"), "data"),
    **dict.fromkeys(("matplotlib", "tensorboardX"), "plot"),
    **dict.fromkeys(("greenlet", "optuna", "scipy", "torch"), "tune"),
}

_CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment file, as file.py:variant.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, metrics, plots.")
_MODE = flags.DEFINE_string("mode", "train", f"What to do: {', '.join(MODES)}.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "For preflight: chips, as v5e:4x4 or h100:8.")
_SEARCH = flags.DEFINE_bool("search", False, "For preflight: try all data x model splits.")
_JSON = flags.DEFINE_string("json", None, "For preflight, inspect: a file for the numbers.")
_TEXT = flags.DEFINE_string("text", None, "For explore: a file to read.")
_PROMPT = flags.DEFINE_string("prompt", None, "For sample: how the text begins; explore: the text.")
_LENGTH = flags.DEFINE_integer("length", 300, "For sample, explore: tokens to draw, to show.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "For sample: below 1 is more careful.")
_TOP_K = flags.DEFINE_integer("top_k", None, "For sample: only the k likeliest tokens.")
_TOP_P = flags.DEFINE_float("top_p", None, "For sample: only tokens of this probability in all.")
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 1, "For sample: texts to draw at once.")
_SEED = flags.DEFINE_integer("seed", 0, "For sample: of the draws.")
_SET = flags.DEFINE_string("set", None, "For sweep: which sets of the experiment, as a,b.")
_SEEDS = flags.DEFINE_string("seeds", "1", "For sweep: of the runs, as 1,2,3.")
_PARALLEL = flags.DEFINE_integer("parallel", 1, "For sweep, tune: runs at a time.")
_REPORT = flags.DEFINE_string("report", None, "For sweep, inspect: Markdown to renew tables in.")
_STUDY = flags.DEFINE_string("study", None, "For tune: a study of the paper, or a JSON file.")
_TRIALS = flags.DEFINE_integer("trials", 100, "For tune: of the study, all workers together.")
_STORAGE = flags.DEFINE_string("storage", None, "For tune: URL or journal file, if shared.")
_SAMPLER = flags.DEFINE_string("sampler", "gp", "For tune: gp, tpe or random.")
_PRUNE = flags.DEFINE_bool("prune", False, "For tune: stop trials that are below the median.")
_PROFILE = flags.DEFINE_string("profile_steps", None, "Trace steps N:M into <workdir>/profile.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, of many.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes make the run.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this one is, from 0.")
_PEER_TIMEOUT = flags.DEFINE_float("peer_timeout", 60.0, "Seconds until a process counts as lost.")


def main(argv: Sequence[str]) -> None:
    """Runs a mode; errors that are meant for people end with a message, not a traceback."""
    if len(argv) > 1:
        raise errors.UsageError(f"{argv[1]!r} is not a flag; write --name=value")
    if _MODE.value not in MODES:
        raise errors.UsageError(f"--mode={_MODE.value} is not known; use {', '.join(MODES)}")
    if _MODE.value == "preflight":
        # No accelerator of this machine is to be touched: only compilers are used.
        jax.config.update("jax_platforms", "cpu")
    from mogrifier_jax import distributed, progress, runtime

    logging.set_verbosity(logging.WARNING)  # While libraries start.
    runtime.use_compilation_cache()
    numbers = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    place = None if _MODE.value == "preflight" else distributed.find_place(*numbers)
    with distributed.session(place, peer_timeout=_PEER_TIMEOUT.value):
        progress.setup_logging()
        modes = dict(
            train=train,
            evaluate=evaluate,
            sample=sample,
            preflight=preflight,
            sweep=sweep,
            inspect=inspect,
            explore=explore,
            tune=tune,
        )
        try:
            modes[_MODE.value]()
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            raise errors.UsageError(
                f"--mode={_MODE.value} needs {error.name}, which is not installed; "
                f'pip install "mogrifier_jax[{EXTRAS[error.name]}]"'
            ) from None


def require_config() -> None:
    """Refuses to go on without an experiment."""
    if _CONFIG.value is None:
        raise errors.UsageError(
            "--config is missing; give an experiment, such as --config=experiments/pydoc.py"
        )
    path = config_filename().partition(":")[0]
    if not os.path.isfile(path):
        raise errors.UsageError(f"--config={path} is not a file; give one, as in experiments/")


def evaluate() -> None:
    """Scores the runs in --workdir (several: a,b,c) as --eval.* says."""
    from mogrifier_jax import scoring

    scoring.run((_WORKDIR.value or "").split(","), FLAGS.eval)


def sample() -> None:
    """Draws text from the run in --workdir."""
    from mogrifier_jax import sample as sampling

    sampling.run(
        _WORKDIR.value or "",
        prompt=_PROMPT.value,
        length=_LENGTH.value,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        num_samples=_NUM_SAMPLES.value,
        seed=_SEED.value,
    )


def preflight() -> None:
    """Compiles the experiment of --config for the chips of --topology, and tells what it costs."""
    require_config()
    if _TOPOLOGY.value is None:
        raise errors.UsageError("--topology is missing; give chips, such as --topology=v5e:2x2")
    from mogrifier_jax import preflight as preflights

    preflights.run(_CONFIG.value, _TOPOLOGY.value, search=_SEARCH.value, json_path=_JSON.value)


def sweep() -> None:
    """Runs the variants of --set with all --seeds in --workdir, and compares them."""
    require_config()
    if _SET.value is None:
        raise errors.UsageError("--set is missing; give sets of the experiment, as --set=rounds")
    from mogrifier_jax import sweeps

    sweeps.run(
        config_filename(),
        _SET.value,
        _SEEDS.value,
        _WORKDIR.value or default_workdir(),
        overrides=config_flags.get_override_values(FLAGS["config"]),
        parallel=_PARALLEL.value,
        report=_REPORT.value,
    )


def inspect() -> None:
    """Compares gates and losses of the runs in --workdir (several: a,b,c)."""
    from mogrifier_jax import inspection

    folders = (_WORKDIR.value or "").split(",")
    if not all(folders):
        raise errors.UsageError("--workdir is missing; give that of a run, or several: a,b,c")
    inspection.run(folders, document=_REPORT.value, json_path=_JSON.value)


def explore() -> None:
    """Writes a page that shows the runs in --workdir (several: a,b) reading a text."""
    from mogrifier_jax import explore as exploring

    exploring.run(
        (_WORKDIR.value or "").split(","),
        path=_TEXT.value,
        prompt=_PROMPT.value,
        length=_LENGTH.value,
    )


def train() -> None:
    """Trains the experiment of --config in --workdir, going on where it was."""
    require_config()
    from mogrifier_jax import train as training

    workdir = _WORKDIR.value or default_workdir()
    training.train_and_evaluate(_CONFIG.value, workdir, profile_steps=_PROFILE.value)
    if jax.process_count() == 1 and _CONFIG.value.data.name != "reverse_copy":
        from mogrifier_jax import sample as sampling

        print("A sample of what it has learnt:\n")
        sampling.run(workdir, length=400, temperature=0.7)


def tune() -> None:
    """Searches for the best settings of --config, or of dynamic evaluation of a trained run."""
    if _STUDY.value is None:
        raise errors.UsageError("--study is missing; give one, such as --study=appendix_a")
    from mogrifier_jax import tuning, tuning_dyneval

    options: dict[str, Any] = dict(
        num_trials=_TRIALS.value,
        parallel=_PARALLEL.value,
        storage=_STORAGE.value,
        sampler=_SAMPLER.value,
    )
    if _STUDY.value == "dyneval":
        tuning_dyneval.tune(_WORKDIR.value or "", FLAGS.eval, **options)
        return
    require_config()
    workdir = _WORKDIR.value or f"{default_workdir()}_tune"
    name = os.path.basename(default_workdir())
    tuning.tune(
        _CONFIG.value, workdir, study=_STUDY.value, name=name, prune=_PRUNE.value, **options
    )


def config_filename() -> str:
    """The value of --config as it was written."""
    flag: Any = FLAGS["config"]
    return flag.config_filename


def default_workdir() -> str:
    """runs/<experiment>, with the variant."""
    path, _, variant = config_filename().partition(":")
    name = os.path.splitext(os.path.basename(path))[0]
    return os.path.join("runs", "_".join([name, *variant.split(",")]).rstrip("_"))


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line; whatever is wrong with it becomes one sentence."""
    try:
        define_options()
        return FLAGS(list(argv))
    except (flags.Error, AttributeError, KeyError, OSError, errors.UsageError) as error:
        raise errors.UsageError(explain(error)) from None


def define_options() -> None:
    """Flags with options of their own: a misspelt one is an error as they are defined."""
    if "eval" in FLAGS:  # Of an earlier command line in this process.
        delattr(FLAGS, "eval")
    config_flags.DEFINE_config_dict("eval", options.evaluation(), "For evaluate: options.")


def explain(error: BaseException) -> str:
    """What people need of an error met while flags were parsed."""
    first = error
    while first.__context__:
        first = first.__context__
    if isinstance(first, errors.UsageError):  # Of an experiment file, wrapped in its traceback.
        return str(first)
    if isinstance(error, OSError):
        return f"--config cannot be read: {str(error).splitlines()[-1].strip()}"
    if isinstance(error, flags.Error):
        return str(error)
    while isinstance(error, BaseException):
        error = error.args[0]
    return "there is no such key: " + error.replace("\n", ". ")


def run() -> None:
    """The command line."""
    try:
        app.run(main, flags_parser=parse_flags)
    except (errors.UsageError, errors.Diverged, errors.Interrupted) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last checkpoint")


if __name__ == "__main__":
    run()

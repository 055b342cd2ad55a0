"""The command line: `python -m mogrifier_jax.main --config=experiments/pydoc.py`.

Only this module defines flags. Each mode is a function here that calls one function of another
module, which is imported when it is used. An error that people or their disks can cause ends with
one sentence and exit code 2.
"""

import contextlib
import errno
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # No traceback while libraries are imported.

try:
    import jax
except ValueError as error:  # It reads the environment as it is imported.
    if __name__ != "__main__":
        raise
    print(f"UsageError: JAX cannot start: {error}; correct the variable", file=sys.stderr)
    sys.exit(2)
from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from mogrifier_jax import configs, errors, hardware
from mogrifier_jax.evaluation import eval_options
from mogrifier_jax.training import compiler, logs

FLAGS = flags.FLAGS
MODES = "train evaluate sample export preflight sweep inspect explore tune config".split()
# The extra that a missing module belongs to. The cells need no extra.
EXTRAS = {
    **dict.fromkeys(("tensorflow_datasets", "importlib_resources"), "data"),
    **dict.fromkeys(("matplotlib", "tensorboardX"), "plot"),
    **dict.fromkeys(("greenlet", "optuna", "scipy", "torch"), "tune"),
}
_FULL = "make room, then the same command goes on from what is saved"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a place that you may use"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP), "give another name"),
    errno.EIO: "the disk may be failing; copy what is there, and go on elsewhere",
}

# How JAX's messages about devices begin, and what this program says instead.
DEVICES = {
    "RESOURCE_EXHAUSTED": "the devices have not enough memory ({}); lower the window, the batch "
    "size or what runs side by side, or use more devices",
    "Unable to initialize backend": "the devices cannot be used ({}); see JAX_PLATFORMS",
}

_CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment file, as file.py:variant.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, metrics, plots.")
_MODE = flags.DEFINE_string("mode", "train", f"What to do: {', '.join(MODES)}.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "For preflight: chips, as v5e:4x4 or h100:8.")
_SEARCH = flags.DEFINE_bool("search", False, "For preflight: try all data x model splits.")
_JSON = flags.DEFINE_string("json", None, "For preflight, inspect, config: a file for JSON.")
_TEXT = flags.DEFINE_string("text", None, "For explore: a file to read.")
_PROMPT = flags.DEFINE_string("prompt", None, "For sample: how the text begins; explore: the text.")
flags.DEFINE_integer("length", 300, "For sample, explore: tokens to draw, to show.")
flags.DEFINE_float("temperature", 1.0, "For sample: below 1 is more careful.")
flags.DEFINE_integer("top_k", None, "For sample: only the k likeliest tokens.")
flags.DEFINE_float("top_p", None, "For sample: only tokens of this probability in all.")
flags.DEFINE_float("min_p", None, "For sample: only with this share of the likeliest.")
flags.DEFINE_integer("num_samples", 1, "For sample: texts to draw at once.")
flags.DEFINE_integer("seed", 0, "For sample: of the draws.")
_OUTPUT = flags.DEFINE_string("output", None, "For export: the file, as name.safetensors.")
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
_CPU_DEVICES = flags.DEFINE_integer("cpu_devices", None, "CPU devices, if not one for each core.")
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
    if _MODE.value == "config":
        return show_config()
    if _MODE.value == "preflight" or (_MODE.value in ("sweep", "tune") and _PARALLEL.value > 1):
        # No accelerator of this machine is to be touched: preflight uses only compilers, and the
        # processes that run side by side need the accelerators for themselves.
        jax.config.update("jax_platforms", "cpu")
    from mogrifier_jax import distributed

    logging.set_verbosity(logging.WARNING)  # Libraries log a lot when they start.
    compiler.check_flags()
    compiler.use_compilation_cache()
    numbers = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    place = None if _MODE.value == "preflight" else distributed.find_place(*numbers)
    if _CPU_DEVICES.value is not None or (place is None and _MODE.value != "preflight"):
        # Processes of one run may share a host, so each has one device unless told otherwise.
        hardware.use_cores(_CPU_DEVICES.value)
    with distributed.session(place, peer_timeout=_PEER_TIMEOUT.value):
        logs.setup_logging()
        modes = (train, evaluate, sample, export, preflight, sweep, inspect, explore, tune)
        with sentences():
            check_outputs()
            {mode.__name__: mode for mode in modes}[_MODE.value]()


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turns errors of the machine into a sentence with a remedy; other exceptions are bugs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise errors.UsageError(
            f"--mode={_MODE.value} needs {error.name}, which is not installed; "
            f'pip install "mogrifier_jax[{EXTRAS[error.name]}]"'
        ) from None
    except BrokenPipeError:
        # The reader of the output has gone. The rest of the output is thrown away.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise errors.UsageError("nobody reads the output any more; what was saved stays") from None
    except RuntimeError as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        for start, what in DEVICES.items():
            if reason.startswith(start):
                raise errors.UsageError(what.format(reason)) from None
        raise
    except OSError as error:
        if error.errno is None:
            raise
        place = f" at {error.filename}" if error.filename else ""
        remedy = REMEDIES.get(error.errno, "see that the place is there and yours, then try again")
        raise errors.UsageError(f"{error.strerror}{place}; {remedy}") from None


def check_outputs() -> None:
    """Refuses places for results that cannot be written to, before there are results."""
    from mogrifier_jax.training import workdirs

    workdirs.check_output(_JSON.value, "--json")
    workdirs.check_output(_OUTPUT.value, "--output")
    workdirs.check_output(_REPORT.value, "--report")
    workdirs.check_output(FLAGS.eval.output, "--eval.output")


def show_config() -> None:
    """Prints the config of --config as it would run, or writes it to --json."""
    require_config()
    config = configs.base(_CONFIG.value)
    configs.check(config)
    if _JSON.value:
        from mogrifier_jax.training import workdirs

        workdirs.check_output(_JSON.value, "--json")
        workdirs.replace_text(_JSON.value, config.to_json_best_effort(indent=2) + "\n")
        return
    for name, value in sorted(configs.flatten(config).items()):
        print(f"{name} = {value!r}")


def require_config() -> None:
    """Refuses to go on without an experiment."""
    if FLAGS["config"].present and not isinstance(_CONFIG.value, config_dict.ConfigDict):
        explain_config(config_filename())
    if _CONFIG.value is None:
        raise errors.UsageError(
            "--config is missing; give an experiment, such as --config=experiments/pydoc.py"
        )
    path = config_filename().partition(":")[0]
    if not os.path.isfile(path):
        raise errors.UsageError(f"--config={path} is not a file; give one, as in experiments/")


def evaluate() -> None:
    """Scores the runs in --workdir (several: a,b,c) as --eval.* says."""
    from mogrifier_jax.evaluation import scoring

    scoring.run(folders(), FLAGS.eval)


def sample() -> None:
    """Draws text from the run in --workdir."""
    from mogrifier_jax.evaluation import trained

    options: dict[str, Any] = {name: FLAGS[name].value for name in trained.Sampling._fields}
    first = jax.process_index() == 0  # All processes draw the same, and one prints it.
    with contextlib.nullcontext() if first else contextlib.redirect_stdout(None):
        trained.print_samples(_WORKDIR.value or "", trained.Sampling(**options), _PROMPT.value)


def export() -> None:
    """Writes the best weights of the run in --workdir to one file."""
    from mogrifier_jax.evaluation import pretrained

    pretrained.export(_WORKDIR.value or "", _OUTPUT.value)


def preflight() -> None:
    """Compiles the experiment of --config for the chips of --topology, and tells what it costs."""
    require_config()
    if _TOPOLOGY.value is None:
        raise errors.UsageError("--topology is missing; give chips, such as --topology=v5e:2x2")
    from mogrifier_jax.preflight import estimates as preflights

    preflights.run(_CONFIG.value, _TOPOLOGY.value, search=_SEARCH.value, json_path=_JSON.value)


def sweep() -> None:
    """Runs the variants of --set with all --seeds in --workdir, and compares them."""
    require_config()
    if _SET.value is None:
        raise errors.UsageError("--set is missing; give sets of the experiment, as --set=rounds")
    from mogrifier_jax.analysis import sweeps

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
    from mogrifier_jax.analysis import inspection

    if not all(folders()):
        raise errors.UsageError("--workdir is missing; give that of a run, or several: a,b,c")
    inspection.run(folders(), document=_REPORT.value, json_path=_JSON.value)


def explore() -> None:
    """Writes a page that shows the runs in --workdir (several: a,b) reading a text."""
    from mogrifier_jax.analysis import explore as exploring

    exploring.run(folders(), path=_TEXT.value, prompt=_PROMPT.value, length=FLAGS.length)


def train() -> None:
    """Trains the experiment of --config in --workdir, going on where it was."""
    require_config()
    from mogrifier_jax.training import train as training

    workdir = _WORKDIR.value or default_workdir()
    training.train_and_evaluate(_CONFIG.value, workdir, profile_steps=_PROFILE.value)
    from mogrifier_jax.data import tasks

    if jax.process_count() == 1 and not tasks.kind_of(_CONFIG.value.data).encoder_decoder:
        from mogrifier_jax.evaluation import trained

        print("A sample of what it has learnt:\n")
        trained.print_samples(workdir, trained.Sampling(length=400, temperature=0.7))


def tune() -> None:
    """Searches for the best settings of --config, or of dynamic evaluation of a trained run."""
    if _STUDY.value is None:
        raise errors.UsageError("--study is missing; give one, such as --study=appendix_a")
    from mogrifier_jax.tuning import worker

    options: dict[str, Any] = dict(
        num_trials=_TRIALS.value, storage=_STORAGE.value, sampler=_SAMPLER.value
    )
    worker.check_numbers(_TRIALS.value, _PARALLEL.value)
    if _STUDY.value == "dyneval":
        run = _WORKDIR.value or ""
        if _PARALLEL.value > 1:
            worker.start_workers(sys.argv[1:], worker.dyneval_workdir(run), _PARALLEL.value)
        else:
            worker.tune_dyneval(run, FLAGS.eval, **options)
        return
    require_config()
    workdir = _WORKDIR.value or f"{default_workdir()}_tune"
    name = os.path.basename(default_workdir())
    if _PARALLEL.value > 1:
        worker.check_study(_STUDY.value)
        worker.start_workers(sys.argv[1:], workdir, _PARALLEL.value)
    else:
        worker.tune(
            _CONFIG.value, workdir, study=_STUDY.value, name=name, prune=_PRUNE.value, **options
        )


def folders() -> list[str]:
    """The values of --workdir; a comma may also be part of a name."""
    value = _WORKDIR.value or ""
    return [value] if os.path.isdir(value) else value.split(",")


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
    name = ""
    for flag, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        flag, equals, value = flag.partition("=")
        if not name and flag in ("--config", "-config"):
            name = value if equals else following
    if os.path.exists(path := name.partition(":")[0]) and not os.path.isfile(path):
        raise errors.UsageError(f"--config={path} is not a file; give one, as in experiments/")
    try:
        define_options()
        return FLAGS(list(argv))
    except (Exception, SystemExit) as error:
        explain_config(name)
        known = AttributeError | KeyError | OSError | ValueError | TypeError | flags.Error
        if not isinstance(error, known):
            raise
        raise errors.UsageError(explain(error)) from None


def explain_config(name: str) -> None:
    """Refuses an experiment file that cannot make a config, with the line that is to blame."""
    if os.path.isfile(name.partition(":")[0]):
        configs.load_config(name)


def define_options() -> None:
    """Defines --eval.*; it reads the command line, so a misspelt option is an error here."""
    if "eval" in FLAGS:  # It is there if this process has parsed a command line before.
        delattr(FLAGS, "eval")

    config_flags.DEFINE_config_dict("eval", eval_options.defaults(), "For evaluate: options.")


def explain(error: BaseException) -> str:
    """The part of an error in the flags that people need."""
    first = error
    while first.__context__:
        first = first.__context__
    if isinstance(first, errors.UsageError):  # An experiment file raised it.
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with sentences():
            app.run(main, flags_parser=parse_flags)
    except (errors.UsageError, errors.Diverged, errors.Interrupted) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    run()

"""The command line: `python -m mogrifier_jax.main --config=experiments/pydoc.py`.

Only this module defines flags. Each mode is a function here that calls one function of another
module, which is imported when it is used. An error that people or their disks can cause ends with
one sentence and exit code 2.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # No traceback while libraries are imported.
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # Closed: the next file that is opened would get what is printed.
            os.open(os.devnull, os.O_RDWR)

try:
    import jax
except ValueError as error:  # It reads the environment as it is imported.
    if __name__ != "__main__":
        raise
    print(f"UsageError: JAX cannot start: {error}; correct the variable", file=sys.stderr)
    sys.exit(2)
from absl import app, flags, logging
from ml_collections import config_dict, config_flags

import mogrifier_jax
from mogrifier_jax import configs, errors, files, hardware
from mogrifier_jax.evaluation import eval_options
from mogrifier_jax.training import compiler, logs, signals

FLAGS = flags.FLAGS


class Mode(NamedTuple):
    """What a mode does, and the flags of an example."""

    does: str
    example: str


MODES = {
    "train": Mode(
        "trains the experiment of --config in --workdir; goes on where it was",
        "--config=experiments/pydoc.py --workdir=runs/pydoc",
    ),
    "evaluate": Mode(
        "scores the runs in --workdir as --eval.* says",
        "--workdir=runs/pydoc --eval.methods=deterministic,mc",
    ),
    "sample": Mode(
        "draws text from the run in --workdir", '--workdir=runs/pydoc --prompt="The " --length=200'
    ),
    "export": Mode(
        "writes the best weights of the run in --workdir to one file",
        "--workdir=runs/pydoc --output=pydoc.safetensors",
    ),
    "preflight": Mode(
        "compiles the experiment of --config for the chips of --topology, and says what it costs",
        "--config=experiments/enwik8.py --topology=v5e:2x2",
    ),
    "sweep": Mode(
        "runs the variants of --set with all --seeds in --workdir, and compares them",
        "--config=experiments/ablation.py:tiny --set=rounds --seeds=1,2",
    ),
    "inspect": Mode(
        "compares gates and losses of the runs in --workdir",
        "--workdir=runs/pydoc,runs/pydoc_lstm --json=gates.json",
    ),
    "explore": Mode(
        "writes a page that shows the runs in --workdir reading a text",
        '--workdir=runs/pydoc --prompt="The lambda form"',
    ),
    "tune": Mode(
        "searches for the best settings of --config, or of dynamic evaluation of a run",
        "--config=experiments/ptb.py --study=appendix_a --trials=20",
    ),
    "config": Mode(
        "prints the config of --config as it would run, or writes it to --json",
        "--config=experiments/pydoc.py:tiny",
    ),
}
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

# Settings of JAX that would give a run other random numbers, or other dtypes.
NUMBERS = {
    "jax_threefry_partitionable": True,
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
}

PARENT = "MOGRIFIER_PARENT"  # The variable with the number of the process that started this one.

# How JAX's messages about devices begin, and what this program says instead.
DEVICES = {
    "RESOURCE_EXHAUSTED": "the devices have not enough memory ({}); lower the window, the batch "
    "size or what runs side by side, or use more devices",
    "Unable to initialize backend": "the devices cannot be used ({}); see JAX_PLATFORMS",
}

# The modes that have a flag, by its name. A mode refuses the flags of others.
MODES_OF: dict[str, tuple[str, ...]] = {}


def define(
    kind: Callable[..., Any], name: str, default: Any, modes: Iterable[str], text: str
) -> Any:
    """Defines a flag of these modes."""
    MODES_OF[name] = tuple(modes)
    return kind(name, default, text)


TEXT, WHOLE, REAL, SWITCH = (
    flags.DEFINE_string,
    flags.DEFINE_integer,
    flags.DEFINE_float,
    flags.DEFINE_bool,
)
CONFIGURED = ("train", "preflight", "sweep", "tune", "config")
PLACED = tuple(mode for mode in MODES if mode not in ("preflight", "config"))
TUNED_DYNEVAL = "tune --study=dyneval"  # A mode of its own: a trained run has its config.
ENSEMBLE = "evaluate --eval.ensemble"
_CONFIG = define(
    config_flags.DEFINE_config_file,
    "config",
    None,
    CONFIGURED,
    "the experiment, as file.py:variant; --config.KEY=VALUE changes a key",
)
_WORKDIR = define(
    TEXT, "workdir", None, (*PLACED, TUNED_DYNEVAL), "the folder of the run; some take a,b,c"
)
_MODE = define(TEXT, "mode", "train", (*MODES, TUNED_DYNEVAL, ENSEMBLE), "what to do")
_TOPOLOGY = define(TEXT, "topology", None, ["preflight"], "the chips, as v5e:4x4 or h100:8")
_SEARCH = define(SWITCH, "search", False, ["preflight"], "try all data x model splits")
_JSON = define(TEXT, "json", None, ["preflight", "inspect", "config"], "a file for the numbers")
_TEXT = define(TEXT, "text", None, ["explore"], "a file to read")
_PROMPT = define(TEXT, "prompt", None, ["sample", "explore"], "how the text begins, or the text")
define(WHOLE, "length", 300, ["sample", "explore"], "how many tokens to draw, or to show")
define(REAL, "temperature", 1.0, ["sample"], "divides the logits: below 1 is more careful")
define(WHOLE, "top_k", None, ["sample"], "draw only from the k likeliest tokens")
define(REAL, "top_p", None, ["sample"], "draw only from the likeliest tokens of this probability")
define(
    REAL, "min_p", None, ["sample"], "draw only tokens at least min_p times as likely as the best"
)
define(WHOLE, "num_samples", 1, ["sample"], "how many texts to draw at once")
define(WHOLE, "seed", 0, ["sample"], "of the draws")
_OUTPUT = define(TEXT, "output", None, ["export"], "the file, as name.safetensors")
_SET = define(TEXT, "set", None, ["sweep"], "which sets of the experiment to run, as a,b")
_SEEDS = define(TEXT, "seeds", "1", ["sweep"], "the seeds of the runs, as 1,2,3")
_PARALLEL = define(
    WHOLE, "parallel", 1, ["sweep", "tune", TUNED_DYNEVAL], "how many runs at a time"
)
_REPORT = define(TEXT, "report", None, ["sweep", "inspect"], "a Markdown file to renew tables in")
_STUDY = define(
    TEXT, "study", None, ["tune", TUNED_DYNEVAL], "a study of the paper, dyneval, or a JSON file"
)
_TRIALS = define(
    WHOLE, "trials", 100, ["tune", TUNED_DYNEVAL], "how many trials, of all workers together"
)
_STORAGE = define(
    TEXT, "storage", None, ["tune", TUNED_DYNEVAL], "a URL or a journal file, if workers share it"
)
_SAMPLER = define(TEXT, "sampler", "gp", ["tune", TUNED_DYNEVAL], "gp, tpe or random")
_PRUNE = define(SWITCH, "prune", False, ["tune"], "stop trials that are below the median")
_PROFILE = define(TEXT, "profile_steps", None, ["train"], "trace steps N:M into <workdir>/profile")
EVERYWHERE = (*PLACED, TUNED_DYNEVAL, ENSEMBLE)
_CPU_DEVICES = define(
    WHOLE,
    "cpu_devices",
    None,
    (*EVERYWHERE, "preflight"),
    "CPU devices; one for each core if unset",
)
_COORDINATOR = define(TEXT, "coordinator", None, EVERYWHERE, "host:port of process 0, of many")
_NUM_PROCESSES = define(WHOLE, "num_processes", None, EVERYWHERE, "how many processes make the run")
_PROCESS_ID = define(WHOLE, "process_id", None, EVERYWHERE, "which of them this one is, from 0")
_PEER_TIMEOUT = define(REAL, "peer_timeout", 60.0, EVERYWHERE, "seconds until a process is lost")
MODES_OF["eval"] = ("evaluate", TUNED_DYNEVAL, ENSEMBLE)
# What people mean by a flag that their mode does not have, if it has another name there.
MEANT = {
    ("evaluate", "prompt"): "eval.text",
    ("evaluate", "num_samples"): "eval.samples",
    ("evaluate", "report"): "eval.output",
    ("evaluate", "json"): "eval.output",
    ("sample", "text"): "prompt",
    ("sample", "eval.text"): "prompt",
    ("sample", "eval.samples"): "num_samples",
    ("sweep", "seed"): "seeds",
    ("sweep", "config.seed"): "seeds",
    ("train", "seeds"): "config.seed",
    ("explore", "eval.window"): "length",
    ("inspect", "output"): "json",
}


def main(argv: Sequence[str]) -> None:
    """Runs a mode; errors that are meant for people end with a message, not a traceback."""
    if len(argv) > 1:
        raise errors.UsageError(f"{argv[1]!r} is not a flag; write --name=value")
    if _MODE.value not in MODES:
        raise errors.UsageError(f"--mode={_MODE.value} is not known; use {', '.join(MODES)}")
    if _MODE.value == "config":
        return show_config()
    fix_numbers()
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


def fix_numbers() -> None:
    """Sets what JAX draws and computes with, so that a run never depends on the environment."""
    for name, value in NUMBERS.items():
        if getattr(jax.config, name) != value:
            logging.warning(
                "%s=%s is not used: a run has %s", name.upper(), getattr(jax.config, name), value
            )
            jax.config.update(name, value)


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
        # The reader of the output has gone.
        raise errors.UsageError("stdout was closed; what was saved is kept") from None
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
            worker.start_workers(flags_of_worker(), worker.dyneval_workdir(run), _PARALLEL.value)
        else:
            worker.tune_dyneval(run, FLAGS.eval, **options)
        return
    require_config()
    workdir = _WORKDIR.value or f"{default_workdir()}_tune"
    name = os.path.basename(default_workdir())
    if _PARALLEL.value > 1:
        worker.check_study(_STUDY.value)
        worker.start_workers(flags_of_worker(), workdir, _PARALLEL.value)
    else:
        worker.tune(
            _CONFIG.value, workdir, study=_STUDY.value, name=name, prune=_PRUNE.value, **options
        )


def flags_of_worker() -> list[str]:
    """The flags of this command for each of the workers that it starts."""
    given = read_line(FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False))
    return [f"--{name}={value}" for name, value in given if name != "parallel"]


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
    check_flagfiles(argv[1:], set())
    given = read_line(FLAGS.read_flags_from_files(list(argv[1:]), force_gnu=False))
    if helps := {"help", "h", "helpshort", "helpfull", "version"} & {name for name, _ in given}:
        shown = dict(given).get("mode")
        print(
            f"mogrifier_jax {mogrifier_jax.__version__}" if "version" in helps else help_on(shown)
        )
        sys.exit(0)
    check_line(given)
    name = dict(given).get("config", "")
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


def check_flagfiles(arguments: Iterable[str], seen: set[str]) -> None:
    """Refuses a --flagfile that is not a file, before it is opened; also in other such files."""
    for name, path in read_line(arguments):
        if name == "flagfile" and path and path not in seen:
            lines = files.read_text(os.path.expanduser(path), "give a file of flags").splitlines()
            check_flagfiles([line for line in lines if line.startswith("-")], seen | {path})


def read_line(arguments: Iterable[str]) -> list[tuple[str, str]]:
    """Names and values of the flags of a command line, whether or not they are known."""
    left, found = list(arguments), []
    while left and left[0].startswith("-") and left[0] != "--":
        name, equals, value = left.pop(0).lstrip("-").partition("=")
        if not equals and name not in FLAGS and name.startswith("no") and name[2:] in FLAGS:
            name, value = name[2:], "False"
        elif not equals and name in FLAGS and FLAGS[name].boolean:
            value = "True"
        elif not equals and left and not left[0].startswith("-"):
            value = left.pop(0)
        found.append((name, value))
    return found


def check_line(given: Sequence[tuple[str, str]]) -> None:
    """Refuses flags that the mode does not have, and flags that are given twice."""
    values = dict(given)
    for name, value in given:
        if value != values[name]:
            both = "" if name == "storage" else f", as {value} and as {values[name]}"
            raise errors.UsageError(f"--{name} is given twice{both}; give it once")
    mode = values.get("mode", "train")
    if mode not in MODES:
        return  # `main` refuses it.
    if mode == "tune" and values.get("study") == "dyneval":
        mode = TUNED_DYNEVAL
    if mode == "evaluate" and values.get("eval.ensemble"):
        mode = ENSEMBLE
    for name, value in given:
        section = name.partition(".")[0]
        has = section not in MODES_OF or mode in MODES_OF[section]
        if mode == ENSEMBLE and section == "eval":
            has = name in ("eval.ensemble", "eval.output")
        if not has or (mode, name) == ("sweep", "config.seed"):  # A sweep sets the seeds itself.
            raise errors.UsageError(refusal(mode, name, value))
    if values.get("eval.text") and "eval.splits" in values:
        raise errors.UsageError(
            "--eval.splits is of the corpus, and --eval.text scores a file; give one of them"
        )


def refusal(mode: str, name: str, value: str) -> str:
    """Says that a mode does not have a flag, and which one was probably meant."""
    start = f"--{name} is not a flag of --mode={mode}"
    known = [flag for flag in flags_of(mode) if flag not in ("config", "eval")]
    if mode in MODES_OF["config"]:
        known += [f"config.{key}" for key in configs.keys()]
    if mode in MODES_OF["eval"] and mode != ENSEMBLE:
        known += [f"eval.{key}" for key in eval_options.OPTIONS]
    leaf = name.rpartition(".")[2]
    near = [flag for flag in known if flag.rpartition(".")[2] == leaf]
    meant = MEANT.get((mode, name)) or min(near, key=lambda flag: flag.count("."), default=None)
    if meant:
        return f"{start}; did you mean --{meant}={value}?"
    if name.startswith("config.") and mode in PLACED:
        return f"{start}: the run in --workdir has its own config; leave it out"
    others = [f"--mode={other}" for other in MODES_OF[name.partition(".")[0]] if other in MODES]
    return f"{start}; leave it out, or use {' or '.join(others)}"


def flags_of(mode: str) -> list[str]:
    """The names of the flags that a mode has."""
    return [name for name, modes in MODES_OF.items() if mode in modes and name != "mode"]


def help_on(mode: str | None) -> str:
    """The help: of one mode, or of all."""
    lines = ["python -m mogrifier_jax.main --mode=MODE --name=value ...", ""]
    shown = [mode] if mode in MODES else list(MODES)
    for name in shown:
        lines += [f"--mode={name} {MODES[name].does}."]
        lines += [f"    python -m mogrifier_jax.main --mode={name} {MODES[name].example}"]
        own = flags_of(name) + ["eval"] * (name == "tune")
        lines += [_describe_flag(flag) for flag in own if flag not in PROCESSES]
        lines += [""]
    lines += ["All modes that use devices have these as well, to run on several hosts."]
    lines += [_describe_flag(flag) for flag in PROCESSES]
    lines += ["", "--flagfile=FILE has more flags. --mode=config shows every key of a config."]
    return "\n".join([*lines, "--version shows the version. docs/ has more on each mode."])


PROCESSES = ("cpu_devices", "coordinator", "num_processes", "process_id", "peer_timeout")


def _describe_flag(name: str) -> str:
    if name == "eval":
        return (
            "      --eval.KEY        an option of evaluation; evaluation/eval_options.py lists them"
        )
    flag = FLAGS[name]
    default = "" if flag.default in (None, "") or flag.boolean else f" (default: {flag.default})"
    return f"      --{name:<15} {flag.help}{default}"


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
    signal.signal(signal.SIGTERM, signals.interrupt)
    prepare_streams()
    try:
        end_with_parent()
        with sentences():
            app.run(run_mode, flags_parser=parse_flags)
    except (errors.UsageError, errors.Diverged, errors.Interrupted) as error:
        end(f"{type(error).__name__}: {error}", error.exit_code)
    except Exception as error:
        if not signals.interrupted.is_set():
            raise
        # SIGTERM met a library, perhaps while it was imported, and this is what came of it.
        end(f"Interrupted: stopped ({type(error).__name__})", errors.Interrupted.exit_code)
    except KeyboardInterrupt:
        end("interrupted; the same command goes on from the last checkpoint", 128 + signal.SIGINT)
    finally:
        signals.interrupted.clear()


def end_with_parent() -> None:
    """Stops this process if the one that started it is killed: a sweep, a study or a launcher."""
    parent = os.environ.get(PARENT, "")
    os.environ[PARENT] = str(os.getpid())  # Of the processes that this one starts.
    if not parent.isdecimal():
        return
    if os.getppid() != int(parent):
        if not os.path.exists("/proc/self") or os.path.exists(f"/proc/{parent}"):
            return  # It was started by another program in between.
        os.kill(os.getpid(), signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def run_mode(argv: Sequence[str]) -> None:
    """Runs `main`, and writes out all that was printed, which may meet a full disk."""
    main(argv)
    sys.stdout.flush()


def prepare_streams() -> None:
    """Makes output possible in any environment, before there is any."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:  # It was closed.
            setattr(sys, name, open(number, "w", closefd=False))
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # Of what ASCII, or Latin-1, lacks.
    if "MPLBACKEND" in os.environ:  # Pictures go to files, and this one may be unknown.
        os.environ["MPLBACKEND"] = "agg"


def end(message: str, code: int) -> NoReturn:
    """Ends with a message, if it can be shown, and in any case with this code."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # What cannot be written is thrown away, or the code would be another.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


if __name__ == "__main__":
    run()

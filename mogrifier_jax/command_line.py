"""The flags of each mode: their definitions, the help, and the refusal of a mode's unknown flags.

`main.py` reads the values. No other module defines or reads flags, so everything else can be called
from a test or a notebook.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_dict, config_flags

import mogrifier_jax
from mogrifier_jax import config_keys, configs, errors, files
from mogrifier_jax.evaluation import eval_options

FLAGS = flags.FLAGS
COMMAND = "python -m mogrifier_jax"


class Mode(NamedTuple):
    """What a mode does, and the flags of an example."""

    description: str
    example: str


MODES = {
    "train": Mode(
        "trains the experiment of --config in --workdir, and resumes a run that was stopped",
        "--config=pydoc --workdir=runs/pydoc",
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
        "compiles the experiment of --config for the chips of --topology, and estimates its cost",
        "--config=enwik8 --topology=v5e:2x2",
    ),
    "sweep": Mode(
        "runs the variants of --set with all --seeds in --workdir, and compares them",
        "--config=ablation:tiny --set=rounds --seeds=1,2",
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
        "--config=ptb --study=appendix_a --trials=20",
    ),
    "config": Mode(
        "prints the config of --config with the meaning of every key, or lists the experiments",
        "--config=pydoc:tiny",
    ),
}
# These two have other flags than their modes, so they are listed like modes.
TUNED_DYNEVAL = "tune --study=dyneval"
ENSEMBLE = "evaluate --eval.ensemble"
WITH_CONFIG = ("train", "preflight", "sweep", "tune", "config")
WITH_WORKDIR = (*(m for m in MODES if m not in ("preflight", "config")), TUNED_DYNEVAL)
TUNING = ("tune", TUNED_DYNEVAL)
ON_DEVICES = (*WITH_WORKDIR, ENSEMBLE)


class Flag(NamedTuple):
    """How a flag is defined, and the modes that have it."""

    define: Callable[..., Any]
    default: Any
    modes: Sequence[str]
    help: str


_TEXT, _WHOLE, _REAL, _SWITCH = (
    flags.DEFINE_string,
    flags.DEFINE_integer,
    flags.DEFINE_float,
    flags.DEFINE_bool,
)
TABLE = {
    "config": Flag(
        config_flags.DEFINE_config_file,
        None,
        WITH_CONFIG,
        "the experiment, as name:variant or path.py:variant",
    ),
    "workdir": Flag(_TEXT, None, WITH_WORKDIR, "the folder of the run; some modes take a,b,c"),
    "mode": Flag(_TEXT, "train", (*MODES, TUNED_DYNEVAL, ENSEMBLE), "what to do"),
    "topology": Flag(_TEXT, None, ["preflight"], "the chips, as v5e:4x4 or h100:8"),
    "search": Flag(_SWITCH, False, ["preflight"], "try all data x model splits"),
    "json": Flag(_TEXT, None, ["preflight", "inspect", "config"], "a file for the numbers"),
    "text": Flag(_TEXT, None, ["explore"], "a file to read"),
    "prompt": Flag(_TEXT, None, ["sample", "explore"], "how the text begins, or the text"),
    "length": Flag(
        _WHOLE, 300, ["sample", "explore"], "how many tokens to draw, or to show (at most 2,000)"
    ),
    "temperature": Flag(_REAL, 1.0, ["sample"], "divides the logits: below 1 is more conservative"),
    "top_k": Flag(_WHOLE, None, ["sample"], "draw only from the k likeliest tokens"),
    "top_p": Flag(_REAL, None, ["sample"], "draw only from the likeliest tokens of this mass"),
    "min_p": Flag(
        _REAL, None, ["sample"], "draw only tokens at least min_p times as likely as the best"
    ),
    "num_samples": Flag(_WHOLE, 1, ["sample"], "how many texts to draw at once"),
    "seed": Flag(_WHOLE, 0, ["sample"], "of the draws"),
    "output": Flag(_TEXT, None, ["export"], "the file, as name.safetensors"),
    "set": Flag(_TEXT, None, ["sweep"], "which sets of the experiment to run, as a,b"),
    "seeds": Flag(_TEXT, "1", ["sweep"], "the seeds of the runs, as 1,2,3"),
    "parallel": Flag(_WHOLE, 1, ["sweep", *TUNING], "how many runs at a time"),
    "report": Flag(_TEXT, None, ["sweep", "inspect"], "a Markdown file whose tables to update"),
    "study": Flag(_TEXT, None, TUNING, "a study of the paper, dyneval, or a JSON file"),
    "trials": Flag(_WHOLE, 100, TUNING, "how many trials, of all workers together"),
    "storage": Flag(_TEXT, None, TUNING, "a URL or a journal file that workers share"),
    "sampler": Flag(_TEXT, "gp", TUNING, "gp, tpe or random"),
    "prune": Flag(_SWITCH, False, ["tune"], "stop trials that are below the median"),
    "profile_steps": Flag(_TEXT, None, ["train"], "trace steps N:M into <workdir>/profile"),
    "cpu_devices": Flag(
        _WHOLE, None, (*ON_DEVICES, "preflight"), "CPU devices; one per core unless set"
    ),
    "coordinator": Flag(_TEXT, None, ON_DEVICES, "host:port of process 0 of several"),
    "num_processes": Flag(_WHOLE, None, ON_DEVICES, "how many processes make up the run"),
    "process_id": Flag(_WHOLE, None, ON_DEVICES, "which of them this one is, from 0"),
    "peer_timeout": Flag(_REAL, 60.0, ON_DEVICES, "seconds of silence until a process is lost"),
}
PROCESSES = ("cpu_devices", "coordinator", "num_processes", "process_id", "peer_timeout")
# The modes that have a flag, by its name. A mode refuses the flags of others.
MODES_OF = {name: tuple(flag.modes) for name, flag in TABLE.items()}
MODES_OF["eval"] = ("evaluate", TUNED_DYNEVAL, ENSEMBLE)
# Flags of absl that would be ignored.
LOGGING = (
    *("verbosity", "v", "logger_levels", "log_dir", "logtostderr", "alsologtostderr"),
    *("stderrthreshold", "showprefixforinfo"),
)
# Flags of absl that another one of them reads.
PROFILING = ("profile_file", "use_cprofile_for_profiling")
# What people probably mean by a flag that their mode has under another name.
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


class ExperimentParser(flags.ArgumentParser):
    """Makes the config of `--config`; the experiment file is executed once."""

    def parse(self, argument: str) -> config_dict.ConfigDict:
        """The config of "name:variant", locked."""
        return configs.load_config(argument).lock()

    def flag_type(self) -> str:
        """The kind of flag, for absl."""
        return "experiment"


for _name, _flag in TABLE.items():
    _flag.define(_name, _flag.default, _flag.help)
FLAGS["config"].parser = ExperimentParser()


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line; whatever is wrong with it becomes a `UsageError`."""
    check_flagfiles(argv[1:], set())
    try:
        given = split_arguments(FLAGS.read_flags_from_files(list(argv[1:]), force_gnu=False))
    except flags.Error as error:  # Such as a --flagfile without a name.
        raise errors.UsageError(f"{error}; write --name=value") from None
    names = {name for name, value in given if value.lower() not in ("false", "0")}
    if "version" in names:
        print(f"mogrifier_jax {mogrifier_jax.__version__}")
        sys.exit(0)
    if names & {"help", "h", "?", "helpshort", "helpfull", "helpxml"}:
        print(make_help(dict(given).get("mode")))
        sys.exit(0)
    check_arguments(given)
    try:
        define_eval_flags()
        return FLAGS(list(argv))
    except (AttributeError, KeyError, OSError, ValueError, TypeError, flags.Error) as error:
        raise errors.UsageError(_explain(error)) from None


def define_eval_flags() -> None:
    """Defines --eval.*, which reads the command line, so that a misspelt option is an error."""
    if "eval" in FLAGS:  # This process has parsed a command line before.
        delattr(FLAGS, "eval")
    config_flags.DEFINE_config_dict("eval", eval_options.defaults(), "options of evaluation")


def check_flagfiles(arguments: Iterable[str], seen: set[str]) -> None:
    """Refuses a --flagfile that is not a file before it is opened, also inside other such files."""
    for name, path in split_arguments(arguments):
        if name == "flagfile" and path and path not in seen:
            lines = files.read_text(os.path.expanduser(path), "give a file of flags").splitlines()
            check_flagfiles([line for line in lines if line.startswith("-")], seen | {path})


def split_arguments(arguments: Iterable[str]) -> list[tuple[str, str]]:
    """Names and values of the flags of a command line, whether or not they are defined."""
    left, given = list(arguments), []
    while left and left[0].startswith("-") and left[0] != "--":
        name, equals, value = left.pop(0).lstrip("-").partition("=")
        if not equals and name not in FLAGS and name.startswith("no") and name[2:] in FLAGS:
            name, value = name[2:], "False"
        elif not equals and name in FLAGS and FLAGS[name].boolean:
            value = "True"
        elif not equals and left and not left[0].startswith("-"):
            value = left.pop(0)
        given.append((name, value))
    return given


def check_arguments(given: Sequence[tuple[str, str]]) -> None:
    """Refuses flags that the mode does not have, and flags that are given twice."""
    values = dict(given)
    for name, value in given:
        if value != values[name]:
            both = "" if name == "storage" else f", as {value} and as {values[name]}"
            raise errors.UsageError(f"--{name} is given twice{both}; give it once")
    mode = values.get("mode", "train")
    if mode not in MODES:
        raise errors.UsageError(f"--mode={mode} is unknown; use {', '.join(MODES)}")
    if mode == "tune" and values.get("study") == "dyneval":
        mode = TUNED_DYNEVAL
    if mode == "evaluate" and values.get("eval.ensemble"):
        mode = ENSEMBLE
    for name, value in given:
        section = name.partition(".")[0]
        has = section not in MODES_OF or mode in MODES_OF[section]
        option = name.removeprefix("eval.")
        if section == "eval" and (mode == ENSEMBLE or option in eval_options.OPTIONS):
            has = has and option in eval_options_of(mode)
        if not has or (mode, name) == ("sweep", "config.seed"):  # A sweep sets the seeds itself.
            raise errors.UsageError(_refuse(mode, name, value))
        if name in PROFILING and "run_with_profiling" not in values:
            raise errors.UsageError(f"--{name} has no effect without --run_with_profiling")
        if name in LOGGING:
            raise errors.UsageError(
                f"--{name} has no effect, because all log lines go to stderr; leave it out"
            )
        if name == "undefok":  # A flag of absl, which ignores the flags that it names.
            raise errors.UsageError(
                f"--undefok={value} would let unknown flags be ignored; leave out both"
            )
    if mode == "evaluate":
        _check_methods(values)
    if "sampler" in values and values.get("storage", "").startswith("vizier://"):
        raise errors.UsageError(
            f"--sampler={values['sampler']} has no effect, because a Vizier service has its own; "
            "leave it out"
        )
    if values.get("eval.text") and "eval.splits" in values:
        raise errors.UsageError(
            "--eval.splits scores the corpus, and --eval.text scores a file; give one of them"
        )


def _check_methods(values: Mapping[str, str]) -> None:
    """Refuses options of evaluation that nothing reads because of the values of others."""
    asked = values.get("eval.methods", eval_options.OPTIONS["methods"].default)
    adapts = any(method in eval_options.READ_BY["dyneval"] for method in asked.split(","))
    if "eval.power" in values and values.get("eval.average") != "power":
        raise errors.UsageError("--eval.power is read only with --eval.average=power; give both")
    for name in values:
        if not asked and name.startswith("eval.") and name not in ("eval.methods", "eval.output"):
            raise errors.UsageError(
                f"--{name} has no effect, because --eval.methods= only shows the results of "
                "earlier evaluations; leave it out, or give methods"
            )
        if name in ("eval.source_dir", "eval.data_dir") and values.get("eval.text") and not adapts:
            raise errors.UsageError(
                f"--{name} has no effect, because --eval.text is scored without the corpus; leave "
                "it out"
            )
        section, _, key = name.partition(".")
        readers = eval_options.readers(key) if section == "eval" else ()
        if readers and not set(readers) & set(asked.split(",")):
            raise errors.UsageError(
                f"--{name} is not read by --eval.methods={asked}; leave it out, or add "
                f"{' or '.join(readers)} to the methods"
            )


def _refuse(mode: str, name: str, value: str) -> str:
    """Says that a mode does not have a flag, and which one was probably meant."""
    start = f"--{name} is not a flag of --mode={mode}"
    known = [flag for flag in flags_of(mode) if flag not in ("config", "eval")]
    if mode in MODES_OF["config"]:
        known += [f"config.{key}" for key in config_keys.keys()]
    known += [f"eval.{key}" for key in eval_options_of(mode)]
    last = name.rpartition(".")[2]
    near = [flag for flag in known if flag.rpartition(".")[2] == last]
    meant = MEANT.get((mode, name)) or min(near, key=lambda flag: flag.count("."), default=None)
    if meant:
        return f"{start}; did you mean --{meant}={value}?"
    if name.startswith("config.") and mode in WITH_WORKDIR:
        return f"{start}: the run in --workdir has its own config; leave it out"
    others = [f"--mode={other}" for other in MODES_OF[name.partition(".")[0]] if other in MODES]
    return f"{start}; leave it out, or use {' or '.join(others)}"


def flags_of(mode: str) -> list[str]:
    """The names of the flags that a mode has."""
    return [name for name, modes in MODES_OF.items() if mode in modes and name != "mode"]


def eval_options_of(mode: str) -> Sequence[str]:
    """The options of evaluation that a mode reads."""
    if mode == ENSEMBLE:
        return ("ensemble", "output")
    if mode == TUNED_DYNEVAL:
        return eval_options.TUNING
    return tuple(eval_options.OPTIONS) if mode in MODES_OF["eval"] else ()


def make_help(mode: str | None) -> str:
    """The help text: of one mode with all its options, or of all modes."""
    lines = [f"{COMMAND} --mode=MODE --name=value ...", ""]
    for name in [mode] if mode in MODES else MODES:
        lines += [f"--mode={name} {MODES[name].description}."]
        lines += [f"    {COMMAND} --mode={name} {MODES[name].example}"]
        own = flags_of(name) + ["eval"] * (name == "tune")
        for flag in own:
            if flag not in PROCESSES:
                options = eval_options_of(TUNED_DYNEVAL if name == "tune" else name)
                lines += _describe_flag(flag, mode in MODES, options)
        lines += [""]
    lines += ["Modes that use devices also have these flags, to run on several hosts:"]
    lines += [line for flag in PROCESSES for line in _describe_flag(flag)]
    lines += ["", "--flagfile=FILE reads more flags from a file. --version shows the version."]
    lines += [f"`{COMMAND} --mode=config` lists the experiments, and with --config every key."]
    return "\n".join([*lines, "--help --mode=MODE shows one mode. docs/ has a page for each."])


def _describe_flag(name: str, detailed: bool = False, options: Sequence[str] = ()) -> list[str]:
    if name == "eval":
        lines = [_row("eval.KEY=VALUE", "sets an option of evaluation")]
        if detailed:
            lines += [
                _row(f"eval.{key}", _with_default(option.describe(), option.default))
                for key, option in eval_options.OPTIONS.items()
                if key in options
            ]
        return lines
    flag = FLAGS[name]
    lines = [_row(name, _with_default(flag.help, None if flag.boolean else flag.default))]
    if name == "config":
        lines += [_row("config.KEY=VALUE", "changes a key of the config, as --config.seed=2")]
    return lines


def _row(name: str, text: str) -> str:
    return f"      --{name:<15} {text}"


def _with_default(text: str, default: Any) -> str:
    return text if default in (None, "", True, False) else f"{text} (default: {default})"


def _explain(error: BaseException) -> str:
    """The part of a parsing error that says what is wrong."""
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, errors.UsageError):  # Of an experiment file, which absl wraps.
            return str(cause)
        cause = cause.__context__
    if isinstance(error, flags.Error):
        return str(error)
    reason: Any = error
    while isinstance(reason, BaseException):
        reason = reason.args[0]
    return "there is no such key: " + str(reason).replace("\n", ". ")

"""The command `mogrifier`: reads the flags and calls one function for the mode.

    mogrifier --config=pydoc --workdir=runs/pydoc
    python -m mogrifier_jax --mode=evaluate --workdir=runs/pydoc

`command_line.py` has the flags. What a mode needs is imported when the mode is run. An error that
people or their machines can cause ends with one sentence and the exit code of `errors.py`.
"""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from mogrifier_jax import (
    buckets,
    command_line,
    command_process,
    config_keys,
    configs,
    errors,
    failures,
)

FLAGS = flags.FLAGS
SEVERAL_WORKDIRS = ("evaluate", "inspect", "explore")  # These modes take --workdir=a,b.


def run() -> None:
    """Prepares the process, parses the flags, runs the mode, and exits with its code."""
    command_process.prepare_streams()
    # Libraries may swallow an exception that is raised while they are imported, so until they are
    # imported SIGTERM is only noted.
    requests: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: requests.append(number))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Without a traceback.
    try:
        from mogrifier_jax.training import signals
    except ValueError as error:  # JAX reads its environment variables when it is imported.
        command_process.end(f"UsageError: JAX cannot start: {error}; correct the variable", 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signals.interrupt)
    previous_hook, sys.unraisablehook = sys.unraisablehook, signals.deliver_again
    try:
        if requests:
            signals.interrupt()
        command_process.end_with_parent()
        with failures.explained():
            app.run(_run_mode, flags_parser=command_line.parse)
    except (Exception, errors.Interrupted) as error:
        if signals.interrupted.is_set() and not isinstance(error, errors.Interrupted):
            # A library swallowed the exception of SIGTERM, perhaps in an import, and failed later.
            code = errors.Interrupted.exit_code
            command_process.end(f"Interrupted: stopped ({type(error).__name__})", code)
        if not isinstance(error, errors.UsageError | errors.Diverged | errors.Interrupted):
            raise
        command_process.end(f"{type(error).__name__}: {error}", error.exit_code)
    except KeyboardInterrupt:
        message = "interrupted; repeat the command to resume from the last checkpoint"
        command_process.end(message, 128 + signal.SIGINT)
    finally:
        signals.interrupted.clear()
        # Orbax's filter (`orbax_storage.py`) must stay, if it has replaced the hook.
        if sys.unraisablehook is signals.deliver_again:
            sys.unraisablehook = previous_hook
        # Python takes a while to exit, and a signal during that time would change the exit code.
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)


def _run_mode(argv: Sequence[str]) -> None:
    """Runs `main`, and flushes stdout here, where a full disk is explained."""
    main(argv)
    sys.stdout.flush()


def main(argv: Sequence[str]) -> None:
    """Runs the mode of the flags."""
    if len(argv) > 1:
        raise errors.UsageError(f"{argv[1]!r} is not a flag; write --name=value")
    modes = (train, evaluate, sample, export, preflight, sweep, inspect, explore, tune)
    run_mode = {mode.__name__: mode for mode in modes}.get(FLAGS.mode)
    if run_mode is None:
        with local_paths():
            return show_config()

    command_process.check_open_files()
    import jax

    from mogrifier_jax import distributed, hardware, jax_settings
    from mogrifier_jax.training import logs

    logging.set_verbosity(logging.WARNING)  # Libraries log a lot when they start.
    jax_settings.fix_numbers()
    compiles_only = FLAGS.mode == "preflight"
    if compiles_only or FLAGS.parallel > 1:
        # This process must not occupy the accelerators: preflight needs only their compilers, and
        # the processes that it starts in parallel need them for themselves.
        jax.config.update("jax_platforms", "cpu")
    jax_settings.check_xla_flags()
    jax_settings.use_compilation_cache()
    cluster = None
    if not compiles_only:
        cluster = distributed.find_cluster(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    if FLAGS.cpu_devices is not None or (cluster is None and not compiles_only):
        # Processes of one run may share a host, so each has one CPU device by default.
        hardware.use_cores(FLAGS.cpu_devices)
    with distributed.session(cluster, peer_timeout=FLAGS.peer_timeout):
        logs.setup_logging()
        if not compiles_only and FLAGS.parallel == 1:
            if sentence := hardware.describe_unused_accelerator():
                logging.warning("%s", sentence)
        with failures.explained(FLAGS.mode), local_paths():
            check_outputs()
            run_mode()


def train() -> None:
    """Trains the experiment of --config in --workdir, and shows a sample of the result."""
    config = require_config()
    import jax

    from mogrifier_jax.data import tasks
    from mogrifier_jax.training import train as training

    workdir = FLAGS.workdir or default_workdir()
    training.train_and_evaluate(config, workdir, profile_steps=FLAGS.profile_steps)
    if jax.process_count() == 1 and not tasks.kind_of(config.data).encoder_decoder:
        from mogrifier_jax.evaluation import sample_command, text_sampling

        print("A sample of what it has learnt:\n")
        sample_command.print_samples(workdir, text_sampling.Sampling(length=400, temperature=0.7))


def evaluate() -> None:
    """Scores the runs in --workdir (several: a,b,c) as --eval.* says."""
    from mogrifier_jax.evaluation import evaluate_command

    evaluate_command.evaluate_workdirs(split_workdirs(), FLAGS.eval)


def sample() -> None:
    """Draws text from the run in --workdir."""
    import jax

    from mogrifier_jax.evaluation import sample_command, text_sampling

    values: dict[str, Any] = {name: FLAGS[name].value for name in text_sampling.Sampling._fields}
    sampling = text_sampling.Sampling(**values)
    # All processes draw the same text, and process 0 prints it.
    prints = jax.process_index() == 0
    with contextlib.nullcontext() if prints else contextlib.redirect_stdout(None):
        sample_command.print_samples(FLAGS.workdir or "", sampling, FLAGS.prompt)


def export() -> None:
    """Writes the best weights of the run in --workdir to one file."""
    from mogrifier_jax.evaluation import export_command

    export_command.export(FLAGS.workdir or "", FLAGS.output)


def preflight() -> None:
    """Compiles the experiment of --config for the chips of --topology, and estimates its cost."""
    config = require_config()
    if FLAGS.topology is None:
        raise errors.UsageError("--topology is missing; give chips, such as --topology=v5e:2x2")
    from mogrifier_jax.preflight import report

    report.preflight(config, FLAGS.topology, search=FLAGS.search, json_path=FLAGS.json)


def sweep() -> None:
    """Runs the variants of --set with all --seeds in --workdir, and compares them."""
    require_config()
    if FLAGS.set is None:
        raise errors.UsageError("--set is missing; give sets of the experiment, as --set=rounds")
    from mogrifier_jax.analysis import sweeps

    sweeps.sweep(
        config_name(),
        FLAGS.set,
        FLAGS.seeds,
        FLAGS.workdir or default_workdir(),
        overrides=config_flags.get_override_values(FLAGS["config"]),
        parallel=FLAGS.parallel,
        report=FLAGS.report,
    )


def inspect() -> None:
    """Compares gates and losses of the runs in --workdir (several: a,b,c)."""
    from mogrifier_jax.analysis import inspection

    if not all(split_workdirs()):
        raise errors.UsageError(
            "--workdir is missing; give the workdir of a run, or several: a,b,c"
        )
    inspection.inspect(split_workdirs(), document=FLAGS.report, json_path=FLAGS.json)


def explore() -> None:
    """Writes a page that shows the runs in --workdir (several: a,b) reading a text."""
    from mogrifier_jax.analysis import explore as exploring

    exploring.write_page(
        split_workdirs(), path=FLAGS.text, prompt=FLAGS.prompt, length=FLAGS.length
    )


def tune() -> None:
    """Searches for the best settings of --config, or of dynamic evaluation of a trained run."""
    if FLAGS.study is None:
        raise errors.UsageError("--study is missing; give one, such as --study=appendix_a")
    from mogrifier_jax.tuning import tune as tuning
    from mogrifier_jax.tuning import worker

    tuning.check_numbers(FLAGS.trials, FLAGS.parallel)
    options = dict(num_trials=FLAGS.trials, storage=FLAGS.storage, sampler=FLAGS.sampler)
    if FLAGS.study == "dyneval":
        run = FLAGS.workdir or ""
        if FLAGS.parallel > 1:
            worker.start_workers(flags_of_worker(), tuning.dyneval_workdir(run), FLAGS.parallel)
        else:
            tuning.tune_dyneval(run, FLAGS.eval, **options)
        return
    config = require_config()
    workdir = FLAGS.workdir or f"{default_workdir()}_tune"
    name = os.path.basename(default_workdir())
    if FLAGS.parallel > 1:
        tuning.check_study(FLAGS.study)
        worker.start_workers(flags_of_worker(), workdir, FLAGS.parallel)
    else:
        tuning.tune(config, workdir, study=FLAGS.study, name=name, prune=FLAGS.prune, **options)


def show_config() -> None:
    """Prints the config of --config with the meaning of its keys, or writes it to --json.

    Without --config it lists the experiments that come with the package.
    """
    if FLAGS.config is None:
        for name, title in configs.list_experiments().items():
            print(f"--config={name:<14} # {title}")
        return
    config = configs.base(require_config())
    configs.check(config)
    if FLAGS.json:
        from mogrifier_jax.training import atomic_files

        atomic_files.check_output(FLAGS.json, "--json")
        atomic_files.write_output(FLAGS.json, config.to_json_best_effort(indent=2) + "\n")
        return
    declared = config_keys.keys()
    for name, value in sorted(configs.flatten(config).items()):
        print(f"{name} = {value!r}".ljust(48) + f" # {declared[name].describe()}")


@contextlib.contextmanager
def local_paths() -> Iterator[None]:
    """Replaces addresses of buckets in flags by local copies, whose changes are copied back.

    The flags have their own values again when the block ends.
    """
    path_flags: dict[str, Any] = {
        name: FLAGS[name] for name in ("workdir", "json", "output", "report")
    }
    given = {name: flag.value for name, flag in path_flags.items()}
    given_eval_output = FLAGS.eval.output
    # Workers on several machines may tune in one workdir, unless the database is inside it.
    exclusive = FLAGS.mode in ("train", "sweep") or (FLAGS.mode == "tune" and not FLAGS.storage)
    with contextlib.ExitStack() as stack:
        workdirs = split_workdirs() if FLAGS.mode in SEVERAL_WORKDIRS else [given["workdir"] or ""]
        if any(map(buckets.is_bucket, workdirs)):
            copies = [
                stack.enter_context(buckets.mounted(workdir, exclusive=exclusive))
                for workdir in workdirs
            ]
            path_flags["workdir"].value = ",".join(copies)
        for name in ("json", "output", "report"):
            path_flags[name].value = stack.enter_context(buckets.output(given[name]))
        FLAGS.eval.output = stack.enter_context(buckets.output(given_eval_output))
        try:
            yield
        finally:
            for name, value in given.items():
                path_flags[name].value = value
            FLAGS.eval.output = given_eval_output


def check_outputs() -> None:
    """Refuses paths that results cannot be written to, before the results are computed."""
    from mogrifier_jax.training import atomic_files

    for name in ("json", "output", "report"):
        atomic_files.check_output(FLAGS[name].value, f"--{name}")
    atomic_files.check_output(FLAGS.eval.output, "--eval.output")


def require_config() -> config_dict.ConfigDict:
    """The config of --config, which must be given."""
    if FLAGS.config is None:
        raise errors.UsageError(
            "--config is missing; give an experiment, such as --config=pydoc (--mode=config "
            "lists them)"
        )
    return FLAGS.config


def config_name() -> str:
    """The value of --config as it was written."""
    flag: Any = FLAGS["config"]
    return flag.config_filename


def default_workdir() -> str:
    """runs/<experiment>, with the variant."""
    path, _, variant = config_name().partition(":")
    name = os.path.splitext(os.path.basename(path))[0]
    return os.path.join("runs", "_".join([name, *variant.split(",")]).rstrip("_"))


def split_workdirs() -> list[str]:
    """The values of --workdir; a comma may also be part of a name."""
    value = FLAGS.workdir or ""
    return [value] if os.path.isdir(value) else value.split(",")


def flags_of_worker() -> list[str]:
    """The flags of this command, as each of the workers that it starts gets them."""
    arguments = FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
    given = dict(command_line.split_arguments(arguments))
    if "workdir" in given:  # If it is in a bucket, all workers of this machine share one copy.
        given["workdir"] = FLAGS.workdir
    return [f"--{name}={value}" for name, value in given.items() if name != "parallel"]


if __name__ == "__main__":
    run()

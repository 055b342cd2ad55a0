"""The command line: one sentence and a code for whatever is wrong with it."""

import ast
import configparser
import contextlib
import inspect
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

import mogrifier_jax
from mogrifier_jax import (
    command_line,
    config_keys,
    configs,
    errors,
    failures,
    jax_settings,
    main,
)
from mogrifier_jax.analysis import sweeps
from mogrifier_jax.evaluation import text_sampling
from mogrifier_jax.training import signals, train

ROOT = pathlib.Path(__file__).parents[1]
TINY = "--config=experiments/pydoc.py:tiny"
WIKITEXT2 = "--config=experiments/wikitext2.py:tiny"
ABLATION = "--config=experiments/ablation.py:tiny"


@pytest.fixture
def trained(monkeypatch):
    """The configs and workdirs that training was started with."""
    calls = []
    monkeypatch.setattr(train, "train_and_evaluate", lambda *args, **kwargs: calls.append(args))
    return calls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode=trian"], "--mode=trian is unknown; use train, evaluate"),
        (["train"], "'train' is not a flag; write --name=value"),
        ([], "--config is missing; give an experiment, such as --config=pydoc"),
        (["--config"], "Missing value for flag --config"),
        (
            ["--config=experiments/pydock.py"],
            "experiments/pydock.py is not a file, and not the name",
        ),
        (["--config=experiments"], "experiments is not a file, and not the name of an experiment"),
        (["--config=pydocs"], "not the name of an experiment; did you mean pydoc?"),
        (["--config=none.py", "--config.seed=1"], "none.py is not a file, and not the name of"),
        (["--config=experiments/pydoc.py:tyni"], "variant 'tyni' is unknown: this experiment has"),
        (["--config=experiments/ptb.py:small,tiny"], "variants small and tiny exclude each other"),
        ([TINY, "--wrokdir=x"], "Unknown command line flag 'wrokdir'. Did you mean: workdir"),
        ([TINY, "--config.model.roundz=3"], "no such key: 'roundz'. Did you mean \"rounds\""),
        ([TINY, "--config.modle.rounds=3"], "no such key: 'modle'. Did you mean \"model\""),
        ([TINY, "--mode=config", "--config.model.rounds=1000000"], "model.rounds 1000000 must be"),
        ([TINY, "--mode=config", "--config.optimizer.learning_rate=1e300"], "1e+300 must be at mo"),
        ([TINY, "--mode=config", "--json=docs"], "--json=docs cannot be written"),
        (
            ["--mode=sweep", ABLATION, "--set=rounds", "--workdir=hdfs://b/x"],
            "neither a path of this",
        ),
        ([TINY, "--peer_timeout=nan"], "--peer_timeout nan must be from 0.1 to 86400"),
        (["--mode=evaluate", "--eval.window=0"], "eval.window 0 must be at least 1, or left out"),
        ([TINY, "--config.model.rounds.x=3"], "model.rounds.x"),
        ([TINY, "--config.model.rounds=three"], "--config.model.rounds=three: invalid literal"),
        ([TINY, "--config.model=3"], "--config.model=3: Failed to parse"),
        ([TINY, "--config.model.tied_embeddings=3"], "--config.model.tied_embeddings=3"),
        (["--mode=evaluate"], "--workdir is missing; give the workdir of a run, or several: a,b,c"),
        (
            ["--mode=evaluate", "--workdir=none"],
            "workdir none does not exist; give the workdir of a trai",
        ),
        (
            ["--mode=evaluate", "--eval.methodz=mc"],
            "no such key: 'methodz'. Did you mean \"methods",
        ),
        (
            ["--mode=evaluate", "--eval.methods=mc", "--eval.samples=many"],
            "--eval.samples=many: invalid literal",
        ),
        (["--mode=evaluate", "--workdir=x", "--eval.methods=mcc"], "method 'mcc' is unknown; use"),
        (["--mode=sample"], "--workdir is missing; give the workdir of a trained run"),
        (
            ["--mode=sample", "--workdir=none"],
            "workdir none does not exist; give the workdir of a trained",
        ),
        (["--mode=sample", "--workdir=docs"], "docs is not the workdir of a run: it has no config"),
        (["--mode=sample", "--workdir=none", "--length=few"], "flag --length=few: invalid literal"),
        (
            ["--mode=sample", "--workdir=none", "--temperature=0"],
            "temperature 0.0 must be at least 0.0001",
        ),
        (["--mode=preflight", TINY], "--topology is missing; give chips, such as --topology=v5e"),
        (["--mode=preflight", TINY, "--topology=v99:2x2"], "v99"),
        (["--mode=preflight", "--topology=v5e:2x2"], "--config is missing; give an experiment"),
        (["--mode=sweep"], "--config is missing; give an experiment"),
        (["--mode=sweep", TINY], "--set is missing; give sets of the experiment, as --set=rounds"),
        (
            ["--mode=sweep", "--config=experiments/text.py:tiny", "--set=rounds"],
            "experiments/text.py has no sets to sweep over",
        ),
        (["--mode=sweep", ABLATION, "--workdir=x", "--set=rownds"], "rownds"),
        (["--mode=inspect"], "--workdir is missing"),
        (["--mode=inspect", "--workdir=none"], "none does not exist"),
        (["--mode=explore"], "--workdir is missing; give the workdir of a run, or two: a,b"),
        (["--mode=explore", "--workdir=none"], "none does not exist"),
        (
            ["--mode=explore", "--workdir=none", "--text=a", "--prompt=b"],
            "--text and --prompt are both given; give one of them",
        ),
        (["--mode=explore", "--workdir=none", "--length=0"], "length 0 must be at least 1"),
        (["--mode=tune", "--study=appendix_a"], "--config is missing; give an experiment"),
        (["--mode=tune", TINY, "--workdir=x", "--study=apendix"], "apendix"),
        (["--mode=tune", TINY, "--workdir=x"], "--study"),
    ],
)
def test_mistakes_end_with_one_sentence(command, trained, arguments, words):
    code, output = command(*arguments)
    assert code == errors.UsageError.exit_code == 2
    assert words in output and "Traceback" not in output
    assert output.startswith("UsageError: ") and output.count("\n") == 1
    assert not trained


def test_the_config_mode_prints_every_key(command, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(main, "print", lines.append, raising=False)
    layer_norm = ["--config=experiments/ptb.py:tiny", "--config.model.layer_norm=True"]
    command("--mode=config", *layer_norm)
    values = dict(line.split(" # ") for line in lines)
    assert {name.rstrip() for name in values} >= {"model.layer_norm = True", "data.name = 'ptb'"}
    assert lines == sorted(lines) and len(lines) == len(config_keys.keys())
    assert all(values.values())  # The meaning of every key.


def test_the_config_mode_lists_the_experiments(command, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(main, "print", lines.append, raising=False)
    code, _ = command("--mode=config")
    names = [line.split()[0].removeprefix("--config=") for line in lines]
    assert not code and names == sorted(p.stem for p in (ROOT / "experiments").glob("*.py"))
    assert all(len(line.partition(" # ")[2]) > 10 for line in lines)
    for name in names:
        assert configs.load_config(name) == configs.load_config(f"experiments/{name}.py")


def test_experiments_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    expected = configs.load_config(str(ROOT / "experiments" / "enwik8.py:lstm,48m"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "enwik8").mkdir()  # A folder of this name, such as a workdir, is no experiment.
    assert configs.load_config("enwik8:lstm,48m") == expected
    (tmp_path / "enwik8.py").write_text("x = 1\n")  # A path is what it says.
    with pytest.raises(errors.UsageError, match="has no function get_config"):
        configs.load_config("enwik8.py")


@pytest.mark.parametrize(
    ("error", "code"),
    [(errors.UsageError, 2), (errors.Diverged, 3), (errors.Interrupted, 75)],
)
def test_what_ends_a_run_early_has_its_own_code(command, monkeypatch, error, code):
    def stop(config, workdir, **options):
        raise error(f"something about {workdir} and {config.model.rounds} rounds")

    monkeypatch.setattr(train, "train_and_evaluate", stop)
    found, output = command(TINY, "--workdir=some/where", "--config.model.rounds=3")
    assert found == code
    assert output == f"{error.__name__}: something about some/where and 3 rounds\n"
    _, output = command(TINY.replace("tiny", "lstm,tiny"))
    assert f"{os.path.join('runs', 'pydoc_lstm_tiny')} and 0 rounds" in output


def test_a_missing_extra_is_named(command, monkeypatch):
    def fail(*args, **options):
        raise ModuleNotFoundError("No module named ...", name=missing)

    monkeypatch.setattr(train, "train_and_evaluate", fail)
    missing = "tensorflow_datasets"
    code, output = command(TINY)
    assert code == 2 and output.count("\n") == 1
    assert 'needs tensorflow_datasets, which is not installed; pip install "mogr' in output
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    assert set(failures.EXTRAS.values()) <= set(extras["options.extras_require"])
    missing = "mogrifier_jax.tarin"  # A bug.
    with pytest.raises(ModuleNotFoundError):
        command(TINY)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(28, "No space left on device", "x/y"),
            "No space left on device at x/y; make room",
        ),
        (PermissionError(13, "Permission denied", "/p"), "Permission denied at /p; give a place"),
        (OSError(5, "Input/output error"), "Input/output error; the disk may be failing"),
    ],
)
def test_what_the_machine_refuses_is_one_sentence(command, monkeypatch, error, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(train, "train_and_evaluate", fail)
    code, said = command("--config=experiments/pydoc.py:tiny")
    assert code == 2 and f"UsageError: {words}" in said, said


def test_a_bug_keeps_its_traceback(command, monkeypatch):
    def fail(config, workdir, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train, "train_and_evaluate", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        command(TINY)


def test_an_interrupt_from_the_keyboard_shows_no_traceback(command, monkeypatch):
    def interrupt(config, workdir, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train_and_evaluate", interrupt)
    code, said = command(TINY)
    assert code == 130
    assert said == "interrupted; repeat the command to resume from the last checkpoint\n"


@pytest.mark.slow
def test_the_real_command_line_says_it_too(tmp_path):
    """In a process of its own, with all that the tests above leave out."""
    done = subprocess.run(
        [sys.executable, "-m", "mogrifier_jax.main", TINY, "--config.data.batch_size=0"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MOGRIFIER_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "UsageError: data.batch_size 0 must be at least 1\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_threefry_partitionable", False),
        ("jax_default_prng_impl", "rbg"),
        ("jax_random_seed_offset", 3),
        ("jax_enable_x64", True),
    ],
)
def test_the_environment_does_not_move_the_numbers_of_a_run(name, value, caplog):
    def draw():
        numbers = jax.random.normal(jax.random.key(0), (3, 5))
        return numbers.dtype, numbers.tolist()

    expected = draw()
    jax_settings.fix_numbers()
    assert not caplog.text
    try:
        jax.config.update(name, value)
        assert draw() != expected  # Control.
        jax_settings.fix_numbers()
        assert draw() == expected
    finally:
        jax.config.update(name, jax_settings.NUMBERS[name])
    assert f"{name.upper()}={value} is ignored" in caplog.text


# Flags by mode.


EVERY_MODE = (*command_line.MODES, command_line.TUNED_DYNEVAL, command_line.ENSEMBLE)
NAMES = [
    *command_line.MODES_OF,
    "config.seed",
    "config.model.rounds",
    "eval.temperature",
    "eval.window",
    "eval.dyneval.window",
]
NAMES.remove("mode")


def line_of(mode):
    """The flags that choose a mode."""
    if mode == command_line.TUNED_DYNEVAL:
        return [("mode", "tune"), ("study", "dyneval")]
    if mode == command_line.ENSEMBLE:
        return [("mode", "evaluate"), ("eval.ensemble", "a,b")]
    return [("mode", mode)]


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("name", NAMES)
def test_a_flag_that_the_mode_does_not_have_is_refused(mode, name):
    chosen = line_of(mode)
    command_line.check_arguments(chosen)  # Control.
    if name == "study" and mode == command_line.TUNED_DYNEVAL:
        return
    has = mode in command_line.MODES_OF[name.partition(".")[0]] and (mode, name) != (
        "sweep",
        "config.seed",
    )
    if name.startswith("eval.") or (name, mode) == ("eval", command_line.ENSEMBLE):
        has = has and name.removeprefix("eval.") in command_line.eval_options_of(mode)
    if has:
        if name == "eval.dyneval.window" and mode == "evaluate":
            chosen = [*chosen, ("eval.methods", "dyneval")]
        return command_line.check_arguments([*chosen, (name, "7")])
    for line in ([*chosen, (name, "7")], [(name, "7"), *chosen]):
        with pytest.raises(errors.UsageError, match=f"--{name} is not a flag of --mode=") as told:
            command_line.check_arguments(line)
        assert any(words in str(told.value) for words in ("did you mean --", "leave it out"))


def names_used(source):
    """The flags that a function of main reads."""
    helpers = {"split_workdirs": "workdir", "require_config": "config"}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in helpers:
            found.add(helpers[node.id])
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "FLAGS":
            found.add(node.attr)
    return found


@pytest.mark.parametrize("mode", command_line.MODES)
def test_a_mode_has_the_flags_that_it_reads(mode):
    function = main.show_config if mode == "config" else getattr(main, mode)
    used = names_used(inspect.getsource(function)) | {"mode"}
    used |= set(text_sampling.Sampling._fields) if mode == "sample" else set()
    declared = {command_line.TUNED_DYNEVAL} if mode == "tune" else set()
    declared = {n for n, modes in command_line.MODES_OF.items() if {mode, *declared} & set(modes)}
    assert used - {"mode"} == declared - {"mode", *command_line.PROCESSES}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed=7", TINY], "--seed is not a flag of --mode=train; did you mean --config.seed=7?"),
        ([TINY, "--seed", "7"], "did you mean --config.seed=7?"),
        ([TINY, "--trials=3"], "leave it out, or use --mode=tune"),
        ([TINY, "--noprune"], "--prune is not a flag of --mode=train"),
        ([TINY, "--eval.window=3"], "did you mean --config.data.window=3?"),
        (
            ["--mode=evaluate", "--workdir=x", "--temperature=2"],
            "did you mean --eval.temperature=2?",
        ),
        (["--mode=evaluate", "--workdir=x", "--seed=2"], "did you mean --eval.seed=2?"),
        (["--mode=evaluate", "--workdir=x", TINY], "--config is not a flag of --mode=evaluate"),
        (
            ["--mode=evaluate", "--workdir=x", "--config.model.rounds=3"],
            "the run in --workdir has its own config",
        ),
        (["--mode=sample", "--workdir=x", "--config.seed=3"], "did you mean --seed=3?"),
        (["--mode=sample", "--workdir=x", "--eval.temperature=3"], "did you mean --temperature=3?"),
        (
            ["--mode=explore", "--workdir=x", "--output=y"],
            "--output is not a flag of --mode=explore",
        ),
        (["--mode=sweep", ABLATION, "--set=rounds", "--config.seed=3"], "did you mean --seeds=3?"),
        (["--mode=tune", "--study=dyneval", TINY], "--config is not a flag of --mode=tune --study"),
        (["--mode=tune", "--storage=a://u:SECRET@h", "--storage=b", TINY], "given twice; give"),
        ([TINY, WIKITEXT2], "--config is given twice, as experiments/pydoc.py:tiny and as exper"),
        ([TINY, "--workdir=a", "--workdir", "b"], "--workdir is given twice, as a and as b; give"),
        ([TINY, "--config.seed=1", "--config.seed=2"], "--config.seed is given twice"),
        (["--mode=evaluate", "--eval.ensemble=a,b", "--workdir=x"], "--workdir is not a flag of"),
        (
            ["--mode=evaluate", "--eval.ensemble=a,b", "--eval.methods=mc"],
            "--eval.methods is not a",
        ),
        (["--mode=evaluate", "--eval.text=a", "--eval.splits=test"], "give one of them"),
        (
            ["--mode=evaluate", "--workdir=x", "--eval.seed=7"],
            "--eval.seed is not read by --eval.methods=deterministic; leave it out, or add mc or",
        ),
        (
            ["--mode=evaluate", "--workdir=x", "--eval.methods=mc", "--eval.dyneval.window=3"],
            "add dyneval or mc_dyneval to the methods",
        ),
        (
            ["--mode=evaluate", "--workdir=x", "--eval.methods=dyneval", "--eval.stripes", "3"],
            "add deterministic or mc to the methods",
        ),
        ([TINY, "--verbosity=1"], "--verbosity has no effect"),
        ([TINY, "--profile_file=x"], "--profile_file has no effect without --run_with_profiling"),
        (
            ["--mode=tune", "--study=dyneval", "--workdir=x", "--eval.samples=3"],
            "--eval.samples is not a flag of --mode=tune --study=dyneval; leave it out, or use",
        ),
        (
            ["--mode=tune", "--study=dyneval", "--workdir=x", "--eval.dyneval.window", "3"],
            "--eval.dyneval.window is not a flag of",
        ),
        (
            ["--mode=tune", TINY, "--storage=vizier://h:1", "--sampler=gp"],
            "--sampler=gp has no effect, because a Vizier service has its own",
        ),
        (
            ["--mode=evaluate", "--workdir=x", "--eval.methods=", "--eval.text=a"],
            "--eval.text has no effect, because --eval.methods= only shows",
        ),
        (
            ["--mode=evaluate", "--workdir=x", "--eval.methods=mc", "--eval.power=0.3"],
            "--eval.power is read only with --eval.average=power",
        ),
        (
            ["--mode=evaluate", "--workdir=x", "--eval.text=a", "--eval.source_dir=b"],
            "--eval.source_dir has no effect, because --eval.text is scored without",
        ),
        ([TINY, "--log_dir=x"], "--log_dir has no effect"),
        ([TINY, "--undefok=sead", "--sead=7"], "--undefok=sead would let unknown flags be ignored"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(command, trained, arguments, words):
    code, output = command(*arguments)
    assert code == 2 and words in output and "Traceback" not in output and not trained
    assert "SECRET" not in output


def test_the_same_flag_twice_with_one_value_is_no_matter(command, trained):
    command(TINY, "--workdir=a", TINY, "--workdir=a")
    assert len(trained) == 1


def test_flags_of_a_file_are_checked_too(command, trained, tmp_path):
    inner, outer, pipe = tmp_path / "inner", tmp_path / "outer", tmp_path / "pipe"
    inner.write_text("--seed=7\n")
    outer.write_text(f"# More.\n--workdir=x\n--flagfile={inner}\n")
    code, output = command(TINY, f"--flagfile={outer}")
    assert code == 2 and "did you mean --config.seed=7?" in output
    os.mkfifo(pipe)
    inner.write_text(f"--flagfile={pipe}\n")
    for path in (pipe, outer):
        code, output = command(TINY, f"--flagfile={path}")
        assert code == 2 and f"{pipe} is not a file; give a file of flags" in output
    for argument in ("--flagfile", "-flagfile"):
        code, output = command(TINY, argument)
        assert code == 2 and "--flagfile with no argument; write --name=value" in output
    inner.write_text("--config.seed=7\n")  # Control.
    command(TINY, f"--flagfile={outer}")
    assert len(trained) == 1


@pytest.mark.parametrize("flag", ["--help", "-h", "-help", "--helpshort", "--helpfull", "-?"])
def test_help_shows_every_mode_and_is_no_error(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["main", flag])
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as stopped:
        main.run()
    assert not stopped.value.code
    assert capsys.readouterr().out == command_line.make_help(None) + "\n"


def test_every_flag_is_in_the_help_of_its_modes():
    for mode in command_line.MODES:
        shown = command_line.make_help(mode)
        for name in command_line.MODES_OF:
            if name == "mode":
                continue
            wanted = mode in command_line.MODES_OF[name] or name in command_line.PROCESSES
            wanted |= mode == "tune" and name == "eval"
            shape = "--eval.KEY" if name == "eval" else f"--{name} "
            assert (f"      {shape}" in shown) == wanted, (mode, name)
        assert all(f"--mode={each} " in command_line.make_help(None) for each in command_line.MODES)


@pytest.mark.parametrize("mode", command_line.MODES)
def test_the_example_of_a_mode_is_a_good_line(mode, monkeypatch):
    monkeypatch.chdir(ROOT)
    command_line.check_arguments(
        command_line.split_arguments(
            ["--mode=" + mode, *shlex.split(command_line.MODES[mode].example)]
        )
    )
    for name, value in command_line.split_arguments(shlex.split(command_line.MODES[mode].example)):
        assert name.partition(".")[0] in flags.FLAGS or name.startswith("eval.")
        if name == "config":
            configs.load_config(value)


def test_the_version_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["main", "--version"])
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as stopped:
        main.run()
    assert not stopped.value.code
    assert capsys.readouterr().out == f"mogrifier_jax {mogrifier_jax.__version__}\n"


# Signals, and parents that are killed.


def test_sigterm_while_a_run_is_prepared_is_a_request_to_stop(command, monkeypatch):
    def prepare(*_, **__):
        signal.raise_signal(signal.SIGTERM)

    previous = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train, "train_and_evaluate", prepare)
    try:
        code, output = command(TINY, "--workdir=x")
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert code == 75 and "Interrupted: stopped; repeat the command to resume" in output


def test_sigterm_while_an_experiment_is_executed_is_no_mistake_in_it(command, tmp_path):
    lines = ["import signal", "def get_config():", "    signal.raise_signal(signal.SIGTERM)"]
    path = tmp_path / "mine.py"
    path.write_text("\n".join(lines))
    previous = signal.getsignal(signal.SIGTERM)
    try:
        code, output = command(f"--config={path}", "--workdir=x")
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert code == 75 and "Interrupted: stopped" in output and "correct the exp" not in output


def test_sigterm_that_a_library_swallows_is_a_stop_as_well(command, monkeypatch):
    def import_badly(*args, **options):
        try:
            signal.raise_signal(signal.SIGTERM)
        except errors.Interrupted:
            raise AttributeError("module 'half' has no attribute 'imported'") from None

    def explain_badly(*args, **options):
        with contextlib.suppress(errors.Interrupted):
            signal.raise_signal(signal.SIGTERM)
        raise errors.UsageError("no library is installed")

    def go_on(*args, **options):
        with contextlib.suppress(errors.Interrupted):
            signal.raise_signal(signal.SIGTERM)
        signals.StopRequests().check()

    previous = signal.getsignal(signal.SIGTERM)
    try:
        for prepare in (import_badly, explain_badly, go_on):
            monkeypatch.setattr(train, "train_and_evaluate", prepare)
            code, output = command(TINY, "--workdir=x")
            assert code == 75 and "Interrupted: stopped" in output and "Traceback" not in output
            signals.StopRequests().check()  # The next command is not stopped.
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_inside_a_destructor_is_not_lost(command, monkeypatch, number, code):
    class Destroyed:
        def __del__(self):
            signal.raise_signal(number)

    def prepare(*_, **__):
        Destroyed()
        time.sleep(10)
        pytest.fail("the signal was lost")

    previous = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(train, "train_and_evaluate", prepare)
    try:
        found, output = command(TINY, "--workdir=x")
    finally:
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGINT, previous[1])
    assert found == code and "Traceback" not in output and "ignored" not in output


def test_sigterm_waits_for_the_end_of_what_must_not_be_interrupted():
    previous = signal.signal(signal.SIGTERM, signals.interrupt)
    done = []
    try:
        with pytest.raises(errors.Interrupted), signals.postponed():
            signal.raise_signal(signal.SIGTERM)
            done.append("all of it")
        assert done == ["all of it"] and signal.getsignal(signal.SIGTERM) is signals.interrupt
        with signals.postponed():  # Nothing was asked for.
            pass
    finally:
        signal.signal(signal.SIGTERM, previous)
        signals.interrupted.clear()


EXIT_SCRIPT = """
import atexit, sys, time
from mogrifier_jax import main
atexit.register(lambda: (print("exiting", flush=True), time.sleep(3)))
sys.argv = ["main", "--mode=config"]
main.run()
"""


@pytest.mark.slow
def test_sigterm_after_the_end_does_not_change_the_exit_code():
    command = [sys.executable, "-c", EXIT_SCRIPT]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        while process.stdout.readline() != "exiting\n":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert process.returncode == 0 and not said


PARENT_SCRIPT = """
import os, subprocess, sys, time
environment = os.environ | {"MOGRIFIER_PARENT": str(os.getpid())}
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment).pid, flush=True)
time.sleep(float(sys.argv[2]))
"""
CHILD_SCRIPT = """
import signal, sys, time
from mogrifier_jax import command_process
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
command_process.end_with_parent()
time.sleep(120)
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("lives", [0.0, 60.0])
def test_a_process_ends_with_the_one_that_started_it(lives):
    """Also if that one was killed while this one was still importing its libraries."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_SCRIPT, CHILD_SCRIPT, str(lives)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    child = int(parent.stdout.readline())
    if lives:
        time.sleep(15)  # It imports its libraries, and goes on as long as its parent.
        assert is_running(child)  # Control.
        parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 60
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.2)
    assert not is_running(child)


ONCE = """
import pathlib

with open({path!r}, "a") as file:
    file.write("executed\\n")

from experiments.pydoc import get_config
"""


@pytest.mark.parametrize("mode", ["train", "sweep"])
def test_an_experiment_is_executed_once(mode, tmp_path, command, trained, monkeypatch):
    monkeypatch.setattr(sweeps.sweep_report, "write", lambda *args, **options: [])
    monkeypatch.setattr(sweeps, "describe_result", str)
    source = ONCE.format(path=str(tmp_path / "log")) + "from experiments.pydoc import SETS\n"
    (tmp_path / "once.py").write_text(source)
    line = [f"--config={tmp_path / 'once.py'}:tiny", f"--workdir={tmp_path / 'run'}"]
    _, output = command(f"--mode={mode}", *line, *(["--set=models"] * (mode == "sweep")))
    assert len(trained) == (2 if mode == "sweep" else 1), output
    assert (tmp_path / "log").read_text() == "executed\n"


@pytest.mark.slow
def test_an_experiment_is_executed_once_and_orbax_left_alone(tmp_path):
    """Checkpoints are slow to import, and most modes need none to read their flags."""
    (tmp_path / "once.py").write_text(ONCE.format(path=str(tmp_path / "log")))
    code = (
        "import sys; from mogrifier_jax import command_line, main; command_line.parse(sys.argv); "
        "main.require_config(); print('orbax' in sys.modules, main.FLAGS.eval.average)"
    )
    flags = [f"--config={tmp_path / 'once.py'}:tiny"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "arithmetic"], done.stderr
    assert (tmp_path / "log").read_text() == "executed\n"

"""The command line: one sentence and a code for whatever is wrong with it."""

import configparser
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from mogrifier_jax import configs, distributed, errors, main
from mogrifier_jax.training import compiler, logs, train

ROOT = pathlib.Path(__file__).parents[1]
TINY = "--config=experiments/pydoc.py:tiny"
WIKITEXT2 = "--config=experiments/wikitext2.py:tiny"
ABLATION = "--config=experiments/ablation.py:tiny"


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command line in this process; returns its exit code and what it wrote to stderr."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(logs, "setup_logging", lambda: None)
    monkeypatch.setattr(compiler, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(compiler, "check_flags", lambda: None)  # It starts a process.
    monkeypatch.setattr(distributed, "find_place", lambda *numbers: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["main", *arguments])
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as stopped:
            flags.FLAGS.unparse_flags()
            main.run()
        return stopped.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def trained(monkeypatch):
    """The configs and workdirs that training was started with."""
    calls = []
    monkeypatch.setattr(train, "train_and_evaluate", lambda *args, **kwargs: calls.append(args))
    return calls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode=trian"], "--mode=trian is not known; use train, evaluate"),
        (["train"], "'train' is not a flag; write --name=value"),
        ([], "--config is missing; give an experiment, such as --config=experiments/pydoc.py"),
        (["--config"], "Missing value for flag --config"),
        (["--config=experiments/pydock.py"], "--config=experiments/pydock.py is not a file"),
        (["--config=experiments"], "--config=experiments is not a file"),
        (["--config=none.py", "--config.seed=1"], "No such file or directory: 'none.py'"),
        (["--config=experiments/pydoc.py:tyni"], "variant 'tyni' is unknown: this experiment has"),
        (["--config=experiments/ptb.py:small,tiny"], "variants small and tiny exclude each other"),
        ([TINY, "--wrokdir=x"], "Unknown command line flag 'wrokdir'. Did you mean: workdir"),
        ([TINY, "--config.model.roundz=3"], "no such key: 'roundz'. Did you mean \"rounds\""),
        ([TINY, "--config.modle.rounds=3"], "no such key: 'modle'. Did you mean \"model\""),
        ([TINY, "--mode=config", "--config.model.rounds=1000000"], "model.rounds 1000000 must be"),
        ([TINY, "--mode=config", "--config.optimizer.learning_rate=1e300"], "1e+300 must be at mo"),
        ([TINY, "--mode=config", "--json=docs"], "--json=docs cannot be written"),
        (["--mode=sweep", ABLATION, "--set=rounds", "--workdir=gs://b/x"], "is an address, not"),
        ([TINY, "--peer_timeout=nan"], "--peer_timeout nan must be from 0.1 to 86400"),
        (["--mode=evaluate", "--eval.window=0"], "eval.window 0 must be at least 1, or left out"),
        ([TINY, "--config.model.rounds.x=3"], "model.rounds.x"),
        ([TINY, "--config.model.rounds=three"], "--config.model.rounds=three: invalid literal"),
        ([TINY, "--config.model=3"], "--config.model=3: Failed to parse"),
        ([TINY, "--config.model.tied_embeddings=3"], "--config.model.tied_embeddings=3"),
        (["--mode=evaluate"], "--workdir is missing; give that of a run, or several: a,b,c"),
        (["--mode=evaluate", "--workdir=none"], "workdir none does not exist; give that of a trai"),
        (
            ["--mode=evaluate", "--eval.methodz=mc"],
            "no such key: 'methodz'. Did you mean \"methods",
        ),
        (["--mode=evaluate", "--eval.samples=many"], "--eval.samples=many: invalid literal"),
        (["--mode=evaluate", "--workdir=x", "--eval.methods=mcc"], "method 'mcc' is unknown; use"),
        (["--mode=sample"], "--workdir is missing; give that of a trained run"),
        (
            ["--mode=sample", "--workdir=none"],
            "workdir none does not exist; give that of a trained",
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
            ["--mode=sweep", WIKITEXT2, "--set=rounds"],
            "experiments/wikitext2.py has no sets to sweep over",
        ),
        (["--mode=sweep", ABLATION, "--workdir=x", "--set=rownds"], "rownds"),
        (["--mode=inspect"], "--workdir is missing"),
        (["--mode=inspect", "--workdir=none"], "none does not exist"),
        (["--mode=explore"], "--workdir is missing; give that of a run, or two: a,b"),
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
    assert "model.layer_norm = True" in lines and "data.name = 'ptb'" in lines
    assert lines == sorted(lines) and len(lines) == len(configs.keys())


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
    assert set(main.EXTRAS.values()) <= set(extras["options.extras_require"])
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
    assert said == "interrupted; the same command goes on from the last checkpoint\n"


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


ONCE = """
import pathlib

with open({path!r}, "a") as file:
    file.write("executed\\n")

from experiments.pydoc import get_config
"""


@pytest.mark.slow
def test_an_experiment_is_executed_once_and_orbax_left_alone(tmp_path):
    """Checkpoints are slow to import, and most modes need none to read their flags."""
    (tmp_path / "once.py").write_text(ONCE.format(path=str(tmp_path / "log")))
    code = (
        "import sys; from mogrifier_jax import main; main.parse_flags(sys.argv); "
        "main.require_config(); print('orbax' in sys.modules, main.FLAGS.eval.samples)"
    )
    flags = [f"--config={tmp_path / 'once.py'}:tiny", "--eval.samples=3"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "3"], done.stderr
    assert (tmp_path / "log").read_text() == "executed\n"

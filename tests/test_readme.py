"""Every command, flag, path, link and Python example of the documentation holds.

Commands are checked by the parsers of the programs they call, with the experiments, variants and
overrides they name, without being carried out; Python examples are run.
"""

import ast
import configparser
import importlib.util
import itertools
import os
import pathlib
import re
import shlex
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import pydoc
from mogrifier_jax import command_line, configs, errors, launch, main
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import eval_options
from tests import workdir

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "launch/*.md", "experiments/*.md", "notebooks/*.md")
    for path in ROOT.glob(pattern)
)
MODULES = sorted(
    path.relative_to(ROOT)
    for pattern in ("experiments/*.py", "examples/*.py", "benchmarks/*.py", "mogrifier_jax/*.py")
    for path in ROOT.glob(pattern)
    if "\n    python " in path.read_text()
)
ROOMS = ("nn", "data", "training", "evaluation", "tuning", "preflight", "analysis")
FOLDERS = ("", "docs", "experiments", "launch", "benchmarks", "notebooks")
FOLDERS += tuple(f"{top}/{room}" for top in ("mogrifier_jax", "tests") for room in ("", *ROOMS))


class Wrong(Exception):
    """What a page says does not hold."""


def read(path):
    text = (ROOT / path).read_text()
    return text if path.suffix == ".md" else ast.get_docstring(ast.parse(text)) or ""


def blocks(text):
    """(language, code) of every block, fenced or indented after an empty line."""
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        yield language, code
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for code in re.findall(r"(?:^|\n\n)((?:    .*\n|    .*$|\n(?=    ))+)", rest):
        yield "", "\n".join(line[4:] for line in code.splitlines())


def commands(text):
    """Lines of blocks that are typed into a terminal, with their continuations joined."""
    for language, code in blocks(text):
        if language not in ("", "sh", "bash"):
            continue
        for line in re.sub(r"\\\n\s*", "", code).splitlines():
            words = split(line)
            if words and is_command(words[0]):
                yield words


def split(line):
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # Prose, a table or a drawing.
        return []
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)  # A variable of the environment.
    return words


def is_command(word):
    return bool(
        re.fullmatch(r"(\S*/)?(python3?|pip|make|mogrifier)|--\w.*|launch/\S+\.sh|sbatch", word)
    )


def check_command(words):
    """Raises Wrong, or whatever the command's own parser raises."""
    name, arguments = words[0].rpartition("/")[2], words[1:]
    if words[0].startswith("--"):
        check_main(["--config=experiments/text.py", *words])
    elif name.startswith("python"):
        check_python(arguments)
    elif name == "mogrifier":
        check_main(arguments)
    elif name == "pip":
        check_pip(arguments)
    elif name == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = re.findall(r"^([\w-]+):", makefile, re.M)
        variables = re.findall(r"^(\w+) \?=", makefile, re.M)
        arguments = [word for word in arguments if word.partition("=")[0] not in variables]
        require(arguments, [word for word in arguments if word not in targets])
    else:  # A script of launch/, perhaps after sbatch and its options.
        script, *arguments = itertools.dropwhile(lambda word: not word.startswith("launch/"), words)
        require([script], [] if os.access(ROOT / script, os.X_OK) else [script])
        if flagged := [word for word in arguments if word.startswith("--")]:
            check_main(flagged)


def require(words, missing):
    if missing or not words:
        raise Wrong(f"{' '.join(missing) or 'nothing'} is not there")


def check_python(arguments):
    if arguments[0] != "-m":
        require([arguments[0]], [] if (ROOT / arguments[0]).is_file() else [arguments[0]])
        return
    module, *arguments = arguments[1:]
    found = importlib.util.find_spec(module)
    if found is None:
        raise Wrong(f"there is no module {module}")
    if module in ("mogrifier_jax", "mogrifier_jax.main"):
        check_main(arguments)
    elif module == "mogrifier_jax.launch":
        launched = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch.Launcher, "run", lambda self, flags: launched.extend(flags) or 0)
            patch.setattr("signal.signal", lambda *_: None)
            launch.main(arguments)
        check_main(launched)
    elif module.startswith("benchmarks."):
        source = pathlib.Path(found.origin).read_text()
        names = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        require([module], [name for name in names if name not in source])


def check_pip(arguments):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for word in arguments[1:]:
        if extras := re.search(r"\[(.+)\]", word):
            known = config["options.extras_require"]
            require([word], [name for name in extras[1].split(",") if name not in known])
        elif word.endswith(".txt"):
            require([word], [] if (ROOT / word).is_file() else [word])


def check_main(arguments):
    """Parses as `main` does, which reads the experiment and all overrides; nothing runs."""
    # A file that an earlier command has made: any experiment stands for it.
    made = re.compile(r"--config=runs/\S+\.py")
    arguments = [made.sub("--config=experiments/ptb.py", word) for word in arguments]
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver():
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["main", *arguments])
        flags.FLAGS.unparse_flags()
        rest = command_line.parse(sys.argv)
        mode, config = flags.FLAGS.mode, flags.FLAGS.config
        if len(rest) > 1 or mode not in command_line.MODES:
            raise Wrong(f"{rest[1:]} are no flags, or --mode={mode} is no mode")
        if mode in ("train", "preflight") and config is None:
            raise Wrong(f"--mode={mode} needs an experiment")
        if config is not None:
            main.require_config()
        names = flags.FLAGS.eval.methods.split(",")
        require(["methods"], [name for name in names if name and name not in eval_options.METHODS])


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=str)
def test_commands_can_be_given(path):
    for words in commands(read(path)):
        try:
            check_command(words)
        except (Wrong, errors.UsageError) as error:
            raise AssertionError(f"{path}: {' '.join(words)}: {error}") from error


def test_commands_are_found():
    """The pages have as many commands as they seem to have."""
    for page in ("README.md", "docs/evaluation.md", "docs/pods.md", "experiments/README.md"):
        text = (ROOT / page).read_text()
        shown = len(re.findall(r"^\s*(?:python -m mogrifier_jax|mogrifier --)", text, re.M))
        found = sum("mogrifier" in " ".join(words[:3]) for words in commands(text))
        assert found == shown > 0


@pytest.mark.parametrize(
    "line",
    [
        "python -m mogrifier_jax.main --config=experiments/ptb.py --wrokdir=runs/ptb",
        "python -m mogrifier_jax.main --config=experiments/pbt.py",
        "python -m mogrifier_jax.main --config=experiments/ptb.py:lstn",
        "python -m mogrifier_jax.main --config=experiments/ptb.py --config.model.roundz=3",
        "python -m mogrifier_jax.main --mode=evalute --workdir=runs/ptb",
        "python -m mogrifier_jax.main --mode=evaluate --workdir=runs/ptb --eval.methods=mcc",
        "python -m mogrifier_jax.main --workdir=runs/ptb",
        "python -m mogrifier_jax.mian",
        "mogrifier --config=pbt",
        "mogrifier --config=ptb --wrokdir=runs/ptb",
        "python -m mogrifier_jax.launch --processes=2 -- --config=experiments/pbt.py",
        "python -m benchmarks.recurrence --no_such_flag",
        "python examples/forcasting.py",
        "pip install .[datas]",
        "pip install -r requirement.txt",
        "make trian",
        "launch/tpu_pods.sh my-slice",
        "launch/tpu_pod.sh my-slice us-west4-a /runs/x --config=experiments/enwik8.py:lst",
        "--config.data.nam=text",
    ],
)
def test_mistakes_in_commands_are_found(line, capsys):
    (words,) = commands(f"Text:\n\n    {line}\n")
    with pytest.raises((Wrong, errors.UsageError, SystemExit)):
        check_command(words)


# What is named inside sentences.


def inline(text):
    """Pieces of code within sentences and tables."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", text)


def is_flag(name):
    """Whether main, launch or an experiment has it; those of XLA are not ours to know."""
    if name.startswith("xla_"):
        return True
    if name.startswith("config."):
        config = configs.load_config(str(ROOT / "experiments" / "text.py"))
        return find_key(config, name.removeprefix("config."))
    if name.startswith("eval."):
        return find_key(eval_options.defaults(), name.removeprefix("eval."))
    return (
        name in ("eval", "help", "version", "flagfile")
        or name in flags.FLAGS
        or f'"--{name}"' in pathlib.Path(launch.__file__).read_text()
    )


def find_key(config, name):
    for part in name.split("."):
        if part not in config:
            return False
        config = config[part]
    return True


def unknown_names(text):
    """Flags that nothing has and files that are not there."""
    for code in inline(text):
        for name in re.findall(r"(?<![\w-])--([A-Za-z][\w.]*\w)", code):
            if not is_flag(name):
                yield f"--{name}"
        if re.fullmatch(r"[\w./-]+\.(py|sh|yaml|md)", code):
            if not any((ROOT / folder / code).exists() for folder in FOLDERS):
                yield code
    for target in re.findall(r"\]\(([^):]+)\)", text):
        yield "link", target


def anchors(path):
    """The names of the headings of a page, as links have them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        yield kept.replace(" ", "-")


def broken(path, text):
    for name in unknown_names(text):
        if not isinstance(name, tuple):
            yield name
            continue
        file, _, anchor = name[1].partition("#")
        target = (ROOT / path).parent / file if file else ROOT / path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield name[1]


# Names that stand for those of a reader, and of files that are made.
THEIRS = {"file.py", "--config.key", "best.py", "report.md"}


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_names_and_links_in_sentences_exist(path):
    assert not set(broken(path, read(path))) - THEIRS


@pytest.mark.parametrize(
    "text",
    [
        *("use `--eval.strips=0`", "`--config.data.nam=x`", "`--pear_timeout`"),
        *("see `tests/golde.py`", "[here](docs/non.md)", "| `preflihgt.py` |"),
        *("[here](docs/data.md#your-text)", "[here](#citing)"),
    ],
)
def test_mistakes_in_sentences_are_found(text):
    assert list(broken(pathlib.Path("README.md"), text))


# Python examples.

RUN = [page for page in PAGES if any(language == "python" for language, _ in blocks(read(page)))]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder with a trained run, and no corpora prepared."""
    home = tmp_path_factory.mktemp("home")
    config = pydoc.get_config("tiny")
    with config.unlocked():
        config.model.update(hidden_size=6, num_layers=1, rounds=2)
    vocab = corpora.load_corpus("pydoc").vocabulary
    workdir.write_run(home / "runs" / "pydoc", config, vocab)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("HOME", str(home))
        patch.setenv("MOGRIFIER_CACHE_DIR", str(home / ".cache" / "mogrifier_jax"))
        yield home


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=str)
def test_python_examples_run(path, elsewhere):
    """One after the other, as one would type them."""
    names = {"__name__": "__main__"}
    for language, code in blocks(read(path)):
        if language != "python":
            continue
        program = compile(code, str(path), "exec")
        if 'tfds.data_source("ptb"' in code and not prepare_ptb(elsewhere):
            continue
        exec(program, names)


def prepare_ptb(home):
    """Whether the corpus that an example reads is at hand."""
    if not os.environ.get("MOGRIFIER_DATA_DIR"):
        return False
    corpora.load_corpus("ptb", data_dir=str(home / ".cache" / "mogrifier_jax"))
    return True


def test_pages_with_python_are_found():
    assert {"README.md", "docs/data.md", "docs/cells.md"} <= set(map(str, RUN))

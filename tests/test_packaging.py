"""The wheel: alone, outside the repository, it is enough for the cells, and quick to import."""

import email
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import zipfile

import pytest

import mogrifier_jax

ROOT = pathlib.Path(__file__).parents[1]
HEAVY = {"tensorflow_datasets", "tensorflow", "matplotlib", "tensorboardX", "optuna", "torch"}
HEAVY |= {"orbax", "pandas", "array_record", "scipy"}
EXPERIMENTS = [*ROOT.glob("experiments/*.py"), *ROOT.glob("experiments/studies/*.json")]
URL = "https://example.org/someone/mogrifier_jax"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What git knows of, as the sources may have been built before."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines() or pytest.skip("not a checkout"):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


def build_wheel(source, folder, **variables):
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=source,
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build_wheel(source, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a new environment with the wheel; the libraries are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    interpreter = folder / "bin" / "python"
    packages = next(folder.glob("lib/*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # A path file of another one's packages does not see the path files there, so that an
    # installation of the sources in this environment stays unseen.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


@pytest.fixture
def run(python, tmp_path):
    """Runs a program outside the repository, as somebody who has installed the wheel would."""

    def run(program):
        kept = {"HOME", "PATH", "XLA_FLAGS", "JAX_PLATFORMS", "TMPDIR"}
        environment = {key: value for key, value in os.environ.items() if key in kept}
        done = subprocess.run(
            [str(python), "-c", program],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def read_wheel(wheel):
    """The names of its files, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        return names, email.message_from_bytes(archive.read(metadata))


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names, about = read_wheel(wheel)
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"mogrifier_jax"}
    assert "mogrifier_jax/evaluation/paper_results.json" in names
    assert "mogrifier_jax/data/datasets/ptb.py" in names
    files = {f"mogrifier_jax/analysis/explore.{kind}" for kind in ("css", "html", "js")}
    assert files <= set(names)
    experiments = {f"mogrifier_jax/{path.relative_to(ROOT)}" for path in EXPERIMENTS}
    assert experiments and experiments <= set(names)
    assert "mogrifier_jax/evaluation/shipped/pydoc.safetensors" in names
    assert any(name.endswith("LICENSE") for name in names) and "mogrifier_jax/py.typed" in names
    assert about["Name"] == "mogrifier_jax" and about["Version"] == mogrifier_jax.__version__
    needed = [item for item in about.get_all("Requires-Dist") if "extra ==" not in item]
    assert not any(re.match("tensorflow|matplotlib|optuna|torch|tensorboard", n) for n in needed)
    assert any(name.startswith("flax") for name in needed)


def test_the_wheel_has_the_command_and_the_experiments(wheel, run):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "mogrifier = mogrifier_jax.main:run" in archive.read(entry_points).decode()
    experiments = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    assert {f"mogrifier_jax/experiments/{name}.py" for name in experiments} <= set(names)
    assert "mogrifier_jax/experiments/studies/pydoc.json" in names
    program = "import sys; from mogrifier_jax import main; sys.argv[1:] = {}; main.run()"
    listed = run(program.format(["--mode=config"])).splitlines()
    assert {line.split()[0].removeprefix("--config=") for line in listed} == experiments
    shown = run(program.format(["--mode=config", "--config=enwik8:lstm,48m"]))
    assert "data.name = 'enwik8'" in shown and "model.rounds = 0" in shown


def test_the_cell_of_the_readme_learns_outside_the_repository(run):
    (example,) = re.findall(
        r"```python\n(import jax\n.*?MogrifierLSTMCell.*?)```",
        (ROOT / "README.md").read_text(),
        re.S,
    )
    step = """
import optax, pathlib, mogrifier_jax
assert "environment" in mogrifier_jax.__file__, mogrifier_jax.__file__

def loss(variables):
    return jnp.square(rnn.apply(variables, xs) - 1).mean()

tx = optax.adam(1e-2)
value, grads = jax.jit(jax.value_and_grad(loss))(variables)
updates, _ = tx.update(grads, tx.init(variables))
print(bool(jax.jit(loss)(optax.apply_updates(variables, updates)) < value))
"""
    assert run(example + step).splitlines() == ["(2, 10, 64)", "True"]


def test_importing_loads_nothing_but_flax_jaxtyping_and_what_is_ours(run):
    statements = (
        "import flax",
        "import mogrifier_jax",
        "import flax.linen, absl.logging; from jaxtyping import PyTree",
        "from mogrifier_jax import MogrifierLSTMCell, LanguageModel",
        "import mogrifier_jax.training.train",
    )
    # What is there after each, in one process.
    program = "\n".join(f"{s}; print(*sys.modules)" for s in ("import sys", *statements))
    _, flax, package, linen, cells, training = map(str.split, run(program).splitlines())

    def foreign(loaded, beside):
        ours = {"mogrifier_jax", *sys.stdlib_module_names}
        return {name for name in set(loaded) - set(beside) if name.split(".")[0] not in ours}

    assert not foreign(package, flax)
    assert not foreign(cells, linen) and not set(linen) & HEAVY
    assert HEAVY & foreign(training, linen)  # So it would be seen.


def test_every_module_is_in_the_wheel_and_none_needs_the_repository(run):
    names = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in (ROOT / "mogrifier_jax").rglob("*.py")
        if path.name not in ("main.py", "__init__.py")
    ]
    listed = subprocess.run(
        ["git", "ls-files", "mogrifier_jax"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    names = [name for name in names if name.replace(".", "/") + ".py" in listed.split()]
    run(f"import importlib\nfor name in {names}: importlib.import_module(name)")


def test_links_of_the_description_work_on_a_package_index(wheel, source, tmp_path):
    _, about = read_wheel(wheel)
    _, with_url = read_wheel(build_wheel(source, tmp_path, PROJECT_URL=URL))
    links = re.compile(r"\]\(([^)]+)\)")
    # Without an address there is nothing to link to; with one, links lead to files of the version.
    plain, linked = (links.findall(each.get_payload()) for each in (about, with_url))
    assert plain and all(target.startswith("https://arxiv.org/") for target in plain)
    assert len(linked) > 20 and all(target.startswith("https://") for target in linked)
    ours = [target for target in linked if target.startswith(URL)]
    for target in ours:
        kind, version, path = target.partition("#")[0].removeprefix(f"{URL}/").split("/", 2)
        assert version == f"v{mogrifier_jax.__version__}" and (ROOT / path).is_file()
        assert kind == ("raw" if path.endswith((".png", ".svg")) else "blob")
    assert f"{URL}/raw/v{mogrifier_jax.__version__}/docs/explore.png" in ours
    addresses = dict(each.split(", ") for each in with_url.get_all("Project-URL"))
    assert addresses["Source"] == URL and {"Documentation", "Issues", "Changelog"} <= set(addresses)
    assert "](docs/" in (ROOT / "README.md").read_text()  # So it would be seen.


def test_the_command_and_its_experiments_work_outside_the_repository(wheel, run):
    with zipfile.ZipFile(wheel) as archive:
        (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        entry = re.search(r"^mogrifier = ([\w.]+):(\w+)$", archive.read(points).decode(), re.M)
    module, function = entry.groups()
    command = "import sys; sys.argv[1:] = ['--mode=config', '--config=pydoc:lstm']; "
    printed = run(command + f"from {module} import {function}; {function}()")
    assert "model.rounds" in printed
    program = (
        "import mogrifier_jax; m = mogrifier_jax.load('pydoc'); print(m.score('The ').nats.shape)"
    )
    assert run(program).split() == ["(4,)"]

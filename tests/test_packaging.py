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

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from what git knows of, as the sources may have been built before."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines() or pytest.skip("not a checkout"):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True
    )
    return next(folder.glob("*.whl"))


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


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"mogrifier_jax"}
    assert "mogrifier_jax/evaluation/paper_results.json" in names
    assert "mogrifier_jax/data/datasets/ptb.py" in names
    files = {f"mogrifier_jax/analysis/explore.{kind}" for kind in ("css", "html", "js")}
    assert files <= set(names)
    assert any(name.endswith("LICENSE") for name in names) and "mogrifier_jax/py.typed" in names
    assert about["Name"] == "mogrifier_jax" and about["Version"] == mogrifier_jax.__version__
    needed = [item for item in about.get_all("Requires-Dist") if "extra ==" not in item]
    assert not any(re.match("tensorflow|matplotlib|optuna|torch|tensorboard", n) for n in needed)
    assert any(name.startswith("flax") for name in needed)


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


def test_importing_loads_nothing_but_flax_and_what_is_ours(run):
    statements = (
        "import flax",
        "import mogrifier_jax",
        "import flax.linen, absl.logging",
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

"""Records what the TPU compiler writes about a small program, for `preflight/test_schedules.py`.

    python -m tests.schedule_dumps    # With the extra `preflight`; no TPU is needed.

A zip in tests/data for each version of libtpu holds the program (`program.hlo.txt`) and the files
that `schedules.Recording` reads, as they were written.
"""

import importlib.metadata
import pathlib
import re
import zipfile

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mogrifier_jax.preflight import schedules, targets, topologies

DATA = pathlib.Path(__file__).parent / "data"
STEPS, MORE, ROWS, FEATURES = 5, 3, 32, 256  # Of the two loops.
LONG = 4096  # Rows of an array that is too large for the fast memory as a whole.


def double(xs):
    """Twice xs, by a kernel of our own: a custom call."""

    def kernel(x, y):
        y[...] = 2 * x[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(xs.shape, xs.dtype))(xs)


def program(w, h, a, b):
    """Two loops with the same body, a custom call, and large work that is done block by block."""

    def step(h, _):
        return jnp.tanh(h @ w), None

    h = double(lax.scan(step, h, None, length=STEPS)[0])
    h = lax.scan(step, h, None, length=MORE)[0]
    return h, jnp.tanh(a) * b


def arguments():
    """Abstract operands on one v5e."""
    mesh = topologies.make_mesh(targets.parse("v5e:1x1"), 1, 1)
    one = jax.sharding.NamedSharding(mesh, jax.P())
    shapes = (FEATURES, FEATURES), (ROWS, FEATURES), (LONG, 1024), (LONG, 1024)
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=one) for shape in shapes]


def record() -> pathlib.Path:
    """Compiles the program and writes the zip."""
    path = DATA / f"schedule_libtpu_{importlib.metadata.version('libtpu')}.zip"
    compiled = jax.jit(program).lower(*arguments()).compile()
    assert schedules._folder
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        # The first lines are tables of source files, which differ from machine to machine.
        text = re.sub(r"^\d+ .*\n", "", compiled.as_text(), flags=re.MULTILINE)
        archive.writestr("program.hlo.txt", text)
        for file in sorted(pathlib.Path(schedules._folder).iterdir()):
            wanted = "-packed-bundles-post-ra" in file.name or "deduplication-map" in file.name
            if wanted and "schedule-analysis" not in file.name:
                archive.write(file, file.name)
    return path


if __name__ == "__main__":
    print(record())

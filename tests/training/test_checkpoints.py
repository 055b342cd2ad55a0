"""Checkpoints: exact, on any mesh, whole after a kill, and never wrong without a word."""

import gc
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.training import checkpoints, orbax_storage, signals, state_arrays, workdirs
from tests import resolved_configs


class Carry(NamedTuple):
    c: jax.Array
    h: jax.Array


@flax.struct.dataclass
class State:
    step: jax.Array
    params: Any
    opt_state: Any
    carry: Any
    key: jax.Array
    flag: jax.Array
    absent: Any = None


def make_state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    params = {
        "embed": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        "cell": {"kernel": jnp.asarray(rng.normal(size=(8, 32)), jnp.bfloat16)},
        "nothing": jnp.zeros((0, 4)),
    }
    return State(
        step=jnp.int32(seed),
        params=params,
        opt_state=optax.adam(0.1).init(params),
        carry=(Carry(jnp.full((8, 4), float(seed)), jnp.ones((8, 4), jnp.bfloat16)),),
        key=jax.random.key(seed),
        flag=jnp.asarray(seed % 2 == 0),
    )


def make_mesh(devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def shard(state, devices: int):
    """Shards whatever has a first axis of 8 or 16 over `data`."""
    mesh = make_mesh(devices)

    def spec(leaf):
        divides = leaf.ndim and leaf.shape[0] in (8, 16)
        return NamedSharding(mesh, PartitionSpec("data") if divides else PartitionSpec())

    return jax.tree.map(lambda leaf: jax.device_put(leaf, spec(leaf)), state)


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def same(a, b) -> bool:
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with checkpoints of steps 1 (the best) and 2."""
    workdir = tmp_path_factory.mktemp("saved")
    with checkpoints.Checkpoints(workdir) as manager:
        manager.save(1, make_state(1), info={"turn": 1, "best_xe": 0.1 + 0.2}, best=True)
        manager.save(2, make_state(2), info={"turn": 2, "best_xe": 0.1 + 0.2}, best=False)
    return workdir


@pytest.fixture
def workdir(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def restore(workdir, *, which="latest", like=None, read_only=True, **options):
    with checkpoints.Checkpoints(workdir, read_only=read_only) as manager:
        return manager.restore(abstract(like or make_state(0)), which=which, **options)


def test_restored_is_what_was_saved(saved):
    latest, best = restore(saved), restore(saved, which="best")
    assert (latest.step, best.step) == (2, 1)
    assert_same(latest.state, make_state(2))
    assert_same(best.state, make_state(1))
    assert latest.info == {"turn": 2, "best_xe": 0.1 + 0.2}
    assert not same(latest.state, best.state)
    draw = jax.random.normal(latest.state.key)
    assert draw == jax.random.normal(jax.random.key(2)) != jax.random.normal(jax.random.key(1))


def test_a_new_workdir_has_nothing_to_restore(tmp_path):
    assert restore(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 1])
def test_restores_onto_another_mesh(tmp_path, devices):
    state = shard(make_state(3), 8)
    with checkpoints.Checkpoints(tmp_path) as manager:
        manager.save(3, state, info={}, best=True)
    target = shard(make_state(0), devices)
    restored = restore(tmp_path, like=target).state
    assert_same(restored, state)
    assert restored.params["embed"].sharding == target.params["embed"].sharding
    assert restored.params["embed"].sharding != state.params["embed"].sharding


def test_part_of_a_state_can_be_restored(saved):
    target = make_state(0).replace(opt_state=None, carry=None)
    restored = restore(saved, like=target, partial=True).state
    assert_same(restored, make_state(2).replace(opt_state=None, carry=None))
    with pytest.raises(errors.UsageError, match=r"opt_state.* vs absent \(expected\)"):
        restore(saved, like=target)


def test_another_state_is_refused_and_not_taken_for_damage(workdir):
    target = make_state(0)
    target.params["embed"] = jnp.zeros((16, 9))
    with pytest.raises(errors.UsageError, match=re.escape("params.embed: float32[16, 8] (saved)")):
        restore(workdir, like=target, read_only=False)
    assert restore(workdir).step == 2


# Which are kept.


def run_saves(workdir, bests: list[bool], keep=2) -> list[int]:
    with checkpoints.Checkpoints(workdir, keep=keep) as manager:
        for step, best in enumerate(bests):
            manager.save(step, {"x": jnp.float32(step)}, info={}, best=best)
    with checkpoints.Checkpoints(workdir, read_only=True) as manager:
        return manager.steps


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    assert run_saves(tmp_path / "a", [True, True, False, False, False]) == [1, 3, 4]
    # The best of step 3 is 1: whoever falls back to 3 finds it.
    assert run_saves(tmp_path / "b", [True, True, False, False, True]) == [1, 3, 4]
    assert run_saves(tmp_path / "c", [False] * 5, keep=1) == [4]
    with checkpoints.Checkpoints(tmp_path / "b") as manager:
        assert (manager.latest_step, manager.best_step) == (4, 4)
        manager.save(5, {"x": jnp.float32(5)}, info={}, best=False)  # The best is remembered.
        manager.wait()
        assert (manager.latest_step, manager.best_step) == (5, 4)
        with pytest.raises(errors.UsageError, match="step 3 cannot be saved"):
            manager.save(3, {"x": jnp.float32(3)}, info={}, best=False)


def test_the_same_step_can_be_saved_again(workdir):
    with checkpoints.Checkpoints(workdir) as manager:
        manager.restore(abstract(make_state(0)))
        manager.save(2, make_state(7), info={"again": True}, best=True)
    assert_same(restore(workdir, which="best").state, make_state(7))
    assert not list(workdir.glob("checkpoints/*.replaced"))


def test_a_kill_while_a_step_is_saved_again_keeps_the_old_one(workdir):
    (workdir / "checkpoints" / "2").rename(workdir / "checkpoints" / "2.replaced")
    (workdir / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir()
    (workdir / "checkpoints" / "0.removed").mkdir()
    assert restore(workdir, read_only=False).step == 2
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["1", "2", "lock"]


def test_a_run_waits_for_one_that_is_ending(workdir, caplog):
    first = checkpoints.Checkpoints(workdir)
    threading.Timer(0.5, first.close).start()
    with checkpoints.Checkpoints(workdir) as manager:
        assert manager.latest_step == 2
    assert "waiting for its end" in caplog.text


def test_one_writer_and_any_readers(workdir, monkeypatch):
    with checkpoints.Checkpoints(workdir) as manager:
        monkeypatch.setattr(checkpoints, "PATIENCE", 0.2)
        with pytest.raises(errors.UsageError, match="another run is writing"):
            checkpoints.Checkpoints(workdir)
        manager.save(3, make_state(3), info={}, best=False)
        assert restore(workdir).step in (2, 3)
    assert restore(workdir, read_only=False).step == 3


# Damage.


def data_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the arrays, which one depends on sizes: all are treated alike."""
    return [f for f in (path / "state").rglob("d/*") if f.is_file()]


def truncate(*files):
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: pathlib.Path, needle: bytes):
    """Flips one bit in the middle of `needle`."""
    content = bytearray(file.read_bytes())
    place = content.index(needle) + len(needle) // 2
    content[place] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "data truncated": lambda path: truncate(*data_files(path)),
    "data emptied": lambda path: [f.write_bytes(b"") for f in data_files(path)],
    "data deleted": lambda path: [f.unlink() for f in data_files(path)],
    "manifest truncated": lambda path: truncate(path / "state" / "manifest.ocdbt"),
    "manifest deleted": lambda path: (path / "state" / "manifest.ocdbt").unlink(),
    "metadata truncated": lambda path: truncate(path / "state" / "_METADATA"),
    "state missing": lambda path: shutil.rmtree(path / "state"),
    "info missing": lambda path: shutil.rmtree(path / "info"),
    "info truncated": lambda path: truncate(path / "info" / "info.json"),
    "info flipped": lambda path: flip(path / "info" / "info.json", b'"turn": 2,'),
    "info emptied": lambda path: (path / "info" / "info.json").write_text(""),
    "info of another kind": lambda path: (path / "info" / "info.json").write_text("[1]"),
    "everything missing": lambda path: [shutil.rmtree(path), path.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_one_before_is_restored(workdir, caplog, damage):
    path = workdir / "checkpoints" / "2"
    DAMAGE[damage](path)
    restored = restore(workdir)
    assert restored.step == 1
    assert_same(restored.state, make_state(1))
    assert "step 2 is damaged" in caplog.text and str(path) in caplog.text
    assert path.exists()  # A reader changes nothing.


@pytest.mark.parametrize("name", ["state/_sharding", "_CHECKPOINT_METADATA", "commit_success.txt"])
def test_files_without_content_are_not_missed(workdir, name):
    (workdir / "checkpoints" / "2" / name).unlink()
    assert_same(restore(workdir).state, make_state(2))


def test_flipped_bits_are_found_where_orbax_sees_none(tmp_path, monkeypatch, caplog):
    state = {"weights": jax.random.normal(jax.random.key(0), (64, 64))}
    with checkpoints.Checkpoints(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state, info={}, best=False)
    # Random mantissas do not compress: the array lies in the file as it is.
    raw = np.asarray(state["weights"]).tobytes()
    flipped = False
    for file in data_files(tmp_path / "checkpoints" / "2"):
        content = bytearray(file.read_bytes())
        if len(content) > len(raw) // 2:
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            flipped = True
    assert flipped
    assert restore(tmp_path, like=state).step == 1
    assert "the checksum of weights is wrong" in caplog.text
    # Control: without our checksums nobody notices.
    monkeypatch.setattr(state_arrays, "compute_checksums", lambda arrays: {})
    unnoticed = restore(tmp_path, like=state)
    assert unnoticed.step == 2
    assert not same(unnoticed.state, state)


def test_sigterm_while_a_checkpoint_is_read_is_no_damage(workdir, monkeypatch):
    def read(*_, **__):
        signals.interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(orbax_storage, "read_arrays", read)
        with pytest.raises(errors.Interrupted):
            restore(workdir, read_only=False)
    signals.interrupted.clear()
    assert restore(workdir).step == 2


def test_a_resumed_run_sets_damage_aside_and_saves_that_step_again(workdir):
    truncate(workdir / "checkpoints" / "2" / "info" / "info.json")
    with checkpoints.Checkpoints(workdir) as manager:
        assert manager.restore(abstract(make_state(0))).step == 1
        manager.save(2, make_state(2), info={}, best=False)
    assert (workdir / "checkpoints" / "2.damaged" / "state").exists()
    assert_same(restore(workdir).state, make_state(2))


@pytest.mark.slow
def test_nothing_good_left_is_an_error_that_lists_what_was_tried(workdir):
    for step in ("1", "2"):
        truncate(*data_files(workdir / "checkpoints" / step))
    with pytest.raises(errors.UsageError, match=r"checkpoints/2: .*checkpoints/1: "):
        restore(workdir, read_only=False)
    assert sorted(p.name for p in (workdir / "checkpoints").glob("[12]*")) == ["1", "2"]


def test_a_damaged_best_is_not_replaced_by_the_latest(workdir, caplog):
    truncate(*data_files(workdir / "checkpoints" / "1"))
    with pytest.raises(errors.UsageError, match=r"no good checkpoint \(best\)"):
        restore(workdir, which="best")
    assert "step 1 is damaged" in caplog.text
    assert restore(workdir).step == 2


# Donation and death.


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_buffers_may_be_donated_while_they_are_saved(tmp_path, devices):
    sharding = NamedSharding(make_mesh(devices), PartitionSpec("data"))
    make = jax.jit(lambda: {"x": jnp.arange(4_000_000.0)}, out_shardings={"x": sharding})
    update = jax.jit(lambda state: {"x": state["x"] * -1 - 1}, donate_argnums=0)
    state = make()
    pointer = state["x"].addressable_shards[0].data.unsafe_buffer_pointer()
    state = update(state)  # Control: donation does write in place.
    assert state["x"].addressable_shards[0].data.unsafe_buffer_pointer() == pointer
    state = make()
    with checkpoints.Checkpoints(tmp_path) as manager:
        manager.save(1, state, info={}, best=False)
        for _ in range(5):
            state = update(state)
        state["x"].block_until_ready()
    restored = restore(tmp_path, like=make()).state
    assert_same(restored, make())
    # And a restored state may be donated.
    assert float(update(restored)["x"][3]) == -4.0


WRITER = """
import sys, jax, jax.numpy as jnp
from mogrifier_jax.training import checkpoints
with checkpoints.Checkpoints(sys.argv[1]) as manager:
    for step in range(1, 100):
        state = {"x": jax.random.normal(jax.random.key(step), (8_000_000,))}
        manager.save(step, state, info={"turn": step}, best=step == 1)
        if step == 2:
            manager.wait()
            print("saved", flush=True)
            sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_killed_save_leaves_the_one_before(tmp_path):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout.readline() == b"saved\n"
    process.stdin.write(b"go\n")
    process.stdin.flush()
    while not list(tmp_path.glob("checkpoints/*.orbax-checkpoint-tmp/state*/*")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # Usually 2; a slow machine may have let it get further.
    last = max(int(path.name) for path in tmp_path.glob("checkpoints/*") if path.name.isdecimal())

    target = {"x": jnp.zeros(8_000_000)}
    with checkpoints.Checkpoints(tmp_path) as manager:  # The lock of the dead is no hindrance.
        assert not list(tmp_path.glob("checkpoints/*.orbax-checkpoint-tmp"))
        restored = manager.restore(abstract(target))
        assert restored.step == last and restored.info == {"turn": last}
        assert_same(restored.state, {"x": jax.random.normal(jax.random.key(last), (8_000_000,))})
        manager.save(last + 1, restored.state, info={}, best=False)
        manager.wait()
        assert (manager.latest_step, manager.best_step) == (last + 1, 1)


# Checksums.

ARRAYS = {
    "float32": np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4),
    "bfloat16": jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16).reshape(16, 4),
    "int32": np.arange(64, dtype=np.int32).reshape(16, 4),
    "uint8": np.arange(64, dtype=np.uint8).reshape(16, 4),
    "bool": np.arange(64).reshape(16, 4) ** 2 % 7 < 3,
}


def checksum(array) -> str:
    return state_arrays.compute_checksums({"x": jnp.asarray(array)})["x"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ARRAYS)
def test_checksum_is_the_same_on_every_mesh_and_sees_any_change(dtype):
    array = np.asarray(ARRAYS[dtype])
    sums = {
        checksum(jax.device_put(array, NamedSharding(make_mesh(n), spec)))
        for n in (2, 8)
        for spec in (PartitionSpec("data"), PartitionSpec())
    } | {checksum(array)}
    assert len(sums) == 1
    swapped = array.copy()
    swapped[[1, 2], [0, 1]] = swapped[[2, 1], [1, 0]]
    flipped = array.copy()
    if dtype == "bool":
        flipped[3, 1] = not flipped[3, 1]
    else:
        flipped.view(np.uint8)[3, 1] ^= 1
    others = [swapped, flipped, array.T, array[::-1], array[:, ::-1]]
    assert all(checksum(other) not in sums for other in others)


def test_checksum_sees_exchanged_signs():
    """Where a sum weighted by odd numbers would not: the difference is 2**31 times an even one."""
    assert checksum(np.float32([1, -1, 3, -3])) != checksum(np.float32([-1, 1, -3, 3]))
    assert checksum(np.float32([0.0, 1])) != checksum(np.float32([-0.0, 1]))


def test_checksums_of_scalars_and_of_nothing():
    assert checksum(np.float32(1)) != checksum(np.float32(2))
    assert checksum(np.zeros((0, 3), np.float32)) == "0" * 16


# Run files.


def make_config() -> config_dict.ConfigDict:
    config = config_dict.ConfigDict({"seed": 1, "mesh": {"data": -1}, "model": {"rounds": 5}})
    config.data = {"name": "text", "batch_size": 2, "window": 3, "fractions": (0.5, 0.25, 0.25)}
    config.optimizer = {"clip_norm": config_dict.placeholder(float), "eps": 1e-9}
    config.optimizer.update({"learning_rate": 0.1, "l2_penalty": 0.0})
    config.schedule = {"turns": 1, "steps_per_turn": 2}
    return config.lock()


VOCABULARY = '{"level": "word", "tokens": ["a"]}'


def test_config_is_read_as_it_was_written(tmp_path):
    workdirs.write_run_files(tmp_path, make_config(), VOCABULARY)
    config = workdirs.read_config(tmp_path)
    assert config == configs.base(make_config()) and config.is_locked
    assert config.data.fractions == (0.5, 0.25, 0.25)
    assert config.data.get_type("length") is int  # Of a key that is not in the file.
    assert config.optimizer.get_type("clip_norm") is float
    assert workdirs.read_vocabulary(tmp_path) == VOCABULARY
    workdirs.write_run_files(tmp_path, config, VOCABULARY)
    starts = json.loads((tmp_path / "version.json").read_text())
    assert len(starts) == 2 and starts[0]["jax"] == jax.__version__
    with pytest.raises(errors.UsageError, match="vocabulary"):
        workdirs.write_run_files(tmp_path, config, '["b"]')


def test_a_workdir_of_an_earlier_version_has_the_defaults_of_later_keys(tmp_path):
    """The recorded configs are from before the base config: without most keys."""
    recorded = json.loads(resolved_configs.PATH.read_text())["ptb.py"]
    values: dict = {"_types": {"model.hidden_size": "int"}}
    for name, value in recorded["values"].items():
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    assert "layer_norm" not in values["model"] and "momentum" not in values["optimizer"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = configs.load_config(str(resolved_configs.ROOT / "experiments" / "ptb.py"))
    workdirs.check_config(tmp_path, config)
    assert workdirs.read_config(tmp_path).model.layer_norm is False
    config.model.layer_norm = True
    with pytest.raises(errors.UsageError, match=r"layer_norm: False \(in the workdir\) vs True"):
        workdirs.check_config(tmp_path, config)


def test_another_config_is_refused_with_the_difference(tmp_path):
    config = make_config().unlock()
    workdirs.check_config(tmp_path, config)  # A new workdir agrees with all.
    workdirs.write_run_files(tmp_path, config, "[]")
    config.mesh.data = 8
    workdirs.check_config(tmp_path, config)
    config.model.rounds = 3
    config.optimizer.momentum = 0.5
    with pytest.raises(errors.UsageError) as error:
        workdirs.check_config(tmp_path, config)
    assert "model.rounds: 5 (in the workdir) vs 3 (requested)" in str(error.value)
    assert "optimizer.momentum: 0.0 (in the workdir) vs 0.5 (requested)" in str(error.value)
    assert "mesh" not in str(error.value)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(errors.UsageError, match=r"no config\.json"):
        workdirs.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(errors.UsageError, match="not valid JSON"):
        workdirs.read_config(tmp_path)


def count_objects():
    gc.collect()
    return len(gc.get_objects())


def test_saving_keeps_nothing_in_memory(tmp_path, caplog):
    """A run of thousands of turns saves thousands of times."""
    for logger in (None, "absl"):
        caplog.set_level("ERROR", logger=logger)  # Captured records would be kept.
    state = {"x": jnp.arange(6.0)}
    with checkpoints.Checkpoints(tmp_path) as saved:

        def save(steps):
            for step in steps:
                saved.save(step, state, info={}, best=True)
            saved.wait()

        counts = []
        for first in range(0, 24, 4):
            save(range(first, first + 4))
            counts.append(count_objects())
        # TensorStore would keep more for each save. Other threads may add something once.
        assert min(np.diff(counts)) < 4, counts


# Signals.


def test_signals_ask_for_a_stop():
    before = signal.getsignal(signal.SIGTERM)
    with signals.StopRequests() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before

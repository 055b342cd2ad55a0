"""Many runs in one program: each as if it were alone, on one device or on many."""

import contextlib
import importlib.util
import math
import signal

import jax
import numpy as np
import pytest

from experiments import pydoc
from mogrifier_jax import errors
from mogrifier_jax.data import tasks
from mogrifier_jax.evaluation import pretrained
from mogrifier_jax.preflight import costs, targets
from mogrifier_jax.training import metrics, programs, runs, train
from tests import quick
from tests import workdir as written

SMALL = dict(
    log_every=2,
    data=dict(batch_size=8, window=4),
    model=dict(num_layers=1, hidden_size=8, rounds=1, rank=2),
    averaging=dict(trigger_turns=1, trigger_at_the_latest=1),
    evaluation=dict(temperature_tokens=64, max_windows=2),
    schedule=dict(turns=2, steps_per_turn=4, early_stopping_turns=0),
    dropout=dict(state=0.2),
)
# The second diverges, the third stops after a turn, as it does not move.
RATES = ((4e-3, 0.1), (1e30, 0.1), (1e-30, 0.1), (1e-2, 0.5))


def make_config(learning_rate=4e-3, dropout=0.1, **sections):
    config = pydoc.get_config("tiny")
    with config.unlocked():
        config.update(SMALL)
        config.update(sections)
        config.optimizer.learning_rate = learning_rate
        config.dropout.input = dropout
    return config.lock()


def make_stack(rates, mesh):
    """The runs and what they compile, once for all tests below."""
    task = runs.make_task(make_config(), mesh)
    made = [runs.make_run(make_config(*pair), programs.home(mesh), task) for pair in rates]
    return made, programs.Together(made[0], len(rates), mesh)


@pytest.fixture(scope="module")
def four():
    """Four runs on two devices, two on each."""
    return make_stack(RATES, programs.make_mesh(4, jax.devices()[:2]))


def train_all(made, functions, folder, on_turn=None):
    with contextlib.ExitStack() as stack:
        books = [
            stack.enter_context(train.open_book(run, str(folder / str(i)), on_turn))
            for i, run in enumerate(made)
        ]
        return train.train(books, functions)


@pytest.fixture(scope="module")
def unbroken(four, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stacked")
    return folder, train_all(*four, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The first and the last run, alone on one device."""
    folder = tmp_path_factory.mktemp("alone")
    mesh = programs.home(programs.make_mesh(1))
    results = {}
    functions = None
    for i in (0, 3):
        run = runs.make_run(make_config(*RATES[i]), mesh)
        functions = functions or programs.Alone(run)
        (results[i],) = train_all([run], functions, folder / str(i))
    return folder, results


def records(folder, *keys):
    return {key: [r[key] for r in metrics.read_metrics(folder) if key in r] for key in keys}


@pytest.mark.slow
def test_stacked_runs_equal_runs_alone(unbroken, alone):
    keys = ("step", "loss_nats", "grad_norm", "valid_nats", "train_nats", "temperature", "averaged")
    found = {i: records(unbroken[0] / str(i), *keys) for i in (0, 3)}
    for i in (0, 3):
        there = records(alone[0] / str(i) / "0", *keys)
        for key in keys:
            np.testing.assert_allclose(found[i][key], there[key], rtol=1e-5, err_msg=key)
        for key, value in alone[1][i].items():
            assert unbroken[1][i][key] == pytest.approx(value, rel=1e-5)
    # The two are not the same run, nor is any the same throughout.
    for key in ("loss_nats", "valid_nats"):
        here, there = np.array(found[0][key]), np.array(found[3][key])
        assert abs(here / there - 1).max() > 1e-3 < abs(here[-1] / here[0] - 1)
    assert found[0]["averaged"] == [False, False, True]


@pytest.mark.slow
def test_one_that_ends_early_leaves_the_others_alone(unbroken):
    folder, outcomes = unbroken
    assert isinstance(outcomes[1], errors.Diverged) and "step 2" in str(outcomes[1])
    assert outcomes[2]["best_turn"] == 0
    assert len(records(folder / "2", "valid_nats")["valid_nats"]) == 2
    assert [outcomes[i]["best_turn"] for i in (0, 3)] == [2, 2]
    assert written.latest_step(folder / "1") == 0
    assert not math.isfinite(float(metrics.read_metrics(folder / "1")[-1]["grad_norm"]))


@pytest.mark.slow
def test_each_has_a_workdir_like_any_run(unbroken):
    loaded = pretrained.load_weights(unbroken[0] / "3")
    assert loaded.config.optimizer.learning_rate == 1e-2 and loaded.info["step"] == 8
    names = {path.name for path in (unbroken[0] / "3").iterdir()}
    assert {"config.json", "metrics.jsonl", "vocabulary.json", "checkpoints"} <= names


@pytest.mark.slow
def test_a_stop_and_a_resume_leave_no_trace(four, unbroken, tmp_path, monkeypatch):
    write = metrics.MetricWriter.write

    def write_and_signal(self, step, kind, **values):
        write(self, step, kind, **values)
        if (kind, step) == ("train", 6):
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.MetricWriter, "write", write_and_signal)
        with pytest.raises(errors.Interrupted, match="stopped at step 6, all saved"):
            train_all(*four, tmp_path)
    assert [written.latest_step(tmp_path / str(i)) for i in range(4)] == [6, 0, 4, 6]
    outcomes = train_all(*four, tmp_path)
    for i in (0, 2, 3):
        name = f"{i}/metrics.jsonl"
        assert (tmp_path / name).read_bytes() == (unbroken[0] / name).read_bytes()
        assert outcomes[i] == unbroken[1][i]


@pytest.mark.slow
def test_what_is_asked_after_a_turn_ends_one_run(four, tmp_path):
    asked = []

    def on_turn(turn, best):
        asked.append(turn)
        if len(asked) == 3:
            raise errors.Abandoned("enough")

    outcomes = train_all(four[0], four[1], tmp_path, on_turn)
    assert [isinstance(outcome, errors.Abandoned) for outcome in outcomes] == [0, 0, 1, 0]
    assert asked.count(0) == 4 and asked.count(1) == asked.count(2) == 2


@pytest.mark.slow
def test_other_numbers_compile_nothing(four, unbroken, tmp_path):
    made, functions = four
    home, task = made[0].mesh, made[0].task
    others = [runs.make_run(make_config(r / 2, d / 2), home, task) for r, d in RATES]
    state, hyper = functions.init(), [run.hyper for run in others]
    with quick.count_compilations() as count:
        train_all(others, functions, tmp_path)
        assert count == [0]
        # It would show: another number of steps is another program.
        functions.train_steps(state, hyper, 1)
        assert count == [1]


def test_a_rate_of_zero_stays_in_the_program_when_it_is_tuned(four):
    made, _ = four
    zero = runs.make_run(make_config(dropout=0.0), made[0].mesh, made[0].task, tuned=("input",))
    assert jax.tree.structure(zero.hyper) == jax.tree.structure(made[0].hyper)
    plain = runs.make_run(make_config(dropout=0.0), made[0].mesh, made[0].task)
    assert jax.tree.structure(plain.hyper) != jax.tree.structure(made[0].hyper)


def program_text(mesh, count, log_every=2):
    """The compiled steps of `count` runs on a mesh that may not be here."""
    config = make_config()
    task = tasks.make_abstract_task(config.data, mesh)
    run = runs.make_run(config, programs.home(mesh), task)

    def place(axis, part):
        sharding, lead = programs.places(mesh, axis), (count,) if axis == 0 else ()
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (*lead, *np.shape(leaf)), getattr(leaf, "dtype", np.float32), sharding=sharding
            ),
            part,
        )

    given = (jax.eval_shape(run.init_state), run.hyper)
    state, hyper = programs.map_axes(place, (programs.STACK, 0), given)
    jitted = programs.jit_steps(run.program, mesh)
    return jitted.lower(state, run.task.stream, hyper, num_steps=log_every).compile().as_text()


@pytest.mark.slow
def test_no_device_speaks_to_another():
    text = program_text(programs.make_mesh(8), 8)
    assert not costs.analyse(text).collectives
    # One run on all devices has to.
    run = runs.make_run(make_config())
    steps = run.jit_steps().lower(run.abstract_state(), run.task.stream, run.hyper, num_steps=2)
    assert costs.analyse(steps.compile().as_text()).collectives


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_sixteen_trials_on_sixteen_chips_do_not_speak():
    target = targets.parse("v5e:4x4")
    chips = targets.mesh(target, 16, 1).devices.reshape(-1)
    text = program_text(programs.make_mesh(16, chips), 16)
    analysis = costs.analyse(text)
    assert analysis.cycles > 0 and not analysis.collectives
    for kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f"{kind}(" not in text and f"{kind}-start(" not in text
    run = runs.make_run(
        make_config(data=dict(batch_size=16)),
        targets.mesh(target, 16, 1),
        tasks.make_abstract_task(
            make_config(data=dict(batch_size=16)).data, targets.mesh(target, 16, 1)
        ),
    )
    control = run.jit_steps().lower(run.abstract_state(), run.task.stream, run.hyper, num_steps=2)
    assert costs.analyse(control.compile().as_text()).collectives

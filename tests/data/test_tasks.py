"""Tasks: each gives batches and plans that cover its examples once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import tasks

KEY = jax.random.key(0)
MESH = partitioning.make_mesh(devices=jax.devices()[:2])


def make_task(**options):
    defaults = dict(name="pydoc", batch_size=8, window=5)
    return tasks.make_task(KEY, None, **(defaults | options))


def make_copies(**options):
    defaults = dict(name="reverse_copy", batch_size=4, length=3, vocab_size=20, num_valid=10)
    return make_task(**(defaults | options))


def targets_of(plan):
    """All targets that a plan asks for, sorted."""
    found, batch_at = [], jax.jit(plan.batch_at)
    for index in range(plan.num_windows):
        batch = batch_at(plan.stream, jnp.int32(index))
        assert batch.inputs.shape[0] == plan.batch_size
        valid = np.arange(batch.targets.shape[1]) < np.asarray(batch.lengths)[:, None]
        found.append(np.asarray(batch.targets)[valid])
    return np.sort(np.concatenate(found))


@pytest.mark.slow
def test_a_stream_goes_on_and_lines_stand_alone():
    stream, lines = make_task(window=400), make_task(window=4000, episodic=True)
    assert stream.carries and not lines.carries
    assert (stream.unit, stream.score_unit) == ("character", "bpc")
    plans = stream.plan("valid", 5), lines.plan("valid", 64)
    assert [plan.carries for plan in plans] == [True, False]
    # Both ask for every character of the split, once.
    tokens = targets_of(plans[0])
    assert len(tokens) > 10_000
    np.testing.assert_array_equal(tokens, targets_of(plans[1]))
    # A line is cut at the window if that is shorter.
    short = make_task(window=20, episodic=True)
    assert short.batch_at(short.stream, 0).inputs.shape == (8, 20)
    assert len(targets_of(short.plan("valid", 64))) < len(tokens)


def test_stripes_are_limited_by_lines_only_where_state_is_carried():
    assert make_task().num_lines("valid") < 2000
    assert make_task(episodic=True).num_lines("valid") > 10**6


@pytest.mark.slow
def test_copies_need_no_corpus_and_score_every_word():
    task = make_copies(source_dir=None, data_dir=None)
    assert not task.carries and task.score_unit == "ppl"
    assert tasks.kind_of({"name": "reverse_copy"}) == (True, False)
    assert tasks.kind_of({"name": "pydoc"}) == (False, True)
    assert tasks.kind_of({"name": "pydoc", "episodic": True}) == (False, False)
    batch = task.batch_at(task.stream, jnp.int32(0))
    assert batch.sources.shape == batch.targets.shape == (4, 4)
    np.testing.assert_array_equal(batch.targets[:, :3], batch.sources[:, 2::-1])
    plan = task.plan("valid", 4)
    assert plan.num_windows == 3 and len(targets_of(plan)) == 10 * 4


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (make_task, {"name": "pidoc"}, "corpus 'pidoc' is unknown; use one of .*pydoc"),
        (make_task, {"lenght": 3}, "corpus 'pydoc' has no option 'lenght'; it has none"),
        (make_copies, {"lenght": 3}, "data.lenght is no option of reverse_copy; it has length"),
        (make_copies, {"length": None}, "data.length is missing"),
        (make_copies, {"num_train": 0}, "num_train 0 must be at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(make, options, words):
    with pytest.raises(errors.UsageError, match=words):
        make(**options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(name="reverse_copy", length=3), dict(episodic=True)])
def test_examples_that_stand_alone_lie_over_the_mesh(options):
    options = dict(name="pydoc", batch_size=4, window=50) | options
    alone, spread = (tasks.make_task(KEY, mesh, **options) for mesh in (None, MESH))
    parts = (alone.batch_at, alone.stream), (spread.batch_at, spread.stream)
    plans = [task.plan("valid", 3) for task in (alone, spread)]
    assert [plan.batch_size for plan in plans] == [3, 4]
    here, there = (jax.jit(batch_at)(stream, jnp.int32(1)) for batch_at, stream in parts)
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_array_equal(one, other)
        assert len(one.devices()) == 1 and other.addressable_shards[0].data.shape[0] == 2
    np.testing.assert_array_equal(*map(targets_of, plans))

"""The mesh: what fits it, what lies where, and the same scores on each.

That losses with dropout do not depend on the mesh is in the recorded numbers of `golden_run.py`.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments import pydoc
from mogrifier_jax import errors, partitioning
from mogrifier_jax.data import corpora, vocabularies
from mogrifier_jax.preflight import costs
from mogrifier_jax.training import programs, runs, scoring


def make_mesh(data, model=1):
    return partitioning.make_mesh(data, model, devices=jax.devices()[: data * model])


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((-1, 1), (8, 1)), ((-1, 2), (4, 2)), ((2, -1), (2, 4)), ((1, 8), (1, 8))],
)
def test_a_mesh_takes_all_devices(sizes, shape):
    mesh = partitioning.make_mesh(*sizes)
    assert mesh.devices.shape == shape and mesh.axis_names == ("data", "model")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((3, 1), "mesh.data 3 x mesh.model 1 does not use all 8 devices.*8 x 1, 4 x 2, 2 x 4"),
        ((-1, 3), "does not use all 8 devices"),
        ((0, 1), "mesh.data 0 is not a size"),
        ((1, -2), "mesh.model -2 is not a size"),
        ((-1, -1), "both -1: set one"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes, words):
    with pytest.raises(errors.UsageError, match=words):
        partitioning.make_mesh(*sizes)


@pytest.mark.parametrize(
    ("size", "groups", "words"),
    [
        (100, 1, r"batch_size 100 is not a multiple of the data axis \(8\); try 96 or 104"),
        (3, 1, r"batch_size 3 .*; try 8$"),
        (24, 2, r"data axis \(8\) times optimizer.accumulate \(2\); try 16 or 32"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_those_that_do(size, groups, words):
    with pytest.raises(errors.UsageError, match=words):
        partitioning.check_batch(make_mesh(8), batch_size=size, groups=groups)
    for fitting in (int(word) for word in words.split("try ")[1].rstrip("$").split(" or ")):
        partitioning.check_batch(make_mesh(8), batch_size=fitting, groups=groups)


def test_a_hidden_size_that_does_not_fit_is_refused_with_those_that_do():
    mesh = make_mesh(2, 4)
    with pytest.raises(
        errors.UsageError, match=r"hidden_size 18 .*axis \(4\); try mesh.model 2, .* 16 or 20"
    ):
        partitioning.check_hidden_size(mesh, 18)
    with pytest.raises(errors.UsageError, match=r"mesh.model 1, or model.hidden_size 4$"):
        partitioning.check_hidden_size(mesh, 3)
    for fitting in (4, 16, 20):
        partitioning.check_hidden_size(mesh, fitting)


def make_config():
    """A small model with every dropout on, and resets."""
    config = pydoc.get_config("tiny").copy_and_resolve_references()
    with config.unlocked():
        config.data.update(batch_size=8, window=5, drop_state_probability=0.3)
        config.model.update(hidden_size=8, embedding_ratio=0.5, rounds=2, rank=2, num_layers=1)
        config.dropout.update(input=0.2, state=0.4, output=0.3)
    return config


def read_odd_text(name, **options):
    """A corpus of seventeen types, which no mesh can split."""
    text = "".join(chr(ord("a") + (i * i + i // 7) % 15) + "\n" * (i % 9 == 0) for i in range(2000))
    vocab = vocabularies.Vocabulary.from_text(text, "character")
    assert len(vocab) == 17
    split = vocab.encode_split(text)
    return corpora.Corpus(name, "character", vocab, split, split, split)


def test_wide_dimensions_are_split_over_model_and_stripes_over_data(monkeypatch):
    state = runs.make_run(make_config(), make_mesh(4, 2)).abstract_state()
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    cell = specs.params["stack"]["layers_0"]["cell"]
    assert specs.params["embedding"] == PartitionSpec("model", None)
    assert specs.params["softmax"]["kernel"] == PartitionSpec(None, "model")
    assert cell["gates"]["recurrent"] == PartitionSpec(None, None, "model")
    assert cell["gates"]["bias"] == PartitionSpec(None, "model")
    assert specs.carry[0].c == PartitionSpec("data", "model")
    # The optimizer and the average lie where their parameters lie.
    assert specs.average.average.mean["embedding"] == PartitionSpec("model", None)
    moments = specs.opt_state[1].nu
    assert moments["embedding"] == PartitionSpec("model", None)
    # A vocabulary that is odd stays whole.
    monkeypatch.setattr(corpora, "load_corpus", read_odd_text)
    state = runs.make_run(make_config(), make_mesh(4, 2)).abstract_state()
    assert state.params["embedding"].sharding.spec == PartitionSpec(None, None)


@pytest.mark.parametrize("change", [{}, {"layer_norm": True}, {"cell": "mogrifier_gru"}], ids=str)
def test_devices_wait_for_each_other_once_a_batch_and_not_at_each_time_step(change):
    config = make_config()
    with config.unlocked():
        config.model.update(change)
    run = runs.make_run(config, make_mesh(2))
    lowered = programs.jit_train_steps(run).lower(
        run.abstract_state(), run.task.stream, run.hyper, num_steps=1
    )
    assert costs.analyse(lowered.compile().as_text()).by_kind()["all-reduce"][0] == 1


@pytest.mark.slow
def test_an_odd_vocabulary_scores_the_same_on_every_mesh(monkeypatch):
    monkeypatch.setattr(corpora, "load_corpus", read_odd_text)
    config = make_config()
    scores = []
    for mesh in (make_mesh(1), make_mesh(4, 2)):
        run = runs.make_run(config, mesh)
        shardings = programs.shardings_of(run.abstract_state())
        params = jax.jit(run.init_state, out_shardings=shardings)().params
        # Six stripes, which the mesh fills up to eight.
        evaluation = scoring.Deterministic(run.model, run.task.plan("valid", 6), chunk=4)
        scores.append(evaluation.sums(params, (1.0, 1.01)))
        scores.append(evaluation(params))
    here, tokens, there, same_tokens = scores
    assert here.count == there.count == len(read_odd_text("odd").valid.tokens)
    np.testing.assert_allclose(here.total, there.total, rtol=1e-6)
    np.testing.assert_allclose(tokens.nats, same_tokens.nats, rtol=1e-5, atol=1e-6)
    assert abs(here.total[0] / here.total[1] - 1) > 1e-5

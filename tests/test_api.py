"""The public interface: its names, the cells in other people's models, trained runs in Python."""

import doctest
import json
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mogrifier_jax
from mogrifier_jax import errors, partitioning
from mogrifier_jax.evaluation import (
    eval_options,
    evaluate_command,
    loading,
    sample_command,
    text_sampling,
    trained_model,
)
from mogrifier_jax.nn import models
from tests import quick
from tests import workdir as workdirs

CELLS = (
    *("ElmanCell", "GRUCell", "LSTMCell", "MLSTMCell", "RewiredLSTMCell"),
    *("MogrifierElmanCell", "MogrifierGRUCell", "MogrifierLSTMCell"),
)
B, T, D, H = 8, 5, 4, 6
XS = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
LENGTHS = np.array([5, 2, 3, 1, 5, 4, 3, 2])


def test_names():
    expected = {*CELLS, "Mogrifier", "RNN", "LanguageModel", "load", "TrainedModel", "LSTMCarry"}
    expected |= {"from_flax", "from_pytorch", "nnx"}
    assert set(mogrifier_jax.__all__) == expected <= set(dir(mogrifier_jax))
    for name in expected:
        assert getattr(mogrifier_jax, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'MogrifierCell'"):
        _ = mogrifier_jax.MogrifierCell


@pytest.mark.parametrize(
    "name", quick.mostly_slow([*CELLS, "Mogrifier", "RNN", "LanguageModel"], "Mogrifier")
)
def test_examples_of_docstrings_run(name, monkeypatch):
    """`load` has its example in the README."""
    monkeypatch.setattr(jax, "jit", quick.jit)
    module = sys.modules[getattr(mogrifier_jax, name).__module__]
    (test,) = (t for t in doctest.DocTestFinder().find(module) if t.name.endswith(f".{name}"))
    assert test.examples and not doctest.DocTestRunner().run(test).failed


@pytest.mark.parametrize("name", quick.mostly_slow([*CELLS, "Mogrifier", "RNN"], "Mogrifier"))
def test_examples_of_nnx_run(name):
    cases = doctest.DocTestFinder().find(sys.modules[mogrifier_jax.nnx.RNN.__module__])
    (test,) = (t for t in cases if t.name.endswith(f".{name}"))
    assert test.examples and not doctest.DocTestRunner().run(test).failed


def test_modules_can_be_imported_from_the_package():
    from mogrifier_jax import from_flax, from_pytorch, nnx

    assert from_flax.convert and from_pytorch.convert
    names = {*CELLS, "Mogrifier", "RNN"}
    assert names == set(nnx.__all__) and all(getattr(nnx, name) for name in names)
    assert not issubclass(nnx.LSTMCell, mogrifier_jax.LSTMCell)


# Cells in other people's models.


def make_rnn(name, **cell_options):
    cell = getattr(mogrifier_jax, name)(features=H, **cell_options)
    return nn.RNN(cell, return_carry=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_cells_train_in_float32_and_bfloat16(name):
    """Within nn.RNN, with lengths, under jit and grad; parameters and gradients stay float32."""
    rnn, low = make_rnn(name), make_rnn(name, dtype=jnp.bfloat16)

    def outputs(rnn, variables):
        carry, ys = rnn.apply(variables, XS, seq_lengths=LENGTHS)
        inside = (np.arange(T) < LENGTHS[:, None])[..., None]
        return jnp.where(inside, ys, jnp.zeros_like(ys)), carry

    def loss(variables, rnn):
        ys, carry = outputs(rnn, variables)
        h = jax.tree.leaves(carry)[-1]
        return jnp.sin(ys.astype(jnp.float32)).sum() + h.astype(jnp.float32).sum(), ys

    @quick.jit
    def run(key):
        variables = rnn.init(key, XS)
        found = [jax.grad(loss, has_aux=True)(variables, module) for module in (rnn, low)]
        return variables, *found

    variables, (grads, ys), (low_grads, low_ys) = run(jax.random.key(0))
    assert ys.dtype == jnp.float32 and low_ys.dtype == jnp.bfloat16
    np.testing.assert_allclose(low_ys.astype(np.float32), ys, atol=0.03)
    assert abs(low_ys.astype(np.float32) - ys).max() > 1e-4
    for leaf, grad, low_grad in zip(
        *map(jax.tree.leaves, (variables, grads, low_grads)), strict=True
    ):
        assert leaf.dtype == grad.dtype == low_grad.dtype == jnp.float32
        assert abs(grad).max() > 1e-4
        np.testing.assert_allclose(low_grad, grad, atol=0.05 * abs(grad).max() + 0.03)


@pytest.mark.slow
def test_a_sharded_batch_stays_sharded():
    rnn = make_rnn("MogrifierLSTMCell", rounds=3, rank=2)
    variables = quick.jit(rnn.init)(jax.random.key(0), XS)
    apply = quick.jit(lambda variables, xs: rnn.apply(variables, xs)[1])
    mesh = partitioning.make_mesh()
    assert mesh.size == 8
    rows = NamedSharding(mesh, PartitionSpec("data"))
    found = apply(variables, jax.device_put(XS, rows))
    np.testing.assert_allclose(found, apply(variables, XS), rtol=1e-5, atol=1e-6)
    assert found.sharding.is_equivalent_to(rows, 3)
    assert {shard.data.shape for shard in found.addressable_shards} == {(1, T, H)}
    assert abs(found[0] - found[1]).max() > 1e-2


@pytest.mark.slow
def test_the_gating_alone_joins_any_two_vectors():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, h):
            x, h = mogrifier_jax.Mogrifier(rounds=4, rank=2)(x, h)
            return x.sum() + (h * h).sum()

    x, h = XS[:, 0], np.ones((B, H), np.float32)
    init = quick.jit(Model().init)
    variables = init(jax.random.key(0), x, h)
    grads = quick.jit(jax.grad(lambda v: Model().apply(v, x, h)))(variables)
    assert all(abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(grads))
    rows = jax.vmap(lambda x, h: Model().apply(variables, x, h))(x, h)
    np.testing.assert_allclose(rows.sum(), Model().apply(variables, x, h), rtol=1e-5)


# Trained runs.

TEXT = "".join(f"{'abcdefgh'[i % 8] * (i % 5 + 1)} {'xyz'[i % 3]}\n" for i in range(150))
SOME = "".join(TEXT.splitlines(keepends=True)[:40])  # More than three windows.


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return workdirs.write(folder, TEXT, num_layers=2, hidden_size=6, rounds=3, rank=2)


@pytest.fixture(scope="module")
def model(workdir):
    return mogrifier_jax.load(workdir)


@pytest.mark.slow
def test_a_score_is_that_of_the_command_line(model, workdir, tmp_path):
    (tmp_path / "some.txt").write_text(SOME)
    chosen = eval_options.defaults()
    with chosen.unlocked():
        chosen.update(text=str(tmp_path / "some.txt"), temperature="saved")
    row = evaluate_command.evaluate_workdirs([str(workdir)], chosen)[0]["results"][0]
    score = model.score(SOME)
    assert row["tokens"] == len(score.tokens) == len(score.nats) == len(SOME)
    assert score.nats_per_token == pytest.approx(row["nats"], rel=1e-6)
    assert score.bits_per_token == pytest.approx(row["bits"], rel=1e-6)
    assert score.perplexity == pytest.approx(row["perplexity"], rel=1e-5)
    assert score.tokens[:6] == ["a", " ", "x", "▼", "b", "b"]
    assert score.unknown == []
    # The logit scale is the checkpoint's unless given, and the state is carried over windows.
    assert model.logit_scale == 0.9
    assert abs(model.score(SOME, logit_scale=1.0).nats_per_token - row["nats"]) > 1e-4
    late = model.score(SOME[trained_model.WINDOW :])
    assert abs(late.nats - score.nats[trained_model.WINDOW :]).max() > 1e-4


@pytest.mark.slow
def test_a_score_is_of_what_is_there(model):
    whole = model.score("ab x\n")
    assert len(model.score("ab x").nats) == 4 and len(whole.nats) == 5
    np.testing.assert_allclose(model.score("ab x").nats, whole.nats[:4], rtol=1e-6)
    strange = model.score("ab Q xü")
    assert strange.unknown == ["Q", "ü"] and strange.tokens[3] == "<UNK>"
    np.testing.assert_allclose(strange.nats[:3], whole.nats[:3], rtol=1e-6)


@pytest.mark.slow
def test_scores_of_all_texts_share_a_program(model):
    model.score("ab x\n")
    size = model._nats._cache_size()
    model.score(SOME, logit_scale=0.5)
    model.score("a")
    assert model._nats._cache_size() == size == 1
    model.generate("a", length=2 * text_sampling.CHUNK)
    with quick.count_compilations() as count:
        model.generate("ab x", length=50, temperature=0.7, seed=3)
    assert count == [0]


@pytest.mark.slow
def test_generated_texts_begin_with_the_prompt(model, capsys, workdir):
    texts = model.generate("ab x\n", length=30, temperature=0.5, num_samples=2, seed=3)
    assert len(texts) == 2 and texts[0] != texts[1]
    for text in texts:
        assert text.startswith("ab x\n") and len(text) == 35
    assert texts == model.generate("ab x\n", length=30, temperature=0.5, num_samples=2, seed=3)
    options = text_sampling.Sampling(length=30, temperature=0.5, num_samples=2, seed=3)
    sample_command.print_samples(str(workdir), options, "ab x\n")
    printed = capsys.readouterr().out
    assert printed == f"--- sample 1\n{texts[0]}\n--- sample 2\n{texts[1]}\n"
    assert len(model.generate(length=7)[0]) == 7


@pytest.mark.slow
def test_gates_are_those_of_every_token(model):
    found = model.gates(SOME)
    assert found.tokens == model.score(SOME).tokens
    ids = np.append(model.vocabulary.eos_id, model.vocabulary.encode(SOME))[None]
    run = quick.jit(lambda params: model.model.apply({"params": params}, ids, method="gates")[1])
    expected = jax.tree.map(lambda leaf: leaf[1:, 0], run(model.params))
    assert len(found.layers) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found.layers, expected)
    first = found.layers[0]
    assert first["f"].shape == (len(SOME), 6) and len(first["rounds"]) == 3
    assert abs(first["f"][0] - first["f"][1]).max() > 1e-3
    assert (0 < first["rounds"][0]).all() and (first["rounds"][0] < 2).all()


def fits_annotations(result):
    """Whether all fields of a named tuple have the shapes and dtypes of their annotations."""
    hints = {n: hint for n, hint in type(result).__annotations__.items() if hasattr(hint, "dims")}
    assert hints
    # A letter has one value within the context, and must be read before a sum that it is part of.
    names = sorted(hints, key=lambda name: "+" in hints[name].dim_str)
    with jaxtyping.jaxtyped("context"):
        return all(isinstance(getattr(result, name), hints[name]) for name in names)


@pytest.mark.slow
def test_results_have_the_shapes_of_their_annotations(model):
    predictions = model.predict(SOME, top=3)
    assert fits_annotations(model.score(SOME)) and fits_annotations(predictions)
    assert not fits_annotations(predictions._replace(ids=predictions.ids[:, :2]))
    assert not fits_annotations(predictions._replace(ranks=predictions.ranks.astype(np.int64)))


@pytest.mark.slow
def test_a_loaded_run_tells_what_it_is(model, workdir):
    assert model.config.model.rounds == 3 and model.config.data.window == 8
    saved = json.loads((workdir / "config.json").read_text())
    assert model.config.optimizer.learning_rate == saved["optimizer"]["learning_rate"]
    assert "step 3, 2 layers of 6" in repr(model) and str(workdir) in repr(model)
    assert model.info["step"] == 3 and len(model.vocabulary) == 14
    assert mogrifier_jax.load(str(workdir), "latest").info["which"] == "latest"


@pytest.mark.slow
def test_what_cannot_be_done_is_explained(model, workdir, tmp_path, monkeypatch):
    for call, words in (
        (
            lambda: mogrifier_jax.load(tmp_path / "none"),
            "none does not exist; give the workdir of a trai",
        ),
        (lambda: mogrifier_jax.load(tmp_path), "is not the workdir of a run: it has no config"),
        (lambda: mogrifier_jax.load(workdir, "first"), "checkpoint 'first' is unknown"),
        (lambda: model.score(""), "the text '' has no tokens"),
        (lambda: model.gates(""), "the text '' has no tokens"),
        (lambda: model.score("ab", logit_scale=0.0), "logit_scale 0.0 must be above 0"),
        (lambda: model.generate("ab", length=-1), "length -1 must be at least 1"),
        (lambda: model.generate(""), "the prompt '' is empty"),
    ):
        with pytest.raises(errors.UsageError) as refused:
            call()
        assert words in str(refused.value)
    copying = loading.load_run(workdir)._replace(model=models.EncoderDecoder(5, 4, 4))
    with pytest.raises(
        errors.UsageError, match="copies sequences; give the workdir of a language model"
    ):
        mogrifier_jax.TrainedModel(copying)
    alone = mogrifier_jax.load(workdir)
    with alone.config.unlocked():
        alone.config.data.episodic = True
    with pytest.raises(errors.UsageError, match="models independent lines"):
        alone.score("ab")

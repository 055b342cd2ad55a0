"""Models that cannot be, and input that does not fit, are explained before any compute."""

import functools

import jax
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, models

V, H, E, T, B = 7, 5, 3, 6, 2


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(mixture_components=1), r"mixture_components 1 must be 0 .* or at least 2"),
        (dict(mixture_components=-2), r"mixture_components -2 must be at least 0"),
        (dict(cell="gru"), r"cell 'gru' is not known; use one of .*mogrifier_gru"),
        (dict(output="mean"), r"output 'mean' is unknown: choose one of sum, residual, last"),
        (dict(state_mask="epoch"), r"state_mask 'epoch' is unknown: choose one of window, step"),
        (dict(num_layers=0), r"num_layers 0 must be at least 1"),
        (dict(hidden_size=0), r"hidden_size 0 must be at least 1"),
        (dict(embedding_size=0), r"embedding_size 0 must be at least 1"),
        (dict(vocab_size=0), r"vocab_size 0 must be at least 1"),
        (dict(cell_options=dict(rounds=-1)), "rounds -1 must be at least 0"),
        (dict(cell_options=dict(rank=9)), r"rank 9 is larger than both .* at most 5"),
        (dict(remat_window=0), r"remat_window 0 must be at least 1"),
    ],
)
def test_impossible_models_are_refused(options, words):
    options = {"vocab_size": V, "hidden_size": H, "embedding_size": E, **options}
    model = models.LanguageModel(**options)
    with pytest.raises(errors.UsageError, match=words):
        jax.eval_shape(model.init, jax.random.key(0), **model.example())


def test_unknown_cell_is_refused_before_anything_is_built():
    model = models.LanguageModel(V, H, E, cell="gru")
    with pytest.raises(errors.UsageError, match=r"cell 'gru' is not known"):
        model.zero_carry(B)
    with pytest.raises(errors.UsageError, match=r"cell 'gru' is not known"):
        models.count_parameters(model)


TOKENS = np.zeros((B, T), np.int32)
HALVES = np.full((B, T), 0.5, np.float32)
LAYER = cells.LSTMCarry(np.zeros((B, H), np.float32), np.zeros((B, H), np.float32))


def score(**changes):
    """The shapes of nats and carry, of input that fits but for some changes."""
    model = models.LanguageModel(V, H, E, cell="lstm")
    shapes = jax.eval_shape(model.init, jax.random.key(0), **model.example())["params"]
    given = dict(inputs=TOKENS, targets=TOKENS, carry=(LAYER, LAYER), lengths=np.array([6, 2]))
    given |= dict(rates=models.Dropout(input=0.5)) | changes
    run = functools.partial(model.apply, method="nats", rngs={"dropout": jax.random.key(0)})
    return jax.eval_shape(lambda params: run({"params": params}, **given), shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, words",
    [
        (dict(inputs=TOKENS[0]), r"inputs of shape \(6,\) must be \[batch, time\]"),
        (dict(inputs=TOKENS[:, :0], targets=TOKENS[:, :0]), r"\(2, 0\) must be .* none .* empty"),
        (dict(targets=TOKENS[:, :5]), r"targets \(2, 5\) must have the shape of inputs.*\(2, 6\)"),
        (dict(inputs=HALVES), r"inputs of dtype float32 must be token ids; cast .* int32"),
        (dict(targets=HALVES), r"targets of dtype float32 must be token ids"),
        (
            dict(lengths=np.array([1, 2, 3])),
            r"lengths of shape \(3,\).* one integer for each .* 2",
        ),
        (
            dict(lengths=np.array([1.0, 2.0], np.float32)),
            r"lengths .*float32 must be one integer for each",
        ),
        (dict(carry=(LAYER,)), r"must be a tuple of 2, one for each layer; make .* zero_carry"),
        (dict(carry=LAYER), r"carry float32\[2, 5\] does not fit .*LSTMCarry"),
        (dict(carry=(LAYER, cells.Carry(LAYER.h))), r"carry Carry.*does not fit .*LSTMCarry"),
        (dict(carry=(LAYER._replace(h=LAYER.h[:1]), LAYER)), r"\[1, 5\].* does not fit .*\[2, 5\]"),
        (dict(rates=models.Dropout(input=1.0)), r"dropout rate 1.0 must be .* below 1; use None"),
        (dict(rates=models.Dropout(state=-0.1)), r"dropout rate -0.1 must be at least 0"),
    ],
)
def test_misfitting_input_of_a_model_is_explained(change, words):
    with pytest.raises(errors.UsageError, match=words):
        score(**change)


def test_fitting_input_of_a_model_is_not_refused():
    assert score()[1].shape == (B, T)


@pytest.mark.parametrize("method", ["logits", "gates"])
def test_other_methods_look_at_their_input_too(method):
    model = models.LanguageModel(V, H, E, cell="lstm")
    shapes = jax.eval_shape(model.init, jax.random.key(0), **model.example())["params"]

    def attempt(*arguments):
        run = functools.partial(model.apply, method=method)
        return jax.eval_shape(lambda p: run({"params": p}, *arguments), shapes)

    attempt(TOKENS, (LAYER, LAYER))
    with pytest.raises(errors.UsageError, match=r"inputs of shape \(6,\)"):
        attempt(TOKENS[0])
    with pytest.raises(errors.UsageError, match=r"must be a tuple of 2"):
        attempt(TOKENS, (LAYER,))


def test_misfitting_source_is_explained():
    model = models.EncoderDecoder(V, H, E, cell="lstm")
    with pytest.raises(errors.UsageError, match=r"source of dtype float32 must be token ids"):
        jax.eval_shape(model.init, jax.random.key(0), HALVES, TOKENS, TOKENS)
    with pytest.raises(errors.UsageError, match=r"carry .* does not fit .*\(2, 3\)"):
        jax.eval_shape(model.init, jax.random.key(0), TOKENS[:1], TOKENS, TOKENS)

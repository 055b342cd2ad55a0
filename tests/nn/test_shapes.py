"""The shapes in annotations are true: cells, RNNs, softmax and models, traced with checks.

jaxtyping and beartype check the arguments and results of every function of `nn` while it is traced.
Nothing is computed.
"""

import functools
import importlib
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.nn import layers
from tests import quick, reference

T, B, S, D, H, V = 5, 3, 2, 4, 6, 11
# An int may stand for a float.
CHECK = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
CHECKED = ("cells", "dropout", "from_flax", "layers", "models", "rnn", "softmax")


@pytest.fixture(scope="module")
def checked():
    """Modules of `nn`, imported anew with a check in every function."""
    ours = [name for name in sys.modules if name.partition(".")[0] == "mogrifier_jax"]
    unchecked = {name: sys.modules.pop(name) for name in ours}
    try:
        with jaxtyping.install_import_hook("mogrifier_jax.nn", CHECK):
            modules = {n: importlib.import_module(f"mogrifier_jax.nn.{n}") for n in CHECKED}
            modules["nnx"] = importlib.import_module("mogrifier_jax.nnx")
        yield types.SimpleNamespace(**modules)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mogrifier_jax"]:
            del sys.modules[name]
        sys.modules.update(unchecked)


def floats(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def trace(module, *args, variables=None, **options):
    """Traces a module and its gradients; returns the shapes of its results."""
    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    if variables is None:
        variables = jax.eval_shape(functools.partial(module.init, keys, **options), *args)

    def run(variables, *args):
        results = module.apply(variables, *args, rngs=keys, **options)
        return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(results)), results

    _, results = jax.eval_shape(jax.grad(run, has_aux=True), variables, *args)
    return jax.tree.map(jnp.shape, results)


def trace_rnn(checked, variant, dtype=jnp.float32, marks=(), **options):
    """Runs a cell over sequences in training; returns the shapes of the carry and the outputs."""
    name, options_of_cell = reference.VARIANTS[variant]
    cell = checked.layers.find_cell(name)(H, **options_of_cell, dtype=dtype)
    params = jax.eval_shape(lambda key: cell.init(key, D, method="weights"), jax.random.key(0))
    return trace(
        checked.rnn.RNN(cell, state_dropout=0.5, return_carry=True, **options),
        floats(B, T, D),
        variables={"params": {"cell": params["params"]}},
        deterministic=False,
        **dict(marks),
    )


def carry_of(checked, variant):
    cell = checked.layers.find_cell(reference.VARIANTS[variant][0])(H)
    return ((B, H), (B, H)) if cell.state_type is checked.cells.LSTMCarry else (B, H)


MARKS = dict(seq_lengths=np.array([5, 0, 2]), resets=np.zeros((B, T), bool))


@pytest.mark.parametrize("variant", quick.mostly_slow(reference.VARIANTS, "mogrifier", "gru"))
def test_of_every_cell(checked, variant):
    """One step, and the fast scan over sequences."""
    name, options = reference.VARIANTS[variant]
    cell = checked.layers.find_cell(name)(H, **options)
    carry = carry_of(checked, variant)
    start = jax.eval_shape(lambda: cell.initialize_carry(None, (B, D)))
    assert trace(cell, start, floats(B, D)) == (carry, (B, H))
    assert trace_rnn(checked, variant, marks=MARKS) == (carry, (B, T, H))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mogrifier", "mlstm", "gru"])
@pytest.mark.parametrize(
    "options", [{"fast": False}, {"dtype": jnp.bfloat16}, {"remat_window": 2}, {"reverse": True}]
)
def test_of_all_ways_to_run_a_window(checked, variant, options):
    assert trace_rnn(checked, variant, **options) == (carry_of(checked, variant), (B, T, H))


@pytest.mark.parametrize(
    "options",
    [
        dict(embedding_size=H),
        pytest.param(dict(embedding_size=D, mixture_components=2), marks=pytest.mark.slow),
        pytest.param(dict(embedding_size=D, max_logits=V * B), marks=pytest.mark.slow),
        pytest.param(dict(embedding_size=H, tied_embeddings=True), marks=pytest.mark.slow),
    ],
)
def test_of_language_models(checked, options):
    """With every dropout and lengths; with a projection or none, and logits in one part or more."""
    model = checked.models.LanguageModel(vocab_size=V, hidden_size=H, **options)
    carry, nats = trace(
        model,
        tokens(B, T),
        tokens(B, T),
        method="nats",
        lengths=jnp.array([5, 1, 2]),
        rates=checked.dropout.Dropout(*[0.5] * len(checked.dropout.Dropout._fields)),
        logit_scale=jnp.float32(0.5),
    )
    assert nats == (B, T) and carry == (((B, H), (B, H)),) * 2
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens(B, T))
    _, logits = jax.eval_shape(model.apply, variables, tokens(B, T))
    read_gates = functools.partial(model.apply, method="gates")
    _, gates = jax.eval_shape(read_gates, variables, tokens(B, T))
    assert logits.shape == (B, T, V) and len(gates) == 2


def test_of_encoder_decoders(checked):
    sizes = dict(vocab_size=V, hidden_size=H, embedding_size=H)
    model = checked.models.EncoderDecoder(**sizes)
    assert trace(model, tokens(B, S), tokens(B, T), tokens(B, T)) == (B, T)


def test_of_the_gating_alone_and_of_cells_of_flax(checked):
    assert trace(checked.layers.Mogrifier(), floats(B, D), floats(B, H)) == ((B, D), (B, H))
    for cell in (nn.OptimizedLSTMCell(H), nn.GRUCell(H), nn.SimpleCell(H)):
        assert trace(checked.rnn.RNN(cell), floats(B, T, D)) == (B, T, H)


def test_of_nnx(checked):
    from flax import nnx

    def run(xs):
        cell = checked.nnx.MogrifierLSTMCell(D, H, rngs=nnx.Rngs(0))
        return checked.nnx.RNN(cell, return_carry=True)(xs)

    carry, ys = jax.eval_shape(run, floats(B, T, D))
    assert carry.c.shape == (B, H) and ys.shape == (B, T, H)


def test_wrong_shapes_and_dtypes_are_caught(checked):
    """The control: the checks are there, in functions, in methods of modules and in results."""
    h, mask = jnp.ones((B, H)), jnp.ones((B, H), bool)
    checked.cells.drop(h, mask, jnp.float32(2))
    for wrong in (
        lambda: checked.cells.drop(h, mask[:2], jnp.float32(2)),
        lambda: checked.cells.drop(h, h, jnp.float32(2)),
        lambda: checked.cells.mogrify([], jnp.ones((2, D)), h),
        lambda: checked.cells.gate_inputs({"kernel": jnp.ones((D + H, H))}, jnp.ones((B, D)), h),
        lambda: checked.softmax.component_logits(h, jnp.ones((V, D)), jnp.ones(V), 1.0),
        lambda: trace(checked.layers.Mogrifier(), floats(2, D), floats(B, H)),
        lambda: trace(checked.layers.LSTMCell(H), (h, h[:2]), floats(B, D)),
        lambda: trace(checked.rnn.RNN(checked.layers.LSTMCell(H)), floats(B, D, dtype=bool)),
    ):
        with pytest.raises(jaxtyping.TypeCheckError):
            wrong()


def test_the_package_itself_is_not_checked_at_run_time():
    """Users get a sentence of ours, and no cost."""
    with pytest.raises(errors.UsageError, match="must agree in all axes but the last"):
        trace(layers.Mogrifier(), floats(2, D), floats(B, H))

"""Nonsense from Python, in experiment files and in the environment: one sentence each."""

import math

import flax.linen as nn
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

from mogrifier_jax import errors, main, nnx
from mogrifier_jax.evaluation import eval_options, scoring, trained
from mogrifier_jax.nn import from_flax, layers, rnn
from mogrifier_jax.training import compiler
from tests import workdir as written

# Nonsense from Python.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    return trained.load(written.write(folder, "some text\nof letters\n", num_layers=1, rounds=1))


def score(**changes):
    asked = eval_options.defaults()
    with asked.unlocked():
        asked.update_from_flattened_dict(changes)
    return scoring.run(["none"], asked)


NONSENSE = {
    "score(5)": (lambda m: m.score(5), "5 is not a text"),
    "score(bytes)": (lambda m: m.score(b"\xff"), "not UTF-8"),
    "gates(list)": (lambda m: m.gates(["a"]), "is not a text"),
    "score(inf)": (lambda m: m.score("some", logit_scale=math.inf), "logit_scale inf must be"),
    "score(10**30)": (lambda m: m.score("some", logit_scale=10**30), "must be at most 10"),
    "predict(nan)": (lambda m: m.predict("some", top=math.nan), "top nan must be a whole number"),
    "explore(2.5)": (lambda m: m.explore("some", length=2.5), "length 2.5 must be"),
    "temperature": (lambda m: m.generate(temperature=1e-38), "temperature 1e-38 must be"),
    "top_p": (lambda m: m.generate(top_p=1e-300), "top_p 1e-300 must be"),
    "seed": (lambda m: m.generate(seed=2**63), "seed 9223372036854775808 must be at most"),
    "seed of another type": (lambda m: m.generate(seed="3"), "seed '3' must be a whole number"),
    "num_samples": (lambda m: m.generate(num_samples=10**12), "num_samples .* must be at most"),
    "length": (lambda m: m.generate(length=2.5), "length 2.5 must be a whole number"),
    "save": (lambda m: m.save("/proc/nothing/x"), "cannot be written"),
    "save a folder": (lambda m: m.save("/"), "cannot be written"),
    "eval.window": (lambda m: score(window=-1), "eval.window -1 must be at least 1"),
    "eval.multipliers": (lambda m: score(multipliers="1,nan"), "eval.multipliers nan must be"),
    "eval.dyneval": (
        lambda m: score(**{"dyneval.epsilons": "0"}),
        "eval.dyneval.epsilons 0.0 must be above",
    ),
    "hidden_size": (lambda m: layers.LSTMCell(2.5), "hidden_size 2.5 must be a whole number"),
    "rounds": (lambda m: layers.MogrifierLSTMCell(4, rounds=10**6), "rounds 1000000 must be"),
    "forget_bias": (lambda m: layers.LSTMCell(4, forget_bias=math.nan), "forget_bias nan must"),
    "dtype": (lambda m: layers.LSTMCell(4, dtype=jnp.int32), "dtype .* floating point"),
    "param_dtype": (lambda m: layers.LSTMCell(4, param_dtype="float99"), "'float99' must be"),
    "RNN(5)": (
        lambda m: rnn.RNN(5).init(jax.random.key(0), jnp.ones((2, 3, 4))),
        "RNN of a int .* give a cell",
    ),
    "RNN of a list": (
        lambda m: rnn.RNN(layers.LSTMCell(4)).init(jax.random.key(0), [[[1.0]]]),
        "over a list .* an array",
    ),
    "to_flax": (lambda m: from_flax.to_flax(5), "5 is not a cell"),
    "load(5)": (lambda m: trained.load(5), "workdir 5 is not a path"),
    "seq_lengths": (lambda m: run_linen(seq_lengths="x"), "seq_lengths 'x' must be"),
    "seq_lengths in NNX": (lambda m: run_nnx(seq_lengths="x"), "seq_lengths 'x' must be"),
    "initial_carry": (lambda m: run_linen(initial_carry=5), "initial_carry 5 is not a carry"),
    "remat_window": (lambda m: run_linen(remat_window=2.5), "remat_window 2.5 must be a whole"),
}


def run_linen(remat_window=None, **given):
    cell = layers.LSTMCell(4) if remat_window else nn.LSTMCell(4)  # Ours, and that of Flax.
    module = rnn.RNN(cell, remat_window=remat_window)
    return module.init_with_output(jax.random.key(0), jnp.ones((2, 3, 4)), **given)


def run_nnx(**given):
    return nnx.RNN(nnx.LSTMCell(4, 4, rngs=flax.nnx.Rngs(0)))(jnp.ones((2, 3, 4)), **given)


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_from_python_is_one_sentence(model, name):
    call, words = NONSENSE[name]
    with pytest.raises(errors.UsageError, match=words):
        call(model)


def test_a_broken_experiment_is_named_with_its_line(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text("def get_config():\n    return {}['x']\n")
    with pytest.raises(errors.UsageError, match=r"experiment.py.*line 2: KeyError") as refused:
        main.explain_config(str(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", ["--config=/dev/zero", "--config /dev/zero", "--config=/"])
def test_a_device_is_no_experiment(form):
    with pytest.raises(errors.UsageError, match="is not a file"):
        main.parse_flags(["main", *form.split()])


# The environment.


@pytest.mark.parametrize(
    "said", ["RESOURCE_EXHAUSTED: no room\nat", "Unable to initialize backend"]
)
def test_what_jax_says_of_devices_is_one_sentence(said):
    with pytest.raises(errors.UsageError, match=said.splitlines()[0]), main.sentences():
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="INTERNAL"), main.sentences():  # Control: a bug.
        raise RuntimeError("INTERNAL")


@pytest.mark.parametrize("value", ["--xla_nonsense=1", "nonsense"])
def test_flags_that_would_abort_the_process_are_refused(value, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    compiler.check_flags()  # Control.
    monkeypatch.setenv("XLA_FLAGS", value)
    with pytest.raises(errors.UsageError, match=rf"XLA_FLAGS='{value}' cannot be read \(\w+"):
        compiler.check_flags()

"""Nonsense from Python, in experiment files and in the environment: one sentence each."""

import ast
import copy
import io
import math
import os
import pathlib
import pickle
import subprocess
import sys

import flax.linen as nn
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax import (
    command_line,
    command_process,
    configs,
    distributed,
    errors,
    failures,
    jax_settings,
    nnx,
    options,
)
from mogrifier_jax.analysis import sweeps
from mogrifier_jax.data import corpora, vocabularies
from mogrifier_jax.evaluation import eval_options, evaluate_command, trained_model
from mogrifier_jax.nn import from_flax, from_pytorch, layers, rnn
from tests import workdir as written

# Nonsense from Python.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    return trained_model.load(
        written.write(folder, "some text\nof letters\n", num_layers=1, rounds=1)
    )


def score(**changes):
    asked = eval_options.defaults()
    with asked.unlocked():
        asked.update_from_flattened_dict(changes)
    return evaluate_command.evaluate_workdirs(["none"], asked)


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
    "save to an address": (
        lambda m: m.save("hdfs://a/b"),
        "hdfs://a/b is neither a path of this machine nor",
    ),
    "save to a bucket's path": (
        lambda m: m.save(pathlib.Path("s3://a/b")),
        "s3://a cannot be used",
    ),
    "weights": (lambda m: spoiled(m).generate(length=3), "logits after token 0 are not finite"),
    "save a folder": (lambda m: m.save("/"), "cannot be written"),
    "eval.window": (lambda m: score(window=-1), "eval.window -1 must be at least 1"),
    "eval.multipliers": (lambda m: score(multipliers="1,nan"), "eval.multipliers nan must be"),
    "eval.dyneval": (
        lambda m: score(**{"dyneval.epsilons": "0"}),
        "eval.dyneval.epsilons 0.0 must be above",
    ),
    "features": (lambda m: layers.LSTMCell(2.5), "features 2.5 must be a whole number"),
    "rounds": (lambda m: layers.MogrifierLSTMCell(4, rounds=10**6), "rounds 1000000 must be"),
    "forget_bias": (lambda m: layers.LSTMCell(4, forget_bias=math.nan), "forget_bias nan must"),
    "dtype": (lambda m: layers.LSTMCell(4, dtype=jnp.int32), "dtype .* floating point"),
    "param_dtype": (lambda m: layers.LSTMCell(4, param_dtype="float99"), "'float99' must be"),
    "RNN(5)": (
        lambda m: rnn.RNN(5).init(jax.random.key(0), jnp.ones((2, 3, 4))),
        "RNN cannot run a int .* give it a cell",
    ),
    "RNN of a list": (
        lambda m: rnn.RNN(layers.LSTMCell(4)).init(jax.random.key(0), [[[1.0]]]),
        "over a list; .* an array",
    ),
    **{
        f"nnx.{name}({size!r}, 8)": (
            lambda m, name=name, size=size: getattr(nnx, name)(size, 8, rngs=flax.nnx.Rngs(0)),
            "in_features .* must be a whole number, at least 1",
        )
        for name, size in [
            *((name, 0) for name in nnx.__all__ if name != "RNN"),
            *(("LSTMCell", size) for size in (-1, 2.5, "4", None, True)),
        ]
    },
    "nnx.Mogrifier(8, 0)": (
        lambda m: nnx.Mogrifier(8, 0, rngs=flax.nnx.Rngs(0)),
        "hidden_features 0 must be",
    ),
    "no features": (
        lambda m: rnn.RNN(layers.LSTMCell(4)).init(jax.random.key(0), jnp.ones((2, 3, 0))),
        "has no features",
    ),
    "no features to gate": (
        lambda m: layers.Mogrifier().init(jax.random.key(0), jnp.ones((2, 0)), jnp.ones((2, 3))),
        "must have features",
    ),
    **{
        f"convert {what}": (
            lambda m, change=change: from_flax.convert(*changed(change)),
            r"params\['h[a-z]'\] of a LSTMCell with 4 features must have",
        )
        for what, change in {
            "without biases": lambda leaves: {"kernel": leaves["kernel"]},
            "without kernels": lambda leaves: {"bias": leaves["bias"]},
            "of other sizes": lambda leaves: leaves | {"kernel": jnp.ones((4, 5))},
            "of other ranks": lambda leaves: leaves | {"bias": jnp.ones((4, 1))},
            "of no leaves": lambda leaves: 5,
        }.items()
    },
    "save(5)": (lambda m: m.save(5), "path=5 is not a path"),
    "save(array)": (lambda m: m.save(np.int8([1, -1])), "is not a path"),
    "load(array)": (
        lambda m: trained_model.load(np.zeros((2, 3))),
        r"^workdir array[^\n]* is not a path",
    ),
    "carry of texts": (lambda m: run_linen(initial_carry=np.array(["a"])), "is not a carry"),
    "carry of texts for ours": (
        lambda m: rnn.RNN(layers.LSTMCell(4)).init(
            jax.random.key(0), jnp.ones((2, 3, 4)), initial_carry=np.array(["a"])
        ),
        "is not a carry",
    ),
    "save(NUL)": (lambda m: m.save("\0"), "is not a path"),
    "save('')": (lambda m: m.save(""), "names no file"),
    "carry": (
        lambda m: rnn.RNN(layers.LSTMCell(4)).init(
            jax.random.key(0), jnp.ones((2, 3, 4)), initial_carry="x"
        ),
        "initial_carry 'x' is not a carry",
    ),
    "zigzag": (lambda m: layers.LSTMCell(4, zigzag=5), "zigzag 5 must be True or False"),
    "params": (lambda m: from_flax.convert(nn.LSTMCell(4), 5), "params 5 must be a mapping"),
    "params of a number": (
        lambda m: from_flax.convert(nn.LSTMCell(4), {1: 2, "hf": 3}),
        "params has 1, hf, and those",
    ),
    "params of objects": (
        lambda m: from_flax.convert(*changed(lambda p: p | {"kernel": object()})),
        r"must have a kernel of shape \(4, 4\), and has none",
    ),
    "tensors of a number": (
        lambda m: from_pytorch.convert({1: 2}),
        "give a mapping of names to tensors",
    ),
    "vocabulary": (lambda m: vocabularies.Vocabulary.from_json(5), "is not valid JSON"),
    "several lines": (lambda m: m.predict("some", top=jnp.ones((2, 2))), r"^top Array[^\n]* must"),
    "which of numbers": (
        lambda m: trained_model.load("runs/x", which=np.zeros((2, 3))),
        r"^checkpoint array[^\n]* is unknown",
    ),
    "rounds of numbers": (
        lambda m: from_pytorch.convert({}, rounds=np.zeros((2, 3))),
        r"^rounds array[^\n]* must be",
    ),
    "lengths of numbers": (
        lambda m: run_linen(seq_lengths=np.zeros((2, 3))),
        r"^seq_lengths array[^\n]* must be",
    ),
    "a key of numbers": (
        lambda m: configs.base({"model": {"rounds": np.zeros((2, 3))}}),
        r"^model.rounds array[^\n]* must be a whole number$",
    ),
    "a fraction of numbers": (
        lambda m: options.check_values({"x": [np.zeros((2, 3))]}, {"x": options.Option(tuple)}),
        r"^x [^\n]* of which array[^\n]* must be a number",
    ),
    "a cell of numbers": (
        lambda m: from_flax.to_flax(np.zeros((2, 3))),
        r"^array[^\n]* is not a cell",
    ),
    "load('')": (lambda m: trained_model.load(""), "workdir is an empty text; give"),
    "to_flax": (lambda m: from_flax.to_flax(5), "5 is not a cell"),
    "load(long)": (lambda m: trained_model.load("x" * 5000), "^workdir x*(...)? does not exist"),
    "load(5)": (lambda m: trained_model.load(5), "workdir 5 is not a path"),
    "seq_lengths": (lambda m: run_linen(seq_lengths="x"), "seq_lengths 'x' must be"),
    "seq_lengths in NNX": (lambda m: run_nnx(seq_lengths="x"), "seq_lengths 'x' must be"),
    "initial_carry": (lambda m: run_linen(initial_carry=5), "initial_carry 5 is not a carry"),
    "remat_window": (lambda m: run_linen(remat_window=2.5), "remat_window 2.5 must be a whole"),
}


def changed(change):
    """A cell of Flax, and its parameters after a change of those that read h."""
    cell = nn.LSTMCell(4)
    carry = cell.initialize_carry(jax.random.key(0), (2, 3))
    params = cell.init(jax.random.key(0), carry, jnp.ones((2, 3)))["params"]
    return cell, {n: change(dict(p)) if n.startswith("h") else p for n, p in params.items()}


def spoiled(model):
    other = copy.copy(model)
    other.params = jax.tree.map(lambda leaf: leaf.at[..., :1].set(jnp.nan), model.params)
    return other


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


def test_a_model_is_pickled_with_its_weights(model):
    again = pickle.loads(pickle.dumps(model))
    assert again.generate("some", length=5) == model.generate("some", length=5)
    assert again.score("some text").nats.tolist() == model.score("some text").nats.tolist()
    assert repr(again) == repr(model)
    other = copy.copy(model)
    other.params = jax.tree.map(lambda leaf: leaf + 1, model.params)  # They are those that are set.
    found = pickle.loads(pickle.dumps(other)).score("some text")
    assert found.nats.tolist() == other.score("some text").nats.tolist()
    assert found.nats.tolist() != model.score("some text").nats.tolist()


@pytest.mark.parametrize(
    "sets", ["{'models': 3}", "3", "{'a': configs.Set('x', 5)}", "{'a': configs.Set('x', [3])}"]
)
def test_sets_that_are_none_are_named(tmp_path, sets):
    path = tmp_path / "experiment.py"
    path.write_text(
        f"from mogrifier_jax import configs\nSETS = {sets}\nget_config = configs.base\n"
    )
    with pytest.raises(errors.UsageError, match=r"SETS of .*experiment.py must map names"):
        sweeps.Sweep(str(path)).find_sets("a")


@pytest.mark.parametrize("value", ["('a', 'b', 'c')", "(0.5, None, 0.5)", "(1.5, 0.1, 0.1)", "()"])
def test_fractions_are_numbers(value, tmp_path):
    (tmp_path / "text").write_text("some words\n" * 30)
    config = configs.base(written.experiment.get_config("tiny"))
    with pytest.raises(errors.UsageError, match="fractions"):
        with config.unlocked():
            configs.assign(config, "data.fractions", ast.literal_eval(value))
        configs.check(config)
        corpora.load_corpus(
            "text",
            path=str(tmp_path / "text"),
            fractions=config.data.fractions,
            data_dir=str(tmp_path / "data"),
        )


@pytest.mark.parametrize("name", ["undefined", "idna", "rot13", "hex", "no such", "x\0", "utf-7"])
def test_an_encoding_that_is_none_is_refused(name, tmp_path):
    (tmp_path / "text").write_bytes(b"some words \xff\xfe ..\n" * 30)
    with pytest.raises(errors.UsageError, match=r"encoding|is not"):
        corpora.load_corpus(
            "text", path=str(tmp_path / "text"), encoding=name, data_dir=str(tmp_path / "data")
        )


def test_a_broken_experiment_is_named_with_its_line(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text("def get_config():\n    return {}['x']\n")
    with pytest.raises(errors.UsageError, match=r"experiment.py.*line 2: KeyError") as refused:
        configs.load_config(str(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", ["--config=/dev/zero", "--config /dev/zero", "--config=/"])
def test_a_device_is_no_experiment(form):
    with pytest.raises(errors.UsageError, match="is not a file"):
        command_line.parse(["main", *form.split()])


# The environment.


@pytest.mark.parametrize(
    "said", ["RESOURCE_EXHAUSTED: no room\nat", "Unable to initialize backend"]
)
def test_what_jax_says_of_devices_is_one_sentence(said):
    with pytest.raises(errors.UsageError, match=said.splitlines()[0]), failures.explained():
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="INTERNAL"), failures.explained():  # Control: a bug.
        raise RuntimeError("INTERNAL")


@pytest.mark.parametrize("value", ["--xla_nonsense=1", "nonsense"])
def test_flags_that_would_abort_the_process_are_refused(value, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    jax_settings.check_xla_flags()  # Control.
    monkeypatch.setenv("XLA_FLAGS", value)
    with pytest.raises(errors.UsageError, match=rf"XLA_FLAGS='{value}' cannot be read \(\w+"):
        jax_settings.check_xla_flags()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_of_any_encoding(encoding, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    with pytest.raises(UnicodeEncodeError):  # Control.
        print("\u25bc \ud800", file=out)
    monkeypatch.setattr(sys, "stdout", out)
    command_process.prepare_streams()
    print("a\u25bc\ud800", flush=True)
    assert out.buffer.getvalue().startswith(b"a")


ROOT = pathlib.Path(__file__).parents[1]
CONFIG = "--mode=config --config=experiments/pydoc.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"-m mogrifier_jax.main {CONFIG} >&-", 0),
        (f"-m mogrifier_jax.main {CONFIG} <&- >&- 2>&-", 0),
        (f"-m mogrifier_jax.main {CONFIG} >/dev/full", 2),
        (f"-m mogrifier_jax.main {CONFIG} >/dev/full 2>/dev/full", 2),
        ("-m mogrifier_jax.main --mode=no 2>/dev/full", 2),
        ("-m mogrifier_jax.main --mode=no 2>&-", 2),
        (f"-OO -m mogrifier_jax.main {CONFIG}", 0),
        ("-OO -m mogrifier_jax.launch --help", 0),
        ("-OO -m mogrifier_jax.launch --processes=0", 2),
    ],
)
def test_the_code_does_not_depend_on_where_the_output_goes(line, code):
    done = subprocess.run(
        f"{sys.executable} {line}", shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == code and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_ends_well_in_a_strange_environment(tmp_path):
    strange = {"PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    strange |= {"PYTHONCOERCECLOCALE": "0", "JAX_ENABLE_X64": "1", "MPLBACKEND": "nonsense"}
    strange |= {"JAX_THREEFRY_PARTITIONABLE": "0"}
    command = [sys.executable, "-m", "mogrifier_jax.main", "--config=experiments/pydoc.py:tiny"]
    command += ["--cpu_devices=1"]
    for name, environment in (("strange", strange), ("plain", {})):
        done = subprocess.run(
            [*command, f"--workdir={tmp_path / name}"],
            cwd=ROOT,
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "strange" / "learning_curve.png").exists()
    same = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("strange", "plain")]
    assert same[0] == same[1]


@pytest.mark.slow
def test_a_variable_that_jax_refuses_is_one_sentence():
    """JAX reads it as it is imported, which must come after signals are handled, too."""
    done = subprocess.run(
        [sys.executable, "-m", "mogrifier_jax.main", "--mode=config"],
        cwd=ROOT,
        env=os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "nonsense"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "UsageError: JAX cannot start: " in done.stderr
    assert "nonsense" in done.stderr and "Traceback" not in done.stderr


def test_variables_of_a_pod_that_do_not_fit_are_one_sentence(monkeypatch):
    def fail(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    place = distributed.find_cluster(environment={"TPU_WORKER_HOSTNAMES": "a,b"})
    with (
        pytest.raises(
            errors.UsageError, match=r"cannot find the other processes .*TPU_WORKER_HOST"
        ),
        distributed.session(place),
    ):
        pass

"""One file to share a model: what it holds, that it scores the same, and what is refused."""

import json

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import mogrifier_jax
from mogrifier_jax import errors
from mogrifier_jax.evaluation import export_command, loading, model_files
from mogrifier_jax.training import state_arrays
from tests import workdir as workdirs

TEXT = "the cat sat\non the mat\n" * 5


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return workdirs.write(tmp_path_factory.mktemp("run"), TEXT, num_layers=1, rounds=1)


@pytest.fixture(scope="module")
def path(workdir, tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "small.safetensors"
    mogrifier_jax.load(workdir).save(path)
    return path


def read(path):
    """The file as numpy and safetensors see it."""
    with safetensors.safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def test_the_file_opens_with_safetensors_alone(path, workdir):
    arrays, metadata = read(path)
    loaded = loading.load_run(workdir)
    assert arrays.keys() == state_arrays.name_leaves(loaded.params).keys()
    assert (arrays["embedding"] == np.asarray(loaded.params["embedding"])).all()
    assert metadata["vocabulary"] == (workdir / "vocabulary.json").read_text()
    assert json.loads(metadata["config"]) == json.loads((workdir / "config.json").read_text())
    assert metadata["format"] == "mogrifier_jax" and metadata["version"] == "1"
    assert json.loads(metadata["temperature"]) == 0.9
    assert json.loads(metadata["info"])["step"] == 3
    assert str(workdir) in loaded.info["workdir"] and str(workdir) not in str(metadata)


@pytest.mark.slow
def test_scores_and_texts_are_those_of_the_workdir(path, workdir):
    here, there = mogrifier_jax.load(workdir), mogrifier_jax.load(path)
    scores = [model.score("the mat sat").nats for model in (here, there)]
    np.testing.assert_array_equal(*scores)
    assert here.generate("the", length=9) == there.generate("the", length=9)
    assert there.config == here.config and there.info["workdir"] == str(path)
    # The control: other weights score otherwise.
    there.params = jax.tree.map(lambda leaf: 1.01 * leaf, there.params)
    assert (there.score("the mat sat").nats != scores[0]).any()


def rewritten(path, to, change_metadata=lambda m: m, change_arrays=lambda a: a, sign=True):
    """A copy that says something else, with a digest that fits it."""
    arrays, metadata = read(path)
    arrays, metadata = change_arrays(arrays), change_metadata(metadata)
    metadata.pop("digest", None)
    if sign:
        metadata["digest"] = model_files.digest_file(arrays, metadata)
    safetensors.numpy.save_file(arrays, to, metadata)
    return to


def without(name):
    return lambda values: {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"change_metadata": lambda m: {"format": "pt"}}, "holds no model of this package"),
        ({"change_metadata": lambda m: {**m, "version": "2"}}, "has version 2 of the format"),
        ({"sign": False}, "is damaged: its digest is another"),
        ({"change_metadata": without("vocabulary")}, "cannot be made here"),
        ({"change_metadata": lambda m: {**m, "config": "{"}}, "cannot be made here"),
        *(
            ({"change_metadata": lambda m, n=name, v=value: {**m, n: v}}, "cannot be made here")
            for name, value in (
                *(("config", "[]"), ("config", "5"), ("config", "[" * 900 + "]" * 900)),
                *(("info", "5"), ("info", "{}"), ("info", '{"step": "x"}')),
                *(("temperature", '"x"'), ("temperature", "[1]"), ("temperature", "NaN")),
                *(("vocabulary", "[]"), ("vocabulary", '{"level": "x", "tokens": []}')),
                ("vocabulary", '{"level": "character", "tokens": ["▼", "<UNK>", 5]}'),
                ("vocabulary", '{"level": "character", "tokens": ["▼", "<UNK>", "a", "a"]}'),
            )
        ),
        ({"change_arrays": without("embedding")}, "embedding differs in name, shape or dtype"),
        (
            {"change_arrays": lambda a: {**a, "embedding": a["embedding"].T.copy()}},
            "embedding differs",
        ),
        (
            {"change_arrays": lambda a: {**a, "embedding": a["embedding"].astype("float64")}},
            "embedding differs",
        ),
        ({"change_arrays": lambda a: {**a, "more": a["embedding"]}}, "more differs"),
    ],
)
def test_a_file_that_says_something_else_is_refused(path, tmp_path, change, message):
    with pytest.raises(errors.UsageError, match=message):
        mogrifier_jax.load(rewritten(path, tmp_path / "x.safetensors", **change))
    # The control: rewritten without a change it is read.
    assert model_files.load_file(rewritten(path, tmp_path / "same.safetensors")).temperature == 0.9


def test_damaged_truncated_and_foreign_files_are_refused(path, tmp_path):
    content = path.read_bytes()
    flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    for damaged, message in (
        (flipped, "is damaged: its digest is another"),
        (content[:-20], "cannot be read as a safetensors file"),
        (content[:40], "cannot be read as a safetensors file"),
        (b"", "cannot be read as a safetensors file"),
        (b"PK\x03\x04 not at all", "cannot be read as a safetensors file"),
    ):
        (tmp_path / "damaged.safetensors").write_bytes(damaged)
        with pytest.raises(errors.UsageError, match=message) as refused:
            mogrifier_jax.load(tmp_path / "damaged.safetensors")
        assert "\n" not in str(refused.value)


def test_export_writes_beside_the_run_or_where_it_is_told(workdir, tmp_path, capsys, path):
    export_command.export(str(workdir), str(tmp_path / "a" / "b.safetensors"))
    assert "mogrifier_jax.load(" in capsys.readouterr().out
    assert read(tmp_path / "a" / "b.safetensors")[1] == read(path)[1]
    export_command.export(str(workdir))
    assert read(workdir / "model.safetensors")[1] == read(path)[1]
    with pytest.raises(errors.UsageError, match="--workdir is missing"):
        export_command.export("")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "BF16", "I64", "BOOL", "C64"])
def test_a_dtype_that_is_not_the_weights_is_refused(path, tmp_path, dtype):
    content, bits = path.read_bytes(), {"BF16": 16, "I64": 64, "C64": 64}.get(dtype, 8)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    start, end = header["embedding"]["data_offsets"]
    header["embedding"] |= {"dtype": dtype, "shape": [(end - start) * 8 // bits]}
    text = json.dumps(header).encode()
    other = tmp_path / "other.safetensors"
    other.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(errors.UsageError, match=r"cannot be read|its digest is another"):
        mogrifier_jax.load(other)

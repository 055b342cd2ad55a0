"""Ensembles average the probabilities of token files, and refuse files that do not fit."""

import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.data import vocabularies
from mogrifier_jax.evaluation import ensembles, eval_options, evaluate_command, token_files
from mogrifier_jax.training.scoring import TokenScores


@pytest.mark.parametrize(
    "change",
    [
        {"nats": np.ones(5, np.float32)},
        {"nats": np.array(["x", "y", "z"])},
        {"nats": np.ones((3, 1), np.float32)},
        {"tokens": np.ones(3, np.float32)},
        {"tokens": np.zeros(0, np.int32), "nats": np.zeros(0, np.float32)},
        *({"nats": np.array([1.0, value, 1.0], np.float32)} for value in (np.nan, np.inf, -5.0)),
        *({"about": np.array(about)} for about in ("", "5", "{}", '{"vocabulary": 5}')),
    ],
)
def test_tokens_that_are_not_as_they_were_written_are_refused(change, tmp_path):
    whole = {"tokens": np.arange(3, dtype=np.int32), "nats": np.ones(3, np.float32)}
    whole["about"] = np.array('{"vocabulary": "x"}')
    for name in "ab":
        np.savez_compressed(tmp_path / f"{name}.npz", **whole)
    ensembles.average_files([tmp_path / "a.npz", tmp_path / "b.npz"])  # Control.
    np.savez_compressed(tmp_path / "b.npz", **whole | change)
    with pytest.raises(errors.UsageError, match=r"b.npz.*--mode=evaluate"):
        ensembles.average_files([tmp_path / "a.npz", tmp_path / "b.npz"])


def test_ensembles_average_probabilities(tmp_path):
    vocab = vocabularies.Vocabulary.from_tokens("abcde", "character")
    ids = np.array([1, 2, 3], np.int32)
    for name, nats in (("a", [1.0, 2.0, 3.0]), ("b", [2.0, 1.0, 3.0])):
        scores = TokenScores(ids, np.array(nats, np.float32))
        token_files.write_tokens(tmp_path / f"{name}.npz", scores, vocab)
    paths = [str(tmp_path / f"{name}.npz") for name in "ab"]
    output = str(tmp_path / "both.npz")
    options = eval_options.defaults()
    with options.unlocked():
        options.update(ensemble=",".join(paths), output=output)
    (result,) = evaluate_command.evaluate_workdirs([], options)
    mixed = -np.log((np.exp(-1) + np.exp(-2)) / 2)
    assert result["nats"] == pytest.approx((2 * mixed + 3) / 3)
    assert result["nats"] < min(result["members"])
    np.testing.assert_allclose(
        token_files.read_tokens(output)[0].nats, [mixed, mixed, 3.0], rtol=1e-6
    )

    other = TokenScores(np.array([1, 2, 4]), np.ones(3))
    token_files.write_tokens(tmp_path / "c.npz", other, vocab)
    token_files.write_tokens(tmp_path / "d.npz", TokenScores(ids[:2], np.ones(2)), vocab)
    token_files.write_tokens(tmp_path / "e.npz", TokenScores(ids, np.ones(3)), "another")
    (tmp_path / "f.npz").write_text("not at all")
    for name, message in (
        ("c", "first at token 2"),
        ("d", "3 and 2 tokens"),
        ("e", "vocabularies differ"),
        ("f", r"f.npz is not a .npz file"),
        ("g", "does not exist"),
    ):
        with pytest.raises(errors.UsageError, match=message):
            ensembles.average_files([paths[0], tmp_path / f"{name}.npz"])
    with pytest.raises(errors.UsageError, match="two or more"):
        ensembles.average_files(paths[:1])
    (tmp_path / "link.npz").symlink_to(paths[0])
    for same in (paths[0], f"{tmp_path}/./a.npz", tmp_path / "link.npz"):
        with pytest.raises(errors.UsageError, match="is there twice"):
            ensembles.average_files([*paths, same])

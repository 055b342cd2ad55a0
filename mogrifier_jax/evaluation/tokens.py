"""Files with the score of every token, and ensembles of them.

A file is a compressed .npz with the arrays `tokens` [N] int32 and `nats` [N] float32, in the
order of the text, and `about`, a JSON text that names the vocabulary by its digest.
"""

import hashlib
import json
import os
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.data import vocabulary
from mogrifier_jax.training import evaluate, workdirs


def write_tokens(
    path: str | os.PathLike,
    scores: evaluate.TokenScores,
    vocab: vocabulary.Vocabulary | str,
    **about: Any,
) -> None:
    """Writes a file of scores, whole or not at all; `vocab` may be its digest."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = vocab if isinstance(vocab, str) else digest_vocabulary(vocab)
    with workdirs.replacing(path) as file:
        np.savez_compressed(
            file,
            tokens=scores.tokens.astype(np.int32),
            nats=scores.nats.astype(np.float32),
            about=np.array(json.dumps({"vocabulary": digest, **about})),
        )


def read_tokens(path: str | os.PathLike) -> tuple[evaluate.TokenScores, dict[str, Any]]:
    """The scores in a file and what it says about itself."""
    if not pathlib.Path(path).is_file():
        raise errors.UsageError(f"{path} does not exist; give .npz files of --mode=evaluate")
    try:
        # Opened here: a damaged file would be left open otherwise.
        with open(path, "rb") as file, np.load(file) as arrays:
            about = json.loads(str(arrays["about"]))
            return evaluate.TokenScores(arrays["tokens"], arrays["nats"]), about
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise errors.UsageError(
            f"{path} is not a file of token scores ({error}); give one of --mode=evaluate"
        ) from error


def ensemble(paths: Sequence[str | os.PathLike]) -> tuple[evaluate.TokenScores, list[float], str]:
    """Averages the probabilities of each token; also the nats of each file, and the vocabulary.

    Files of other tokens, or of another vocabulary, are refused.
    """
    if len(paths) < 2:
        raise errors.UsageError(f"an ensemble of {len(paths)} files is none; give two or more")
    (first, about), *others = (read_tokens(path) for path in paths)
    log_p = -first.nats.astype(np.float64)
    means = [first.mean()]
    for path, (scores, described) in zip(paths[1:], others, strict=True):
        if described["vocabulary"] != about["vocabulary"]:
            _refuse(paths[0], path, "their vocabularies differ")
        if len(scores.tokens) != len(first.tokens):
            _refuse(paths[0], path, f"{len(first.tokens):,} and {len(scores.tokens):,} tokens")
        different = np.flatnonzero(scores.tokens != first.tokens)
        if len(different):
            _refuse(paths[0], path, f"they differ first at token {different[0]:,}")
        log_p = np.logaddexp(log_p, -scores.nats.astype(np.float64))
        means.append(scores.mean())
    nats = np.log(len(paths)) - log_p
    return evaluate.TokenScores(first.tokens, nats.astype(np.float32)), means, about["vocabulary"]


def digest_vocabulary(vocab: vocabulary.Vocabulary) -> str:
    """Tells vocabularies apart."""
    return hashlib.sha256(vocab.to_json().encode()).hexdigest()


def _refuse(first, second, why: str) -> None:
    raise errors.UsageError(
        f"{first} and {second} score different texts: {why}; an ensemble needs files of the same "
        "split, made with the same vocabulary"
    )

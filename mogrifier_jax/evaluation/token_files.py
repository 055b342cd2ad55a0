"""Files with the score of every token of a text.

A token file is a compressed .npz with the arrays `tokens` [N] int32 and `nats` [N] float32, in the
order of the text, and `about`, a JSON text with the digest of the vocabulary. `ensembles.py`
averages several of them.
"""

import hashlib
import json
import os
from typing import Any

import numpy as np

from mogrifier_jax import errors, files
from mogrifier_jax.data import vocabularies
from mogrifier_jax.training import atomic_files, scoring

ARRAYS = {"tokens": files.Array("iu", 1), "nats": files.Array("f", 1), "about": files.Array("U", 0)}


def write_tokens(
    path: str | os.PathLike,
    scores: scoring.TokenScores,
    vocab: vocabularies.Vocabulary | str,
    **about: Any,
) -> None:
    """Writes a token file, whole or not at all; `vocab` may be the digest of a vocabulary."""
    digest = vocab if isinstance(vocab, str) else digest_vocabulary(vocab)
    with atomic_files.replacing(path) as file:
        np.savez_compressed(
            file,
            tokens=scores.tokens.astype(np.int32),
            nats=scores.nats.astype(np.float32),
            about=np.array(json.dumps({"vocabulary": digest, **about})),
        )


def read_tokens(path: str | os.PathLike) -> tuple[scoring.TokenScores, dict[str, Any]]:
    """The scores in a token file, and its `about`."""
    remedy = "give .npz files that --mode=evaluate has written"
    arrays = files.read_arrays(path, ARRAYS, remedy)
    about = files.parse_json(str(arrays["about"]), {"vocabulary": str}, f"{path}: about", remedy)
    scores = scoring.TokenScores(arrays["tokens"], arrays["nats"])
    if len(scores.tokens) != len(scores.nats) or not len(scores.nats):
        raise errors.UsageError(
            f"{path} has {len(scores.tokens):,} tokens and {len(scores.nats):,} nats, not one for "
            f"each; {remedy}"
        )
    if not np.isfinite(scores.nats).all():
        raise errors.UsageError(f"{path} has nats that are not finite; {remedy}")
    if (lowest := scores.nats.min()) < -1e-3:  # Rounding may leave a probability just above 1.
        raise errors.UsageError(
            f"{path} has {lowest:g} nats for a token, which would be a probability above 1; "
            f"{remedy}"
        )
    return scores, about


def digest_vocabulary(vocab: vocabularies.Vocabulary) -> str:
    """The SHA-256 of a vocabulary; only files with the same digest can be compared."""
    return hashlib.sha256(vocab.to_json().encode()).hexdigest()

"""Ensembles: the average of the probabilities that several runs give to each token of a text."""

import os
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from absl import logging

from mogrifier_jax import errors, files
from mogrifier_jax.evaluation import token_files
from mogrifier_jax.training import scoring, summaries, units


class Ensemble(NamedTuple):
    """The scores of an ensemble and of its members."""

    scores: scoring.TokenScores  # Of the average probability.
    members: list[float]  # Nats per token of each file.
    vocabulary: str  # The digest of the vocabulary.


def evaluate_ensemble(paths: Sequence[str], output: str | None = None) -> files.JsonObject:
    """Shows the scores of token files and of their ensemble, which is written to `output`."""
    scores, members, vocabulary = average_files(paths)
    nats = scores.mean()
    rows = [(str(path), _show_nats(member)) for path, member in zip(paths, members, strict=True)]
    rows.append(("ensemble", _show_nats(nats)))
    logging.info("\n%s", summaries.table({f"ensemble of {len(paths)} files": rows}))
    if output:
        token_files.write_tokens(output, scores, vocabulary, ensemble=list(map(str, paths)))
    return {"ensemble": list(map(str, paths)), "nats": nats, "members": members}


def average_files(paths: Sequence[str | os.PathLike]) -> Ensemble:
    """Averages the probabilities of each token.

    Refuses files that differ in their tokens or in their vocabulary.
    """
    if len(paths) < 2:
        raise errors.UsageError(f"{len(paths)} files make no ensemble; give two or more")
    places = [os.path.realpath(path) for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise errors.UsageError(f"{path} is there twice, and would count twice; give it once")
    (first, about), *others = (token_files.read_tokens(path) for path in paths)
    log_p = -first.nats.astype(np.float64)
    members = [first.mean()]
    for path, (scores, other_about) in zip(paths[1:], others, strict=True):
        if other_about["vocabulary"] != about["vocabulary"]:
            _refuse(paths[0], path, "their vocabularies differ")
        if len(scores.tokens) != len(first.tokens):
            _refuse(paths[0], path, f"{len(first.tokens):,} and {len(scores.tokens):,} tokens")
        different = np.flatnonzero(scores.tokens != first.tokens)
        if len(different):
            _refuse(paths[0], path, f"they differ first at token {different[0]:,}")
        log_p = np.logaddexp(log_p, -scores.nats.astype(np.float64))
        members.append(scores.mean())
    nats = np.log(len(paths)) - log_p
    averaged = scoring.TokenScores(first.tokens, nats.astype(np.float32))
    return Ensemble(averaged, members, about["vocabulary"])


def _show_nats(nats: float) -> str:
    return f"{nats:.5f} nats  (ppl {units.perplexity(nats):.2f}, {units.bits(nats):.4f} bits)"


def _refuse(first: str | os.PathLike, second: str | os.PathLike, reason: str) -> NoReturn:
    raise errors.UsageError(
        f"{first} and {second} score different texts: {reason}; an ensemble needs files of the "
        "same split, made with the same vocabulary"
    )

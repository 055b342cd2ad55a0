"""What is scored, the splits of a run's corpus or any file, and files with scores of all tokens.

Such a file is a compressed .npz with the arrays `tokens` [N] int32 and `nats` [N] float32, in the
order of the text, and `about`, a JSON text that names the vocabulary by its digest. Several of
them make an ensemble.
"""

import functools
import hashlib
import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from mogrifier_jax import errors
from mogrifier_jax.data import tasks, vocabulary
from mogrifier_jax.evaluation import pretrained
from mogrifier_jax.training import evaluate, workdirs


class Texts(NamedTuple):
    """Named texts that can be laid out for evaluation."""

    names: tuple[str, ...]
    unit: str  # In which a score is read: "ppl", "bpc" or "bpb".
    plan: Callable[..., tasks.Plan]  # plan(name, num_stripes, window=..., mesh=None)
    num_lines: Callable[[str], int]
    carries: bool
    about: Mapping[str, Any]  # For the record.


def read_splits(
    loaded: pretrained.Pretrained, source_dir: str | None = None, data_dir: str | None = None
) -> Texts:
    """The splits of the corpus that the run was trained on; another vocabulary is refused."""
    options = dict(loaded.config.data)
    moved = {"source_dir": source_dir, "data_dir": data_dir}
    options |= {key: folder for key, folder in moved.items() if folder}
    task = tasks.make_task(jax.random.key(loaded.config.seed), None, **options)
    if task.vocabulary.to_json() != loaded.vocabulary.to_json():
        raise errors.UsageError(
            f"the corpus {options['name']} here has another vocabulary ({len(task.vocabulary):,} "
            f"tokens) than the run in {loaded.info['workdir']} ({len(loaded.vocabulary):,}): it is "
            "not the text that the run was trained on; set --eval.source_dir to that, or score "
            "the file itself with --eval.text"
        )
    return Texts(
        ("train", "valid", "test"),
        task.score_unit,
        task.plan,
        task.num_lines,
        task.carries,
        {"corpus": options["name"]},
    )


def read_file(loaded: pretrained.Pretrained, path: str | os.PathLike) -> Texts:
    """Any text file as one text, named "text"; what the vocabulary lacks is reported."""
    config, vocab = loaded.config, loaded.vocabulary
    if not tasks.kind_of(config.data).carries:
        raise errors.UsageError(
            f"the run in {loaded.info['workdir']} models no stream of text; "
            "a file can be scored only by a language model that carries its state"
        )
    split = encode_file(vocab, path)
    unknown = int((split.tokens == vocab.unknown_id).sum())
    if unknown:
        some = vocab.find_unknown(read_text(vocab, path))
        logging.warning(
            "%s: %d of %d tokens (%.2f%%) are not in the vocabulary, %d different ones: %s",
            *(path, unknown, len(split.tokens), 100 * unknown / len(split.tokens), len(some)),
            ", ".join(map(repr, some[:10])) + (", ..." if len(some) > 10 else ""),
        )
    plan = functools.partial(tasks.plan_text, split, vocab.eos_id)
    unit = unit_of(config.data.name, vocab.level)
    return Texts(
        ("text",),
        unit,
        lambda name, *args, **options: plan(*args, **options),
        lambda name: len(split.line_starts),
        True,
        {"source": str(path), "unknown_tokens": unknown},
    )


def encode_file(vocab: vocabulary.Vocabulary, path: str | os.PathLike) -> vocabulary.EncodedSplit:
    """The ids of a file; one that is missing, empty or no text is refused."""
    text = read_text(vocab, path)
    if not text:
        raise errors.UsageError(f"{path} is empty; there is nothing to score")
    return vocab.encode_split(text)


def unit_of(corpus: str, level: str) -> str:
    """How scores on this corpus are read, by the level of its vocabulary."""
    # The words of ptb_char are characters with spaces between them.
    level = "character" if corpus == "ptb_char" else level
    return tasks.SCORE_UNITS[level]


def read_text(vocab: vocabulary.Vocabulary, path: str | os.PathLike) -> str | bytes:
    """What is in a file, as the level of the vocabulary needs it."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise errors.UsageError(f"{path} is not a file; give one of text")
    content = path.read_bytes()
    if vocab.level == "byte":
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.UsageError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        ) from error


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

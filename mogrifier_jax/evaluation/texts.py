"""What is scored: the splits of a run's corpus, or any file, in the run's vocabulary."""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from absl import logging

from mogrifier_jax import errors
from mogrifier_jax.data import tasks, vocabulary
from mogrifier_jax.evaluation import pretrained


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
    return {"word": "ppl", "character": "bpc", "byte": "bpb"}[level]


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

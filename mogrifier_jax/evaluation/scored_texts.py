"""The texts that a loaded run can score: the splits of its corpus, or any file."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
from absl import logging

from mogrifier_jax import errors, files
from mogrifier_jax.data import tasks, vocabularies
from mogrifier_jax.evaluation import loaded_run


class ScoredTexts(NamedTuple):
    """Texts as the splits of a task, and what is kept with their scores."""

    task: tasks.Task
    origin: files.JsonObject  # The corpus and its changed splits, or a file and its unknown tokens.


def read_splits(
    loaded: loaded_run.LoadedRun, source_dir: str | None = None, data_dir: str | None = None
) -> ScoredTexts:
    """The splits of the corpus that the run was trained on; refuses another vocabulary.

    A corpus that has not been prepared is prepared in `data_dir` or in the cache. The folder that
    the config of the run names is only read, because the run may be somebody else's.
    """
    options = dict(loaded.config.data)
    options |= {"data_dir": data_dir, "prepared_dir": options["data_dir"]}
    if source_dir:
        options["source_dir"] = source_dir
    task = tasks.make_task(jax.random.key(loaded.config.seed), None, **options)
    if task.vocabulary.to_json() != loaded.vocabulary.to_json():
        raise errors.UsageError(
            f"the corpus {options['name']} here has another vocabulary ({len(task.vocabulary):,} "
            f"tokens) than the run in {loaded.info['workdir']} ({len(loaded.vocabulary):,}): it is "
            "not the text that the run was trained on; set --eval.source_dir to that, or score "
            "the file itself with --eval.text"
        )
    origin: files.JsonObject = {"corpus": options["name"]}
    known = loaded.info.get("corpus", {})
    changed = [split for split in known if known[split] != task.digests.get(split, known[split])]
    if changed:
        # Another text may be scored on purpose, but its scores must not be mistaken for the run's.
        origin["changed_splits"] = ",".join(changed)
        logging.warning(
            "the corpus %s is not the one that the run in %s was trained on: the text of %s has "
            "changed. Scores are those of the text as it is now, whose valid and test splits may "
            "contain lines that were trained on",
            options["name"],
            loaded.info["workdir"],
            " and ".join(changed),
        )
    return ScoredTexts(task, origin)


def read_file(loaded: loaded_run.LoadedRun, path: str | os.PathLike) -> ScoredTexts:
    """Any text file as one split named "text"; a warning lists the unknown tokens."""
    config, vocab = loaded.config, loaded.vocabulary
    if not tasks.kind_of(config.data).carries:
        raise errors.UsageError(
            f"the run in {loaded.info['workdir']} models no stream of text; "
            "a file can be scored only by a language model that carries its state"
        )
    text = read_text(vocab, path)
    if not text:
        raise errors.UsageError(f"{path} is empty; there is nothing to score")
    encoded = vocab.encode_split(text)
    num_unknown = int((encoded.tokens == vocab.unknown_id).sum())
    if num_unknown:
        unknown = vocab.find_unknown(text)
        total, share = len(encoded.tokens), f"{num_unknown / len(encoded.tokens):.2%}"
        logging.warning(
            f"{path}: {num_unknown} of {total} tokens ({share}) are not in the vocabulary, "
            f"{len(unknown)} distinct ones: {list_some(unknown)}"
        )
    task = tasks.make_scored_text(encoded, vocab, token_unit(config.data.name, vocab.level))
    return ScoredTexts(task, {"source": os.path.abspath(path), "unknown_tokens": num_unknown})


def list_some(tokens: Sequence[str]) -> str:
    """The first ten tokens, as a message shows them."""
    return ", ".join(map(repr, tokens[:10])) + (", ..." if len(tokens) > 10 else "")


def token_unit(corpus: str, level: str) -> str:
    """What a token of this corpus is, given the level of its vocabulary."""
    # The words of ptb_char are single characters.
    return "character" if corpus == "ptb_char" else level


def read_text(vocab: vocabularies.Vocabulary, path: str | os.PathLike) -> str | bytes:
    """The content of a file: bytes for a vocabulary of bytes, otherwise UTF-8 text."""
    content = files.read_bytes(path, "give a file of text")
    if vocab.level == "byte":
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.UsageError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        ) from error

"""Corpora by name: read, checked, encoded, ready for `streams.py`.

The paper's corpora and local files go through the builders in `datasets/`; `pydoc` comes with
Python. `vocabulary.py` does the encoding.
"""

import dataclasses
import functools
import importlib
import os
import pathlib
from collections.abc import Callable

import tqdm
from etils import epath

from mogrifier_jax import errors
from mogrifier_jax.data import datasets
from mogrifier_jax.data import vocabulary as vocabularies
from mogrifier_jax.data.datasets import base, mwc
from mogrifier_jax.data.datasets import text as local_text

SOURCE_VARIABLE = "MOGRIFIER_DATA_DIR"
CACHE_VARIABLE = "MOGRIFIER_CACHE_DIR"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three encoded splits and the vocabulary of the first."""

    name: str
    unit: str  # What a token is: "word", "character" or "byte".
    vocabulary: vocabularies.Vocabulary
    train: vocabularies.EncodedSplit
    valid: vocabularies.EncodedSplit
    test: vocabularies.EncodedSplit


def load_corpus(name: str, *, data_dir=None, source_dir=None, **options) -> Corpus:
    """Loads a corpus, preparing it first if need be.

    Args:
      name: one of NAMES.
      data_dir: where prepared data is kept; by default $MOGRIFIER_CACHE_DIR, or a folder in
        ~/.cache.
      source_dir: a folder with files that were already downloaded; by default
        $MOGRIFIER_DATA_DIR, if set.
      **options: of `mwc`, the language; of `text`, the fields of `datasets.text.Options`. None
        stands for the default.
    """
    if name not in _READERS:
        raise errors.UsageError(f"corpus {name!r} is unknown; use one of {', '.join(NAMES)}")
    reader, accepted = _READERS[name]
    options = {key: value for key, value in options.items() if value is not None}
    for key in options:
        if key not in accepted:
            known = f"its options are {', '.join(accepted)}" if accepted else "it has none"
            raise errors.UsageError(f"corpus {name!r} has no option {key!r}; {known}")
    return reader(name, _default_data_dir(data_dir), _default_source_dir(source_dir), **options)


def _read_pydoc(name, data_dir, source_dir) -> Corpus:
    """The language reference that `help()` shows: English, the same for each Python version."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise errors.UsageError(
            "corpus 'pydoc' is not in this Python (no module pydoc_data); "
            "install the full standard library, or use another corpus"
        ) from error
    whole = "".join(topics[topic].rstrip("\n") + "\n" for topic in sorted(topics))
    texts = local_text.cut(whole, (0.9, 0.05, 0.05), "pydoc_data.topics")
    return _encode(name, "character", "character", iter(texts))


def _read_prepared(
    name, data_dir, source_dir, *, level=None, encoding="utf-8", **builder_options
) -> Corpus:
    kind = datasets.BUILDERS[name]
    level = level or kind.LEVEL
    make_builder = functools.partial(kind, data_dir=epath.Path(data_dir), **builder_options)
    builder = base.prepare(make_builder, source_dir)

    def read(split):
        content = base.read(builder, split)
        if level == "byte":
            return content.data
        try:
            return content.tobytes().decode(encoding)
        except UnicodeDecodeError as error:
            raise errors.UsageError(
                f"the {split} text of {name} is not {encoding}: {error.reason} at byte "
                f"{error.start}; fetch it again and delete {builder.data_path}"
            ) from error

    return _encode(name, level, kind.UNIT or level, map(read, base.SPLITS))


def _read_mwc(name, data_dir, source_dir, *, language="en") -> Corpus:
    if language not in mwc.LANGUAGES:
        raise errors.UsageError(
            f"language {language!r} is unknown; use one of {', '.join(mwc.LANGUAGES)}"
        )
    return _read_prepared(name, data_dir, source_dir, config=language)


def _read_text(name, data_dir, source_dir, **options) -> Corpus:
    if "fractions" in options:
        options["fractions"] = tuple(options["fractions"])
    parsed = local_text.Options(**options)
    config = local_text.make_config(parsed)
    return _read_prepared(name, data_dir, None, level=parsed.level, config=config)


def _encode(name, level, unit, texts) -> Corpus:
    """Encodes train, valid and test one after the other, holding one text at a time."""
    splits: list[vocabularies.EncodedSplit] = []
    with tqdm.tqdm(total=3, desc=f"encoding {name}", unit="split", disable=None) as bar:
        for text in texts:
            if not splits:
                vocab = vocabularies.Vocabulary.from_text(text, level)
            splits.append(vocab.encode_split(text))
            bar.update()
    return Corpus(name, unit, vocab, *splits)


def _default_data_dir(data_dir):
    default = os.environ.get(CACHE_VARIABLE) or "~/.cache/mogrifier_jax"
    return os.path.expanduser(data_dir or default)


def _default_source_dir(source_dir) -> pathlib.Path | None:
    source_dir = source_dir or os.environ.get(SOURCE_VARIABLE)
    if not source_dir:
        return None
    path = pathlib.Path(source_dir).expanduser()
    if not path.is_dir():
        raise errors.UsageError(
            f"source_dir {source_dir} is not a folder; name the folder that holds the files, or "
            f"unset {SOURCE_VARIABLE}"
        )
    return path


# For each name its reader and the options that it takes.
_READERS: dict[str, tuple[Callable[..., Corpus], tuple[str, ...]]] = {
    **dict.fromkeys(datasets.BUILDERS, (_read_prepared, ())),
    "mwc": (_read_mwc, ("language",)),
    "text": (_read_text, tuple(field.name for field in dataclasses.fields(local_text.Options))),
    "pydoc": (_read_pydoc, ()),
}
NAMES = tuple(_READERS)

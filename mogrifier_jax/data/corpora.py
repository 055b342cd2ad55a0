"""Loads a corpus by name: three encoded splits and the vocabulary of the training split.

The builders in `datasets/` read the paper's corpora and local files. They are imported only when a
corpus is loaded, because a trained model needs none of their libraries. The text of the corpus
`pydoc` is part of this package. `vocabularies.py` encodes.
"""

import dataclasses
import functools
import gzip
import hashlib
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tqdm
from etils import epath

from mogrifier_jax import buckets, errors, files
from mogrifier_jax.data import vocabularies

SPLITS = ("train", "valid", "test")
SOURCE_VARIABLE = "MOGRIFIER_DATA_DIR"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three encoded splits, and the vocabulary of the training split."""

    name: str
    unit: str  # What a token is: "word", "character" or "byte".
    vocabulary: vocabularies.Vocabulary
    train: vocabularies.EncodedSplit
    valid: vocabularies.EncodedSplit
    test: vocabularies.EncodedSplit

    def split(self, name: str) -> vocabularies.EncodedSplit:
        """The split of this name, which is one of SPLITS."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[name]

    def digests(self) -> dict[str, str]:
        """The SHA-256 of the token ids of each split, which identifies the texts of a run."""
        digests = {}
        for name in SPLITS:
            tokens = self.split(name).tokens
            digest = hashlib.sha256(f"{tokens.dtype.str} {len(tokens)}".encode())
            digest.update(np.ascontiguousarray(tokens).data)
            digests[name] = digest.hexdigest()
        return digests


def load_corpus(
    name: str,
    *,
    data_dir: str | os.PathLike | None = None,
    source_dir: str | os.PathLike | None = None,
    prepared_dir: str | os.PathLike | None = None,
    **options: Any,
) -> Corpus:
    """Loads a corpus, which is prepared first if it has not been.

    Args:
      name: the name of a builder in `datasets/`, or "pydoc".
      data_dir: the folder of prepared data; by default $MOGRIFIER_CACHE_DIR, or a folder in
        ~/.cache.
      source_dir: a folder with files that have been downloaded already; by default
        $MOGRIFIER_DATA_DIR, if set.
      prepared_dir: another folder that may contain prepared data. Nothing is written to it.
      **options: the OPTIONS of the builder. None selects the default.
    """
    from mogrifier_jax.data import datasets

    if name not in (known := [*datasets.BUILDERS, "pydoc"]):
        raise errors.UsageError(f"corpus {name!r} is unknown; use one of {', '.join(known)}")
    accepted = () if name == "pydoc" else datasets.BUILDERS[name].OPTIONS
    options = {key: value for key, value in options.items() if value is not None}
    for key in options:
        if key not in accepted:
            has = f"its options are {', '.join(accepted)}" if accepted else "it has none"
            raise errors.UsageError(f"corpus {name!r} has no option {key!r}; {has}")
    source_path = _resolve_source_dir(source_dir)
    if name == "pydoc":
        return _read_pydoc()
    with buckets.mounted(_resolve_data_dir(data_dir)) as prepared:
        return _read_prepared(name, prepared, source_path, prepared_dir, options)


def _read_pydoc() -> Corpus:
    """The language reference that `help()` shows in Python 3.11, as stored in this package."""
    from mogrifier_jax.data.datasets import text

    path = pathlib.Path(__file__).with_name("pydoc") / "topics.txt.gz"
    try:
        whole = gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise errors.UsageError(
            f"{path}, the corpus 'pydoc', is missing or damaged ({error}); install mogrifier_jax "
            "again"
        ) from error
    texts = text.cut(whole, (0.9, 0.05, 0.05), str(path))
    return _encode("pydoc", "character", "character", iter(texts))


def _read_prepared(
    name: str,
    data_dir: str,
    source_dir: pathlib.Path | None,
    prepared_dir: str | os.PathLike | None,
    options: Mapping[str, Any],
) -> Corpus:
    """The corpus of a builder in `datasets/`."""
    from mogrifier_jax.data import datasets
    from mogrifier_jax.data.datasets import base

    builder_class = datasets.BUILDERS[name]
    config = builder_class.configure(**options)
    make_builder = functools.partial(builder_class, data_dir=epath.Path(data_dir), config=config)
    if prepared_dir:
        prepared = epath.Path(os.path.expanduser(buckets.local_copy(prepared_dir)))
        make_prepared = functools.partial(make_builder, data_dir=prepared)
        make_builder = make_prepared if base.is_prepared(make_prepared) else make_builder
    builder = base.prepare(make_builder, source_dir)
    level = builder.level

    def read(split: str) -> str | memoryview:
        content = base.read(builder, split)
        if level == "byte":
            return content.data
        try:
            return content.tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise errors.UsageError(
                f"the {split} text of {name} is not utf-8: {error.reason} at byte "
                f"{error.start}; fetch it again and delete {builder.data_path}"
            ) from error

    return _encode(name, level, builder_class.UNIT or level, map(read, SPLITS))


def _encode(name: str, level: str, unit: str, texts: Iterable[str | memoryview]) -> Corpus:
    """Encodes train, valid and test in turn, with only one text in memory at a time."""
    splits: list[vocabularies.EncodedSplit] = []
    with tqdm.tqdm(total=3, desc=f"encoding {name}", unit="split", disable=None) as bar:
        for text in texts:
            if not splits:
                vocab = vocabularies.Vocabulary.from_text(text, level)
            splits.append(vocab.encode_split(text))
            bar.update()
    return Corpus(name, unit, vocab, *splits)


def _resolve_data_dir(data_dir: str | os.PathLike | None) -> str:
    return os.path.expanduser(data_dir) if data_dir else files.cache_folder()


def _resolve_source_dir(source_dir: str | os.PathLike | None) -> pathlib.Path | None:
    source_dir = source_dir or os.environ.get(SOURCE_VARIABLE)
    if not source_dir:
        return None
    path = pathlib.Path(os.path.expanduser(buckets.local_copy(source_dir)))
    if not path.is_dir():
        raise errors.UsageError(
            f"source_dir {source_dir} is not a folder; name the folder that contains the files, or "
            f"unset {SOURCE_VARIABLE}"
        )
    return path

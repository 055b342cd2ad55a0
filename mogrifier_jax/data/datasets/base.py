"""The base class of the builders, which store each split as bytes in a few large records.

Prepared data gets its final name only when it is complete. It contains the SHA-256 of each
split, which `read` checks. `sources.py` finds the files of a corpus; the other modules of this
folder are the corpora.
"""

import contextlib
import hashlib
import io
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from etils import epath

from mogrifier_jax import errors, files
from mogrifier_jax.data import corpora
from mogrifier_jax.data.datasets import sources

_RECORD_BYTES = 1 << 20
# Preparing never takes a day, so an older unfinished folder belongs to a killed process.
_LEFTOVER_SECONDS = 24 * 3600


class TextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A corpus of three texts; a subclass names the SOURCE and describes it."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}  # noqa: RUF012 (the name and type are tfds's)
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Optional: the files as published, plain, packed or archived."

    LEVEL = "word"  # One of vocabularies.LEVELS.
    UNIT: str | None = None  # What a token is, where the level does not say it.
    OPTIONS: tuple[str, ...] = ()  # The keywords of `configure`.
    SOURCE: sources.Source
    DESCRIPTION: str
    HOMEPAGE: str | None = None
    CITATION: str | None = None

    def __init__(
        self,
        *,
        file_format: str | None = None,
        data_dir: str | os.PathLike,
        config: Any = None,
        **kwargs: Any,
    ):
        variant = getattr(config, "name", config) or ""
        folder = pathlib.Path(data_dir, self.name, variant, str(self.VERSION))
        # tfds would read from a device such as /dev/zero forever.
        if irregular := files.find_irregular(folder):
            raise errors.UsageError(
                f"{irregular}, part of the prepared data of this corpus, is not a regular file; "
                f"delete {folder} and start again"
            )
        # Writing the default format of tfds needs TensorFlow.
        super().__init__(
            file_format=file_format or "array_record", data_dir=data_dir, config=config, **kwargs
        )

    @classmethod
    def configure(cls) -> Any:
        """The tfds config for the options of the corpus; None if it has no options."""
        return None

    @property
    def level(self) -> str:
        """The level at which the text is read, one of vocabularies.LEVELS."""
        return self.LEVEL

    def load_texts(self, source_dir: str | os.PathLike | None) -> tuple[bytes | memoryview, ...]:
        """The checked bytes of train, valid and test."""
        return sources.load(self.SOURCE, source_dir)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Tensor(shape=(None,), dtype=np.uint8, encoding="bytes")
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.DESCRIPTION,
            homepage=self.HOMEPAGE,
            citation=self.CITATION,
            features=tfds.features.FeaturesDict({"text": text}),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        try:
            source_dir = dl_manager.manual_dir
        except AssertionError:  # The folder is missing or empty.
            source_dir = None
        texts = dict(zip(corpora.SPLITS, self.load_texts(source_dir), strict=True))
        self.info.metadata["sha256"] = {
            split: hashlib.sha256(text).hexdigest() for split, text in texts.items()
        }
        return {split: self._generate_examples(text) for split, text in texts.items()}

    def _generate_examples(self, text: bytes | memoryview) -> Iterator[tuple[int, dict[str, Any]]]:
        data = np.frombuffer(text, np.uint8)
        for i, start in enumerate(range(0, len(data), _RECORD_BYTES)):
            yield i, {"text": data[start : start + _RECORD_BYTES]}


def is_prepared(make_builder: Callable[[], TextBuilder]) -> bool:
    """Whether the folder of a builder contains its prepared data; nothing is written."""
    try:
        with _quiet():
            return make_builder().data_path.exists()
    except Exception:  # A damaged dataset_info.json raises many kinds of errors.
        return False


def prepare(
    make_builder: Callable[[], TextBuilder], source_dir: str | os.PathLike | None = None
) -> TextBuilder:
    """The builder with its data prepared; several processes may prepare the same data at once."""
    folder = getattr(make_builder, "keywords", {}).get("data_dir", "the cache")
    with _damage_named(folder), _quiet():
        builder = make_builder()
    if not builder.data_path.exists():
        _remove_leftovers(builder.data_path.parent)
        if not sys.stderr.isatty():
            tfds.disable_progress_bar()
        config = tfds.download.DownloadConfig(manual_dir=source_dir)
        try:
            with _quiet():
                builder.download_and_prepare(download_config=config)
        except errors.UsageError:
            raise
        except Exception as error:  # How a full disk is reported depends on the library.
            # If another process has finished first, its data is used.
            if not builder.data_path.exists():
                reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                raise errors.UsageError(
                    f"this corpus could not be prepared in {builder.data_path} ({reason}); make "
                    f"room there or fix the cause, or set data.data_dir to another folder"
                ) from error
    with _damage_named(folder):
        # A builder that is made before another process has finished does not know what it prepared.
        return builder if builder.info.metadata else make_builder()


def read(builder: TextBuilder, split: str) -> np.ndarray:
    """The bytes of a prepared split."""
    try:
        source = builder.as_data_source(split)
        records = source.__getitems__(list(range(len(source))))
        text = np.concatenate([record["text"] for record in records])
        if hashlib.sha256(text.data).hexdigest() == builder.info.metadata["sha256"][split]:
            return text
    except Exception:
        pass  # Damaged records and metadata raise many kinds of errors.
    raise errors.UsageError(
        f"the prepared {split} text in {builder.data_path} is damaged; delete that folder and "
        "start again"
    )


@contextlib.contextmanager
def _damage_named(folder: Any) -> Iterator[None]:
    """Turns the many kinds of errors that tfds raises for damaged JSON into one sentence."""
    try:
        yield
    except (errors.UsageError, PermissionError):
        raise
    except Exception as error:
        raise errors.UsageError(
            f"the prepared data of this corpus in {folder} is damaged "
            f"({' '.join(str(error).split())[:200]}); delete its folder there and start again"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences tfds, which reports downloads of unknown size even if nothing is downloaded."""
    logger = logging.get_absl_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _remove_leftovers(folder: epath.Path) -> None:
    """Deletes unfinished folders of preparations that were killed more than a day ago."""
    if folder.exists():
        for path in folder.glob("incomplete.*"):
            if time.time() - path.stat().mtime > _LEFTOVER_SECONDS:
                path.rmtree(missing_ok=True)

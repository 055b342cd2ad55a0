"""The base class of the builders, which store each split as bytes in a few large records.

Prepared data gets its final name only when it is whole. It has the sha256 of each split, which
`read` checks. `sources.py` finds the files. The other files of this folder are the corpora.
"""

import contextlib
import hashlib
import sys
import time
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from mogrifier_jax import errors
from mogrifier_jax.data.datasets import sources

SPLITS = ("train", "valid", "test")
_RECORD_BYTES = 1 << 20
_LEFTOVER_SECONDS = 24 * 3600  # A preparation takes less than a day, so an older one was killed.


class TextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A corpus of three texts; a subclass names the SOURCE and describes it."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}  # noqa: RUF012 (the name and type are tfds's)
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Optional: the files as published, plain, packed or archived."

    LEVEL = "word"  # What the text is cut into.
    UNIT: str | None = None  # What people call such a token, if it is another word.
    OPTIONS: tuple[str, ...] = ()  # The keywords of `configure`.
    SOURCE: sources.Source
    DESCRIPTION: str
    HOMEPAGE: str | None = None
    CITATION: str | None = None

    def __init__(self, *, file_format=None, **kwargs):
        # The default of tfds needs TensorFlow to write.
        super().__init__(file_format=file_format or "array_record", **kwargs)

    @classmethod
    def configure(cls) -> Any:
        """The config of tfds for these options of a corpus; None if it has none."""
        return None

    @property
    def level(self) -> str:
        """What the text is cut into."""
        return self.LEVEL

    def load_texts(self, source_dir) -> tuple[bytes | memoryview, ...]:
        """The bytes of train, valid and test, checked."""
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

    def _split_generators(self, dl_manager):
        try:
            source_dir = dl_manager.manual_dir
        except AssertionError:  # The folder is missing or empty.
            source_dir = None
        texts = dict(zip(SPLITS, self.load_texts(source_dir), strict=True))
        self.info.metadata["sha256"] = {
            split: hashlib.sha256(text).hexdigest() for split, text in texts.items()
        }
        return {split: self._generate_examples(text) for split, text in texts.items()}

    def _generate_examples(self, text):
        data = np.frombuffer(text, np.uint8)
        for i, start in enumerate(range(0, len(data), _RECORD_BYTES)):
            yield i, {"text": data[start : start + _RECORD_BYTES]}


def is_prepared(make_builder) -> bool:
    """Whether the folder of a builder has its prepared data; nothing is written to it."""
    try:
        return make_builder().data_path.exists()
    except Exception:  # A damaged dataset_info.json fails in many ways.
        return False


def prepare(make_builder, source_dir=None) -> TextBuilder:
    """Returns the builder with its data prepared; several processes may do so at once."""
    try:
        builder = make_builder()
    except (errors.UsageError, PermissionError):
        raise
    except Exception as error:  # A damaged dataset_info.json fails in many ways.
        folder = getattr(make_builder, "keywords", {}).get("data_dir", "the cache")
        raise errors.UsageError(
            f"what was prepared of this corpus in {folder} is damaged "
            f"({' '.join(str(error).split())[:200]}); delete its folder there and start again"
        ) from None
    if not builder.data_path.exists():
        _remove_leftovers(builder.data_path.parent)
        if not sys.stderr.isatty():
            tfds.disable_progress_bar()
        config = tfds.download.DownloadConfig(manual_dir=source_dir)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # Standard output is for results.
                builder.download_and_prepare(download_config=config)
        except errors.UsageError:
            raise
        except Exception as error:  # A full disk comes as whatever the library that met it raises.
            # If another process was faster, its data is used.
            if not builder.data_path.exists():
                reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                raise errors.UsageError(
                    f"this corpus could not be prepared in {builder.data_path} ({reason}); make "
                    f"room there or mend what is wrong, or set data.data_dir to another folder"
                ) from error
            builder = make_builder()
    return builder


def read(builder: TextBuilder, split: str) -> np.ndarray:
    """The bytes of a prepared split."""
    try:
        source = builder.as_data_source(split)
        records = source.__getitems__(list(range(len(source))))
        text = np.concatenate([record["text"] for record in records])
        if hashlib.sha256(text.data).hexdigest() == builder.info.metadata["sha256"][split]:
            return text
    except (OSError, ValueError, KeyError, IndexError, RuntimeError):
        pass  # Reading damaged records fails in many ways.
    raise errors.UsageError(
        f"the prepared {split} text in {builder.data_path} is damaged; delete that folder and "
        "start again"
    )


def _remove_leftovers(folder: epath.Path) -> None:
    """Deletes the files of preparations that were killed long ago."""
    if folder.exists():
        for path in folder.glob("incomplete.*"):
            if time.time() - path.stat().mtime > _LEFTOVER_SECONDS:
                path.rmtree(missing_ok=True)

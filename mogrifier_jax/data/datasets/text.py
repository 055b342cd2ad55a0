"""The user's own text: three files, or one file that is divided at line breaks."""

import dataclasses
import errno
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import tensorflow_datasets as tfds

from mogrifier_jax import errors
from mogrifier_jax.data import vocabularies
from mogrifier_jax.data.datasets import base


@dataclasses.dataclass(frozen=True)
class Options:
    """The files, which are `path` or `train`, `valid` and `test`, and how they are read."""

    path: str | None = None
    train: str | None = None
    valid: str | None = None
    test: str | None = None
    fractions: tuple[float, ...] = (0.9, 0.05, 0.05)
    level: str = "character"
    encoding: str = "utf-8"

    def __post_init__(self):
        vocabularies.check_level(self.level)
        three = (self.train, self.valid, self.test)
        if (all(three) and not self.path) or (self.path and not any(three)):
            return
        raise errors.UsageError(
            f"text files path={self.path!r}, train={self.train!r}, valid={self.valid!r}, "
            f"test={self.test!r}: give either path alone or all of train, valid and test"
        )


@dataclasses.dataclass
class TextConfig(tfds.core.BuilderConfig):
    """The options, under a name that changes with them and with the files."""

    options: Options | None = None


class Text(base.TextBuilder):
    """Local files; stored as UTF-8, or unchanged at level "byte"."""

    DESCRIPTION = "A text from local files."
    OPTIONS = tuple(field.name for field in dataclasses.fields(Options))

    @classmethod
    def configure(cls, **options: Any) -> TextConfig:
        """The config for these fields of `Options`."""
        if "fractions" in options:
            options["fractions"] = tuple(options["fractions"])
        return make_config(Options(**options))

    @property
    def level(self) -> str:
        """The level in the options."""
        return self.builder_config.options.level

    def load_texts(self, source_dir: str | os.PathLike | None) -> tuple[bytes, ...]:
        """Reads the files that the options name, wherever `source_dir` is."""
        return load_texts(self.builder_config.options)


def make_config(options: Options) -> TextConfig:
    """The config for these options, named after the content of the files."""
    digest = hashlib.sha256(repr((options.fractions, options.level, options.encoding)).encode())
    for path in _paths(options):
        digest.update(hashlib.sha256(_read_bytes(path)).digest())
    stem = "".join(c if c.isalnum() else "_" for c in pathlib.Path(_paths(options)[0]).stem)
    return TextConfig(name=f"{stem or 'text'}_{digest.hexdigest()[:16]}", options=options)


def load_texts(options: Options) -> tuple[bytes, ...]:
    """The bytes of train, valid and test."""
    texts = [_read(path, options) for path in _paths(options)]
    if options.path:
        texts = cut(texts[0], options.fractions, options.path)
    byte_level = options.level == "byte"
    return tuple(text.encode("cp437" if byte_level else "utf-8") for text in texts)


def cut(text: str, fractions: Sequence[float], name: str) -> list[str]:
    """Divides a text by its number of lines; the last part gets the remaining lines."""
    fractions = tuple(fractions)
    if len(fractions) != 3 or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise errors.UsageError(f"fractions {fractions} must be three above 0 with the sum 1")
    lines = text.splitlines(keepends=True)
    first = round(len(lines) * fractions[0])
    second = round(len(lines) * (fractions[0] + fractions[1]))
    parts = lines[:first], lines[first:second], lines[second:]
    if not all(parts):
        raise errors.UsageError(
            f"{name} has {len(lines)} lines, too few to cut by {fractions}: "
            "each part needs a line; give a longer text or three files"
        )
    return ["".join(part) for part in parts]


def _paths(options: Options) -> list[str]:
    return [p for p in (options.path, options.train, options.valid, options.test) if p]


def _read_bytes(path: str) -> bytes:
    try:
        file = pathlib.Path(os.path.expanduser(path))
        if file.exists() and not file.is_file():  # Reading a device may never end.
            raise IsADirectoryError(errno.EISDIR, "it is not a file")
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.UsageError(
            f"text file {path} cannot be read ({reason}); give the path of a text file"
        ) from error
    if not content:
        raise errors.UsageError(f"text file {path} is empty; give a file with text")
    return content


def _read(path: str, options: Options) -> str:
    content = _read_bytes(path)
    encoding = "cp437" if options.level == "byte" else options.encoding
    try:
        return content.decode(encoding)
    except LookupError as error:
        raise errors.UsageError(
            f"encoding {encoding!r} is unknown; use one that Python knows, such as utf-8"
        ) from error
    except UnicodeDecodeError as error:
        raise errors.UsageError(
            f"text file {path} is not {encoding}: {error.reason} at byte {error.start}; set "
            "encoding to the right one, or level to byte"
        ) from error
    except ValueError as error:  # Of codecs that do not encode texts, such as base64.
        raise errors.UsageError(
            f"encoding {encoding!r} cannot read {path} ({error}); use another, such as utf-8"
        ) from error

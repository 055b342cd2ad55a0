"""text8: 100,000,000 letters and spaces of cleaned English Wikipedia text."""

import itertools
import os

from mogrifier_jax import errors
from mogrifier_jax.data.datasets import base, enwik8, sources

_VALID, _TEST = 90_000_000, 95_000_000  # Where these splits begin, in bytes.
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz "
# The text is a single line, but stripes begin at lines. An end of line after so many bytes is one
# token in a hundred thousand, which changes a score by less than 0.0002 bits.
_LINE = 100_000


class Text8(base.TextBuilder):
    """29 types; 90,000,900 / 5,000,050 / 5,000,050 tokens with the ends of lines."""

    LEVEL = "byte"  # Which are characters here.
    DESCRIPTION = (
        "The first 10^8 bytes of cleaned English Wikipedia text of 2006: a to z and space."
    )
    HOMEPAGE = enwik8.Enwik8.HOMEPAGE
    CITATION = enwik8.Enwik8.CITATION
    SOURCE = sources.Source(
        name="text8",
        files=(sources.File("text8", 100_000_000),),  # Its checksum is not known to us.
        folders=("text8",),
        archives=("text8.zip",),
        urls=("http://mattmahoney.net/dc/text8.zip", "https://mattmahoney.net/dc/text8.zip"),
    )

    def load_texts(self, source_dir: str | os.PathLike | None) -> tuple[bytes, ...]:
        """Divides the file into its three splits, and these into lines."""
        (content,) = sources.load(self.SOURCE, source_dir)
        check_alphabet(content)
        bounds = (0, _VALID, _TEST, len(content))
        return tuple(cut_lines(content[a:b]) for a, b in itertools.pairwise(bounds))


def check_alphabet(content: bytes) -> None:
    """Refuses a text with anything but small letters and spaces."""
    if others := content.translate(None, _ALPHABET):
        position = content.index(others[:1])
        raise errors.UsageError(
            f"text8 has {others[:1]!r} at byte {position:,}, and must have only a to z and spaces; "
            "fetch it again"
        )


def cut_lines(text: bytes) -> bytes:
    """The text with an end of line after each `_LINE` bytes, and at its end."""
    return b"".join(text[i : i + _LINE] + b"\n" for i in range(0, len(text), _LINE))

"""enwik8: the first 100,000,000 bytes of an English Wikipedia dump."""

import os

from mogrifier_jax.data.datasets import base, sources

_VALID, _TEST = 90_000_000, 95_000_000  # Where these splits begin, in bytes.


class Enwik8(base.TextBuilder):
    """206 types; 90,000,001 / 5,000,001 / 5,000,001 tokens with the ends of lines.

    The splits begin and end inside lines, so each has one end of line more than the file.
    """

    LEVEL = "byte"
    DESCRIPTION = "The first 10^8 bytes of the English Wikipedia dump of 2006: XML, UTF-8, GFDL."
    HOMEPAGE = "http://mattmahoney.net/dc/textdata.html"
    CITATION = """\
@misc{mahoney2006large,
  title={Large Text Compression Benchmark},
  author={Mahoney, Matt},
  year={2006},
  url={http://mattmahoney.net/dc/text.html}
}
"""
    SOURCE = sources.Source(
        name="enwik8",
        files=(
            sources.File(
                "enwik8",
                100_000_000,
                "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
            ),
        ),
        folders=("enwik8",),
        archives=("enwik8.zip",),
        urls=(
            "http://mattmahoney.net/dc/enwik8.zip",
            "https://mattmahoney.net/dc/enwik8.zip",
            "https://data.deepai.org/enwik8.zip",
        ),
    )

    def load_texts(self, source_dir: str | os.PathLike | None) -> tuple[memoryview, ...]:
        """Divides the file into its three splits."""
        (content,) = super().load_texts(source_dir)
        view = memoryview(content)  # Slices without copies.
        return view[:_VALID], view[_VALID:_TEST], view[_TEST:]

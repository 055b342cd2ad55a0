"""Multilingual Wikipedia Corpus, the single text, large setting."""

import os

import tensorflow_datasets as tfds

from mogrifier_jax import errors
from mogrifier_jax.data.datasets import base, sources

LANGUAGES = ("en", "fi")


def make_source(language: str) -> sources.Source:
    """The files of one language, whose checksums are not known."""
    folder = f"wiki_{language}"
    return sources.Source(
        name=f"mwc ({language})",
        files=tuple(
            sources.File(f"{folder}/ptb_format_large/{folder}.{part}.raw.unk")
            for part in ("tr", "va", "te")
        ),
        folders=("mwc",),
        archives=("P17-1137.Datasets.zip", "mwc.zip", "mwc.tar.gz", "mwc.tgz"),
        urls=("https://aclanthology.org/attachments/P17-1137.Datasets.zip",),
    )


class Mwc(base.TextBuilder):
    """Articles in English or Finnish, read as characters; rare ones are marked in the files."""

    BUILDER_CONFIGS = [  # noqa: RUF012 (the name and type are tfds's)
        tfds.core.BuilderConfig(name=language, description=f"The articles in {language!r}.")
        for language in LANGUAGES
    ]
    LEVEL = "character"
    OPTIONS = ("language",)
    DESCRIPTION = "Wikipedia articles, 600 / 60 / 60 in each language. UTF-8, read as characters."
    HOMEPAGE = "http://k-kawakami.com/research/mwc"
    CITATION = """\
@inproceedings{kawakami2017learning,
  title={Learning to Create and Reuse Words in Open-Vocabulary Neural Language Modeling},
  author={Kawakami, Kazuya and Dyer, Chris and Blunsom, Phil},
  booktitle={Association for Computational Linguistics},
  year={2017}
}
"""

    @classmethod
    def configure(cls, language: str = "en") -> str:
        """The name of the config, which is the language."""
        if language not in LANGUAGES:
            raise errors.UsageError(
                f"language {language!r} is unknown; use one of {', '.join(LANGUAGES)}"
            )
        return language

    def load_texts(self, source_dir: str | os.PathLike | None) -> tuple[bytes, ...]:
        """Reads the files of the configured language."""
        return sources.load(make_source(self.builder_config.name), source_dir)

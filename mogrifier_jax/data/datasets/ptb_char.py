"""Penn Treebank at character level, as preprocessed by Mikolov et al."""

from mogrifier_jax.data.datasets import base, ptb, sources


class PtbChar(base.TextBuilder):
    """51 types; 5,017,483 / 393,043 / 442,424 tokens with the ends of lines.

    The characters are separated by spaces and `_` stands for a space, so the files are read as
    words. Each ends in a line that holds one space, which counts as an empty line.
    """

    UNIT = "character"  # Which are separated by spaces.
    DESCRIPTION = "The words of ptb spelt out: characters separated by spaces, _ for a space."
    CITATION = ptb.CITATION
    SOURCE = sources.Source(
        name="ptb_char",
        files=(
            sources.File(
                "ptb.char.train.txt",
                10_034_964,
                "e313d91425e06c4f0a8fb6e881dcce0c291f2a0e9f4dda54833069b122f91da9",
            ),
            sources.File(
                "ptb.char.valid.txt",
                786_084,
                "21661f63ec355085879458b6524644d4add5573541b4be14fb52ab2e2e995eb8",
            ),
            sources.File(
                "ptb.char.test.txt",
                884_846,
                "1ef5607ac3c463b16e38bfe7900dd3bfc91de5a96e0f21e7eab5188b465b8ebe",
            ),
        ),
        folders=("ptb_char", *ptb.ARCHIVE_FOLDERS),
        archives=ptb.ARCHIVES,
        urls=ptb.ARCHIVE_URLS,
    )

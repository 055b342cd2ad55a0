"""WikiText-2 at word level."""

from mogrifier_jax.data.datasets import base, sources


class Wikitext2(base.TextBuilder):
    """33,279 types; 2,088,628 / 217,646 / 245,569 tokens with the ends of lines."""

    DESCRIPTION = "Good and featured articles of Wikipedia, words separated by spaces. CC BY-SA."
    HOMEPAGE = "https://arxiv.org/abs/1609.07843"
    CITATION = """\
@inproceedings{merity2017pointer,
  title={Pointer Sentinel Mixture Models},
  author={Merity, Stephen and Xiong, Caiming and Bradbury, James and Socher, Richard},
  booktitle={International Conference on Learning Representations},
  year={2017}
}
"""
    SOURCE = sources.Source(
        name="wikitext2",
        files=(
            sources.File(
                "wiki.train.tokens",
                10_797_148,
                "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            ),
            sources.File(
                "wiki.valid.tokens",
                1_121_681,
                "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            ),
            sources.File(
                "wiki.test.tokens",
                1_256_449,
                "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            ),
        ),
        folders=("wikitext-2", "wikitext2"),
        archives=("wikitext-2-v1.zip",),
        urls=(
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
        ),
    )

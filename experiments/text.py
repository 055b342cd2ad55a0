r"""Your own text: a small model on any local files.

    python -m mogrifier_jax.main --config=experiments/text.py --config.data.path=book.txt

`data.path` names one file, cut by its lines as `data.fractions` says; or give all of
`data.train`, `data.valid` and `data.test`. `data.level` is character, word or byte.

Variants: `mogrifier` (default) or `lstm`; `tiny` is a smoke run.
"""

import pathlib

from mogrifier_jax import configs

PYDOC = configs.load_file(pathlib.Path(__file__).with_name("pydoc.py"))
TEXT = dict(
    data=dict(name="text", fractions=(0.9, 0.05, 0.05), level="character", encoding="utf-8")
)


def get_config(variant=""):
    sizes = {"": {}, "tiny": configs.TINY}
    return configs.base(configs.build(variant, PYDOC.COMMON, PYDOC.CELLS, sizes), TEXT)

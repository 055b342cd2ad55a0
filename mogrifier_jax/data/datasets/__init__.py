"""TFDS builders, one file per corpus; importing this package registers them.

    import mogrifier_jax.data.datasets
    tfds.data_source("ptb", split="train", data_dir=...)

No builder needs TensorFlow. `corpora.py` encodes the texts that they store.
"""

from mogrifier_jax.data.datasets import enwik8, mwc, ptb, ptb_char, text, text8, wikitext2

BUILDERS = {
    "ptb": ptb.Ptb,
    "ptb_char": ptb_char.PtbChar,
    "wikitext2": wikitext2.Wikitext2,
    "enwik8": enwik8.Enwik8,
    "text8": text8.Text8,
    "mwc": mwc.Mwc,
    "text": text.Text,
}

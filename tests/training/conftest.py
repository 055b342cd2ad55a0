"""A small model with a short text, for the tests of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mogrifier_jax.data import corpora, tasks, vocabularies
from mogrifier_jax.nn import models

TEXT = "".join("abcdefg"[(i * i + i // 5) % 7] + "\n" * (i % 4 == 0) for i in range(150))


class Small:
    """A model with a task on a text of a few lines."""

    def __init__(self, patch):
        vocab = vocabularies.Vocabulary.from_text(TEXT, "character")
        split = vocab.encode_split(TEXT)
        self.tokens, self.eos = split.tokens, vocab.eos_id
        corpus = corpora.Corpus("text", "character", vocab, split, split, split)
        patch.setattr(corpora, "load_corpus", lambda name, **options: corpus)
        key = jax.random.key(0)
        self.task = tasks.make_task(key, None, name="text", batch_size=4, window=6)
        self.model = models.make_model(len(vocab), hidden_size=6, num_layers=1, rounds=0)
        params = jax.jit(self.model.init)(key, **self.model.example())["params"]
        # Sharpened, so that temperatures matter.
        self.params = jax.tree.map(lambda p: 3 * p, params)
        self.nats = jax.jit(
            lambda *args: self.model.apply({"params": self.params}, *args, method="nats")
        )

    def direct(self):
        """The nats of the whole text as one window."""
        inputs = np.concatenate([[self.eos], self.tokens[:-1]])
        tokens = (jnp.asarray(a[None], jnp.int32) for a in (inputs, self.tokens))
        return np.asarray(self.nats(*tokens)[1][0], np.float64)


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        yield Small(patch)

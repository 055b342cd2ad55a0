"""Text from a trained model, many samples at once, as it is drawn.

Axes: B samples, V vocabulary. One compiled program makes a few steps in each dispatch. A step
draws a token and reads it; while a prompt lasts, its tokens are read instead of those drawn, so
that the program is the same for every prompt. `trained.py` has the same for Python.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mogrifier_jax import configs, errors
from mogrifier_jax.configs import SEED, Key
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import pretrained
from mogrifier_jax.nn import models

CHUNK = 16  # Steps of one dispatch.


class Sampling(NamedTuple):
    """How text is drawn: the options of `--mode=sample` and `TrainedModel.generate`.

    The temperature divides the logits, so that values below 1 sharpen. It is a traced number;
    what restricts the tokens is compiled.
    """

    length: int = 300  # Tokens to draw.
    temperature: float = 1.0
    top_k: int | None = None  # Only the likeliest tokens, so many.
    top_p: float | None = None  # Only the likeliest tokens that together have this probability.
    min_p: float | None = None  # Only tokens with this share of the likeliest one's probability.
    num_samples: int = 1
    seed: int = 0

    def check(self) -> None:
        """Refuses what cannot be drawn, before anything is loaded or compiled."""
        configs.check_values(self._asdict(), LIMITS)

    def restrict(self, logits: jax.Array) -> jax.Array:
        """Leaves the tokens that may be drawn; these logits are divided by the temperature."""
        logits = restrict(logits, self.top_k, self.top_p)
        if self.min_p is not None:
            least = logits.max(-1, keepdims=True) + math.log(self.min_p)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return logits


DEFAULTS = Sampling()
# Below these, a temperature makes logits infinite, and a probability leaves no token.
LIMITS = {
    "length": Key(int, required=True, low=1, high=10**7),
    "temperature": Key(float, required=True, low=1e-4, high=1e4),
    "top_k": Key(int, low=1, high=10**9),
    "top_p": Key(float, low=1e-6, high=1.0),
    "min_p": Key(float, low=1e-6, high=1.0),
    "num_samples": Key(int, required=True, low=1, high=10**5),
    "seed": SEED._replace(required=True),
}


class Sampler:
    """Draws from one model; compiles for a number of samples, whatever prompt and length."""

    def __init__(self, model: Any, params: Any, vocab: corpora.Vocabulary):
        if isinstance(model, models.EncoderDecoder):
            raise errors.UsageError(
                "this run copies sequences; only language models can be sampled from"
            )
        self.vocabulary, self._model, self._params = vocab, model, params
        advance = functools.partial(_advance, model)
        self._advance = jax.jit(advance, static_argnames="sampling")

    def draw(
        self, sampling: Sampling = DEFAULTS, prompt: str | None = None
    ) -> Iterator[np.ndarray]:
        """Ids drawn by each dispatch, [B, at most CHUNK], until there are as many as asked for.

        `prompt` is how the text begins; None draws from the beginning of a line.
        """
        sampling.check()
        ids = np.append(self.vocabulary.eos_id, encode_prompt(self.vocabulary, prompt))
        return self._draw(ids, sampling)

    def _draw(self, ids, sampling):
        total, num_samples = len(ids) + sampling.length, sampling.num_samples
        forced = np.full(total + CHUNK, -1, np.int32)
        forced[: len(ids)] = ids
        variables, key = {"params": self._params}, jax.random.key(sampling.seed)
        carry = initial_carry(self._model, self._params, num_samples)
        # Only what restricts the tokens is compiled.
        fixed = DEFAULTS._replace(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        logits = place(jnp.zeros((num_samples, len(self.vocabulary))), self._params)
        for first in range(0, total, CHUNK):
            tokens, logits, carry = self._advance(
                variables,
                logits,
                carry,
                jax.random.fold_in(key, first),
                forced[first : first + CHUNK],
                jnp.float32(sampling.temperature),
                sampling=fixed,
            )
            drawn = np.asarray(tokens)[:, max(0, len(ids) - first) : total - first]
            if drawn.size:
                yield drawn


def initial_carry(model: Any, params: Any, batch_size: int) -> Any:
    """What a text starts from."""
    return place(model.apply({"params": params}, batch_size, method="initial_carry"), params)


def place(tree: Any, params: Any) -> Any:
    """Puts arrays where the parameters are, as results will be: or else jit compiles twice."""
    return jax.device_put(tree, jax.tree.leaves(params)[0].sharding)


def _advance(model, variables, logits, carry, key, forced, temperature, *, sampling):
    """CHUNK steps: the tokens [B, CHUNK], and the logits and carry after them."""

    def body(state, step):
        logits, carry = state
        key, forced = step
        drawn = jax.random.categorical(key, sampling.restrict(logits / temperature))
        tokens = jnp.where(forced < 0, drawn, forced)
        logits, carry = model.apply(variables, tokens[:, None], carry, method="logits")
        return (logits[:, 0].astype(jnp.float32), carry), tokens

    keys = jax.random.split(key, len(forced))
    (logits, carry), tokens = jax.lax.scan(body, (logits, carry), (keys, forced))
    return tokens.T, logits, carry


def restrict(logits: jax.Array, top_k: int | None, top_p: float | None) -> jax.Array:
    """Leaves the k likeliest tokens, or the likeliest that together have probability p."""
    if top_k is not None:
        kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
        kept = jnp.where(before < top_p, ordered, jnp.inf)  # The likeliest always stays.
        logits = jnp.where(logits < kept.min(-1, keepdims=True), -jnp.inf, logits)
    return logits


def encode_prompt(vocab: corpora.Vocabulary, prompt: str | None) -> np.ndarray:
    """The ids of a prompt; one that is empty, or has what the vocabulary lacks, is refused."""
    if prompt is None:
        return np.zeros(0, np.int32)
    ids = vocab.encode(prompt)
    if not len(ids):
        raise errors.UsageError(
            f"the prompt {prompt!r} is empty; leave it out to start from the beginning of a line"
        )
    unknown = vocab.find_unknown(prompt)
    if unknown:
        shown = ", ".join(map(repr, unknown[:10])) + (", ..." if len(unknown) > 10 else "")
        raise errors.UsageError(
            f"the prompt has {shown}, which the training text did not have; write it without"
        )
    return ids.astype(np.int32)


def run(workdir: str, sampling: Sampling = DEFAULTS, prompt: str | None = None) -> None:
    """`--mode=sample`: one sample streams to the terminal, several follow each other."""
    if not workdir:
        raise errors.UsageError("--workdir is missing; give that of a trained run")
    sampling.check()
    trained = pretrained.load_weights(workdir)
    vocab = trained.vocabulary
    drawn = Sampler(trained.model, trained.params, vocab).draw(sampling, prompt)
    begin = encode_prompt(vocab, prompt)
    if sampling.num_samples == 1:
        show(vocab, begin, drawn)
        return
    for index, ids in enumerate(np.concatenate(list(drawn), axis=1)):
        print(f"--- sample {index + 1}")
        show(vocab, begin, iter([ids[None]]))


def show(vocab: corpora.Vocabulary, begin: np.ndarray, drawn: Iterator[np.ndarray]) -> None:
    """Prints the first sample as it comes, with the prompt before it."""
    for piece in pieces(vocab, begin, drawn):
        print(piece, end="", flush=True)
    print()


def pieces(
    vocab: corpora.Vocabulary, begin: np.ndarray, drawn: Iterator[np.ndarray]
) -> Iterator[str]:
    """The text of the first sample, as far as each dispatch brings it."""
    # The line that is not complete is decoded anew each time: words need the spaces between
    # them, and bytes may end in mid-character.
    line, shown = begin, 0
    for more in drawn:
        line = np.concatenate([line, more[0]])
        text = vocab.decode(line).rstrip("\ufffd")
        yield text[shown:]
        ends = np.flatnonzero(line == vocab.eos_id)
        if len(ends):
            line = line[ends[-1] + 1 :]
        shown = len(vocab.decode(line).rstrip("\ufffd"))

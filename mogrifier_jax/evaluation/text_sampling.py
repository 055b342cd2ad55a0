"""Samples text: the options, such as temperature and top_p, and the program that draws tokens.

Axes: B samples, V vocabulary. A dispatch takes CHUNK steps, each of which draws a token and reads
it. As long as the prompt lasts, a step reads the token of the prompt instead, so the same program
serves every prompt.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mogrifier_jax import errors, options
from mogrifier_jax.data import vocabularies
from mogrifier_jax.evaluation import scored_texts
from mogrifier_jax.nn import cells, models, stack
from mogrifier_jax.options import Option

CHUNK = 16  # Steps of one dispatch.
LIMITS = {
    "length": Option(int, required=True, low=1, high=10**7),
    # A lower temperature would make logits infinite, and a lower probability would leave no token.
    "temperature": Option(float, required=True, low=1e-4, high=1e4),
    "top_k": Option(int, low=1, high=10**9),
    "top_p": Option(float, low=1e-6, high=1.0),
    "min_p": Option(float, low=1e-6, high=1.0),
    "num_samples": Option(int, required=True, low=1, high=10**5),
    "seed": options.SEED._replace(required=True),
}


class Sampling(NamedTuple):
    """The options of `--mode=sample` and of `TrainedModel.generate`.

    The temperature divides the logits, so values below 1 sharpen the distribution.
    """

    length: int = 300  # Tokens to draw.
    temperature: float = 1.0
    top_k: int | None = None  # Keep only this many of the likeliest tokens.
    top_p: float | None = None  # Keep the likeliest tokens that together have this probability.
    min_p: float | None = None  # Keep tokens at least min_p times as probable as the likeliest.
    num_samples: int = 1
    seed: int = 0

    def check(self) -> None:
        """Refuses impossible options before anything is loaded or compiled."""
        options.check_values(self._asdict(), LIMITS)

    def compiled(self) -> "Sampling":
        """Only the options that are compiled, so that others do not compile the program again."""
        return Sampling(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def restrict(self, logits: jax.Array) -> jax.Array:
        """Sets the logits of tokens that may not be drawn to -inf.

        Args:
          logits: [B, V], already divided by the temperature.
        """
        if self.top_k is not None:
            kth = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][..., -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
            kept = jnp.where(before < self.top_p, ordered, jnp.inf)  # The likeliest is always kept.
            logits = jnp.where(logits < kept.min(-1, keepdims=True), -jnp.inf, logits)
        if self.min_p is not None:
            least = logits.max(-1, keepdims=True) + math.log(self.min_p)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return logits


class Drawn(NamedTuple):
    """The tokens of one dispatch, and the logits from which the next one starts."""

    tokens: jax.Array  # [B, CHUNK] int32.
    finite: jax.Array  # [] bool: whether every distribution had a finite largest logit.
    logits: jax.Array  # [B, V], after the last token.


def draw_chunk(
    model: models.LanguageModel,
    variables: Mapping[str, cells.Params],
    logits: jax.Array,
    carry: stack.Carries,
    key: jax.Array,
    forced: jax.Array,
    temperature: jax.Array,
    *,
    sampling: Sampling,
) -> tuple[stack.Carries, Drawn]:
    """Draws or reads the next CHUNK tokens of every sample; also returns the carry.

    Args:
      forced: [CHUNK] the tokens of the prompt; negative where a token is to be drawn.
    """

    def body(state: tuple[Any, Any], step: tuple[jax.Array, jax.Array]) -> Any:
        logits, carry = state
        key, forced = step
        drawn = jax.random.categorical(key, sampling.restrict(logits / temperature))
        tokens = jnp.where(forced < 0, drawn, forced)
        outputs: Any  # Flax annotates the second result of `apply` as variables.
        carry, outputs = model.apply(variables, tokens[:, None], carry, method="logits")
        logits = outputs[:, 0].astype(jnp.float32)
        # Logits that are not finite are reported, because `categorical` silently draws from NaNs.
        return (logits, carry), (tokens, jnp.isfinite(logits.max(-1)).all())

    keys = jax.random.split(key, len(forced))
    (logits, carry), (tokens, finite) = jax.lax.scan(body, (logits, carry), (keys, forced))
    return carry, Drawn(tokens.T, finite.all(), logits)


def encode_prompt(vocab: vocabularies.Vocabulary, prompt: str | None) -> np.ndarray:
    """The ids of a prompt; refuses one that is empty or has unknown tokens."""
    if prompt is None:
        return np.zeros(0, np.int32)
    ids = vocab.encode(prompt)
    if not len(ids):
        raise errors.UsageError(
            f"the prompt {prompt!r} is empty; leave it out to start from the beginning of a line"
        )
    unknown = vocab.find_unknown(prompt)
    if unknown:
        raise errors.UsageError(
            f"the prompt has {scored_texts.list_some(unknown)}, which the training text did not "
            "have; remove or replace it"
        )
    return ids.astype(np.int32)


def decode_pieces(
    vocab: vocabularies.Vocabulary, prompt_ids: np.ndarray, drawn: Iterable[np.ndarray]
) -> Iterator[str]:
    """The text of the first sample, in the pieces that each dispatch adds.

    Args:
      drawn: ids [B, at most CHUNK] of each dispatch.
    """
    # The unfinished line is decoded again each time, because words need the spaces between them
    # and bytes may end in the middle of a character.
    line, shown = prompt_ids, 0
    for ids in drawn:
        line = np.concatenate([line, ids[0]])
        text = vocab.decode(line).rstrip("\ufffd")
        yield text[shown:]
        ends = np.flatnonzero(line == vocab.eos_id)
        if len(ends):
            line = line[ends[-1] + 1 :]
        shown = len(vocab.decode(line).rstrip("\ufffd"))

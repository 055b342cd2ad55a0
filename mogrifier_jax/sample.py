"""Text from a trained model, many samples at once, as it is drawn.

Axes: B samples, T time, V vocabulary. One compiled program reads the prompt, another draws a
few tokens in each dispatch, so that text can be shown while it is made.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mogrifier_jax import errors, models, pretrained, vocabulary

CHUNK = 16  # Tokens of one dispatch.


def generate(
    model: Any,
    params: Any,
    vocab: vocabulary.Vocabulary,
    *,
    prompt: str = "",
    length: int = 300,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_samples: int = 1,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Yields the ids drawn by each dispatch, [B, at most CHUNK], until `length` are drawn."""
    check(vocab, model, prompt, length, temperature, top_k, top_p, num_samples)
    ids = np.concatenate([[vocab.eos_id], vocab.encode(prompt)]).astype(np.int32)
    inputs = jnp.asarray(np.broadcast_to(ids, (num_samples, len(ids))))
    logits, carry = jax.jit(functools.partial(model.apply, method="logits"))(
        {"params": params}, inputs
    )
    draw = jax.jit(functools.partial(_draw, model, top_k=top_k, top_p=top_p))
    key = jax.random.key(seed)
    last = logits[:, -1]
    for first in range(0, length, CHUNK):
        tokens, last, carry = draw(params, last, carry, jax.random.fold_in(key, first), temperature)
        yield np.asarray(tokens)[:, : length - first]


def _draw(model, params, logits, carry, key, temperature, *, top_k, top_p):
    """CHUNK tokens of each sample, and what comes after them."""

    def body(state, key):
        logits, carry = state
        tokens = jax.random.categorical(key, restrict(logits / temperature, top_k, top_p))
        logits, carry = model.apply({"params": params}, tokens[:, None], carry, method="logits")
        return (logits[:, 0], carry), tokens

    keys = jax.random.split(key, CHUNK)
    (logits, carry), tokens = jax.lax.scan(body, (logits, carry), keys)
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


def check(vocab, model, prompt, length, temperature, top_k, top_p, num_samples) -> None:
    """Refuses what cannot be sampled, before anything is compiled."""
    rules = (
        (length >= 1, f"length {length} must be at least 1 token"),
        (temperature > 0, f"temperature {temperature} must be above 0; try 0.7"),
        (top_k is None or top_k >= 1, f"top_k {top_k} must be at least 1, or left out"),
        (top_p is None or 0 < top_p <= 1, f"top_p {top_p} must be in (0, 1], or left out"),
        (num_samples >= 1, f"num_samples {num_samples} must be at least 1"),
        (
            not isinstance(model, models.EncoderDecoder),
            "this run copies sequences; only language models can be sampled from",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise errors.UsageError(message)
    unknown = vocab.find_unknown(prompt)
    if unknown:
        shown = ", ".join(repr(token) for token in unknown[:10])
        raise errors.UsageError(
            f"the prompt has {shown}, which the training text did not have; write it without"
        )


def run(workdir: str, *, prompt: str, **options: Any) -> None:
    """`--mode=sample`: text that goes on from a prompt."""
    if not workdir:
        raise errors.UsageError("--workdir is missing; give that of a trained run")
    if prompt == "":
        raise errors.UsageError(
            "--prompt is empty; give the beginning of a text, such as --prompt='The '"
        )
    show(workdir, prompt=prompt, **options)


def show(workdir: str, *, prompt: str = "", num_samples: int = 1, **options: Any) -> None:
    """One sample streams to the terminal, several follow each other."""
    trained = pretrained.load_weights(workdir)
    vocab = trained.vocabulary
    drawn = generate(
        trained.model,
        trained.params,
        vocab,
        prompt=prompt,
        num_samples=num_samples,
        **options,
    )
    if num_samples == 1:
        stream(vocab, prompt, drawn)
        return
    for index, ids in enumerate(np.concatenate(list(drawn), axis=1)):
        print(f"--- sample {index + 1}")
        stream(vocab, prompt, iter([ids[None]]))


def stream(vocab: vocabulary.Vocabulary, prompt: str, drawn: Iterator[np.ndarray]) -> None:
    """Prints the first sample as it comes, with the prompt before it."""
    ids, shown = vocab.encode(prompt), 0
    for more in drawn:
        ids = np.concatenate([ids, more[0]])
        # Decoded anew each time: words need the spaces between, bytes may end in mid-character.
        text = vocab.decode(ids).rstrip("\ufffd")
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()

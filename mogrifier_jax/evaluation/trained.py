"""A trained language model for Python: `mogrifier_jax.load(workdir)` scores, writes, shows gates.

Axes: N tokens of a text, D input features of a layer, H hidden features. Texts are read in
windows of a fixed size with the state carried on, so that each method compiles once for texts of
any length.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import pretrained, sample
from mogrifier_jax.nn import models
from mogrifier_jax.training import checkpoints, metrics

if TYPE_CHECKING:
    from mogrifier_jax.analysis import explore

WINDOW = 64  # Tokens of one dispatch.
LIMITS = {
    "logit_scale": configs.keys()["evaluation.softmax_temperature"],
    "top": configs.Key(int, required=True, low=1, high=10**9),
}


class Score(NamedTuple):
    """How well a text was predicted, token by token."""

    tokens: list[str]  # As the vocabulary writes them: "▼" is the end of a line.
    nats: np.ndarray  # [N] float32: -log p of each.
    unknown: list[str]  # What the vocabulary lacks; it is scored as "<UNK>".

    @property
    def nats_per_token(self) -> float:
        """The cross-entropy."""
        return metrics.Sum(self.nats, len(self.nats)).mean()

    @property
    def bits_per_token(self) -> float:
        """The same in bits: per character or byte, if those are the tokens."""
        return metrics.bits(self.nats_per_token)

    @property
    def perplexity(self) -> float:
        """The exponential of the cross-entropy."""
        return metrics.perplexity(self.nats_per_token)


class GateValues(NamedTuple):
    """What the gates did as a text was read."""

    tokens: list[str]  # As in Score.
    # For each layer: [N, H] by name, such as f, i, o, j, c of an LSTM; "rounds" is a list
    # of the Mogrifier's gates 2σ(.), [N, D] in odd rounds (which scale x), [N, H] in even ones.
    layers: list[dict[str, Any]]


class Predictions(NamedTuple):
    """What is expected before a text and after each of its tokens."""

    ids: np.ndarray  # [N + 1, K] int32: the likeliest tokens, the likeliest first.
    probabilities: np.ndarray  # [N + 1, K] float32.
    entropy_nats: np.ndarray  # [N + 1] float32: of the whole distribution.
    ranks: np.ndarray  # [N] int32: the place of each token of the text; 1 is the likeliest.


class TrainedModel:
    """What a run has learned, ready for use; made by `load`."""

    def __init__(self, loaded: pretrained.Pretrained):
        model = loaded.model
        if isinstance(model, models.EncoderDecoder):
            raise errors.UsageError(
                f"the run in {loaded.info['workdir']} copies sequences; give that of a language "
                "model"
            )
        self.config: config_dict.ConfigDict = loaded.config
        self.vocabulary: corpora.Vocabulary = loaded.vocabulary
        self.model: models.LanguageModel = model
        self.params: Any = loaded.params
        self.temperature: float = loaded.temperature or 1.0  # The logit scale of scores.
        self.info: dict[str, Any] = loaded.info
        self._loaded = loaded
        self._sampler = sample.Sampler(model, loaded.params, loaded.vocabulary)
        self._nats = jax.jit(functools.partial(model.apply, method="nats"))
        self._gates = jax.jit(functools.partial(model.apply, method="gates"))
        self._predict = jax.jit(functools.partial(_predict, model), static_argnames="top")

    def __repr__(self) -> str:
        about = f"{self.info['workdir']!r}, {self.info['which']}, step {self.info['step']:,}"
        return f"TrainedModel({about}, {self.model.num_layers} layers of {self.model.hidden_size})"

    def save(self, path: str | os.PathLike) -> None:
        """Writes the model to one safetensors file, which `load` reads; see `pretrained.py`."""
        pretrained.save_file(self._loaded._replace(params=self.params), path)

    def score(self, text: str | bytes, *, logit_scale: float | None = None) -> Score:
        """-log p of every token of a text, read from the beginning of a line.

        It equals `--mode=evaluate --eval.text` on a file with this text. Only what is there
        is scored: the end of the last line counts if the text ends in a newline.

        Args:
          logit_scale: multiplies the logits (the temperature of `generate` divides them); that
            of the checkpoint unless given.
        """
        if self.config.data.get("episodic"):
            raise errors.UsageError(
                f"the run in {self.info['workdir']} models lines that stand alone; a text can be "
                "scored only by a language model that carries its state"
            )
        if logit_scale is None:
            logit_scale = self.temperature
        configs.check_values({"logit_scale": logit_scale}, LIMITS)
        ids = self._encode(text)
        inputs = np.append(self.vocabulary.eos_id, ids[:-1])

        def run(carry, first):
            targets, length = _cut(ids, first)
            window, _ = _cut(inputs, first)
            lengths = np.array([length], np.int32)
            return self._nats(
                {"params": self.params}, window, targets, carry, lengths, None, logit_scale
            )

        nats = np.concatenate([np.asarray(part)[0] for part in self._windows(run, len(ids))])
        unknown = self.vocabulary.find_unknown(text)
        return Score(self._spell(ids), nats[: len(ids)].astype(np.float32), unknown)

    def generate(self, prompt: str | None = None, **options: Any) -> list[str]:
        """Texts that begin with the prompt and go on for `length` tokens, one for each sample.

        Args:
          prompt: None starts at the beginning of a line.
          options: `length`, `temperature` (it divides the logits: below 1 sharpens), `top_k`,
            `top_p`, `min_p`, `num_samples` and `seed`, as `sample.Sampling` has them.
        """
        unknown = options.keys() - set(sample.Sampling._fields)
        if unknown:
            known = ", ".join(sample.Sampling._fields)
            raise TypeError(f"generate has no option {', '.join(sorted(unknown))}; it has {known}")
        drawn = self._sampler.draw(sample.Sampling(**options), prompt)
        begin = sample.encode_prompt(self.vocabulary, prompt)
        rows = np.concatenate(list(drawn), axis=1)
        return [self.vocabulary.decode(np.concatenate([begin, ids])) for ids in rows]

    def gates(self, text: str | bytes) -> GateValues:
        """What every gate of every layer is as each token of a text is read."""
        ids = self._encode(text)
        inputs = np.append(self.vocabulary.eos_id, ids)

        def run(carry, first):
            return self._gates({"params": self.params}, _cut(inputs, first)[0], carry)

        parts = list(self._windows(run, len(inputs)))
        # [T, 1, ...] each; the first step has read the line end before the text.
        layers = jax.tree.map(lambda *arrays: np.concatenate(arrays)[1 : len(inputs), 0], *parts)
        return GateValues(self._spell(ids), layers)

    def predict(self, text: str | bytes, *, top: int = 10) -> Predictions:
        """The likeliest next tokens at every place of a text, at the temperature of scores."""
        configs.check_values({"top": top}, LIMITS)
        ids = self._encode(text)
        inputs, targets = np.append(self.vocabulary.eos_id, ids), np.append(ids, 0)

        def run(carry, first):
            window, expected = _cut(inputs, first)[0], _cut(targets, first)[0][0]
            return self._predict(
                self.params,
                window,
                expected,
                carry,
                self.temperature,
                top=min(top, len(self.vocabulary)),
            )

        parts = list(self._windows(run, len(inputs)))
        ids, probabilities, entropy, ranks = (
            np.concatenate(arrays)[: len(inputs)] for arrays in zip(*parts, strict=True)
        )
        return Predictions(ids, probabilities, entropy, ranks[:-1])

    def explore(
        self, text: str | bytes, *others: "TrainedModel", length: int = 300
    ) -> "explore.Page":
        """A page to read a text with the eyes of this model, and of others beside it.

        A notebook shows it, and `.save("explore.html")` writes it; see `explore.py`.

        Args:
          others: models with the same vocabulary.
          length: the first tokens of the text, at most so many, are shown.
        """
        from mogrifier_jax.analysis import explore

        return explore.make_page([self, *others], text, length=length)

    def _windows(self, run: Callable[..., tuple[Any, Any]], length: int) -> Iterator[Any]:
        """What run(carry, first) -> (found, carry) finds in windows that cover the length."""
        carry = sample.initial_carry(self.model, self.params, 1)
        for first in range(0, length, WINDOW):
            found, carry = run(carry, first)
            yield jax.device_get(found)

    def _encode(self, text: str | bytes) -> np.ndarray:
        ids = self.vocabulary.encode(text)
        if not len(ids):
            raise errors.UsageError(f"the text {text!r} has no tokens; give some text")
        return ids.astype(np.int32)

    def _spell(self, ids: np.ndarray) -> list[str]:
        return [self.vocabulary.tokens[i] for i in ids]


def load(workdir: str | os.PathLike, which: checkpoints.Which = "best") -> TrainedModel:
    """Loads the best or the latest checkpoint of a run, or a file of `save`; no corpus is needed.

    model = mogrifier_jax.load("runs/pydoc")
    model.score("The lambda form creates a function.").bits_per_token
    print(model.generate("The ", length=200, temperature=0.7)[0])
    model.gates("The ").layers[0]["rounds"][0]  # [4, D], of the first round
    """
    return TrainedModel(pretrained.load_weights(workdir, which))


def _predict(model, params, window, expected, carry, temperature, *, top):
    """Predictions after each token of a window [1, T], and the carry."""
    logits, carry = model.apply({"params": params}, window, carry, temperature, method="logits")
    log_p = jax.nn.log_softmax(logits[0].astype(np.float32))  # [T, V]
    best, ids = jax.lax.top_k(log_p, top)
    own = jnp.take_along_axis(log_p, expected[:, None], axis=-1)
    ranks = 1 + (log_p > own).sum(-1)
    return (ids, jnp.exp(best), -(jnp.exp(log_p) * log_p).sum(-1), ranks), carry


def _cut(ids: np.ndarray, first: int) -> tuple[np.ndarray, int]:
    """A window [1, WINDOW], filled up with zeros at the end, and how much of it is text."""
    window = ids[first : first + WINDOW]
    return np.pad(window, (0, WINDOW - len(window)))[None].astype(np.int32), len(window)

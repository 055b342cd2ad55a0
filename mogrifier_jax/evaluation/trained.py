"""A trained language model for Python: `mogrifier_jax.load(workdir)` scores, writes, shows gates.

Axes: N tokens of a text, B samples, V vocabulary, D input features of a layer, H hidden features.

A text is read in windows of a fixed size, and the state is carried from window to window. So each
method compiles once for texts of any length. A dispatch draws a few steps of all samples. A step
draws a token and reads it. While the prompt lasts, the step reads the prompt's token instead, so
the program is the same for every prompt. `print_samples` is `--mode=sample`.
"""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import config_dict

from mogrifier_jax import configs, errors
from mogrifier_jax.configs import Key
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import pretrained
from mogrifier_jax.nn import models
from mogrifier_jax.training import checkpoints, evaluate, units

if TYPE_CHECKING:
    from mogrifier_jax.analysis import explore

WINDOW = 64  # Tokens that one dispatch reads.
CHUNK = 16  # Steps that one dispatch draws.
# A lower temperature makes logits infinite, and a lower probability leaves no token.
LIMITS = {
    "logit_scale": configs.keys()["evaluation.softmax_temperature"],
    "top": Key(int, required=True, low=1, high=10**9),
    "length": Key(int, required=True, low=1, high=10**7),
    "temperature": Key(float, required=True, low=1e-4, high=1e4),
    "top_k": Key(int, low=1, high=10**9),
    "top_p": Key(float, low=1e-6, high=1.0),
    "min_p": Key(float, low=1e-6, high=1.0),
    "num_samples": Key(int, required=True, low=1, high=10**5),
    "seed": configs.SEED._replace(required=True),
}


class Score(NamedTuple):
    """How well a text was predicted, token by token."""

    tokens: list[str]  # As the vocabulary writes them: "▼" is the end of a line.
    nats: np.ndarray  # [N] float32: -log p of each.
    unknown: list[str]  # Tokens that the vocabulary lacks; they are scored as "<UNK>".

    @property
    def nats_per_token(self) -> float:
        """The cross-entropy: the mean of `nats`."""
        return evaluate.Sum(self.nats, len(self.nats)).mean()

    @property
    def bits_per_token(self) -> float:
        """The cross-entropy in bits: per character or byte if those are the tokens."""
        return units.bits(self.nats_per_token)

    @property
    def perplexity(self) -> float:
        """The exponential of the cross-entropy."""
        return units.perplexity(self.nats_per_token)


class GateValues(NamedTuple):
    """The values of the gates while a text was read."""

    tokens: list[str]  # As in Score.
    # For each layer: [N, H] by name, such as f, i, o, j, c of an LSTM; "rounds" is a list
    # of the Mogrifier's gates 2σ(.), [N, D] in odd rounds (which scale x), [N, H] in even ones.
    layers: list[dict[str, Any]]


class Predictions(NamedTuple):
    """The likeliest next tokens before a text and after each of its tokens."""

    ids: np.ndarray  # [N + 1, K] int32: the likeliest tokens, the likeliest first.
    probabilities: np.ndarray  # [N + 1, K] float32.
    entropy_nats: np.ndarray  # [N + 1] float32: of the whole distribution.
    ranks: np.ndarray  # [N] int32: the rank of each token of the text; 1 is the likeliest.


class Sampling(NamedTuple):
    """How text is drawn: the options of `--mode=sample` and `TrainedModel.generate`.

    The temperature divides the logits, so values below 1 sharpen the distribution. It is an input
    of the program. `top_k`, `top_p` and `min_p` are compiled into the program.
    """

    length: int = 300  # Tokens to draw.
    temperature: float = 1.0
    top_k: int | None = None  # Only this many of the likeliest tokens.
    top_p: float | None = None  # Only the likeliest tokens that together have this probability.
    min_p: float | None = None  # Only tokens with this share of the likeliest one's probability.
    num_samples: int = 1
    seed: int = 0

    def check(self) -> None:
        """Refuses impossible options before anything is loaded or compiled."""
        configs.check_values(self._asdict(), LIMITS)

    def restrict(self, logits: jax.Array) -> jax.Array:
        """Sets the logits of tokens that may not be drawn to -inf; the temperature is in them."""
        if self.top_k is not None:
            kth = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][..., -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
            kept = jnp.where(before < self.top_p, ordered, jnp.inf)  # The likeliest always stays.
            logits = jnp.where(logits < kept.min(-1, keepdims=True), -jnp.inf, logits)
        if self.min_p is not None:
            least = logits.max(-1, keepdims=True) + math.log(self.min_p)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return logits


class TrainedModel:
    """A trained language model; `load` makes it."""

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
        self._nats = jax.jit(functools.partial(model.apply, method="nats"))
        self._gates = jax.jit(functools.partial(model.apply, method="gates"))
        self._predict = jax.jit(functools.partial(_predict, model), static_argnames="top")
        self._advance = jax.jit(functools.partial(_advance, model), static_argnames="sampling")

    def __repr__(self) -> str:
        about = f"{self.info['workdir']!r}, {self.info['which']}, step {self.info['step']:,}"
        return f"TrainedModel({about}, {self.model.num_layers} layers of {self.model.hidden_size})"

    def save(self, path: str | os.PathLike) -> None:
        """Writes the model to one safetensors file, which `load` reads; see `pretrained.py`."""
        pretrained.save_file(self._loaded._replace(params=self.params), path)

    def score(self, text: str | bytes, *, logit_scale: float | None = None) -> Score:
        """-log p of every token of a text, read from the beginning of a line.

        It equals `--mode=evaluate --eval.text` on a file with this text. The end of the last
        line counts only if the text ends in a newline.

        Args:
          logit_scale: multiplies the logits (the temperature of `generate` divides them). The
            default is the one that training found for the checkpoint.
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
            window, targets = _cut(inputs, first), _cut(ids, first)
            lengths = np.array([min(WINDOW, len(ids) - first)], np.int32)
            variables = {"params": self.params}
            return self._nats(variables, window, targets, carry, lengths, None, logit_scale)

        nats = np.concatenate([np.asarray(part)[0] for part in self._windows(run, len(ids))])
        unknown = self.vocabulary.find_unknown(text)
        return Score(self._spell(ids), nats[: len(ids)].astype(np.float32), unknown)

    def generate(self, prompt: str | None = None, **options: Any) -> list[str]:
        """Texts that begin with the prompt and go on for `length` tokens, one for each sample.

        Args:
          prompt: None starts at the beginning of a line.
          options: `length`, `temperature` (it divides the logits: below 1 sharpens), `top_k`,
            `top_p`, `min_p`, `num_samples` and `seed`, as `Sampling` has them.
        """
        unknown = options.keys() - set(Sampling._fields)
        if unknown:
            known = ", ".join(Sampling._fields)
            raise TypeError(f"generate has no option {', '.join(sorted(unknown))}; it has {known}")
        drawn = self.draw(Sampling(**options), prompt)
        begin = encode_prompt(self.vocabulary, prompt)
        rows = np.concatenate(list(drawn), axis=1)
        return [self.vocabulary.decode(np.concatenate([begin, ids])) for ids in rows]

    def draw(self, sampling: Sampling, prompt: str | None = None) -> Iterator[np.ndarray]:
        """Yields the ids that each dispatch draws, [B, at most CHUNK], `length` in all.

        `prompt` is how the text begins; None draws from the beginning of a line. It compiles once
        for each number of samples; prompt and length do not matter.
        """
        sampling.check()
        ids = np.append(self.vocabulary.eos_id, encode_prompt(self.vocabulary, prompt))
        return self._draw(ids, sampling)

    def _draw(self, ids: np.ndarray, sampling: Sampling) -> Iterator[np.ndarray]:
        """The generator of `draw`. It is apart so that `draw` checks its arguments at once."""
        total, num_samples = len(ids) + sampling.length, sampling.num_samples
        forced = np.full(total + CHUNK, -1, np.int32)
        forced[: len(ids)] = ids
        key = jax.random.key(sampling.seed)
        carry = self._initial_carry(num_samples)
        logits = self._place(jnp.zeros((num_samples, len(self.vocabulary))))
        # Only what restricts the tokens is compiled.
        fixed = Sampling(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        for first in range(0, total, CHUNK):
            tokens, logits, carry = self._advance(
                {"params": self.params},
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

    def gates(self, text: str | bytes) -> GateValues:
        """The value of every gate of every layer after each token of a text."""
        ids = self._encode(text)
        inputs = np.append(self.vocabulary.eos_id, ids)

        def run(carry, first):
            return self._gates({"params": self.params}, _cut(inputs, first), carry)

        parts = list(self._windows(run, len(inputs)))
        # [T, 1, ...] each; the first step has read the line end before the text.
        layers = jax.tree.map(lambda *arrays: np.concatenate(arrays)[1 : len(inputs), 0], *parts)
        return GateValues(self._spell(ids), layers)

    def predict(self, text: str | bytes, *, top: int = 10) -> Predictions:
        """The likeliest next tokens at every place of a text, at the temperature of scores."""
        configs.check_values({"top": top}, LIMITS)
        ids = self._encode(text)
        inputs, targets = np.append(self.vocabulary.eos_id, ids), np.append(ids, 0)
        listed = min(top, len(self.vocabulary))

        def run(carry, first):
            window, expected = _cut(inputs, first), _cut(targets, first)[0]
            return self._predict(self.params, window, expected, carry, self.temperature, top=listed)

        parts = list(self._windows(run, len(inputs)))
        ids, probabilities, entropy, ranks = (
            np.concatenate(arrays)[: len(inputs)] for arrays in zip(*parts, strict=True)
        )
        return Predictions(ids, probabilities, entropy, ranks[:-1])

    def explore(
        self, text: str | bytes, *others: "TrainedModel", length: int = 300
    ) -> "explore.Page":
        """A page that shows how this model, and others beside it, read a text.

        A notebook shows it, and `.save("explore.html")` writes it; see `explore.py`.

        Args:
          others: models with the same vocabulary.
          length: at most this many tokens from the start of the text are shown.
        """
        from mogrifier_jax.analysis import explore

        return explore.make_page([self, *others], text, length=length)

    def _windows(self, run: Callable[..., tuple[Any, Any]], length: int) -> Iterator[Any]:
        """Calls run(carry, first) -> (found, carry) window by window; yields what it finds."""
        carry = self._initial_carry(1)
        for first in range(0, length, WINDOW):
            found, carry = run(carry, first)
            yield jax.device_get(found)

    def _initial_carry(self, batch_size: int) -> Any:
        """The state before the first token of a text."""
        variables = {"params": self.params}
        return self._place(self.model.apply(variables, batch_size, method="initial_carry"))

    def _place(self, tree: Any) -> Any:
        """Puts arrays where the parameters and all results are, so that jit compiles only once."""
        return jax.device_put(tree, jax.tree.leaves(self.params)[0].sharding)

    def _encode(self, text: str | bytes) -> np.ndarray:
        ids = self.vocabulary.encode(text)
        if not len(ids):
            raise errors.UsageError(f"the text {text!r} has no tokens; give some text")
        return ids.astype(np.int32)

    def _spell(self, ids: np.ndarray) -> list[str]:
        return [self.vocabulary.tokens[i] for i in ids]


def load(workdir: str | os.PathLike, which: checkpoints.Which = "best") -> TrainedModel:
    """Loads the best or the latest checkpoint of a run, or a file of `save`; needs no corpus.

    model = mogrifier_jax.load("runs/pydoc")
    model.score("The lambda form creates a function.").bits_per_token
    print(model.generate("The ", length=200, temperature=0.7)[0])
    model.gates("The ").layers[0]["rounds"][0]  # [4, D], of the first round
    """
    return TrainedModel(pretrained.load_weights(workdir, which))


def _predict(model, params, window, expected, carry, temperature, *, top):
    """The fields of `Predictions` after each token of a window [1, T], and the carry."""
    logits, carry = model.apply({"params": params}, window, carry, temperature, method="logits")
    log_p = jax.nn.log_softmax(logits[0].astype(np.float32))  # [T, V]
    best, ids = jax.lax.top_k(log_p, top)
    own = jnp.take_along_axis(log_p, expected[:, None], axis=-1)
    ranks = 1 + (log_p > own).sum(-1)
    return (ids, jnp.exp(best), -(jnp.exp(log_p) * log_p).sum(-1), ranks), carry


def _advance(model, variables, logits, carry, key, forced, temperature, *, sampling):
    """Draws or reads CHUNK tokens [B, CHUNK]; also returns the logits and carry after them."""

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


def _cut(ids: np.ndarray, first: int) -> np.ndarray:
    """The window [1, WINDOW] of ids from `first` on, filled up with zeros at the end."""
    window = ids[first : first + WINDOW]
    return np.pad(window, (0, WINDOW - len(window)))[None].astype(np.int32)


def encode_prompt(vocab: corpora.Vocabulary, prompt: str | None) -> np.ndarray:
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
            f"the prompt has {pretrained.list_some(unknown)}, which the training text did not "
            "have; write it without"
        )
    return ids.astype(np.int32)


def print_samples(workdir: str, sampling: Sampling, prompt: str | None = None) -> None:
    """`--mode=sample`: prints one sample as it is drawn, or several one after the other."""
    sampling.check()
    model = TrainedModel(pretrained.load_weights(workdir))
    drawn = model.draw(sampling, prompt)
    begin = encode_prompt(model.vocabulary, prompt)
    if sampling.num_samples == 1:
        for piece in pieces(model.vocabulary, begin, drawn):
            print(piece, end="", flush=True)
        print()
        return
    for index, ids in enumerate(np.concatenate(list(drawn), axis=1)):
        print(f"--- sample {index + 1}")
        print(*pieces(model.vocabulary, begin, [ids[None]]))


def pieces(
    vocab: corpora.Vocabulary, begin: np.ndarray, drawn: Iterable[np.ndarray]
) -> Iterator[str]:
    """The text of the first sample, in the pieces that each dispatch adds."""
    # An incomplete line is decoded again each time: words need the spaces between them, and
    # bytes may end in the middle of a character.
    line, shown = begin, 0
    for more in drawn:
        line = np.concatenate([line, more[0]])
        text = vocab.decode(line).rstrip("\ufffd")
        yield text[shown:]
        ends = np.flatnonzero(line == vocab.eos_id)
        if len(ends):
            line = line[ends[-1] + 1 :]
        shown = len(vocab.decode(line).rstrip("\ufffd"))

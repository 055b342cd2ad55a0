"""A trained language model in Python: `mogrifier_jax.load(workdir)`.

Axes: N tokens of a text, K likeliest tokens, B samples, T steps of a window, V vocabulary,
D input features of a layer, H hidden features.

The model scores texts, generates text (`text_sampling.py`), and shows its predictions and gates. It
reads a text in windows of a fixed size, with the state carried from window to window, so that each
method compiles once for texts of any length.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, PyTree
from ml_collections import config_dict

from mogrifier_jax import config_keys, errors, files, options
from mogrifier_jax.data import vocabularies
from mogrifier_jax.evaluation import loaded_run, loading, model_files, text_sampling
from mogrifier_jax.nn import cells, models, stack
from mogrifier_jax.options import Option
from mogrifier_jax.training import checkpoints, scoring, units

if TYPE_CHECKING:
    from mogrifier_jax.analysis import explore

Outputs = TypeVar("Outputs")
WINDOW = 64  # Tokens that one dispatch reads.
LIMITS = {
    "logit_scale": config_keys.keys()["evaluation.softmax_temperature"],
    "top": Option(int, required=True, low=1, high=10**9),
}


class Score(NamedTuple):
    """How well a text was predicted, token by token."""

    tokens: list[str]  # As in the vocabulary, where "▼" is the end of a line.
    nats: Float32[np.ndarray, "N"]  # -log p of each token.
    unknown: list[str]  # Tokens that are not in the vocabulary; they are scored as "<UNK>".

    @property
    def nats_per_token(self) -> float:
        """The cross-entropy: the mean of `nats`."""
        return scoring.Sum(self.nats, len(self.nats)).mean()

    @property
    def bits_per_token(self) -> float:
        """The cross-entropy in bits; the tokens may be words, characters or bytes."""
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
    layers: list[cells.Gates]


class Predictions(NamedTuple):
    """The likeliest next tokens before a text and after each of its tokens."""

    ids: Int32[np.ndarray, "N+1 K"]  # The likeliest tokens, the likeliest first.
    probabilities: Float32[np.ndarray, "N+1 K"]  # Those of these tokens.
    entropy_nats: Float32[np.ndarray, "N+1"]  # Of the whole distribution.
    ranks: Int32[np.ndarray, "N"]  # The rank of each token of the text; 1 is the likeliest.


class TrainedModel:
    """A trained language model, made by `mogrifier_jax.load`.

    Its attributes are `config`, `vocabulary`, `model` (a `LanguageModel`), `params`, `logit_scale`
    (which multiplies the logits of scores) and `info` (such as the step of the checkpoint).

    >>> model = load("pydoc")
    >>> score = model.score("import sys")
    >>> score.nats.shape, score.tokens[:3]  # A number for each character.
    ((10,), ['i', 'm', 'p'])
    >>> model.predict("impor", top=3).ids.shape  # Before the text, and after each character.
    (6, 3)
    >>> model.vocabulary.decode(model.predict("impor").ids[-1, :1])
    't'
    """

    def __init__(self, loaded: loaded_run.LoadedRun):
        model = loaded.model
        if isinstance(model, models.EncoderDecoder):
            raise errors.UsageError(
                f"the run in {loaded.info['workdir']} copies sequences; give the workdir of a "
                "language model"
            )
        self.config: config_dict.ConfigDict = loaded.config
        self.vocabulary: vocabularies.Vocabulary = loaded.vocabulary
        self.model: models.LanguageModel = model
        self.params: cells.Params = loaded.params
        # Multiplies the logits of scores; lamb calls it the softmax temperature.
        self.logit_scale: float = loaded.temperature or 1.0
        self.info: files.JsonObject = loaded.info
        self._loaded = loaded
        self._nats = jax.jit(functools.partial(model.apply, method="nats"))
        self._gates = jax.jit(functools.partial(model.apply, method="gates"))
        self._predict = jax.jit(functools.partial(_predict, model), static_argnames="top")
        self._draw_chunk = jax.jit(
            functools.partial(text_sampling.draw_chunk, model), static_argnames="sampling"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the loaded run; compiled programs are made again when it is unpickled."""
        params = jax.tree.map(np.asarray, self.params)
        return _from_host, (self._loaded._replace(params=params),)

    def __repr__(self) -> str:
        about = f"{self.info['workdir']!r}, {self.info['which']}, step {self.info['step']:,}"
        return f"TrainedModel({about}, {self.model.num_layers} layers of {self.model.hidden_size})"

    def save(self, path: str | os.PathLike) -> None:
        """Writes the model to one safetensors file, which `load` reads; see `model_files.py`."""
        model_files.save_file(self._loaded._replace(params=self.params), path)

    def score(self, text: str | bytes, *, logit_scale: float | None = None) -> Score:
        """-log p of every token of a text that starts at the beginning of a line.

        The scores are those of `--mode=evaluate --eval.text` on a file with this text. The end of
        the last line counts only if the text ends in a newline.

        Args:
          logit_scale: multiplies the logits (the temperature of `generate` divides them). The
            default is the one that training found for the checkpoint.
        """
        if self.config.data.get("episodic"):
            raise errors.UsageError(
                f"the run in {self.info['workdir']} models independent lines; a text can be scored "
                "only by a language model that carries its state"
            )
        if logit_scale is None:
            logit_scale = self.logit_scale
        options.check_values({"logit_scale": logit_scale}, LIMITS)
        ids = self._encode(text)
        inputs = np.append(self.vocabulary.eos_id, ids[:-1])

        def score_window(
            carry: stack.Carries, first: int
        ) -> tuple[stack.Carries, Float[Array, "1 T"]]:
            window, targets = _cut(inputs, first), _cut(ids, first)
            lengths = np.array([min(WINDOW, len(ids) - first)], np.int32)
            variables = {"params": self.params}
            return self._nats(variables, window, targets, carry, lengths, None, logit_scale)

        windows = self._read_windows(score_window, len(ids))
        nats = np.concatenate([np.asarray(nats)[0] for nats in windows])
        unknown = self.vocabulary.find_unknown(text)
        return Score(self._spell(ids), nats[: len(ids)].astype(np.float32), unknown)

    def generate(self, prompt: str | None = None, **options: Any) -> list[str]:
        """Samples of text: the prompt followed by `length` tokens.

        Args:
          prompt: how the text begins; None starts at the beginning of a line.
          options: as for `--mode=sample`: `length` (300), `temperature` (1.0; it divides the
            logits, so values below 1 sharpen), `top_k`, `top_p` and `min_p` (None: all tokens),
            `num_samples` (1) and `seed` (0).
        """
        unknown = options.keys() - set(text_sampling.Sampling._fields)
        if unknown:
            known = ", ".join(text_sampling.Sampling._fields)
            raise TypeError(f"generate has no option {', '.join(sorted(unknown))}; it has {known}")
        drawn = self.draw(text_sampling.Sampling(**options), prompt)
        prompt_ids = text_sampling.encode_prompt(self.vocabulary, prompt)
        rows = np.concatenate(list(drawn), axis=1)
        return [self.vocabulary.decode(np.concatenate([prompt_ids, ids])) for ids in rows]

    def draw(
        self, sampling: text_sampling.Sampling, prompt: str | None = None
    ) -> Iterator[Int32[np.ndarray, "B _"]]:
        """Yields the ids of B samples while they are drawn, a few steps at a time, `length` in all.

        It compiles once for each number of samples, for prompts and samples of any length.

        Args:
          prompt: how the text begins; None starts at the beginning of a line.
        """
        sampling.check()
        prompt_ids = text_sampling.encode_prompt(self.vocabulary, prompt)
        return self._draw(np.append(self.vocabulary.eos_id, prompt_ids), sampling)

    def _draw(
        self, ids: Int32[np.ndarray, "N"], sampling: text_sampling.Sampling
    ) -> Iterator[Int32[np.ndarray, "B _"]]:
        """The generator behind `draw`, which checks its arguments before anything is read."""
        total, num_samples = len(ids) + sampling.length, sampling.num_samples
        forced = np.full(total + text_sampling.CHUNK, -1, np.int32)
        forced[: len(ids)] = ids
        key = jax.random.key(sampling.seed)
        carry = self._initial_carry(num_samples)
        logits = self._place(jnp.zeros((num_samples, len(self.vocabulary))))
        for first in range(0, total, text_sampling.CHUNK):
            carry, drawn = self._draw_chunk(
                {"params": self.params},
                logits,
                carry,
                jax.random.fold_in(key, first),
                forced[first : first + text_sampling.CHUNK],
                jnp.float32(sampling.temperature),
                sampling=sampling.compiled(),
            )
            if not drawn.finite:
                raise errors.UsageError(
                    f"the logits after token {first} are not finite, so nothing can be drawn: the "
                    f"weights of {self.info['workdir']} have diverged; load another checkpoint, or "
                    "train again with a lower learning rate"
                )
            logits = drawn.logits
            tokens = np.asarray(drawn.tokens)[:, max(0, len(ids) - first) : total - first]
            if tokens.size:
                yield tokens

    def gates(self, text: str | bytes) -> GateValues:
        """The value of every gate of every layer after each token of a text."""
        ids = self._encode(text)
        inputs = np.append(self.vocabulary.eos_id, ids)

        def read_gates(carry: stack.Carries, first: int) -> tuple[stack.Carries, list[cells.Gates]]:
            return self._gates({"params": self.params}, _cut(inputs, first), carry)

        windows = list(self._read_windows(read_gates, len(inputs)))
        # Each array is [T, 1, ...], and the first step reads the end of line before the text.
        layers = jax.tree.map(lambda *arrays: np.concatenate(arrays)[1 : len(inputs), 0], *windows)
        return GateValues(self._spell(ids), layers)

    def predict(self, text: str | bytes, *, top: int = 10) -> Predictions:
        """The likeliest next tokens at every position of a text, with the logit scale of scores."""
        options.check_values({"top": top}, LIMITS)
        ids = self._encode(text)
        inputs, targets = np.append(self.vocabulary.eos_id, ids), np.append(ids, 0)
        count = min(top, len(self.vocabulary))

        def predict_window(
            carry: stack.Carries, first: int
        ) -> tuple[stack.Carries, tuple[Array, ...]]:
            window, expected = _cut(inputs, first), _cut(targets, first)[0]
            return self._predict(self.params, window, expected, carry, self.logit_scale, top=count)

        windows = list(self._read_windows(predict_window, len(inputs)))
        ids, probabilities, entropy, ranks = (
            np.concatenate(arrays)[: len(inputs)] for arrays in zip(*windows, strict=True)
        )
        return Predictions(ids, probabilities, entropy, ranks[:-1])

    def explore(
        self, text: str | bytes, *others: "TrainedModel", length: int = 300
    ) -> "explore.Page":
        """A page that shows how this model reads a text, beside other models if any are given.

        It displays itself in a notebook, and `.save("explore.html")` writes it to a file.

        Args:
          others: models with the same vocabulary.
          length: at most this many tokens from the start of the text are shown.
        """
        from mogrifier_jax.analysis import explore

        return explore.make_page([self, *others], text, length=length)

    def _read_windows(
        self, read: Callable[[stack.Carries, int], tuple[stack.Carries, Outputs]], length: int
    ) -> Iterator[Outputs]:
        """Calls read(carry, first) -> (carry, outputs) window by window; yields the outputs."""
        carry = self._initial_carry(1)
        for first in range(0, length, WINDOW):
            carry, outputs = read(carry, first)
            yield jax.device_get(outputs)

    def _initial_carry(self, batch_size: int) -> stack.Carries:
        """The state before the first token of a text."""
        variables = {"params": self.params}
        return self._place(self.model.apply(variables, batch_size, method="initial_carry"))

    def _place(self, tree: PyTree) -> PyTree:
        """Puts arrays on the device of the parameters, so that jit compiles only once."""
        return jax.device_put(tree, jax.tree.leaves(self.params)[0].sharding)

    def _encode(self, text: str | bytes) -> Int32[np.ndarray, "N"]:
        ids = self.vocabulary.encode(text)
        if not len(ids):
            raise errors.UsageError(f"the text {text!r} has no tokens; give some text")
        return ids.astype(np.int32)

    def _spell(self, ids: Int32[np.ndarray, "N"]) -> list[str]:
        return [self.vocabulary.tokens[i] for i in ids]


def load(workdir: str | os.PathLike, which: checkpoints.Which = "best") -> TrainedModel:
    """Loads a trained language model; it needs no corpus.

    Args:
      workdir: the workdir of a run, a file of `TrainedModel.save` or `--mode=export`, or "pydoc",
        the model of `make train` that comes with the package. A file or folder of that name in the
        current directory takes precedence.
      which: the "best" or the "latest" checkpoint of a workdir.

    >>> model = load("pydoc")
    >>> model.score("The lambda form creates a function.").bits_per_token < 2.5
    True
    >>> text = model.generate("The ", length=80, temperature=0.7)[0]
    >>> text.startswith("The "), len(text)
    (True, 84)
    >>> rounds = model.gates("The ").layers[0]["rounds"]
    >>> len(rounds), rounds[0].shape  # 2σ(.) of each round for each of the four tokens.
    (3, (4, 160))
    """
    return TrainedModel(loading.load_run(model_files.find_shipped(workdir), which))


def _from_host(loaded: loaded_run.LoadedRun) -> TrainedModel:
    """The model of a pickle, whose weights are put on the device that `load` uses."""
    return TrainedModel(loaded._replace(params=jax.device_put(loaded.params, jax.devices()[0])))


def _predict(
    model: models.LanguageModel,
    params: cells.Params,
    window: Int32[Array, "1 T"],
    expected: Int32[Array, "T"],
    carry: stack.Carries,
    logit_scale: float,
    *,
    top: int,
) -> tuple[stack.Carries, tuple[Array, ...]]:
    """The carry, and the fields of `Predictions` after each token of a window."""
    logits: Any  # Flax annotates the second result of `apply` as variables.
    carry, logits = model.apply({"params": params}, window, carry, logit_scale, method="logits")
    log_p = jax.nn.log_softmax(logits[0].astype(np.float32))  # [T, V]
    best, ids = jax.lax.top_k(log_p, top)
    own = jnp.take_along_axis(log_p, expected[:, None], axis=-1)
    ranks = 1 + (log_p > own).sum(-1)
    return carry, (ids, jnp.exp(best), -(jnp.exp(log_p) * log_p).sum(-1), ranks)


def _cut(ids: Int32[np.ndarray, "N"], first: int) -> Int32[np.ndarray, "1 T"]:
    """The window of WINDOW ids from `first` on, padded with zeros at the end."""
    window = ids[first : first + WINDOW]
    return np.pad(window, (0, WINDOW - len(window)))[None].astype(np.int32)

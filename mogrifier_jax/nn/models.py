"""LanguageModel and EncoderDecoder: embed, recurrent stack, softmax, nats per token.

Axes: B batch, T time, E embedding (input and output alike), H hidden, V vocabulary. Tokens and
results are [B, T]; inside, time comes first, as the recurrence wants it.
"""

import dataclasses
import difflib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging

from mogrifier_jax.nn import cells, layers, rnn, sizing, softmax
from mogrifier_jax.nn.rnn import Dropout

Dtype = Any
check = layers.check


class Sizes(nn.Module):
    """What all models are made of; sizes are explicit, and `sizing.py` finds them from a budget."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    num_layers: int = 2
    cell: str = "mogrifier_lstm"
    cell_options: Any = ()
    output: str = "sum"
    state_mask: str = "window"
    fast: bool = True
    remat_window: int | None = None
    unroll: int = 1
    max_logits: int = 1 << 26  # More logits than this are never in memory at once.
    dtype: Dtype = jnp.float32


class LanguageModel(Sizes):
    """Tokens to nats.

    >>> model = LanguageModel(
    ...     vocab_size=50, hidden_size=8, embedding_size=8, cell_options={"rounds": 4, "rank": 2}
    ... )
    >>> tokens = jnp.zeros((2, 7), jnp.int32)
    >>> variables = jax.jit(model.init)(jax.random.key(0), tokens)
    >>> nats, carry = model.apply(variables, tokens, tokens, method="nats")  # Inputs, targets.
    >>> nats.shape
    (2, 7)
    """

    tied_embeddings: bool = False
    mixture_components: int = 0  # 0: an ordinary softmax.
    trainable_initial_state: bool = False

    def setup(self) -> None:
        """Checks the sizes and makes the parts."""
        sizes = dict(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            embedding_size=self.embedding_size,
        )
        for name, size in sizes.items():
            check(size >= 1, f"{name} {size} must be at least 1")
        check(
            self.mixture_components == 0 or self.mixture_components >= 2,
            f"mixture_components {self.mixture_components} must be 0 (an ordinary softmax) or "
            "at least 2",
        )
        self.embedding = self.param(
            "embedding",
            softmax.normal_by_fan(self.embedding_size),
            (self.vocab_size, self.embedding_size),
        )
        self.stack = rnn.Stack(**_fields_of(rnn.Stack, self))
        self.softmax = softmax.Softmax(**_fields_of(softmax.Softmax, self))

    def __call__(self, inputs: jax.Array, carry: Any = None) -> tuple[jax.Array, Any]:
        """(inputs [B, T], carry) to (logits [B, T, V], carry), without dropout."""
        return self.logits(inputs, carry)

    @nn.nowrap
    def zero_carry(self, batch_size: int) -> Any:
        """What a stream starts from, unless the initial state is trained."""
        return rnn.zero_carry(self, batch_size)

    @nn.nowrap
    def example(self) -> dict[str, Any]:
        """Arguments of `init`."""
        return {"inputs": jnp.zeros((1, 1), jnp.int32)}

    def initial_carry(self, batch_size: int) -> Any:
        """What an example that stands alone starts from."""
        return self.stack.initial_carry(batch_size)

    def batch_nats(
        self, batch: Any, carry: Any, rates: Dropout | None = None, temperature: Any = 1.0
    ) -> tuple[jax.Array, Any]:
        """`nats` of a `data.Window`; an example that stands alone has the carry ()."""
        start = None if carry == () else carry
        nats, end = self.nats(batch.inputs, batch.targets, start, batch.lengths, rates, temperature)
        return nats, () if start is None else end

    def nats(
        self,
        inputs: jax.Array,
        targets: jax.Array,
        carry: Any = None,
        lengths: jax.Array | None = None,
        rates: Dropout | None = None,
        temperature: Any = 1.0,
    ) -> tuple[jax.Array, Any]:
        """-log p(target) [B, T], zero beyond `lengths`, and the carry at each example's end.

        `temperature` multiplies the logits, so that values below 1 flatten.
        """
        rates = rates or Dropout()
        check_tokens("inputs", inputs)
        check_tokens("targets", targets)
        check(
            inputs.shape == targets.shape,
            f"targets {targets.shape} must have the shape of inputs, here {inputs.shape}",
        )
        valid = None if lengths is None else _valid(lengths, inputs)
        carry, hs = self.run(inputs, carry, valid, rates)
        nats = self.softmax.nats(hs, targets.T, self.embedding, rates, temperature)
        if valid is not None:
            nats = jnp.where(valid, nats, 0.0)
        return nats.T, carry

    def logits(
        self, inputs: jax.Array, carry: Any = None, temperature: Any = 1.0
    ) -> tuple[jax.Array, Any]:
        """Unnormalised log-probabilities [B, T, V] without dropout, and the carry."""
        carry, hs = self.run(inputs, carry, None, Dropout())
        logits = self.softmax.logits(hs, self.embedding, temperature)
        return jnp.swapaxes(logits, 0, 1), carry

    def gates(self, inputs: jax.Array, carry: Any = None) -> tuple[list[cells.Gates], Any]:
        """What every gate of every layer does, [T, B, ...]: f, i, j, o, c and the rounds."""
        xs = self.embed(inputs, Dropout())
        carry = self.initial_carry(inputs.shape[0]) if carry is None else carry
        carry, gates = self.stack.gates(carry, xs)
        return gates, carry

    def run(self, inputs, carry, valid, rates):
        """Tokens [B, T] to the stack's outputs [T, B, H]."""
        xs = self.embed(inputs, rates)
        carry = self.initial_carry(inputs.shape[0]) if carry is None else carry
        return self.stack(carry, xs, valid, rates)

    def embed(self, inputs: jax.Array, rates: Dropout) -> jax.Array:
        """Tokens [B, T] to [T, B, E]."""
        check_tokens("inputs", inputs)
        xs = jnp.take(self.embedding.astype(self.dtype), inputs.T, axis=0)
        if rates.input is not None:
            xs = rnn.dropout(rates.input, xs, self.make_rng("dropout"))
        return xs


class EncoderDecoder(Sizes):
    """Two stacks with embeddings of their own; the decoder starts where the encoder ends."""

    num_layers: int = 1

    def setup(self) -> None:
        """Checks the sizes and makes the parts."""
        self.source_embedding = self.param(
            "source_embedding",
            softmax.normal_by_fan(self.embedding_size),
            (self.vocab_size, self.embedding_size),
        )
        self.encoder = rnn.Stack(**_fields_of(rnn.Stack, self))
        self.decoder = LanguageModel(**_fields_of(LanguageModel, self))

    @nn.nowrap
    def zero_carry(self, batch_size: int) -> tuple[()]:
        """Nothing is carried from batch to batch."""
        del batch_size
        return ()

    @nn.nowrap
    def example(self) -> dict[str, Any]:
        """Arguments of `init`."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return {"source": tokens, "inputs": tokens, "targets": tokens}

    def __call__(self, source, inputs, targets):
        """The nats of full examples, without dropout."""
        return self.nats(source, inputs, targets)

    def batch_nats(
        self, batch: Any, carry: Any, rates: Dropout | None = None, temperature: Any = 1.0
    ) -> tuple[jax.Array, Any]:
        """`nats` of a `streams.CopyBatch`; there is no carry."""
        nats = self.nats(
            batch.sources, batch.inputs, batch.targets, None, batch.lengths, rates, temperature
        )
        return nats, carry

    def nats(
        self,
        source: jax.Array,
        inputs: jax.Array,
        targets: jax.Array,
        source_lengths: jax.Array | None = None,
        lengths: jax.Array | None = None,
        rates: Dropout | None = None,
        temperature: Any = 1.0,
    ) -> jax.Array:
        """-log p(target) [B, T] of each target given the source [B, S]."""
        rates = rates or Dropout()
        check_tokens("source", source)
        xs = jnp.take(self.source_embedding.astype(self.dtype), source.T, axis=0)
        if rates.input is not None:
            xs = rnn.dropout(rates.input, xs, self.make_rng("dropout"))
        carry = self.encoder.initial_carry(source.shape[0])
        valid = None if source_lengths is None else _valid(source_lengths, source)
        carry, _ = self.encoder(carry, xs, valid, rates)
        return self.decoder.nats(inputs, targets, carry, lengths, rates, temperature)[0]


def _fields_of(part: Any, model: nn.Module) -> dict[str, Any]:
    """The options of a part of a model that the model has under the same names."""
    names = {field.name for field in dataclasses.fields(part)} - {"parent", "name"}
    return {name: getattr(model, name) for name in names if hasattr(model, name)}


def check_tokens(name: str, tokens: jax.Array) -> None:
    """Ids [B, T]."""
    check(
        tokens.ndim == 2 and tokens.size > 0,
        f"{name} of shape {tokens.shape} must be [batch, time], none of them empty",
    )
    check(
        jnp.issubdtype(tokens.dtype, jnp.integer),
        f"{name} of dtype {tokens.dtype} must be token ids; cast them to int32",
    )


def _valid(lengths: jax.Array, tokens: jax.Array) -> jax.Array:
    """[T, B]: whether a time step is within the example."""
    check(
        lengths.shape == tokens.shape[:1] and jnp.issubdtype(lengths.dtype, jnp.integer),
        f"lengths of shape {lengths.shape} and dtype {lengths.dtype} must be one integer for each "
        f"row of tokens, here {tokens.shape[0]}",
    )
    return jnp.arange(tokens.shape[1])[:, None] < lengths[None, :]


def make_model(
    vocab_size: int,
    *,
    num_params: int | None = None,
    hidden_size: int | None = None,
    embedding_ratio: float = 1.0,
    encoder_decoder: bool = False,
    dtype: str = "float32",
    **options: Any,
) -> LanguageModel | EncoderDecoder:
    """A model from `config.model`: sizes solved from the budget, cell options sorted out."""
    kind = EncoderDecoder if encoder_decoder else LanguageModel
    of_model = {field.name for field in dataclasses.fields(kind)} - {"parent", "name"}
    # What only the other kind has may be there as long as it asks for nothing.
    unused = (
        {f.name: f.default for f in dataclasses.fields(LanguageModel)} if encoder_decoder else {}
    )
    options = {n: v for n, v in options.items() if n in of_model or v != unused.get(n, ...)}
    of_cells = {f.name for c in _CELL_CLASSES for f in dataclasses.fields(c)} - of_model
    known = sorted(of_model | of_cells)
    for name in options:
        near = difflib.get_close_matches(name, known) or known
        check(name in known, f"model.{name} is not an option; did you mean {' or '.join(near)}?")
    check(
        dtype in ("float32", "bfloat16", "float64"),
        f"model.dtype {dtype!r} is not known; use 'float32' or 'bfloat16'",
    )
    cell_options = {name: value for name, value in options.items() if name in of_cells}
    make = functools.partial(
        kind,
        vocab_size=vocab_size,
        cell_options=_accepted_options(options.get("cell", kind.cell), cell_options),
        dtype=jnp.dtype(dtype),
        **{name: value for name, value in options.items() if name in of_model},
    )
    if hidden_size is None:
        check(
            num_params is not None,
            "neither model.hidden_size nor model.num_params is set; set one of them",
        )
        trial = make(hidden_size=1, embedding_size=1)
        hidden_size = sizing.solve_hidden_size(
            num_params or 0, embedding_ratio=embedding_ratio, **_what_counts(trial)
        )
    embedding_size = sizing.embedding_size(hidden_size, embedding_ratio)
    return make(hidden_size=hidden_size, embedding_size=embedding_size)


def _accepted_options(cell: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that this kind of cell has; None stands for the cell's own default.

    The others are named in a warning, unless they ask for nothing: a config has them all.
    """
    kinds: list[Any] = [
        getattr(make, "func", make) for make in (*layers.CELLS.values(), layers.find_cell(cell))
    ]
    defaults = {field.name: field.default for kind in kinds for field in dataclasses.fields(kind)}
    names = {field.name for field in dataclasses.fields(kinds[-1])}
    given = {name: value for name, value in options.items() if value is not None}
    ignored = sorted(n for n in given.keys() - names if given[n] != defaults[n])
    if ignored:
        logging.warning("cell %s has no %s: ignored", cell, ", ".join(ignored))
    return {name: value for name, value in given.items() if name in names}


def count_parameters(model: LanguageModel | EncoderDecoder) -> dict[str, int]:
    """How many trainable scalars each part has, by formula."""
    return sizing.count_by_part(
        hidden_size=model.hidden_size, embedding_size=model.embedding_size, **_what_counts(model)
    )


_CELL_CLASSES = (layers.MogrifierLSTMCell, layers.MogrifierGRUCell, layers.MogrifierElmanCell)


def _what_counts(model) -> dict[str, Any]:
    """What decides the number of parameters, apart from the two sizes."""
    cell = layers.find_cell(model.cell)(10**6, **dict(model.cell_options))
    counted = [field.name for field in dataclasses.fields(sizing.CellOptions)]
    return dict(
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        cell=model.cell,
        tied_embeddings=getattr(model, "tied_embeddings", False),
        mixture_components=getattr(model, "mixture_components", 0),
        encoder_decoder=isinstance(model, EncoderDecoder),
        trainable_initial_state=getattr(model, "trainable_initial_state", False),
        **{name: getattr(cell, name) for name in counted if hasattr(cell, name)},
    )

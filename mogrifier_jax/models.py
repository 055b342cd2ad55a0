"""LanguageModel and EncoderDecoder: embed, recurrent stack, softmax, nats per token.

Axes: B batch, T time, E embedding (input and output alike), H hidden, V vocabulary, C
components of a mixture of softmaxes. Tokens and results are [B, T]; inside, time comes
first, as the recurrence wants it. Dropout rates are values, not switches: they may be
traced, and `None` takes the operation away.
"""

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mogrifier_jax import cells, layers, sizing

Dtype = Any
check = layers.check


class Dropout(NamedTuple):
    """Probabilities of dropping; None where there is no dropout at all."""

    input: Any = None  # On embedded tokens.
    inter_layer: Any = None  # On what one layer hands to the next.
    state: Any = None  # On the previous h as the gates read it.
    output: Any = None  # On the summed output of the layers.
    downprojected: Any = None  # Once more after a projection or mixture.


def dropout(rate: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Inverted dropout with a rate that may be traced."""
    keep = keep_mask(rate, x.shape, key)
    return jnp.where(keep, x * keep_scale(rate, x.dtype), jnp.zeros_like(x))


def keep_mask(rate: Any, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """True with probability 1 - rate."""
    check(
        not isinstance(rate, int | float) or 0 <= rate < 1,
        f"dropout rate {rate} must be at least 0 and below 1; use None for no dropout",
    )
    return jax.random.bernoulli(key, 1 - jnp.asarray(rate, jnp.float32), shape)


def keep_scale(rate: Any, dtype: Dtype) -> jax.Array:
    """What makes up for the dropped: 1 / (1 - rate)."""
    return (1 / (1 - jnp.asarray(rate, jnp.float32))).astype(dtype)


def normal_by_fan(fan: int, factor: float = 1.0) -> Any:
    """Truncated normal whose real deviation is sqrt(factor / fan): lamb's embeddings."""
    return nn.initializers.truncated_normal((factor / fan) ** 0.5 / 0.87962566)


def zero_carry(module: Any, batch_size: int) -> tuple[Any, ...]:
    """A zero carry for each layer of a stack or model."""
    make = layers.find_cell(module.cell)
    cell = make(module.hidden_size, dtype=module.dtype, parent=None)
    return (cell.initialize_carry(None, (batch_size, module.hidden_size)),) * module.num_layers


class Stack(nn.Module):
    """Layers of one cell over a window, combined as `output` says."""

    num_layers: int
    hidden_size: int
    cell: str = "mogrifier_lstm"
    cell_options: Mapping[str, Any] = ()  # Splatted into the cell.
    output: str = "sum"  # "sum" of all layers, "residual" connections or the "last" layer.
    state_mask: str = "window"  # State dropout: one mask for the "window" or for each "step".
    trainable_initial_state: bool = False
    fast: bool = True
    remat_window: int | None = None
    unroll: int = 1
    dtype: Dtype = jnp.float32

    def setup(self):
        check(self.num_layers >= 1, f"num_layers {self.num_layers} must be at least 1")
        check(
            self.output in ("sum", "residual", "last"),
            f"output {self.output!r} is not known; use 'sum', 'residual' or 'last'",
        )
        check(
            self.state_mask in ("window", "step"),
            f"state_mask {self.state_mask!r} is not known; use 'window' or 'step'",
        )
        make = functools.partial(layers.find_cell(self.cell), **dict(self.cell_options))
        self.layers = [
            layers.Layer(
                make(self.hidden_size, dtype=self.dtype, parent=None),
                fast=self.fast,
                remat_window=self.remat_window,
                unroll=self.unroll,
            )
            for _ in range(self.num_layers)
        ]
        if self.trainable_initial_state:
            self.initial_state = self.param("initial_state", self.init_initial_state)

    def init_initial_state(self, key: jax.Array) -> tuple[Any, ...]:
        """Zeros, to be trained."""
        del key
        return jax.tree.map(lambda a: cells.widen(a[0]), zero_carry(self, 1))

    def initial_carry(self, batch_size: int) -> tuple[Any, ...]:
        """What a sequence starts from: zeros, or the trained initial state."""
        zeros = zero_carry(self, batch_size)
        if not self.trainable_initial_state:
            return zeros
        return jax.tree.map(lambda v, z: cells.stretch(v, z), self.initial_state, zeros)

    def __call__(
        self,
        carry: tuple[Any, ...],
        xs: jax.Array,
        valid: jax.Array | None = None,
        rates: Dropout = Dropout(),
    ) -> tuple[tuple[Any, ...], jax.Array]:
        """(carry, xs [T, B, E]) to (carry, outputs [T, B, H])."""
        self.check_carry(carry)
        carries, total = [], None
        for index, layer in enumerate(self.layers):
            if index and rates.inter_layer is not None:
                xs = dropout(rates.inter_layer, xs, self.make_rng("dropout"))
            mask = self.draw_state_mask(rates.state, xs.shape)
            last, hs = layer(carry[index], xs, **mask, valid=valid)
            carries.append(last)
            if self.output == "residual" and index:
                hs = total + hs
            total = total + hs if self.output == "sum" and index else hs
            xs = hs
        return tuple(carries), total

    def check_carry(self, carry: Any) -> None:
        """One carry for each layer; the layers look at them more closely."""
        check(
            isinstance(carry, tuple | list) and len(carry) == self.num_layers,
            f"carry {jax.tree.structure(carry)} must be a tuple of {self.num_layers}, one for "
            "each layer; make one with zero_carry(batch_size)",
        )

    def draw_state_mask(self, rate: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """One mask for each layer, drawn outside the recurrence."""
        if rate is None:
            return {}
        steps = shape[:1] if self.state_mask == "step" else ()
        mask_shape = (*steps, shape[1], self.hidden_size)
        keep = keep_mask(rate, mask_shape, self.make_rng("dropout"))
        return {"keep": keep, "scale": keep_scale(rate, jnp.float32)}

    def gates(self, carry: tuple[Any, ...], xs: jax.Array) -> tuple[Any, list[cells.Gates]]:
        """Every gate of every layer, [T, B, ...] each."""
        self.check_carry(carry)
        carries, found, total = [], [], None
        for index, layer in enumerate(self.layers):
            last, hs, gates = layer.gates(carry[index], xs)
            carries.append(last)
            found.append(gates)
            xs = total + hs if self.output == "residual" and index else hs
            total = xs
        return tuple(carries), found


class LanguageModel(nn.Module):
    """Tokens to nats. All sizes are explicit; `sizing.py` finds them from a budget."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    num_layers: int = 2
    cell: str = "mogrifier_lstm"
    cell_options: Mapping[str, Any] = ()
    tied_embeddings: bool = False
    mixture_components: int = 0  # 0: an ordinary softmax.
    output: str = "sum"
    state_mask: str = "window"
    trainable_initial_state: bool = False
    fast: bool = True
    remat_window: int | None = None
    unroll: int = 1
    max_logits: int = 1 << 26  # More logits than this are never in memory at once.
    dtype: Dtype = jnp.float32

    def setup(self):
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
            "embedding", normal_by_fan(self.embedding_size), (self.vocab_size, self.embedding_size)
        )
        self.stack = Stack(
            self.num_layers,
            self.hidden_size,
            self.cell,
            self.cell_options,
            self.output,
            self.state_mask,
            self.trainable_initial_state,
            self.fast,
            self.remat_window,
            self.unroll,
            self.dtype,
        )
        self.softmax = Softmax(
            self.vocab_size,
            self.hidden_size,
            self.embedding_size,
            self.mixture_components,
            self.tied_embeddings,
            self.max_logits,
            self.dtype,
        )

    def __call__(self, inputs: jax.Array, carry: Any = None) -> tuple[jax.Array, Any]:
        """(inputs [B, T], carry) to (logits [B, T, V], carry), without dropout."""
        return self.logits(inputs, carry)

    @nn.nowrap
    def zero_carry(self, batch_size: int) -> Any:
        """What a stream starts from, unless the initial state is trained."""
        return zero_carry(self, batch_size)

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
        nats, end = self.nats(
            batch.inputs, batch.targets, start, batch.lengths, rates, temperature
        )
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
            xs = dropout(rates.input, xs, self.make_rng("dropout"))
        return xs


class Softmax(nn.Module):
    """From the stack's outputs [T, B, H] to logits or nats."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    mixture_components: int
    tied_embeddings: bool
    max_logits: int
    dtype: Dtype

    def setup(self):
        hidden, size, count = self.hidden_size, self.embedding_size, self.mixture_components
        if count:
            draw = normal_by_fan(hidden)
            self.projection = self.param("projection", draw, (hidden, count, size))
            self.projection_bias = self.param("projection_bias", _zeros, (count, size))
            self.mixture = self.param("mixture", draw, (hidden, count))
        elif size != hidden:
            self.projection = self.param("projection", nn.initializers.orthogonal(), (hidden, size))
        if not self.tied_embeddings:
            self.kernel = self.param("kernel", normal_by_fan(size), (size, self.vocab_size))
        self.bias = self.param("bias", _zeros, (self.vocab_size,))

    def nats(self, hs, targets, embedding, rates, temperature) -> jax.Array:
        """-log p(target) [T, B]; at most `max_logits` logits exist at a time."""
        us, log_weights = self.features(hs, rates)
        score = functools.partial(self.score, self.matrix(embedding), temperature)
        steps, batch = targets.shape
        components = max(1, self.mixture_components)
        most = max(1, self.max_logits // (batch * components * self.vocab_size))
        if most >= steps:
            return score(us, log_weights, targets)
        chunks = -(-steps // most)
        size = -(-steps // chunks)
        padding = chunks * size - steps

        def cut(a):
            a = jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1))
            return a.reshape(chunks, size, *a.shape[1:])

        parts = jax.tree.map(cut, (us, log_weights, targets))
        nats = jax.lax.map(jax.checkpoint(lambda part: score(*part)), parts)
        return nats.reshape(chunks * size, batch)[:steps]

    def logits(self, hs, embedding, temperature) -> jax.Array:
        """Unnormalised log-probabilities [T, B, V]."""
        us, log_weights = self.features(hs, Dropout())
        logits = self.component_logits(self.matrix(embedding), temperature, us)
        if log_weights is None:
            return logits
        return jax.nn.logsumexp(jax.nn.log_softmax(logits) + log_weights[..., None], axis=-2)

    def features(self, hs, rates):
        """What is compared with the embeddings: [T, B, E], or [T, B, C, E] and log weights."""
        if rates.output is not None:
            hs = dropout(rates.output, hs, self.make_rng("dropout"))
        log_weights = None
        if self.mixture_components:
            us = jnp.tanh(
                cells.project(hs, self.projection.astype(self.dtype), self.projection_bias)
            )
            us = us.astype(self.dtype)
            log_weights = jax.nn.log_softmax(cells.project(hs, self.mixture.astype(self.dtype)))
        elif self.embedding_size != self.hidden_size:
            us = jnp.tensordot(hs, self.projection.astype(self.dtype), axes=1)
        else:
            return hs, None
        if rates.downprojected is not None:
            us = dropout(rates.downprojected, us, self.make_rng("dropout"))
        return us, log_weights

    def matrix(self, embedding) -> jax.Array:
        """[V, E], the layout of an embedding table, in the compute dtype."""
        table = embedding if self.tied_embeddings else self.kernel.T
        return table.astype(self.dtype)

    def component_logits(self, matrix, temperature, us) -> jax.Array:
        """[..., V] for each component, in at least float32."""
        wide = cells.wide(us.dtype)
        contract = (((us.ndim - 1,), (1,)), ((), ()))
        logits = jax.lax.dot_general(us, matrix, contract, preferred_element_type=wide)
        return (logits + cells.stretch(self.bias, logits)) * jnp.asarray(temperature, wide)

    def score(self, matrix, temperature, us, log_weights, targets) -> jax.Array:
        """-log p(target), from the target's logit and the normaliser of each component."""
        logits = self.component_logits(matrix, temperature, us)
        if log_weights is not None:
            targets = jnp.broadcast_to(targets[..., None], logits.shape[:-1])
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        log_p = chosen - jax.nn.logsumexp(logits, axis=-1)
        return -log_p if log_weights is None else -jax.nn.logsumexp(log_weights + log_p, axis=-1)


class EncoderDecoder(nn.Module):
    """Two stacks with embeddings of their own; the decoder starts where the encoder ends."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    num_layers: int = 1
    cell: str = "mogrifier_lstm"
    cell_options: Mapping[str, Any] = ()
    output: str = "sum"
    state_mask: str = "window"
    fast: bool = True
    remat_window: int | None = None
    unroll: int = 1
    max_logits: int = 1 << 26
    dtype: Dtype = jnp.float32

    def setup(self):
        shared = dict(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            cell=self.cell,
            cell_options=self.cell_options,
            output=self.output,
            state_mask=self.state_mask,
            fast=self.fast,
            remat_window=self.remat_window,
            unroll=self.unroll,
            dtype=self.dtype,
        )
        self.source_embedding = self.param(
            "source_embedding",
            normal_by_fan(self.embedding_size),
            (self.vocab_size, self.embedding_size),
        )
        self.encoder = Stack(**shared)
        self.decoder = LanguageModel(
            vocab_size=self.vocab_size,
            embedding_size=self.embedding_size,
            max_logits=self.max_logits,
            **shared,
        )

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
        """`nats` of an `episodes.CopyBatch`; there is no carry."""
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
            xs = dropout(rates.input, xs, self.make_rng("dropout"))
        carry = self.encoder.initial_carry(source.shape[0])
        valid = None if source_lengths is None else _valid(source_lengths, source)
        carry, _ = self.encoder(carry, xs, valid, rates)
        return self.decoder.nats(inputs, targets, carry, lengths, rates, temperature)[0]


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


def _zeros(key, shape, dtype=jnp.float32):
    del key
    return jnp.zeros(shape, dtype)


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
        cell_options=layers.accepted_options(options.get("cell", kind.cell), cell_options),
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
            num_params, embedding_ratio=embedding_ratio, **_what_counts(trial)
        )
    embedding_size = sizing.embedding_size(hidden_size, embedding_ratio)
    return make(hidden_size=hidden_size, embedding_size=embedding_size)


def count_parameters(model: LanguageModel | EncoderDecoder) -> dict[str, int]:
    """How many trainable scalars each part has, by formula."""
    return sizing.count_by_part(
        hidden_size=model.hidden_size, embedding_size=model.embedding_size, **_what_counts(model)
    )


_CELL_CLASSES = (layers.MogrifierLSTMCell, layers.MogrifierGRUCell, layers.MogrifierElmanCell)


def _what_counts(model) -> dict[str, Any]:
    """What decides the number of parameters, apart from the two sizes."""
    cell = layers.find_cell(model.cell)(1 << 30, **dict(model.cell_options))
    counted = [field.name for field in dataclasses.fields(sizing.CellOptions)]
    return dict(
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        cell=model.cell,
        tied_embeddings=getattr(model, "tied_embeddings", False),
        mixture_components=getattr(model, "mixture_components", 0),
        encoder_decoder=isinstance(model, EncoderDecoder),
        **{name: getattr(cell, name) for name in counted if hasattr(cell, name)},
    )

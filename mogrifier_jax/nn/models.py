"""LanguageModel and EncoderDecoder: embeddings, a recurrent stack, a softmax, nats per token.

Axes: B batch, T time, E embedding (of input and output), H hidden, V vocabulary. Tokens and results
are [B, T]. Within the models time comes first, because the recurrence scans over the leading axis.
`make_model` solves for the sizes E and H that fit a budget of parameters. The formulas that count
parameters repeat the shapes that `layers.py` and `softmax.py` create, and the tests check that both
agree.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from absl import logging
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, dropout, layers, model_options, softmax, stack
from mogrifier_jax.nn.dropout import Dropout
from mogrifier_jax.nn.softmax import LogitScale

Tokens = Integer[Array, "B T"]
Lengths = Integer[Array, "B"]
check = errors.check


class Sizes(nn.Module):
    """The fields that all models have; `make_model` finds the sizes from a budget."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    num_layers: int = 2
    cell: str = "mogrifier_lstm"
    cell_options: layers.Options = ()
    output: str = "sum"
    state_mask: str = "window"
    fast: bool = True
    remat_window: int | None = None
    unroll: int = 1
    max_logits: int = 1 << 26  # More logits than this are never in memory at once.
    dtype: DTypeLike = jnp.float32

    def make_embedding(self, name: str) -> Float[Array, "V E"]:
        """Declares a table of embeddings."""
        draw = softmax.normal_by_fan(self.embedding_size)
        return self.param(name, draw, (self.vocab_size, self.embedding_size))

    def look_up(
        self, table: Float[Array, "V E"], name: str, tokens: Tokens, rates: Dropout
    ) -> Float[Array, "T B E"]:
        """The embeddings of tokens, after input dropout."""
        check_tokens(name, tokens)
        xs = jnp.take(table.astype(self.dtype), tokens.T, axis=0)
        if rates.input is not None:
            xs = dropout.drop(rates.input, xs, self.make_rng("dropout"))
        return xs


class LanguageModel(Sizes):
    """A language model: from tokens to nats per token.

    >>> import jax
    >>> model = LanguageModel(
    ...     vocab_size=50, hidden_size=8, embedding_size=8, cell_options={"rounds": 4, "rank": 2}
    ... )
    >>> tokens = jnp.zeros((2, 7), jnp.int32)
    >>> variables = jax.jit(model.init)(jax.random.key(0), tokens)
    >>> carry, nats = model.apply(variables, tokens, tokens, method="nats")  # Inputs, targets.
    >>> nats.shape
    (2, 7)
    """

    tied_embeddings: bool = False
    mixture_components: int = 0  # 0: an ordinary softmax.
    trainable_initial_state: bool = False

    def setup(self) -> None:
        """Checks the sizes and makes embedding, stack and softmax."""
        sizes = ("vocab_size", "hidden_size", "embedding_size", "mixture_components", "max_logits")
        model_options.check(self, *sizes)
        check(
            self.mixture_components != 1,
            "mixture_components 1 must be 0 (an ordinary softmax) or at least 2",
        )
        self.embedding = self.make_embedding("embedding")
        self.stack = stack.Stack(**_fields_for(stack.Stack, self))
        self.softmax = softmax.Softmax(**_fields_for(softmax.Softmax, self))

    def __call__(
        self, inputs: Tokens, carry: stack.Carries | None = None
    ) -> tuple[stack.Carries, Float[Array, "B T V"]]:
        """From inputs and a carry to the carry after them and the logits, without dropout."""
        return self.logits(inputs, carry)

    @nn.nowrap
    def zero_carry(self, batch_size: int) -> stack.Carries:
        """The zero carry that a stream starts from, unless the initial state is trained."""
        return stack.zero_carry(self, batch_size)

    @nn.nowrap
    def example(self) -> dict[str, Any]:
        """Small arguments for `init`."""
        return {"inputs": jnp.zeros((1, 1), jnp.int32)}

    def initial_carry(self, batch_size: int) -> stack.Carries:
        """The carry that an independent example starts from, which may be trained."""
        return self.stack.initial_carry(batch_size)

    def batch_nats(
        self,
        batch: Any,
        carry: stack.Carries,
        rates: Dropout | None = None,
        logit_scale: LogitScale = 1.0,
    ) -> tuple[stack.Carries, Float[Array, "B T"]]:
        """`nats` of a `streams.Window`; the carry of independent examples is ()."""
        start = None if carry == () else carry
        end, nats = self.nats(batch.inputs, batch.targets, start, batch.lengths, rates, logit_scale)
        return () if start is None else end, nats

    def nats(
        self,
        inputs: Tokens,
        targets: Tokens,
        carry: stack.Carries | None = None,
        lengths: Lengths | None = None,
        rates: Dropout | None = None,
        logit_scale: LogitScale = 1.0,
    ) -> tuple[stack.Carries, Float[Array, "B T"]]:
        """The carry at each example's end, and -log p(target), zero beyond `lengths`.

        `logit_scale` multiplies the logits, so values below 1 flatten the distribution. It is
        lamb's softmax temperature.
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
        nats = self.softmax.nats(hs, targets.T, self.embedding, rates, logit_scale)
        if valid is not None:
            nats = jnp.where(valid, nats, 0.0)
        return carry, nats.T

    def logits(
        self,
        inputs: Tokens,
        carry: stack.Carries | None = None,
        logit_scale: LogitScale = 1.0,
    ) -> tuple[stack.Carries, Float[Array, "B T V"]]:
        """The carry, and unnormalised log-probabilities without dropout.

        `logit_scale` multiplies them.
        """
        carry, hs = self.run(inputs, carry, None, Dropout())
        logits = self.softmax.logits(hs, self.embedding, logit_scale)
        return carry, jnp.swapaxes(logits, 0, 1)

    def gates(
        self, inputs: Tokens, carry: stack.Carries | None = None
    ) -> tuple[stack.Carries, list[cells.Gates]]:
        """The carry, and all gates of every layer, [T, B, ...]: f, i, j, o, c and the rounds."""
        xs = self.look_up(self.embedding, "inputs", inputs, Dropout())
        return self.stack.gates(carry, xs)

    def run(
        self,
        inputs: Tokens,
        carry: stack.Carries | None,
        valid: Bool[Array, "T B"] | None,
        rates: Dropout,
    ) -> tuple[stack.Carries, Float[Array, "T B H"]]:
        """From tokens to the carry and the stack's outputs."""
        xs = self.look_up(self.embedding, "inputs", inputs, rates)
        return self.stack(carry, xs, valid, rates)


class EncoderDecoder(Sizes):
    """Two stacks with separate embeddings; the decoder starts from the encoder's last carry."""

    def setup(self) -> None:
        """Makes the encoder with its embedding, and the decoder."""
        self.source_embedding = self.make_embedding("source_embedding")
        self.encoder = stack.Stack(**_fields_for(stack.Stack, self))
        self.decoder = LanguageModel(**_fields_for(LanguageModel, self))

    @nn.nowrap
    def zero_carry(self, batch_size: int) -> tuple[()]:
        """An empty carry, because batches are independent."""
        del batch_size
        return ()

    @nn.nowrap
    def example(self) -> dict[str, Any]:
        """Small arguments for `init`."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return {"source": tokens, "inputs": tokens, "targets": tokens}

    def __call__(
        self, source: Integer[Array, "B S"], inputs: Tokens, targets: Tokens
    ) -> Float[Array, "B T"]:
        """`nats` of examples that fill their rows, without dropout."""
        return self.nats(source, inputs, targets)

    def batch_nats(
        self,
        batch: Any,
        carry: stack.Carries,
        rates: Dropout | None = None,
        logit_scale: LogitScale = 1.0,
    ) -> tuple[stack.Carries, Float[Array, "B T"]]:
        """`nats` of a `reverse_copy.CopyBatch`; returns the carry unchanged."""
        nats = self.nats(
            batch.sources, batch.inputs, batch.targets, None, batch.lengths, rates, logit_scale
        )
        return carry, nats

    def nats(
        self,
        source: Integer[Array, "B S"],
        inputs: Tokens,
        targets: Tokens,
        source_lengths: Lengths | None = None,
        lengths: Lengths | None = None,
        rates: Dropout | None = None,
        logit_scale: LogitScale = 1.0,
    ) -> Float[Array, "B T"]:
        """-log p(target), given the source; zero beyond `lengths`."""
        rates = rates or Dropout()
        xs = self.look_up(self.source_embedding, "source", source, rates)
        valid = None if source_lengths is None else _valid(source_lengths, source)
        carry, _ = self.encoder(None, xs, valid, rates)
        return self.decoder.nats(inputs, targets, carry, lengths, rates, logit_scale)[1]


# What configs make.
Model = LanguageModel | EncoderDecoder


def _fields_for(module: type[nn.Module], model: nn.Module) -> dict[str, Any]:
    """The fields of a submodule that the model has under the same names, with their values."""
    names = {field.name for field in dataclasses.fields(module)} - {"parent", "name"}
    return {name: getattr(model, name) for name in names if hasattr(model, name)}


def check_tokens(name: str, tokens: Array) -> None:
    """Refuses anything but a non-empty array [B, T] of integers."""
    check(
        tokens.ndim == 2 and tokens.size > 0,
        f"{name} of shape {tokens.shape} must be [batch, time], none of them empty",
    )
    check(
        jnp.issubdtype(tokens.dtype, jnp.integer),
        f"{name} of dtype {tokens.dtype} must be token ids; cast them to int32",
    )


def _valid(lengths: Lengths, tokens: Tokens) -> Bool[Array, "T B"]:
    """Whether each time step is within its example."""
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
) -> Model:
    """Makes a model from the keys of `config.model`; solves the hidden size from a budget."""
    kind = EncoderDecoder if encoder_decoder else LanguageModel
    defaults = {field.name: field.default for field in dataclasses.fields(LanguageModel)}
    of_model = {name: value for name, value in options.items() if name in defaults}
    of_cell = {name: value for name, value in options.items() if name not in defaults}
    for name in of_model.keys() - {field.name for field in dataclasses.fields(kind)}:
        value = of_model.pop(name)
        check(
            value == defaults[name],
            f"model.{name} {errors.show(value)} is not for a model that reads a source; leave it "
            "out",
        )
    of_cell = _accepted_options(options.get("cell", kind.cell), of_cell)

    def make(hidden_size: int) -> Model:
        return kind(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            embedding_size=embedding_size(hidden_size, embedding_ratio),
            cell_options=of_cell,
            dtype=jnp.dtype(dtype),
            **of_model,
        )

    if hidden_size is None:
        check(
            num_params is not None,
            "neither model.hidden_size nor model.num_params is set; set one of them",
        )
        hidden_size = solve_hidden_size(num_params or 0, make)
    return make(hidden_size)


def _accepted_options(cell: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that this kind of cell has; None means the cell's own default.

    A config has the options of all cells. A warning names those that this cell lacks, if their
    values are not the defaults.
    """
    kinds: list[Any] = [
        getattr(make, "func", make) for make in (*layers.CELLS.values(), layers.find_cell(cell))
    ]
    defaults = {field.name: field.default for kind in kinds for field in dataclasses.fields(kind)}
    names = {field.name for field in dataclasses.fields(kinds[-1])}
    given = {name: value for name, value in options.items() if value is not None}
    ignored = sorted(n for n in given.keys() - names if given[n] != defaults.get(n))
    if ignored:
        logging.warning("cell %s has no %s: ignored", cell, ", ".join(ignored))
    return {name: value for name, value in given.items() if name in names}


def embedding_size(hidden_size: int, ratio: float) -> int:
    """E = ratio * H, rounded and at least 1; a ratio of 1 or more means E = H."""
    return max(1, round(min(1.0, ratio) * hidden_size))


def solve_hidden_size(budget: int, make: Callable[[int], Model]) -> int:
    """The largest hidden size whose model `make(hidden_size)` has at most `budget` parameters."""

    def count(hidden_size: int) -> int:
        return sum(count_parameters(make(hidden_size)).values())

    check(
        count(1) <= budget,
        f"num_params {budget:,} is too small: one hidden unit already needs {count(1):,} "
        "parameters; raise the budget or lower num_layers, rank or the vocabulary",
    )
    # The count grows with H, so bisection finds the maximum.
    fits, exceeds = 1, 2
    while count(exceeds) <= budget:
        fits, exceeds = exceeds, 2 * exceeds
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if count(middle) <= budget:
            fits = middle
        else:
            exceeds = middle
    return fits


def count_parameters(model: Model) -> dict[str, int]:
    """The number of parameters of each part, by formula: tracing a model takes too long."""
    v, h, e = model.vocab_size, model.hidden_size, model.embedding_size
    # This cell only gives the options, so its size does not matter.
    cell = layers.find_cell(model.cell)(1, **dict(model.cell_options))
    recurrent = _count_layer(cell, e, h) + (model.num_layers - 1) * _count_layer(cell, h, h)
    if getattr(model, "trainable_initial_state", False):
        states = len(cell.state_type._fields)  # c and h, or h.
        recurrent += model.num_layers * states * h
    components = getattr(model, "mixture_components", 0)
    if components:
        projection = components * (e * h + e + h)
    else:
        projection = e * h if e != h else 0
    tied = getattr(model, "tied_embeddings", False)
    stacks = 2 if isinstance(model, EncoderDecoder) else 1
    return {
        "embedding": stacks * v * e,
        "recurrent": stacks * recurrent,
        "projection": projection,
        "softmax": v if tied else v + e * v,
    }


def _count_layer(cell: layers.Cell, d: int, h: int) -> int:
    """Counts a layer with d inputs and h hidden units; odd rounds gate x, even ones h."""
    gates = cell.num_gates * h
    count = _count_matrix(d + h, gates, getattr(cell, "gate_rank", 0)) + gates
    count += cell.rounds * _count_matrix(d, h, cell.rank)
    if cell.gate_bias:
        count += (cell.rounds + 1) // 2 * d + cell.rounds // 2 * h
    if cell.scaling:
        count += d + h
    if getattr(cell, "layer_norm", False):
        count += 2 * gates + 2 * h  # Gains of the x and h parts; gain and shift of c.
    if isinstance(cell, layers.MLSTMCell):
        count += d * h + h * h
    if isinstance(cell, layers.RewiredLSTMCell):
        count += (2 * h + 1) * h + (h + 1) * h  # The forget gate and the output gate.
    if isinstance(cell, layers.MogrifierGRUCell):
        count += h  # The candidate's recurrent part has another bias.
    return count


def _count_matrix(inputs: int, outputs: int, rank: int) -> int:
    """Counts a dense matrix, or its two factors if the rank is above 0."""
    return rank * (inputs + outputs) if rank > 0 else inputs * outputs

"""Flax modules around the cells: parameters and initialisers.

Axes: D input features, H hidden features. The modules follow `nn.RNNCellBase`, so they work in
`nn.RNN` and `nn.Bidirectional`. The `RNN` of `rnn.py` runs them over a sequence faster.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, taps

Dtype = Any
check = errors.check
# The lowest and the highest value of a cell's fields. Fields with whole limits are whole numbers.
LIMITS: dict[str, tuple[float, float]] = {
    "hidden_size": (1, 10**6),
    "rounds": (0, 100),
    "rank": (-(10**6), 10**6),
    "gate_rank": (0, 10**6),
    "init_factor": (1e-9, 1e3),
    "cell_clip": (1e-9, 1e6),
    "forget_bias": (-1e3, 1e3),
    "chrono_max": (2.0, 1e9),
    "zoneout": (0.0, 1.0),
}


def truncated_normal(fan: int, factor: float = 1.0, mean: float = 0.0) -> Callable:
    """lamb's initialiser of cells: deviation sqrt(1.3 factor / fan), cut at two deviations."""
    draw = nn.initializers.truncated_normal(math.sqrt(1.3 * factor / fan))
    return lambda key, shape, dtype: mean + draw(key, shape, dtype)


def chrono(longest: float) -> Callable:
    """Chrono initialisation (arXiv:1804.11188) of forget biases: ln u, u uniform in [1, T - 1).

    A gate with such a bias forgets in the course of u steps, so memories last up to T = `longest`.
    """

    def draw(key, shape, dtype):
        return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, max(1.0, longest - 1.0)))

    return draw


class Cell(nn.RNNCellBase):
    """The base class of all cells: rounds of gating, parameters, carry."""

    hidden_size: int
    rounds: int = 0
    rank: int = 0  # Zero and below mean full rank.
    zigzag: bool = True
    gate_bias: bool = True  # Whether the gating maps have a bias, as in lamb.
    scaling: bool = False  # Multiply x and h by a learned vector.
    init_factor: float = 1.0
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32

    @property
    def num_gates(self) -> int:
        """The number of blocks of the gate matrices."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of x that are not batch axes, for `nn.RNN`."""
        return 1

    def initialize_carry(self, rng: jax.Array | None, input_shape: tuple[int, ...]) -> Any:
        """The zero carry for inputs of this shape; `rng` is not used."""
        del rng
        shape = (*input_shape[:-1], self.hidden_size)
        return cells.Carry(jnp.zeros(shape, self.dtype))

    def __call__(self, carry: Any, x: jax.Array, **extras: jax.Array) -> tuple[Any, jax.Array]:
        """One step: (carry, x [..., D]) to (carry, h [..., H])."""
        self.check_carry(carry, x.shape)
        weights = taps.cast_matrices(self.weights(x.shape[-1]), self.dtype)
        carry, _ = self.cell(weights, carry, x.astype(self.dtype), **extras)
        return carry, carry.h

    @nn.compact
    def weights(self, input_size: int) -> dict[str, Any]:
        """Declares the parameters; returns them in the form `cells` reads."""
        self.check_input_size(input_size)
        params: dict[str, Any] = {"gates": self.param("gates", self.init_gates, input_size)}
        if self.scaling:
            params["scaling"] = self.param("scaling", self.init_scaling, input_size)
        if self.rounds:
            params["rounds"] = [
                self.param(f"round_{i}", self.init_round, input_size, i)
                for i in range(1, self.rounds + 1)
            ]
        return params

    @property
    def cell(self) -> Callable:
        """The function of `cells.py` with the options of this cell."""
        raise NotImplementedError

    @property
    def masks(self) -> dict[str, float]:
        """Masks that each step of training takes: how likely an element is True, by keyword."""
        return {}

    def init_gates(self, key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        """Draws each matrix by the size of its own input; biases are random, as in lamb."""
        keys = jax.random.split(key, 3)
        hidden, gates = self.hidden_size, self.num_gates

        def draw(key: jax.Array, fan: int, shape: tuple[int, ...]) -> jax.Array:
            return truncated_normal(fan, self.init_factor)(key, shape, self.param_dtype)

        return {
            "input": draw(keys[0], input_size, (input_size, gates, hidden)),
            "recurrent": draw(keys[1], hidden, (hidden, gates, hidden)),
            "bias": draw(keys[2], hidden, (gates, hidden)),
        }

    def init_scaling(self, key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        """Ones, which change nothing."""
        del key
        return {
            "x": jnp.ones(input_size, self.param_dtype),
            "h": jnp.ones(self.hidden_size, self.param_dtype),
        }

    def init_round(self, key: jax.Array, input_size: int, index: int) -> dict[str, jax.Array]:
        """Draws the map of one round: from h to x in odd rounds, from x to h in even ones."""
        sizes = (self.hidden_size, input_size) if index % 2 else (input_size, self.hidden_size)
        return init_map(key, *sizes, self.rank, self.gate_bias, self.init_factor, self.param_dtype)

    def check_carry(self, carry: Any, input_shape: tuple[int, ...]) -> None:
        """Refuses a carry of another cell, batch or dtype."""
        check(
            len(input_shape) >= 1 and input_shape[-1] >= 1,
            f"an input of shape {tuple(input_shape)} has no features; give x [..., features]",
        )
        expected = jax.eval_shape(lambda: self.initialize_carry(None, input_shape))
        describe = functools.partial(
            jax.tree.map, lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}"
        )
        leaves = jax.tree.leaves(carry)
        check(
            bool(leaves) and all(is_numeric(leaf) for leaf in leaves),
            f"initial_carry {errors.show(carry)} is not a carry; make one with "
            "initialize_carry(key, input_shape)",
        )
        check(
            describe(carry) == describe(expected)
            and bool(jax.tree.structure(carry) == jax.tree.structure(expected)),  # type: ignore
            f"carry {describe(carry)} does not fit an input of shape {tuple(input_shape)}: this "
            f"cell needs {describe(expected)}; make one with initialize_carry(key, input_shape)",
        )

    def check_input_size(self, input_size: int) -> None:
        """Refuses inputs of another size than the existing parameters are for."""
        if not self.has_variable("params", "gates"):
            return
        gates: Any = self.get_variable("params", "gates")
        if "input" in gates:
            size = gates["input"].shape[0]
        else:
            size = gates["down"].shape[0] - self.hidden_size
        check(
            input_size == size,
            f"x has {input_size} features and the parameters are for {size}; give x of that "
            "size, or initialise parameters for this one",
        )


class MogrifierLSTMCell(Cell):
    """LSTM whose x and h gate each other first (arXiv:1909.01792); with 0 rounds it is an LSTM.

    >>> cell = MogrifierLSTMCell(hidden_size=8, rounds=5, rank=3)
    >>> init = jax.jit(nn.RNN(cell).init_with_output)
    >>> ys, variables = init(jax.random.key(0), jnp.ones((2, 7, 4)))
    >>> ys.shape
    (2, 7, 8)
    """

    rounds: int = 5
    cap_input_gate: bool = True  # Use min(i, 1 - f) for i, as lamb does, but not the paper.
    tied_gates: bool = False  # Use 1 - f for i.
    layer_norm: bool = False
    cell_clip: float | None = None
    forget_bias: float = 1.0  # The mean of the initial bias of the forget gate.
    chrono_max: float | None = None  # Draw that bias by `chrono` instead: the longest memory.
    gate_rank: int = 0  # Above zero, the gate matrix is a product of two factors of this rank.
    zoneout: float = 0.0  # The probability that an element of c or h stays as it was, in training.

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            not (self.layer_norm and self.gate_rank > 0),
            f"gate_rank {self.gate_rank} and layer_norm exclude each other; set one of them off",
        )

    @property
    def num_gates(self) -> int:
        """The blocks are j, o, f and i; with tied gates there is no i."""
        return 3 if self.tied_gates else 4

    @property
    def cell(self) -> Callable:
        """`cells.lstm` with the options of this cell."""
        switches = ("zigzag", "cap_input_gate", "tied_gates", "cell_clip", "zoneout")
        return functools.partial(cells.lstm, **{name: getattr(self, name) for name in switches})

    @property
    def masks(self) -> dict[str, float]:
        """What zoneout leaves as it was."""
        return dict.fromkeys(("zone_c", "zone_h"), self.zoneout) if self.zoneout else {}

    def initialize_carry(
        self, rng: jax.Array | None, input_shape: tuple[int, ...]
    ) -> cells.LSTMCarry:
        """The zero carry for inputs of this shape; `rng` is not used."""
        h = super().initialize_carry(rng, input_shape).h
        return cells.LSTMCarry(cells.widen(h), h)

    @nn.compact
    def weights(self, input_size: int) -> dict[str, Any]:
        """Declares the parameters; returns them in the form `cells` reads."""
        params = super().weights(input_size)
        if self.layer_norm:
            params["cell_norm"] = self.param("cell_norm", self.init_cell_norm)
        return params

    def init_gates(self, key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        """As the base class; also shifts the forget gate's bias, and knows the variants."""
        params = super().init_gates(key, input_size)
        bias = params.pop("bias").at[2].add(self.forget_bias)
        if self.chrono_max is not None:
            draw, of_forget = chrono(self.chrono_max), jax.random.fold_in(key, 3)
            bias = bias.at[2].set(draw(of_forget, bias.shape[1:], bias.dtype))
        if self.layer_norm:
            ones = jnp.ones_like(bias)
            return {**params, "input_gain": ones, "recurrent_gain": ones, "shift": bias}
        if self.gate_rank > 0:
            sizes = (input_size + self.hidden_size, bias.size)
            factors = init_map(key, *sizes, self.gate_rank, False, 1.0, self.param_dtype)
            up = factors["up"].reshape(self.gate_rank, *bias.shape)
            return {"down": factors["down"], "up": up, "bias": bias}
        return {**params, "bias": bias}

    def init_cell_norm(self, key: jax.Array) -> dict[str, jax.Array]:
        """The gain and the shift of the normalised c."""
        del key
        ones = jnp.ones(self.hidden_size, self.param_dtype)
        return {"gain": ones, "shift": jnp.zeros_like(ones)}


class LSTMCell(MogrifierLSTMCell):
    """The LSTM of the paper's baselines: capped input gate, random biases.

    >>> cell = LSTMCell(hidden_size=8)
    >>> carry = cell.initialize_carry(None, (2, 4))  # For x [2, 4].
    >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, jnp.ones((2, 4)))
    >>> y.shape, carry.c.shape
    ((2, 8), (2, 8))
    """

    rounds: int = 0


class MLSTMCell(MogrifierLSTMCell):
    """Multiplicative LSTM (arXiv:1609.07959), the Mogrifier's closest relative.

    >>> xs = jnp.ones((2, 7, 4))
    >>> rnn = nn.RNN(MLSTMCell(hidden_size=8), return_carry=True)
    >>> (carry, ys), variables = jax.jit(rnn.init_with_output)(jax.random.key(0), xs)
    >>> carry.h.shape
    (2, 8)
    """

    rounds: int = 0

    @nn.compact
    def weights(self, input_size: int) -> dict[str, Any]:
        """Declares the parameters; returns them in the form `cells` reads."""
        params = super().weights(input_size)
        params["multiplicative"] = self.param("multiplicative", self.init_product, input_size)
        return params

    def init_product(self, key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        """Draws the matrices of the two factors of h_m."""

        def draw(key: jax.Array, fan: int) -> jax.Array:
            shape = (fan, self.hidden_size)
            return truncated_normal(fan, self.init_factor)(key, shape, self.param_dtype)

        keys = jax.random.split(key)
        return {"input": draw(keys[0], input_size), "recurrent": draw(keys[1], self.hidden_size)}


class RewiredLSTMCell(Cell):
    """Rewired LSTM (arXiv:2211.01848) whose x and h gate each other first; 0 rounds: without that.

    The forget gate reads the proposed update i ⊙ j and h, and the output gate reads the new c.

    >>> cell = RewiredLSTMCell(hidden_size=8, rounds=5, rank=3)
    >>> init = jax.jit(nn.RNN(cell).init_with_output)
    >>> ys, variables = init(jax.random.key(0), jnp.ones((2, 7, 4)))
    >>> variables["params"]["cell"]["forget"]["kernel"].shape
    (16, 8)
    """

    rounds: int = 5
    forget_bias: float = 1.0  # The mean of the initial bias of the forget gate.
    chrono_max: float | None = None  # Draw that bias by `chrono` instead: the longest memory.

    num_gates = 2  # The blocks are i and j; the other gates have matrices of their own.

    @property
    def cell(self) -> Callable:
        """`cells.rewired_lstm` with the option of this cell."""
        return functools.partial(cells.rewired_lstm, zigzag=self.zigzag)

    def initialize_carry(
        self, rng: jax.Array | None, input_shape: tuple[int, ...]
    ) -> cells.LSTMCarry:
        """The zero carry for inputs of this shape; `rng` is not used."""
        h = super().initialize_carry(rng, input_shape).h
        return cells.LSTMCarry(cells.widen(h), h)

    @nn.compact
    def weights(self, input_size: int) -> dict[str, Any]:
        """Declares the parameters; returns them in the form `cells` reads."""
        params = super().weights(input_size)
        hidden = self.hidden_size
        # The rows of the forget gate's matrix are those of i ⊙ j, then those of h.
        forget = truncated_normal(hidden, self.init_factor, self.forget_bias)
        if self.chrono_max is not None:
            forget = chrono(self.chrono_max)
        output = truncated_normal(hidden, self.init_factor)
        params["forget"] = self.param("forget", self.init_gate, 2 * hidden, forget)
        params["output"] = self.param("output", self.init_gate, hidden, output)
        return params

    def init_gate(self, key: jax.Array, size: int, draw_bias: Callable) -> dict[str, jax.Array]:
        """Draws a gate that reads one or two states; the deviation is that for H inputs."""
        of_kernel, of_bias = jax.random.split(key)
        hidden, dtype = self.hidden_size, self.param_dtype
        draw = truncated_normal(hidden, self.init_factor)
        return {
            "kernel": draw(of_kernel, (size, hidden), dtype),
            "bias": draw_bias(of_bias, (hidden,), dtype),
        }


class MogrifierGRUCell(Cell):
    """GRU whose x and h gate each other first; with 0 rounds it is `nn.GRUCell`.

    >>> both = nn.Bidirectional(nn.RNN(MogrifierGRUCell(8)), nn.RNN(MogrifierGRUCell(8)))
    >>> ys, variables = jax.jit(both.init_with_output)(jax.random.key(0), jnp.ones((2, 7, 4)))
    >>> ys.shape
    (2, 7, 16)
    """

    rounds: int = 5

    num_gates = 3  # The blocks are r, u and n.

    @property
    def cell(self) -> Callable:
        """`cells.gru` with the option of this cell."""
        return functools.partial(cells.gru, zigzag=self.zigzag)

    def init_gates(self, key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        """As the base class, and a bias that the reset gate multiplies."""
        candidate_bias = jnp.zeros(self.hidden_size, self.param_dtype)
        return {**super().init_gates(key, input_size), "candidate_bias": candidate_bias}


class MogrifierElmanCell(Cell):
    """Elman network whose x and h gate each other first.

    >>> rnn = nn.RNN(MogrifierElmanCell(hidden_size=8, rounds=2, dtype=jnp.bfloat16))
    >>> ys, variables = jax.jit(rnn.init_with_output)(jax.random.key(0), jnp.ones((2, 7, 4)))
    >>> ys.dtype
    dtype(bfloat16)
    """

    rounds: int = 5

    num_gates = 1

    @property
    def cell(self) -> Callable:
        """`cells.elman` with the option of this cell."""
        return functools.partial(cells.elman, zigzag=self.zigzag)


CELLS: dict[str, Callable[..., Cell]] = {
    "lstm": LSTMCell,
    "mogrifier_lstm": MogrifierLSTMCell,
    "mogrifier_no_zigzag": functools.partial(MogrifierLSTMCell, zigzag=False),
    "mlstm": MLSTMCell,
    "rewired_lstm": RewiredLSTMCell,
    "mogrifier_gru": MogrifierGRUCell,
    "mogrifier_elman": MogrifierElmanCell,
}


def find_cell(name: str) -> Callable[..., Cell]:
    """The cell of this name."""
    check(name in CELLS, f"cell {name!r} is not known; use one of {', '.join(CELLS)}")
    return CELLS[name]


class Mogrifier(nn.Module):
    """The gating alone, for any two vectors: (x [..., D], h [..., H]) to the same shapes.

    >>> x, h = jnp.ones((2, 4)), jnp.ones((2, 8))
    >>> (x, h), variables = Mogrifier(rounds=4).init_with_output(jax.random.key(0), x, h)
    >>> x.shape, h.shape
    ((2, 4), (2, 8))
    """

    rounds: int = 5
    rank: int = 0
    zigzag: bool = True
    gate_bias: bool = True
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns x and h; the gates of each read the other."""
        check_fields(self)
        check(
            min(jnp.ndim(x), jnp.ndim(h)) >= 1 and x.shape[:-1] == h.shape[:-1],
            f"x {x.shape} and h {h.shape} must agree in all axes but the last, their features",
        )
        sizes = [h.shape[-1], x.shape[-1]]
        check(min(sizes) >= 1, f"x {x.shape} and h {h.shape} must have features; give at least 1")
        rounds = []
        for i in range(1, self.rounds + 1):
            size_in, size_out = sizes if i % 2 else sizes[::-1]
            options = (size_in, size_out, self.rank, self.gate_bias, 1.0, self.param_dtype)
            rounds.append(self.param(f"round_{i}", init_map, *options))
        weights = taps.cast_matrices(rounds, self.dtype)
        return cells.mogrify(weights, x.astype(self.dtype), h.astype(self.dtype), self.zigzag)[:2]


def init_map(
    key: jax.Array,
    size_in: int,
    size_out: int,
    rank: int,
    bias: bool,
    factor: float,
    dtype: Dtype,
) -> dict[str, jax.Array]:
    """Draws a gating map: one matrix, or two factors whose product has a variance of about 1/in."""
    check(
        rank <= max(size_in, size_out),
        f"rank {rank} is larger than both sides of a {size_in} x {size_out} gating matrix; "
        f"use at most {max(size_in, size_out)}, or 0 for full rank",
    )
    params = {}
    if rank <= 0:
        params["kernel"] = truncated_normal(size_in, factor)(key, (size_in, size_out), dtype)
    else:
        draw = nn.initializers.truncated_normal((size_in * rank) ** -0.25)
        down, up = jax.random.split(key)
        params["down"] = draw(down, (size_in, rank), dtype)
        params["up"] = draw(up, (rank, size_out), dtype)
    if bias:
        params["bias"] = jnp.zeros(size_out, dtype)
    return params


def is_numeric(leaf: Any) -> bool:
    """Whether it is an array of numbers."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.number))


def check_fields(cell: Any) -> None:
    """Refuses numbers and dtypes that are out of range; `cell` is a module of `layers.py`."""
    for field in dataclasses.fields(cell):
        name, value = field.name, getattr(cell, field.name)
        if name in ("dtype", "param_dtype"):
            good, rule = _is_floating(value), "a dtype of floating point"
        elif name in LIMITS and not (value is None and field.default is None):
            low, high = LIMITS[name]
            kind: Any = numbers.Integral if isinstance(low, int) else numbers.Real
            good = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
            rule = f"a {'whole ' * isinstance(low, int)}number from {low} to {high}"
        elif isinstance(field.default, bool):
            good, rule = isinstance(value, bool | np.bool_), "True or False"
        else:
            continue
        if not good:
            raise errors.UsageError(f"{name} {errors.show(value)} must be {rule}")


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False

"""Flax modules around the cells: parameters, initialisers and carries.

Axes: *B any leading axes, D input features, H hidden features, G gates, *I axes of inputs.

The modules follow `nn.RNNCellBase`, so they work in `nn.RNN` and `nn.Bidirectional`, and their
arguments have the names and the order of Flax's own cells. The `RNN` of `rnn.py` runs them over a
sequence faster.
"""

import dataclasses
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import dtypes
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Real

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, model_options, taps
from mogrifier_jax.options import Option

# (key, shape, dtype) -> array
Initializer = Callable[[Array, tuple[int, ...], DTypeLike], Array]
# The options of a cell, by name; () is none.
Options = Mapping[str, Any] | tuple[()]
# What users see of a state: `LSTMCarry`, a tuple (c, h), or h alone of cells without c.
CarryLike: TypeAlias = PyTree[Float[Array, "*B H"]]
check = errors.check
# The fields of cells that are numbers and switches. All but `features` are keys of a config, too.
OPTIONS: Mapping[str, Option] = {
    "features": Option(
        int,
        low=1,
        high=10**6,
        meaning="the number of hidden units, H, which is also the size of the output",
    ),
    "rounds": Option(int, low=0, high=100, meaning="rounds of mutual gating of x and h"),
    "rank": Option(
        int,
        low=-(10**6),
        high=10**6,
        meaning="rank of the gating maps; 0 or less is full rank",
    ),
    "zigzag": Option(bool, meaning="each round gates with the result of the one before"),
    "gate_bias": Option(bool, meaning="gating maps have a bias, as in lamb"),
    "scaling": Option(bool, meaning="multiply x and h by learned vectors"),
    "init_factor": Option(
        float, low=1e-9, high=1e3, meaning="factor on the variance of the initial weights"
    ),
    "cap_input_gate": Option(bool, meaning="use min(i, 1 - f) as input gate, as in lamb"),
    "tied_gates": Option(bool, meaning="use 1 - f as input gate"),
    "layer_norm": Option(bool, meaning="layer normalisation inside the cell"),
    "cell_clip": Option(float, low=1e-9, high=1e6, meaning="clip c to [-cell_clip, cell_clip]"),
    "forget_bias": Option(
        float, low=-1e3, high=1e3, meaning="mean initial bias of the forget gate"
    ),
    "chrono_max": Option(
        float,
        low=2.0,
        high=1e9,
        meaning="chrono initialisation of that bias: the longest memory, in steps",
    ),
    "gate_rank": Option(
        int, low=0, high=10**6, meaning="factorise the gate matrix with this rank; 0 is full rank"
    ),
    "zoneout": Option(
        float, low=0.0, high=1.0, meaning="probability that an element of the state keeps its value"
    ),
}
# The fields of a cell that are functions of its equations.
FUNCTIONS = ("gate_fn", "activation_fn")
# The arguments of all cells, for their docstrings here and in `nnx.py`.
ARGUMENTS = {
    "gate_fn": "the function of the gates; the gates of the rounds are always sigmoids.",
    "activation_fn": "the function of the candidate, and of c where the output reads it.",
    "kernel_init": "draws the matrix [D, H] of each gate that multiplies x; None is lamb's "
    "truncated normal. The rounds have their own initial values.",
    "recurrent_kernel_init": "draws the matrix [H, H] of each gate that multiplies h; None is "
    "lamb's truncated normal.",
    "bias_init": "draws the bias [H] of each gate; None is lamb's truncated normal, around "
    "forget_bias for the forget gate.",
    "dtype": "the dtype of the computation; None promotes the dtypes of inputs and parameters.",
    "param_dtype": "the dtype of the parameters.",
    "carry_init": "draws the parts of the initial carry; zeros by default.",
    **{name: f"{option.meaning}." for name, option in OPTIONS.items()},
}


def describe_arguments(names: Iterable[str]) -> str:
    """The section "Args" of a docstring."""
    lines = (
        textwrap.fill(
            f"{name}: {ARGUMENTS[name]}", 88, initial_indent="  ", subsequent_indent=" " * 4
        )
        for name in names
        if name in ARGUMENTS
    )
    return "\n".join(("Args:", *lines))


def refuse_unknown(init: Callable[..., None]) -> Callable[..., None]:
    """Lets an __init__ refuse keywords that it does not have with a sentence."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        unknown = [name for name in options if name not in known]
        if unknown:
            size = "; the size is called features, as in Flax" if "hidden_size" in unknown else ""
            raise errors.UsageError(
                f"{type(self).__name__} has no argument {', '.join(unknown)}{size}; it has "
                f"{', '.join(known)}"
            )
        init(self, *args, **options)

    return checked


def has_standard_step(cell: type, base: type) -> bool:
    """Whether a class is a cell of this package whose step no subclass has overridden."""
    return issubclass(cell, base) and cell.__call__ is base.__call__


def truncated_normal(fan: int, factor: float = 1.0, mean: float = 0.0) -> Initializer:
    """lamb's initialiser of cells: deviation sqrt(1.3 factor / fan), cut at two deviations."""
    draw = nn.initializers.truncated_normal(math.sqrt(1.3 * factor / fan))
    return lambda key, shape, dtype: mean + draw(key, shape, dtype)


def draw_each_gate(
    init: Initializer, key: Array, shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "*I G H"]:
    """Draws the parameters of all gates by calling `init` for each of them, as Flax does."""
    *inputs, gates, hidden = shape
    keys = jax.random.split(key, gates)
    return jnp.stack([init(key, (*inputs, hidden), dtype) for key in keys], -2)


def chrono(longest: float) -> Initializer:
    """Chrono initialisation (arXiv:1804.11188) of forget biases: ln u, u uniform in [1, T - 1).

    A gate with such a bias forgets in the course of u steps, so memories last up to T = `longest`.
    """

    def draw(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, max(1.0, longest - 1.0)))

    return draw


class Cell(nn.RNNCellBase):
    """The base class of all cells: rounds of gating, parameters, carry."""

    features: int
    gate_fn: cells.Function = jax.nn.sigmoid
    activation_fn: cells.Function = jnp.tanh
    kernel_init: Initializer | None = None
    recurrent_kernel_init: Initializer | None = None
    bias_init: Initializer | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    carry_init: Initializer = nn.initializers.zeros
    rounds: int = 0
    rank: int = 0
    zigzag: bool = True
    gate_bias: bool = True
    scaling: bool = False
    init_factor: float = 1.0

    state_type: ClassVar[type[cells.State]] = cells.Carry

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = [field.name for field in dataclasses.fields(cls)]
        summary = inspect.cleandoc(cls.__doc__ or "")
        cls.__doc__ = f"{summary}\n\n{describe_arguments(names)}\n"
        cls.__init__ = refuse_unknown(cls.__init__)  # type: ignore[method-assign]

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

    @nn.nowrap
    def initialize_carry(self, rng: Array | None, input_shape: tuple[int, ...]) -> CarryLike:
        """The carry that a sequence starts from: `LSTMCarry(c, h)`, or h of a GRU or Elman cell.

        Args:
          rng: a key for `carry_init`; it may be None for the default, zeros.
          input_shape: the shape of x, (*B, D).
        """
        check(
            rng is not None or self.carry_init is nn.initializers.zeros,
            "carry_init needs a key; give one, as in initialize_carry(jax.random.key(0), shape)",
        )
        shape = (*input_shape[:-1], self.features)
        dtype = self.param_dtype if self.dtype is None else self.dtype
        names = self.state_type._fields
        keys: Any = [rng]
        if len(names) > 1:
            keys = [None] * len(names) if rng is None else jax.random.split(rng, len(names))
        drawn = [self.carry_init(key, shape, self.param_dtype) for key in keys]
        return self.to_carry(cells.cast_state(self.state_type(*drawn), dtype))

    @nn.nowrap
    def to_carry(self, state: cells.State) -> CarryLike:
        """The state in the form that users see, as Flax's cell of the same kind has it."""
        return state.h if isinstance(state, cells.Carry) else state

    @nn.nowrap
    def to_state(self, carry: CarryLike, dtype: DTypeLike) -> cells.State:
        """The state of a carry that `check_carry` accepts, in the dtype of the computation."""
        return cells.cast_state(self.state_type(*map(jnp.asarray, jax.tree.leaves(carry))), dtype)

    @nn.nowrap
    def check_carry(self, carry: Any, input_shape: tuple[int, ...]) -> None:
        """Refuses a carry that is not one for inputs of this shape; any float dtype is one.

        A tuple (c, h) is a carry of an LSTM, and a `cells.State` is one as well.
        """
        check(
            len(input_shape) >= 1 and input_shape[-1] >= 1,
            f"an input of shape {tuple(input_shape)} has no features; give x [..., features]",
        )
        leaves = jax.tree.leaves(carry)
        check(
            bool(leaves) and all(is_numeric(leaf) for leaf in leaves),
            f"initial_carry {errors.show(carry)} is not a carry; make one with "
            "initialize_carry(key, input_shape)",
        )
        parts = carry if isinstance(carry, tuple | list) else (carry,)
        names, shape = self.state_type._fields, (*input_shape[:-1], self.features)
        if (
            len(parts) == len(leaves) == len(names)
            and all(jnp.shape(leaf) == shape for leaf in leaves)
            and all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
        ):
            return
        given = jax.tree.map(lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}", carry)
        needed = f"an array of floats {list(shape)}"
        if len(names) > 1:
            needed = f"{self.state_type.__name__}({', '.join(names)}), floats {list(shape)} each"
        raise errors.UsageError(
            f"carry {given} does not fit an input of shape {tuple(input_shape)}: this cell needs "
            f"{needed}; make one with initialize_carry(key, input_shape)"
        )

    @nn.nowrap
    def computation_dtype(self, x: Real[Array, "..."], weights: cells.Params) -> np.dtype:
        """The dtype of the matmuls: `dtype`, or what x and the parameters promote to."""
        if self.dtype is not None:
            return jnp.dtype(self.dtype)
        return jnp.dtype(dtypes.canonicalize_dtype(x, *jax.tree.leaves(weights)))

    def __call__(
        self, carry: CarryLike, x: Real[Array, "*B D"], **extras: Array
    ) -> tuple[CarryLike, Float[Array, "*B H"]]:
        """One step, from the carry and x to the new carry and h."""
        check(hasattr(x, "shape"), f"x {errors.show(x)} must be an array [..., features]")
        self.check_carry(carry, x.shape)
        weights = self.weights(x.shape[-1])
        dtype = self.computation_dtype(x, weights)
        params, state = taps.cast_matrices(weights, dtype), self.to_state(carry, dtype)
        state, _ = self.cell(params, state, x.astype(dtype), **extras)
        return self.to_carry(state), state.h

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
    def cell(self) -> Callable[..., tuple[cells.State, cells.Gates]]:
        """The function of `cells.py` with the options of this cell."""
        raise NotImplementedError

    @nn.nowrap
    def pick(self, *names: str) -> dict[str, Any]:
        """The values of these fields."""
        return {name: getattr(self, name) for name in names}

    @property
    def masks(self) -> dict[str, float]:
        """Masks that each step of training takes: how likely an element is True, by keyword."""
        return {}

    def init_gates(self, key: Array, input_size: int) -> dict[str, Array]:
        """Draws each matrix by the size of its own input; biases are random, as in lamb."""
        of_input, of_recurrent, of_bias = jax.random.split(key, 3)
        hidden, gates, dtype = self.features, self.num_gates, self.param_dtype
        draw_input = self.draw_gates(self.kernel_init, input_size)
        draw_recurrent = self.draw_gates(self.recurrent_kernel_init, hidden)
        draw_bias = self.draw_gates(self.bias_init, hidden)
        return {
            "input": draw_input(of_input, (input_size, gates, hidden), dtype),
            "recurrent": draw_recurrent(of_recurrent, (hidden, gates, hidden), dtype),
            "bias": draw_bias(of_bias, (gates, hidden), dtype),
        }

    def draw_gates(self, init: Initializer | None, fan: int) -> Initializer:
        """An initialiser of parameters [..., G, H]: lamb's, or `init` for each gate."""
        if init is None:
            return truncated_normal(fan, self.init_factor)
        return functools.partial(draw_each_gate, init)

    def init_scaling(self, key: Array, input_size: int) -> dict[str, Array]:
        """Ones, which change nothing."""
        del key
        return {
            "x": jnp.ones(input_size, self.param_dtype),
            "h": jnp.ones(self.features, self.param_dtype),
        }

    def init_round(self, key: Array, input_size: int, index: int) -> dict[str, Array]:
        """Draws the map of one round: from h to x in odd rounds, from x to h in even ones."""
        sizes = (self.features, input_size) if index % 2 else (input_size, self.features)
        return init_map(key, *sizes, self.rank, self.gate_bias, self.init_factor, self.param_dtype)

    def check_input_size(self, input_size: int) -> None:
        """Refuses inputs of another size than the existing parameters are for."""
        if not self.has_variable("params", "gates"):
            return
        gates: Any = self.get_variable("params", "gates")
        if "input" in gates:
            size = gates["input"].shape[0]
        else:
            size = gates["down"].shape[0] - self.features
        check(
            input_size == size,
            f"x has {input_size} features and the parameters are for {size}; give x of that "
            "size, or initialise parameters for this one",
        )


class MogrifierLSTMCell(Cell):
    """LSTM whose x and h gate each other first (arXiv:1909.01792); with 0 rounds it is an LSTM.

    >>> cell = MogrifierLSTMCell(features=8, rounds=5, rank=3)
    >>> init = jax.jit(nn.RNN(cell).init_with_output)
    >>> ys, variables = init(jax.random.key(0), jnp.ones((2, 7, 4)))
    >>> ys.shape
    (2, 7, 8)
    """

    rounds: int = 5
    cap_input_gate: bool = True
    tied_gates: bool = False
    layer_norm: bool = False
    cell_clip: float | None = None
    forget_bias: float = 1.0
    chrono_max: float | None = None
    gate_rank: int = 0
    zoneout: float = 0.0

    state_type = cells.LSTMCarry

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            not (self.layer_norm and self.gate_rank > 0),
            f"gate_rank {self.gate_rank} and layer_norm exclude each other; set one of them off",
        )
        check(
            self.gate_rank <= 0 or (self.kernel_init or self.recurrent_kernel_init) is None,
            f"gate_rank {self.gate_rank} makes the gate matrix a product of two factors, which "
            "kernel_init and recurrent_kernel_init cannot draw; leave them out, or set gate_rank=0",
        )
        check_forget_bias(self)

    @property
    def num_gates(self) -> int:
        """The blocks are j, o, f and i; with tied gates there is no i."""
        return 3 if self.tied_gates else 4

    @property
    def cell(self) -> Callable[..., tuple[cells.State, cells.Gates]]:
        """`cells.lstm` with the options of this cell."""
        switches = ("zigzag", "cap_input_gate", "tied_gates", "cell_clip", "zoneout")
        return functools.partial(cells.lstm, **self.pick(*switches, *FUNCTIONS))

    @property
    def masks(self) -> dict[str, float]:
        """What zoneout leaves as it was."""
        return dict.fromkeys(("zone_c", "zone_h"), self.zoneout) if self.zoneout else {}

    @nn.compact
    def weights(self, input_size: int) -> dict[str, Any]:
        """Declares the parameters; returns them in the form `cells` reads."""
        params = super().weights(input_size)
        if self.layer_norm:
            params["cell_norm"] = self.param("cell_norm", self.init_cell_norm)
        return params

    def init_gates(self, key: Array, input_size: int) -> dict[str, Array]:
        """As the base class; also shifts the forget gate's bias, and knows the variants."""
        params = super().init_gates(key, input_size)
        bias = params.pop("bias")
        if self.bias_init is None:
            bias = bias.at[2].add(self.forget_bias)
        if self.chrono_max is not None:
            draw, of_forget = chrono(self.chrono_max), jax.random.fold_in(key, 3)
            bias = bias.at[2].set(draw(of_forget, bias.shape[1:], bias.dtype))
        if self.layer_norm:
            ones = jnp.ones_like(bias)
            return {**params, "input_gain": ones, "recurrent_gain": ones, "shift": bias}
        if self.gate_rank > 0:
            sizes = (input_size + self.features, bias.size)
            factors = init_map(key, *sizes, self.gate_rank, False, 1.0, self.param_dtype)
            up = factors["up"].reshape(self.gate_rank, *bias.shape)
            return {"down": factors["down"], "up": up, "bias": bias}
        return {**params, "bias": bias}

    def init_cell_norm(self, key: Array) -> dict[str, Array]:
        """The gain and the shift of the normalised c."""
        del key
        ones = jnp.ones(self.features, self.param_dtype)
        return {"gain": ones, "shift": jnp.zeros_like(ones)}


class LSTMCell(MogrifierLSTMCell):
    """The LSTM of the paper's baselines: capped input gate, random biases.

    >>> cell = LSTMCell(features=8)
    >>> carry = cell.initialize_carry(None, (2, 4))  # For x [2, 4].
    >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, jnp.ones((2, 4)))
    >>> y.shape, carry.c.shape
    ((2, 8), (2, 8))
    """

    rounds: int = 0


class MLSTMCell(MogrifierLSTMCell):
    """Multiplicative LSTM (arXiv:1609.07959), the Mogrifier's closest relative.

    >>> xs = jnp.ones((2, 7, 4))
    >>> rnn = nn.RNN(MLSTMCell(features=8), return_carry=True)
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

    def init_product(self, key: Array, input_size: int) -> dict[str, Array]:
        """Draws the matrices of the two factors of h_m."""
        of_input, of_recurrent = jax.random.split(key)
        hidden, factor, dtype = self.features, self.init_factor, self.param_dtype
        draw_input = self.kernel_init or truncated_normal(input_size, factor)
        draw_recurrent = self.recurrent_kernel_init or truncated_normal(hidden, factor)
        return {
            "input": draw_input(of_input, (input_size, hidden), dtype),
            "recurrent": draw_recurrent(of_recurrent, (hidden, hidden), dtype),
        }


class RewiredLSTMCell(Cell):
    """Rewired LSTM (arXiv:2211.01848) whose x and h gate each other first; 0 rounds: without that.

    The forget gate reads the proposed update i ⊙ j and h, and the output gate reads the new c.

    >>> cell = RewiredLSTMCell(features=8, rounds=5, rank=3)
    >>> init = jax.jit(nn.RNN(cell).init_with_output)
    >>> ys, variables = init(jax.random.key(0), jnp.ones((2, 7, 4)))
    >>> variables["params"]["cell"]["forget"]["kernel"].shape
    (16, 8)
    """

    rounds: int = 5
    forget_bias: float = 1.0
    chrono_max: float | None = None

    state_type = cells.LSTMCarry
    num_gates = 2  # The blocks are i and j; the other gates have matrices of their own.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_forget_bias(self)

    @property
    def cell(self) -> Callable[..., tuple[cells.State, cells.Gates]]:
        """`cells.rewired_lstm` with the options of this cell."""
        return functools.partial(cells.rewired_lstm, **self.pick("zigzag", *FUNCTIONS))

    @nn.compact
    def weights(self, input_size: int) -> dict[str, Any]:
        """Declares the parameters; returns them in the form `cells` reads."""
        params = super().weights(input_size)
        hidden = self.features
        output = self.bias_init or truncated_normal(hidden, self.init_factor)
        forget = self.bias_init or truncated_normal(hidden, self.init_factor, self.forget_bias)
        if self.chrono_max is not None:
            forget = chrono(self.chrono_max)
        params["forget"] = self.param("forget", self.init_gate, 2, forget)
        params["output"] = self.param("output", self.init_gate, 1, output)
        return params

    def init_gate(self, key: Array, states: int, draw_bias: Initializer) -> dict[str, Array]:
        """Draws a gate that reads so many states; the deviation is that for H inputs.

        The rows of the forget gate's matrix are those of i ⊙ j, then those of h.
        """
        of_kernel, of_bias = jax.random.split(key)
        hidden, dtype = self.features, self.param_dtype
        if self.recurrent_kernel_init is None:
            draw = truncated_normal(hidden, self.init_factor)
            kernel = draw(of_kernel, (states * hidden, hidden), dtype)
        else:
            keys = jax.random.split(of_kernel, states)
            shape = (hidden, hidden)
            kernel = jnp.concatenate([self.recurrent_kernel_init(k, shape, dtype) for k in keys])
        return {"kernel": kernel, "bias": draw_bias(of_bias, (hidden,), dtype)}


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
    def cell(self) -> Callable[..., tuple[cells.State, cells.Gates]]:
        """`cells.gru` with the options of this cell."""
        return functools.partial(cells.gru, **self.pick("zigzag", *FUNCTIONS))

    def init_gates(self, key: Array, input_size: int) -> dict[str, Array]:
        """As the base class, and a bias that the reset gate multiplies."""
        draw = self.bias_init or nn.initializers.zeros
        candidate_bias = draw(jax.random.fold_in(key, 3), (self.features,), self.param_dtype)
        return {**super().init_gates(key, input_size), "candidate_bias": candidate_bias}


class GRUCell(MogrifierGRUCell):
    """GRU: `MogrifierGRUCell` without rounds, which computes what `nn.GRUCell` computes.

    >>> cell = GRUCell(features=8)
    >>> carry = cell.initialize_carry(None, (2, 4))  # For x [2, 4].
    >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, jnp.ones((2, 4)))
    >>> y.shape, carry.shape
    ((2, 8), (2, 8))
    """

    rounds: int = 0


class MogrifierElmanCell(Cell):
    """Elman network whose x and h gate each other first.

    >>> rnn = nn.RNN(MogrifierElmanCell(features=8, rounds=2, dtype=jnp.bfloat16))
    >>> ys, variables = jax.jit(rnn.init_with_output)(jax.random.key(0), jnp.ones((2, 7, 4)))
    >>> ys.dtype
    dtype(bfloat16)
    """

    rounds: int = 5

    num_gates = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.gate_fn is jax.nn.sigmoid,
            f"{type(self).__name__} has no gates that gate_fn could change; leave it out, or use "
            "activation_fn",
        )

    @property
    def cell(self) -> Callable[..., tuple[cells.State, cells.Gates]]:
        """`cells.elman` with the options of this cell."""
        return functools.partial(cells.elman, **self.pick("zigzag", "activation_fn"))


class ElmanCell(MogrifierElmanCell):
    """Elman network: `MogrifierElmanCell` without rounds, which is `nn.SimpleCell`.

    >>> xs = jnp.ones((2, 7, 4))
    >>> rnn = nn.RNN(ElmanCell(features=8), return_carry=True)
    >>> (carry, ys), variables = jax.jit(rnn.init_with_output)(jax.random.key(0), xs)
    >>> carry.shape
    (2, 8)
    """

    rounds: int = 0


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
    known = isinstance(name, str) and name in CELLS
    check(known, f"cell {errors.show(name)} is not known; use one of {', '.join(CELLS)}")
    return CELLS[name]


class Mogrifier(nn.Module):
    """The gating alone, for any two vectors x and h: from (x, h) to (x, h).

    >>> x, h = jnp.ones((2, 4)), jnp.ones((2, 8))
    >>> (x, h), variables = Mogrifier(rounds=4).init_with_output(jax.random.key(0), x, h)
    >>> x.shape, h.shape
    ((2, 4), (2, 8))
    """

    rounds: int = 5
    rank: int = 0
    zigzag: bool = True
    gate_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: Real[Array, "*B D"], h: Real[Array, "*B H"]
    ) -> tuple[Float[Array, "*B D"], Float[Array, "*B H"]]:
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
        leaves = jax.tree.leaves(rounds)
        dtype = jnp.dtype(dtypes.canonicalize_dtype(x, h, *leaves, dtype=self.dtype))
        weights = taps.cast_matrices(rounds, dtype)
        return cells.mogrify(weights, x.astype(dtype), h.astype(dtype), self.zigzag)[:2]


def init_map(
    key: Array,
    size_in: int,
    size_out: int,
    rank: int,
    bias: bool,
    factor: float,
    dtype: DTypeLike,
) -> dict[str, Array]:
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


def is_numeric(leaf: object) -> bool:
    """Whether it is an array of numbers."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.number))


def check_fields(cell: Cell | Mogrifier) -> None:
    """Refuses options outside their limits, and dtypes and functions that are something else."""
    model_options.check(cell, *OPTIONS, declared=OPTIONS)
    for field in dataclasses.fields(cell):
        name, value = field.name, getattr(cell, field.name)
        if name in ("dtype", "param_dtype"):
            good = _is_floating(value) or (value is None and field.default is None)
            rule = "a dtype of floating point"
        elif name in FUNCTIONS or name.endswith("_init"):
            good, rule = callable(value) or value is field.default, "a function"
        else:
            continue
        if not good:
            raise errors.UsageError(f"{name} {errors.show(value)} must be {rule}")


def check_forget_bias(cell: MogrifierLSTMCell | RewiredLSTMCell) -> None:
    """Refuses two ways of drawing the bias of the forget gate."""
    fields = {field.name: field for field in dataclasses.fields(cell)}
    for name in ("forget_bias", "chrono_max"):
        value = getattr(cell, name)
        check(
            cell.bias_init is None or value == fields[name].default,
            f"{name} {value} and bias_init exclude each other: bias_init draws the bias of the "
            "forget gate, too; leave one of them out",
        )


def _is_floating(dtype: Any) -> bool:
    if dtype is None:  # NumPy takes it for float64.
        return False
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False

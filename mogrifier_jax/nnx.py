"""The cells and the fast RNN for Flax NNX: thin wrappers around the modules of linen.

    cell = mogrifier_jax.nnx.MogrifierLSTMCell(32, 64, rounds=5, rank=16, rngs=nnx.Rngs(0))
    ys = mogrifier_jax.nnx.RNN(cell)(xs)  # [batch, time, 32] to [batch, time, 64]

A wrapper holds the parameters, as `nnx.Param`s under their names in linen, and a linen module
without parameters, which makes the initial values and computes the results. Initial values and
equations are therefore written once, and `nnx.to_pure_dict(nnx.state(cell))` is the `params` of the
linen cell.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Integer, PyTree, Real, Shaped

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, from_flax, layers, meshes, rnn, step_by_step

__all__ = [
    "RNN",
    "ElmanCell",
    "GRUCell",
    "LSTMCell",
    "MLSTMCell",
    "Mogrifier",
    "MogrifierElmanCell",
    "MogrifierGRUCell",
    "MogrifierLSTMCell",
    "RewiredLSTMCell",
]


def _check_features(name: str, size: object) -> None:
    whole = isinstance(size, int) and not isinstance(size, bool) and 1 <= size < 2**31
    errors.check(
        whole, f"{name} {errors.show(size)} must be a whole number, at least 1 and below 2**31"
    )


# Fields of linen modules that are not options of the modules here.
_NOT_OPTIONS = ("features", "parent", "name")
_ARGUMENTS = """Args:
  in_features: the number of features of the inputs, D.
  hidden_features: the number of hidden units, H, which is also the size of the output.
  rngs: the streams of random numbers; "params" draws the parameters.
  metadata: the metadata of parameters, by path, such as
    `{"gates/input": {"out_sharding": (None, None, "model")}}`."""


def _signature(fields: list[dataclasses.Field]) -> inspect.Signature:
    """The signature of a module with these fields as options, in the order of Flax's cells."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    sizes = ("in_features", "hidden_features")
    return inspect.Signature(
        [
            *(inspect.Parameter(name, kinds[0], annotation=int) for name in sizes),
            *(
                inspect.Parameter(f.name, kinds[1], default=f.default, annotation=f.type)
                for f in fields
            ),
            inspect.Parameter("rngs", kinds[1], annotation=nnx.Rngs),
            inspect.Parameter("metadata", kinds[1], default=None),
        ]
    )


class _Wrapper(nnx.Module):
    """An NNX module with the parameters of a linen module, which is `spec`."""

    spec: Any
    linen: Any  # The class of `spec`.

    def __init_subclass__(cls, **options: Any) -> None:
        """Gives the class the signature and the arguments' descriptions of its linen class."""
        super().__init_subclass__(**options)
        if hasattr(cls, "linen"):
            fields = [f for f in dataclasses.fields(cls.linen) if f.name not in _NOT_OPTIONS]
            cls.__signature__ = _signature(fields)  # type: ignore[attr-defined]
            described = layers.describe_arguments(field.name for field in fields)
            described = described.replace("Args:", _ARGUMENTS, 1)
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{described}\n"

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        *,
        rngs: nnx.Rngs,
        metadata: Mapping[str, Mapping[str, Any]] | None = None,  # By path, as "gates/input".
        **options: Any,
    ):
        known = inspect.signature(type(self)).parameters
        unknown = [name for name in options if name not in known]
        if unknown:
            size = "the size is called hidden_features, as in Flax; " * ("hidden_size" in unknown)
            raise errors.UsageError(
                f"{type(self).__name__} has no argument {', '.join(unknown)}; {size}it has "
                f"{', '.join(known)}"
            )
        _check_features("in_features", in_features)
        _check_features("hidden_features", hidden_features)
        self.in_features = in_features
        self.hidden_features = hidden_features
        params = self.init_linen(rngs.params(), options).get("params", {})
        metadata = metadata or {}
        misplaced = metadata.keys() - {
            f"{g}/{name}" for g, group in params.items() for name in group
        }
        if misplaced:
            raise errors.UsageError(
                f"metadata for {', '.join(sorted(misplaced))}, which is not a parameter of this "
                f"{type(self).__name__}; its groups are {', '.join(params)}"
            )
        self.groups = tuple(params)
        for group, leaves in params.items():
            held = {
                name: nnx.Param(leaf, **metadata.get(f"{group}/{name}", {}))
                for name, leaf in leaves.items()
            }
            setattr(self, group, nnx.Dict(held))

    def init_linen(self, key: Array, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sets `spec` to a linen module with these options, and returns its variables."""
        raise NotImplementedError

    def params(self) -> dict[str, dict[str, Array]]:
        """The parameters as a dict, in the form that linen takes."""
        return {
            group: {name: leaf[...] for name, leaf in getattr(self, group).items()}
            for group in self.groups
        }


_INITIALISERS = ("kernel_init", "recurrent_kernel_init", "bias_init")


class WrappedCell(_Wrapper, nnx.RNNCellBase):
    """The base class of all cells. `options` are the fields of the linen cell of the same name."""

    def init_linen(self, key: Array, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes the linen cell and its weights."""
        cell = self.linen(self.hidden_features, **options, parent=None)
        # What draws the weights is not kept: cells that differ in nothing else are the same graph,
        # so that they share compiled programs.
        defaults = {f.name: f.default for f in dataclasses.fields(cell) if f.name in _INITIALISERS}
        self.spec = cell.clone(parent=None, **defaults)
        return cell.init(key, self.in_features, method="weights")

    def __call__(
        self, carry: layers.CarryLike, inputs: Real[Array, "*B D"]
    ) -> tuple[layers.CarryLike, Float[Array, "*B H"]]:
        """One step, from the carry and the inputs x to the new carry and h."""
        return self.spec.apply({"params": self.params()}, carry, inputs)

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        carry_init: layers.Initializer | None = None,
    ) -> layers.CarryLike:
        """The carry that a sequence starts from: `LSTMCarry(c, h)`, or h of a GRU or Elman cell.

        Args:
          input_shape: the shape of the inputs, [..., in_features].
          rngs: the streams, or the stream, that `carry_init` draws from.
          carry_init: draws the carry instead of the cell's own `carry_init`, which is zeros.
        """
        cell = self.spec if carry_init is None else self.spec.clone(carry_init=carry_init)
        return cell.initialize_carry(_carry_key(cell, rngs), input_shape)

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of the inputs that are not batch axes."""
        return 1


def _carry_key(cell: layers.Cell, rngs: nnx.Rngs | nnx.RngStream | None) -> Array | None:
    """A key for the `carry_init` of a linen cell; None if it draws nothing."""
    if cell.carry_init is jax.nn.initializers.zeros:
        return None
    stream = _stream(rngs, "carry") if isinstance(rngs, nnx.Rngs) else rngs
    if stream is None:
        raise errors.UsageError(
            "carry_init needs random numbers: give rngs=nnx.Rngs(carry=0), or a stream of it"
        )
    return stream()


def _stream(rngs: nnx.Rngs, name: str) -> nnx.RngStream | None:
    """The stream of this name, or the default one; None if there is neither."""
    return getattr(rngs, name) if name in rngs or "default" in rngs else None


class MogrifierLSTMCell(WrappedCell):
    """LSTM whose x and h gate each other first (arXiv:1909.01792); 0 rounds is the LSTM.

    >>> cell = MogrifierLSTMCell(4, 8, rounds=5, rank=3, rngs=nnx.Rngs(0))
    >>> carry, y = cell(cell.initialize_carry((2, 4)), jax.numpy.ones((2, 4)))
    >>> y.shape, carry.c.shape
    ((2, 8), (2, 8))
    """

    linen = layers.MogrifierLSTMCell


class LSTMCell(WrappedCell):
    """The LSTM of the paper's baselines: capped input gate, random biases.

    >>> cell = LSTMCell(4, 8, rngs=nnx.Rngs(0))
    >>> (c, h), y = cell(cell.initialize_carry((2, 4)), jax.numpy.ones((2, 4)))
    >>> c.shape, bool((h == y).all())
    ((2, 8), True)
    """

    linen = layers.LSTMCell


class MLSTMCell(WrappedCell):
    """Multiplicative LSTM (arXiv:1609.07959), the Mogrifier's closest relative.

    >>> rnn = RNN(MLSTMCell(4, 8, rank=3, rngs=nnx.Rngs(0)))
    >>> nnx.jit(rnn)(jax.numpy.ones((2, 7, 4))).shape  # [batch, time, features]
    (2, 7, 8)
    """

    linen = layers.MLSTMCell


class RewiredLSTMCell(WrappedCell):
    """Rewired LSTM (arXiv:2211.01848) whose x and h gate each other first.

    >>> rnn = RNN(RewiredLSTMCell(4, 8, rounds=2, rngs=nnx.Rngs(0)), return_carry=True)
    >>> (c, h), ys = nnx.jit(rnn)(jax.numpy.ones((2, 7, 4)))
    >>> c.shape, ys.shape
    ((2, 8), (2, 7, 8))
    """

    linen = layers.RewiredLSTMCell


class MogrifierGRUCell(WrappedCell):
    """GRU whose x and h gate each other first.

    >>> rnn = RNN(MogrifierGRUCell(4, 8, rounds=1, rngs=nnx.Rngs(0)), time_major=True)
    >>> nnx.jit(rnn)(jax.numpy.ones((7, 2, 4))).shape  # [time, batch, features]
    (7, 2, 8)
    """

    linen = layers.MogrifierGRUCell


class GRUCell(WrappedCell):
    """GRU, which computes what Flax's GRU computes; its carry is h.

    >>> cell = GRUCell(4, 8, rngs=nnx.Rngs(0))
    >>> h, y = cell(cell.initialize_carry((2, 4)), jax.numpy.ones((2, 4)))
    >>> h.shape, bool((h == y).all())
    ((2, 8), True)
    """

    linen = layers.GRUCell


class MogrifierElmanCell(WrappedCell):
    """Elman network whose x and h gate each other first.

    >>> cell = MogrifierElmanCell(4, 8, rounds=2, dtype=jax.numpy.bfloat16, rngs=nnx.Rngs(0))
    >>> h, y = cell(cell.initialize_carry((2, 4)), jax.numpy.ones((2, 4)))
    >>> y.shape, y.dtype.name
    ((2, 8), 'bfloat16')
    """

    linen = layers.MogrifierElmanCell


class ElmanCell(WrappedCell):
    """Elman network, which computes what `nnx.SimpleCell` computes; its carry is h.

    >>> cell = ElmanCell(4, 8, rngs=nnx.Rngs(0))
    >>> h, y = cell(cell.initialize_carry((4,)), jax.numpy.ones(4))  # Without a batch.
    >>> y.shape
    (8,)
    """

    linen = layers.ElmanCell


class Mogrifier(_Wrapper):
    """The gating alone, for any two vectors x and h: from (x, h) to (x, h).

    >>> x, h = Mogrifier(4, 8, rounds=4, rngs=nnx.Rngs(0))(jax.numpy.ones(4), jax.numpy.ones(8))
    >>> x.shape, h.shape
    ((4,), (8,))
    """

    linen = layers.Mogrifier

    def init_linen(self, key: Array, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes the linen module and the weights of all rounds."""
        self.spec = self.linen(**options, parent=None)
        sizes = (self.in_features, self.hidden_features)
        return self.spec.init(key, *(jax.numpy.zeros(size, self.spec.dtype) for size in sizes))

    def __call__(
        self, x: Real[Array, "*B D"], h: Real[Array, "*B H"]
    ) -> tuple[Float[Array, "*B D"], Float[Array, "*B H"]]:
        """Returns x and h; the gates of each read the other."""
        return self.spec.apply({"params": self.params()}, x, h)


def _fork(rngs: nnx.Rngs, name: str) -> Any:
    """A stream that is forked from that of this name; None, as data of a module, without one."""
    stream = _stream(rngs, name)
    return nnx.data(None) if stream is None else stream.fork()


def _show_arguments(cls: type) -> None:
    """Gives a class the signature of its __init__, which the metaclass of NNX hides."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


class RNN(nnx.Module):
    """`nnx.RNN` with a fast backward pass; arguments and results are the same.

    >>> rnn = RNN(MogrifierLSTMCell(4, 8, rngs=nnx.Rngs(0)))
    >>> nnx.jit(rnn)(jax.numpy.ones((2, 7, 4))).shape  # [batch, time, features]
    (2, 7, 8)

    Flax's own LSTM, GRU and simple cell are fast too; other cells run step by step.

    Args:
      cell: a cell of this package or of NNX. What follows it up to `rngs` is as in `nnx.RNN`.
      rngs: the streams "carry", for a cell with `carry_init`, and "dropout", for masks.
      fast, remat_window, state_dropout: as in `mogrifier_jax.RNN`.
      deterministic: whether masks are left out; `eval()` sets it.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _show_arguments(cls)

    def __init__(
        self,
        cell: Any,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Mapping[Any, int | type[nnx.Carry] | None] | None = None,
        broadcast_rngs: nnx.filterlib.Filter = None,
        rngs: nnx.Rngs | nnx.RngStream | bool = True,
        fast: bool = True,
        remat_window: int | None = None,
        state_dropout: float = 0.0,
        deterministic: bool = False,
    ):
        rnn.check_cell(cell, "nnx")
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        self.state_axes = state_axes
        self.broadcast_rngs = broadcast_rngs
        errors.check(
            isinstance(rngs, nnx.Rngs | nnx.RngStream | bool),
            f"rngs {errors.show(rngs)} must be nnx.Rngs, an nnx.RngStream, True or False",
        )
        # For the initial carry. Cells of this package that start from zeros get no stream: in its
        # tree mode NNX differentiates by all that a module has, and a stream has integers.
        carry_init = cell.spec.carry_init if isinstance(cell, WrappedCell) else None
        draws = carry_init is not jax.nn.initializers.zeros
        self.rngs = nnx.data(None)
        if isinstance(rngs, nnx.Rngs):
            self.rngs = _fork(rngs, "carry")
        elif isinstance(rngs, nnx.RngStream):
            self.rngs = rngs
        elif rngs and draws:
            self.rngs = nnx.RngStream(0, tag="carry")
        self.fast = fast
        self.remat_window = remat_window
        self.state_dropout = state_dropout
        self.deterministic = deterministic
        self.dropout_rngs = nnx.data(None)
        if isinstance(rngs, nnx.Rngs):
            self.dropout_rngs = _fork(rngs, "dropout")

    def __call__(
        self,
        inputs: Real[Array, "..."],
        *,
        initial_carry: PyTree[Array] = None,
        seq_lengths: Integer[ArrayLike, "*B"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        deterministic: bool | None = None,
        resets: Shaped[ArrayLike, "..."] | None = None,
    ) -> Any:
        """Runs the cell over sequences, with the arguments of `nnx.RNN` and two more.

        Args:
          inputs: [..., time, features], or [time, ..., features] if `time_major`.
          deterministic, resets: as in `mogrifier_jax.RNN`.

        Returns:
          the outputs [..., time, hidden]; (carry, outputs) if `return_carry`.
        """
        given = dict(
            initial_carry=initial_carry,
            seq_lengths=rnn.check_sequences(self.cell, inputs, seq_lengths, "nnx"),
            return_carry=return_carry,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
        )
        carry_rngs = self.rngs if rngs is None else rngs
        counterpart = self.in_linen()
        if counterpart is None:
            if resets is not None:
                return self.run_step_by_step(inputs, resets, carry_rngs, **given)
            self.plan_steps(inputs, None, **given)
            ours = isinstance(self.cell, WrappedCell)
            if isinstance(initial_carry, cells.LSTMCarry) and not ours:
                given["initial_carry"] = tuple(initial_carry)  # What Flax's LSTM returns.
            return self.in_flax()(inputs, rngs=carry_rngs, **given)
        names = ("time_major", "return_carry", "reverse", "keep_order", "unroll", "fast")
        options = {name: getattr(self, name) for name in (*names, "remat_window", "state_dropout")}
        deterministic = self.deterministic if deterministic is None else deterministic
        module = rnn.RNN(counterpart.cell, **options, deterministic=deterministic, parent=None)
        keys = {}
        if module.draws(None):
            stream = _stream(rngs, "dropout") if isinstance(rngs, nnx.Rngs) else self.dropout_rngs
            if stream is None:
                masked = self.state_dropout and f"state_dropout {self.state_dropout}"
                raise errors.UsageError(
                    f"{masked or 'a mask of the cell'} needs random numbers: give RNN or its "
                    "call rngs=nnx.Rngs(dropout=0), or set deterministic=True"
                )
            keys = {"dropout": stream()}
        if isinstance(self.cell, WrappedCell) and (initial_carry is None or resets is not None):
            given["init_key"] = _carry_key(self.cell.spec, carry_rngs)
        variables = {"params": {"cell": counterpart.params}}
        return module.apply(variables, inputs, resets=resets, rngs=keys, **given)

    def run_step_by_step(
        self,
        inputs: Real[Array, "..."],
        resets: Any,
        rngs: nnx.Rngs | nnx.RngStream | None,
        initial_carry: PyTree[Array],
        **given: Any,
    ) -> Any:
        """Runs any cell as `nnx.RNN` does, with the same keywords, and resets."""
        run = self.plan_steps(inputs, resets, **given)
        rngs = _fork(rngs, "carry") if isinstance(rngs, nnx.Rngs) else rngs
        start = self.cell.initialize_carry(run.input_shape, rngs)
        broadcast = nnx.All(nnx.RngState, self.broadcast_rngs)
        state_axes = nnx.StateAxes({broadcast: None, **(self.state_axes or {...: nnx.Carry})})

        def scan(step: Any, in_axes: int, out_axes: Any) -> Any:
            scanned = nnx.scan(
                step,
                in_axes=(state_axes, nnx.Carry, in_axes),
                out_axes=(nnx.Carry, out_axes),
                unroll=self.unroll,
            )
            split = nnx.split_rngs(splits=1, only=self.broadcast_rngs, squeeze=True)
            return split(scanned)

        carry = start
        if initial_carry is not None:
            carry = step_by_step.match_structure(initial_carry, start)
        start, carry = meshes.shard_carry((start, carry), inputs, run.batch_axes)
        return run(scan, self.cell, start, carry)

    def plan_steps(
        self, inputs: Real[Array, "..."], resets: Any, initial_carry: Any = None, **given: Any
    ) -> step_by_step.Run:
        """A call of any cell, whose arguments are checked."""
        del initial_carry
        names = ("return_carry", "time_major", "reverse", "keep_order")
        given |= {name: getattr(self, name) for name in names if given.get(name) is None}
        return step_by_step.Run(inputs, resets, self.cell.num_feature_axes, **given)

    def in_flax(self) -> nnx.RNN:
        """Flax's own RNN, for a cell that must run step by step."""
        names = ("time_major", "return_carry", "reverse", "keep_order", "unroll")
        options = {name: getattr(self, name) for name in (*names, "state_axes", "broadcast_rngs")}
        return nnx.RNN(self.cell, **options, rngs=False)

    def in_linen(self) -> from_flax.Pair | None:
        """The linen cell and its parameters; None if the cell must run step by step."""
        if layers.has_standard_step(type(self.cell), WrappedCell):
            return from_flax.Pair(self.cell.spec, self.cell.params())
        if not self.fast or getattr(self.cell, "carry_init", None) is not None:
            return None
        try:
            return from_flax.as_linen(self.cell)
        except errors.UsageError:
            return None


_show_arguments(RNN)


def from_linen(cell: layers.Cell, in_features: int, params: cells.Params) -> WrappedCell:
    """Makes the NNX cell of a linen cell and its parameters."""
    make: Any = {wrapper.linen: wrapper for wrapper in WrappedCell.__subclasses__()}[type(cell)]
    fields = {field.name for field in dataclasses.fields(cell)} - set(_NOT_OPTIONS)
    options = {name: getattr(cell, name) for name in fields}
    module = make(in_features, cell.features, rngs=nnx.Rngs(0), **options)
    for group, leaves in params.items():
        for name, leaf in leaves.items():
            getattr(module, group)[name][...] = leaf
    return module

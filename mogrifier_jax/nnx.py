"""The cells and the fast RNN for Flax NNX: thin shells around the modules of linen.

    cell = mogrifier_jax.nnx.MogrifierLSTMCell(32, 64, rounds=5, rank=16, rngs=nnx.Rngs(0))
    ys = mogrifier_jax.nnx.RNN(cell)(xs)  # [batch, time, 32] to [batch, time, 64]

A shell has the parameters, as `nnx.Param`s under their names in linen. It also has a linen module
without parameters, which makes the initial values and computes the results. So initial values and
equations are written once, and `nnx.to_pure_dict(nnx.state(cell))` is the `params` of the linen
cell.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from mogrifier_jax import errors
from mogrifier_jax.nn import from_flax, layers, rnn

__all__ = [
    "RNN",
    "LSTMCell",
    "MLSTMCell",
    "Mogrifier",
    "MogrifierElmanCell",
    "MogrifierGRUCell",
    "MogrifierLSTMCell",
    "RewiredLSTMCell",
]


def _check_features(size: Any) -> None:
    whole = isinstance(size, int) and not isinstance(size, bool) and 1 <= size < 2**31
    errors.check(
        whole, f"in_features {errors.show(size)} must be a whole number, at least 1 and below 2**31"
    )


class _Shell(nnx.Module):
    """An NNX module with the parameters of a linen module, which is `spec`."""

    spec: Any

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        rngs: nnx.Rngs,
        metadata: Mapping[str, Mapping[str, Any]] | None = None,  # By path, as "gates/input".
        **options: Any,
    ):
        _check_features(in_features)
        self.in_features = in_features
        self.hidden_features = hidden_features
        params = self.init_linen(rngs.params(), options).get("params", {})
        metadata = metadata or {}
        unknown = metadata.keys() - {f"{g}/{name}" for g, group in params.items() for name in group}
        if unknown:
            raise errors.UsageError(
                f"metadata for {', '.join(sorted(unknown))}, which is not a parameter of this "
                f"{type(self).__name__}; its groups are {', '.join(params)}"
            )
        self.groups = tuple(params)
        for group, leaves in params.items():
            held = {
                name: nnx.Param(leaf, **metadata.get(f"{group}/{name}", {}))
                for name, leaf in leaves.items()
            }
            setattr(self, group, nnx.Dict(held))

    def init_linen(self, key: jax.Array, options: Mapping[str, Any]) -> Any:
        """Sets `spec` to a linen module with these options, and returns its variables."""
        raise NotImplementedError

    def params(self) -> dict[str, dict[str, jax.Array]]:
        """The parameters as a dict, in the form that linen takes."""
        return {
            group: {name: leaf[...] for name, leaf in getattr(self, group).items()}
            for group in self.groups
        }


class CellShell(_Shell, nnx.RNNCellBase):
    """The base class of all cells. `options` are the fields of the linen cell of the same name.

    `metadata` gives `nnx.Param`s their metadata by path, such as
    `{"gates/input": {"out_sharding": (None, None, "model")}}`.
    """

    linen: type[layers.Cell]

    def init_linen(self, key: jax.Array, options: Mapping[str, Any]) -> Any:
        """Makes the linen cell and its weights."""
        self.spec = self.linen(self.hidden_features, **options, parent=None)
        return self.spec.init(key, self.in_features, method="weights")

    def __call__(self, carry: Any, inputs: jax.Array) -> tuple[Any, jax.Array]:
        """Makes one step: inputs are [..., in_features], the output h is [..., hidden_features]."""
        return self.spec.apply({"params": self.params()}, carry, inputs)

    def initialize_carry(
        self, input_shape: tuple[int, ...], rngs: Any = None, carry_init: Any = None
    ) -> Any:
        """The zero carry for inputs of this shape, unless `carry_init` draws another."""
        zeros = self.spec.initialize_carry(None, input_shape)
        if carry_init is None:
            return zeros
        stream = rngs.carry if isinstance(rngs, nnx.Rngs) else rngs
        return jax.tree.map(lambda a: carry_init(stream(), a.shape, a.dtype), zeros)

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of the inputs that are not batch axes."""
        return 1


class MogrifierLSTMCell(CellShell):
    """LSTM whose x and h gate each other first (arXiv:1909.01792); 0 rounds is the LSTM.

    >>> cell = MogrifierLSTMCell(4, 8, rounds=5, rank=3, rngs=nnx.Rngs(0))
    >>> carry, y = cell(cell.initialize_carry((2, 4)), jax.numpy.ones((2, 4)))
    >>> y.shape, carry.c.shape
    ((2, 8), (2, 8))
    """

    linen = layers.MogrifierLSTMCell


class LSTMCell(CellShell):
    """The LSTM of the paper's baselines: capped input gate, random biases."""

    linen = layers.LSTMCell


class MLSTMCell(CellShell):
    """Multiplicative LSTM (arXiv:1609.07959), the Mogrifier's closest relative."""

    linen = layers.MLSTMCell


class RewiredLSTMCell(CellShell):
    """Rewired LSTM (arXiv:2211.01848) whose x and h gate each other first."""

    linen = layers.RewiredLSTMCell


class MogrifierGRUCell(CellShell):
    """GRU whose x and h gate each other first."""

    linen = layers.MogrifierGRUCell


class MogrifierElmanCell(CellShell):
    """Elman network whose x and h gate each other first."""

    linen = layers.MogrifierElmanCell


class Mogrifier(_Shell):
    """The gating alone, for any two vectors: (x [..., D], h [..., H]) to the same shapes.

    >>> x, h = Mogrifier(4, 8, rounds=4, rngs=nnx.Rngs(0))(jax.numpy.ones(4), jax.numpy.ones(8))
    >>> x.shape, h.shape
    ((4,), (8,))
    """

    def init_linen(self, key: jax.Array, options: Mapping[str, Any]) -> Any:
        """Makes the linen module and the weights of all rounds."""
        _check_features(self.hidden_features)
        self.spec = layers.Mogrifier(**options, parent=None)
        sizes = (self.in_features, self.hidden_features)
        return self.spec.init(key, *(jax.numpy.zeros(size, self.spec.dtype) for size in sizes))

    def __call__(self, x: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns x and h; the gates of each read the other."""
        return self.spec.apply({"params": self.params()}, x, h)


class RNN(nnx.Module):
    """`nnx.RNN` with a fast backward pass; arguments and results are the same.

    >>> rnn = RNN(MogrifierLSTMCell(4, 8, rngs=nnx.Rngs(0)))
    >>> nnx.jit(rnn)(jax.numpy.ones((2, 7, 4))).shape  # [batch, time, features]
    (2, 7, 8)

    `fast`, `remat_window` and `state_dropout` are those of `mogrifier_jax.RNN`. State dropout
    draws from the stream "dropout" of `rngs`, and stops in `eval()`. Flax's own LSTM, GRU and
    simple cell are fast too; other cells run step by step.
    """

    def __init__(
        self,
        cell: Any,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Any = None,
        broadcast_rngs: Any = None,
        rngs: Any = True,
        fast: bool = True,
        remat_window: int | None = None,
        state_dropout: float = 0.0,
        deterministic: bool = False,
    ):
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        self.state_axes = state_axes
        self.broadcast_rngs = broadcast_rngs
        # For the initial carry. The cells of this package start from zeros, so they get no stream:
        # in its tree mode NNX differentiates by all that a module has, and a stream has integers.
        errors.check(
            isinstance(rngs, nnx.Rngs | bool), f"rngs {rngs!r} must be nnx.Rngs, True or False"
        )
        if isinstance(rngs, nnx.Rngs):
            self.rngs = rngs.carry.fork()
        elif rngs is True and not isinstance(cell, CellShell):
            self.rngs = nnx.RngStream(0, tag="carry")
        else:
            self.rngs = nnx.data(None)
        self.fast = fast
        self.remat_window = remat_window
        self.state_dropout = state_dropout
        self.deterministic = deterministic
        self.dropout_rngs = rngs.dropout.fork() if isinstance(rngs, nnx.Rngs) else nnx.data(None)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Any = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Any = None,
        deterministic: bool | None = None,
    ) -> Any:
        """Runs the cell over sequences; the arguments mean what they mean in `nnx.RNN`."""
        given = dict(
            initial_carry=initial_carry,
            seq_lengths=rnn.check_sequences(self.cell, inputs, seq_lengths),
            return_carry=return_carry,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
        )
        found = self.in_linen()
        if found is None:
            return self.in_flax()(inputs, rngs=self.rngs if rngs is None else rngs, **given)
        names = ("time_major", "return_carry", "reverse", "keep_order", "unroll", "fast")
        options = {name: getattr(self, name) for name in (*names, "remat_window", "state_dropout")}
        deterministic = self.deterministic if deterministic is None else deterministic
        module = rnn.RNN(found.cell, **options, deterministic=deterministic, parent=None)
        keys = {}
        if module.draws(None):
            stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else self.dropout_rngs
            if stream is None:
                masked = self.state_dropout and f"state_dropout {self.state_dropout}"
                raise errors.UsageError(
                    f"{masked or 'a mask of the cell'} needs random numbers: give RNN or its "
                    "call rngs=nnx.Rngs(dropout=0), or set deterministic=True"
                )
            keys = {"dropout": stream()}
        return module.apply({"params": {"cell": found.params}}, inputs, rngs=keys, **given)

    def in_flax(self) -> nnx.RNN:
        """Flax's own RNN, for a cell that must run step by step."""
        names = ("time_major", "return_carry", "reverse", "keep_order", "unroll")
        options = {name: getattr(self, name) for name in (*names, "state_axes", "broadcast_rngs")}
        return nnx.RNN(self.cell, **options, rngs=False)

    def in_linen(self) -> from_flax.Pair | None:
        """The linen cell and its parameters; None if the cell must run step by step."""
        if isinstance(self.cell, CellShell):
            return from_flax.Pair(self.cell.spec, self.cell.params())
        if not self.fast or getattr(self.cell, "carry_init", None) is not None:
            return None
        try:
            return from_flax.as_linen(self.cell)
        except errors.UsageError:
            return None


def from_linen(cell: layers.Cell, in_features: int, params: Mapping[str, Any]) -> CellShell:
    """Makes the NNX cell of a linen cell and its parameters."""
    make = {shell.linen: shell for shell in CellShell.__subclasses__()}[type(cell)]
    fields = {field.name for field in dataclasses.fields(cell)} - {"hidden_size", "parent", "name"}
    options = {name: getattr(cell, name) for name in fields}
    shell = make(in_features, cell.hidden_size, rngs=nnx.Rngs(0), **options)
    for group, leaves in params.items():
        for name, leaf in leaves.items():
            getattr(shell, group)[name][...] = leaf
    return shell

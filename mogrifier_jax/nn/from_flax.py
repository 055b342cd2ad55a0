"""Converts Flax's own recurrent cells and their weights to ours, and back.

    cell, params = from_flax.convert(nn.OptimizedLSTMCell(64), params)    # linen
    cell = from_flax.convert(nnx.OptimizedLSTMCell(32, 64, rngs=rngs))    # NNX

Flax's cells have a matrix for each gate, whose name says what it reads (i for the input x, or h)
and which gate it is for. NNX's optimised cells have these matrices side by side in `dense_i` and
`dense_h`; ours are [D, G, H] and [H, G, H], with G gates. `RNN` converts Flax's cells by itself to
use the fast recurrence, so `convert` is only needed for the weights.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Real

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, layers

# The state of a cell of Flax or of ours.
Carry: TypeAlias = PyTree[Float[Array, "..."]]


class Match(NamedTuple):
    """Cells of Flax, and our cell that computes the same."""

    flax: tuple[type, ...]  # Cells of linen; `to_flax` makes the last one.
    ours: type[layers.Cell]
    options: dict[str, Any]  # Fields that our cell must have; others must have their defaults.
    gates: tuple[str, ...]  # Flax's names of the gates, in our order.
    biased: str  # Which matrices have a bias: those that read x ("i"), or those that read h ("h").
    nnx_gates: tuple[str, ...]  # The gates in the order of NNX's optimised cells.


_PLAIN = dict(rounds=0)
# Fields that say what a cell computes with, and which Flax's cells have too, if they have gates.
_FUNCTIONS = ("gate_fn", "activation_fn")
# Fields that change no equation of a cell without rounds: sizes, dtypes, initial values.
FREE_FIELDS = {
    *("features", "kernel_init", "recurrent_kernel_init", "bias_init", "carry_init"),
    *("init_factor", "forget_bias", "chrono_max", "rank", "zigzag", "gate_bias"),
    *("dtype", "param_dtype", "parent", "name"),
}
KINDS = (
    Match(
        (nn.LSTMCell, nn.OptimizedLSTMCell),
        layers.LSTMCell,
        {**_PLAIN, "cap_input_gate": False},
        ("g", "o", "f", "i"),
        "h",
        ("i", "f", "g", "o"),
    ),
    Match((nn.GRUCell,), layers.MogrifierGRUCell, _PLAIN, ("r", "z", "n"), "i", ("r", "z", "n")),
    Match((nn.SimpleCell,), layers.MogrifierElmanCell, _PLAIN, ("",), "i", ("",)),
)


class Pair(NamedTuple):
    """A cell and its parameters."""

    cell: Any
    params: cells.Params


def convert(cell: Any, params: cells.Params | None = None) -> Any:
    """Converts a cell of Flax to the cell of ours that computes the same.

    Args:
      cell: a cell of linen or NNX: `LSTMCell`, `OptimizedLSTMCell`, `GRUCell` or `SimpleCell`.
      params: the parameters of a linen cell; a cell of NNX has its own.

    Returns:
      (cell, params) for linen, or a cell of `mogrifier_jax.nnx` for NNX.
    """
    if isinstance(cell, nn.Module):
        kind = find(cell)
        return Pair(
            counterpart(cell, kind),
            {"gates": read_gates(kind, cell, {} if params is None else params)},
        )
    from mogrifier_jax import nnx  # Slow to import, and users of linen do not need it.

    linen = as_linen(cell)
    ours = convert(linen.cell, linen.params)
    in_features = linen.params["i" + find(linen.cell).gates[0]]["kernel"].shape[0]
    return nnx.from_linen(ours.cell, in_features, ours.params)


def to_flax(cell: Any, params: cells.Params | None = None) -> Any:
    """Converts our cell to `OptimizedLSTMCell`, `GRUCell` or `SimpleCell` of linen or NNX.

    Args:
      cell: a cell of this package without rounds, of linen or NNX.
      params: the parameters of a linen cell; a cell of NNX has its own.

    Returns:
      (cell, params) for linen, or a cell of `flax.nnx` for NNX.
    """
    if not isinstance(cell, layers.Cell):
        return as_nnx(to_flax(*with_params(cell)))
    kind = find_counterpart(cell)
    gates = (params or {}).get("gates", {})
    flax_params: dict[str, Any] = {}
    for index, gate in enumerate(kind.gates):
        for side, name in (("i", "input"), ("h", "recurrent")):
            flax_params[side + gate] = {"kernel": gates[name][:, index]}
        flax_params[kind.biased + gate]["bias"] = gates["bias"][index]
    if "candidate_bias" in gates:
        flax_params["hn"]["bias"] = gates["candidate_bias"]
    make: Any = kind.flax[-1]
    options = {name: getattr(cell, name) for name in ("dtype", "param_dtype", *functions(make))}
    return Pair(make(cell.features, **options), flax_params)


def functions(make: object) -> list[str]:
    """The names of the functions that can be set for a cell of Flax: a SimpleCell has no gates."""
    return [name for name in _FUNCTIONS if hasattr(make, name)]


def with_params(cell: Any, params: cells.Params | None = None) -> Pair:
    """A cell of ours as a linen cell and its parameters, which an NNX cell has itself."""
    if isinstance(cell, layers.Cell):
        return Pair(cell, dict(params or {}))
    if not isinstance(getattr(cell, "spec", None), layers.Cell):
        raise errors.UsageError(f"{errors.show(cell)} is not a cell of this package; give one")
    return Pair(cell.spec, cell.params())


def find(cell: nn.Module) -> Match:
    """The match of a cell of linen; refuses one that has no counterpart here."""
    for kind in KINDS:
        if type(cell) in kind.flax:
            break
    else:
        known = ", ".join(flax.__name__ for kind in KINDS for flax in kind.flax)
        raise errors.UsageError(f"{type(cell).__name__} has no counterpart here; {known} have one")
    if getattr(cell, "residual", False):
        raise errors.UsageError("SimpleCell with residual=True has no counterpart here")
    return kind


def find_counterpart(cell: layers.Cell) -> Match:
    """The match of one of our cells; refuses a cell that Flax does not have."""
    for kind in KINDS:
        # A MogrifierLSTMCell without rounds is an LSTMCell.
        ours = layers.MogrifierLSTMCell if kind.ours is layers.LSTMCell else kind.ours
        if isinstance(cell, ours):
            break
    else:
        raise errors.UsageError(
            f"Flax has no {type(cell).__name__}, so it cannot be converted; an LSTMCell can"
        )
    check_options(
        cell, kind.ours, kind.options, FREE_FIELDS.union(functions(kind.flax[-1])), "Flax"
    )
    return kind


def check_options(
    cell: layers.Cell,
    like: type[layers.Cell],
    options: Mapping[str, Any],
    free: set[str],
    framework: str,
) -> None:
    """Refuses a cell that another framework does not have.

    Args:
      cell: the cell to convert. It must be a `like`.
      options: fields that must have these values; others must have the defaults of `like`.
      free: fields that may have any value.
      framework: its name, for the message.
    """
    needed = {f.name: f.default for f in dataclasses.fields(like) if f.name not in free}
    needed |= options
    of_kind = isinstance(cell, layers.MogrifierLSTMCell if like is layers.LSTMCell else like)
    if not of_kind or isinstance(cell, layers.MLSTMCell):
        raise errors.UsageError(
            f"{framework} has no {type(cell).__name__}, so it cannot be converted; an LSTMCell can"
        )
    wrong = [name for name, value in needed.items() if getattr(cell, name) != value]
    if wrong:
        given, wanted = (
            ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in pairs)
            for pairs in (
                [(name, getattr(cell, name)) for name in wrong],
                [(name, needed[name]) for name in wrong],
            )
        )
        raise errors.UsageError(
            f"{framework} has no {type(cell).__name__} with {given}; only one with {wanted} can be "
            "converted"
        )


def counterpart(cell: Any, kind: Match, inputs_dtype: DTypeLike | None = None) -> layers.Cell:
    """Our cell for a cell of linen, without weights.

    Args:
      inputs_dtype: the dtype of the inputs, by which `dtype=None` is resolved; without it, None
        stays None.
    """
    dtype = cell.dtype
    if dtype is None and inputs_dtype is not None:
        dtype = jnp.promote_types(cell.param_dtype, inputs_dtype)
    return kind.ours(
        cell.features,
        dtype=dtype,
        param_dtype=cell.param_dtype,
        parent=None,
        **{name: getattr(cell, name) for name in functions(cell)},
        **kind.options,
    )


def read_gates(kind: Match, cell: Any, params: cells.Params) -> dict[str, Array]:
    """The parameters of our gates from those of a linen cell; differentiable."""
    errors.check(
        isinstance(params, Mapping),
        f"params {errors.show(params)} must be a mapping; give those that init of the cell made",
    )
    names = {side + gate for side in "ih" for gate in kind.gates}
    if set(params) != names:
        raise errors.UsageError(
            f"params has {', '.join(sorted(map(str, params))) or 'nothing'}, and those of a "
            f"{type(cell).__name__} are {', '.join(sorted(names))}"
        )

    size = cell.features
    for name, leaves in params.items():
        shapes = (
            {} if not isinstance(leaves, Mapping) else {n: np.shape(a) for n, a in leaves.items()}
        )
        # None stands for the number of input features, which only the parameters show.
        expected: dict[str, tuple[int | None, ...]] = {
            "kernel": (size if name[0] == "h" else None, size)
        }
        if name[0] == kind.biased:
            expected["bias"] = (size,)
        for leaf, shape in expected.items():
            given = shapes.get(leaf)
            if (
                given is None
                or len(given) != len(shape)
                or any(e not in (None, g) for g, e in zip(given, shape, strict=True))
            ):
                raise errors.UsageError(
                    f"params[{name!r}] of a {type(cell).__name__} with {size} features must have a "
                    f"{leaf} of shape {shape}, and has {given or 'none'}; give those that its init "
                    "made"
                )

    def stack(side: str, leaf: str, axis: int) -> Array:
        return jnp.stack([params[side + gate][leaf] for gate in kind.gates], axis)

    gates = {
        "input": stack("i", "kernel", 1),
        "recurrent": stack("h", "kernel", 1),
        "bias": stack(kind.biased, "bias", 0),
    }
    if "bias" in params.get("hn", {}):
        gates["candidate_bias"] = params["hn"]["bias"]
    return gates


def run(
    module: Any, plain: Callable[..., Any], inputs: Real[Array, "..."], given: dict[str, Any]
) -> Any:
    """Runs an `RNN` over a cell of Flax: with our counterpart if there is one, else step by step.

    Args:
      module: the RNN. Its parameters stay those of Flax's cell.
      plain: the method `RNN.run_step_by_step`.
      given: the keywords of that method.
    """
    deterministic = given.pop("deterministic")
    try:
        kind = find(module.cell)
    except errors.UsageError as refusal:
        if module.remat_window is not None or module.state_dropout:
            raise errors.UsageError(
                f"{refusal}; it runs step by step, without remat_window and state_dropout"
            ) from None
        return plain(inputs, **given)
    cell = counterpart(module.cell, kind, inputs.dtype)
    carry = given["initial_carry"]
    if carry is None:
        time_major = module.time_major if given["time_major"] is None else given["time_major"]
        time_axis = 0 if time_major else inputs.ndim - 2
        shape = inputs.shape[:time_axis] + inputs.shape[time_axis + 1 :]
        key = jax.random.key(0) if given["init_key"] is None else given["init_key"]
        carry = module.cell.initialize_carry(key, shape)
    leaves = jax.tree.leaves(carry)
    errors.check(
        bool(leaves) and all(layers.is_numeric(leaf) for leaf in leaves),
        f"initial_carry {errors.show(carry)} is not a carry; make one with cell.initialize_carry",
    )
    h = leaves[-1]
    # The state of Flax's GRU may be wider than its matmuls, whereas ours has their dtype.
    narrows = kind.ours is layers.MogrifierGRUCell and h.dtype != cell.dtype
    if module.is_initializing() or ((narrows or not module.fast) and not module.state_dropout):
        return plain(inputs, **given)

    wants_carry = module.return_carry if given["return_carry"] is None else given["return_carry"]
    cell = cell.clone(carry_init=module.cell.carry_init, parent=None)
    given |= dict(initial_carry=carry, return_carry=True)
    params = {"gates": read_gates(kind, module.cell, module.cell.variables["params"])}
    rngs = {"dropout": module.make_rng("dropout")} if module.has_rng("dropout") else {}
    end, ys = module.clone(cell=cell, parent=None, name=None).apply(
        {"params": {"cell": params}}, inputs, **given, deterministic=deterministic, rngs=rngs
    )
    ys = ys.astype(h.dtype)
    return (write_carry(end, carry), ys) if wants_carry else ys


def write_carry(carry: Carry, like: Carry) -> Carry:
    """Converts our carry to Flax's, with the structure and the dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = jax.tree.leaves(carry)
    cast = [new.astype(old.dtype) for new, old in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, cast)


def as_linen(cell: Any) -> Pair:
    """The cell of linen that computes the same as a cell of NNX, with its weights."""
    name = type(cell).__name__
    make: Any = {flax.__name__: flax for kind in KINDS for flax in kind.flax}.get(name)
    if make is None or not type(cell).__module__.startswith("flax."):
        raise errors.UsageError(
            f"{type(cell).__module__}.{name} has no counterpart here; Flax's own LSTMCell, "
            "OptimizedLSTMCell, GRUCell and SimpleCell have one"
        )
    given = ("gate_fn", "activation_fn", "residual", "dtype", "param_dtype")
    options = {option: getattr(cell, option) for option in given if hasattr(cell, option)}
    linen = make(cell.hidden_features, **options, parent=None)
    kind = find(linen)
    params: dict[str, Any] = {}
    for side in "ih":
        if hasattr(cell, "dense_i"):
            params |= _split(getattr(cell, f"dense_{side}"), side, kind.nnx_gates)
        else:  # One matrix for each gate; NNX writes `if_`, because `if` is a keyword.
            for gate in kind.gates:
                dense = getattr(cell, side + gate, None) or getattr(cell, f"{side}{gate}_")
                params |= _split(dense, side, (gate,))
    if "hn" in params:  # Unlike linen's, the GRU of NNX has no bias there.
        params["hn"]["bias"] = jnp.zeros_like(params["in"]["bias"])
    return Pair(linen, params)


def _split(dense: Any, side: str, gates: tuple[str, ...]) -> dict[str, dict[str, Array]]:
    """Splits a `Linear` of NNX into the matrix and the bias of each gate."""
    parts = {
        name: jnp.split(getattr(dense, name)[...], len(gates), -1)
        for name in ("kernel", "bias")
        if getattr(dense, name) is not None
    }
    return {
        side + gate: {name: part[index] for name, part in parts.items()}
        for index, gate in enumerate(gates)
    }


def as_nnx(pair: Pair) -> Any:
    """The cell of NNX that computes the same as a cell of linen."""
    from flax import nnx

    kind = find(pair.cell)
    if "hn" in pair.params and bool(jnp.any(pair.params["hn"]["bias"])):
        raise errors.UsageError(
            "nnx.GRUCell has no bias for the candidate's recurrent part, and this cell's "
            "candidate_bias is not zero; go back to nn.GRUCell of linen"
        )
    make: Any = getattr(nnx, type(pair.cell).__name__)
    in_features = pair.params["i" + kind.gates[0]]["kernel"].shape[0]
    names = ("dtype", "param_dtype", *functions(pair.cell))
    options = {name: getattr(pair.cell, name) for name in names}
    cell = make(in_features, pair.cell.features, **options, rngs=nnx.Rngs(0))
    for side in "ih":
        dense = getattr(cell, f"dense_{side}")
        parts = [pair.params[side + gate] for gate in kind.nnx_gates]
        dense.kernel[...] = jnp.concatenate([part["kernel"] for part in parts], -1)
        if dense.bias is not None:
            dense.bias[...] = jnp.concatenate([part["bias"] for part in parts], -1)
    return cell

"""Converts Flax's own recurrent cells and their weights to ours, and back.

    cell, params = from_flax.convert(nn.OptimizedLSTMCell(64), params)    # linen
    cell = from_flax.convert(nnx.OptimizedLSTMCell(32, 64, rngs=rngs))    # NNX

Flax has a matrix for each gate. Its name is what it reads (i for x, or h) and the gate. NNX's
optimised cells have the matrices side by side in `dense_i` and `dense_h`. Ours are [D, G, H] and
[H, G, H]. `RNN` converts Flax's cells by itself, to use the fast recurrence. Call `convert` only to
get the weights.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, layers


class Match(NamedTuple):
    """Cells of Flax, and our cell that computes the same."""

    flax: tuple[type, ...]  # Cells of linen; `to_flax` makes the last one.
    ours: type[layers.Cell]
    options: dict[str, Any]  # Fields that our cell must have; all but _FREE have their defaults.
    gates: tuple[str, ...]  # Flax's names of the gates, in our order.
    biased: str  # The matrices that have the biases: "i" (they read x) or "h".
    nnx_gates: tuple[str, ...]  # The gates in the order of NNX's optimised cells.


_PLAIN = dict(rounds=0)
# Fields of our cells that may have any value: sizes, initial values and options of the rounds.
_FREE = {"hidden_size", "init_factor", "forget_bias", "chrono_max", "rank", "zigzag", "gate_bias"}
_FREE |= {"dtype", "param_dtype", "parent", "name"}
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
    params: dict[str, Any]


def convert(cell: Any, params: Mapping[str, Any] | None = None) -> Any:
    """Our cell that computes the same as a cell of Flax.

    Args:
      cell: a cell of linen, with its `params`, or a cell of NNX, which has its own.

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

    found = as_linen(cell)
    ours = convert(found.cell, found.params)
    in_features = found.params["i" + find(found.cell).gates[0]]["kernel"].shape[0]
    return nnx.from_linen(ours.cell, in_features, ours.params)


def to_flax(cell: Any, params: Mapping[str, Any] | None = None) -> Any:
    """Converts our cell to `OptimizedLSTMCell`, `GRUCell` or `SimpleCell` of linen or NNX."""
    if not isinstance(cell, layers.Cell):
        if not isinstance(getattr(cell, "spec", None), layers.Cell):
            raise errors.UsageError(f"{cell!r:.60} is not a cell of this package; give one")
        return as_nnx(to_flax(cell.spec, cell.params()))
    kind = find_counterpart(cell)
    gates = (params or {}).get("gates", {})
    found: dict[str, Any] = {}
    for index, gate in enumerate(kind.gates):
        for side, name in (("i", "input"), ("h", "recurrent")):
            found[side + gate] = {"kernel": gates[name][:, index]}
        found[kind.biased + gate]["bias"] = gates["bias"][index]
    if "candidate_bias" in gates:
        found["hn"]["bias"] = gates["candidate_bias"]
    make: Any = kind.flax[-1]
    return Pair(make(cell.hidden_size, dtype=cell.dtype, param_dtype=cell.param_dtype), found)


def find(cell: nn.Module) -> Match:
    """The match of a cell of linen; refuses a cell that has no counterpart here."""
    for kind in KINDS:
        if type(cell) in kind.flax:
            break
    else:
        known = ", ".join(flax.__name__ for kind in KINDS for flax in kind.flax)
        raise errors.UsageError(f"{type(cell).__name__} has no counterpart here; {known} have one")
    given: Any = cell
    for name, function in (("gate_fn", nn.sigmoid), ("activation_fn", nn.tanh)):
        found = getattr(given, name, function)
        if found is not function:
            raise errors.UsageError(
                f"{name} {getattr(found, '__name__', found)} of {type(cell).__name__} is not "
                f"{function.__name__}, and our cells have no other"
            )
    if getattr(given, "residual", False):
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
        raise errors.UsageError(f"Flax has no {type(cell).__name__}; it cannot go back")
    fields = dataclasses.fields(kind.ours)
    needed = {f.name: f.default for f in fields if f.name not in _FREE} | kind.options
    found = {name: getattr(cell, name) for name in needed}
    wrong = [f"{name}={value}" for name, value in found.items() if value != needed[name]]
    if wrong or isinstance(cell, layers.MLSTMCell):
        raise errors.UsageError(
            f"Flax has no {type(cell).__name__}{' with ' if wrong else ''}{', '.join(wrong)}; only "
            f"cells with {', '.join(f'{n}={v}' for n, v in needed.items())} can go back"
        )
    return kind


def counterpart(cell: Any, kind: Match, inputs_dtype: Any = None) -> layers.Cell:
    """Our cell for a cell of linen, without weights."""
    dtype = cell.dtype
    if dtype is None:
        dtype = jnp.promote_types(cell.param_dtype, inputs_dtype or cell.param_dtype)
    return kind.ours(
        cell.features, dtype=dtype, param_dtype=cell.param_dtype, parent=None, **kind.options
    )


def read_gates(kind: Match, cell: Any, params: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The gates of our cell from the parameters of a linen cell; gradients go through it."""
    errors.check(
        isinstance(params, Mapping),
        f"params {errors.show(params)} must be a mapping; give those that init of the cell made",
    )
    names = {side + gate for side in "ih" for gate in kind.gates}
    if set(params) != names:
        raise errors.UsageError(
            f"params has {', '.join(sorted(params)) or 'nothing'}, and those of a "
            f"{type(cell).__name__} are {', '.join(sorted(names))}"
        )

    size = cell.features
    for name, leaves in params.items():
        shapes = (
            {} if not isinstance(leaves, Mapping) else {n: jnp.shape(a) for n, a in leaves.items()}
        )
        wanted: dict[str, tuple[Any, ...]] = {"kernel": (size if name[0] == "h" else None, size)}
        if name[0] == kind.biased:
            wanted["bias"] = (size,)
        for leaf, shape in wanted.items():
            found = shapes.get(leaf)
            same = found is not None and len(found) == len(shape)
            if not same or any(w not in (None, f) for f, w in zip(found or (), shape, strict=True)):
                raise errors.UsageError(
                    f"params[{name!r}] of a {type(cell).__name__} with {size} features must have a "
                    f"{leaf} of shape {shape}, and has {found or 'none'}; give those that its init "
                    "made"
                )

    def stack(side: str, leaf: str, axis: int) -> jax.Array:
        return jnp.stack([params[side + gate][leaf] for gate in kind.gates], axis)

    gates = {
        "input": stack("i", "kernel", 1),
        "recurrent": stack("h", "kernel", 1),
        "bias": stack(kind.biased, "bias", 0),
    }
    if "bias" in params.get("hn", {}):
        gates["candidate_bias"] = params["hn"]["bias"]
    return gates


def run(module: Any, plain: Callable, inputs: jax.Array, given: dict[str, Any]) -> Any:
    """Runs an `RNN` over a cell of Flax: with our counterpart if there is one, else step by step.

    Args:
      module: the RNN. Its parameters stay those of Flax's cell.
      plain: the method `nn.RNN.__call__`, which runs step by step.
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
    # Flax's GRU may have a state that is wider than its matmuls. Ours has the compute dtype.
    loses = kind.ours is layers.MogrifierGRUCell and h.dtype != cell.dtype
    if module.is_initializing() or ((loses or not module.fast) and not module.state_dropout):
        return plain(inputs, **given)

    wants_carry = module.return_carry if given["return_carry"] is None else given["return_carry"]
    given |= dict(initial_carry=read_carry(carry, cell.dtype), return_carry=True)
    params = {"gates": read_gates(kind, module.cell, module.cell.variables["params"])}
    rngs = {"dropout": module.make_rng("dropout")} if module.has_rng("dropout") else {}
    end, ys = module.clone(cell=cell, parent=None, name=None).apply(
        {"params": {"cell": params}}, inputs, **given, deterministic=deterministic, rngs=rngs
    )
    ys = ys.astype(h.dtype)
    return (write_carry(end, carry), ys) if wants_carry else ys


def read_carry(carry: Any, dtype: Any) -> Any:
    """Converts Flax's carry, which is (c, h) or h, to ours."""
    if isinstance(carry, tuple):
        return cells.LSTMCarry(carry[0].astype(cells.wide(dtype)), carry[1].astype(dtype))
    return cells.Carry(carry.astype(dtype))


def write_carry(carry: Any, like: Any) -> Any:
    """Converts our carry to Flax's, with the structure and the dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    cast = [new.astype(old.dtype) for new, old in zip(carry, leaves, strict=True)]
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
        else:  # One matrix for each gate. NNX writes `if_`, since `if` is a keyword of Python.
            for gate in kind.gates:
                dense = getattr(cell, side + gate, None) or getattr(cell, f"{side}{gate}_")
                params |= _split(dense, side, (gate,))
    if "hn" in params:  # A GRU of NNX has no bias there.
        params["hn"]["bias"] = jnp.zeros_like(params["in"]["bias"])
    return Pair(linen, params)


def _split(dense: Any, side: str, gates: tuple[str, ...]) -> dict[str, dict[str, jax.Array]]:
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
    options = dict(dtype=pair.cell.dtype, param_dtype=pair.cell.param_dtype)
    cell = make(in_features, pair.cell.features, **options, rngs=nnx.Rngs(0))
    for side in "ih":
        dense = getattr(cell, f"dense_{side}")
        parts = [pair.params[side + gate] for gate in kind.nnx_gates]
        dense.kernel[...] = jnp.concatenate([part["kernel"] for part in parts], -1)
        if dense.bias is not None:
            dense.bias[...] = jnp.concatenate([part["bias"] for part in parts], -1)
    return cell

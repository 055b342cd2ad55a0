"""Converts Mogrifier LSTM cells between PyTorch and this package, in both directions.

    cell, params = from_pytorch.convert(module.state_dict())
    carry = cell.initialize_carry(jax.random.key(0), x.shape)
    carry, y = cell.apply({"params": params}, carry, x)
    state_dict = from_pytorch.to_pytorch(cell, params)

Letters: D input features, H hidden features, K rank. PyTorch has no Mogrifier LSTM of its own, so
each implementation names its tensors differently. `convert` recognises these layouts by their
names, and `to_pytorch` writes them:

    recurrence   "lstm_cell", a `torch.nn.LSTMCell`: weight_ih [4H, D], weight_hh [4H, H], bias_ih
                 and bias_hh; "lstm", a `torch.nn.LSTM` of one layer: the same names with _l0;
                 "linears", two `Linear` x2h and h2h; "tensors", bare Wih [D, 4H], Whh, bih, bhh
    gating       "list", one `ModuleList` with a map for each round; "q_r", a list q of the maps
                 that gate x and a list r of those that gate h; "shared", a single q and r for all
                 rounds. `convert` also reads q and r that are bare tensors Q [H, D] and R [D, H].
    low rank     each map is a `Sequential` of two `Linear`

PyTorch itself is not needed: `convert` takes any mapping of names to arrays, and `to_pytorch`
returns NumPy arrays.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.nn import cells, from_flax, layers

# PyTorch's blocks of gates are i, f, g, o; ours are j (its g), o, f, i.
_OURS_FROM_PYTORCH = [2, 3, 1, 0]
_PYTORCH_FROM_OURS = [3, 2, 0, 1]


class _Recurrence(NamedTuple):
    """How a layout names the tensors of the LSTM."""

    input: str
    recurrent: str
    input_bias: str
    recurrent_bias: str
    owner: str  # The attribute of the module that has the tensors, if rounds come before the LSTM.
    out_first: bool  # Whether a matrix is [out, in], as in `Linear`.


_RECURRENCES = {
    "lstm_cell": _Recurrence("weight_ih", "weight_hh", "bias_ih", "bias_hh", "lstm.", True),
    "lstm": _Recurrence("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "lstm.", True),
    "linears": _Recurrence("x2h.weight", "h2h.weight", "x2h.bias", "h2h.bias", "", True),
    "tensors": _Recurrence("Wih", "Whh", "bih", "bhh", "", False),
}
_GATINGS = ("list", "q_r", "shared")


class _Map(NamedTuple):
    """An affine map: a matrix [in, out] and an optional bias."""

    kernel: np.ndarray
    bias: np.ndarray | None


def convert(
    state_dict: Mapping[str, Any], *, rounds: int | None = None, prefix: str = ""
) -> from_flax.Pair:
    """Converts the state dict of a PyTorch cell, or of a model that contains one.

    Args:
      state_dict: tensors or arrays by name, in one of the layouts above.
      rounds: the number of rounds of gating. It must be given if all rounds share one q and r,
        because the weights do not show the number then, or if a single map might be another layer.
        By default, every round that has weights.
      prefix: the part of the names before those of the cell, such as "layers.0.".

    Returns:
      (cell, params): a `MogrifierLSTMCell` and its parameters.
    """
    named = isinstance(state_dict, Mapping) and all(isinstance(n, str) for n in state_dict)
    if not (named and isinstance(prefix, str)):
        raise errors.UsageError("give a mapping of names to tensors, and the prefix as a string")
    if reason := layers.OPTIONS["rounds"].refusal(rounds):
        raise errors.UsageError(f"rounds {errors.show(rounds)} {reason}")
    tensors = {
        name.removeprefix(prefix): _to_numpy(name, value)
        for name, value in state_dict.items()
        if name.startswith(prefix)
    }
    gates, rest = _read_recurrence(tensors)
    input_size, _, hidden_size = gates["input"].shape
    maps = _read_rounds(_group(rest), (input_size, hidden_size), rounds)
    has_bias = any("bias" in params for params in maps)
    ranks = {params["down"].shape[1] if "down" in params else 0 for params in maps}
    if len(ranks) > 1:
        raise errors.UsageError(f"the rounds have different ranks {sorted(ranks)}; all must agree")
    if has_bias:
        for index, params in enumerate(maps):
            size = hidden_size if index % 2 else input_size
            params.setdefault("bias", np.zeros(size, np.float32))
    cell = layers.MogrifierLSTMCell(
        hidden_size,
        rounds=len(maps),
        rank=max(ranks, default=0),
        gate_bias=has_bias,
        cap_input_gate=False,  # PyTorch's LSTM uses i; the authors' code uses min(i, 1 - f).
    )
    rounds_by_name = {f"round_{index}": params for index, params in enumerate(maps, start=1)}
    return from_flax.Pair(cell, {"gates": gates, **rounds_by_name})


def to_pytorch(
    cell: Any,
    params: cells.Params | None = None,
    *,
    recurrence: str = "lstm_cell",
    gating: str = "list",
    prefix: str = "",
) -> dict[str, np.ndarray]:
    """Converts a `MogrifierLSTMCell` or an `LSTMCell` to a state dict for PyTorch.

        state_dict = from_pytorch.to_pytorch(cell, params)
        module.load_state_dict({name: torch.from_numpy(a) for name, a in state_dict.items()})

    A cell without rounds becomes the state dict of a bare LSTM, which `torch.nn.LSTMCell` loads, or
    `torch.nn.LSTM` with `recurrence="lstm"`. With rounds the LSTM's tensors are under `lstm.`.
    PyTorch adds two biases; ours is the first, and the second is zero.

    Args:
      cell: a cell of linen, with its `params`, or a cell of `mogrifier_jax.nnx`, which has its own.
        It must have `cap_input_gate=False`, because PyTorch's LSTM does not cap its input gate.
      params: the parameters of a linen cell.
      recurrence: the layout of the LSTM: "lstm_cell", "lstm", "linears" or "tensors".
      gating: the layout of the gating maps: "list", "q_r" or "shared".
      prefix: what to put before all names, such as "layers.0.".

    Returns:
      float32 arrays by name.
    """
    for name, value, known in (
        ("recurrence", recurrence, tuple(_RECURRENCES)),
        ("gating", gating, _GATINGS),
    ):
        errors.check(
            isinstance(value, str) and value in known,
            f"{name} {errors.show(value)} is not a layout; use one of {', '.join(known)}",
        )
    errors.check(isinstance(prefix, str), f"prefix {errors.show(prefix)} must be a string")
    cell, params = from_flax.with_params(cell, params)
    from_flax.check_options(
        cell,
        layers.MogrifierLSTMCell,
        {"cap_input_gate": False},
        from_flax.FREE_FIELDS - {"zigzag"} | {"rounds"},
        "PyTorch",
    )
    _check_params(cell, params)
    arrays = jax.tree.map(lambda a: _to_numpy("params", a), dict(params))
    rounds = [arrays[f"round_{index}"] for index in range(1, cell.rounds + 1)]
    state_dict = _write_recurrence(arrays["gates"], _RECURRENCES[recurrence], bool(rounds))
    for name, round_params in _name_rounds(rounds, gating):
        state_dict |= _write_map(name, round_params)
    return {prefix + name: np.array(a, order="C") for name, a in state_dict.items()}


def _check_params(cell: layers.Cell, params: cells.Params) -> None:
    """Refuses parameters that are not those of the cell."""
    wrong = (
        f"params are not those of this {type(cell).__name__}; give what its init made, "
        'variables["params"] of the cell'
    )
    try:
        input_size = int(np.shape(params["gates"]["input"])[0])
        expected = jax.eval_shape(
            lambda: cell.init(jax.random.key(0), input_size, method="weights")
        )
        given = jax.tree.map(np.shape, dict(params))
    except (errors.UsageError, IndexError, KeyError, TypeError, ValueError):
        raise errors.UsageError(wrong) from None
    errors.check(given == jax.tree.map(np.shape, dict(expected["params"])), wrong)


def _write_recurrence(
    gates: Mapping[str, np.ndarray], names: _Recurrence, has_rounds: bool
) -> dict[str, np.ndarray]:
    """The tensors of the LSTM: matrices [4H, in], or their transposes, and two biases [4H]."""
    size = gates["bias"].size
    matrices = {
        name: kernel[:, _PYTORCH_FROM_OURS].reshape(-1, size)
        for name, kernel in ((names.input, gates["input"]), (names.recurrent, gates["recurrent"]))
    }
    state_dict: dict[str, np.ndarray] = {
        name: m.T if names.out_first else m for name, m in matrices.items()
    }
    state_dict[names.input_bias] = gates["bias"][_PYTORCH_FROM_OURS].reshape(-1)
    state_dict[names.recurrent_bias] = np.zeros(size, np.float32)
    owner = names.owner if has_rounds else ""
    return {owner + name: array for name, array in state_dict.items()}


def _name_rounds(
    rounds: list[dict[str, np.ndarray]], gating: str
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields the name of each gating map in PyTorch, and its parameters."""
    for index, params in enumerate(rounds):
        letter, turn = "qr"[index % 2], index // 2
        if gating == "list":
            yield f"mogrifier_list.{index}", params
        elif gating == "q_r":
            yield f"{letter}.{turn}", params
        elif turn == 0:
            yield letter, params
        else:
            first = rounds[index % 2]
            same = all(np.array_equal(array, first[name]) for name, array in params.items())
            errors.check(
                same,
                f"rounds {index % 2 + 1} and {index + 1} have different weights, so they cannot "
                'share one map; use gating="list" or "q_r"',
            )


def _write_map(name: str, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a `Linear`, or of a `Sequential` of two."""
    if "kernel" in params:
        last, state_dict = name, {f"{name}.weight": params["kernel"].T}
    else:
        last = f"{name}.1"
        state_dict = {f"{name}.0.weight": params["down"].T, f"{last}.weight": params["up"].T}
    if "bias" in params:
        state_dict[f"{last}.bias"] = params["bias"]
    return state_dict


def _read_recurrence(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict]:
    """The parameters of the gates in our form, and the remaining tensors."""
    for layout in _RECURRENCES.values():
        names = (layout.input, layout.recurrent, layout.input_bias, layout.recurrent_bias)
        matches = [[key for key in tensors if re.fullmatch(rf"(.*\.)?{n}", key)] for n in names]
        if not matches[0]:
            continue
        if any(len(keys) > 1 for keys in matches):
            raise errors.UsageError(
                f"there are several cells, {', '.join(matches[0])}; choose one by its prefix"
            )
        if not matches[1]:
            raise errors.UsageError(
                f"there is {matches[0][0]} but no {names[1]}; give the state dict of a whole LSTM"
            )
        used = [keys[0] for keys in matches if keys]
        matrices = [tensors[keys[0]] for keys in matches[:2]]
        matrices = [m if layout.out_first else m.T for m in matrices]  # [4H, in] each.
        hidden = matrices[1].shape[-1] if matrices[1].ndim else 0
        if not hidden or any(m.ndim != 2 or m.shape[0] != 4 * hidden for m in matrices):
            raise errors.UsageError(
                f"{used[0]} and {used[1]} of shapes {tensors[used[0]].shape} and "
                f"{tensors[used[1]].shape} are not of an LSTM, which has four gates"
            )
        for key in used[2:]:
            _check_bias(key, tensors[key], 4 * hidden)
        # PyTorch adds two biases to the same sum; one is enough.
        bias = sum((tensors[keys[0]] for keys in matches[2:] if keys), np.zeros(4 * hidden))
        blocks = [m.reshape(4, hidden, -1)[_OURS_FROM_PYTORCH].transpose(2, 0, 1) for m in matrices]
        gates = {
            "input": np.ascontiguousarray(blocks[0]),
            "recurrent": np.ascontiguousarray(blocks[1]),
            "bias": bias.reshape(4, hidden)[_OURS_FROM_PYTORCH].astype(np.float32),
        }
        return gates, {key: value for key, value in tensors.items() if key not in used}
    raise errors.UsageError(
        f"no LSTM cell among {', '.join(list(tensors)[:10]) or 'no tensors'}; expected weight_ih "
        "and weight_hh (torch.nn.LSTMCell), x2h and h2h, or Wih and Whh; is the prefix right?"
    )


def _group(tensors: dict[str, np.ndarray]) -> dict[str, list[list[_Map]]]:
    """The maps in each list of the module, by its name; a low-rank map is a list of its factors."""
    linears: dict[str, _Map] = {}
    for key, value in tensors.items():
        path, _, kind = key.rpartition(".")
        if kind == "weight" and value.ndim == 2:
            bias = tensors.get(f"{path}.bias")
            if bias is not None:
                _check_bias(f"{path}.bias", bias, len(value))
            linears[path] = _Map(value.T, bias)
        elif kind != "bias" and value.ndim == 2:  # A bare tensor, multiplied from the right.
            linears[key] = _Map(value, None)
        elif kind != "bias" or f"{path}.weight" not in tensors:
            raise errors.UsageError(f"{key} of shape {value.shape} has no place in this cell")
    groups: dict[str, dict[str, list[_Map]]] = {}
    for path in sorted(linears, key=lambda p: [int(n) for n in re.findall(r"\d+", p)]):
        name, index = re.fullmatch(r"(.*?)((?:\.\d+)*)", path).groups()  # type: ignore[union-attr]
        entry = index.split(".")[1] if index else ""
        group = groups.setdefault(name, {})
        if entry and entry not in group and int(entry) != len(group):
            raise errors.UsageError(
                f"the list {name} has an entry {entry} but none {len(group)}; give all of them"
            )
        group.setdefault(entry, []).append(linears[path])
    return {name: list(entries.values()) for name, entries in groups.items()}


def _read_rounds(
    groups: dict[str, list[list[_Map]]], sizes: tuple[int, int], rounds: int | None
) -> list[dict[str, np.ndarray]]:
    """The parameters of each round, in order."""
    if rounds and not groups:
        raise errors.UsageError(
            f"rounds {rounds} needs gating maps, and there are none beside the LSTM; give the "
            "state dict of the whole cell, or leave rounds out for a plain LSTM"
        )
    if not groups:
        return []
    if len(groups) == 1:
        ((name, entries),) = groups.items()
        own_name = re.fullmatch(r"q|.*mog.*", name.rpartition(".")[2].lower())
        if len(entries) == 1 and rounds is None and not own_name:
            raise errors.UsageError(
                f"{name} may be the map of the only round, or another layer of the model; say "
                "rounds=1 or rounds=0, or choose the cell by its prefix"
            )
    else:
        entries = _interleave(groups, sizes, rounds)
    if rounds is not None and rounds > len(entries):
        raise errors.UsageError(
            f"rounds {rounds} must be at most {len(entries)}, the number of rounds with weights"
        )
    used = entries if rounds is None else entries[:rounds]
    return [_compose(entry, index, sizes) for index, entry in enumerate(used)]


def _interleave(
    groups: dict[str, list[list[_Map]]], sizes: tuple[int, int], rounds: int | None
) -> list[list[_Map]]:
    """The maps of all rounds in order: q, which gates x, alternates with r, which gates h."""
    named = {name.rpartition(".")[2].lower(): entries for name, entries in groups.items()}
    if set(named) != {"q", "r"}:
        raise errors.UsageError(
            f"the gating maps {', '.join(groups)} are not of a known layout: one list with an "
            "entry for each round, or q (for x) and r (for h); rename the keys, or choose the cell "
            "by its prefix"
        )
    q, r = (_join_factors(named[name], out, sizes) for name, out in (("q", 0), ("r", 1)))
    if len(q) == len(r) == 1 and rounds is None:
        raise errors.UsageError(
            "one q and one r may serve any number of rounds; say how many with rounds"
        )
    if len(q) == len(r) == 1:
        return [(q, r)[i % 2][0] for i in range(rounds or 0)]
    if len(q) - len(r) not in (0, 1):
        raise errors.UsageError(
            f"{len(q)} maps for x and {len(r)} for h do not take turns; x comes first, so there "
            "must be as many for h, or one less"
        )
    return [(q, r)[i % 2][i // 2] for i in range(len(q) + len(r))]


def _join_factors(entries: list[list[_Map]], out: int, sizes: tuple[int, int]) -> list[list[_Map]]:
    """Joins two entries that are the factors of one low-rank map, a `Sequential`."""
    single = all(len(entry) == 1 for entry in entries)  # Otherwise each entry has its factors.
    full = (sizes[1 - out], sizes[out])
    if len(entries) == 2 and single and entries[0][0].kernel.shape != full:
        return [[entries[0][0], entries[1][0]]]
    return entries


def _compose(entry: Sequence[_Map], index: int, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
    """The parameters of a round; a bias between two factors is folded into the last one."""
    size_in, size_out = (sizes[1], sizes[0]) if index % 2 == 0 else sizes
    shapes = [part.kernel.shape for part in entry]
    inner = [shape[1] for shape in shapes[:-1]]
    if len(entry) > 2 or shapes != [*zip([size_in, *inner], [*inner, size_out], strict=True)]:
        raise errors.UsageError(
            f"round {index + 1} has matrices {shapes} (in, out), and must lead from "
            f"{'h' if index % 2 == 0 else 'x'} ({size_in}) to {size_out}: rounds start with the "
            "map from h to x, and take turns"
        )
    bias = entry[-1].bias
    if len(entry) == 2 and entry[0].bias is not None:
        moved = entry[0].bias @ entry[1].kernel
        bias = moved if bias is None else moved + bias
    names = ("kernel",) if len(entry) == 1 else ("down", "up")
    params = {name: part.kernel for name, part in zip(names, entry, strict=True)}
    return params if bias is None else {**params, "bias": bias.astype(np.float32)}


def _check_bias(name: str, bias: np.ndarray, size: int) -> None:
    if bias.shape != (size,):
        raise errors.UsageError(f"{name} of shape {bias.shape} must be ({size},), as its matrix")


def _to_numpy(name: str, value: Any) -> np.ndarray:
    """Converts a tensor of any dtype and device, or an array, to float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.numpy() if value.is_complex() else value.float().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biufV":  # V: bfloat16 and the like.
        raise errors.UsageError(f"{name} holds {array.dtype}; weights are real numbers")
    return array.astype(np.float32)

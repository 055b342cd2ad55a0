"""Converts the weights of a Mogrifier LSTM cell written in PyTorch to `MogrifierLSTMCell`.

    cell, params = from_pytorch.convert(module.state_dict())
    carry = cell.initialize_carry(None, x.shape)
    carry, y = cell.apply({"params": params}, carry, x)

Letters: D input features, H hidden features, K rank. `convert` knows the layouts that people use:

    recurrence   a `torch.nn.LSTMCell` (weight_ih [4H, D], weight_hh [4H, H], bias_ih, bias_hh),
                 two `Linear` named x2h and h2h, or tensors Wih [D, 4H], Whh, bih, bhh
    gating       one `ModuleList` with an entry for each round, or a list for x, named q, and one
                 for h, named r; or a single q and r (`Linear`, or tensors Q [H, D] and R [D, H])
                 for all rounds
    low rank     each entry is a `Sequential` of two `Linear`

PyTorch itself is not needed: any mapping of names to arrays works.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mogrifier_jax import errors
from mogrifier_jax.nn import from_flax, layers

# PyTorch's blocks are i, f, g, o; ours are j (its g), o, f, i.
_GATES = [2, 3, 1, 0]
# Names of one layout: input and recurrent matrix, their biases, and whether a matrix is [out, in].
_RECURRENCES = (
    ("weight_ih", "weight_hh", "bias_ih", "bias_hh", True),
    ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", True),
    ("x2h.weight", "h2h.weight", "x2h.bias", "h2h.bias", True),
    ("Wih", "Whh", "bih", "bhh", False),
)


class _Map(NamedTuple):
    """An affine map: a matrix [in, out], and perhaps a bias."""

    kernel: np.ndarray
    bias: np.ndarray | None


def convert(
    state_dict: Mapping[str, Any], *, rounds: int | None = None, prefix: str = ""
) -> from_flax.Pair:
    """Converts the state dict of a cell, or of a model with a cell under a prefix.

    Args:
      rounds: how many rounds of gating the module makes. It is needed if one q and r are for
        all rounds, because the weights do not show the number. Otherwise the default is all
        rounds that have weights.
      prefix: the beginning of the cell's names, such as "layers.0.".
    """
    named = isinstance(state_dict, Mapping) and all(isinstance(n, str) for n in state_dict)
    if not (named and isinstance(prefix, str)):
        raise errors.UsageError("give a mapping of names to tensors, and the prefix as a text")
    if rounds is not None and not (type(rounds) is int and 0 <= rounds <= 100):
        raise errors.UsageError(f"rounds {rounds!r} must be a whole number from 0 to 100")
    tensors = {
        name.removeprefix(prefix): _to_numpy(name, value)
        for name, value in state_dict.items()
        if name.startswith(prefix)
    }
    gates, rest = _read_recurrence(tensors)
    input_size, _, hidden_size = gates["input"].shape
    maps = _read_rounds(_group(rest), (input_size, hidden_size), rounds)
    has_bias = any("bias" in found for found in maps)
    ranks = {found["down"].shape[1] if "down" in found else 0 for found in maps}
    if len(ranks) > 1:
        raise errors.UsageError(f"the rounds have different ranks {sorted(ranks)}; all must agree")
    if has_bias:
        for index, found in enumerate(maps):
            size = hidden_size if index % 2 else input_size
            found.setdefault("bias", np.zeros(size, np.float32))
    cell = layers.MogrifierLSTMCell(
        hidden_size,
        rounds=len(maps),
        rank=max(ranks, default=0),
        gate_bias=has_bias,
        cap_input_gate=False,  # PyTorch's LSTM uses i; the authors' code uses min(i, 1 - f).
    )
    rounds_by_name = {f"round_{index}": found for index, found in enumerate(maps, start=1)}
    return from_flax.Pair(cell, {"gates": gates, **rounds_by_name})


def _read_recurrence(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict]:
    """The gate matrices in our form, and the tensors that are left."""
    for *names, transposed in _RECURRENCES:
        found = [[key for key in tensors if re.fullmatch(rf"(.*\.)?{n}", key)] for n in names]
        if not found[0]:
            continue
        if any(len(keys) > 1 for keys in found):
            raise errors.UsageError(
                f"there are several cells, {', '.join(found[0])}; choose one by its prefix"
            )
        if not found[1]:
            raise errors.UsageError(f"{found[0][0]} is there but {names[1]} is not")
        used = [keys[0] for keys in found if keys]
        matrices = [tensors[keys[0]] for keys in found[:2]]
        matrices = [m if transposed else m.T for m in matrices]  # [4H, in] each.
        hidden = matrices[1].shape[-1] if matrices[1].ndim else 0
        if not hidden or any(m.ndim != 2 or m.shape[0] != 4 * hidden for m in matrices):
            raise errors.UsageError(
                f"{used[0]} and {used[1]} of shapes {tensors[used[0]].shape} and "
                f"{tensors[used[1]].shape} are not of an LSTM, which has four gates"
            )
        for key in used[2:]:
            _check_bias(key, tensors[key], 4 * hidden)
        # PyTorch adds two biases to the same sum. We have one.
        bias = sum((tensors[keys[0]] for keys in found[2:] if keys), np.zeros(4 * hidden))
        blocks = [m.reshape(4, hidden, -1)[_GATES].transpose(2, 0, 1) for m in matrices]
        gates = {
            "input": np.ascontiguousarray(blocks[0]),
            "recurrent": np.ascontiguousarray(blocks[1]),
            "bias": bias.reshape(4, hidden)[_GATES].astype(np.float32),
        }
        return gates, {key: value for key, value in tensors.items() if key not in used}
    raise errors.UsageError(
        f"no LSTM cell among {', '.join(list(tensors)[:10]) or 'no tensors'}; expected weight_ih "
        "and weight_hh (torch.nn.LSTMCell), x2h and h2h, or Wih and Whh; is the prefix right?"
    )


def _group(tensors: dict[str, np.ndarray]) -> dict[str, list[list[_Map]]]:
    """The entries of each list of the module, by its name; an entry is a map or its factors."""
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
        found = groups.setdefault(name, {})
        if entry and entry not in found and int(entry) != len(found):
            raise errors.UsageError(
                f"the list {name} has an entry {entry} but none {len(found)}; give all of them"
            )
        found.setdefault(entry, []).append(linears[path])
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
    if not groups or rounds == 0:
        return []
    if len(groups) == 1:
        entries = next(iter(groups.values()))
    else:
        entries = _interleave(groups, sizes, rounds)
    if rounds is not None and rounds > len(entries):
        raise errors.UsageError(f"rounds {rounds} is more than the {len(entries)} that are there")
    used = entries if rounds is None else entries[:rounds]
    return [_compose(entry, index, sizes) for index, entry in enumerate(used)]


def _interleave(
    groups: dict[str, list[list[_Map]]], sizes: tuple[int, int], rounds: int | None
) -> list[list[_Map]]:
    """The entries of all rounds: the maps for x (q) and for h (r) take turns."""
    named = {name.rpartition(".")[2].lower(): entries for name, entries in groups.items()}
    if set(named) != {"q", "r"}:
        raise errors.UsageError(
            f"the gating maps {', '.join(groups)} are not of a known layout: one list with an "
            "entry for each round, or q (for x) and r (for h); rename the keys"
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
    """Joins two entries that are the factors of one map, which is a `Sequential` of its own."""
    if len(entries) == 2 and entries[0][0].kernel.shape != (sizes[1 - out], sizes[out]):
        return [[entries[0][0], entries[1][0]]]
    return entries


def _compose(entry: Sequence[_Map], index: int, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
    """The parameters of a round; a bias between two factors moves to the end."""
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
    found = np.asarray(value)
    if found.dtype.kind not in "biufV":  # V: bfloat16 and its like.
        raise errors.UsageError(f"{name} holds {found.dtype}; weights are real numbers")
    return found.astype(np.float32)

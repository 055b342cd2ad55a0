"""The data of the explore page: what models predicted and computed as they read a text, compressed.

Axes: N tokens of the text, U units of a map, K likeliest tokens.

A map has the values of one gate of one layer, units by tokens; `gate_statistics.name_gates` names
them. Surprisals, probabilities and means are stored as float32. Maps are stored as decimal
fixed-point numbers, so that all digits of a value that the page shows are correct.
"""

import base64
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mogrifier_jax import errors, files
from mogrifier_jax.analysis import gate_statistics
from mogrifier_jax.evaluation import trained_model
from mogrifier_jax.nn import layers, models
from mogrifier_jax.training import units

TOP = 8  # How many of the likeliest tokens are listed.
MAX_VALUES = 1_700_000  # Of all maps together. At 1.7 bytes each or less, a file has < 3 MB.
DECIMALS = {"factor": 3, "gate": 2, "signed": 2}  # Decimal places of the values in a map.


class Reading(NamedTuple):
    """How a model has read a text."""

    arrays: dict[str, np.ndarray]  # What was expected, and how surprising each token was.
    bits_per_token: float
    layers: list[dict[str, np.ndarray]]  # The values [N, U] of each gate, by name.


def read(model: trained_model.TrainedModel, text: str | bytes) -> Reading:
    """Everything that the page shows about one model, as arrays."""
    score = model.score(text)
    if not np.isfinite(score.nats).all():
        raise errors.UsageError(
            f"the scores of the run in {model.info['workdir']} are not finite, so it has diverged; "
            "give another run"
        )
    expected = model.predict(text, top=TOP)
    named = [gate_statistics.name_gates(layer) for layer in model.gates(text).layers]
    gates = [{name: np.asarray(values) for name, values in layer.items()} for layer in named]
    arrays = {
        "bits": score.nats / math.log(2),
        "ids": expected.ids,
        "probabilities": expected.probabilities,
        "entropy": expected.entropy_nats / math.log(2),
        "ranks": expected.ranks,
    }
    return Reading(arrays, score.bits_per_token, gates)


def limit_units(gates: Sequence[Mapping[str, np.ndarray]], most: int) -> int:
    """How many units a map may have so that all maps together have at most `most` values."""
    shapes = [values.shape for layer in gates for values in layer.values()]
    if sum(tokens * units for tokens, units in shapes) <= most:
        return max(units for _, units in shapes)
    return max(1, most // sum(tokens for tokens, _ in shapes))


def pack_run(
    model: trained_model.TrainedModel,
    reading: Reading,
    name: str,
    words: Sequence[int],
    max_units: int,
) -> files.JsonObject:
    """A run as the page needs it: its sizes and options, its maps, and its packed arrays.

    Args:
      words: the ids of all tokens that the page knows, sorted; the page counts them from 0.
      max_units: how many units of a map are kept.
    """
    module = model.model
    cell = layers.find_cell(module.cell)(module.hidden_size, **dict(module.cell_options))
    arrays = dict(reading.arrays)
    arrays["ids"] = np.searchsorted(words, arrays["ids"])
    maps = []
    for number, layer in enumerate(reading.layers):
        listed = []
        for key, values in layer.items():
            about, parts = make_map(key, values, cell.rounds, max_units)
            listed.append(about)
            arrays |= {f"{number}/{key}/{part}": array for part, array in parts.items()}
            if key in ("x_scale", "h_scale"):
                arrays[f"{number}/{key}/strength"] = np.asarray(gate_statistics.strength(values))
        maps.append(listed)
    index, data = pack(arrays)
    return {
        "name": name,
        "folder": os.path.basename(os.path.normpath(model.info["workdir"])),
        "step": model.info["step"],
        "parameters": sum(models.count_parameters(module).values()),
        "hidden": module.hidden_size,
        "cell": module.cell,
        **{key: getattr(cell, key) for key in ("rounds", "rank", "zigzag")},
        "capped": bool(getattr(cell, "cap_input_gate", False)),
        "tied": bool(getattr(cell, "tied_gates", False)),
        "bits_per_token": reading.bits_per_token,
        "perplexity": units.perplexity(reading.bits_per_token * math.log(2)),
        "layers": maps,
        "index": index,
        "data": data,
    }


def make_map(
    name: str, values: np.ndarray, rounds: int, max_units: int
) -> tuple[files.JsonObject, dict[str, np.ndarray]]:
    """The description of a map and its arrays, from the values [N, U] of a gate.

    If there are more than `max_units` units, those that vary most are kept.
    """
    low, high = gate_statistics.limits(name, rounds)
    factor = name.startswith("round") or name.endswith("_scale")
    kind = "gate" if low == 0 else "signed"
    if factor:
        kind = "factor"
    kept = np.arange(values.shape[1])
    if len(kept) > max_units:
        varying = np.log2(np.maximum(values, 2.0**-20)) if factor else values
        kept = np.sort(np.argsort(-varying.var(0), kind="stable")[:max_units])
    reach = max(float(np.abs(values).max()), high)
    fitting = math.floor(math.log10(np.iinfo(np.int16).max / reach))
    decimals = max(0, min(DECIMALS[kind], fitting))
    about = {
        "name": name,
        "kind": kind,
        "reach": reach,
        "decimals": decimals,
        "units": values.shape[1],
    }
    fixed = np.rint(values[:, kept].T.astype(np.float64) * 10**decimals)
    return about, {
        "values": fixed.astype(np.int16),  # [U, N]
        "kept": kept,
        "mean": values.mean(1, dtype=np.float64),
    }


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[list[list[Any]], str]:
    """The names, types and sizes of arrays, and all their bytes, deflated and in base64.

    The first bytes of all numbers of an array come first, then the second bytes, and so on, because
    that deflates better. Floats become float32; integers become int16 if they fit, or else int32.
    """
    index, parts = [], []
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            array = array.astype("<f4")
        else:
            small = np.abs(array).max(initial=0) <= np.iinfo(np.int16).max
            array = array.astype("<i2" if small else "<i4")
        index.append([name, array.dtype.str[1:], array.size])
        parts.append(array.reshape(-1, 1).view(np.uint8).T.tobytes())
    return index, base64.b64encode(zlib.compress(b"".join(parts), 9)).decode()

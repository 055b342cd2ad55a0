"""Limits of cells, parameter counts by formula, and the largest hidden size within a budget.

Letters: V vocabulary, E embedding (input and output), D a layer's input, H hidden units,
r Mogrifier rounds, k rank, K mixture components. The formulas restate the shapes that
`layers.py` and `models.py` create; the tests hold the two together.
"""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from mogrifier_jax import errors

# Of numbers among the fields, both included; those with whole limits are whole.
LIMITS: dict[str, tuple[float, float]] = {
    **{"hidden_size": (1, 10**6), "rounds": (0, 100), "rank": (-(10**6), 10**6)},
    **{"gate_rank": (0, 10**6), "init_factor": (1e-9, 1e3), "cell_clip": (1e-9, 1e6)},
    "forget_bias": (-1e3, 1e3),
}


@dataclasses.dataclass(frozen=True)
class CellOptions:
    """What decides the size of one recurrent layer besides D and H."""

    rounds: int = 0
    rank: int = 0
    gate_bias: bool = True
    tied_gates: bool = False
    layer_norm: bool = False
    scaling: bool = False
    gate_rank: int = 0

    def __post_init__(self):
        check_fields(self)


def check_fields(cell: Any) -> None:
    """Refuses numbers and dtypes that no cell can have."""
    for field in dataclasses.fields(cell):
        name, value = field.name, getattr(cell, field.name)
        if name in ("dtype", "param_dtype"):
            good, rule = _is_floating(value), "a dtype of floating point"
        elif name in LIMITS and not value is field.default is None:
            low, high = LIMITS[name]
            kind: Any = numbers.Integral if isinstance(low, int) else numbers.Real
            good = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
            rule = f"a {'whole ' * isinstance(low, int)}number from {low} to {high}"
        else:
            continue
        if not good:
            raise errors.UsageError(f"{name} {value!r} must be {rule}")


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def _matrix(inputs: int, outputs: int, rank: int) -> int:
    """A dense [inputs, outputs] matrix, or its two factors when rank > 0."""
    return rank * (inputs + outputs) if rank > 0 else inputs * outputs


def _mogrify(d: int, h: int, options: CellOptions) -> int:
    """All rounds of one layer: the odd ones (1st, 3rd, ...) gate x, the even ones h."""
    x_rounds, h_rounds = (options.rounds + 1) // 2, options.rounds // 2
    matrices = options.rounds * _matrix(d, h, options.rank)
    return matrices + options.gate_bias * (x_rounds * d + h_rounds * h)


def _lstm(d: int, h: int, options: CellOptions) -> int:
    gates = (3 if options.tied_gates else 4) * h
    layer_norm = 2 * gates + 2 * h  # Gains of the x and h parts; gain and shift of c.
    return _matrix(d + h, gates, options.gate_rank) + gates + options.layer_norm * layer_norm


def _mlstm(d: int, h: int, options: CellOptions) -> int:
    return d * h + h * h + _lstm(d, h, options)


def _gru(d: int, h: int, options: CellOptions) -> int:
    del options
    return 3 * h * (d + h) + 3 * h + h  # The candidate's recurrent part has its own bias.


def _elman(d: int, h: int, options: CellOptions) -> int:
    del options
    return h * (d + h) + h


# Every cell is counted beside its Mogrifier rounds, of which any may have some or none.
CELLS: dict[str, Callable[[int, int, CellOptions], int]] = {
    "lstm": _lstm,
    "mogrifier_lstm": _lstm,
    "mogrifier_no_zigzag": _lstm,
    "mlstm": _mlstm,
    "mogrifier_gru": _gru,
    "mogrifier_elman": _elman,
}
_ONLY_H = ("mogrifier_gru", "mogrifier_elman")  # The state of the others is c and h.


def embedding_size(hidden_size: int, ratio: float) -> int:
    """E = O for a hidden size; a ratio of 1 or more means E = H."""
    if not ratio >= 0:
        raise errors.UsageError(
            f"embedding_ratio {ratio} is not a ratio: give 0 or more (1 makes the embedding as "
            "wide as the hidden state)"
        )
    return max(1, round(min(1.0, ratio) * hidden_size))


def count_by_part(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    embedding_size: int,
    cell: str = "mogrifier_lstm",
    tied_embeddings: bool = False,
    mixture_components: int = 0,
    encoder_decoder: bool = False,
    trainable_initial_state: bool = False,
    **cell_options: Any,
) -> dict[str, int]:
    """Trainable scalars of the embedding, the recurrent layers, the projection and the softmax.

    `cell_options` are the fields of `CellOptions`; a cell ignores what it does not have.
    """
    if cell not in CELLS:
        raise errors.UsageError(f"cell {cell!r} is unknown: choose one of {', '.join(CELLS)}")
    options = CellOptions(**cell_options)
    v, h, e, mixture = vocab_size, hidden_size, embedding_size, mixture_components
    layers = 0
    for layer in range(num_layers):
        d = e if layer == 0 else h
        layers += CELLS[cell](d, h, options) + _mogrify(d, h, options)
        layers += options.scaling * (d + h)
        layers += trainable_initial_state * (1 if cell in _ONLY_H else 2) * h
    if mixture > 0:
        projection = mixture * (e * h + e + h)
    else:
        projection = h * e if e != h else 0
    stacks = 2 if encoder_decoder else 1
    return {
        "embedding": stacks * v * e,
        "recurrent": stacks * layers,
        "projection": projection,
        "softmax": v + (0 if tied_embeddings else e * v),
    }


def count_parameters(**sizes: Any) -> int:
    """Trainable scalars of the whole model; takes the keywords of `count_by_part`."""
    return sum(count_by_part(**sizes).values())


def solve_hidden_size(budget: int, *, embedding_ratio: float = 1.0, **sizes: Any) -> int:
    """The largest hidden size whose model has at most `budget` parameters.

    `sizes` are the keywords of `count_by_part` without hidden_size and embedding_size; the
    embedding follows each trial size by the ratio.
    """

    def count(hidden_size: int) -> int:
        embedding = embedding_size(hidden_size, embedding_ratio)
        return count_parameters(hidden_size=hidden_size, embedding_size=embedding, **sizes)

    if count(1) > budget:
        raise errors.UsageError(
            f"num_params {budget:,} is too small: one hidden unit already needs {count(1):,} "
            "parameters; raise the budget or lower num_layers, rank or the vocabulary"
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

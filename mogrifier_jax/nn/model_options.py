"""The limits and the meaning of every option of a model, declared once.

Stacks and models refuse values outside these limits when they are set up, and `configs.py` makes
the keys of the section `model` of the same declarations. Defaults are those of the modules' fields,
so they are not repeated here. The limits of the fields of cells are in `layers.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mogrifier_jax import errors
from mogrifier_jax.options import Option

OPTIONS: Mapping[str, Option] = {
    "cell": Option(str, choices="nn.layers.CELLS", meaning="the recurrent cell"),
    "num_layers": Option(int, low=1, high=100, meaning="recurrent layers"),
    "num_params": Option(
        int, low=1, high=10**12, meaning="budget of parameters that hidden_size is solved from"
    ),
    "hidden_size": Option(
        int, low=1, high=10**6, meaning="units of a layer; takes precedence over num_params"
    ),
    "embedding_ratio": Option(
        float, low=0.0, high=1e3, meaning="embedding size / hidden_size; 1 or more makes them equal"
    ),
    "tied_embeddings": Option(bool, meaning="share one matrix between embedding and softmax"),
    "mixture_components": Option(
        int, low=0, high=100, meaning="components of a mixture of softmaxes; 0 is a plain softmax"
    ),
    "output": Option(
        str,
        choices=("sum", "residual", "last"),
        meaning="how the outputs of the layers are combined",
    ),
    "state_mask": Option(
        str, choices=("window", "step"), meaning="draw the state dropout mask once per"
    ),
    "trainable_initial_state": Option(bool, meaning="learn the state that a sequence starts from"),
    "fast": Option(bool, meaning="use the fast recurrence; False is the plain scan"),
    "remat_window": Option(
        int, low=1, high=10**6, meaning="steps recomputed together in the backward pass"
    ),
    "unroll": Option(int, low=1, high=1000, meaning="time steps per iteration of the scan"),
    "max_logits": Option(
        int, low=1, high=1 << 40, meaning="largest number of logits in memory at once"
    ),
    "dtype": Option(str, choices=("float32", "bfloat16"), meaning="dtype of matmuls"),
}
# The fields of the cells; their limits are `layers.LIMITS`.
CELL_MEANINGS = {
    "rounds": "rounds of mutual gating of x and h",
    "rank": "rank of the gating maps; 0 or less is full rank",
    "zigzag": "each round gates with the result of the one before",
    "gate_bias": "gating maps have a bias, as in lamb",
    "scaling": "multiply x and h by learned vectors",
    "init_factor": "factor on the variance of the initial weights",
    "cap_input_gate": "use min(i, 1 - f) as input gate, as in lamb",
    "tied_gates": "use 1 - f as input gate",
    "layer_norm": "layer normalisation inside the cell",
    "cell_clip": "clip c to [-cell_clip, cell_clip]",
    "forget_bias": "mean initial bias of the forget gate",
    "chrono_max": "chrono initialisation of that bias: the longest memory, in steps",
    "gate_rank": "factorise the gate matrix with this rank; 0 is full rank",
    "zoneout": "probability that an element of the state keeps its value",
}
# Sizes that follow from the corpus and from the options above.
_DERIVED = {name: Option(int, low=1, high=10**9) for name in ("vocab_size", "embedding_size")}


def check(module: Any, *names: str) -> None:
    """Refuses a module whose fields of these names are outside the limits."""
    defaults = {field.name: field.default for field in dataclasses.fields(module)}
    declared = {**OPTIONS, **_DERIVED}
    for name in names:
        # Absent is a choice only where it is the default.
        option = declared[name]._replace(required=defaults[name] is not None)
        value = getattr(module, name)
        if reason := option.refusal(value):
            raise errors.UsageError(f"{name} {errors.show(value)} {reason}")

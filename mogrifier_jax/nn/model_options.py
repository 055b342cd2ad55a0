"""The limits and the meaning of every option of a model, declared once.

Stacks and models refuse values outside these limits when they are set up, and `config_keys.py`
makes the keys of the section `model` from the same declarations. The defaults are in the fields of
the modules and are not repeated here. The options of cells are in `layers.py`.
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
# Sizes that follow from the corpus and from the options above.
SIZES = {name: Option(int, low=1, high=10**9) for name in ("vocab_size", "embedding_size")}
ALL = {**OPTIONS, **SIZES}


def check(module: Any, *names: str, declared: Mapping[str, Option] = ALL) -> None:
    """Refuses a module whose fields of these names are outside the limits."""
    for field in dataclasses.fields(module):
        if field.name in names:
            # Absent is a choice only where it is the default.
            option = declared[field.name]._replace(required=field.default is not None)
            value = getattr(module, field.name)
            if reason := option.refusal(value):
                raise errors.UsageError(f"{field.name} {errors.show(value)} {reason}")

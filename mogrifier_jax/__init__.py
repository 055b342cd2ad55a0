"""Mogrifier LSTM in JAX and Flax: cells for any model, language models, trained runs.

    import jax, jax.numpy as jnp
    from mogrifier_jax import RNN, MogrifierLSTMCell

    rnn = RNN(MogrifierLSTMCell(hidden_size=64, rounds=5, rank=16))
    ys, variables = rnn.init_with_output(jax.random.key(0), jnp.ones((2, 10, 32)))

What is listed here is the public interface; it is imported when it is first used, so that the
cells need neither the corpora's libraries nor those of plots and tuning.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mogrifier_jax import nnx as nnx
    from mogrifier_jax.evaluation.trained import TrainedModel as TrainedModel
    from mogrifier_jax.evaluation.trained import load as load
    from mogrifier_jax.nn import from_flax as from_flax
    from mogrifier_jax.nn import from_pytorch as from_pytorch
    from mogrifier_jax.nn.layers import LSTMCell as LSTMCell
    from mogrifier_jax.nn.layers import MLSTMCell as MLSTMCell
    from mogrifier_jax.nn.layers import Mogrifier as Mogrifier
    from mogrifier_jax.nn.layers import MogrifierElmanCell as MogrifierElmanCell
    from mogrifier_jax.nn.layers import MogrifierGRUCell as MogrifierGRUCell
    from mogrifier_jax.nn.layers import MogrifierLSTMCell as MogrifierLSTMCell
    from mogrifier_jax.nn.models import LanguageModel as LanguageModel
    from mogrifier_jax.nn.rnn import RNN as RNN

__version__ = "0.1.0"

_HOMES = {
    "RNN": "nn.rnn",
    "LSTMCell": "nn.layers",
    "LanguageModel": "nn.models",
    "MLSTMCell": "nn.layers",
    "Mogrifier": "nn.layers",
    "MogrifierElmanCell": "nn.layers",
    "MogrifierGRUCell": "nn.layers",
    "MogrifierLSTMCell": "nn.layers",
    "TrainedModel": "evaluation.trained",
    "load": "evaluation.trained",
}
_MODULES = {"from_flax": "nn.from_flax", "from_pytorch": "nn.from_pytorch", "nnx": "nnx"}
__all__ = sorted(_HOMES | _MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

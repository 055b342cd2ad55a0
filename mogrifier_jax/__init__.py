"""Mogrifier LSTM in JAX and Flax: cells for any model, language models, trained runs.

    import jax, jax.numpy as jnp
    from mogrifier_jax import RNN, MogrifierLSTMCell

    rnn = RNN(MogrifierLSTMCell(features=64, rounds=5, rank=16))
    ys, variables = rnn.init_with_output(jax.random.key(0), jnp.ones((2, 10, 32)))

The names below are the public interface. Each is imported when it is first used, so the cells do
not need the libraries for corpora, plots and tuning.
"""

from etils import epy

__version__ = "0.1.0"

with epy.lazy_api_imports(globals()):
    from mogrifier_jax import nnx
    from mogrifier_jax.evaluation.trained_model import TrainedModel, load
    from mogrifier_jax.nn import from_flax, from_pytorch
    from mogrifier_jax.nn.cells import LSTMCarry
    from mogrifier_jax.nn.layers import (
        ElmanCell,
        GRUCell,
        LSTMCell,
        MLSTMCell,
        Mogrifier,
        MogrifierElmanCell,
        MogrifierGRUCell,
        MogrifierLSTMCell,
        RewiredLSTMCell,
    )
    from mogrifier_jax.nn.models import LanguageModel
    from mogrifier_jax.nn.rnn import RNN

__all__ = [
    "RNN",
    "ElmanCell",
    "GRUCell",
    "LSTMCarry",
    "LSTMCell",
    "LanguageModel",
    "MLSTMCell",
    "Mogrifier",
    "MogrifierElmanCell",
    "MogrifierGRUCell",
    "MogrifierLSTMCell",
    "RewiredLSTMCell",
    "TrainedModel",
    "from_flax",
    "from_pytorch",
    "load",
    "nnx",
]

"""The public names for Flax NNX; `nn/nnx.py` has what they are."""

from mogrifier_jax.nn.nnx import RNN as RNN
from mogrifier_jax.nn.nnx import LSTMCell as LSTMCell
from mogrifier_jax.nn.nnx import MLSTMCell as MLSTMCell
from mogrifier_jax.nn.nnx import Mogrifier as Mogrifier
from mogrifier_jax.nn.nnx import MogrifierElmanCell as MogrifierElmanCell
from mogrifier_jax.nn.nnx import MogrifierGRUCell as MogrifierGRUCell
from mogrifier_jax.nn.nnx import MogrifierLSTMCell as MogrifierLSTMCell

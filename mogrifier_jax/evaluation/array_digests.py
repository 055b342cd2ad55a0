"""A digest of arrays, by which readers of model files and of gradient statistics notice damage."""

import hashlib
from collections.abc import Mapping

import jax
import numpy as np


def digest_arrays(about: str, arrays: Mapping[str, np.ndarray | jax.Array]) -> str:
    """The SHA-256 of a text and of the names, shapes, dtypes and contents of arrays."""
    digest = hashlib.sha256(about.encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()

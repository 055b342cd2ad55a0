"""Explains failures of the machine, such as a full disk or a missing library.

Each becomes an `errors.UsageError` with a remedy. Any other exception is a bug, and keeps its
traceback.
"""

import contextlib
import errno
from collections.abc import Iterator

from mogrifier_jax import errors

# The extra that a missing module belongs to. The cells need no extra.
EXTRAS = {
    **dict.fromkeys(("tensorflow_datasets", "importlib_resources"), "data"),
    **dict.fromkeys(("matplotlib", "tensorboardX"), "plot"),
    **dict.fromkeys(("greenlet", "optuna", "scipy", "torch"), "tune"),
}
_FULL = "make room, then repeat the command, which resumes from what is saved"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a place that you may use"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP), "give another name"),
    errno.EIO: "the disk may be failing; copy your files, and continue elsewhere",
}
_OTHER_REMEDY = "check that it exists and that you may use it, then try again"
# How JAX's messages about devices begin, and what is shown instead.
DEVICES = {
    "RESOURCE_EXHAUSTED": "the devices do not have enough memory ({}); lower the window, the batch "
    "size or what runs in parallel, or use more devices",
    "Unable to initialize backend": "the devices cannot be used ({}); check JAX_PLATFORMS",
}


@contextlib.contextmanager
def explained(mode: str = "train") -> Iterator[None]:
    """Turns failures of the machine into a `UsageError`, which names the mode."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise errors.UsageError(
            f"--mode={mode} needs {error.name}, which is not installed; "
            f'pip install "mogrifier_jax[{EXTRAS[error.name]}]"'
        ) from None
    except BrokenPipeError:
        raise errors.UsageError("stdout was closed; what was saved is kept") from None
    except RuntimeError as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        for start, sentence in DEVICES.items():
            if reason.startswith(start):
                raise errors.UsageError(sentence.format(reason)) from None
        raise
    except OSError as error:
        if error.errno is None:
            raise
        place = f" at {error.filename}" if error.filename else ""
        remedy = REMEDIES.get(error.errno, _OTHER_REMEDY)
        raise errors.UsageError(f"{error.strerror}{place}; {remedy}") from None

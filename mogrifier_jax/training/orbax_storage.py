"""Arrays on disk, written and read by Orbax, and the workarounds that long runs need."""

import asyncio
import contextlib
import ctypes
import functools
import glob
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src.serialization import tensorstore_utils


class Folder(type(epath.Path("."))):  # type: ignore[misc]
    """A path for Orbax, which globs in it, and would take brackets in its name for a pattern."""

    def glob(self, pattern: str) -> Iterator["Folder"]:
        """The files in this folder, whatever its name."""
        return map(self._new, glob.glob(os.path.join(glob.escape(str(self)), pattern)))


def make_checkpointer(*, alone: bool = False) -> ocp.AsyncCheckpointer:
    """Writes the arrays of a checkpoint as `state`, and its JSON as `info/info.json`.

    Args:
      alone: this process writes all by itself, and does not wait for others.
    """
    # Orbax logs how many bytes were written, and every reading of that counter leaks memory in
    # TensorStore (orbax-checkpoint 0.12.8, tensorstore 0.1.86): 10 KB at each save.
    tensorstore_utils.get_tensorstore_raw_bytes = lambda *_, **__: 0
    processes = ocp.options.MultiprocessingOptions()
    if alone:
        me = jax.process_index()
        processes = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
        )
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            state=ocp.PyTreeCheckpointHandler(multiprocessing_options=processes),
            info=ocp.JsonCheckpointHandler("info.json", multiprocessing_options=processes),
            composite_options=ocp.CompositeOptions(multiprocessing_options=processes),
        ),
        multiprocessing_options=processes,
    )


def read_arrays(
    folder: pathlib.Path, targets: dict[str, jax.ShapeDtypeStruct], *, on_host: bool = False
) -> dict[str, Any]:
    """Reads saved arrays, onto the shardings of `targets`, or as NumPy arrays."""
    saved = {name: target for name, target in targets.items() if target.size}
    restore_args = ocp.checkpoint_utils.construct_restore_args(saved)
    if on_host:
        restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in saved}
    # The handler instead of a checkpointer, which would wait for the other processes at the end,
    # and forever for one that met damage.
    with quiet_failure():
        arrays = ocp.PyTreeCheckpointHandler().restore(
            Folder(folder),
            args=ocp.args.PyTreeRestore(
                item=saved, restore_args=restore_args, partial_restore=True
            ),
        )
    for name, target in targets.items():
        if not target.size:
            zeros = np.zeros if on_host else functools.partial(jnp.zeros, device=target.sharding)
            arrays[name] = zeros(target.shape, target.dtype)
    return {name: arrays[name] for name in targets}


@contextlib.contextmanager
def quiet_failure() -> Iterator[None]:
    """Keeps a failed transfer from printing a traceback for every other one that was in progress.

    They come from other threads, or whenever the transfers are freed, so the filter stays after a
    failure.
    """
    hook = sys.unraisablehook

    def filtered(failure: Any) -> None:
        code = getattr(failure.object, "cr_code", None)
        is_transfer = code is not None and "orbax" in code.co_filename
        # One that could not open its sockets, because too many files were open, fails to close.
        is_event_loop = failure.object is asyncio.BaseEventLoop.__del__
        closed = "Event loop is closed" in str(failure.exc_value)
        if not (is_transfer or is_event_loop or closed):
            hook(failure)

    sys.unraisablehook = filtered
    yield
    sys.unraisablehook = hook


def release_memory() -> None:
    """Returns freed memory to the system, where the C library is glibc.

    The threads of a save allocate from arenas of their own, which otherwise grow with every save.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

"""What XLA is told before it starts: where compiled programs are kept, and flags it can read."""

import os
import pathlib
import subprocess
import sys

import jax

from mogrifier_jax import errors


def use_compilation_cache() -> None:
    """Keeps compiled programs in ~/.cache, unless JAX_COMPILATION_CACHE_DIR names another folder.

    JAX_ENABLE_COMPILATION_CACHE=false switches it off.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        base = os.environ.get("MOGRIFIER_CACHE_DIR") or "~/.cache/mogrifier_jax"
        folder = pathlib.Path(base).expanduser() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))


def check_flags() -> None:
    """Refuses XLA_FLAGS that the library does not know: reading them, it would end the process."""
    value = os.environ.get("XLA_FLAGS")
    if not value:
        return
    read = "x.CompileOptions().executable_build_options.debug_options"
    command = [sys.executable, "-c", f"from jaxlib import xla_client as x; {read}"]
    checked = subprocess.run(command, capture_output=True, text=True)
    if checked.returncode:
        reason = checked.stderr.strip().partition("\n")[0].rpartition("] ")[2]
        raise errors.UsageError(
            f"XLA_FLAGS={value!r} cannot be read ({reason}); correct or unset the variable"
        )

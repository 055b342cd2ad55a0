"""Settings of JAX and XLA that must be made before they start.

They make the numbers of a run independent of environment variables, keep compiled programs on disk,
and refuse XLA_FLAGS that XLA cannot read.
"""

import os
import subprocess
import sys

import jax
from absl import logging

from mogrifier_jax import errors, files

# What random numbers and dtypes depend on.
NUMBERS = {
    "jax_threefry_partitionable": True,
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
}


def fix_numbers() -> None:
    """Sets the options that random numbers and dtypes depend on, whatever the environment says."""
    for name, value in NUMBERS.items():
        if getattr(jax.config, name) != value:
            logging.warning(
                "%s=%s is ignored: a run uses %s", name.upper(), getattr(jax.config, name), value
            )
            jax.config.update(name, value)


def use_compilation_cache() -> None:
    """Keeps compiled programs in ~/.cache, unless JAX_COMPILATION_CACHE_DIR names another folder.

    JAX_ENABLE_COMPILATION_CACHE=false switches it off.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = os.path.join(files.cache_folder(), "compiled")
        jax.config.update("jax_compilation_cache_dir", folder)


def check_xla_flags() -> None:
    """Refuses XLA_FLAGS that XLA does not know, because it would abort the process over them."""
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

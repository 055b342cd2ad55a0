"""Log lines for people: short, above the progress bar, without the chatter of libraries."""

import logging as python_logging
import sys

import jax
import tqdm
from absl import logging


class _BarHandler(python_logging.Handler):
    """Prints above the bar instead of into it."""

    def emit(self, record: python_logging.LogRecord) -> None:
        tqdm.tqdm.write(self.format(record), file=sys.stderr)


def setup_logging() -> None:
    """Short log lines that go well with a progress bar; other processes than 0 only warn."""
    handler = _BarHandler()
    process = f"[process {jax.process_index()}] " if jax.process_count() > 1 else ""
    handler.setFormatter(
        python_logging.Formatter(f"%(asctime)s {process}%(prefix)s%(message)s", datefmt="%H:%M:%S")
    )
    handler.addFilter(_is_for_people)
    root = python_logging.getLogger()
    root.handlers = [handler]
    logging.set_verbosity(logging.INFO if jax.process_index() == 0 else logging.WARNING)


def _is_for_people(record: python_logging.LogRecord) -> bool:
    """Leaves out what libraries tell of every step they take, and names the level of warnings."""
    warns = record.levelno >= python_logging.WARNING
    record.prefix = f"{record.levelname.lower()}: " if warns else ""
    return warns or not any(f"/{name}/" in record.pathname for name in ("orbax", "jax", "etils"))

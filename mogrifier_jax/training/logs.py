"""Log lines: short, above the progress bar, copied to run.log, those of libraries left out."""

import contextlib
import io
import logging as python_logging
import os
import sys
from collections.abc import Iterator

import jax
import tqdm
from absl import logging

from mogrifier_jax import buckets, errors, files


class _BarHandler(python_logging.Handler):
    """Prints above the bar instead of into it."""

    def emit(self, record: python_logging.LogRecord) -> None:
        # Writing to stderr may fail, for example on a full disk, and must not end the run.
        with contextlib.suppress(OSError):
            tqdm.tqdm.write(buckets.show(self.format(record)), file=sys.stderr)


class _FileHandler(python_logging.StreamHandler):
    """Appends to a file, and gives up silently if the disk is full."""

    def format(self, record: python_logging.LogRecord) -> str:
        return buckets.show(super().format(record))

    def handleError(self, record: python_logging.LogRecord) -> None:
        del record


def setup_logging() -> None:
    """Short log lines that go well with a progress bar; processes other than 0 only warn."""
    handler = _BarHandler()
    process = f"[process {jax.process_index()}] " if jax.process_count() > 1 else ""
    handler.setFormatter(
        python_logging.Formatter(f"%(asctime)s {process}%(prefix)s%(message)s", datefmt="%H:%M:%S")
    )
    handler.addFilter(_is_for_people)
    root = python_logging.getLogger()
    root.handlers = [handler]
    logging.set_verbosity(logging.INFO if jax.process_index() == 0 else logging.WARNING)


@contextlib.contextmanager
def copied_to(path: str | os.PathLike) -> Iterator[None]:
    """Appends the log lines of process 0 to a file as well, with their date."""
    if jax.process_index() != 0:
        yield
        return
    try:
        file = io.TextIOWrapper(files.open_to_write(path, os.O_APPEND | os.O_CREAT), "utf-8")
    except OSError as error:
        logging.warning("no log is written to %s: %s", path, error.strerror)
        yield
        return
    handler = _FileHandler(file)
    handler.setFormatter(python_logging.Formatter("%(asctime)s %(prefix)s%(message)s"))
    handler.addFilter(_is_for_people)
    root = python_logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except (Exception, errors.Interrupted) as error:
        with contextlib.suppress(OSError):
            file.write(f"{type(error).__name__}: {error}\n")
        raise
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):
            file.close()


def _is_for_people(record: python_logging.LogRecord) -> bool:
    """Drops what libraries log about their own work, and names the level of warnings."""
    # Orbax logs tracebacks of errors in its background threads. The same errors are raised to the
    # caller, so they are not logged as well.
    if record.exc_info and ("/orbax/" in record.pathname or record.name == "asyncio"):
        return False
    warns = record.levelno >= python_logging.WARNING
    record.prefix = f"{record.levelname.lower()}: " if warns else ""
    return warns or not any(f"/{name}/" in record.pathname for name in ("orbax", "jax", "etils"))

"""Journal files, one of Optuna's storages: opened, and repaired where nothing is lost.

A worker that was killed, or whose disk was full, may leave half a line at the end of a journal.
"""

import json
import os
import shutil

import optuna
from absl import logging
from optuna.storages import journal

from mogrifier_jax import errors, files
from mogrifier_jax.tuning import redaction

_REMEDY = "restore it from a copy, or use another --storage and --workdir for a new study"


def open_journal(path: str) -> optuna.storages.JournalStorage:
    """Opens a journal; repairs an incomplete last line, and refuses any other damage."""
    if os.path.exists(path) and not os.path.isfile(path):
        shown = redaction.hide_password(path)
        raise errors.UsageError(f"--storage={shown} is not a file; give a journal, or a URL")
    backend, lock = journal.JournalFileBackend(path), journal.JournalFileSymlinkLock(path)
    lock.acquire()  # No other worker is writing a line now.
    try:
        _repair_last_line(path)
    finally:
        lock.release()
    try:
        return optuna.storages.JournalStorage(backend)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        shown = redaction.hide_password(path)
        raise errors.UsageError(f"{shown} is no journal of trials ({reason}); {_REMEDY}") from None


def _repair_last_line(path: str) -> None:
    """Ends the last line if it is complete; otherwise cuts it off and keeps a copy of the file."""
    *lines, last = files.read_bytes(path, _REMEDY).split(b"\n")
    shown = redaction.hide_password(path)
    for number, line in enumerate(lines, start=1):
        if not _is_entry(line):
            raise errors.UsageError(
                f"line {number} of {shown} is not an entry of trials; {_REMEDY}"
            )
    if _is_entry(last):
        with open(path, "ab") as file:
            file.write(b"\n")
    elif last:
        shutil.copyfile(path, f"{path}.damaged")
        os.truncate(path, sum(len(line) + 1 for line in lines))
        logging.warning(
            "%s ended in an incomplete line, which was cut off; %s.damaged has it", shown, shown
        )


def _is_entry(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False

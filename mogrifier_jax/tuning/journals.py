"""Journal files, one of Optuna's storages: opened, and repaired where nothing is lost.

A worker that was killed, or whose disk was full, may leave half a line at the end of a journal.
"""

import json
import os
import shutil
from collections.abc import Sequence

import optuna
from absl import logging
from optuna.storages import journal

from mogrifier_jax import errors, files
from mogrifier_jax.tuning import redaction

_CREATE_STUDY, _CREATE_TRIAL = 0, 4  # Optuna's codes of operations.
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
    if reason := _find_gap(lines):
        raise errors.UsageError(f"lines of {shown} were lost or repeated: {reason}; {_REMEDY}")
    if _is_entry(last):
        with open(path, "ab") as file:
            file.write(b"\n")
    elif last:
        shutil.copyfile(path, f"{path}.damaged")
        os.truncate(path, sum(len(line) + 1 for line in lines))
        logging.warning(
            "%s ended in an incomplete line, which was cut off; %s.damaged has it", shown, shown
        )


def _find_gap(lines: Sequence[bytes]) -> str | None:
    """Why a line must be missing or be there twice; None if nothing shows that.

    Optuna counts trials as it reads, and skips entries of trials and studies that it does not know.
    Without the line that creates a trial, the entries of the next one would be taken for its own.
    """
    created: dict[str, set[bytes]] = {"study": set(), "trial": set()}
    for number, line in enumerate(lines, start=1):
        entry = json.loads(line)
        for kind, known in created.items():
            identity = entry.get(f"{kind}_id", -1)
            if isinstance(identity, int) and identity >= len(known):
                return f"line {number} is about a {kind} that no line before it creates"
        made = {_CREATE_STUDY: "study", _CREATE_TRIAL: "trial"}.get(entry.get("op_code"))
        if made and line in created[made]:
            return f"line {number} creates the same {made} as a line before it"
        if made:
            created[made].add(line)
    return None


def _is_entry(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False

"""The files that record the numbers of a run.

`metrics.jsonl` holds one JSON object per line, in the order of the run, and only numbers that
are the same each time: a resumed run writes the file that the unbroken run would have written.

    {"step": 200, "kind": "train", "loss_nats": ..., "grad_norm": ..., "learning_rate": ...}
    {"step": 200, "kind": "eval", "turn": 1, "valid_nats": ..., "train_nats": ...,
     "temperature": ..., "averaged": false, "best": true}
    {"step": 220, "kind": "restart", "restarts": 1, "best_step": 200, "learning_rate": ...}

`step` counts optimiser steps already made; `loss_nats`, `valid_nats`, `train_nats` are nats per
token; `averaged` tells that averaged weights were evaluated. Further keys may be added. JSON has
no words for numbers that are not finite: they are the strings "nan", "inf" and "-inf", which
`float` reads. `speed.jsonl` holds what differs from run to run, such as tokens per second.
TensorBoard shows both, from the folder `tensorboard`.

`units.py` shows these numbers to people, and `learning_curves.py` draws them.
"""

import contextlib
import hashlib
import importlib.util
import io
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from mogrifier_jax import errors, files
from mogrifier_jax.training import workdirs

_REMEDY = "restore it from a copy, or delete it"
_VALUE = (float, "nan", "inf", "-inf")
RECORD = {  # A line of metrics.jsonl.
    "step": files.COUNT,
    "kind": str,
    **dict.fromkeys(("loss_nats?", "valid_nats?", "train_nats?", "temperature?"), _VALUE),
    "turn?": files.COUNT,
    **dict.fromkeys(("averaged?", "best?"), bool),
}


# What a checkpoint knows of metrics.jsonl.
SEAL = {"lines": files.COUNT, "sha256": str, "parts": [list]}
_PART_DIGITS = 16  # Of the digest of a part, in hexadecimal.
_SEARCHED = 500  # Lines among which a part that is not in its place is looked for.


class MetricWriter:
    """Writes `metrics.jsonl`, `speed.jsonl` and TensorBoard files, on process 0 alone.

    Args:
      resume_step: the step the run goes on from; lines beyond it are dropped, they will come
        again. None is a new run, which drops all.
      sealed: what `seal` returned when the checkpoint of this step was saved; None if it was saved
        by an early version. Lines that do not fit it are set aside.
      evaluations: the records of the evaluations that the checkpoint knows. They take the places of
        those that are set aside.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        resume_step: int | None = None,
        sealed: Mapping[str, Any] | None = None,
        evaluations: Sequence[Mapping[str, Any]] = (),
    ):
        self._metrics = self._speed = self._board = None
        self._repeated: set[tuple[int, str]] = set()
        self._whole, self._part = _Digest(), _Digest()
        self._parts: list[list[Any]] = []
        if jax.process_index() != 0:
            return
        workdir = pathlib.Path(workdir)
        path = workdir / "metrics.jsonl"
        last = -1 if resume_step is None else resume_step
        if resume_step is None or sealed is None:
            # The run may have been killed after writing these and before its next checkpoint.
            self._repeated = _keep_lines(path, last)
            self._take_over(path)
        else:
            self._restore(path, sealed, evaluations)
        self._metrics = io.TextIOWrapper(files.open_to_write(path, os.O_APPEND), "utf-8")
        how = os.O_APPEND if resume_step is not None else os.O_TRUNC
        speed = _free(workdir / "speed.jsonl")
        self._speed = io.TextIOWrapper(files.open_to_write(speed, os.O_CREAT | how), "utf-8")
        self._board = _open_board(workdir / "tensorboard", last + 1)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Records numbers that are the same in every run of this config."""
        if self._metrics and (step, kind) not in self._repeated:
            self._append(self._metrics, {"step": step, "kind": kind} | values, kind)

    def write_speed(self, step: int, **values: Any) -> None:
        """Records numbers that are not, such as `tokens_per_second`."""
        if self._speed:
            self._append(self._speed, {"step": step} | values, "speed")

    def seal(self) -> dict[str, Any] | None:
        """Count and digest of the lines so far, for a checkpoint; None on other processes than 0.

        The lines since the last call are a part, whose digest tells what of a damaged file is good.
        """
        if self._metrics is None:
            return None
        if self._part.lines:
            self._parts.append([self._part.lines, self._part.hexdigest()[:_PART_DIGITS]])
            self._part = _Digest()
        return {
            "lines": self._whole.lines,
            "sha256": self._whole.hexdigest(),
            "parts": [list(part) for part in self._parts],
        }

    def _take_over(self, path: pathlib.Path) -> None:
        """Counts the lines that are there as written, in one part."""
        with files.open_regular(path, _REMEDY) as file:
            for line in file:
                self._whole.add(line)
                self._part.add(line)

    def _restore(
        self,
        path: pathlib.Path,
        sealed: Mapping[str, Any],
        evaluations: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keeps the lines that were there at the checkpoint, or what is left of them."""
        if reason := files.mismatch(sealed, SEAL):
            raise errors.UsageError(f"the checkpoint's notes on {path}: {reason}; {_REMEDY}")
        if os.path.lexists(path) and path.is_file():
            with files.open_regular(path, _REMEDY) as file:
                size = 0
                for line in itertools.islice(file, sealed["lines"]):
                    self._whole.add(line)
                    size += len(line)
            if (self._whole.lines, self._whole.hexdigest()) == (sealed["lines"], sealed["sha256"]):
                os.truncate(path, size)
                self._parts = [list(part) for part in sealed["parts"]]
                return
        kept = set_aside(path)
        lines = list(_find_parts(kept, sealed["parts"])) if kept else []
        known = {record["step"] for _, record in lines if record["kind"] == "eval"}
        made = [
            (json.dumps(dict(record)).encode() + b"\n", dict(record))
            for record in evaluations
            if record["step"] not in known
        ]
        # The sort is stable. The evaluation of a step is behind its training.
        ranks = {"train": 0, "eval": 1}
        lines = sorted(lines + made, key=lambda p: (p[1]["step"], ranks.get(p[1]["kind"], 2)))
        logging.warning(
            "%s is not as it was when the checkpoint was saved%s: %d of its %d lines are good, and "
            "%d evaluations are restored from the checkpoint",
            path,
            f"; it is {kept.name} now" if kept else "",
            len(lines) - len(made),
            sealed["lines"],
            len(made),
        )
        workdirs.replace_text(path, b"".join(line for line, _ in lines).decode())
        self._whole = _Digest()
        self._take_over(path)

    def close(self) -> None:
        """Closes the files."""
        for file in (self._metrics, self._speed, self._board):
            if file is not None:
                with contextlib.suppress(OSError):  # A full disk was met as the line was written.
                    file.close()
        self._metrics = self._speed = self._board = None

    def _append(self, file, record: dict[str, Any], group: str) -> None:
        record = {key: _to_plain(value) for key, value in record.items()}
        odd = {k: str(v) for k, v in record.items() if isinstance(v, float) and not np.isfinite(v)}
        line = json.dumps(record | odd, allow_nan=False) + "\n"
        file.write(line)
        if file is self._metrics:
            self._whole.add(line.encode())
            self._part.add(line.encode())
        file.flush()  # So that it can be read while the run goes on.
        if self._board is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"{group}/{key}", value, record["step"])


def _keep_lines(path: pathlib.Path, last: int) -> set[tuple[int, str]]:
    """Drops the lines beyond the step `last`; returns step and kind of those at this step."""
    repeated: set[tuple[int, str]] = set()
    there, whole = _count_lines(path) if os.path.lexists(path) else 0, 0
    with workdirs.replacing(path) as file:
        for line, record in read_lines(path) if there else ():
            whole += 1
            if record["step"] <= last:
                file.write(line)
                if record["step"] == last:
                    repeated.add((record["step"], record["kind"]))
        if whole != there:
            shutil.copyfile(path, f"{path}.damaged")
            logging.warning("%s is kept as %s.damaged, with what is left out", path, path.name)
    return repeated


def _count_lines(path: pathlib.Path) -> int:
    with files.open_regular(path, _REMEDY) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _free(path: pathlib.Path) -> pathlib.Path:
    """A path that a file can be written to: what is not a file there is moved aside."""
    if os.path.lexists(path) and not path.is_file():
        kept = set_aside(path)
        logging.warning("%s was not a file; it is %s now", path, kept and kept.name)
    return path


def set_aside(path: pathlib.Path) -> pathlib.Path | None:
    """Renames a damaged file, over no other one; None if there is nothing."""
    if not os.path.lexists(path):
        return None
    numbers = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}.damaged{number}") for number in numbers)
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def _find_parts(
    path: pathlib.Path, parts: Sequence[Sequence[Any]]
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of the parts that a damaged file still has, in order, with their records."""
    if not path.is_file():
        return
    with files.open_regular(path) as file:
        lines, place = list(file), 0
    for count, digest in parts:
        for start in range(place, min(place + _SEARCHED, len(lines) - count + 1)):
            found = _Digest()
            for line in lines[start : start + count]:
                found.add(line)
            if found.hexdigest()[:_PART_DIGITS] == digest:
                place = start + count
                yield from ((line, json.loads(line)) for line in lines[start:place])
                break


class _Digest:
    """A number of lines and their SHA-256."""

    def __init__(self) -> None:
        self.lines, self._hash = 0, hashlib.sha256()

    def add(self, line: bytes) -> None:
        """Adds a line at the end."""
        self.lines += 1
        self._hash.update(line)

    def hexdigest(self) -> str:
        """The digest of all lines so far."""
        return self._hash.hexdigest()


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The records so far; a last line that is still being written is left out."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    return [record for _, record in read_lines(path)] if path.exists() else []


def read_lines(path: pathlib.Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every whole line with its record, one after the other; names lines that are no records."""
    with files.open_regular(path, _REMEDY) as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield line, files.parse_json(line, RECORD, "it")
            except errors.UsageError:
                logging.warning("%s: this is not a record, left out: %r", path, line[:80])


def _to_plain(value: Any) -> Any:
    """Python's own number; a float32 becomes the shortest decimal that reads as that float32."""
    if isinstance(value, str | bool | int | float | None):
        return value
    value = np.asarray(value)
    if value.ndim:
        raise TypeError(f"a metric is one number, not an array of shape {value.shape}")
    if value.dtype == np.float32:
        return float(str(value[()]))
    return value.item()


def _open_board(folder: pathlib.Path, first_step: int):
    """A TensorBoard writer, or None if tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        logging.info("no TensorBoard files: tensorboardX is not installed")
        return None
    import tensorboardX

    # What an earlier start wrote from this step on is hidden.
    return tensorboardX.SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)

"""Writes the numbers of a run to metrics.jsonl, speed.jsonl and TensorBoard's event files.

`metrics.jsonl` has one JSON object per line, in the order of the run, and only numbers that are
reproducible: a resumed run writes the same bytes as a run that was never interrupted.

    {"step": 200, "kind": "train", "loss_nats": ..., "grad_norm": ..., "learning_rate": ...}
    {"step": 200, "kind": "eval", "turn": 1, "valid_nats": ..., "train_nats": ...,
     "temperature": ..., "averaged": false, "best": true}
    {"step": 220, "kind": "restart", "restarts": 1, "best_step": 200, "learning_rate": ...}

`step` is the number of optimizer steps made so far; `loss_nats`, `valid_nats` and `train_nats` are
nats per token; `averaged` says whether averaged weights were evaluated. Further keys may be added.
Numbers that are not finite, which JSON lacks, are the strings "nan", "inf" and "-inf", which
`float` reads. `speed.jsonl` has what differs from run to run, such as tokens per second.
TensorBoard shows both, from the folder `tensorboard`.

`units.py` formats these numbers for people, and `learning_curves.py` draws them.
"""

import codecs
import contextlib
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import jax
import numpy as np
from absl import logging

from mogrifier_jax import errors, files
from mogrifier_jax.training import atomic_files

_REMEDY = "restore it from a copy, or delete it"
_VALUE = (float, "nan", "inf", "-inf")
RECORD = {  # A line of metrics.jsonl.
    "step": files.COUNT,
    "kind": str,
    **dict.fromkeys(("loss_nats?", "valid_nats?", "train_nats?", "temperature?"), _VALUE),
    "turn?": files.COUNT,
    **dict.fromkeys(("averaged?", "best?"), bool),
}


# What a checkpoint remembers of metrics.jsonl.
DIGEST_SCHEMA = {"lines": files.COUNT, "sha256": str, "parts": [[files.COUNT, str]]}
_PART_DIGITS = 16  # Of the digest of a part, in hexadecimal.
_SEARCHED = 500  # Lines before and after its position in which a part is searched for.
_HASHED = 1 << 32  # Bytes hashed in these searches, which takes a few seconds.
_LONGEST = 1 << 20  # Bytes of a line. A record is shorter.


class MetricWriter:
    """Writes `metrics.jsonl`, `speed.jsonl` and TensorBoard files, on process 0 alone.

    Args:
      resume_step: the step that the run resumes from. Later lines are dropped, because they will be
        written again. None is a new run, which drops all lines.
      expected: what `digest_lines` returned when the checkpoint of this step was saved; None if an
        early version saved it. Lines that do not match are set aside.
      evaluations: the records of the evaluations that the checkpoint remembers. They replace those
        that are set aside.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        resume_step: int | None = None,
        expected: files.JsonObject | None = None,
        evaluations: Sequence[files.JsonObject] = (),
    ):
        self._metrics = self._speed = self._board = None
        self._open_board: Callable[[], Any] | None = None
        self._repeated: set[tuple[int, str]] = set()
        self._whole, self._part = _Digest(), _Digest()
        self._parts: list[list[Any]] = []
        if jax.process_index() != 0:
            return
        workdir = pathlib.Path(workdir)
        path = workdir / "metrics.jsonl"
        last = -1 if resume_step is None else resume_step
        if resume_step is None or expected is None:
            # The run may have been killed after it wrote these and before its next checkpoint.
            self._repeated = _keep_lines(path, last)
            self._take_over(path)
        else:
            self._restore(path, expected, evaluations)
        self._metrics = io.TextIOWrapper(files.open_to_write(path, os.O_APPEND), "utf-8")
        how = os.O_APPEND if resume_step is not None else os.O_TRUNC
        speed = _make_free(workdir / "speed.jsonl")
        self._speed = io.TextIOWrapper(files.open_to_write(speed, os.O_CREAT | how), "utf-8")
        # A run that has ended already writes nothing, and leaves no empty file.
        self._open_board = functools.partial(_open_board, workdir / "tensorboard", last + 1)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Records numbers that are reproducible."""
        if self._metrics and (step, kind) not in self._repeated:
            self._append(self._metrics, {"step": step, "kind": kind} | values, kind)

    def write_speed(self, step: int, **values: Any) -> None:
        """Records numbers that are not reproducible, such as `tokens_per_second`."""
        if self._speed:
            self._append(self._speed, {"step": step} | values, "speed")

    def digest_lines(self) -> files.JsonObject | None:
        """Count and digest of the lines so far, for a checkpoint; None on processes other than 0.

        The lines since the last call form a part with its own digest, by which the good parts of a
        damaged file are recognised.
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
        """Digests the existing lines, as one part."""
        with files.open_regular(path, _REMEDY) as file:
            for line in file:
                self._whole.add(line)
                self._part.add(line)

    def _restore(
        self,
        path: pathlib.Path,
        expected: files.JsonObject,
        evaluations: Sequence[files.JsonObject],
    ) -> None:
        """Keeps the lines that existed at the checkpoint, or what is left of them."""
        if reason := files.mismatch(expected, DIGEST_SCHEMA):
            raise errors.UsageError(f"the checkpoint's digest of {path}: {reason}; {_REMEDY}")
        if os.path.lexists(path) and path.is_file():
            with files.open_regular(path, _REMEDY) as file:
                size = 0
                for line in itertools.islice(_split_lines(file), expected["lines"]):
                    self._whole.add(line)
                    size += len(line)
                    if not line.endswith(b"\n"):
                        break
            counted = (self._whole.lines, self._whole.hexdigest())
            if counted == (expected["lines"], expected["sha256"]):
                os.truncate(path, size)
                self._parts = [list(part) for part in expected["parts"]]
                return
        kept = set_aside(path)
        lines = list(_find_parts(kept, expected["parts"])) if kept else []
        known = {step for step, kind, _ in lines if kind == "eval"}
        made = [
            (record["step"], "eval", json.dumps(dict(record)).encode() + b"\n")
            for record in evaluations
            if record["step"] not in known
        ]
        # The sort is stable, and the evaluation of a step follows its training.
        ranks = {"train": 0, "eval": 1}
        lines = sorted(lines + made, key=lambda line: (line[0], ranks.get(line[1], 2)))
        logging.warning(
            "%s has changed since the checkpoint was saved%s: %d of its %d lines are good, and "
            "%d evaluations are restored from the checkpoint",
            path,
            f" and was renamed to {kept.name}" if kept else "",
            len(lines) - len(made),
            expected["lines"],
            len(made),
        )
        atomic_files.replace_text(path, b"".join(line for *_, line in lines).decode())
        self._whole = _Digest()
        self._take_over(path)

    def close(self) -> None:
        """Closes the files."""
        for file in (self._metrics, self._speed, self._board):
            if file is not None:
                with contextlib.suppress(OSError):  # A full disk was noticed at the last line.
                    file.close()
        self._metrics = self._speed = self._board = self._open_board = None

    def _append(self, file, record: files.JsonObject, group: str) -> None:
        record = {key: _to_plain(value) for key, value in record.items()}
        odd = {k: str(v) for k, v in record.items() if isinstance(v, float) and not np.isfinite(v)}
        line = json.dumps(record | odd, allow_nan=False) + "\n"
        file.write(line)
        if file is self._metrics:
            self._whole.add(line.encode())
            self._part.add(line.encode())
        file.flush()  # So that it can be read during the run.
        if self._open_board is not None:
            self._board, self._open_board = self._open_board(), None
        if self._board is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"{group}/{key}", value, record["step"])


def _keep_lines(path: pathlib.Path, last: int) -> set[tuple[int, str]]:
    """Drops the lines after the step `last`; returns step and kind of those at this step."""
    repeated: set[tuple[int, str]] = set()
    there, whole = _count_lines(path) if os.path.lexists(path) else 0, 0
    with atomic_files.replacing(path) as file:
        for line, record in read_lines(path) if there else ():
            whole += 1
            if record["step"] <= last:
                file.write(line)
                if record["step"] == last:
                    repeated.add((record["step"], record["kind"]))
        if whole != there:
            shutil.copyfile(path, f"{path}.damaged")
            logging.warning("%s is kept as %s.damaged, with the dropped lines", path, path.name)
    return repeated


def _count_lines(path: pathlib.Path) -> int:
    with files.open_regular(path, _REMEDY) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _make_free(path: pathlib.Path) -> pathlib.Path:
    """A path for a file; anything else that exists at this path is renamed."""
    if os.path.lexists(path) and not path.is_file():
        kept = set_aside(path)
        logging.warning("%s was not a file; it was renamed to %s", path, kept and kept.name)
    return path


def set_aside(path: pathlib.Path) -> pathlib.Path | None:
    """Renames a damaged file to a free name; None if it does not exist."""
    if not os.path.lexists(path):
        return None
    numbers = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}.damaged{number}") for number in numbers)
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def _find_parts(
    path: pathlib.Path, parts: Sequence[Sequence[Any]]
) -> Iterator[tuple[int, str, bytes]]:
    """The lines of the parts that are intact in a damaged file, with their steps and kinds.

    Empty lines, other line ends and a byte order mark, as an editor may leave them, do no harm.
    """
    if not path.is_file():
        return
    most = min(2 * sum(count for count, _ in parts) + _SEARCHED, sys.maxsize)
    with files.open_regular(path) as file:
        pieces = (
            piece.strip()
            for line in _split_lines(file)
            for piece in line.removeprefix(codecs.BOM_UTF8).splitlines()
        )
        lines = [piece + b"\n" for piece in itertools.islice(filter(None, pieces), most)]
    content = memoryview(b"".join(lines))
    ends = [0, *itertools.accumulate(map(len, lines))]
    position = lost = hashed = 0  # `position` follows the last part that was found.
    for count, digest in parts:
        last, guess = len(lines) - count, position + lost
        near = range(max(0, guess - _SEARCHED), min(guess + _SEARCHED, last + 1))
        lost += count
        # Where it would be if no line or all lines of the lost parts were there, then nearby.
        likely = [start for start in (guess, position) if start <= last]
        for start in (*likely, *sorted(near, key=lambda start: abs(start - guess))):
            if hashed > _HASHED and start not in likely:
                break
            part = content[ends[start] : ends[start + count]]
            hashed += len(part)
            if hashlib.sha256(part).hexdigest()[:_PART_DIGITS] == digest:
                for line in lines[start : start + count]:
                    record = json.loads(line)
                    yield record["step"], record["kind"], line
                position, lost = start + count, 0
                break


def _split_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file; one that is too long for a record is cut, so that memory suffices."""
    while line := file.readline(_LONGEST):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST)


class _Digest:
    """The number of lines and their SHA-256."""

    def __init__(self) -> None:
        self.lines, self._hash = 0, hashlib.sha256()

    def add(self, line: bytes) -> None:
        """Appends a line."""
        self.lines += 1
        self._hash.update(line)

    def hexdigest(self) -> str:
        """The digest of all lines so far."""
        return self._hash.hexdigest()


def read_metrics(workdir: str | os.PathLike) -> list[files.JsonObject]:
    """All records so far, without a last line that is still being written."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    return [record for _, record in read_lines(path)] if path.exists() else []


def read_lines(path: pathlib.Path) -> Iterator[tuple[bytes, files.JsonObject]]:
    """Every complete line with its record; warns of lines that are not records."""
    with files.open_regular(path, _REMEDY) as file:
        for line in _split_lines(file):
            if not line.endswith(b"\n") and len(line) < _LONGEST:
                return
            try:
                yield line, files.parse_json(line, RECORD, "it")
            except errors.UsageError:
                logging.warning("%s: skipped a line that is not a record: %r", path, line[:80])


def _to_plain(value: object) -> object:
    """A Python number; a float32 becomes the shortest decimal that parses to that float32."""
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

    # Hides what was written from this step on before the run was resumed.
    return tensorboardX.SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)

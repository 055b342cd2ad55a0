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
import importlib.util
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
from absl import logging

from mogrifier_jax import errors
from mogrifier_jax.training import workdirs


class MetricWriter:
    """Writes `metrics.jsonl`, `speed.jsonl` and TensorBoard files, on process 0 alone.

    Args:
      resume_step: the step the run goes on from; lines beyond it are dropped, they will come
        again. None is a new run, which drops all.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int | None = None):
        self._metrics = self._speed = self._board = None
        if jax.process_index() != 0:
            return
        workdir = pathlib.Path(workdir)
        path = workdir / "metrics.jsonl"
        last = -1 if resume_step is None else resume_step
        records = read_metrics(workdir)
        if path.exists() and len(records) != path.read_bytes().count(b"\n"):
            shutil.copyfile(path, f"{path}.damaged")
            logging.warning("%s is kept as %s.damaged, with what is left out", path, path.name)
        kept = [record for record in records if record["step"] <= last]
        workdirs.replace_text(path, "".join(f"{json.dumps(record)}\n" for record in kept))
        # The run may have been killed after writing these and before its next checkpoint.
        self._repeated = {(r["step"], r["kind"]) for r in kept if r["step"] == last}
        self._metrics = path.open("a")
        self._speed = (workdir / "speed.jsonl").open("a" if resume_step is not None else "w")
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
        file.write(json.dumps(record | odd, allow_nan=False) + "\n")
        file.flush()  # So that it can be read while the run goes on.
        if self._board is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"{group}/{key}", value, record["step"])


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The records so far; a last line that is still being written is left out."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    if not path.exists():
        return []
    if not path.is_file():
        raise errors.UsageError(f"{path} is not a file; restore it from a copy, or delete it")
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        whole = isinstance(record, dict) and {"step", "kind"} <= record.keys()
        if whole and type(record["step"]) is int:
            records.append(record)
        else:
            logging.warning("%s: this is not a record, left out: %r", path, line[:80])
    return records


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

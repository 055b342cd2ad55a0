r"""Kills, damage, full disks, changed corpora, random command lines and calls, with a report.

    python -m benchmarks.chaos --kills=100 --damages=200 --disks=10 --folder=/tmp/chaos
    python -m benchmarks.chaos --texts=20 --lines=500 --environments=20 --databases=100 --calls=500

An unbroken run of `experiments/pydoc.py:tiny` is the reference. What must hold:

- A run that was killed, or whose disk was full, ends with the same metrics and results as the
  unbroken run, byte by byte, once it is allowed to.
- Damage is named, is refused in one sentence, or changes no number.
- A run does not resume on a changed corpus, and scores of a changed corpus say so.
- A flag of another mode is refused.
- A call from Python with nonsense, or a database with wrong content, returns or raises a
  UsageError.
- Nothing prints a traceback or hangs, and exit codes are those of docs/pods.md.

The report grows in `<folder>/report.txt`, beside the outputs with faults. With `--broken`, each
series runs while a check of the package is switched off (`BREAKS`), and must find at least one
fault.

Each start is a fork of a process that has imported the package and has not started JAX, which
saves the time of the imports. Full disks are small tmpfs mounts, which only root can make; without
root, a limit on the size of files (RLIMIT_FSIZE) takes their place.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import json
import os
import pathlib
import pickle
import pkgutil
import random
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import safetensors
import safetensors.numpy
from absl import flags
from flax import nnx

import mogrifier_jax
from mogrifier_jax import command_line, config_keys, configs, errors, main
from mogrifier_jax.data import vocabularies
from mogrifier_jax.evaluation import (
    eval_options,
    model_files,
    sample_command,
    text_sampling,
    trained_model,
)
from mogrifier_jax.training import checkpoints

EXPERIMENTS = pathlib.Path("experiments").absolute()
CONFIG = f"{EXPERIMENTS}/pydoc.py:tiny"
# One layer with two rounds, because most of the time of a start goes into tracing the model.
RUN = (
    *(f"--config={CONFIG}", "--config.schedule.turns=5", "--config.log_every=1"),
    *("--config.model.num_layers=1", "--config.model.rounds=2"),
)
SENTENCE = "The lambda form creates a function."
SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM,) * 3 + (signal.SIGINT,) * 2 + (signal.SIGHUP,)
EXIT_CODES = {0, 2, 3, 75, 130}
MAX_SECONDS = 20  # Of processor time, after which a start counts as hanging.
MAX_WALL_SECONDS = 900  # A start may wait for the cores, but not for ever.
# Modules that most starts import, imported once before the forks.
PRELOADED = (
    *("matplotlib.pyplot", "tensorflow_datasets", "mogrifier_jax.distributed"),
    *("mogrifier_jax.jax_settings", "mogrifier_jax.training.train"),
    *("mogrifier_jax.training.learning_curves", "mogrifier_jax.evaluation.evaluate_command"),
)


def start(
    arguments: Sequence[str], log: pathlib.Path, prepare: Callable[[], None] | None = None
) -> int:
    """Forks a process that runs a command line, its output in a file; returns its pid."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code: Any = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Also under nohup.
        signal.alarm(MAX_WALL_SECONDS)
        sys.argv = ["main", *arguments]
        if prepare is not None:
            prepare()
        try:
            main.run()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int | None) else 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code or 0)  # Whatever happens, a fork does not go on with the series.


def finish(pid: int) -> int:
    """The exit code of a start, or minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Report:
    """Counts of all outcomes and a list of the faults, written to a file as it grows."""

    def __init__(self, path: pathlib.Path, title: str) -> None:
        self.path, self.title = path, title
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def count(self, kind: str, outcome: str) -> None:
        """Counts an outcome."""
        self.counts[f"{kind}: {outcome}"] += 1
        self.path.write_text(str(self))

    def __str__(self) -> str:
        counts = [f"{count:6d}  {name}" for name, count in sorted(self.counts.items())]
        faults = [f"{len(self.faults)} faults", *(f"  {fault}" for fault in self.faults)]
        return "\n".join([self.title, *counts, *faults, ""])

    def add_fault(self, fault: str) -> None:
        """Adds to the list of faults."""
        fault = fault.encode(errors="backslashreplace").decode()
        self.faults.append(fault)
        print("FAULT", fault, flush=True)

    def check(self, holds: bool, what: str, log: pathlib.Path) -> None:
        """Adds a fault, with the last line of the output, unless something holds."""
        if not holds:
            said = read_output(log).strip().splitlines()
            shutil.copy(log, log.with_name(f"fault{len(self.faults)}.log"))
            self.add_fault(f"{what} | {said[-1][:300] if said else ''}")

    def check_output(
        self, log: pathlib.Path, code: int, what: str, allowed: set[int] = EXIT_CODES
    ) -> None:
        """Checks that no traceback was printed and that the exit code is a documented one."""
        said = read_output(log)
        self.check("Traceback" not in said, f"traceback: {what}", log)
        self.check(code in allowed, f"exit code {code}: {what}", log)
        self.check(said.count("\n") < 100, f"{said.count(chr(10))} lines: {what}", log)


def read_output(log: pathlib.Path) -> str:
    """What a start has printed, also if it was asked to print UTF-16."""
    return log.read_text(errors="replace").replace("\0", "")


class Deck:
    """Deals names in random order; each is dealt once before any is dealt again."""

    def __init__(self, names: Sequence[str], rng: random.Random) -> None:
        self._names, self._rng = sorted(names), rng
        self._left: list[str] = []
        self.dealt: set[str] = set()

    def deal(self, count: int) -> list[str]:
        """The next names, as many as asked for."""
        found: list[str] = []
        while len(found) < min(count, len(self._names)):
            self._left = self._left or self._rng.sample(self._names, len(self._names))
            found.append(self._left.pop())
        self.dealt.update(found)
        return found

    def __str__(self) -> str:
        return f"{len(self.dealt)} of {len(self._names)}"


class Series(NamedTuple):
    """What every series of trials needs."""

    count: int
    root: pathlib.Path  # A folder for whatever it writes.
    reference: pathlib.Path  # The workdir of the unbroken run.
    seconds: float  # What the unbroken run took.
    rng: random.Random
    report: Report

    @property
    def log(self) -> pathlib.Path:
        """The output of the last start."""
        return self.root / "log"


# Kills.


def kill(series: Series) -> None:
    """Ends starts of a run at random moments; each run must end up like the unbroken one."""
    count, root, reference, seconds, rng, report = series
    folder, log, number = root / "kills0", series.log, 0
    for i in range(count):
        chosen = rng.choice(SIGNALS)
        newest = latest_step(folder)
        pid = start([*RUN, f"--workdir={folder}"], log, without_sample)
        began, watched = time.monotonic(), os.pidfd_open(pid)
        ended, _, _ = select.select([watched], [], [], rng.uniform(0.0, 1.1 * seconds))
        os.close(watched)
        if ended and newest < 0:
            seconds = time.monotonic() - began  # Other programs may leave it more or less time.
        os.kill(pid, chosen)
        code, name = finish(pid), signal.Signals(chosen).name
        report.check_output(log, code, f"{name} {i}", EXIT_CODES | {-chosen})
        report.count(name, "came after the end" if code == 0 else f"code {code}")
        report.check(latest_step(folder) >= newest, f"{name} {i} lost step {newest}", log)
        if code == 0 or i == count - 1:
            code = resume(folder, log)  # A run that has ended stays as it is.
            same = code == 0 and is_like(folder, reference)
            report.check(same, f"{folder} differs from the unbroken run", log)
            report.count("runs that were killed", "like the unbroken run" if same else "different")
            number += 1
            folder = root / f"kills{number}"


def latest_step(folder: pathlib.Path) -> int:
    """The step of the newest checkpoint of a workdir; -1 if there is none."""
    # A checkpoint that is being replaced is kept under this name, and the next start takes it back.
    names = [p.name.removesuffix(".replaced") for p in (folder / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def resume(folder: pathlib.Path, log: pathlib.Path) -> int:
    """Starts or resumes a run and waits for its end."""
    return finish(start([*RUN, f"--workdir={folder}"], log, without_sample))


def without_sample() -> None:
    """Leaves out the sample at the end of a run, which takes as long as the run itself."""
    sample_command.print_samples = lambda *_, **__: None


def is_like(folder: pathlib.Path, reference: pathlib.Path) -> bool:
    """Whether a run has the metrics and the results of the unbroken run."""
    return read_numbers(folder) == read_numbers(reference)


def read_numbers(folder: pathlib.Path) -> list[bytes]:
    """The metrics and results of a run; empty where a file is missing."""
    paths = (folder / "metrics.jsonl", folder / "results.json")
    return [path.read_bytes() if path.is_file() else b"" for path in paths]


# Damage.

RESEALED = "other content, resealed"  # By somebody who knows how digests are computed.
DAMAGES: dict[str, Callable[[pathlib.Path, random.Random], Any]] = {
    "truncated": lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size or 1)),
    "emptied": lambda path, rng: os.truncate(path, 0),
    "deleted": lambda path, rng: path.unlink(),
    "garbage": lambda path, rng: path.write_bytes(rng.randbytes(200)),
    "a flipped bit": lambda path, rng: flip_bit(path, rng),
    "other JSON": lambda path, rng: path.write_text(rng.choice(OTHER_JSON)),
    "a folder": lambda path, rng: (path.unlink(), path.mkdir()),
    "a pipe": lambda path, rng: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path, rng: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link to nothing": lambda path, rng: (path.unlink(), path.symlink_to("nowhere")),
    "a link to itself": lambda path, rng: (path.unlink(), path.symlink_to(path)),
    "unreadable text": lambda path, rng: path.write_bytes(path.read_bytes().replace(b"e", b"\xff")),
    "other line ends": lambda path, rng: path.write_bytes(
        path.read_bytes().replace(b"\n", b"\r\n")
    ),
    "other content": lambda path, rng: edit(path, rng),
    "other lines": lambda path, rng: edit_lines(path, rng),
    RESEALED: lambda path, rng: edit(path, rng, reseal=True),
}
OTHER_JSON = ("[]", "{}", "5", "null", '"x"', "NaN", "[" * 9000, '{"step": 1e999}', "\ufeff{}")
VALUES_IN_FILES: tuple[Any, ...] = (None, True, -1, 0, 0.5, 1e9, 10**30, float("nan"), "", "x")
VALUES_IN_FILES += ("../..", "\0", [], [1], [[]], {}, {"a": 1}, float("inf"))


def damage(series: Series) -> None:
    """Damages a file of a run that has ended, and then uses the run."""
    count, root, reference, _, rng, report = series
    if not count:
        return
    log, whole, folder = series.log, root / "whole", root / "damaged"
    shutil.copytree(reference, whole)
    (root / "text.txt").write_text(f"{SENTENCE}\n" * 20)
    export = ["--mode=export", f"--workdir={whole}"]
    for line in (evaluation_of(whole), evaluation_of(whole, "dyneval"), export):
        assert finish(start(line, log)) == 0, log.read_text()
    expected = {}
    for name, use in USES.items():
        expected[name] = use(whole, log)
        # A warning that is always there would count as one of the damage.
        assert expected[name][0] == 0 and "warning:" not in log.read_text(), log.read_text()
    for i in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        path = choose_file(folder, i, rng)
        kind = rng.choice(list(DAMAGES))
        DAMAGES[kind](path, rng)
        name = choose_use(path, rng)
        what = f"{name}, {kind}: {path.relative_to(folder)}"
        if name == "resumed" and rng.random() < 0.5 and (folder / "results.json").is_file():
            (folder / "results.json").unlink()  # As if the run had not ended.
        code, numbers = USES[name](folder, log)
        same = (code, numbers) == expected[name]
        named = code == 2 or "warning:" in log.read_text(errors="replace")
        report.check_output(log, code, what)
        report.check(same or named or kind == RESEALED, f"silent: {what}", log)
        outcome = "refused" if code == 2 else "same numbers" if same else "named, other numbers"
        if kind == RESEALED and not (same or named):
            outcome = "resealed, other numbers"
        report.count(f"damaged and {name}", outcome)


def choose_file(folder: pathlib.Path, i: int, rng: random.Random) -> pathlib.Path:
    """One of all files, of the small ones or of the archives in turn, as arrays have many files."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and "tensorboard" not in p.parts)
    suffixes = ((".json", ".jsonl"), (".npz", ".safetensors"), None)[i % 3]
    return rng.choice([p for p in files if suffixes is None or p.suffix in suffixes])


def choose_use(path: pathlib.Path, rng: random.Random) -> str:
    """How a run is used after a file of it was damaged: in a way that reads the file."""
    if path.suffix == ".npz":
        return "averaged" if path.parent.name == "tokens" else "adapted"
    uses = {"model.safetensors": "loaded", "evaluation.json": "evaluated"}
    uses |= dict.fromkeys(("metrics.jsonl", "speed.jsonl"), "resumed")
    return uses.get(path.name) or rng.choice(
        ("resumed", "resumed", "scored", "scored", "evaluated")
    )


def evaluation_of(folder: pathlib.Path, method: str = "deterministic") -> list[str]:
    """A command line that scores a short text."""
    options = {"methods": method, "text": folder.parent / "text.txt"}
    if method == "dyneval":
        options |= {"dyneval.batch_size": 8, "dyneval.max_windows": 3}
    given = [f"--eval.{name}={value}" for name, value in options.items()]
    return ["--mode=evaluate", f"--workdir={folder}", *given]


def use_resumed(folder: pathlib.Path, log: pathlib.Path) -> tuple[int, Any]:
    """Resumes the run."""
    return resume(folder, log), read_numbers(folder)


def use_scored(folder: pathlib.Path, log: pathlib.Path) -> tuple[int, Any]:
    """Loads the run and scores a sentence."""
    return score(folder, log)


def use_loaded(folder: pathlib.Path, log: pathlib.Path) -> tuple[int, Any]:
    """Loads the file that was exported from the run and scores a sentence."""
    return score(folder / "model.safetensors", log)


def use_evaluated(
    folder: pathlib.Path, log: pathlib.Path, method: str = "deterministic"
) -> tuple[int, Any]:
    """Evaluates the run."""
    code = finish(start(evaluation_of(folder, method), log))
    if code:
        return code, None
    row = json.loads((folder / "evaluation.json").read_bytes())["results"][-1]
    return code, (row["method"], row["nats"])


def use_averaged(folder: pathlib.Path, log: pathlib.Path) -> tuple[int, Any]:
    """Averages the token scores of two evaluations."""
    output = folder.parent / "averaged.npz"
    output.unlink(missing_ok=True)
    pattern = str(folder / "tokens")
    names = ",".join(f"{pattern}/{name}" for name in sorted(os.listdir(pattern)))
    line = ["--mode=evaluate", f"--eval.ensemble={names}", f"--eval.output={output}"]
    code = finish(start(line, log))
    return code, np.load(output)["nats"].tolist() if output.exists() else None


USES = {
    "resumed": use_resumed,
    "scored": use_scored,
    "loaded": use_loaded,
    "evaluated": use_evaluated,
    "adapted": functools.partial(use_evaluated, method="dyneval"),
    "averaged": use_averaged,
}


def score(workdir: pathlib.Path, log: pathlib.Path) -> tuple[int, str]:
    """The exit code of loading a run or an exported file, and the score of a sentence."""
    found = log.with_name("scored")
    found.unlink(missing_ok=True)

    def instead() -> None:
        def run(workdir: str, *_) -> None:
            found.write_text(repr(trained_model.load(workdir).score(SENTENCE).nats_per_token))

        sample_command.print_samples = run

    code = finish(start(["--mode=sample", f"--workdir={workdir}"], log, instead))
    return code, found.read_text() if found.exists() else ""


def edit(path: pathlib.Path, rng: random.Random, reseal: bool = False) -> None:
    """Changes one value in a file of JSON, lines of JSON or arrays; flips a bit of other files."""
    try:
        if path.suffix == ".npz":
            edit_arrays(path, rng)
        elif path.suffix == ".safetensors":
            edit_safetensors(path, rng, reseal)
        elif path.suffix == ".jsonl":
            edit_one_line(path, rng)
        else:
            whole = json.loads(path.read_bytes())
            edit_value(whole, rng)
            if reseal and path.name == "info.json":
                whole = checkpoints._add_digest(whole["content"])
            path.write_text(json.dumps(whole))
    except (ValueError, TypeError, IndexError, KeyError):
        flip_bit(path, rng)


def edit_value(whole: Any, rng: random.Random) -> None:
    """Sets one value, at any depth of JSON, to another."""
    inner = whole
    while True:
        key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], dict | list) or not inner[key] or rng.random() < 0.2:
            break
        inner = inner[key]
    if isinstance(inner, dict) and rng.random() < 0.2:
        del inner[key]
    else:
        inner[key] = rng.choice(VALUES_IN_FILES)


def edit_one_line(path: pathlib.Path, rng: random.Random) -> None:
    """Changes a value in one line."""
    lines = path.read_text().splitlines()
    index = rng.randrange(len(lines))
    record = json.loads(lines[index])
    edit_value(record, rng)
    lines[index] = json.dumps(record)
    path.write_text("".join(f"{line}\n" for line in lines))


def edit_arrays(path: pathlib.Path, rng: random.Random) -> None:
    """Drops an array, or gives it another name, dtype or shape, with CRCs that are right."""
    with np.load(path) as found:
        arrays = dict(found)
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    numeric = array.dtype.kind in "iuf"
    changed = {
        "dropped": {},
        "renamed": {f"{name}2": array},
        "text": {name: array.astype(str)},
        "complex": {name: array.astype(complex) if numeric else np.zeros(3, complex)},
        "deeper": {name: array[None]},
        "longer": {name: np.append(array, array)},
        "empty": {name: array.ravel()[:0]},
    }
    if path.parent.name != "tokens":  # Files of tokens have no digest.
        changed["zeros"] = {name: np.zeros_like(array)}
        if array.dtype.kind == "f":
            changed["NaN"] = {name: np.full_like(array, np.nan)}
    np.savez(path, **arrays, **changed[rng.choice(sorted(changed))])


def edit_safetensors(path: pathlib.Path, rng: random.Random, reseal: bool) -> None:
    """Changes the header of a file, or what its metadata say, perhaps with a right digest."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if not reseal:
        edit_value(header, rng)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
        return
    metadata, arrays = header["__metadata__"], safetensors.numpy.load(content)
    name = rng.choice([name for name in metadata if name != "digest"])
    with contextlib.suppress(ValueError):
        part = {name: json.loads(metadata[name])}
        edit_value(part, rng)
        metadata[name] = json.dumps(part.get(name))
    del metadata["digest"]
    metadata["digest"] = model_files.digest_file(arrays, metadata)
    path.write_bytes(safetensors.numpy.save(arrays, metadata))


def edit_lines(path: pathlib.Path, rng: random.Random) -> None:
    """Deletes, doubles, swaps or reverses lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = rng.randrange(len(lines) or 1)
    changed = {
        "deleted": lines[:at] + lines[at + 1 :],
        "doubled": lines[: at + 1] + lines[at:],
        "swapped": [*lines[:at], *lines[at : at + 2][::-1], *lines[at + 2 :]],
        "reversed": lines[::-1],
    }
    path.write_bytes(b"".join(changed[rng.choice(list(changed))]))


def flip_bit(path: pathlib.Path, rng: random.Random) -> None:
    """Flips one bit of a file."""
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


# Full disks.


def fill_disks(series: Series) -> None:
    """Runs on disks that are too small; with more room, each run must end like the unbroken one."""
    count, root, reference, _, rng, report = series
    log = series.log
    for i in range(count):
        folder, size = root / f"disk{i}", rng.randrange(8, 1600)
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0

        def limit(size: int = size) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size * 100, size * 100))

        try:
            line = [*RUN, f"--workdir={folder / 'run'}"]
            code = finish(start(line, log, None if mounted else limit))
            report.check_output(log, code, f"a disk of {size} KiB")
            report.count("full disks", f"code {code}")
            if mounted:
                subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)
            code = resume(folder / "run", log)
            same = code == 0 and is_like(folder / "run", reference)
            report.check(same, f"after a disk of {size} KiB: code {code}", log)
            outcome = "like the unbroken run" if same else "different"
            report.count("full disks, with room again", outcome)
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(folder)], check=False)


# Changed corpora.

TEXT_CHANGES: dict[str, Callable[[list[str], random.Random], list[str]]] = {
    "reversed": lambda lines, rng: lines[::-1],
    "shuffled": lambda lines, rng: rng.sample(lines, len(lines)),
    "with a line deleted": lambda lines, rng: lines[:-1],
    "with a line added": lambda lines, rng: [*lines, lines[0]],
    "with two lines swapped": lambda lines, rng: [lines[-1], *lines[1:-1], lines[0]],
    "with a letter changed": lambda lines, rng: [lines[0].replace("a", "b"), *lines[1:]],
    "with a space at the end": lambda lines, rng: [*lines[:-1], lines[-1].rstrip("\n") + " \n"],
    "with other line ends": lambda lines, rng: [line.replace("\n", "\r\n") for line in lines],
    "empty": lambda lines, rng: [],
}


def change_texts(series: Series) -> None:
    """Changes the corpus of a run, or its prepared files, and then uses the run."""
    count, root, _, _, rng, report = series
    if not count:
        return
    log, book, whole, prepared = series.log, root / "book.txt", root / "book", root / "prepared"
    lines = [f"{'abc'[i % 3] * (i % 7 + 1)} {'xyz'[i % 5 % 3]} {i % 11}\n" for i in range(600)]
    book.write_text("".join(lines))
    run = [f"--config={EXPERIMENTS}/text.py:tiny", f"--config.data.path={book}"]
    run += [f"--config.data.data_dir={prepared}"]
    assert finish(start([*run, f"--workdir={whole}"], log, without_sample)) == 0, log.read_text()
    kept = root / "prepared_once"
    if prepared.exists():
        shutil.copytree(prepared, kept)
    for i in range(count):
        folder = root / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        caches = sorted(p for p in prepared.rglob("*") if p.is_file()) if prepared.exists() else []
        damaged = bool(caches) and i % 4 == 3
        if damaged:
            path, kind = rng.choice(caches), rng.choice([k for k in DAMAGES if k != RESEALED])
            DAMAGES[kind](path, rng)
            change = f"a prepared corpus, {kind}: {path.name}"
        else:
            change = f"a text {rng.choice(list(TEXT_CHANGES))}"
            book.write_text("".join(TEXT_CHANGES[change.removeprefix("a text ")](lines, rng)))
        if rng.random() < 0.5:
            use, line = "evaluated", ["--mode=evaluate", f"--workdir={folder}"]
        else:
            use, line = "resumed", [*run, f"--workdir={folder}"]
            (folder / "results.json").unlink()
        code = finish(start(line, log, without_sample))
        said = log.read_text(errors="replace")
        # A damaged cache may be prepared again from a text that has not changed.
        named = code == 2 or "changed_splits" in said or (damaged and code == 0)
        if damaged and code == 0 and use == "resumed":
            named = read_numbers(folder) == read_numbers(whole)
        report.check(named, f"silent: {use} with {change}", log)
        report.check_output(log, code, f"{use} with {change}")
        kind = "a damaged cache" if damaged else "a changed text"
        report.count(f"{kind}, {use}", "refused" if code == 2 else "same or named")
        book.write_text("".join(lines))
        if prepared.exists():
            shutil.rmtree(prepared)
            shutil.copytree(kept, prepared)


# Command lines.

VALUES = (
    *("", "0", "-1", "1", "2", "3.5", "nan", "inf", "-inf", "1e-38", "1e308", "9" * 30, "True"),
    *("1000000", str(2**32), str(2**63), str(-(2**63)), "None", "abc", "[1]", "(1, 2)", "{}"),
    *("'", '"', "\\", "a,b", ",", ":", "::", "../.."),
    *("/proc/x", "/dev/full", "gs://b/x", "\udcff", "ü", " ", "$HOME", "%s", "-", "--", "x" * 5000),
    *("1:2", "2:1", "127.0.0.1:1", "sqlite://", "best", "latest", "float64", "float16", "adam"),
)
# Where the work of each mode begins. Command lines are tried up to here.
WORK = (
    *(
        "training.train:train_turns",
        "evaluation.trained_model:TrainedModel._draw",
        "tuning.worker:work",
    ),
    "tuning.worker:start_workers",
    *("training.scoring:Deterministic.__call__", "training.scoring:Deterministic.sums"),
    *(
        "evaluation.montecarlo:MonteCarlo.__call__",
        "evaluation.gradient_statistics:read_or_compute",
    ),
    *("analysis.sweeps:run_in_turn", "analysis.sweeps:run_in_parallel"),
    *("analysis.inspection:measure", "analysis.explore_data:read", "preflight.flops:count_flops"),
)


def try_lines(series: Series) -> None:
    """Command lines of all modes in turn, with one or two random values each."""
    count, root, reference, _, rng, report = series
    if not count:
        return
    for path in WORK:
        pkgutil.resolve_name(f"mogrifier_jax.{path}")  # Imported before the forks.
    keys = Deck([f"config.{name}" for name in config_keys.keys()], rng)
    evaluation = Deck([f"eval.{name}" for name in eval_options.OPTIONS], rng)
    modes = list(command_line.MODES)
    own = {m: Deck([n for n in command_line.flags_of(m) if n != "eval"], rng) for m in modes}
    for i in range(count):
        mode = modes[i % len(modes)]
        base, decks = {"mode": mode, "workdir": str(reference)}, [own[mode]]
        if mode in command_line.WITH_CONFIG:
            base |= {"config": CONFIG, "workdir": str(root / f"lines{i}")}
            decks += [keys, keys]
        if mode == "tune":
            base |= {"study": "appendix_a", "sampler": "random"}
        elif mode == "sweep":
            base |= {"set": "rounds", "config": f"{EXPERIMENTS}/ablation.py:tiny"}
        elif mode == "preflight":
            base |= {"topology": "v5e:2x2"}
        elif mode == "evaluate":
            base |= {"eval.methods": rng.choice(eval_options.METHODS)}
            decks += [evaluation, evaluation]
        if mode == "tune" and rng.random() < 0.25:
            base |= {"study": "dyneval", "workdir": str(reference)}
            del base["config"]
            decks = [evaluation]
        for name in rng.choice(decks).deal(rng.choice((1, 1, 2))):
            base[name] = rng.choice(VALUES)
        allowed, kind = {0, 2, 3, 75}, f"command lines of {mode}"
        known = {*command_line.flags_of(mode), "mode", "eval", *base}
        foreign = [name for name in command_line.MODES_OF if name not in known]
        if foreign and rng.random() < 0.2 and base.get("study") != "dyneval":
            base[rng.choice(foreign)] = "1"
            allowed, kind = {2}, "command lines with a flag of another mode"
        base = {n: v for n, v in base.items() if n != "workdir" or mode in command_line.MODES_OF[n]}
        line = write_line(base, root, rng)
        pid = start(
            line, series.log, functools.partial(only_check, root / "here" / "and" / "below")
        )
        code = finish(pid)
        report.check_output(series.log, code, " ".join(line)[:400], allowed)
        report.count(kind, f"code {code}")
    dealt = ", ".join(f"{mode} {deck}" for mode, deck in own.items())
    report.title += f"; drawn: keys of configs {keys}, of eval {evaluation}; flags of {dealt}"


def write_line(values: dict[str, str], root: pathlib.Path, rng: random.Random) -> list[str]:
    """The arguments for these flags, in one of the ways in which flags are written."""
    # --config comes before its keys, which are known only once there is a config.
    names = sorted(values, key=lambda name: "." in name)
    joined = [f"--{name}={values[name]}" for name in names]
    way = rng.random()
    if way < 0.1:
        return [argument.replace("--", "-", 1) for argument in joined]
    if way < 0.2:
        return [part for name in names for part in (f"--{name}", values[name])]
    if way < 0.3 and "\udcff" not in "".join(joined):
        path = root / "flags.txt"
        path.write_text("".join(f"{line}\n" for line in joined if "." not in line.split("=")[0]))
        return [f"--flagfile={path}", *(a for a in joined if "." in a.split("=")[0])]
    return joined


def only_check(folder: pathlib.Path) -> None:
    """Ends a mode where its work would begin, and limits its processor time."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # Relative paths are drawn, too.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))

    def end(*_, **__):
        sys.stdout.flush()
        os._exit(0)

    for path in WORK:
        module, _, name = path.partition(":")
        holder, _, name = f"{module}:{name}".rpartition("." if "." in name else ":")
        setattr(pkgutil.resolve_name(f"mogrifier_jax.{holder}"), name, end)


# Environments.

VARIABLES = {
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16"),
    "LC_ALL": ("C", "POSIX", "nonsense"),
    "PYTHONUTF8": ("0", "1"),
    "PYTHONOPTIMIZE": ("2",),
    "PYTHONWARNINGS": ("error::DeprecationWarning:mogrifier_jax", "nonsense"),
    "JAX_ENABLE_X64": ("1", "0", "x"),
    "JAX_THREEFRY_PARTITIONABLE": ("0",),
    "JAX_DEFAULT_PRNG_IMPL": ("rbg", "nonsense"),
    "JAX_PLATFORMS": ("", "nonsense", "cpu", "cuda,cpu"),
    "JAX_NUM_CPU_DEVICES": ("0", "3", "x", "-1"),
    "JAX_DEBUG_NANS": ("1",),
    "JAX_DISABLE_JIT": ("0",),
    "JAX_LOG_COMPILES": ("0",),
    "JAX_NUMPY_DTYPE_PROMOTION": ("strict",),
    "JAX_DEFAULT_MATMUL_PRECISION": ("bfloat16", "nonsense"),
    "JAX_COMPILATION_CACHE_DIR": ("/proc/x",),
    "MPLBACKEND": ("nonsense", "TkAgg"),
    "MOGRIFIER_CACHE_DIR": ("/proc/x", "relative", ""),
    "MOGRIFIER_DATA_DIR": ("/nowhere", "", "\udcff"),
    "MOGRIFIER_PARENT": ("1", "x", "999999999", "-1", ""),
    "TPU_WORKER_HOSTNAMES": ("a,b",),
    "SLURM_NTASKS": ("2", "x"),
    "SLURM_JOB_ID": ("1",),
    "OMPI_COMM_WORLD_SIZE": ("2", "x"),
    "XLA_FLAGS": ("--xla_nonsense=1", "nonsense", " ", "--xla_force_host_platform_device_count=2"),
    "TMPDIR": ("/nowhere",),
    "HOME": ("/nowhere", ""),
    "COLUMNS": ("0", "x"),
    "TERM": ("dumb", ""),
    "TZ": ("nonsense", "UTC+25"),
}
REDIRECTIONS = (
    *("", "", "<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", "| head -c 1"),
    *("</dev/full", ">&- 2>/dev/full"),
)
LIMITS = ("", "", "", "ulimit -n 16;", "ulimit -n 40;", "ulimit -f 0;", "ulimit -c 0; umask 777;")
INTERPRETERS = ("", "", "-OO", "-u", "-X dev", "-b")
PROGRAM = "-m mogrifier_jax.main"


def change_environments(series: Series) -> None:
    """Command lines with random variables, and with streams that are closed or full."""
    count, root, reference, _, rng, report = series
    log = series.log
    for i in range(count):
        folder = root / f"environment{i}"
        lines = (
            f"--mode=config --config={CONFIG}",
            f"--mode=config --config={CONFIG} --json={folder}.json",
            f"--mode=sample --workdir={reference} --length=3",
            f"--mode=export --workdir={reference} --output={folder}.safetensors",
            f"{' '.join(RUN[:1])} --config.schedule.turns=1 --workdir={folder}",
            "--help",
        )
        chosen = {name: rng.choice(VARIABLES[name]) for name in rng.sample(list(VARIABLES), 2)}
        line, redirection, limit = rng.choice(lines), rng.choice(REDIRECTIONS), rng.choice(LIMITS)
        python = f"{sys.executable} {rng.choice(INTERPRETERS)} {PROGRAM}"
        # The limits are those of the program alone: bash and head write to the log.
        command = f"({limit} {python} {line}) {redirection}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command],
                env=os.environ | chosen,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(MAX_WALL_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
        variables = " ".join(f"{name}={value!r}" for name, value in chosen.items())
        report.check_output(log, code, f"{variables} {command}")
        report.count("environments", f"code {code}")


# Databases and journals of trials.

VALUES_OF_DATABASES = (None, -1, 7, 1e300, "", "x", "{}", "[]", '"../../evil"', "5", b"\xff")


def edit_storages(series: Series) -> None:
    """Changes one value of a study's storage; the study opens, or is refused in a sentence."""
    count, root, _, _, rng, report = series
    if not count:
        return
    wholes = {name: root / f"study_{name}" for name in ("x.db", "x.journal")}
    for name, whole in wholes.items():
        whole.mkdir()
        ask_trials(whole, name)[0].finish(1.0)
    for i in range(count):
        name, edit_storage = (("x.db", edit_database), ("x.journal", edit_journal))[i % 3 == 2]
        folder = root / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(wholes[name], folder)
        what = edit_storage(folder / name, rng)
        if what is None:
            report.count(f"edits of {name}", "not possible")
            continue
        try:
            with time_limit():
                for trial in ask_trials(folder, name):
                    place = (folder / "work" / trial.folder).resolve()
                    if (folder / "work" / "trials").resolve() != place.parent:
                        report.add_fault(f"{what}: a trial in {place}")
            outcome = "opened"
        except errors.UsageError:
            outcome = "refused"
        except Exception as error:
            outcome = "another exception"
            report.add_fault(f"{what}: {error!r:.200}")
        report.count(f"edits of {name}", outcome)


def ask_trials(folder: pathlib.Path, name: str) -> list[Any]:
    """Opens a study, and asks for two trials and for the records of all."""
    from mogrifier_jax.tuning import queues, storages, studies

    study = studies.Study("one", {"x": studies.Range(-1.0, 1.0)})
    options = dict(name="test", num_trials=4, seed=1, sampler="random")
    storage = f"sqlite:///{folder}/{name}" if name.endswith(".db") else str(folder / name)
    with storages.explain_errors():
        queue = queues.open_queue(study, str(folder / "work"), storage=storage, **options)
        asked = queue.ask(2)
        queue.records()
    return asked


def edit_database(path: pathlib.Path, rng: random.Random) -> str | None:
    """Sets a column of an SQLite file; returns what was done, or None if SQLite refuses it."""
    with contextlib.closing(sqlite3.connect(path)) as base:
        names = [n for (n,) in base.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        filled = [n for n in names if base.execute(f"SELECT count(*) FROM {n}").fetchone()[0]]
        table = rng.choice(filled)
        column = rng.choice([row[1] for row in base.execute(f"PRAGMA table_info({table})")])
        value = rng.choice(VALUES_OF_DATABASES)
        try:
            with base:
                base.execute(f"UPDATE {table} SET {column} = ?", (value,))
        except sqlite3.Error:
            return None
    return f"{table}.{column} = {value!r}"


def edit_journal(path: pathlib.Path, rng: random.Random) -> str | None:
    """Changes a value, or the lines, of a journal; returns what the journal is then."""
    change = rng.choice((edit_one_line, edit_one_line, edit_lines))
    try:
        change(path, rng)
    except (ValueError, IndexError):
        return None
    return f"{change.__name__} of a journal: {path.read_bytes()!r:.2000}"


# Calls.

NONSENSE: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 2.5, 1e300, float("nan"), 10**30, 2**63, "")
NONSENSE += ("x", "gs://a/b", "/proc/x", "\0", b"", b"\xff", [], [1], (), {}, {"a": 1}, object())
NONSENSE += (np.zeros(0), np.zeros((2, 3)), np.array(-1), np.int8([1, -1]), np.array(["a"]), 1j)
NONSENSE += (
    "\udcff",
    [None],
    {1: 2},
    np.array([np.nan]),
    np.uint8([5, 5]),
    len,
    Exception,
    range(2),
)
NONSENSE += (
    np.array([2, 5], object),
    np.array([True, False]),
    np.float16([1, 2]),
    -(2**63),
    {1, 2},
)


def make_calls(series: Series) -> None:
    """Calls the public interface with nonsense; each call returns or raises a UsageError."""
    count, _, reference, _, rng, report = series
    if not count:
        return
    calls = public_calls(reference)
    deck = Deck(list(calls), rng)
    for _ in range(count):
        (name,), value = deck.deal(1), rng.choice(NONSENSE)
        try:
            with time_limit():
                calls[name](value)
            outcome = "returned"
        except errors.UsageError as error:
            outcome = "refused in a sentence"
            if "\n" in str(error).partition("\n----")[0]:
                report.add_fault(f"{name}({value!r:.60}): several lines: {error!r:.200}")
        except Exception as error:
            outcome = "another exception"
            report.add_fault(f"{name}({value!r:.60}): {error!r:.200}")
        report.count("calls", outcome)


def public_calls(reference: pathlib.Path) -> dict[str, Callable[[Any], Any]]:
    """The public interface, each entry with one argument left open."""
    model = trained_model.load(str(reference))
    xs = np.ones((2, 5, 3), np.float32)

    def run(cell, **options):
        return mogrifier_jax.RNN(cell).init_with_output(jax.random.key(0), xs, **options)

    def run_nnx(**options):
        cell = mogrifier_jax.nnx.LSTMCell(3, 2, rngs=nnx.Rngs(0))
        return mogrifier_jax.nnx.RNN(cell)(xs, **options)

    tensors = {"weight_ih": np.ones((8, 3)), "weight_hh": np.ones((8, 2))}
    return {
        "load": mogrifier_jax.load,
        "load which": lambda v: mogrifier_jax.load(str(reference), v),
        "generate": lambda v: model.generate(v, length=2),
        **{
            f"generate {name}": lambda v, name=name: model.generate(**{"length": 2, name: v})
            for name in text_sampling.Sampling._fields
            if name != "num_samples"
        },
        "score": model.score,
        "score logit_scale": lambda v: model.score("The", logit_scale=v),
        "predict": model.predict,
        "predict top": lambda v: model.predict("The", top=v),
        "gates": model.gates,
        "explore": model.explore,
        "explore length": lambda v: model.explore("The", length=v),
        "save": model.save,
        "pickle": lambda v: pickle.loads(pickle.dumps(model)),
        "from_pytorch": mogrifier_jax.from_pytorch.convert,
        "from_pytorch rounds": lambda v: mogrifier_jax.from_pytorch.convert(tensors, rounds=v),
        "from_pytorch tensor": lambda v: mogrifier_jax.from_pytorch.convert(
            tensors | {"weight_hh": v}
        ),
        "from_flax": lambda v: mogrifier_jax.from_flax.convert(nn.LSTMCell(3), v),
        "from_flax cell": mogrifier_jax.from_flax.convert,
        "to_flax": mogrifier_jax.from_flax.to_flax,
        "seq_lengths": lambda v: run(mogrifier_jax.LSTMCell(2), seq_lengths=v),
        "seq_lengths of Flax's cell": lambda v: run(nn.GRUCell(2), seq_lengths=v),
        "seq_lengths of NNX": lambda v: run_nnx(seq_lengths=v),
        "initial_carry": lambda v: run(mogrifier_jax.LSTMCell(2), initial_carry=v),
        "initial_carry of NNX": lambda v: run_nnx(initial_carry=v),
        "inputs": lambda v: mogrifier_jax.RNN(mogrifier_jax.LSTMCell(2)).init(jax.random.key(0), v),
        "RNN": lambda v: run(v),
        **{
            f"cell {name}": lambda v, name=name: run(
                mogrifier_jax.MogrifierLSTMCell(**{"features": 2, "rounds": 2, name: v})
            )
            for name in ("features", "rounds", "rank", "zigzag", "forget_bias", "dtype")
        },
        "nnx in_features": lambda v: mogrifier_jax.nnx.LSTMCell(v, 8, rngs=nnx.Rngs(0)),
        "nnx hidden": lambda v: mogrifier_jax.nnx.MogrifierGRUCell(3, v, rngs=nnx.Rngs(0)),
        "nnx rewired": lambda v: mogrifier_jax.nnx.RewiredLSTMCell(3, v, rngs=nnx.Rngs(0)),
        "vocabulary": vocabularies.Vocabulary.from_json,
        "config": lambda v: configs.check(configs.base({"data": v})),
        "config model": lambda v: configs.check(configs.base({"model": {"rounds": v}})),
    }


@contextlib.contextmanager
def time_limit(seconds: int = 120) -> Iterator[None]:
    """Raises TimeoutError in a block that takes too long."""

    def end(*_) -> None:
        raise TimeoutError(f"it hangs: {seconds} s are over")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


# Controls.


def take_last_line(self: Any, path: pathlib.Path, *_) -> None:
    """Loses a line of metrics at every resume."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    self._take_over(path)


# What each series must notice: a check of the package, and what takes its place.
BREAKS: dict[str, tuple[str, Any]] = {
    "kills": ("mogrifier_jax.training.metrics:MetricWriter._restore", take_last_line),
    "damages": ("absl.logging:warning", lambda *_: None),
    "disks": ("mogrifier_jax.training.checkpoints:Checkpoints._saving", contextlib.nullcontext),
    "lines": ("mogrifier_jax.command_line:check_arguments", lambda given: None),
    "texts": ("mogrifier_jax.training.workdirs:corpus_digests", lambda fingerprint: {}),
    "environments": (
        "benchmarks.chaos:PROGRAM",
        "-c 'from mogrifier_jax import command_process as c, main; "
        "c.prepare_streams = lambda: None; main.run()'",
    ),
    "databases": ("mogrifier_jax.tuning.optuna_queue:find_damage", lambda *_: None),
    "calls": ("mogrifier_jax.errors:check", lambda *_: None),
}


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """Switches off the check that a series must miss."""
    path, instead = BREAKS[name]
    holder, _, attribute = path.replace(":", ".").rpartition(".")
    place = sys.modules[__name__] if holder == "benchmarks.chaos" else pkgutil.resolve_name(holder)
    before = getattr(place, attribute)
    setattr(place, attribute, instead)
    try:
        yield
    finally:
        setattr(place, attribute, before)


SERIES = {
    "kills": kill,
    "damages": damage,
    "disks": fill_disks,
    "lines": try_lines,
    "texts": change_texts,
    "environments": change_environments,
    # These start JAX in this process, which must not fork from then on.
    "databases": edit_storages,
    "calls": make_calls,
}


def run() -> int:
    """Parses its options, runs the series that they ask for, and prints the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in SERIES:
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--broken", action="store_true", help="switch a check off in each series")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/chaos"))
    given = parser.parse_args()
    root = given.folder.absolute()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    reference, log = root / "reference", root / "log"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # Of the forks as well.
    for module in PRELOADED:
        importlib.import_module(module)
    resume(root / "first", log)  # Fills the compilation cache.
    began = time.monotonic()
    assert resume(reference, log) == 0, log.read_text()
    seconds = time.monotonic() - began
    title = f"seed {given.seed}; the unbroken run takes {seconds:.1f} s"
    report = Report(root / "report.txt", title)
    missed = []
    try:
        for name, series in SERIES.items():
            rng = random.Random(f"{name} {given.seed}")  # The same draws whatever else is run.
            count, faults = getattr(given, name), len(report.faults)
            with broken(name) if given.broken and count else contextlib.nullcontext():
                series(Series(count, root, reference, seconds, rng, report))
            if given.broken and count and len(report.faults) == faults:
                missed.append(name)
    except KeyboardInterrupt:
        print("interrupted; the report so far:")
    print(report)
    report.path.write_text(str(report))
    if given.broken:
        print(f"series that did not notice what was broken: {', '.join(missed) or 'none'}")
        return bool(missed)
    return bool(report.faults)


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.unparse_flags()
    sys.exit(run())

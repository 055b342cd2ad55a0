r"""Kills, damages, full disks, changed texts, drawn command lines and calls; with a report.

    python -m benchmarks.chaos --kills=100 --damages=100 --disks=10 --folder=/tmp/chaos
    python -m benchmarks.chaos --texts=20 --lines=500 --environments=20 --calls=500 --databases=100

An unbroken run of `experiments/pydoc.py:tiny` is the reference. What must hold: a run that was
killed or whose disk was full ends, once it may, with the same metrics and results, byte by byte.
A damage is either named, refused in one sentence, or changes no number. No line of a traceback is
printed, and exit codes are those of docs/pods.md. A run does not go on with a changed text, and
its scores name one. A flag of another mode is refused. A call from Python with nonsense, or a
database with wrong content, returns or raises a UsageError. The report grows in
`<folder>/report.txt`.

Each start is a fork of a process that has imported the package and has not started JAX, so it
takes a second. Full disks are small tmpfs mounts, for which one must be root; without, files are
limited in size (RLIMIT_FSIZE).
"""

import argparse
import collections
import functools
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
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from absl import flags
from flax import nnx

import mogrifier_jax
from mogrifier_jax import configs, errors, main
from mogrifier_jax.data import corpora
from mogrifier_jax.evaluation import eval_options, methods, trained
from mogrifier_jax.training import checkpoints

EXPERIMENTS = pathlib.Path("experiments").absolute()
CONFIG = f"{EXPERIMENTS}/pydoc.py:tiny"
RUN = (f"--config={CONFIG}", "--config.schedule.turns=5", "--config.log_every=1")
SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM,) * 3 + (signal.SIGINT,) * 2 + (signal.SIGHUP,)
CODES = {0, 2, 3, 75, 130}
SECONDS = 20.0  # Of computing, after which a start counts as hanging.
VALUES = (
    *("", "0", "-1", "1", "2", "3.5", "nan", "inf", "-inf", "1e-38", "1e308", "9" * 30, "True"),
    *("1000000", str(2**32), str(2**63), str(-(2**63)), "None", "abc", "[1]", "(1, 2)", "{}"),
    *("'", '"', "\\", "a,b", ",", ":", "::", "../.."),
    *("/proc/x", "/dev/full", "gs://b/x", "\udcff", "ü", " ", "$HOME", "%s", "-", "--", "x" * 5000),
    *("1:2", "2:1", "127.0.0.1:1", "sqlite://", "best", "latest", "float64", "float16", "adam"),
)
# Where the work of each mode begins: command lines are tried up to here.
WORK = (
    *("training.train:train_turns", "evaluation.trained:TrainedModel._draw", "tuning.worker:work"),
    "tuning.worker:start_workers",
    *("training.evaluate:Deterministic.__call__", "training.evaluate:Deterministic.sums"),
    *("evaluation.montecarlo:MonteCarlo.__call__", "evaluation.dyneval:cached_statistics"),
    *("analysis.sweeps:run_here", "analysis.sweeps:run_beside", "analysis.inspection:inspect"),
    *("analysis.explore:read", "preflight.costs:count_flops"),
)


def start(arguments: Sequence[str], log: pathlib.Path, prepare: Callable[[], None] | None = None):
    """Forks a process that runs a command line, its output in a file; returns its number."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Also under nohup.
        sys.argv = ["main", *arguments]
        if prepare is not None:
            prepare()
        main.run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int | None) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def finish(pid: int) -> int:
    """The exit code of a start; minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Report:
    """Counts of what happened, and a list of what should not have; in a file as it goes."""

    def __init__(self, path: pathlib.Path, title: str) -> None:
        self.path, self.title = path, title
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def note(self, kind: str, outcome: str) -> None:
        """Counts an outcome."""
        self.counts[f"{kind}: {outcome}"] += 1
        self.path.write_text(str(self))

    def __str__(self) -> str:
        counts = [f"{count:6d}  {name}" for name, count in sorted(self.counts.items())]
        faults = [f"{len(self.faults)} faults", *(f"  {fault}" for fault in self.faults)]
        return "\n".join([self.title, *counts, *faults, ""])

    def check(self, holds: bool, what: str, log: pathlib.Path) -> None:
        """Notes what does not hold, with the last line that was said."""
        if not holds:
            said = log.read_text(errors="replace").strip().splitlines()
            self.faults.append(f"{what} | {said[-1][:300] if said else ''}")
            print("FAULT", self.faults[-1], flush=True)

    def check_output(self, log: pathlib.Path, code: int, what: str, allowed=CODES) -> None:
        """No traceback, and a code that is documented."""
        self.check("Traceback" not in log.read_text(errors="replace"), f"traceback: {what}", log)
        self.check(code in allowed, f"exit code {code}: {what}", log)


def is_like(folder: pathlib.Path, reference: pathlib.Path) -> bool:
    """Whether a run has left what the unbroken one left."""
    names = ("metrics.jsonl", "results.json")
    return all(
        (folder / name).exists() and (folder / name).read_bytes() == (reference / name).read_bytes()
        for name in names
    )


def complete(folder: pathlib.Path, log: pathlib.Path) -> int:
    """Goes on with a run until it ends by itself."""
    return finish(start([*RUN, f"--workdir={folder}"], log, without_sample))


def without_sample() -> None:
    """The text at the end of a run takes as long as the run."""
    trained.print_samples = lambda *_, **__: None


def kill(count: int, root: pathlib.Path, reference, seconds: float, draw, report: Report) -> None:
    """Ends starts of a run at drawn moments; each run is at last like the unbroken one."""
    folder, log, number = root / "kills0", root / "log", 0
    for i in range(count):
        number_of_signal = draw.choice(SIGNALS)
        newest = latest(folder)
        pid = start([*RUN, f"--workdir={folder}"], log, without_sample)
        began, watched = time.monotonic(), os.pidfd_open(pid)
        ended, _, _ = select.select([watched], [], [], draw.uniform(0.0, 1.1 * seconds))
        os.close(watched)
        if ended and newest < 0:
            seconds = time.monotonic() - began  # The machine is less busy, or more, than before.
        os.kill(pid, number_of_signal)
        code, name = finish(pid), signal.Signals(number_of_signal).name
        report.check_output(log, code, f"{name} {i}", CODES | {-number_of_signal})
        report.note(name, "finished before it" if code == 0 else f"code {code}")
        report.check(latest(folder) >= newest, f"lost step {newest} by {name} {i}", log)
        if code == 0 or i == count - 1:
            code = complete(folder, log)  # Also one that has ended: it stays as it is.
            report.check(code == 0 and is_like(folder, reference), f"{folder} differs", log)
            report.note("runs of kills", "ended like the unbroken one")
            number += 1
            folder = root / f"kills{number}"


def latest(folder: pathlib.Path) -> int:
    names = [p.name for p in (folder / "checkpoints").glob("*") if p.name.isdecimal()]
    return max(map(int, names), default=-1)


DAMAGES = {
    "truncated": lambda p, draw: os.truncate(p, draw.randrange(p.stat().st_size or 1)),
    "emptied": lambda p, draw: os.truncate(p, 0),
    "deleted": lambda p, draw: p.unlink(),
    "garbage": lambda p, draw: p.write_bytes(draw.randbytes(200)),
    "flipped": lambda p, draw: flip(p, draw),
    "other JSON": lambda p, draw: p.write_text(draw.choice(["[]", "{}", "5", "null", '"x"'])),
    "a folder": lambda p, draw: (p.unlink(), p.mkdir()),
    "a pipe": lambda p, draw: (p.unlink(), os.mkfifo(p)),
    "a link to nothing": lambda p, draw: (p.unlink(), p.symlink_to("nowhere")),
    "other content": lambda p, draw: edit(p, draw),
    "other lines": lambda p, draw: change_lines(p, draw),
}
CONTENTS = (None, True, -1, 0, 1e9, 10**30, float("nan"), "", "x", "../..", [], [1], {}, {"a": 1})


def edit(path: pathlib.Path, draw) -> None:
    """Sets one value in JSON, or in a line of it, to another; flips a bit of other files."""
    lines = path.read_text(errors="replace").splitlines() if path.suffix == ".jsonl" else [""]
    index = draw.randrange(len(lines)) if lines else 0
    try:
        whole = json.loads(lines[index] if path.suffix == ".jsonl" else path.read_bytes())
        inner: Any = whole
        while True:
            key = draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            if not isinstance(inner[key], dict | list) or not inner[key] or draw.random() < 0.3:
                break
            inner = inner[key]
        inner[key] = draw.choice(CONTENTS)
    except (ValueError, TypeError, IndexError, KeyError):
        return flip(path, draw)
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{line}\n" for line in [*lines[:index], json.dumps(whole)]))
        return None
    if path.name == "info.json" and draw.random() < 0.7:  # As somebody who knows of the digest.
        whole = checkpoints._seal(whole.get("content"))
    path.write_text(json.dumps(whole))
    return None


def change_lines(path: pathlib.Path, draw) -> None:
    """Deletes, doubles, swaps or reverses lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = draw.randrange(len(lines) or 1)
    changed = {
        "deleted": lines[:at] + lines[at + 1 :],
        "doubled": lines[: at + 1] + lines[at:],
        "swapped": [*lines[:at], *lines[at : at + 2][::-1], *lines[at + 2 :]],
        "reversed": lines[::-1],
    }
    path.write_bytes(b"".join(changed[draw.choice(list(changed))]))


def flip(path: pathlib.Path, draw) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


def damage(count: int, root: pathlib.Path, reference, draw, report: Report) -> None:
    """Damages a file of a run that has ended, then goes on with it, or scores a text with it."""
    log, scored = root / "log", root / "scored"
    expected = score(reference, log, scored)
    assert expected[0] == 0, log.read_text()
    for i in range(count):
        folder = root / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(reference, folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file() and "tensorboard" not in p.parts)
        # Half of them where most can be told: beside the many files of the arrays.
        small = [p for p in files if p.suffix in (".json", ".jsonl")]
        path, kind = draw.choice(files if i % 2 else small), draw.choice(list(DAMAGES))
        DAMAGES[kind](path, draw)
        what = f"{kind} {path.relative_to(folder)}"
        if draw.random() < 0.4 or path.name in ("metrics.jsonl", "speed.jsonl"):
            if draw.random() < 0.5:  # As if the run had not ended.
                if (folder / "results.json").is_file():
                    (folder / "results.json").unlink()
            code = complete(folder, log)
            same, action = is_like(folder, reference), "resumed"
        else:
            found = score(folder, log, scored)
            code, same, action = found[0], found == expected, "scored"
        said = log.read_text(errors="replace")
        report.check_output(log, code, f"{action}, {what}")
        named = "warning:" in said or code == 2
        report.check(same or named, f"silent: {action}, {what}", log)
        report.check(said.count("\n") < 60, f"{said.count(chr(10))} lines: {action}, {what}", log)
        outcome = "refused" if code == 2 else "equal" if same else "named, with other numbers"
        report.note(action, outcome)


def score(folder: pathlib.Path, log: pathlib.Path, found: pathlib.Path) -> tuple[int, str]:
    """The exit code of loading a run, and the score of a text."""
    found.unlink(missing_ok=True)

    def instead() -> None:
        def run(workdir: str, *_) -> None:
            nats = trained.load(workdir).score("The lambda form creates a function.").nats_per_token
            found.write_text(repr(nats))

        trained.print_samples = run

    code = finish(start(["--mode=sample", f"--workdir={folder}"], log, instead))
    return code, found.read_text() if found.exists() else ""


TEXT_CHANGES = {
    "reversed": lambda lines, draw: lines[::-1],
    "shuffled": lambda lines, draw: draw.sample(lines, len(lines)),
    "a line deleted": lambda lines, draw: lines[:-1],
    "a line added": lambda lines, draw: [*lines, lines[0]],
    "two swapped": lambda lines, draw: [lines[-1], *lines[1:-1], lines[0]],
    "a letter changed": lambda lines, draw: [lines[0].replace("a", "b"), *lines[1:]],
}


def change_texts(count: int, root: pathlib.Path, draw, report: Report) -> None:
    """Changes the text of a run, then goes on with the run, or evaluates it."""
    if not count:
        return
    log, book, whole = root / "log", root / "book.txt", root / "whole"
    lines = [f"{'abc'[i % 3] * (i % 7 + 1)} {'xyz'[i % 5 % 3]} {i % 11}\n" for i in range(600)]
    book.write_text("".join(lines))
    run = [f"--config={EXPERIMENTS}/text.py:tiny", f"--config.data.path={book}"]
    run += [f"--config.data.data_dir={root / 'prepared'}"]
    assert finish(start([*run, f"--workdir={whole}"], log, without_sample)) == 0, log.read_text()
    for i in range(count):
        folder, change = root / "changed", draw.choice(list(TEXT_CHANGES))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        changed = TEXT_CHANGES[change](lines, draw)
        book.write_text("".join(changed))
        if i % 2:
            kind, line = "evaluated", ["--mode=evaluate", f"--workdir={folder}"]
        else:
            kind, line = "resumed", [*run, f"--workdir={folder}"]
            (folder / "results.json").unlink()
        code = finish(start(line, log, without_sample))
        said = log.read_text(errors="replace")
        named = code == 2 if kind == "resumed" else code == 2 or "is another" in said
        report.check(named, f"silent: {kind} with a text {change}", log)
        report.check_output(log, code, f"{kind} with a text {change}")
        report.note(f"texts changed, {kind}", "refused" if code == 2 else "named")
        book.write_text("".join(lines))


VARIABLES = {
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16"),
    "LC_ALL": ("C", "POSIX", "nonsense"),
    "PYTHONUTF8": ("0", "1"),
    "JAX_ENABLE_X64": ("1", "0"),
    "JAX_THREEFRY_PARTITIONABLE": ("0",),
    "JAX_DEFAULT_PRNG_IMPL": ("rbg", "nonsense"),
    "JAX_PLATFORMS": ("", "nonsense", "cpu"),
    "JAX_NUM_CPU_DEVICES": ("0", "3", "x"),
    "MPLBACKEND": ("nonsense", "TkAgg"),
    "MOGRIFIER_CACHE_DIR": ("/proc/x", "relative"),
    "MOGRIFIER_DATA_DIR": ("/nowhere",),
    "MOGRIFIER_PARENT": ("1", "x", "999999999"),
    "TPU_WORKER_HOSTNAMES": ("a,b",),
    "SLURM_NTASKS": ("2", "x"),
    "XLA_FLAGS": ("--xla_nonsense=1", "nonsense"),
    "TMPDIR": ("/nowhere",),
    "HOME": ("/nowhere",),
    "COLUMNS": ("0", "x"),
}
STREAMS = ("", "", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", "| head -c 1")


def strange_environments(count: int, root: pathlib.Path, reference, draw, report: Report) -> None:
    """Command lines with drawn variables, and with streams that are closed or full."""
    log = root / "log"
    for _ in range(count):
        chosen = {n: draw.choice(VARIABLES[n]) for n in draw.sample(list(VARIABLES), 2)}
        line = draw.choice(
            (f"--mode=config --config={CONFIG}", f"--mode=sample --workdir={reference} --length=3")
        )
        streams = draw.choice(STREAMS)
        command = f"{sys.executable} -m mogrifier_jax.main {line} {streams}"
        with log.open("wb") as out:
            found = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                env=os.environ | chosen,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=300,
            )
        variables = " ".join(f"{name}={value}" for name, value in chosen.items())
        report.check_output(log, found.returncode, f"{variables} {line} {streams}")
        report.note("environments", f"code {found.returncode}")


NONSENSE: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 2.5, 1e300, float("nan"), 10**30, 2**63, "")
NONSENSE += ("x", "gs://a/b", "/proc/x", "\0", b"", b"\xff", [], [1], (), {}, {"a": 1}, object())
NONSENSE += (np.zeros(0), np.zeros((2, 3)), np.array(-1), np.int8([1, -1]), np.array(["a"]), 1j)


def draw_calls(count: int, reference: pathlib.Path, draw, report: Report) -> None:
    """Calls the public interface with nonsense: each returns, or raises a UsageError."""
    model = trained.load(str(reference)) if count else None
    xs = np.ones((2, 5, 3), np.float32)

    def run(cell, **options):
        return mogrifier_jax.RNN(cell).init_with_output(jax.random.key(0), xs, **options)

    calls: dict[str, Callable[[Any], Any]] = {
        "load": mogrifier_jax.load,
        "load which": lambda v: mogrifier_jax.load(str(reference), v),
        "generate": lambda v: model.generate(v, length=2),
        **{
            f"generate {name}": lambda v, name=name: model.generate(**{"length": 2, name: v})
            for name in trained.Sampling._fields
            if name != "num_samples"
        },
        "score": lambda v: model.score(v),
        "score scale": lambda v: model.score("The", logit_scale=v),
        "predict": lambda v: model.predict(v),
        "predict top": lambda v: model.predict("The", top=v),
        "gates": lambda v: model.gates(v),
        "save": lambda v: model.save(v),
        "from_pytorch": mogrifier_jax.from_pytorch.convert,
        "from_pytorch rounds": lambda v: mogrifier_jax.from_pytorch.convert(
            {"weight_ih": np.ones((8, 3)), "weight_hh": np.ones((8, 2))}, rounds=v
        ),
        "from_flax": lambda v: mogrifier_jax.from_flax.convert(nn.LSTMCell(3), v),
        "to_flax": mogrifier_jax.from_flax.to_flax,
        "lengths": lambda v: run(mogrifier_jax.LSTMCell(2), seq_lengths=v),
        "lengths of Flax's": lambda v: run(nn.GRUCell(2), seq_lengths=v),
        "carry": lambda v: run(mogrifier_jax.LSTMCell(2), initial_carry=v),
        "inputs": lambda v: mogrifier_jax.RNN(mogrifier_jax.LSTMCell(2)).init(jax.random.key(0), v),
        **{
            f"cell {name}": lambda v, name=name: run(
                mogrifier_jax.MogrifierLSTMCell(**{"hidden_size": 2, "rounds": 2, name: v})
            )
            for name in ("hidden_size", "rounds", "rank", "zigzag", "forget_bias", "dtype")
        },
        "nnx": lambda v: mogrifier_jax.nnx.LSTMCell(v, 8, rngs=nnx.Rngs(0)),
        "nnx hidden": lambda v: mogrifier_jax.nnx.MogrifierGRUCell(3, v, rngs=nnx.Rngs(0)),
        "vocabulary": corpora.Vocabulary.from_json,
        "config": lambda v: configs.check(configs.base({"data": v})),
        "pickle": lambda v: pickle.loads(pickle.dumps(model)),
    }
    deck = Deck(list(calls), draw)
    for _ in range(count):
        (name,), value = deck.deal(1), draw.choice(NONSENSE)
        try:
            signal.alarm(60)
            calls[name](value)
            outcome = "returned"
        except errors.UsageError as error:
            outcome = "refused in a sentence"
            if "\n" in str(error).partition("\n----")[0]:
                report.faults.append(f"{name}({value!r:.60}): several lines: {error!r:.200}")
        except Exception as error:
            outcome = "another exception"
            report.faults.append(f"{name}({value!r:.60}): {error!r:.200}")
        finally:
            signal.alarm(0)
        report.note("calls", outcome)


def edit_databases(count: int, root: pathlib.Path, draw, report: Report) -> None:
    """Sets a value of a study's database to another; the study opens, or is refused."""
    if not count:
        return
    from mogrifier_jax.tuning import storages, studies

    study = studies.Study("one", {"x": studies.Range(-1.0, 1.0)})

    def work(folder: pathlib.Path) -> Any:
        options = dict(name="test", num_trials=4, seed=1, sampler="random")
        storage = f"sqlite:///{folder}/x.db"
        with storages.explain_errors():
            queue = storages.open_queue(study, str(folder / "work"), storage=storage, **options)
            asked = queue.ask(2)
            queue.records()
        return asked

    whole = root / "study"
    whole.mkdir()
    work(whole)[0].finish(1.0)
    for _ in range(count):
        folder = root / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        base = sqlite3.connect(folder / "x.db")
        names = [
            name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        table = draw.choice(
            [n for n in names if base.execute(f"SELECT count(*) FROM {n}").fetchone()[0]]
        )
        column = draw.choice([row[1] for row in base.execute(f"PRAGMA table_info({table})")])
        value = draw.choice((None, -1, 7, 1e300, "", "x", "{}", "[]", '"../../evil"', "5", b"\xff"))
        what = f"{table}.{column} = {value!r}"
        try:
            with base:
                base.execute(f"UPDATE {table} SET {column} = ?", (value,))
            base.close()
            for trial in work(folder):
                place = (folder / "work" / trial.folder).resolve()
                if (folder / "work" / "trials").resolve() != place.parent:
                    report.faults.append(f"{what}: a trial in {place}")
            outcome = "opened"
        except sqlite3.Error:
            outcome = "not possible"
        except errors.UsageError:
            outcome = "refused in a sentence"
        except Exception as error:
            outcome = "another exception"
            report.faults.append(f"{what}: {error!r:.200}")
        finally:
            base.close()
        report.note("databases", outcome)


def fill(count: int, root: pathlib.Path, reference, draw, report: Report) -> None:
    """Runs on disks that are too small; with room they end like the unbroken one."""
    log = root / "log"
    for i in range(count):
        folder, size = root / f"disk{i}", draw.randrange(8, 1600)
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0

        def limit(size=size) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size * 100, size * 100))

        try:
            where = [*RUN, f"--workdir={folder / 'run'}"]
            code = finish(start(where, log, None if mounted else limit))
            report.check_output(log, code, f"disk of {size} KiB")
            report.note("full disks", f"code {code}")
            if mounted:
                subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)
            code = complete(folder / "run", log)
            like = code == 0 and is_like(folder / "run", reference)
            report.check(like, f"after a disk of {size} KiB: code {code}", log)
            report.note("full disks, with room again", "like the unbroken one" if like else "no")
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(folder)], check=False)


def only_check(folder: pathlib.Path) -> None:
    """Ends a mode where its work would begin; at most so many seconds of computing."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # Relative paths are drawn, too.
    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))
    signal.alarm(45 * int(SECONDS))  # It may wait for the cores, but not for ever.

    def end(*_, **__):
        sys.stdout.flush()
        os._exit(0)

    for path in WORK:
        room, _, name = path.partition(":")
        holder, _, name = f"{room}:{name}".rpartition("." if "." in name else ":")
        setattr(pkgutil.resolve_name(f"mogrifier_jax.{holder}"), name, end)


class Deck:
    """Names in a drawn order; all of them are dealt before one comes again."""

    def __init__(self, names: Sequence[str], draw):
        self._names, self._draw = sorted(names), draw
        self._left: list[str] = []
        self.dealt: set[str] = set()

    def deal(self, count: int) -> list[str]:
        """So many, each once."""
        found: list[str] = []
        while len(found) < min(count, len(self._names)):
            self._left = self._left or self._draw.sample(self._names, len(self._names))
            found.append(self._left.pop())
        self.dealt.update(found)
        return found

    def __str__(self) -> str:
        return f"{len(self.dealt)} of {len(self._names)}"


def draw_lines(count: int, root: pathlib.Path, reference, draw, report: Report) -> None:
    """Command lines of all modes in turn, with one or two drawn values each."""
    log = root / "log"
    for path in WORK:
        pkgutil.resolve_name(f"mogrifier_jax.{path}")  # Imported before the forks.
    keys = Deck([f"config.{name}" for name in configs.keys()], draw)
    evaluation = Deck([f"eval.{name}" for name in eval_options.OPTIONS], draw)
    own = {mode: Deck([n for n in main.flags_of(mode) if n != "eval"], draw) for mode in main.MODES}
    for i in range(count):
        mode = list(main.MODES)[i % len(main.MODES)]
        base, decks = {"mode": mode, "workdir": str(reference)}, [own[mode]]
        if mode in ("train", "preflight", "sweep", "tune", "config"):
            base |= {"config": CONFIG, "workdir": str(root / f"lines{i}")}
            decks += [keys, keys]
        if mode == "tune":
            base |= {"study": "appendix_a", "sampler": "random"}
        elif mode == "sweep":
            base |= {"set": "rounds", "config": f"{EXPERIMENTS}/ablation.py:tiny"}
        elif mode == "preflight":
            base |= {"topology": "v5e:2x2"}
        elif mode == "evaluate":
            base |= {"eval.methods": draw.choice(methods.METHODS)}
            decks += [evaluation, evaluation]
        if mode == "tune" and draw.random() < 0.25:
            base |= {"study": "dyneval", "workdir": str(reference)}
            decks = [evaluation]
        for name in draw.choice(decks).deal(draw.choice((1, 1, 2))):
            base[name] = draw.choice(VALUES)
        allowed, kind = {0, 2, 3, 75}, f"command lines of {mode}"
        foreign = [name for name in main.MODES_OF if name not in (*main.flags_of(mode), "mode")]
        foreign = [name for name in foreign if name not in base and name != "eval"]
        if foreign and draw.random() < 0.2 and base.get("study") != "dyneval":
            base[draw.choice(foreign)] = "1"
            allowed, kind = {2}, "command lines with a flag of another mode"
        base = {n: v for n, v in base.items() if n != "workdir" or mode in main.MODES_OF[n]}
        # A key of a config is known once there is one.
        line = [f"--{name}={base[name]}" for name in sorted(base, key=lambda n: "." in n)]
        pid = start(line, log, functools.partial(only_check, root / "here" / "and" / "below"))
        code = finish(pid)
        shown = " ".join(line)[:400].encode(errors="replace").decode()
        report.check_output(log, code, shown, allowed)
        report.note(kind, f"code {code}")
    if not count:
        return
    dealt = ", ".join(f"{mode} {deck}" for mode, deck in own.items())
    report.title += f"; drawn: keys of configs {keys}, of eval {evaluation}; flags of {dealt}"


def run() -> int:
    """Parses its options, does what they ask for, and prints the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = ("--kills", "--damages", "--disks", "--lines", "--texts", "--environments", "--calls")
    for name in (*kinds, "--databases", "--seed"):
        parser.add_argument(name, type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/chaos"))
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    draw = random.Random(given.seed)
    reference, log = given.folder / "reference", given.folder / "log"
    complete(given.folder / "first", log)  # Compiles.
    began = time.monotonic()
    assert complete(reference, log) == 0, log.read_text()
    seconds = time.monotonic() - began
    title = f"seed {given.seed}; an unbroken run takes {seconds:.1f} s"
    report = Report(given.folder / "report.txt", title)
    try:
        kill(given.kills, given.folder, reference, seconds, draw, report)
        damage(given.damages, given.folder, reference, draw, report)
        fill(given.disks, given.folder, reference, draw, report)
        draw_lines(given.lines, given.folder, reference, draw, report)
        change_texts(given.texts, given.folder, draw, report)
        strange_environments(given.environments, given.folder, reference, draw, report)
        edit_databases(given.databases, given.folder, draw, report)
        # Last: these start JAX in this process, which then must not fork.
        draw_calls(given.calls, reference, draw, report)
    except KeyboardInterrupt:
        print("interrupted; so far:")
    print(report)
    return bool(report.faults)


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.unparse_flags()
    sys.exit(run())

r"""Kills, signals, damages and full disks on a small run, and drawn command lines; with a report.

    python -m benchmarks.chaos --kills=100 --damages=100 --disks=10 --lines=500 --folder=/tmp/chaos

An unbroken run of `experiments/pydoc.py:tiny` is the reference. What must hold: a run that was
killed or whose disk was full ends, once it may, with the same metrics and results, byte by byte.
A damage is either named, refused in one sentence, or changes no number. No line of a traceback is
printed, and exit codes are those of docs/pods.md. The report grows in `<folder>/report.txt`.

Each start is a fork of a process that has imported the package and has not started JAX, so it
takes a second. Full disks are small tmpfs mounts, for which one must be root; without, files are
limited in size (RLIMIT_FSIZE).
"""

import argparse
import collections
import functools
import os
import pathlib
import pkgutil
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from absl import flags

from mogrifier_jax import configs, main
from mogrifier_jax.evaluation import eval_options, methods, trained

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
}


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
        if draw.random() < 0.4:
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


def flags_of(mode: str) -> list[str]:
    """Those whose help names the mode, or none."""
    found = []
    for flag in main.FLAGS.flags_by_module_dict()[main.__name__]:
        modes = flag.help.partition(":")[0].removeprefix("For ").split(", ")
        if flag.name not in ("mode", "eval") and (
            mode in modes or not set(modes) & set(main.MODES)
        ):
            found.append(flag.name)
    return found


def draw_lines(count: int, root: pathlib.Path, reference, draw, report: Report) -> None:
    """Command lines of all modes in turn, with one or two drawn values each."""
    log = root / "log"
    for path in WORK:
        pkgutil.resolve_name(f"mogrifier_jax.{path}")  # Imported before the forks.
    keys = Deck([f"config.{name}" for name in configs.keys()], draw)
    evaluation = Deck([f"eval.{name}" for name in eval_options.OPTIONS], draw)
    own = {mode: Deck(flags_of(mode), draw) for mode in main.MODES}
    for i in range(count):
        mode = main.MODES[i % len(main.MODES)]
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
        # A key of a config is known once there is one.
        line = [f"--{name}={base[name]}" for name in sorted(base, key=lambda n: "." in n)]
        pid = start(line, log, functools.partial(only_check, root / "here" / "and" / "below"))
        code = finish(pid)
        shown = " ".join(line)[:400].encode(errors="replace").decode()
        report.check_output(log, code, shown, {0, 2, 3, 75})
        report.note(f"command lines of {mode}", f"code {code}")
    if not count:
        return
    dealt = ", ".join(f"{mode} {deck}" for mode, deck in own.items())
    report.title += f"; drawn: keys of configs {keys}, of eval {evaluation}; flags of {dealt}"


def run() -> int:
    """Parses its options, does what they ask for, and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--kills", "--damages", "--disks", "--lines", "--seed"):
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
    except KeyboardInterrupt:
        print("interrupted; so far:")
    print(report)
    return bool(report.faults)


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    flags.FLAGS.unparse_flags()
    sys.exit(run())

r"""What a workdir in a bucket costs: CPU seconds of a turn, and seconds until a run resumes.

    python -m benchmarks.buckets --megabytes=8 --delay=0.1
    taskset -c 1 python -m benchmarks.buckets --runs=3 --delay=0.1

A server on loopback takes `delay` seconds for each request. The mirror writes a checkpoint of the
given size and metrics, as it does while a run goes on, and is then read back as by a resume. The
CPU time is that of this process, which would otherwise be free for the training loop.

With `--runs`, whole runs of `experiments/pydoc.py` on a disk and in the bucket take turns instead,
and their times are compared.
"""

import argparse
import datetime
import functools
import os
import pathlib
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from mogrifier_jax import buckets, launch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=8.0, help="of a checkpoint")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds of a request")
    parser.add_argument("--turns", type=int, default=8, help="checkpoints to write")
    parser.add_argument("--runs", type=int, default=0, help="whole runs of each kind")
    options = parser.parse_args()
    port = launch._free_port()
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{port}"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "token"
    command = [sys.executable, "-m", "tests.object_store", str(port), str(options.delay)]
    # The server is on another core if there is one.
    everywhere = functools.partial(os.sched_setaffinity, 0, range(os.cpu_count() or 1))
    server = subprocess.Popen(command, preexec_fn=everywhere)
    time.sleep(3.0)
    try:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["MOGRIFIER_CACHE_DIR"] = cache
            if options.runs:
                compare_runs(options.runs, cache)
            else:
                measure(options.megabytes, options.turns)
    finally:
        server.kill()


def measure(megabytes: float, turns: int) -> None:
    cpu, wall = [], []
    with buckets.mounted("gs://runs/run", exclusive=True) as folder:
        (mirror,) = buckets._mirrors.values()
        for turn in range(turns):
            write_turn(pathlib.Path(folder), turn, megabytes)
            used, started = time.process_time(), time.monotonic()
            mirror.push()
            cpu.append(time.process_time() - used)
            wall.append(time.monotonic() - started)
    started = time.monotonic()
    with buckets.mounted("gs://runs/run", exclusive=True):
        resumed = time.monotonic() - started
    print(f"a turn: {max(cpu):.3f} s of CPU at most, {max(wall):.1f} s in the background")
    print(f"a resume: {resumed:.1f} s until the files are there")


class Times(NamedTuple):
    """Seconds of a run: all of it, its processor time, and from the first turn to the last."""

    whole: float
    processor: float
    loop: float


def compare_runs(count: int, folder: str) -> None:
    """Times runs on a disk and in the bucket, by turns; a first run fills the cache of programs."""
    time_run(f"{folder}/first")
    pairs = []
    for number in range(count):
        disk, bucket = time_run(f"{folder}/{number}"), time_run(f"gs://runs/{number}")
        pairs.append([there / here for here, there in zip(disk, bucket, strict=True)])
        print(f"disk {disk}, bucket {bucket}", flush=True)
    for name, ratios in zip(Times._fields, zip(*pairs, strict=True), strict=True):
        shown = ", ".join(f"{ratio:.4f}" for ratio in sorted(ratios))
        print(f"{name}, bucket / disk: median {statistics.median(ratios):.4f} of {shown}")


def time_run(workdir: str) -> Times:
    command = [sys.executable, "-m", "mogrifier_jax", "--config=experiments/pydoc.py"]
    used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [*command, "--cpu_devices=1", f"--workdir={workdir}"], check=True, capture_output=True
    )
    whole, now = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    with buckets.copied(workdir) as place:
        lines = pathlib.Path(place, "run.log").read_text().splitlines()
        print(pathlib.Path(place, "results.json").read_text().replace("\n", ""))
    turns = [line for line in lines if " turn " in line]
    first, last = (
        datetime.datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")
        for line in (turns[0], turns[-1])
    )
    return Times(whole, processor, (last - first).total_seconds())


def write_turn(folder: pathlib.Path, turn: int, megabytes: float) -> None:
    """The files of a turn, in the number and proportion in which Orbax writes them."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(f"{secrets.token_hex(100)}\n" * 20)
    checkpoint = folder / "checkpoints" / str(turn)
    (checkpoint / "state" / "d").mkdir(parents=True)
    (checkpoint / "info").mkdir()
    for index in range(8):
        size = int(megabytes * 2**20 / 8)
        (checkpoint / "state" / "d" / str(index)).write_bytes(secrets.token_bytes(size))
    for index in range(8):
        (checkpoint / "state" / f"small_{index}").write_bytes(b"x" * 1000)
    (checkpoint / "info" / "info.json").write_bytes(b"x" * 10_000)
    old = folder / "checkpoints" / str(turn - 2)
    if old.exists():
        for path in sorted(old.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        old.rmdir()


if __name__ == "__main__":
    main()

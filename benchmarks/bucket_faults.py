r"""Kills, failures and delays of a run whose workdir is in a bucket, with a report.

    python -m benchmarks.bucket_faults --scheme=gs --kills=20
    python -m benchmarks.bucket_faults --scheme=s3 --kills=6      # needs pip install "moto[server]"
    python -m benchmarks.bucket_faults --scheme=gs --kills=0 --failures=0.2 --delay=0.1

An unbroken run of `experiments/pydoc.py:tiny` on a disk is the reference. The same run in a bucket
is killed when a request of a certain kind comes to a certain point, as in `KILLS`, and is started
again; in the end its metrics and results must be those of the reference, byte by byte.

Requests go through a proxy in front of the store: tests/object_store.py for gs, moto's server for
s3. It sees each request arrive, come in half, be carried out and be answered. It can also
answer a share of them with 503, with a reset, or with half of an answer.
"""

import argparse
import contextlib
import http.client
import http.server
import multiprocessing
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import chaos
from mogrifier_jax import buckets, launch

RUN = (
    *(f"--config={chaos.CONFIG}", "--cpu_devices=1", "--config.schedule.turns=40"),
    *("--config.schedule.steps_per_turn=4", "--config.log_every=2"),
)
STAGES = ("arrived", "half", "done", "answered")


class Kill(NamedTuple):
    """A point at which a process is killed: a request, and how far it has come."""

    request: str  # A regular expression for a method and an object.
    stage: str  # One of STAGES; "half" is in the middle of the body.
    count: int = 1  # So many such requests of a start.


# In an order in which a run comes to each of them; the last ones end it.
KILLS = (
    Kill(r"GET .*/\.lease", "arrived"),
    Kill(r"WRITE .*/\.lease", "half"),
    Kill(r"WRITE .*/\.lease", "done"),
    Kill(r"WRITE .*/config\.json", "half"),
    Kill(r"WRITE .*/vocabulary\.json", "done"),
    Kill(r"WRITE .*/checkpoints/\d+/state/.*", "half"),
    Kill(r"WRITE .*/checkpoints/\d+/state/.*", "answered", 5),
    Kill(r"WRITE .*/info\.json", "arrived"),
    Kill(r"WRITE .*/info\.json", "half"),
    Kill(r"WRITE .*/info\.json", "done"),
    Kill(r"WRITE .*/metrics\.jsonl", "half"),
    Kill(r"WRITE .*/metrics\.jsonl", "done", 2),
    Kill(r"GET .*/checkpoints/\d+/state/.*", "arrived"),
    Kill(r"GET .*/checkpoints/\d+/state/.*", "answered", 9),
    Kill(r"DELETE .*/checkpoints/\d+/info/info\.json", "arrived"),
    Kill(r"DELETE .*/checkpoints/\d+/info/info\.json", "done"),
    Kill(r"DELETE .*/checkpoints/\d+/state/.*", "done", 3),
    Kill(r"WRITE .*/\.lease", "done", 3),  # A renewal.
    Kill(r"WRITE .*/results\.json", "half"),
    Kill(r"DELETE .*/\.lease", "arrived"),
)


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a store on loopback, and interferes."""

    daemon_threads = True

    def __init__(self, port: int, delay: float, failures: float, seed: int):
        super().__init__(("127.0.0.1", 0), Passing)
        self.port, self.delay, self.failures = port, delay, failures
        self.random, self.lock = random.Random(seed), threading.Lock()
        # Shared with the process that starts the victims.
        self.victim, self.kill = multiprocessing.Value("i", 0), multiprocessing.Value("i", -1)
        self.requests, self.failed = multiprocessing.Value("i", 0), multiprocessing.Value("i", 0)
        self.seen = 0

    def arm(self, kill: int) -> None:
        """The next victim is killed at this point of KILLS; -1 is none."""
        self.victim.value, self.kill.value = 0, kill

    def is_end_of_victim(self, request: str, stage: str) -> bool:
        """Notes a stage of a request; True if it was the one to be killed at."""
        with self.lock:
            if self.kill.value < 0:
                return False
            kill = KILLS[self.kill.value]
            if kill.stage != stage or not re.fullmatch(kill.request, request):
                return False
            self.seen += 1
            if self.seen < kill.count:
                return False
            self.seen, self.kill.value = 0, -1
            os.kill(self.victim.value, signal.SIGKILL)
            return True

    def choose_failure(self) -> str | None:
        """What goes wrong with the next request, if anything."""
        with self.lock:
            self.requests.value += 1
            if self.random.random() >= self.failures:
                return None
            self.failed.value += 1
            return self.random.choice(("503", "reset", "half", "lost"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: clients are killed here."""


class Passing(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        """Reads, or lists."""
        self.pass_on(self.command)

    do_HEAD = do_DELETE = do_GET

    def do_POST(self) -> None:
        """Writes: POST of Google, PUT of S3."""
        self.pass_on("WRITE")

    do_PUT = do_POST

    def pass_on(self, kind: str) -> None:
        """Passes a request to the store and its answer back, unless something goes wrong."""
        address = urllib.parse.urlsplit(self.path)
        name = dict(urllib.parse.parse_qsl(address.query)).get("name", "")
        request = f"{kind} {urllib.parse.unquote(address.path)}/{name}".rstrip("/")
        time.sleep(self.server.delay)
        if self.comes_to(request, "arrived"):
            return
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size // 2)
        if self.comes_to(request, "half"):
            return
        body += self.rfile.read(size - len(body))
        failure = self.server.choose_failure()
        if failure == "reset":
            return self.hang_up()
        if failure == "503":
            return self.answer(503, [], b"")
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        connection.request(self.command, self.path, body, headers)
        found = connection.getresponse()
        content = found.read()
        connection.close()
        if self.comes_to(request, "done"):
            return
        if failure == "lost":  # It was carried out, and nobody is told.
            return self.hang_up()
        self.answer(found.status, found.getheaders(), content, half=failure == "half")
        self.comes_to(request, "answered")

    def comes_to(self, request: str, stage: str) -> bool:
        """Whether the client is killed at this point."""
        if ended := self.server.is_end_of_victim(request, stage):
            self.close_connection = True
        return ended

    def answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, half: bool = False
    ) -> None:
        """Sends an answer, or half of its content."""
        self.send_response_only(status)
        for key, value in headers:
            if key.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if half and content:
            self.wfile.write(content[: len(content) // 2])
            return self.hang_up()
        if self.command != "HEAD":
            self.wfile.write(content)

    def hang_up(self) -> None:
        """Ends the connection with a reset."""
        self.close_connection = True
        no_lingering = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_lingering)


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Iterator[Proxy]:
    """A store with a bucket `runs` behind a proxy, which the environment names."""
    port = launch._free_port()
    if options.scheme == "gs":
        command = [sys.executable, "-m", "tests.object_store", str(port), "0"]
    else:
        command = [options.moto, "-p", str(port)]
    with tempfile.TemporaryFile() as log:
        store = subprocess.Popen(command, stdout=log, stderr=log)
    proxy = Proxy(port, options.delay, options.failures, options.seed)
    address = f"http://127.0.0.1:{proxy.server_port}"
    # A process of its own, so that this one has no threads when it forks.
    serving = multiprocessing.get_context("fork").Process(target=proxy.serve_forever, daemon=True)
    serving.start()
    try:
        wait_for(port)
        if options.scheme == "gs":
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = address
            os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "token"
        else:
            make_s3_bucket(port)
            os.environ["AWS_ENDPOINT_URL"] = address
            os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "x"
            os.environ["AWS_REGION"] = "us-east-1"
        yield proxy
    finally:
        serving.kill()
        store.kill()
        store.wait()


def wait_for(port: int) -> None:
    """Waits until somebody listens at a port."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port)).close()
        time.sleep(0.2)
    raise SystemExit("the store did not start")


def make_s3_bucket(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", "/runs")
    connection.getresponse().read()
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scheme", choices=("gs", "s3"), default="gs")
    parser.add_argument("--kills", type=int, default=len(KILLS), help="spread over the list")
    parser.add_argument("--failures", type=float, default=0.0, help="share of failing requests")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds of a request")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between uploads")
    parser.add_argument("--seed", type=int, default=1, help="of the failures")
    parser.add_argument("--moto", default="moto_server", help="the program of moto's server")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Changes are looked for often, because a turn takes less than a second.
    buckets.PAUSE = buckets.BEAT = options.pause
    with tempfile.TemporaryDirectory() as folder, serving(options) as proxy:
        os.environ["MOGRIFIER_CACHE_DIR"] = f"{folder}/cache"
        faults = check(pathlib.Path(folder), proxy, options.scheme, options.kills)
    print(f"{len(faults)} faults", *faults, sep="\n")
    raise SystemExit(bool(faults))


def check(root: pathlib.Path, proxy: Proxy, scheme: str, kills: int) -> list[str]:
    """The run on a disk, the killed one in the bucket, and what is wrong with the latter."""
    log, disk, bucket = root / "log", root / "disk", f"{scheme}://runs/some/run"
    code = chaos.finish(chaos.start([*RUN, f"--workdir={disk}"], log))
    assert code == 0, log.read_text()
    faults = []
    for index in [*(number * len(KILLS) // kills for number in range(kills)), -1]:
        proxy.arm(index)
        started = time.monotonic()
        proxy.victim.value = pid = chaos.start([*RUN, f"--workdir={bucket}"], log)
        code, seconds = chaos.finish(pid), time.monotonic() - started
        what = " ".join(map(str, KILLS[index])) if index >= 0 else "to the end"
        print(f"{what:60s} {code:3d} {find_step(log)}, {seconds:.0f} s", flush=True)
        if code != (-signal.SIGKILL if index >= 0 else 0) or "Traceback" in log.read_text():
            faults.append(f"{what}: code {code}: {log.read_text()[-1000:]}")
    found = buckets.local_copy(bucket)
    for name in ("metrics.jsonl", "results.json"):
        wanted, there = (disk / name).read_bytes(), pathlib.Path(found, name).read_bytes()
        print(f"{name}: {len(there)} bytes, equal: {wanted == there}")
        if wanted != there:
            faults.append(f"{name} is not that of the unbroken run")
    names = [key.decode() for key in buckets._open(bucket).list().result()]
    if ".lease" in names:
        faults.append("a lease is left")
    requests, failed = proxy.requests.value, proxy.failed.value
    print(f"{requests} requests, of which {failed} failed; {len(names)} objects")
    return faults


def find_step(log: pathlib.Path) -> str:
    """Where a start began, by its output."""
    found = re.findall(r"resuming at step \d+", log.read_text(errors="replace"))
    return found[-1] if found else "from the beginning"


if __name__ == "__main__":
    main()

"""The progress bar, on a terminal and without one."""

import os
import pty
import subprocess
import sys
import termios

import pytest
from absl import logging

from mogrifier_jax.training import progress

SHOW = """
import logging, time
import absl.logging
from mogrifier_jax.training import logs, progress
logs.setup_logging()
with progress.Bar(40, 1000, seconds=0.0, unit="ppl") as bar:
    for step in (10, 20, 30, 40):
        time.sleep(0.15)
        bar.update(step, 1.0)
        absl.logging.info("noted %d", step)
absl.logging.warning("careful")
"""


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar_and_each_line_comes_once():
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 100))
    with subprocess.Popen(
        [sys.executable, "-c", SHOW], stderr=follower, stdout=follower
    ) as process:
        os.close(follower)
        output = b""
        try:
            while chunk := os.read(leader, 4096):
                output += chunk
        except OSError:  # How a pseudo-terminal says that it is over.
            pass
    os.close(leader)
    assert process.returncode == 0
    text = output.decode()
    assert text.count("noted 20") == 1
    assert text.count("warning: careful") == 1
    assert "20/40" in text and "ppl 2.72" in text and "tok/s" in text and "left" in text
    assert "step 20/40" not in text


@pytest.mark.slow
def test_without_a_terminal_there_are_lines():
    result = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True
    )
    lines = result.stderr.splitlines()
    assert len(lines) == 9
    assert "step 20/40 loss 1.0000  ppl 2.72" in lines[2]
    assert lines[3].endswith(" noted 20")


def test_lines_come_no_more_often_than_asked(caplog):
    logging.set_verbosity(logging.INFO)
    with progress.Bar(100, 10, seconds=3600, unit="bpc") as bar:
        for step in range(1, 50):
            bar.update(step, 1.0)
    assert "step" not in caplog.text
    assert bar.tokens_per_second > 0


def test_a_pause_does_not_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with progress.Bar(100, 10) as bar:
        for step in (5, 10):
            clock[0] += 1
            bar.update(step, 1.0)
        assert bar.tokens_per_second == 50
        with bar.paused():
            clock[0] += 1000
        clock[0] += 1
        bar.update(15, 1.0)
        assert bar.tokens_per_second == 50


def test_compilation_does_not_count(monkeypatch, caplog):
    """The first dispatch of each length compiles, which would make the time left far too long."""
    logging.set_verbosity(logging.INFO)
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with progress.Bar(100, 10, seconds=0.0, unit="bpc") as bar:
        for step, seconds in ((20, 300), (40, 2), (45, 300), (50, 0.5), (70, 2)):
            clock[0] += seconds
            bar.update(step, 1.0)
            assert bar.tokens_per_second == (0 if step == 20 else 100)
    lines = [line for line in caplog.text.splitlines() if "step" in line]
    assert "left" not in lines[0] and lines[1].endswith("6s left") and lines[-1].endswith("3s left")

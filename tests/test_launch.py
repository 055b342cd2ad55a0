import pathlib
import signal
import subprocess
import sys

import pytest

from mogrifier_jax import errors, launch

ROOT = pathlib.Path(__file__).parents[1]
RESTART = errors.Interrupted.exit_code


@pytest.mark.parametrize(
    ("codes", "combined"),
    [
        ((0, 0), 0),
        ((RESTART, RESTART), RESTART),
        ((-signal.SIGKILL, RESTART), RESTART),  # One was killed, the other noticed.
        ((-signal.SIGABRT, -signal.SIGKILL), RESTART),  # The coordinator was killed.
        ((0, RESTART), RESTART),
        ((RESTART, 2), 2),  # A mistake would only be repeated.
        ((3, 3), 3),
        ((-signal.SIGTERM, 1), 1),
    ],
)
def test_one_exit_code_for_all(codes, combined):
    assert launch.combine(codes) == combined


class FakeLauncher(launch.Launcher):
    """Ends with the given codes, one for each start."""

    codes: list
    seen: list

    def run(self, flags):
        FakeLauncher.seen.append(list(flags))
        return FakeLauncher.codes.pop(0)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(launch, "Launcher", FakeLauncher)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(codes, *arguments):
        FakeLauncher.codes, FakeLauncher.seen = list(codes), []
        return launch.main([*arguments, "--wait=0", "--", "--mode=x"]), len(FakeLauncher.seen)

    return run


def test_restarts_what_was_interrupted_and_nothing_else(fake):
    assert fake([RESTART, RESTART, 0]) == (0, 3)
    assert fake([RESTART, 2, 0]) == (2, 2)
    assert fake([0, RESTART]) == (0, 1)
    assert fake([RESTART] * 5, "--restarts=2") == (RESTART, 3)
    assert FakeLauncher.seen[0] == ["--mode=x"]


def test_a_failure_is_seen_while_process_0_hangs():
    """As if process 0 had been stopped (SIGSTOP): only its death ends it."""
    launcher = launch.Launcher(2, 1, grace=0.0)
    programs = ["import time; time.sleep(600)", "import sys; sys.exit(3)"]
    launcher._running = [subprocess.Popen([sys.executable, "-c", p]) for p in programs]
    assert launcher._wait() == [-signal.SIGKILL, 3]


@pytest.mark.parametrize("flag", ["--wait=nan", "--grace=-1", "--processes=0", "--restarts=-1"])
def test_numbers_that_cannot_be(flag):
    with pytest.raises(SystemExit, match="2"):
        launch.main([flag])


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named_and_waited_for_in_vain():
    address = f"--coordinator=127.0.0.1:{launch._free_port()}"
    command = [sys.executable, "-m", "mogrifier_jax.main", "--config=experiments/pydoc.py:tiny"]
    flags = [address, "--num_processes=3", "--process_id=0", "--peer_timeout=0.2"]
    done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == RESTART
    assert done.stderr.startswith("PeerLost: processes 1, 2 did not report within 1 s")


@pytest.mark.slow
def test_a_mistake_ends_all_processes_with_its_own_code(capfd):
    launcher = launch.Launcher(2, 1, grace=3600.0)
    assert launcher.run(["--mode=nonsense"]) == errors.UsageError.exit_code
    said = capfd.readouterr().err
    assert said.count("UsageError: --mode=nonsense is unknown") == 2
    assert "process 0 (pid" in said and "ended with code 2" in said

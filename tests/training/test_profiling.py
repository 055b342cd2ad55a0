import jax
import pytest

from mogrifier_jax import errors
from mogrifier_jax.training import profiling


@pytest.mark.parametrize("text", ["5", "5:", "a:b", "0:3", "7:6", "1:2:3", "-1:4"])
def test_steps_that_cannot_be_traced(text):
    with pytest.raises(errors.UsageError, match="is not N:M"):
        profiling.parse_steps(text)


@pytest.mark.parametrize(
    ("steps", "traced"),
    [
        ("1:1", [0]),
        ("4:5", [0, 4]),  # Dispatches of four steps each: 1 to 4, 5 to 8.
        ("5:8", [4]),
        ("6:13", [4, 8, 12]),
        ("99:100", []),
        (None, []),
    ],
)
def test_whole_dispatches_are_traced(steps, traced, monkeypatch, tmp_path):
    running, seen = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", running.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", running.pop)
    trace = profiling.Trace(tmp_path, steps)
    for done in range(0, 20, 4):
        with trace.steps(done, 4):
            seen += [done] * len(running)
    assert seen == traced and not running

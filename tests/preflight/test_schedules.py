"""Schedules of a small program, as two versions of the TPU compiler wrote them.

`tests/schedule_dumps.py` has the program and recorded the files.
"""

import dataclasses
import importlib.util
import os
import pathlib
import zipfile

import jax
import pytest

from mogrifier_jax.preflight import chips, costs, estimates, listings, report, schedules
from tests import schedule_dumps as recorded

V5E = chips.CHIPS["v5e"]
ZIPS = sorted(recorded.DATA.glob("schedule_libtpu_*.zip"))


@pytest.fixture(params=ZIPS, ids=[path.stem.rpartition("_")[2] for path in ZIPS])
def dump(request, tmp_path):
    """A folder as the compiler leaves it."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def read(folder):
    """The schedule of the files in a folder, which are removed."""
    analysis = costs.analyse((folder / "program.hlo.txt").read_text())
    recording = schedules.Recording(V5E, str(folder))
    recording.read_files(complete=True)
    return recording.schedule(analysis)


def parts(schedule, start):
    return [part for part in schedule.parts if part.name.startswith(start)]


def test_both_versions_are_recorded():
    assert len(ZIPS) == 2
    assert sum(path.stat().st_size for path in ZIPS) < 200_000


def test_one_listing_stands_for_two_instructions(dump):
    """The bodies of both loops are the same, and the compiler schedules them once."""
    written = [path.name for path in dump.iterdir() if "convolution_tanh_fusion" in path.name]
    assert len(written) == 1
    first, second = parts(read(dump), "convolution_tanh_fusion")
    assert (first.executions, second.executions) == (recorded.STEPS, recorded.MORE)
    assert first.each == second.each
    # Four tiles of 128 x 128 weights, which take 32 cycles to load, and 32 rows for each.
    assert (first.each.pushed, first.each.multiplied) == (4 * 32, 4 * recorded.ROWS)
    assert 32 < first.each.bundles < 1000 and first.each.dmas == 0


def test_blocks_of_a_large_array(dump):
    """Two arrays are read and one is written, block by block; the last block is not full."""
    (each,) = (part.each for part in parts(read(dump), "tanh_multiply_fusion"))
    array = 4 * recorded.LONG * 1024
    assert each.dmas % 3 == 0 and each.dmas > 3
    block = each.dma_bytes // each.dmas
    assert 3 * array <= each.dma_bytes < 3 * (array + block)
    # Each vector of 8 x 128 elements is loaded twice and stored once, one store in a bundle.
    assert each.bundles >= array // 4096
    assert each.guesses == 0


def test_custom_calls_count(dump):
    (kernel,) = parts(read(dump), "program")
    assert kernel.op_name.endswith("pallas_call")
    assert (kernel.executions, kernel.each.bundles > 1) == (1, True)


def test_the_total_is_the_sum_and_the_range_follows(dump):
    schedule = read(dump)
    assert schedule.parts[-1].name == "between instructions"
    cycles = sum(part.executions * part.each.bundles for part in schedule.parts)
    assert schedule.total.bundles == cycles and schedule.total.guesses == 0
    assert schedule.lower_seconds == pytest.approx(cycles / V5E.clock)
    waited = schedule.total.dma_bytes / 819e9 + schedule.total.dmas * 0.5e-6
    assert schedule.dma_seconds == pytest.approx(waited)
    steps = recorded.STEPS + recorded.MORE
    assert schedule.matrix_share == pytest.approx(steps * 4 * 32 / 4 / cycles)
    assert schedule.dearest()[0].name == "tanh_multiply_fusion"


def test_loops_of_the_program_are_counted(dump):
    text = (dump / "program.hlo.txt").read_text()
    analysis = costs.analyse(text)
    recording = schedules.Recording(V5E, str(dump))
    recording.read_files(complete=True)
    once = dataclasses.replace(analysis, executions=dict.fromkeys(analysis.executions, 1))
    often, single = recording.schedule(analysis), recording.schedule(once)
    assert often.parts[-1].each.bundles > single.parts[-1].each.bundles
    assert often.total.bundles > single.total.bundles + 6 * 200  # Six more matmuls.


def test_files_are_read_when_they_are_complete_and_removed(dump):
    recording = schedules.Recording(V5E, str(dump))
    recording.read_files(complete=False)
    assert not recording.counts  # No file says that its listing is complete.
    (listing,) = dump.glob("*convolution_tanh_fusion*")
    mark = listing.name.replace("packed", "static_gap_analysis_packed")
    (dump / mark).write_text("Static Gap Analysis\n")
    recording.read_files(complete=False)
    assert not listing.exists() and len(recording.counts) == 1


def test_a_missing_listing_gives_no_schedule(dump):
    (listing,) = dump.glob("*convolution_tanh_fusion*")
    listing.unlink()
    assert read(dump) is None


def test_an_unknown_format_gives_no_schedule(dump):
    """What another version writes must not end a preflight."""
    analysis = costs.analyse((dump / "program.hlo.txt").read_text())
    (listing,) = dump.glob("*convolution_tanh_fusion*")
    kept = listing.read_text()
    with schedules.Recording(V5E, str(dump)) as recording:
        listing.write_text(kept.replace("%s", "register "))
        (dump / "1-TLP-02-packed-bundles-post-ra.txt").write_text("something else\n")
    assert recording.schedule(analysis) is None
    assert not list(dump.iterdir())
    with schedules.Recording(V5E, str(dump)) as recording:
        listing.write_bytes(b"\xff\xfe")
    assert recording.schedule(analysis) is None


def test_gpus_have_no_schedule(tmp_path):
    (tmp_path / "kept").touch()
    with schedules.Recording(chips.CHIPS["h100"], str(tmp_path)) as recording:
        pass
    assert recording.schedule(costs.Analysis((), (), (), {})) is None
    assert (tmp_path / "kept").exists()


def test_flags_are_added_once_and_unknown_ones_ignored(monkeypatch):
    monkeypatch.setattr(schedules, "_folder", None)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine=1")
    schedules.request_listings()
    flags = os.environ["LIBTPU_INIT_ARGS"]
    schedules.request_listings()
    assert os.environ["LIBTPU_INIT_ARGS"] == flags
    names = [flag.partition("=")[0].strip("-") for flag in flags.split()]
    assert names[0] == "mine" and names[-1] == "undefok"
    assert flags.split()[-1] == "--undefok=" + ",".join(names[1:-1])
    assert pathlib.Path(schedules._folder).is_dir()
    monkeypatch.setattr(schedules, "_folder", None)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_jf_dump_to=elsewhere")
    schedules.request_listings()
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_jf_dump_to=elsewhere"


def make_estimate(**fields):
    common = dict(topology="v5e:1x1", chips=1, data=1, model=1, batch_size=10, window=100)
    common |= dict(turns=2, steps=1000, dtype="float32", vocab_size=9, parameters=7, flops=8)
    common |= dict(
        fits=True, memory=2**30, needed=2**20, bytes={}, time_from="the compiler's own estimates"
    )
    common |= dict(evaluation_seconds=5.0, saving_seconds=1.0, peak_share=0.1)
    return estimates.Estimate(
        **common, compute_seconds=0.004, collective_seconds=0.001, collectives={}, **fields
    )


def test_the_report_shows_the_range_beside_the_old_sum(dump):
    step = estimates._scheduled_step(read(dump), 2, 0.001, (3.0, 4.0))
    assert step.upper_seconds == step.lower_seconds + step.dma_seconds + 0.001
    shown = make_estimate(schedule=step)
    text = report.to_table(shown)
    lower, upper = 1e3 * step.lower_seconds, 1e3 * step.upper_seconds
    assert f"{lower:.1f} to {upper:.1f}" in text
    assert (
        "by the schedule that the compiler made" in text and "the compiler's own estimates" in text
    )
    assert shown.scheduled_days[0] == pytest.approx((1000 * step.lower_seconds + 2 * 4) / 86_400)
    values = shown.to_dict()
    assert values["schedule"]["cycles"] == step.cycles and values["seconds"] == 0.005
    assert values["schedule"]["dearest"][0][0] == "tanh_multiply_fusion"
    unknown = dataclasses.replace(
        shown, schedule=dataclasses.replace(step, matrix_share=float("nan"))
    )
    assert unknown.to_dict()["schedule"]["matrix_share"] is None
    assert "matrix units" not in report.to_table(unknown) and "matrix units" in text
    assert "by the schedule" not in report.to_table(make_estimate())


@pytest.mark.slow
def test_with_the_compiler_that_is_here():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed")
    lowered = jax.jit(recorded.program).lower(*recorded.arguments())
    with schedules.Recording(V5E) as recording:
        program = lowered.compile()
    schedule = recording.schedule(costs.analyse(program.as_text()))
    assert schedule, "the compiler wrote no schedule that can be read"
    first, second = parts(schedule, "convolution")
    assert (first.executions, second.executions) == (recorded.STEPS, recorded.MORE)
    assert first.each.multiplied == 4 * recorded.ROWS
    assert not list(pathlib.Path(schedules._folder).iterdir())
    assert schedule.total.bundles > listings.Counts().bundles

"""`--mode=preflight`: prints whether a run fits on chips of a kind, and how fast it will be.

    python -m mogrifier_jax.main --mode=preflight --config=experiments/enwik8.py --topology=v5e:2x2

`estimates.py` makes the estimates that are printed here.
"""

import datetime
import importlib.metadata
import json

import jax
from ml_collections import config_dict

from mogrifier_jax.preflight import estimates, memory, targets
from mogrifier_jax.training import atomic_files, summaries, units


def preflight(
    config: config_dict.ConfigDict,
    topology: str,
    *,
    search: bool = False,
    json_path: str | None = None,
) -> list[estimates.Estimate]:
    """Prints the estimate of a config on a topology, and returns it in a list.

    Args:
      search: try all splits of the chips into data and model axes, print the best one in full and
        list the others, which are returned as well, the best first.
      json_path: a file for all numbers.
    """
    target = targets.parse(topology)
    if target.chip.kind == "tpu":
        # The compiler writes a schedule only when it compiles.
        jax.config.update("jax_enable_compilation_cache", False)
    if search:
        ranked = estimates.examine_splits(config, target)
    else:
        ranked = [estimates.examine(config, target)]
    print(to_table(ranked[0]))
    if search:
        lines = ["splits of the chips, best first:", *(each.in_one_line() for each in ranked)]
        print("\n  ".join(lines))
    if json_path:
        write_json(json_path, ranked)
    return ranked


def to_table(estimate: estimates.Estimate) -> str:
    """An estimate as a table for the terminal."""
    show, verdict = memory.show_bytes, "fits" if estimate.fits else "DOES NOT FIT"
    needed = show(estimate.needed) if estimate.needed else "more"
    sections: dict[str, list[tuple[str, object]]] = {
        "program": [
            ("chips", f"{estimate.topology}, data {estimate.data} x model {estimate.model}"),
            ("batch x window", f"{estimate.batch_size} x {estimate.window}"),
            ("parameters", estimate.parameters),
            ("matmul FLOPs of a step", units.quantity(estimate.flops)),
        ],
        f"memory of each chip: {verdict}": [
            ("needed, of", f"{needed}, {show(estimate.memory)}"),
            *((f"  {kind}", show(size)) for kind, size in estimate.bytes.items()),
            ("while evaluating", show(estimate.evaluation_needed)),
        ],
    }
    if estimate.schedule:
        sections["time of a step, by the schedule that the compiler made"] = _scheduled(estimate)
    if estimate.time_from:
        share = estimate.collective_seconds / estimate.seconds
        sections[f"time of a step, by {estimate.time_from}"] = [
            ("milliseconds", f"{1e3 * estimate.seconds:.1f}"),
            ("  in collectives", f"{1e3 * estimate.collective_seconds:.1f} ({share:.0%})"),
            *(
                (f"  {kind}", f"{times:,.0f} times, {show(size)}")
                for kind, (times, size) in estimate.collectives.items()
            ),
            *([("kernels launched", f"{estimate.kernels:,.0f}")] if estimate.kernels > 0 else []),
            ("tokens per second", f"{estimate.tokens_per_second:,.0f}"),
            ("  per chip", f"{estimate.tokens_per_second / estimate.chips:,.0f}"),
            ("share of the peak", f"{estimate.peak_share:.1%}"),
            ("seconds of an evaluation", f"{estimate.evaluation_seconds:.2f}"),
            ("  of a checkpoint", f"{estimate.saving_seconds:.2f}"),
            (
                "days in all",
                f"{estimate.days:.2f} for {estimate.steps:,} steps, {estimate.turns:,} turns",
            ),
        ]
    return "\n".join([summaries.table(sections), *estimate.notes])


def _scheduled(estimate: estimates.Estimate) -> list[tuple[str, object]]:
    """The rows of the schedule: from everything overlapped to nothing overlapped."""
    step, show = estimate.schedule, memory.show_bytes
    days = estimate.scheduled_days
    assert step and days
    ends = step.lower_seconds, step.upper_seconds
    tokens = [estimate.batch_size * estimate.window / end for end in reversed(ends)]
    matrix = [("matrix units busy", f"{step.matrix_share:.0%}")] if step.matrix_share >= 0 else []
    guesses = [("branches guessed", step.guesses)] if step.guesses else []
    return [
        ("milliseconds", " to ".join(f"{1e3 * end:.1f}" for end in ends)),
        ("  cycles alone", f"{1e3 * step.lower_seconds:.1f} ({units.quantity(step.cycles)})"),
        ("  waits for DMAs, at most", f"{1e3 * step.dma_seconds:.1f}"),
        ("    number, bytes", f"{step.dmas:,.0f}, {show(step.dma_bytes)}"),
        ("  collectives, at most", f"{1e3 * estimate.collective_seconds:.1f}"),
        *matrix,
        *guesses,
        ("tokens per second", " to ".join(f"{rate:,.0f}" for rate in tokens)),
        (
            "seconds of an evaluation",
            " to ".join(f"{end:.2f}" for end in step.evaluation_seconds),
        ),
        ("days in all", " to ".join(f"{end:.2f}" for end in days)),
    ]


def write_json(path: str, ranked: list[estimates.Estimate]) -> None:
    """Writes estimates to a file, with the date and the versions of JAX and the compilers."""
    names = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
    installed = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    content = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in names if name in installed},
        "reports": [each.to_dict() for each in ranked],
    }
    atomic_files.write_output(path, json.dumps(content, indent=1) + "\n")

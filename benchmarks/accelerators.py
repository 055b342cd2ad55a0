"""The two recurrence paths compiled for TPU chips that are not here, whole train steps.

    python -m benchmarks.tpu --sizes=ptb,enwik8      # needs the extra `tpu`; minutes, no TPU

Prints XLA's own estimate of the time of a step and the memory of a chip, for the fast path and
the plain `nn.scan`, and their ratio (nan where the compiler refuses plain for its memory). Goals:
enwik8 at 96M parameters on four v5e chips at most 0.4 of plain and 14 GB a chip, PTB on one chip
at most 0.7.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from benchmarks import timing, training
from mogrifier_jax import preflight, targets

# Experiment, chips, and what differs from it: bfloat16, and the batch in one piece.
SIZES = {
    "ptb": ("experiments/ptb.py", "v5e:1x1"),
    "enwik8": ("experiments/enwik8.py", "v5e:2x2"),
}


def examine(path: str, topology: str, fast: bool) -> preflight.Report:
    config = training.load_config(path)
    with config.unlocked():
        config.model.fast = fast
        config.model.dtype = "bfloat16"
        config.optimizer.accumulate = 1
    return preflight.examine(config, targets.parse(topology))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="ptb,enwik8", help="of ptb and enwik8")
    args = parser.parse_args()
    rows = [("", "ms of a step", "GB a chip", "vs plain")]
    for size in args.sizes.split(","):
        plain, fast = (examine(*SIZES[size], fast=fast) for fast in (False, True))
        for name, report in (("plain", plain), ("fast", fast)):
            ratio = report.compute_seconds / plain.compute_seconds
            times = f"{1e3 * report.compute_seconds:.2f}", f"{report.needed / 1e9:.1f}"
            rows.append((f"{size}, {name}", *times, f"{ratio:.2f}x"))
    print(timing.table(rows))


if __name__ == "__main__":
    main()

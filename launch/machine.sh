#!/usr/bin/env bash
# Trains, or tunes, on all GPUs of this machine, and goes on after a crash.
#
#   launch/machine.sh --config=experiments/ptb.py --workdir=runs/ptb
#   launch/machine.sh --mode=tune --config=experiments/ptb.py --study=appendix_a --trials=100 --workdir=runs/tune_ptb
#
# A run takes all GPUs. Tuning has a worker for each GPU, and workers on further machines join in if
# --storage is a database that all of them reach. On a machine without GPUs both use its cores.
# Start it in the folder of the repository after launch/install.sh.
set -euo pipefail

if (($# == 0)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
python=${PYTHON:-.venv/bin/python} # CHANGE: the Python with the package.
if [[ " $* " == *" --mode=tune "* && " $* " != *" --parallel="* ]]; then
  # As many workers as GPUs, or one that uses all cores.
  gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
  set -- "$@" --parallel=$((gpus > 0 ? gpus : 1))
fi
# The launcher starts one process, which sees all devices, and starts it again if it is killed.
exec "$python" -m mogrifier_jax.launch --processes=1 -- "$@"

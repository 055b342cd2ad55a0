#!/usr/bin/env bash
# Trains on every worker of a TPU VM slice, and goes on after preemption.
#
#   launch/tpu_pod.sh NAME ZONE WORKDIR --config=experiments/enwik8.py [more flags of main]
#
# NAME is a slice that exists (gcloud compute tpus tpu-vm create, or a queued resource), WORKDIR a
# folder that is mounted on all workers, such as a Filestore share. The last commit of this
# repository is copied to each worker and installed there. Processes find each other through the
# slice's own metadata, so no addresses are needed.
set -euo pipefail

if (($# < 4)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
name=$1 zone=$2 workdir=$3
shift 3
flags=$(printf '%q ' "$@" "--workdir=$workdir")

on_all() { gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }

root=$(cd "$(dirname "$0")/.." && pwd)
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
git -C "$root" archive --format=tar.gz --output="$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$name:mogrifier_jax.tar.gz" --zone="$zone" --worker=all
on_all 'mkdir -p mogrifier_jax && tar xzf mogrifier_jax.tar.gz -C mogrifier_jax &&
  python3 -m venv mogrifier_jax/.venv &&
  mogrifier_jax/.venv/bin/pip install --quiet -e "./mogrifier_jax[tpu,data,plot]"'

# Code 75 asks for another start; a worker that came back after maintenance joins the others then.
on_all "cd mogrifier_jax && for attempt in \$(seq 100); do
  .venv/bin/python -m mogrifier_jax.main $flags; code=\$?
  # 134: the runtime gave up because the host of process 0 was lost.
  if [ \$code -ne 75 ] && [ \$code -ne 134 ]; then exit \$code; fi
  echo \"attempt \$attempt ended with code \$code; starting again\"; sleep 20
done; exit 75"

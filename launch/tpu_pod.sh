#!/usr/bin/env bash
# Trains on every worker of a TPU VM slice, and goes on after preemption.
#
#   launch/tpu_pod.sh NAME ZONE WORKDIR --config=experiments/enwik8.py [more flags of main]
#
# Asks for the slice NAME as a queued resource if it is not there, waits for it, installs the last
# commit of this repository on each worker, and trains. If the slice is preempted, it is asked for
# again, and training goes on from the last checkpoint. WORKDIR is in a bucket, as
# gs://bucket/runs/enwik8, or a folder that all workers share. KEEP=yes keeps the slice when the run
# is over. With --mode=tune and a --storage that all workers reach, every chip gets a worker. Needs
# gcloud, with a project (gcloud config set project NAME) that has the TPU API switched on.
set -euo pipefail

if (($# < 4)); then
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
name=$1 zone=$2 workdir=$3
shift 3
chips=${CHIPS:-4} # CHANGE: the chips of a host, for tuning.
if [[ " $* " == *" --mode=tune "* ]]; then
  set -- "$@" --num_processes=1 --parallel="$chips"
fi
flags=$(printf '%q ' "$@" "--workdir=$workdir")

accelerator_type=${ACCELERATOR_TYPE:-v5litepod-16} # CHANGE: the slice; this one has 4 hosts of 4 chips.
runtime_version=${RUNTIME_VERSION:-v2-alpha-tpuv5-lite} # CHANGE: with the kind of chips.
capacity=${CAPACITY---spot} # CHANGE: CAPACITY= pays for a slice that is not preempted.
mount=${MOUNT:-true} # CHANGE: if WORKDIR is a folder, a command that mounts it on a worker.
pause=${PAUSE:-30} # Seconds between looks at the queue.

tpus() { gcloud compute tpus "$@" --zone="$zone"; }
# A command outlives a connection that is lost, so the next one waits for it.
lock='exec 9>>mogrifier_jax.lock; flock --nonblock 9 || { echo "waiting for the end of an earlier start"; flock 9; }; '
on_all() { tpus tpu-vm ssh "$name" --worker=all --command="$lock$1"; }

slice_state() {
  # Also one that was made without a queue (gcloud compute tpus tpu-vm create) will do.
  tpus queued-resources describe "$name" --format='value(state.state)' 2>/dev/null ||
    tpus tpu-vm describe "$name" --format='value(state)' 2>/dev/null || echo NONE
}

delete_slice() { tpus queued-resources delete "$name" --force --quiet || tpus tpu-vm delete "$name" --quiet; }

wait_for_slice() {
  local state before= failures=0
  while :; do
    state=$(slice_state)
    [[ $state == "$before" ]] || echo "$(date +%T) slice $name: $state"
    before=$state
    case $state in
    ACTIVE | READY) return ;;
    NONE)
      # Without a network the slice looks as if it were not there, so one failure is not the end.
      # shellcheck disable=SC2086 # Options, of which there may be none.
      tpus queued-resources create "$name" --node-id="$name" $capacity \
        --accelerator-type="$accelerator_type" --runtime-version="$runtime_version" ||
        ((++failures < 3)) || exit 1
      ;;
    SUSPENDED | PREEMPTED) delete_slice ;; # Spot capacity was taken back.
    FAILED)
      echo "the slice could not be made; see: gcloud compute tpus queued-resources describe $name" >&2
      exit 1
      ;;
    esac
    sleep "$pause"
  done
}

root=$(cd "$(dirname "$0")/.." && pwd)
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
git -C "$root" archive --format=tar.gz --output="$archive" HEAD

# Code 75 asks for another start; a worker that came back after maintenance joins the others then.
# 134: the runtime gave up because the host of process 0 was lost.
train="cd mogrifier_jax && for attempt in \$(seq 100); do
  .venv/bin/python -u -m mogrifier_jax.main $flags; code=\$?
  if [ \$code -ne 75 ] && [ \$code -ne 134 ]; then exit \$code; fi
  echo \"attempt \$attempt ended with code \$code; starting again\"; sleep 20
done; exit 75"

for _ in $(seq 100); do
  wait_for_slice
  code=0
  {
    tpus tpu-vm scp "$archive" "$name:mogrifier_jax.tar.gz" --worker=all &&
      on_all "mkdir -p mogrifier_jax && tar xzf mogrifier_jax.tar.gz -C mogrifier_jax &&
        mogrifier_jax/launch/install.sh tpu && $mount" &&
      on_all "$train"
  } || code=$?
  # 2 is a wrong flag and 3 divergence, which would only be repeated; a slice that is still there
  # and fails otherwise is not to be paid for while it fails again.
  state=$(slice_state)
  case $code:$state in
  0:* | 2:* | 3:*) break ;;
  *:ACTIVE | *:READY) [[ $code == 75 || $code == 255 ]] || break ;;
  esac
  echo "$(date +%T) interrupted (code $code, slice $state); waiting for the slice"
  sleep "$pause"
done
if [[ $code == 0 && ${KEEP:-no} != yes ]]; then delete_slice; fi
exit "$code"

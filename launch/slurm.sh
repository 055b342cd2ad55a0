#!/usr/bin/env bash
# Trains on the nodes of a Slurm allocation, and is queued again after preemption or a lost node.
#
#   sbatch --nodes=2 launch/slurm.sh --config=experiments/enwik8.py --workdir=/shared/runs/enwik8
#
# One task for each GPU; processes find each other through Slurm's own variables. Start it in the
# folder of the repository, in the Python environment that it is to use.
#SBATCH --job-name=mogrifier
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=6
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=mogrifier-%j.log
# Two minutes before the end every task gets SIGTERM: the run is saved and queued again.
#SBATCH --signal=TERM@120
set -uo pipefail

if (($# == 0)); then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

# Slurm itself is not to end the step at the first task that stops: they agree on a step to save.
srun --kill-on-bad-exit=0 --wait=300 python -u -m mogrifier_jax.main "$@" &
step=$!
trap 'kill -TERM $step' TERM # Passed on to all tasks when the whole job is preempted.
while :; do
  wait $step
  code=$?
  kill -0 $step 2>/dev/null || break # A signal ends `wait` early; the step may still be saving.
done

# 75: saved, or another task was lost. 134, 137, 143: ended with a node or by the runtime.
case $code in
75 | 134 | 137 | 143)
  echo "code $code: queued again"
  scontrol requeue "$SLURM_JOB_ID"
  ;;
*) exit $code ;;
esac

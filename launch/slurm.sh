#!/usr/bin/env bash
# Trains on the nodes of a Slurm allocation, and is queued again after preemption or a lost node.
#
#   sbatch --nodes=2 launch/slurm.sh --config=experiments/enwik8.py --workdir=/shared/runs/enwik8
#
# One task on each node takes all GPUs that Slurm gives the job there. The tasks find each other
# through Slurm's variables, so any number of nodes and GPUs will do. Start it in the folder of the
# repository. Options of sbatch on the command line take precedence over those in this file. With
# --mode=tune and a --storage that all nodes reach, every GPU of every node gets a worker.
#SBATCH --job-name=mogrifier
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
##SBATCH --gpus-per-node=8 # CHANGE: remove one # to ask for GPUs.
##SBATCH --partition=gpu # CHANGE: as your cluster wants it; the same for --account, --qos.
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=mogrifier-%j.log
# Two minutes before the end every task gets SIGTERM: the run is saved and queued again.
#SBATCH --signal=TERM@120
set -uo pipefail

if (($# == 0)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

python=(.venv/bin/python) # CHANGE: the Python with the package, which launch/install.sh installs.
# Or that of a container (apptainer build mogrifier_jax.sif docker-daemon:mogrifier_jax:cuda12):
# python=(apptainer exec --nv --bind="$PWD" mogrifier_jax.sif /mogrifier_jax/.venv/bin/python)
if [[ " $* " == *" --mode=tune "* ]]; then
  set -- "$@" --num_processes=1 --parallel="${SLURM_GPUS_ON_NODE:-1}"
fi
most=100 # Starts of one job, so that one that cannot succeed comes to an end.

# Slurm itself is not to end the step at the first task that stops: they agree on a step to save.
srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --kill-on-bad-exit=0 --wait=300 \
  "${python[@]}" -u -m mogrifier_jax.main "$@" &
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
  # Slurm itself ends a job that was cancelled, which is not to come back, and queues one that was
  # preempted without time to save. Such a job is no longer running.
  if [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") != *" JobState=RUNNING "* ]]; then
    exit "$code"
  fi
  if ((${SLURM_RESTART_COUNT:-0} >= most)); then
    echo "code $code: started $most times already; sbatch the same command to go on"
    exit "$code"
  fi
  echo "code $code: queued again"
  scontrol requeue "$SLURM_JOB_ID"
  ;;
*) exit "$code" ;;
esac

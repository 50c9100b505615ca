#!/usr/bin/env bash
# %{name}: %{machines} of %{processes}. Submit it: sbatch FILE
#SBATCH --job-name=%{name}
#SBATCH --nodes=%{nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=%{cores}
#SBATCH --gpus-per-node=%{n_gpus}
#SBATCH --time=%{time}
#SBATCH --signal=USR1@%{warn_seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --partition=%{partition}
#SBATCH --account=%{account}
%{sbatch}
set -e
%{setup}
set -uo pipefail
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-%{cores}}"  # srun does not read sbatch's number
# Slurm sends SIGUSR1 to every task: the run finishes its step, saves and ends with %{stopped}, and the
# job is requeued. After a lost rank (%{peer_lost}) the run is restarted at once.
for _ in $(seq 0 %{max_restarts}); do
    code=0
    srun --kill-on-bad-exit=0 megatoken %{train} || code=$?
    [ "$code" -eq %{peer_lost} ] || break
done
if [ "$code" -eq %{stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

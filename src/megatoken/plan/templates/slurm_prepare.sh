#!/usr/bin/env bash
# %{name}: %{machines} prepare a dataset in parts, which another job joins. Submit both, also to resume
# after a failure: bash FILE
#SBATCH --job-name=%{name}
#SBATCH --cpus-per-task=%{cores}
#SBATCH --time=%{time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --partition=%{partition}
#SBATCH --account=%{account}
%{sbatch}
set -e
%{setup}
set -uo pipefail
case "${1:-submit}" in
submit)
    parts=$(sbatch --parsable --array=1-%{nodes} "$0" part)
    sbatch --dependency="afterok:${parts%%;*}" "$0" join
    ;;
part) exec megatoken prepare %{prepare} --part "$SLURM_ARRAY_TASK_ID/%{nodes}" ;;
join) exec megatoken prepare --join %{out} ;;
esac

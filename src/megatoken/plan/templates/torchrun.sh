#!/usr/bin/env bash
# %{name}: %{machines} of %{processes}. Run it on every machine: bash FILE ADDRESS_OF_THE_FIRST
# Forwards signals, and exits with the run's code: %{stopped} means stopped and saved, run it again.
set -e
%{setup}
set -uo pipefail
head=${1:?give the address of the first machine}
exec python -P -m megatoken.distributed.torchrun --nnodes %{nodes} --nproc-per-node 1 --max-restarts %{max_restarts} --rdzv-backend c10d --rdzv-id %{name} --rdzv-endpoint "$head:%{port}" -m megatoken %{train}

"""Scripts that start a run on many machines by an engine that exists: torchrun, Slurm, Kubernetes, SkyPilot.

In: the words of `megatoken train`, machines and processes on each. Out: the text of one file. Every script starts the
same command in every process, passes on the scheduler's warning before it takes the machine away, and starts the run
again when it ended with 75 (stopped, resumable). Absent: submitting it, and anything about the cluster's storage: the
run folder and the dataset have to be on a file system that all machines see.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatoken.errors import Exit
from megatoken.parallel.topology import PORT

WARN_SECONDS = 300  # before the time limit: room for the step under way and the save


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to start where. words: of `megatoken train`; time: HH:MM:SS, for engines that limit it."""

    name: str
    words: Sequence[str]
    nodes: int
    nproc: int
    gpus: str
    time: str
    image: str

    @property
    def train(self) -> str:
        return shlex.join(["train", *self.words])


def write_torchrun(job: Job) -> str:
    """For every machine: the first argument is the address of one of them, the same for all."""
    return f"""\
#!/usr/bin/env bash
# {job.name}: {job.nodes} machines of {job.nproc} processes. Run it on every machine: bash FILE ADDRESS_OF_THE_FIRST
set -euo pipefail
head=${{1:?give the address of the first machine}}
code=0
torchrun --nnodes {job.nodes} --nproc-per-node {job.nproc} --max-restarts 3 \\
    --rdzv-backend c10d --rdzv-id {shlex.quote(job.name)} --rdzv-endpoint "$head:{PORT}" \\
    -m megatoken.cli {job.train} || code=$?
exit "$code"
"""


def write_slurm(job: Job) -> str:
    """For sbatch: one task a process, requeued when the time limit stopped it."""
    return f"""\
#!/usr/bin/env bash
# {job.name}: {job.nodes} machines of {job.nproc} processes. Submit it: sbatch FILE
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node={job.nproc}
#SBATCH --gpus-per-node={job.nproc}
#SBATCH --time={job.time}
#SBATCH --signal=USR1@{WARN_SECONDS}
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
# SIGUSR1 goes to every task: the run finishes its step, saves and ends with {int(Exit.STOPPED)}.
code=0
srun --kill-on-bad-exit=0 megatoken {job.train} || code=$?
if [ "$code" -eq {int(Exit.STOPPED)} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def write_k8s(job: Job) -> str:
    """An indexed Job behind a headless Service; pod 0 is where the others meet."""
    command = (
        f"torchrun --nnodes {job.nodes} --nproc-per-node {job.nproc} --node-rank $JOB_COMPLETION_INDEX "
        f"--master-addr {job.name}-0.{job.name} --master-port {PORT} -m megatoken.cli {job.train}"
    )
    return f"""\
# {job.name}: {job.nodes} pods of {job.nproc} GPUs. Start it: kubectl apply -f FILE
apiVersion: v1
kind: Service
metadata:
  name: {job.name}
spec:
  clusterIP: None
  selector:
    job-name: {job.name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.name}
spec:
  completions: {job.nodes}
  parallelism: {job.nodes}
  completionMode: Indexed
  backoffLimit: 20
  template:
    metadata:
      labels:
        job-name: {job.name}
    spec:
      subdomain: {job.name}
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: {WARN_SECONDS}
      containers:
        - name: train
          image: {job.image}
          command: ["bash", "-c", {_quote(f"exec {command}")}]
          resources:
            limits:
              nvidia.com/gpu: {job.nproc}
          volumeMounts:
            - name: work
              mountPath: /work
          workingDir: /work
      volumes:
        - name: work
          persistentVolumeClaim:
            claimName: megatoken
"""


def write_skypilot(job: Job) -> str:
    """A task for `sky jobs launch`, which starts it again where spot machines are taken away."""
    return f"""\
# {job.name}: {job.nodes} machines of {job.nproc} GPUs. Start it: sky jobs launch FILE
name: {job.name}
num_nodes: {job.nodes}
resources:
  accelerators: {job.gpus}:{job.nproc}
  use_spot: true
setup: |
  pip install "megatoken[data]"
run: |
  head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {job.nproc} --node-rank "$SKYPILOT_NODE_RANK" \\
    --master-addr "$head" --master-port {PORT} -m megatoken.cli {job.train}
"""


def _quote(text: str) -> str:
    """As a double-quoted YAML string, which JSON's strings are."""
    return json.dumps(text)


ENGINES: dict[str, Callable[[Job], str]] = {
    "torchrun": write_torchrun,
    "slurm": write_slurm,
    "k8s": write_k8s,
    "skypilot": write_skypilot,
}

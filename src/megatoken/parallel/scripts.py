"""Scripts that start a run on many machines by an engine that exists: torchrun, Slurm, Kubernetes, SkyPilot.

In: the words of `megatoken train`, machines and processes on each. Out: the text of one file. Every script starts the
same command in every process, passes on the scheduler's warning before it takes the machine away, and starts the run
again when it ended with 75 (stopped, resumable). Absent: submitting it, and anything about the cluster's storage: the
run folder and the dataset have to be on a file system that all machines see.
"""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatoken.config import Run
from megatoken.errors import Exit, Fault
from megatoken.parallel.layout import lay_out
from megatoken.parallel.topology import PORT

NO_GPUS = "none"
TIME = re.compile(r"(\d+-)?\d{1,3}:\d\d:\d\d")  # as Slurm reads it
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
    def world_size(self) -> int:
        return self.nodes * self.nproc

    @property
    def train(self) -> str:
        return shlex.join(["train", *self.words])


def check_job(job: Job, run: Run) -> None:
    """Raise Fault(CONFIG) for a job that would fail when its time has come: a script is often read hours later."""
    for flag, number in (("--nodes", job.nodes), ("--nproc", job.nproc)):
        if number < 1:
            raise Fault(Exit.CONFIG, f"{flag} is {number}", flag, "give 1 or more")
    if not TIME.fullmatch(job.time):
        raise Fault(Exit.CONFIG, f"--time is {job.time!r}", "--time", "give HH:MM:SS or D-HH:MM:SS")
    lay_out(run.machine.shard, run.machine.tensor_parallel, world_size=job.world_size, local_world_size=job.nproc)
    if run.batch_seqs % job.world_size:
        what = f"a batch of {run.batch_seqs:,} sequences does not divide among {job.world_size} processes"
        raise Fault(Exit.CONFIG, what, "--nodes, --nproc", "change them, or budget.batch_tokens")


def name_job(recipe: str) -> str:
    """A recipe's name as hosts may be called: a letter, then letters, digits and hyphens, 40 at most."""
    name = re.sub(r"[^a-z0-9]+", "-", recipe.lower())
    return re.sub(r"^(?![a-z])-?", "run-", name)[:40].strip("-")


def _start(job: Job, *options: str) -> str:
    """The command that starts a machine's processes and ends as the run does."""
    return " ".join(
        [
            f"python -m megatoken.parallel.elastic --nnodes {job.nodes} --nproc-per-node {job.nproc}",
            *options,
            f"-m megatoken.cli {job.train}",
        ]
    )


def write_torchrun(job: Job) -> str:
    """For every machine: the first argument is the address of one of them, the same for all."""
    rendezvous = f'--rdzv-backend c10d --rdzv-id {shlex.quote(job.name)} --rdzv-endpoint "$head:{PORT}"'
    return f"""\
#!/usr/bin/env bash
# {job.name}: {job.nodes} machines of {job.nproc} processes. Run it on every machine: bash FILE ADDRESS_OF_THE_FIRST
# Signals reach the run. The exit code is the run's: {int(Exit.STOPPED)} means stopped and saved, start it again.
set -euo pipefail
head=${{1:?give the address of the first machine}}
exec {_start(job, "--max-restarts 3", rendezvous)}
"""


def write_slurm(job: Job) -> str:
    """For sbatch: one task a process, requeued when the time limit stopped it."""
    gpus = f"#SBATCH --gpus-per-node={job.nproc}\n" if job.gpus != NO_GPUS else ""
    return f"""\
#!/usr/bin/env bash
# {job.name}: {job.nodes} machines of {job.nproc} processes. Submit it: sbatch FILE
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node={job.nproc}
{gpus}#SBATCH --time={job.time}
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
    """An indexed Job behind a headless Service; pod 0 is where the others meet. A run that cannot succeed fails the Job
    at once, one that was stopped or lost a peer is started again, and a drained node is not counted."""
    meeting = f'--node-rank "$JOB_COMPLETION_INDEX" --master-addr {job.name}-0.{job.name} --master-port {PORT}'
    gpus = f"          resources:\n            limits:\n              nvidia.com/gpu: {job.nproc}\n"
    hopeless = [int(code) for code in (Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, Exit.STORAGE, Exit.NUMERICS)]
    return f"""\
# {job.name}: {job.nodes} pods of {job.nproc} processes. Start it: kubectl apply -f FILE
apiVersion: v1
kind: Service
metadata:
  name: {job.name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
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
  backoffLimit: {20 * job.nodes}
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes:
          containerName: train
          operator: In
          values: {hopeless}
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
  template:
    metadata:
      labels:
        job-name: {job.name}
    spec:
      subdomain: {job.name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {WARN_SECONDS}
      containers:
        - name: train
          image: {job.image}
          command: ["bash", "-c", {_quote(f"exec {_start(job, meeting)}")}]
{gpus if job.gpus != NO_GPUS else ""}          volumeMounts:
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
    machine = f"accelerators: {job.gpus}:{job.nproc}" if job.gpus != NO_GPUS else f"cpus: {job.nproc}+"
    meeting = f'--node-rank "$SKYPILOT_NODE_RANK" --master-addr "$head" --master-port {PORT}'
    return f"""\
# {job.name}: {job.nodes} machines of {job.nproc} processes. Start it: sky jobs launch FILE
name: {job.name}
num_nodes: {job.nodes}
resources:
  {machine}
  use_spot: true
  job_recovery:
    recover_on_exit_codes: [{int(Exit.STOPPED)}, {int(Exit.PEER)}]
setup: |
  pip install "megatoken[data]"
run: |
  head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  exec {_start(job, meeting)}
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

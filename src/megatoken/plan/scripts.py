"""Write launch scripts for torchrun, Slurm, Kubernetes and SkyPilot from templates/.

A script runs the same command on every machine. The command starts and watches the machine's ranks
(distributed/local_launch.py). The script passes on the scheduler's warning before the time limit,
and restarts the run after exit codes 75 (stopped, can be resumed) and 7 (a rank was lost). The run
folder and the dataset must be on a shared file system.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from megatoken.base.console import format_count
from megatoken.base.errors import ConfigError, ExitCode
from megatoken.base.system.table import read_table
from megatoken.distributed.env import PORT

TABLE = read_table(__file__)
ENGINES = TABLE["engines"]
INSTALL_CHECKOUT = 'pip install ".[data,s3]"'
IMAGES = {False: "megatoken", True: "megatoken:cuda"}  # without and with GPUs
CORES = 3  # per process: training, its backward, and data or saves
MEMORY_GB = 4  # per process: CUDA's context, prefetched batches, its share of a save
WORK = "/work"  # where the volume `megatoken` is mounted, with dataset and runs
MAX_RESTARTS = 3
WARN_SECONDS = 300  # before the time limit, for the current step and the save
# After exit codes other than these, a restart would not help.
RESTARTED = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.PEER)


class ScriptTemplate(Template):
    """A string template with placeholders %{name}, so that $ can be used for the shell."""

    delimiter = "%"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to launch, and where.

    nproc: number of processes per node.
    setup: shell commands to run before training.
    time, partition, account: Slurm's time limit and options.
    sbatch: more Slurm options, as `name=value` or `name`.
    image: container image for Kubernetes and SkyPilot.
    namespace: for Kubernetes.
    spot: line of SkyPilot's resources, or empty.
    volume: where SkyPilot mounts the volume `megatoken`, or empty.
    prepare, out: arguments of `megatoken prepare`, to run that in parts instead of training, and its
        --out.
    """

    name: str
    train_args: Sequence[str] = ()
    nodes: int
    nproc: int
    gpus: str
    time: str
    image: str = ""
    setup: Sequence[str] = ()
    partition: str = ""
    account: str = ""
    sbatch: Sequence[str] = ()
    namespace: str = ""
    spot: str = ""
    volume: str = WORK
    prepare: Sequence[str] = ()
    out: str = ""


def check_options(engine: str, job: Job) -> None:
    """Raise ConfigError for an option that the engine does not have or a value it cannot accept."""
    for name, row in TABLE["options"].items():
        value = getattr(job, name)
        for text in [value] if isinstance(value, str) else value:
            if text and engine not in row.get("engines", ENGINES):
                raise ConfigError(f"{engine} has no --{name}", f"--{name}", "leave it out")
            if not text.isprintable() or not re.fullmatch(row.get("format", ".*"), text):
                fix = row.get("fix", "see megatoken launch -h")
                raise ConfigError(f"cannot read {text!r}", f"--{name}", fix)
    for option in job.sbatch:
        name = option.split("=")[0]
        if name in TABLE["reserved"]:
            raise ConfigError(f"the script sets {name} itself", "--sbatch", "leave it out")
    if 0 < _seconds(job.time) <= WARN_SECONDS:  # the job would stop and requeue forever
        what = f"--time {job.time} leaves no time before the save {WARN_SECONDS} s before its end"
        raise ConfigError(what, "--time", "give 10 (minutes) or more")


def name_job(recipe: str) -> str:
    """Convert a recipe's name to a job name that is a valid host name of at most 40 characters."""
    name = re.sub(r"[^a-z0-9]+", "-", recipe.lower())
    return re.sub(r"^(?![a-z])-?", "run-", name)[:40].strip("-")


def write_script(engine: str, job: Job) -> str:
    """Return the launch script of a job for an engine. Raises what `check_options` raises.

    Lines of the template that would set an empty value are left out.
    """
    check_options(engine, job)
    train = shlex.join(["train", "--nproc", str(job.nproc), *job.train_args])
    setup = list(job.setup)
    if engine == "skypilot":
        train = train.replace("\n", "\n  ")  # the indentation of its YAML block
        if not setup and not job.image:
            setup = [INSTALL_CHECKOUT]
        setup = ["setup: |", *(f"  {line}" for line in setup)] if setup else []
    has_gpus = job.gpus != "none"
    machine = f"cpus: {job.nproc}+"
    if has_gpus:
        machine = f"accelerators: {json.dumps(f'{job.gpus}:{job.nproc}')}"
    workdir = "workdir: .  # a checkout of megatoken, copied to every machine"
    values = (
        asdict(job)
        | {
            "machines": format_count(job.nodes, "pod" if engine == "k8s" else "machine"),
            "processes": format_count(job.nproc, "process", "processes"),
            "n_gpus": job.nproc if has_gpus else "",
            "machine": machine,
            "cores": CORES * job.nproc,
            "memory": MEMORY_GB * job.nproc,
            "partition": job.partition and shlex.quote(job.partition),
            "account": job.account and shlex.quote(job.account),
            "sbatch": "\n".join(f"#SBATCH --{_quote_value(option)}" for option in job.sbatch),
            "setup": "\n".join(setup),
            "image": json.dumps(job.image or IMAGES[has_gpus]),
            "image_id": job.image and json.dumps(f"docker:{job.image}"),
            "workdir": "" if job.image or job.setup else workdir,
            "port": PORT,
            "max_restarts": MAX_RESTARTS if job.nodes > 1 else 0,  # else --nproc restarts ranks
            "train": train,
            "prepare": shlex.join(job.prepare),
            "out": shlex.quote(job.out),
            "train_in_quotes": json.dumps(train)[1:-1],  # escapes of a double-quoted YAML string
            "warn_seconds": WARN_SECONDS,
            "backoff_limit": 20 * job.nodes,
            "fatal": [int(code) for code in ExitCode if code not in RESTARTED],
            "stopped": int(ExitCode.STOPPED),
            "peer_lost": int(ExitCode.PEER),
        }
    )
    file = TABLE["prepare"] if job.prepare else ENGINES[engine]
    template = (Path(__file__).parent / "templates" / file).read_text()
    for name, value in values.items():
        if value == "":
            template = re.sub(rf".*%{{{name}}}.*\n", "", template)
    return ScriptTemplate(template).substitute(values)


def _seconds(time: str) -> int:
    """Convert a Slurm time limit to seconds; 0 means no limit."""
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return 86400 * int(days or 0) + seconds


def _quote_value(option: str) -> str:
    """Quote the value of an option `name=value` for a shell."""
    name, equals, value = option.partition("=")
    return name + equals + (equals and shlex.quote(value))

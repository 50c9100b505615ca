"""Scripts that start a run on many machines by torchrun, Slurm, Kubernetes or SkyPilot, from files in templates/.

A script starts the same command once on every machine, which starts and watches its ranks (local.py), forwards the
scheduler's warning signal, and restarts the run when it ended with 75 (stopped, resumable) or 7 (a rank lost). The run
folder and the dataset have to be on a shared file system.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from megatoken.config.schema import Config, nearest_multiples
from megatoken.console import format_count
from megatoken.distributed.env import PORT, DistEnv
from megatoken.distributed.parallel_dims import build_dims
from megatoken.errors import ConfigError, ExitCode

ENGINES = {
    "torchrun": "torchrun.sh",
    "slurm": "slurm.sh",
    "k8s": "k8s.yaml",
    "skypilot": "skypilot.yaml",
}
TAKEN_BY = {  # options that not every engine has
    **dict.fromkeys(("--partition", "--account", "--sbatch"), ("slurm",)),
    **{
        "--namespace": ("k8s",),
        "--image": ("k8s", "skypilot"),
        "--setup": ("slurm", "torchrun", "skypilot"),
    },
}
SBATCH_TAKEN = {  # options of sbatch whose values an option of ours gives
    **{name: f"--{name}" for name in ("nodes", "time", "partition", "account")},
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "--nodes and --nproc"),
}
SBATCH_OWN = (
    "signal",
    "no-requeue",
    "array",
)  # the script saves, goes on and has a run folder by these
INSTALL_CHECKOUT = 'pip install ".[data,s3]"'
ONE_LINE = ("partition", "account", "namespace", "image", "gpus", "time")
GPU, TIME = "H100", "24:00:00"  # defaults of --gpus and --time
IMAGE = "megatoken"  # what the documentation builds from the Dockerfile
MAX_RESTARTS = 3
WARN_SECONDS = 300  # before the time limit: for the current step and the save
RESTARTED = (
    ExitCode.DONE,
    ExitCode.STOPPED,
    ExitCode.PEER,
)  # after any other code a restart is useless


class ScriptTemplate(Template):
    """Placeholders are %{name}, so that $ belongs to the shell."""

    delimiter = "%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """nproc: processes on each node; time: Slurm's limit; setup: lines of shell before the run, as they are.

    partition, account, sbatch (`name=value` or `name`): options of Slurm. image: of Kubernetes and SkyPilot. namespace:
    of Kubernetes.
    """

    name: str
    train_args: Sequence[str]
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


def check_job(job: Job, config: Config) -> None:
    """Raise ConfigError for a job that would fail when it starts, which may be hours later."""
    for flag, number in (("--nodes", job.nodes), ("--nproc", job.nproc)):
        if number < 1:
            raise ConfigError(f"{flag} is {number}", flag, "give 1 or more")
    check_batch(config, job.nodes, job.nproc)


def check_batch(config: Config, nodes: int, nproc: int, where: str = "--nodes, --nproc") -> None:
    """Raise ConfigError for a batch that does not divide among `nproc` processes on each of `nodes` machines."""
    machine = config.machine
    dist_env = DistEnv(world_size=nodes * nproc, local_world_size=nproc)
    dp_size = build_dims(
        machine.sharding, machine.tensor_parallel, dist_env
    ).dp_size  # a group reads the same batch
    budget, seq_len = config.budget, config.model.seq_len
    for key, tokens in (("batch_tokens", budget.batch_tokens), ("batch_start", budget.batch_start)):
        if tokens // seq_len % dp_size:
            what = f"a batch of {tokens // seq_len:,} sequences does not divide among {dp_size} data-parallel processes"
            near = nearest_multiples(tokens, dp_size * seq_len)
            fix = f"take another number, or budget.{key} {' or '.join(map(str, near))}"
            raise ConfigError(what, where, fix)


def check_options(engine: str, job: Job) -> None:
    """Raise ConfigError for an option that has no effect on this engine, or a value that cannot stand in its script."""
    given = [(f"--{name}", [getattr(job, name)]) for name in ONE_LINE]
    for flag, texts in [*given, ("--sbatch", job.sbatch), ("--setup", job.setup)]:
        for text in filter(None, texts):
            if engine not in TAKEN_BY.get(flag, ENGINES):
                fix = f"leave it out: it is for {' and '.join(TAKEN_BY[flag])}"
                raise ConfigError(f"{flag} has no effect on {engine}", flag, fix)
            if not text.isprintable():
                raise ConfigError(
                    f"{flag} is not one line of text: {text!r}",
                    flag,
                    "write one line; of --setup each",
                )
    for option in job.sbatch:
        if not re.fullmatch(r"[a-z][a-z0-9-]*(=.*)?", option):
            fix = "write it as qos=high, constraint=a100 or exclusive"
            raise ConfigError(f"not an option of sbatch: {option!r}", "--sbatch", fix)
        if ours := SBATCH_TAKEN.get(name := option.split("=")[0]):
            raise ConfigError(f"--sbatch {name} contradicts {ours}", "--sbatch", f"use {ours}")
        if name in SBATCH_OWN:
            what = f"--sbatch {name} contradicts how the script saves and goes on"
            raise ConfigError(what, "--sbatch", f"leave {option} out")
    if not re.fullmatch(r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}", job.time):
        fix = "write it as 90 (minutes), 12:00:00 or 2-12:00:00 (days-hours:minutes:seconds)"
        raise ConfigError(f"not a time limit of Slurm: {job.time!r}", "--time", fix)
    if (
        0 < _seconds(job.time) <= WARN_SECONDS
    ):  # the signal would come at each start, and the job requeue for ever
        what = f"--time {job.time} is not longer than the {WARN_SECONDS} seconds before its end when the run is to save"
        raise ConfigError(what, "--time", "give 10 (minutes) or more")
    if not re.fullmatch(r"[A-Za-z][\w.-]*", job.gpus):
        fix = "give a name such as H100; how many a machine has is --nproc"
        raise ConfigError(f"not the name of a GPU: {job.gpus!r}", "--gpus", fix)
    if re.search(r"\s", job.image):
        raise ConfigError(
            f"an image has no white space in its name: {job.image!r}", "--image", "leave it out"
        )
    if job.namespace and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{,61}[a-z0-9])?", job.namespace):
        raise ConfigError(
            f"not a namespace: {job.namespace!r}", "--namespace", "use a-z, 0-9 and -, 63 at most"
        )


def name_job(recipe: str) -> str:
    """A recipe's name as a host name: a letter, then letters, digits and hyphens, 40 at most."""
    name = re.sub(r"[^a-z0-9]+", "-", recipe.lower())
    return re.sub(r"^(?![a-z])-?", "run-", name)[:40].strip("-")


def write_script(engine: str, job: Job) -> str:
    """The script of an engine, without the lines of its template whose values are empty. Raises as `check_options`."""
    check_options(engine, job)
    has_gpus = job.gpus != "none"
    train = shlex.join(["train", "--nproc", str(job.nproc), *job.train_args])
    setup = list(job.setup)
    if engine == "skypilot":
        train = train.replace("\n", "\n  ")  # the indentation of its YAML block
        setup = setup or ([] if job.image else [INSTALL_CHECKOUT])
        setup = ["setup: |", *(f"  {line}" for line in setup)] if setup else []
    restarts = MAX_RESTARTS if job.nodes > 1 else 0  # on one machine --nproc starts ranks again
    values = asdict(job) | {
        "machines": format_count(job.nodes, "pod" if engine == "k8s" else "machine"),
        "processes": format_count(job.nproc, "process", "processes"),
        "n_gpus": job.nproc if has_gpus else "",
        "machine": f"accelerators: {json.dumps(f'{job.gpus}:{job.nproc}')}"
        if has_gpus
        else f"cpus: {job.nproc}+",
        "time": shlex.quote(job.time),
        "sbatch": "\n".join(_sbatch_lines(job)),
        "setup": "\n".join(setup),
        "namespace": job.namespace and f"namespace: {job.namespace}",
        "image": json.dumps(job.image or IMAGE),
        "image_id": job.image and f"image_id: {json.dumps(f'docker:{job.image}')}",
        "workdir": ""
        if job.image or job.setup
        else "workdir: .  # a checkout of megatoken, copied to every machine",
        "port": PORT,
        "torchrun": f"python -P -m megatoken.launch.torchrun --nnodes {job.nodes} --nproc-per-node 1",
        "max_restarts": restarts,
        "train": train,
        "train_in_quotes": json.dumps(train)[
            1:-1
        ],  # JSON's escapes are those of a double-quoted YAML string
        "warn_seconds": WARN_SECONDS,
        "backoff_limit": 20 * job.nodes,
        "fatal": [int(code) for code in ExitCode if code not in RESTARTED],
        "stopped": int(ExitCode.STOPPED),
        "attempts": " ".join(map(str, range(restarts + 1))),
        "peer_lost": int(ExitCode.PEER),
    }
    template = (Path(__file__).parent / "templates" / ENGINES[engine]).read_text()
    for name in ("n_gpus", "sbatch", "setup", "namespace", "image_id", "workdir"):
        if not values[name]:
            template = re.sub(rf".*%{{{name}}}.*\n", "", template)
    return ScriptTemplate(template).substitute(values)


def _seconds(time: str) -> int:
    """Of a time limit of Slurm; 0 is none."""
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    )


def _sbatch_lines(job: Job) -> Iterator[str]:
    """Lines of options, in quotes that sbatch reads as a shell does."""
    given = [
        ("partition", job.partition),
        ("account", job.account),
        *(each.split("=", 1) for each in job.sbatch),
    ]
    for name, *value in given:
        if value != [""]:
            yield "#SBATCH --" + "=".join([name, *map(shlex.quote, value)])

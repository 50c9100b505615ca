"""Launch scripts are valid shell or YAML, and contain the command unchanged."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from megatoken.base.errors import ExitCode
from megatoken.plan.scripts import ENGINES, Job, name_job, write_script
from tests.conftest import Ask, Call
from tests.tables import read_table

PATH = f"{os.environ['PATH']}:{Path(sys.executable).parent}"
SHELLCHECK = shutil.which("shellcheck", path=PATH)
ARGUMENTS = ["gpt2-124m", 'sample.prompt=it\'s "so"']
JOB = Job(name="a-run", train_args=ARGUMENTS, nodes=2, nproc=4, gpus="A100", time="1:00:00")


def run(folder: Path, text: str, *arguments: str, **programs: str) -> "CompletedProcess[str]":
    """Run a script with arguments; `programs` are the texts of programs on its PATH."""
    (folder / "script.sh").write_text(text)
    for name, body in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    command, environment = ["bash", "script.sh", *arguments], {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("engine", list(ENGINES))
def test_shellcheck_finds_nothing(engine: str, tmp_path: Path):
    """Check the scripts, and the commands inside the YAML files."""
    text = write_script(engine, JOB)
    if engine == "k8s":
        text = pod_of()[2]["command"][2]
    if engine == "skypilot":
        text = task_of()["run"]
    script = tmp_path / "script.sh"
    script.write_text(text)
    command = [str(SHELLCHECK), "--shell=bash", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_arguments_arrive_unchanged(tmp_path: Path):
    """Run torchrun's script with a python that shows its arguments."""
    script = write_script("torchrun", JOB)
    done = run(tmp_path, script, "head-0", python='printf "%s\\n" "$@"\nexit 75')
    assert done.returncode == ExitCode.STOPPED
    arguments = done.stdout.splitlines()
    assert arguments[-5:] == ["train", "--nproc", "4", *ARGUMENTS]
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == "head-0:29500"
    assert run(tmp_path, script).returncode == 1  # no address


def pod_of(**changes: object) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the service, the job and its container."""
    service, job = yaml.safe_load_all(write_script("k8s", replace(JOB, **changes)))  # type: ignore[arg-type]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def task_of(**changes: object) -> dict[str, Any]:
    (task,) = yaml.safe_load_all(write_script("skypilot", replace(JOB, **changes)))  # type: ignore[arg-type]
    return task


NUMBERS = """
.task.resources.job_recovery.recover_on_exit_codes [75, 7]
.task.resources.accelerators A100:4
.task.num_nodes 2
.service.spec.clusterIP None
.job.completions 2
.job.parallelism 2
.job.completionMode Indexed
.job.podFailurePolicy.rules.0.action FailJob
.job.podFailurePolicy.rules.0.onExitCodes.values [2, 3, 4, 5, 6]
.job.podFailurePolicy.rules.1.action Ignore
.container.resources.limits.nvidia.com/gpu 4
.container.resources.requests.cpu 12
.container.resources.requests.memory 16G
.container.envFrom.0.secretRef.name megatoken
.container.envFrom.0.secretRef.optional True
.container.volumeMounts.0.name work
.container.volumeMounts.0.mountPath /work
.container.volumeMounts.1.name shm
.container.volumeMounts.1.mountPath /dev/shm
"""


def test_yaml_has_the_numbers_of_the_job():
    service, job, container = pod_of()
    parts = {"task": task_of(), "service": service, "job": job["spec"], "container": container}
    assert read_table(NUMBERS).items() <= list_fields(parts).items()
    assert "--master-addr a-run-0.a-run" in container["command"][2]
    volumes = job["spec"]["template"]["spec"]["volumes"]
    assert {volume["name"] for volume in volumes} == {"work", "shm"}
    images = [pod_of(gpus=gpus)[2]["image"] for gpus in ("A100", "none")]
    assert images == ["megatoken:cuda", "megatoken"]


def test_values_stay_one_value_in_yaml():
    image, argument = 'x",hostPID:true,a:"${IMAGE}#y', "sample.prompt=one\n\n two"
    values = {"image": image, "train_args": ["gpt2-124m", argument]}
    service, job, container = pod_of(**values, namespace="ml")
    task = task_of(**values, gpus="A100-80GB")
    assert container["image"] == image
    assert task["resources"]["image_id"] == f"docker:{image}"
    assert task["resources"]["accelerators"] == "A100-80GB:4"
    for command in (container["command"][2], task["run"]):
        assert shlex.split(command)[-3:] == ["4", "gpt2-124m", argument]
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"] == "ml"
    assert "namespace" not in pod_of()[0]["metadata"]


STORED = "data.path=s3://b/data save.mirror=s3://b/run"


@pytest.mark.parametrize(
    "arguments", [f"{STORED} --spot", "save.mirror=s3://b/run", f"{STORED} --nodes 2"]
)
def test_runs_of_skypilot_survive_their_machines(arguments: str, ask: Ask):
    """They use a volume unless one machine has data and copies in object storage; spot on request."""
    task = yaml.safe_load(ask(f"launch skypilot gpt2-124m {arguments}")["script"])
    is_spot = arguments.endswith("--spot")
    assert task.get("volumes") == (None if is_spot else {"/work": "megatoken"})
    assert ("cd /work" in task["run"]) != is_spot
    assert task["resources"].get("use_spot", False) == is_spot


HOSTILE = """a b; touch "$PWD/owned" '$(touch owned)' `touch owned` \\ #x"""
OF_A_SITE = {
    "partition": "gpu",
    "account": HOSTILE,
    "sbatch": ["qos=high", f"comment={HOSTILE}", "exclusive"],
}


def test_slurm_options_of_a_site(tmp_path: Path):
    """Values are quoted for sbatch as for a shell. Setup lines run before srun; a failing one ends
    the job.
    """
    setup = ["unset_is_fine=$NOT_SET", "export PATH=$PWD/env:$PATH", "type megatoken"]
    script = write_script("slurm", replace(JOB, **OF_A_SITE, setup=setup))  # type: ignore[arg-type]
    lines = re.findall("^#SBATCH (.*)$", script, re.M)
    *_, partition, account, qos, comment, exclusive = (shlex.split(line) for line in lines)
    assert (partition, qos, exclusive) == (["--partition=gpu"], ["--qos=high"], ["--exclusive"])
    assert (account, comment) == ([f"--account={HOSTILE}"], [f"--comment={HOSTILE}"])
    (tmp_path / "env").mkdir()
    programs = {"srun": 'shift; exec "$@"', "env/megatoken": 'printf "%s\\n" "$@"'}
    done = run(tmp_path, script, **programs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-4:] == ["--nproc", "4", *ARGUMENTS]
    assert not (tmp_path / "owned").exists()
    done = run(tmp_path, write_script("slurm", replace(JOB, setup=["false"])), **programs)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_slurm_array_prepares_parts_and_a_dependent_job_joins_them(tmp_path: Path, call: Call):
    words = ["it's/", "--out", HOSTILE, "--workers", "4"]
    line = f"launch slurm --nodes 3 --partition=cpu --write {tmp_path}/script --prepare "
    assert call(line + shlex.quote(shlex.join(words)))[0] == 0
    # Slurm runs a copy of the script, each task of the array by itself.
    array = (
        'for SLURM_ARRAY_TASK_ID in 1 2 3; do export SLURM_ARRAY_TASK_ID; bash "$3" "$4"; done >&2'
    )
    join = 'echo "$1" >&2; bash "$2" "$3" >&2'
    programs = {"sbatch": f'if [ "$1" = --parsable ]; then {array}; echo "7;here"; else {join}; fi'}
    programs["megatoken"] = 'printf "%s\\n" "$@"'
    done = run(tmp_path, (tmp_path / "script").read_text(), **programs)
    expected = []
    for number in (1, 2, 3):
        expected += ["prepare", *words, "--part", f"{number}/3"]
    expected += ["--dependency=afterok:7", "prepare", "--join", HOSTILE]
    assert (done.returncode, done.stderr.splitlines()) == (0, expected)
    assert not (tmp_path / "owned").exists()


REFUSED = r"""
k8s '--prepare=texts --out data'
slurm '--prepare=texts'
slurm '--prepare=texts --out data --part 1/2'
slurm '--prepare=texts --out data --tokenizer bpe:300'
k8s --partition=x
slurm --image=x
slurm --spot
k8s --setup=x=1
torchrun --sbatch=qos=high
slurm '--partition=x\n#SBATCH --uid=0'
slurm '--time=1\nrm -rf x'
slurm '--setup=a\nb'
slurm '--sbatch=qos=a\nb'
slurm --sbatch=Q=x
slurm --sbatch=nodes=9
slurm --sbatch=--time=1
slurm --sbatch=no-requeue
slurm --time=4:59
slurm --time=12h
slurm --time=1:2:3:4
k8s '--image=a b'
k8s --namespace=A_b
skypilot --gpus=H100:8
slurm --nproc=7
slurm --nproc=0
slurm optim.lrr=1
slurm --nproc=12 budget.batch_tokens=6144 machine.tensor_parallel=3
"""


@pytest.mark.parametrize("line", REFUSED.strip().split("\n"))
def test_refused_options(line: str, call: Call):
    engine, options = line.split(" ", 1)
    code, _, error = call(f"launch {engine} gpt2-124m {options}".replace(r"\n", "\n"))
    assert (code, error.count("\n")) == (ExitCode.CONFIG, 1)


@pytest.mark.parametrize("time", ["0", "6", "90:30", "12:00:00", "2-12", "2-12:30:00"])
def test_options_of_slurm(time: str, ask: Ask):
    arguments = f"launch slurm gpt2-124m --time {time} --sbatch=--constraint=a=b --nproc 12"
    arguments += " budget.batch_tokens=6144 machine.tensor_parallel=2"  # a batch of six sequences
    lines = ask(arguments)["script"].splitlines()
    assert {"#SBATCH --constraint=a=b", f"#SBATCH --time={time}"} <= {*lines}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_accepts_every_field_of_the_job(tmp_path: Path):
    """kubectl reads the Job into its types, which drop unknown fields. It needs no cluster."""
    _, job = yaml.safe_load_all(write_script("k8s", JOB))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    line = f"kubectl set image --local -f {tmp_path}/job.yaml train=other -o json"
    output = subprocess.check_output(line.split(), text=True)
    assert list_fields(job).keys() <= list_fields(json.loads(output)).keys()


def list_fields(node: object, path: str = "") -> dict[str, str]:
    """Return every value in JSON by its path; a list of plain values counts as one value."""
    if isinstance(node, list) and node and isinstance(node[0], dict):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return {path: str(node)}
    fields = {}
    for key, value in node.items():
        fields |= list_fields(value, f"{path}.{key}")
    return fields


def test_job_names_are_host_names():
    names = {"gpt2-124m": "gpt2-124m", "124M_mine.v2": "run-124m-mine-v2", "--": "run"}
    names["a" * 60] = "a" * 40
    assert {recipe: name_job(recipe) for recipe in names} == names


def test_the_launch_command_writes(tmp_path: Path, ask: Ask, call: Call):
    script = tmp_path / "job.sh"
    arguments = f"launch slurm gpt2-124m --nodes 2 --write {script} optim.lr=1e-3"
    result = ask(arguments)
    text = script.read_text()
    assert (result["script"], result["processes"]) == (text, 16)
    assert {"#SBATCH --nodes=2", "#SBATCH --cpus-per-task=24"} <= {*text.splitlines()}
    assert "megatoken train --nproc 8 gpt2-124m --out runs/gpt2-124m optim.lr=1e-3" in text
    script.write_text(f"{text}# edited\n")
    assert call(arguments)[0] == ExitCode.CONFIG
    assert script.read_text() == f"{text}# edited\n"


@pytest.mark.parametrize(("nodes", "start"), [(2, 32_768), (16, 262_144)])
def test_a_ramp_is_fitted_as_in_the_plan(nodes: int, start: int, ask: Ask):
    """The recipe's first batch has 16 sequences of 2,048 tokens."""
    setting = f"budget.batch_start={start}"
    script = ask(f"launch slurm gpt3-1.3b --nodes {nodes}")["script"]
    planned = ask(f"plan gpt3-1.3b --gpus {8 * nodes}xA100-40GB")["settings"]
    assert (setting in script) == (setting in planned) == (nodes > 2)

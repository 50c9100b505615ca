"""Launch scripts are valid shell or YAML, and contain the command unchanged."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatoken.cli.main import main
from megatoken.errors import ExitCode
from megatoken.launch.scripts import ENGINES, Job, name_job, write_script

SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
JOB = Job(
    name="a-run",
    train_args=["gpt2-124m", 'sample.prompt=it\'s "so"'],
    nodes=2,
    nproc=4,
    gpus="A100",
    time="1:00:00",
    image="image",
)


@pytest.mark.parametrize("engine", ["torchrun", "slurm"])
def test_shell_scripts_parse(engine: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(write_script(engine, JOB))
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("engine", list(ENGINES))
def test_shellcheck_finds_nothing(engine: str, tmp_path: Path) -> None:
    """With the scripts, and with the commands inside the YAML files."""
    text = write_script(engine, JOB)
    if engine == "k8s":
        job = list(yaml.safe_load_all(text))[1]
        text = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    if engine == "skypilot":
        text = yaml.safe_load(text)["run"]
    script = tmp_path / "script.sh"
    script.write_text(text)
    done = subprocess.run([str(SHELLCHECK), "--shell=bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_arguments_arrive_unchanged(tmp_path: Path) -> None:
    """Run torchrun's script with a python that shows its arguments."""
    script, fake = tmp_path / "script.sh", tmp_path / "python"
    script.write_text(write_script("torchrun", JOB))
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\nexit 75\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), "head-0"], capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert done.returncode == ExitCode.STOPPED
    arguments = done.stdout.splitlines()
    assert arguments[-5:] == ["train", "--nproc", "4", "gpt2-124m", 'sample.prompt=it\'s "so"']
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == "head-0:29500"
    assert subprocess.run(["bash", str(script)], capture_output=True).returncode == 1  # no address


@pytest.mark.parametrize("engine", ["k8s", "skypilot"])
def test_yaml_has_the_numbers_of_the_job(engine: str) -> None:
    documents = list(yaml.safe_load_all(write_script(engine, JOB)))
    if engine == "skypilot":
        (task,) = documents
        assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75, 7]}
        assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "A100:4")
        assert "train --nproc 4 gpt2-124m" in task["run"]
        return
    service, job = documents
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    failing, disrupted = spec["podFailurePolicy"]["rules"]
    assert (failing["action"], failing["onExitCodes"]["values"]) == ("FailJob", [2, 3, 4, 5, 6])
    assert disrupted["action"] == "Ignore"
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert "--master-addr a-run-0.a-run" in container["command"][2]
    assert "sample.prompt=it" in container["command"][2]


def test_line_ends_in_an_argument_survive_yaml() -> None:
    job = replace(JOB, train_args=["gpt2-124m", "sample.prompt=one\n\n two"])
    _, task = yaml.safe_load_all(write_script("k8s", job))
    (sky,) = yaml.safe_load_all(write_script("skypilot", job))
    for command in (task["spec"]["template"]["spec"]["containers"][0]["command"][2], sky["run"]):
        assert shlex.split(command)[-1] == "sample.prompt=one\n\n two"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_accepts_every_field_of_the_job(tmp_path: Path) -> None:
    """kubectl reads the Job into its own types, which drop unknown fields; it needs no cluster."""
    _, job = yaml.safe_load_all(write_script("k8s", JOB))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = ["kubectl", "set", "image", "--local", "-f", str(tmp_path / "job.yaml"), "train=other", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list_fields(job) <= list_fields(json.loads(done.stdout))


def list_fields(node: object, path: str = "") -> set[str]:
    if isinstance(node, dict):
        return {field for key, value in node.items() for field in list_fields(value, f"{path}.{key}")}
    if isinstance(node, list):
        return {field for index, value in enumerate(node) for field in list_fields(value, f"{path}[{index}]")}
    return {path}


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("gpt2-124m", "gpt2-124m"), ("124M_mine.v2", "run-124m-mine-v2"), ("--", "run"), ("a" * 60, "a" * 40)],
)
def test_job_names_are_host_names(recipe: str, name: str) -> None:
    assert name_job(recipe) == name


@pytest.mark.parametrize("engine", ["slurm", "k8s", "skypilot"])
def test_a_job_without_gpus_requests_none(engine: str) -> None:
    text = write_script(engine, replace(JOB, gpus="none"))
    assert not re.search("gpu|accelerators", text)
    list(yaml.safe_load_all(text) if engine != "slurm" else [])


def test_the_launch_command_checks_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "slurm", "gpt2-124m", "--nodes", "2", "--write", str(tmp_path / "job.sh"), "optim.lr=1e-3"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    text = (tmp_path / "job.sh").read_text()
    assert text == answer["script"]
    assert answer["processes"] == 16
    assert "#SBATCH --nodes=2" in text
    assert "megatoken train --nproc 8 gpt2-124m --out runs/gpt2-124m optim.lr=1e-3" in text
    assert main(["launch", "slurm", "gpt2-124m", "--nproc", "7"]) == ExitCode.CONFIG
    expected = (
        "does not divide among 7 data-parallel processes — --nodes, --nproc — change them, or budget.batch_tokens "
    )
    assert expected + "to 523264 or 530432" in capsys.readouterr().err
    assert main(["launch", "slurm", "gpt2-124m", "--nproc", "6", "machine.tensor_parallel=3"]) == ExitCode.DONE
    capsys.readouterr()
    assert main(["launch", "slurm", "gpt2-124m", "optim.lrr=1"]) == ExitCode.CONFIG
    assert "did you mean 'optim.lr'" in capsys.readouterr().err

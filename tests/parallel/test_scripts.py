"""Launch scripts are valid for the shell or for YAML, and hold the command as it was written."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatoken.cli import main
from megatoken.errors import Exit
from megatoken.parallel.scripts import ENGINES, Job, name_job

JOB = Job(name="a-run", words=["gpt2-124m", "sample.prompt=it's \"so\""], nodes=2, nproc=4, gpus="A100", time="1:00:00",
          image="image")  # fmt: skip


@pytest.mark.parametrize("engine", ["torchrun", "slurm"])
def test_shell_scripts_parse(engine: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(ENGINES[engine](JOB))
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("engine", list(ENGINES))
def test_shellcheck_is_content(engine: str, tmp_path: Path) -> None:
    """With the scripts, and with the commands inside the YAML files."""
    text = ENGINES[engine](JOB)
    if engine == "k8s":
        job = list(yaml.safe_load_all(text))[1]
        text = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    if engine == "skypilot":
        text = yaml.safe_load(text)["run"]
    script = tmp_path / "script.sh"
    script.write_text(text)
    done = subprocess.run(["shellcheck", "--shell=bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_words_arrive_as_they_were_written(tmp_path: Path) -> None:
    """Run torchrun's script with a python that shows its arguments."""
    script, fake = tmp_path / "script.sh", tmp_path / "python"
    script.write_text(ENGINES["torchrun"](JOB))
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\nexit 75\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), "head-0"], capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert done.returncode == Exit.STOPPED
    words = done.stdout.splitlines()
    assert words[-3:] == ["train", "gpt2-124m", 'sample.prompt=it\'s "so"']
    assert words[words.index("--rdzv-endpoint") + 1] == "head-0:29500"
    assert subprocess.run(["bash", str(script)], capture_output=True).returncode == 1  # no address


@pytest.mark.parametrize("engine", ["k8s", "skypilot"])
def test_yaml_says_how_many_of_what(engine: str) -> None:
    documents = list(yaml.safe_load_all(ENGINES[engine](JOB)))
    if engine == "skypilot":
        (task,) = documents
        assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75, 7]}
        assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "A100:4")
        assert "train gpt2-124m" in task["run"]
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


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_knows_every_field_of_the_job(tmp_path: Path) -> None:
    """It reads the Job into its own types, which drop what they do not know; no cluster is asked."""
    _, job = yaml.safe_load_all(ENGINES["k8s"](JOB))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = ["kubectl", "set", "image", "--local", "-f", str(tmp_path / "job.yaml"), "train=other", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list_fields(job) <= list_fields(json.loads(done.stdout))


def list_fields(node: object, place: str = "") -> set[str]:
    if isinstance(node, dict):
        return {field for key, value in node.items() for field in list_fields(value, f"{place}.{key}")}
    if isinstance(node, list):
        return {field for number, value in enumerate(node) for field in list_fields(value, f"{place}[{number}]")}
    return {place}


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("gpt2-124m", "gpt2-124m"), ("124M_mine.v2", "run-124m-mine-v2"), ("--", "run"), ("a" * 60, "a" * 40)],
)
def test_names_are_fit_for_hosts(recipe: str, name: str) -> None:
    assert name_job(recipe) == name


@pytest.mark.parametrize("engine", ["slurm", "k8s", "skypilot"])
def test_no_gpus_are_asked_for_where_there_are_none(engine: str) -> None:
    text = ENGINES[engine](replace(JOB, gpus="none"))
    assert not re.search("gpu|accelerators", text)
    list(yaml.safe_load_all(text) if engine != "slurm" else [])


def test_the_command_writes_what_it_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "slurm", "gpt2-124m", "--nodes", "2", "--write", str(tmp_path / "job.sh"), "optim.lr=1e-3"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    text = (tmp_path / "job.sh").read_text()
    assert text == answer["script"]
    assert answer["processes"] == 16
    assert "#SBATCH --nodes=2" in text
    assert "megatoken train gpt2-124m --out runs/gpt2-124m optim.lr=1e-3" in text
    assert main(["launch", "slurm", "gpt2-124m", "--nproc", "7"]) == Exit.CONFIG
    assert "does not divide among 7 processes" in capsys.readouterr().err
    assert main(["launch", "slurm", "gpt2-124m", "optim.lrr=1"]) == Exit.CONFIG
    assert "did you mean 'optim.lr'" in capsys.readouterr().err

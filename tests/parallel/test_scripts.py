"""Launch scripts are valid for the shell or for YAML, and hold the command as it was written."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megatoken.cli import main
from megatoken.errors import Exit
from megatoken.parallel.scripts import ENGINES, Job

JOB = Job(name="a-run", words=["gpt2-124m", "sample.prompt=it's \"so\""], nodes=2, nproc=4, gpus="A100", time="1:00:00",
          image="image")  # fmt: skip


@pytest.mark.parametrize("engine", ["torchrun", "slurm"])
def test_shell_scripts_parse(engine: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(ENGINES[engine](JOB))
    subprocess.run(["bash", "-n", str(script)], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, str(script)], check=True)


def test_the_words_arrive_as_they_were_written(tmp_path: Path) -> None:
    """Run torchrun's script with a torchrun that shows its arguments."""
    script, fake = tmp_path / "script.sh", tmp_path / "torchrun"
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
        assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "A100:4")
        assert "train gpt2-124m" in task["run"]
        return
    service, job = documents
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert "--master-addr a-run-0.a-run" in container["command"][2]
    assert "sample.prompt=it" in container["command"][2]


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

"""The completion script, run in bash, offers commands, options, recipes and settings."""

import os
import pty
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.errors import ExitCode

pytest.importorskip("shtab")
LINES = {
    "megatoken tr": {"train"},
    "megatoken train gpt2-1": {"gpt2-124m", "gpt2-1558m"},
    "megatoken train gpt2-124m optim.l": {"optim.lr="},
    "megatoken train --allow": {"--allow-changes"},
    "megatoken bench la": {"ladder"},
}


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    assert main(["completion", "bash"]) == ExitCode.DONE
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    for line, expected in LINES.items():
        words = line.split()
        program = (
            f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_megatoken; "
        )
        program += 'printf "%s\\n" "${COMPREPLY[@]}"'
        offered = subprocess.run(
            [bash, "-c", program], capture_output=True, text=True, cwd=tmp_path
        ).stdout.split()
        assert set(offered) == expected, line


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (
            "megatoken sweep quickstart objective.na",
            "megatoken sweep quickstart objective.name=",
        ),  # without a blank
        (
            "megatoken sweep quickstart 'optim.lr=1e-3|2e-3' budget.st",
            "'optim.lr=1e-3|2e-3' budget.steps=",
        ),
        ("megatoken train quickstart data.path=ru", "megatoken train quickstart data.path=runs/"),
        ("megatoken eval ru", "megatoken eval runs/"),
        ("megatoken train sft --init ru", "megatoken train sft --init runs/"),
        ("megatoken report --ser", "megatoken report --serve "),
    ],
)
def test_a_tab_at_the_terminal(
    typed: str,
    completed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    assert main(["completion", "bash"]) == ExitCode.DONE
    (tmp_path / "rc").write_text(capsys.readouterr().out + "PS1='ready>'\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "inputrc").write_text("set bell-style none\nset enable-bracketed-paste off\n")
    monkeypatch.setenv("INPUTRC", str(tmp_path / "inputrc"))
    monkeypatch.setenv("TERM", "dumb")
    terminal, end = pty.openpty()
    command = [bash, "--noprofile", "--rcfile", "rc", "-i"]
    child = subprocess.Popen(
        command, cwd=tmp_path, stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    shown = b""

    def read_until(text: str) -> None:
        nonlocal shown
        while not shown.endswith(text.encode()):
            assert select.select([terminal], [], [], 20)[0], shown
            shown += os.read(terminal, 4096)

    try:
        read_until("ready>")
        os.write(terminal, typed.encode() + b"\t#")  # what is typed next shows where the cursor is
        read_until(f"{completed}#")
    finally:
        child.kill()
        child.wait()
        os.close(terminal)
        os.close(end)


def test_zsh_script_names_recipes_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == ExitCode.DONE
    script = capsys.readouterr().out
    assert script.startswith("#compdef megatoken")
    assert "gpt3-175b" in script
    assert "optim.min_lr_ratio=" in script

"""The completion script, run in bash, offers commands, options, recipes and settings."""

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
    "megatoken bench lo": {"loader"},
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
        program = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_megatoken; "
        program += 'printf "%s\\n" "${COMPREPLY[@]}"'
        offered = subprocess.run([bash, "-c", program], capture_output=True, text=True, cwd=tmp_path).stdout.split()
        assert set(offered) == expected, line


def test_zsh_script_names_recipes_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == ExitCode.DONE
    script = capsys.readouterr().out
    assert script.startswith("#compdef megatoken")
    assert "gpt3-175b" in script
    assert "optim.min_lr_ratio=" in script

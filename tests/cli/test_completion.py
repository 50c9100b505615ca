"""The completion script, run in bash, offers commands, options, recipes and settings."""

import shutil
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from tests.cli.test_chat import Terminal
from tests.conftest import Call

pytest.importorskip("shtab")


# What is typed before a tab, and the line then: # is typed next and shows where the cursor is.
LINES = """\
megatoken tr => megatoken train #
megatoken bench la => megatoken bench ladder #
megatoken train gpt2-1558 => megatoken train gpt2-1558m #
megatoken train llama3-8 => megatoken train llama3-8#
megatoken plan llama3-8 => megatoken plan llama3-8b #
megatoken sweep sft objective.na => megatoken sweep sft objective.name=#
megatoken sweep sft 'optim.lr=1e-3|2e-3' budget.st => 'optim.lr=1e-3|2e-3' budget.steps=#
megatoken train quickstart data.path=ru => megatoken train quickstart data.path=runs/#
megatoken eval ru => megatoken eval runs/#
megatoken train sft --init ru => megatoken train sft --init runs/#
megatoken report --ser => megatoken report --serve #
"""  # llama3-8b is a preset, not a recipe


@pytest.mark.parametrize("line", LINES.splitlines())
def test_a_tab_at_the_terminal(
    line: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    code, script, _ = call("completion bash")
    assert code == ExitCode.DONE
    (tmp_path / "rc").write_text(f"{script}PS1='ready>'\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "inputrc").write_text("set bell-style none\nset enable-bracketed-paste off\n")
    monkeypatch.chdir(tmp_path)
    command = [bash, "--noprofile", "--rcfile", "rc", "-i"]
    with Terminal(command, INPUTRC="inputrc", TERM="dumb") as terminal:
        terminal.read("ready>")
        typed, completed = line.split(" => ")
        terminal.type(f"{typed}\t#")
        terminal.read(completed)

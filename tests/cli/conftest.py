"""A recipe for `sweep` and `race`, whose runs are forks of a process that has loaded torch."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.distributed.local_launch import COMMAND
from megatoken.study import experiment
from megatoken.text.prepare import prepare
from tests.ranks import start_process

TEXT = "To be, or not to be, that is the question. " * 400
RECIPE = """version: 2
model: {{n_layer: 1, n_head: 1, d_model: 16, seq_len: 16}}
data: {{path: {data}}}
optim: {{schedule: constant}}
budget: {{steps: 20, batch_tokens: 256}}
evaluate: {{every: 5steps, tokens: 1024}}
machine: {{precision: fp32, threads: 1, micro_batch: 16, attention: explicit, adamw: foreach}}
log: {{plots: false}}
"""


def prepare_text(out: Path, text: str, tokenizer: str = "bytes", val_fraction: float = 0.1) -> None:
    source = out.with_suffix(".txt")
    source.write_text(text)
    prepare(str(source), out, tokenizer=tokenizer, val_fraction=val_fraction, workers=1)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare TEXT, a tenth of it held out, and write a recipe of 20 steps of 256 bytes."""
    folder = tmp_path_factory.mktemp("recipe")
    prepare_text(folder / "data", TEXT)
    (folder / "tiny.yaml").write_text(RECIPE.format(data=folder / "data"))
    return f"{folder}/tiny.yaml"


class ForkedChild:
    """A `megatoken.base.system.process.Child` that starts in milliseconds."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: Path,
        stderr: Path,
        env: dict[str, str],
        detached: bool,
    ) -> None:
        self._process = start_process(run_command, command[len(COMMAND) :], stdout, env)

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)


def run_command(arguments: Sequence[str], log: Path, env: Mapping[str, str] = {}) -> None:
    """Run `megatoken ARGUMENTS` and append its output to a file. env: variables to add."""
    os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(arguments))


def run_forked(arguments: Sequence[str], log: Path) -> None:
    """Run `megatoken ARGUMENTS`, whose runs are forks."""
    experiment.Child = ForkedChild
    run_command(arguments, log)


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "Child", ForkedChild)

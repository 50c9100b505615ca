"""Fine-tuning on CUDA: every objective trains, validates, saves and resumes."""

from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.errors import ExitCode
from tests.golden.run import RUNS, TINY, prepare_data
from tests.tiny_run import read_column

OBJECTIVES = ("sft", "dpo", "kto", "reward", "grpo", "ppo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objectives")
    prepare_data(folder)
    return folder


def train(folder: Path, name: str, *more: str) -> None:
    golden = RUNS[name]
    settings = [word for word in TINY if not (golden.base and word.startswith("model."))]
    settings += [*golden.settings.split(), f"data.path=data/{golden.data}", "machine.device=cuda"]
    settings += ["budget.steps=2", "save.every=1steps", "log.every=1", "log.plots=false"]
    init = ["--init", f"runs/{golden.base}"] if golden.base else []
    words = ["train", golden.recipe, "--out", f"runs/{name}", *init, *settings, *more]
    assert main(words) == ExitCode.DONE


@pytest.mark.parametrize("name", ["gpt2", *OBJECTIVES])
def test_an_objective_trains_and_resumes(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    train(folder, name)
    train(folder, name, "--extend", "1steps")
    assert list(read_column(folder / "runs" / name, "loss")) == [1, 2, 3]

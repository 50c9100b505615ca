"""`megatoken quickstart`, and the prepare commands of shipped recipes."""

import json
import re
from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.config.load import SHIPPED, list_recipes, prepare_words, resolve
from megatoken.errors import ExitCode

SHORT = ("budget.steps=2", "model.n_layer=1", "model.d_model=32", "machine.micro_batch=4", "evaluate.tokens=512")


def test_recipes_name_the_command_that_makes_their_dataset() -> None:
    for recipe in list_recipes():
        data = resolve(recipe).config.data.path
        command = f"# Data: megatoken {' '.join(prepare_words(data, data))}"
        assert re.split(r"\n|  +", (SHIPPED / f"{recipe}.yaml").read_text()).count(command) == 1, recipe


def test_a_missing_dataset_names_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "--json"]) == ExitCode.DATA
    command = "megatoken prepare python --out data/python --tokenizer bpe:4096 --val-fraction 0.03"
    assert capsys.readouterr().err.endswith(f"— data/python — make it with: {command}\n")
    assert main(["train", "quickstart", "--json", "data.path=other"]) == ExitCode.DATA
    assert capsys.readouterr().err.endswith("make it with: megatoken prepare SOURCE --out other\n")


def test_quickstart_makes_everything_and_a_rerun_skips_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--json", *SHORT]) == ExitCode.DONE
    captured = capsys.readouterr()
    first = json.loads(captured.out)
    assert list(first) == ["prepare", "train", "sample"]
    assert first["prepare"]["tokenizer"]["vocab_size"] == 4096
    assert first["train"]["steps"] == 2
    assert "$ megatoken prepare python --out data/python --tokenizer bpe:4096 --val-fraction 0.03\n" in captured.err
    assert 'sample runs/quickstart "class "' in captured.err
    assert (tmp_path / "runs/quickstart/metrics.jsonl").is_file()
    metrics = (tmp_path / "runs/quickstart/metrics.jsonl").read_bytes()

    assert main(["quickstart", "--json", *SHORT]) == ExitCode.DONE
    again = json.loads(capsys.readouterr().out)
    assert list(again) == ["train", "sample"]
    assert again["sample"] == first["sample"]
    assert (tmp_path / "runs/quickstart/metrics.jsonl").read_bytes() == metrics
    assert main(["quickstart", "--json", *SHORT, "budget.steps=3"]) == ExitCode.CONFIG  # another run is in the folder

"""`megatoken train` on CUDA, from set-up to a resumed run, with every family and compile mode."""

import json
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.cli.main import main
from tests.nullgpu.models import train_and_extend
from tests.tiny_run import read_column, read_events, read_rows

RECIPES = ("gpt2-124m", "gpt3-125m", "llama-110m", "modern-124m", "modern-hf-124m")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text("some text to train on. " * 4000)
    line = f"prepare {folder}/a.txt --out {folder}/bytes --tokenizer bytes"
    assert main(line.split()) == ExitCode.DONE
    return folder / "bytes"


SETTINGS = (
    "machine.device=cuda machine.fused=on model.n_layer=2 budget.steps=2 "
    "budget.batch_tokens=16384 budget.batch_start=0 budget.batch_ramp=0 evaluate.every=1steps "
    "evaluate.tokens=4096 sample.every=2steps sample.tokens=8 sample.prompt=some "
    "save.every=1steps log.every=1 log.plots=false machine.micro_batch=2"
)


@pytest.mark.parametrize("mode", ["off", "blocks", "graphs"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_trains_validates_samples_saves_and_resumes(
    dataset: Path, tmp_path: Path, recipe: str, mode: str
):
    line = f"train {recipe} data.path={dataset} {SETTINGS} machine.compile={mode} --out {tmp_path}"
    train_and_extend(line)
    assert list(read_column(tmp_path, "loss")) == [1, 2, 3]
    assert list(read_column(tmp_path, "loss", "val")) == [0, 1, 2, 3]
    assert read_rows(tmp_path, "sample")
    assert not read_events(tmp_path, "warning")
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert machine["compile"] == mode
    assert "loss triton" not in machine["forms"]["errors"]

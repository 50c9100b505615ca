"""`megatoken train` on CUDA, from set-up to a resumed run, with every family and compile mode."""

import json
from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.errors import ExitCode
from megatoken.system.metrics_log import read_metrics

RECIPES = ("gpt2-124m", "gpt3-125m", "llama-110m", "modern-124m", "modern-hf-124m")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text("some text to train on. " * 4000)
    words = [
        "prepare",
        str(folder / "a.txt"),
        "--out",
        str(folder / "bytes"),
        "--tokenizer",
        "bytes",
    ]
    assert main(words) == ExitCode.DONE
    return folder / "bytes"


def train(recipe: str, out: Path, dataset: Path, *words: str) -> None:
    settings = (
        f"data.path={dataset}",
        "machine.device=cuda",
        "machine.fused=on",
        "model.n_layer=2",
        "budget.steps=2",
        "budget.batch_tokens=16384",
        "budget.batch_start=0",
        "budget.batch_ramp=0",
        "evaluate.every=1steps",
        "evaluate.tokens=4096",
        "sample.every=2steps",
        "sample.tokens=8",
        "sample.prompt=some",
        "save.every=1steps",
        "log.every=1",
        "log.plots=false",
    )
    assert main(["train", recipe, *settings, *words, "--out", str(out)]) == ExitCode.DONE


@pytest.mark.parametrize("mode", ["off", "blocks", "graphs"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_trains_validates_samples_saves_and_resumes(
    dataset: Path, tmp_path: Path, recipe: str, mode: str
):
    words = [f"machine.compile={mode}", "machine.micro_batch=2"]
    train(recipe, tmp_path, dataset, *words)
    train(recipe, tmp_path, dataset, *words, "--extend", "1steps")
    rows = read_metrics(tmp_path)
    steps = {
        kind: [row["step"] for row in rows if row["kind"] == kind] for kind in ("train", "val")
    }
    assert steps == {"train": [1, 2, 3], "val": [0, 1, 2, 3]}
    assert "sample" in {row["kind"] for row in rows}
    assert not [row for row in rows if row.get("what") == "warning"]
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert machine["compile"] == mode
    assert "loss triton" not in machine["forms"]["errors"]

"""Fine-tuning on CUDA: every objective trains, validates, saves and resumes."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.model.gpt import GPT
from tests.convert.models import TINY_GPT, save_run
from tests.nullgpu.models import train_and_extend
from tests.tiny_run import read_column
from tests.train.search import ROWS, SAMPLED, TOKENIZER, write_data

SETTINGS = (
    "machine.device=cuda machine.micro_batch=2 budget.epochs=0 budget.steps=2 "
    "budget.batch_tokens=512 optim.warmup=2steps evaluate.every=6steps save.every=1steps "
    "log.every=1 log.plots=false"
)
ROLLOUTS = "objective.group=4 objective.reward=number objective.max_new_tokens=8 objective.kl=0.01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objectives")
    write_data(folder)
    model = GPT(replace(TINY_GPT, vocab_size=TOKENIZER.vocab_size, seq_len=64), seed=1)
    save_run(folder / "init", model, TOKENIZER)
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_an_objective_trains_and_resumes(folder: Path, name: str):
    out = folder / "runs" / name
    line = (
        f"train {name} --init {folder}/init --out {out} data.path={folder / ROWS[name]} {SETTINGS}"
    )
    line += f" {ROLLOUTS}" * (name in SAMPLED)
    train_and_extend(line)
    assert list(read_column(out, "loss")) == [1, 2, 3]

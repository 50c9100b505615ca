"""The recipe `finetune` improves a model on new text, and keeps it as good on its own."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.base.config.load import resolve
from megatoken.base.errors import ConfigError, ExitCode
from megatoken.train.train import Summary
from tests.tiny_run import MACHINE, read_losses, train, write_shards

BATCH = "budget.batch_tokens=512 machine.micro_batch=16"


def write_text(folder: Path, letters: str) -> str:
    """Write shards of sentences that repeat a few words of these letters."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list(letters), 5)) for _ in range(40)]
    texts = [" ".join(rng.choice(words, count)).encode() for count in (4000, 600)]
    return write_shards(folder, *texts)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the text `own`; `new` lies beside it."""
    folder = tmp_path_factory.mktemp("base")
    write_text(folder / "new", "fghijklmnopqrst")
    data = write_text(folder / "own", "abcdefghijklmno")
    train(
        folder / "run",
        f"{data} model.seq_len=32 optim.min_lr_ratio=0 budget.steps=60 evaluate.every=60 "
        f"evaluate.tokens=262144 {BATCH}",
    )
    return folder


def finetune(base: Path, out: Path, data: str, *settings: str, **options: Any) -> Summary:
    paths = f"model.init={base / 'run'} data.path={base / data} data.tokenizer=bytes"
    given = (paths, BATCH, MACHINE, "sample.every=0 sample.at_start=false", *settings)
    return train(out, *given, recipe="finetune", **options)


@pytest.mark.long
@pytest.mark.parametrize(("data", "change"), [("own", 0.01), ("new", -0.2)])
def test_finetuning_helps_on_new_text_and_does_no_harm(
    base: Path, tmp_path: Path, data: str, change: float
):
    finetune(base, tmp_path / "run", data)
    losses = read_losses(tmp_path / "run", "val")
    assert losses[-1] < losses[0] + change
    assert min(losses) == pytest.approx(losses[-1], abs=0.01)
    if data == "own":
        assert losses[0] == pytest.approx(read_losses(base / "run", "val")[-1], rel=1e-6)


@pytest.mark.long
def test_sizes_are_those_of_the_model_also_when_it_is_gone(base: Path, tmp_path: Path):
    init, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(base, init)
    assert finetune(init, out, "own", stop=3).code == ExitCode.STOPPED
    config = resolve(f"{out}/config.yaml").config
    assert (config.model.n_layer, config.model.d_model, config.model.seq_len) == (2, 32, 32)
    shutil.rmtree(init / "run")
    finetune(init, out, "own")
    for settings in ("model.n_layer=3 model.seq_len=32", "budget.batch_tokens=1000"):
        with pytest.raises(ConfigError):
            finetune(base, tmp_path / "other", "own", settings)

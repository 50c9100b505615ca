"""The recipe `finetune` takes its sizes from the model, improves it on new text and leaves it as good on its own."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.errors import ConfigError, ExitCode
from megatoken.system.metrics_log import read_metrics
from megatoken.train.train import Summary, Trainer

RECIPE = """\
model: {n_layer: 2, n_head: 2, d_model: 32, seq_len: 32}
data: {path: DATA, tokenizer: bytes}
optim: {lr: 1e-2, warmup: 5steps, min_lr_ratio: 0}
budget: {steps: 60, batch_tokens: 512}
machine: {device: cpu, precision: fp32, micro_batch: 16, threads: 1, attention: flash}
log: {plots: false}
"""
WORDS = [
    "data.tokenizer=bytes",
    "budget.batch_tokens=512",
    "sample.every=0",
    "sample.at_start=false",
    "machine.device=cpu",
    "machine.precision=fp32",
    "machine.micro_batch=16",
    "machine.threads=1",
    "machine.attention=flash",
    "log.plots=false",
]


def write_text(folder: Path, letters: str) -> Path:
    """Shards of sentences that repeat a few words of these letters."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list(letters), 5)) for _ in range(40)]
    folder.mkdir()
    for split, count in (("train", 4000), ("val", 600)):
        text = " ".join(rng.choice(words, count)).encode()
        np.save(folder / f"{split}_0.npy", np.frombuffer(text, np.uint8).astype(np.uint16))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the text `own`; `new` lies beside it."""
    folder = tmp_path_factory.mktemp("base")
    write_text(folder / "new", "fghijklmnopqrst")
    (folder / "tiny.yaml").write_text(
        RECIPE.replace("DATA", str(write_text(folder / "own", "abcdefghijklmno")))
    )
    Trainer(resolve(str(folder / "tiny.yaml")), folder / "run", console=Console(quiet=True)).fit()
    return folder


def finetune(base: Path, out: Path, data: str, *words: str) -> Summary:
    given = [f"model.init={base / 'run'}", f"data.path={base / data}", *WORDS, *words]
    return Trainer(resolve("finetune", given), out, console=Console(quiet=True)).fit()


def val_losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out) if row["kind"] == "val"]


@pytest.mark.parametrize(("data", "change"), [("own", 0.01), ("new", -0.2)])
def test_finetuning_helps_on_new_text_and_does_no_harm(
    base: Path, tmp_path: Path, data: str, change: float
) -> None:
    assert finetune(base, tmp_path / "run", data).code == ExitCode.DONE
    losses = val_losses(tmp_path / "run")
    assert losses[-1] < losses[0] + change
    assert min(losses) == pytest.approx(losses[-1], abs=0.01)
    if data == "own":
        assert losses[0] == pytest.approx(val_losses(base / "run")[-1], rel=1e-6)


def test_sizes_are_those_of_the_model_also_when_it_is_gone(base: Path, tmp_path: Path) -> None:
    init = Path(shutil.copytree(base / "run", tmp_path / "base" / "run"))
    shutil.copytree(base / "own", tmp_path / "base" / "own")
    stop = [lambda row: row["kind"] == "train" and row["step"] == 3]
    words = [f"model.init={init}", f"data.path={tmp_path / 'base' / 'own'}", *WORDS]
    resolved = resolve("finetune", words)
    out = tmp_path / "out"
    assert (
        Trainer(resolved, out, callbacks=stop, console=Console(quiet=True)).fit().code
        == ExitCode.STOPPED
    )
    config = resolve(str(out / "config.yaml")).config
    assert (config.model.n_layer, config.model.d_model, config.model.seq_len) == (2, 32, 32)
    (line,) = [
        line for line in (out / "config.yaml").read_text().splitlines() if "n_layer:" in line
    ]
    assert line.split() == ["n_layer:", "2", "#", "model.init"]
    shutil.rmtree(init)
    assert Trainer(resolved, out, console=Console(quiet=True)).fit().code == ExitCode.DONE
    with pytest.raises(ConfigError, match=r"set model.n_layer=2"):
        finetune(base, tmp_path / "other", "own", "model.n_layer=3", "model.seq_len=32")
    with pytest.raises(ConfigError, match=r"not a multiple of model.seq_len 32 — model.init .*run"):
        finetune(
            base,
            tmp_path / "another",
            "own",
            "budget.batch_tokens=1024",
            "budget.batch_tokens=1000",
        )

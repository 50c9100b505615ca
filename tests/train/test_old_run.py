"""A run folder written before the fields and modules were renamed (commit 0203507) resumes, samples and verifies."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.cli.verify import verify_folder
from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.pretrain import Trainer
from megatoken.train.metrics_log import read_metrics

OLD_RUN = Path(__file__).parents[1] / "old_run"
# Training losses of steps 11 to 20 as the version that wrote the folder computed them: fp32, one thread.
LOSSES = [
    3.9093050956726074,
    3.7991902828216553,
    3.7129368782043457,
    3.645663261413574,
    3.61761212348938,
    3.5446994304656982,
    3.5271501541137695,
    3.518580436706543,
    3.481217384338379,
    3.47344970703125,
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD_RUN / "run", tmp_path / "run"))


def test_old_field_names_are_read_and_reported(run: Path) -> None:
    resolved = resolve(str(run / "config.yaml"))
    config = resolved.config
    assert (config.optim.min_lr_ratio, config.optim.grad_clip) == (0.05, 0.5)
    assert (config.model.pos_emb, config.model.tie_embeddings) == ("rotary", False)
    assert (config.machine.master_weights, config.machine.activation_checkpointing) == (
        "off",
        "none",
    )
    assert config.sample.num_samples == 2
    assert "optim.floor is now called optim.min_lr_ratio" in resolved.notes
    assert "machine.mixed is now called machine.master_weights=off" in resolved.notes


@pytest.mark.fault(26)
def test_old_run_resumes_at_the_same_losses(run: Path) -> None:
    resolved = resolve(str(run / "config.yaml"), [f"data.path={OLD_RUN / 'data'}"])
    summary = Trainer(resolved, run, console=Console(quiet=True)).fit()
    assert summary.steps == 20
    losses = [
        row["loss"] for row in read_metrics(run) if row["kind"] == "train" and row["step"] > 10
    ]
    assert losses == pytest.approx(
        LOSSES, rel=1e-6
    )  # equal to the bit on the processor that wrote it
    forms = json.loads((run / "machine.json").read_text())["forms"]
    assert (forms["kernels"]["attention"], forms["circumstances"]["linear"]) == ("flash", "torch")
    assert verify_folder(run).errors == []


def test_old_run_loads_for_sampling(run: Path) -> None:
    loaded = load_pretrained(str(run))
    assert replace(loaded.model.config, vocab_size=0).pos_emb == "rotary"
    assert loaded.tokenizer.name == "bytes"

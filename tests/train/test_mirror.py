"""`save.mirror` of whole runs: the same command goes on from the copy when the machine is lost."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatoken.checkpoint.mirror import list_mirrored
from megatoken.cli.main import main
from megatoken.config.load import load_config
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.errors import ExitCode
from megatoken.system.metrics_log import read_metrics
from megatoken.system.object_store import ObjectStore
from megatoken.train import live_mirror
from megatoken.train.train import Trainer
from tests.train.test_storage_faults import SAVING, events, tensors
from tests.train.test_trainer import SMALL


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_mirror, "RETRY_SECONDS", (0.0,))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "train_0.npy"
    text = b"to be or not to be, that is the question. " * 300
    np.save(path, np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
    return path


def words(data: str, address: str) -> list[str]:
    return [
        f"data.path={data}",
        *SMALL,
        *SAVING,
        "machine.precision=fp32",
        f"save.mirror={address}",
    ]


def stop_at_6(row: dict[str, Any]) -> bool:
    return row["kind"] == "train" and row["step"] == 6


def test_a_lost_machine(
    s3: str, shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data and checkpoints on S3: stopped at step 6, the folder lost, gone on elsewhere with the same bits."""
    ObjectStore(f"{s3}/data").write(shard.name, shard.read_bytes())
    config = load_config("quickstart", *words(f"{s3}/data", f"{s3}/run"))
    stopped = Trainer(config, tmp_path / "run", callbacks=[stop_at_6]).fit()
    assert (stopped.code, stopped.steps) == (ExitCode.STOPPED, 6)
    assert list_mirrored(ObjectStore(f"{s3}/run"))[-1] == 6
    assert "mirrored" in events(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert Trainer(config, tmp_path / "elsewhere").fit().steps == 12
    output = capsys.readouterr().out
    assert f"fetched step-00000006 from {s3}/run in" in output
    assert "resuming from step-00000006" in output
    steps = [row["step"] for row in read_metrics(tmp_path / "elsewhere") if row["kind"] == "train"]
    assert steps == [*range(1, 13)]
    undisturbed = load_config("quickstart", *words(str(shard), ""))
    Trainer(undisturbed, tmp_path / "clean").fit()
    expected, found = tensors(tmp_path / "clean"), tensors(tmp_path / "elsewhere")
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    loaded = load_pretrained(f"{s3}/run")
    weights = loaded.model.state_dict()
    assert loaded.source == f"{s3}/run"
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert main(["verify", f"{s3}/run"]) == 0
    n_steps = len(list_mirrored(ObjectStore(f"{s3}/run")))
    assert f"run {s3}/run: {n_steps} checked, 0 damaged" in capsys.readouterr().out


def test_a_mirror_that_fails_ends_nothing(
    shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a file from step 5 on; when it is a folder again, the same command copies what is missing."""
    copy, out = tmp_path / "copy", tmp_path / "run"
    config = load_config("quickstart", *words(str(shard), str(copy)))

    def break_mirror(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 5:
            shutil.rmtree(copy, ignore_errors=True)
            copy.write_text("")

    assert Trainer(config, out, callbacks=[break_mirror]).fit().code == ExitCode.DONE
    assert "not mirrored" in events(out)
    assert "warning: not copied to save.mirror: cannot " in capsys.readouterr().out
    copy.unlink()
    Trainer(config, out).fit()
    assert list_mirrored(ObjectStore(str(copy))) == [12]
    for place in (str(copy), f"file://{copy}"):
        assert main(["verify", place]) == ExitCode.DONE
        assert f"run {copy}: 1 checked, 0 damaged" in capsys.readouterr().out
    weights = next(copy.glob("checkpoints/*/model*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["verify", f"file://{copy}"]) == ExitCode.CHECKPOINT
    shutil.rmtree(out / "tokenizer")
    assert main(["verify", str(out)]) != ExitCode.DONE  # a run folder needs its own


def test_the_copy_of_a_finished_run_is_at_its_end_and_measures_nothing(
    shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status is not copied; here its machine.json, with the micro-batch, is of another machine."""
    given = [
        *words(f"file://{shard}", str(tmp_path / "copy")),
        "machine.micro_batch=auto",
        "budget.batch_tokens=512",
    ]
    Trainer(load_config("quickstart", *given), tmp_path / "run").fit()
    output = capsys.readouterr().out
    assert "micro-batch" in output
    assert f"data     {shard}: " in output  # where it lies, not in the cache
    (tmp_path / "copy" / "machine.json").unlink()
    assert Trainer(load_config("quickstart", *given), tmp_path / "elsewhere").fit().steps == 12
    output = capsys.readouterr().out
    assert "resuming from step-00000012" in output
    assert "micro-batch" not in output

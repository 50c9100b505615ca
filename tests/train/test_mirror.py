"""`save.mirror` of full runs: the same command continues from the copy on another machine."""

import shutil
from pathlib import Path

import pytest
import torch

from megatoken.base.console import Console
from megatoken.base.errors import ExitCode, StorageError
from megatoken.cli.main import main
from megatoken.store.mirror import list_mirrored
from megatoken.store.objects import ObjectStore
from megatoken.text.load_pretrained import load_pretrained
from tests.tiny_run import assert_equal_tensors, read_column, read_events, train

SAVING = "save.keep_last=3 evaluate.every=0 model.dropout=0.1 save.mirror="


@pytest.fixture
def shard(data: str) -> Path:
    return Path(data.removeprefix("data.path=")).with_name("train_0.npy")


def test_a_lost_machine(s3: str, shard: Path, tmp_path: Path):
    """With data and checkpoints on S3, a stopped run whose folder is lost resumes elsewhere."""
    run, elsewhere, clean = (tmp_path / name for name in ("run", "elsewhere", "clean"))
    ObjectStore(f"{s3}/data").write(shard.name, shard.read_bytes())
    settings = f"data.path={s3}/data {SAVING}{s3}/run"
    stopped = train(run, settings, stop=6)
    assert (stopped.code, stopped.steps) == (ExitCode.STOPPED, 6)
    assert list_mirrored(ObjectStore(f"{s3}/run"))[-1] == 6
    assert read_events(run, "mirrored")
    shutil.rmtree(run)
    assert train(elsewhere, settings).steps == 12
    train(clean, f"data.path={shard} {SAVING}")
    assert read_column(elsewhere, "loss") == read_column(clean, "loss")
    assert_equal_tensors(elsewhere, clean)
    loaded, expected = load_pretrained(f"{s3}/run"), load_pretrained(clean)
    assert loaded.source == f"{s3}/run"
    weights = [each.model.state_dict() for each in (loaded, expected)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert main(["verify", f"{s3}/run"]) == 0


@pytest.mark.long
def test_a_mirror_that_fails_ends_nothing(shard: Path, tmp_path: Path):
    """From step 5 on, the address is a file. Once it is a folder, a resume copies the rest."""
    copy, out, refused = (tmp_path / name for name in ("copy", "run", "refused"))
    settings = f"data.path={shard} {SAVING}{copy}"

    def break_mirror(row):
        if row["kind"] == "train" and row["step"] == 5:
            shutil.rmtree(copy, ignore_errors=True)
            copy.write_text("")

    train(out, settings, callbacks=[break_mirror])
    assert read_events(out, "not mirrored")
    with pytest.raises(StorageError):  # before the first step of a new run
        train(refused, f"data.path={shard} save.mirror={copy}/run save.every=0")
    assert not (refused / "metrics.jsonl").exists()
    copy.unlink()
    train(out, settings)
    assert list_mirrored(ObjectStore(str(copy))) == [12]
    for address in (str(copy), f"file://{copy}"):
        assert main(["verify", address]) == ExitCode.DONE
    weights = next(copy.glob("checkpoints/*/model*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["verify", f"file://{copy}"]) == ExitCode.CHECKPOINT
    shutil.rmtree(out / "tokenizer")
    assert main(f"verify {out}".split()) != ExitCode.DONE  # a run folder needs its own


@pytest.mark.long
def test_the_copy_of_a_finished_run_is_at_its_end_and_measures_nothing(
    shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The status is not copied; machine.json, with the micro-batch, is of another machine."""
    settings = f"data.path=file://{shard} {SAVING}{tmp_path / 'copy'} machine.micro_batch=auto"
    train(tmp_path / "run", settings, console=Console())
    assert "micro-batch" in capsys.readouterr().out
    (tmp_path / "copy/machine.json").unlink()
    assert train(tmp_path / "elsewhere", settings, console=Console()).steps == 12
    assert "micro-batch" not in capsys.readouterr().out

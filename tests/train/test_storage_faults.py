"""Whole runs on disks that fail: full, read-only, or emptied by somebody else."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatoken.checkpoint import commit as protocol
from megatoken.checkpoint.commit import list_steps, step_folder
from megatoken.checkpoint.manifest import verify
from megatoken.cli.main import main
from megatoken.config.load import load_config
from megatoken.config.schema import Config
from megatoken.errors import ConfigError, ExitCode, StorageError
from megatoken.launch.local import find_free_port
from megatoken.system.metrics_log import MetricsLogger, read_metrics
from megatoken.train import checkpoint_saver
from megatoken.train import train as pretrain
from megatoken.train.train import Trainer
from tests.ranks import run_ranks
from tests.train.test_trainer import SMALL

SAVING = ("save.every=4steps", "save.keep_last=3", "evaluate.every=0", "model.dropout=0.1")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shards")
    text = b"to be or not to be, that is the question. " * 300
    np.save(folder / "train_0.npy", np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
    return [f"data.path={folder}/*.npy", *SMALL, *SAVING]


@pytest.fixture(scope="module")
def config(words: list[str]) -> Config:
    return load_config("quickstart", *words)


@pytest.fixture(scope="module")
def clean(config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The last weights and moments of an undisturbed run."""
    out = tmp_path_factory.mktemp("clean") / "run"
    Trainer(config, out).fit()
    assert list_steps(out / "checkpoints") == [4, 8, 12]
    return tensors(out)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(checkpoint_saver, "LAST_SAVE_RETRY_SECONDS", (0.0, 0.0))


def tensors(out: Path) -> dict[str, torch.Tensor]:
    folder = step_folder(out / "checkpoints", 12)
    return {
        **load_file(folder / "model.safetensors"),
        **load_file(folder / "optimizer.safetensors"),
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def events(out: Path) -> list[str]:
    return [row["what"] for row in read_metrics(out) if row["kind"] == "event"]


def fill_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[str], bool]) -> list[str]:
    """Let the fsync of files whose path `is_full` fail; return the list of those, which grows."""
    sync_file, failed = protocol.sync_file, []

    def sync(path: Path, on_progress: Callable[[int], object] | None = None) -> None:
        if is_full(str(path)):
            failed.append(path.name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync_file(path, on_progress)

    monkeypatch.setattr(protocol, "sync_file", sync)
    return failed


@pytest.mark.fault(17)
def test_a_scheduled_save_on_a_full_disk_warns_once_and_the_next_is_tried(
    config: Config,
    clean: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = fill_disk(monkeypatch, lambda path: "step-00000004" in path)
    assert Trainer(config, tmp_path / "run").fit().code == ExitCode.DONE
    assert failed == 3 * ["model.safetensors"]  # written again twice, beside training
    assert list_steps(tmp_path / "run" / "checkpoints") == [8, 12]
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))
    warnings = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("warning: checkpoint")
    ]
    assert len(warnings) == 1
    assert "checkpoint of step 4 was not saved: No space left on device" in warnings[0]
    for part in (" bytes needed, ", " free — ", str(tmp_path / "run" / "checkpoints")):
        assert part in warnings[0]
    assert events(tmp_path / "run") == ["save failed"]
    assert equal(tensors(tmp_path / "run"), clean)


@pytest.mark.fault(17)
def test_the_last_save_on_a_full_disk_ends_the_run_and_keeps_what_there_was(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    failed = fill_disk(monkeypatch, lambda path: "step-00000012" in path)
    with pytest.raises(
        StorageError, match=r"step 12 was not saved: No space left on device, [\d,]+ bytes needed"
    ):
        Trainer(config, out).fit()
    assert len(failed) == 3 * 3  # three saves, each with a file written three times
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 5, 12)
    assert [verify(step_folder(out / "checkpoints", step)).step for step in (4, 8)] == [4, 8]
    assert list_steps(out / "checkpoints") == [4, 8]


@pytest.mark.fault(17)
def test_the_last_save_succeeds_once_there_is_room(
    config: Config, clean: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fill_disk(monkeypatch, lambda path: "step-00000012" in path and len(failed) < 8)
    assert Trainer(config, tmp_path / "run").fit().code == ExitCode.DONE
    assert len(failed) == 8
    assert list_steps(tmp_path / "run" / "checkpoints") == [4, 8, 12]
    assert equal(tensors(tmp_path / "run"), clean)


@pytest.mark.fault(23)
def test_checkpoints_removed_during_the_run_do_not_stop_it(
    config: Config, clean: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def remove(row: dict[str, Any]) -> None:
        if row["kind"] == "save" and row["step"] == 4:
            shutil.rmtree(out / "checkpoints")

    assert Trainer(config, out, callbacks=[remove]).fit().code == ExitCode.DONE
    assert list_steps(out / "checkpoints") == [8, 12]
    assert equal(tensors(out), clean)


@pytest.mark.fault(21)
@pytest.mark.skipif(
    not Path("/dev/full").is_char_device(), reason="needs a device that is always full"
)
def test_a_full_disk_under_the_log_changes_nothing_but_the_log(
    config: Config,
    clean: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_log = MetricsLogger.open

    def open_full(folder: Path) -> MetricsLogger:
        log = open_log(folder)
        assert log._file is not None
        log._file.close()
        log._file = FileIO("/dev/full", "wb")
        return log

    monkeypatch.setattr(MetricsLogger, "open", open_full)
    assert Trainer(config, tmp_path / "run").fit().steps == 12
    assert (
        capsys.readouterr().err.count("warning: cannot write the log: No space left on device") == 1
    )
    assert read_metrics(tmp_path / "run") == []
    assert equal(tensors(tmp_path / "run"), clean)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk with these options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("may not mount a disk here")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


def refuse(config: Config, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a run on a disk that cannot hold it and check that it makes no step."""
    monkeypatch.setattr(
        "megatoken.train.train.train_step_async", lambda *_: pytest.fail("a step was made")
    )
    with pytest.raises(StorageError):
        Trainer(config, out).fit()


@pytest.mark.fault(8)
@pytest.mark.parametrize("change", [{"n_layer": 10**8}, {"d_model": 10**8}])
def test_a_model_far_beyond_the_memory_is_refused_before_it_is_built(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:
    monkeypatch.setattr(
        pretrain, "build_train_state", lambda *_, **__: pytest.fail("the model was built")
    )
    huge = replace(config, model=replace(config.model, **change))
    with pytest.raises(ConfigError, match=r"need .* per process"):
        Trainer(huge, tmp_path / "run").fit()


@pytest.mark.fault(18)
def test_a_disk_without_room_for_the_checkpoints_is_refused(
    config: Config, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(config, disk("size=4m") / "run", monkeypatch)  # the tensors alone would fit


@pytest.mark.fault(18)
def test_a_full_disk_is_refused(
    config: Config, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = disk("size=64k")
    with pytest.raises(OSError, match="No space left"):
        (full / "filler").write_bytes(b"x" * 100_000)
    refuse(config, full / "run", monkeypatch)


@pytest.mark.fault(19)
def test_a_read_only_disk_is_refused_before_the_model_is_built(
    config: Config, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pretrain, "build_train_state", lambda *_, **__: pytest.fail("the model was built")
    )
    refuse(config, disk("ro,size=1m") / "run", monkeypatch)


def train_as_rank(rank: int, port: int, words: list[str], out: str) -> None:
    """What a launcher that is not ours starts: `megatoken train` as one of two ranks."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": port,
    }
    os.environ.update(
        {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    )
    with open(f"{out}.{rank}", "w") as errors, contextlib.redirect_stderr(errors):
        code = main(["train", "quickstart", *words, "--out", out])
    Path(f"{out}.{rank}.code").write_text(str(code))


@pytest.mark.fault(7, 19)
@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("the folder holds something that is not a run", ExitCode.CONFIG),
        ("cannot write", ExitCode.STORAGE),
    ],
)
def test_what_only_rank_0_meets_is_the_same_error_on_all(
    words: list[str], what: str, code: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    (out / "machine.json").mkdir(parents=True)  # cannot be replaced by a file
    if code == ExitCode.STORAGE:
        (out / "provenance.json").write_text('{"megatoken": "0"}')
    run_ranks(train_as_rank, find_free_port(), words, str(out), nprocs=2)
    lines = [Path(f"{out}.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert [Path(f"{out}.{rank}.code").read_text() for rank in (0, 1)] == 2 * [str(int(code))]
    assert lines[0][-1].startswith(f"error: {what}")
    assert lines[1] == [f"[rank 1] {lines[0][-1]}"]


def test_a_folder_that_is_no_folder_is_refused_before_torch_is_loaded(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").touch()
    program = "import sys; from megatoken.cli.main import main; code = main(sys.argv[1:]); "
    program += "sys.exit(99 if 'torch' in sys.modules else code)"
    for out, code in ((tmp_path, ExitCode.CONFIG), (tmp_path / "notes.txt", ExitCode.STORAGE)):
        arguments = ["train", "quickstart", *words, "--out", str(out)]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr.count("\n")) == (code, 1)

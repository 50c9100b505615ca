"""Runs on disks that are full, read-only, or freed by another program."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest

from megatoken.base.errors import ConfigError, ExitCode, StorageError
from megatoken.base.system.metrics_log import MetricsLogger, read_metrics
from megatoken.cli.main import main
from megatoken.store import commit as protocol
from megatoken.store.commit import list_steps, step_folder
from megatoken.store.manifest import verify
from megatoken.train import train as pretrain
from tests.ranks import run_ranks
from tests.tiny_run import TINY, assert_equal_tensors, read_events, train


@pytest.fixture(scope="module")
def settings(data: str) -> str:
    return f"{data} save.keep_last=3 evaluate.every=0 model.dropout=0.1"


@pytest.fixture(scope="module")
def clean(settings: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("clean") / "run"
    train(out, settings)
    assert list_steps(out / "checkpoints") == [4, 8, 12]
    return out


def fill_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[str], bool]) -> list[str]:
    """Fail the fsync of files whose path `is_full`; return the list of them, which grows."""
    sync_file, failed = protocol.sync_file, []

    def sync(path, on_progress=None):
        if is_full(str(path)):
            failed.append(path.name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync_file(path, on_progress)

    monkeypatch.setattr(protocol, "sync_file", sync)
    return failed


@pytest.mark.fault(17)
@pytest.mark.parametrize(("step", "n_failures", "kept"), [(4, 3, [8, 12]), (12, 8, [4, 8, 12])])
def test_a_save_on_a_full_disk_is_tried_again_beside_training_or_at_the_end(
    settings: str, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    step: int, n_failures: int, kept: list[int],
):  # fmt: skip
    """A scheduled save is written three times, and warns once; the last one until there is room."""
    failed = fill_disk(
        monkeypatch, lambda path: f"step-{step:08d}" in path and len(failed) < n_failures
    )
    train(tmp_path, settings)
    assert failed == n_failures * ["model.safetensors"]
    assert list_steps(tmp_path / "checkpoints") == kept
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
    assert step == 12 or len(read_events(tmp_path, "save failed")) == 1
    assert_equal_tensors(tmp_path, clean)


@pytest.mark.fault(17)
def test_the_last_save_on_a_full_disk_ends_the_run_and_keeps_what_there_was(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    failed = fill_disk(monkeypatch, lambda path: "step-00000012" in path)
    with pytest.raises(StorageError):
        train(tmp_path, settings)
    assert len(failed) in (9, 12)  # three writes a save, two retries, perhaps a scheduled save
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 5, 12)
    assert list_steps(tmp_path / "checkpoints") == [4, 8]
    assert [verify(step_folder(tmp_path / "checkpoints", step)).step for step in (4, 8)] == [4, 8]


@pytest.mark.fault(21)
@pytest.mark.skipif(
    not Path("/dev/full").is_char_device(), reason="needs a device that is always full"
)
def test_a_full_disk_under_the_log_changes_nothing_but_the_log(
    settings: str,
    clean: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    open_log = MetricsLogger.open

    def open_full(folder):
        log = open_log(folder)
        log._file.close()
        log._file = FileIO("/dev/full", "wb")
        return log

    monkeypatch.setattr(MetricsLogger, "open", open_full)
    assert train(tmp_path, settings).steps == 12
    assert capsys.readouterr().err.count("cannot write the log") == 1
    assert read_metrics(tmp_path) == []
    assert_equal_tensors(tmp_path, clean)


@pytest.mark.fault(8)
def test_a_model_far_beyond_the_memory_is_refused_before_it_is_built(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrain, "build_train_state", lambda *_, **__: pytest.fail("built"))
    for setting in ("model.d_ff=100000000", "model.d_model=100000000"):
        with pytest.raises(ConfigError, match=r"need .* per process"):
            train(tmp_path, settings, setting)


@pytest.mark.fault(18, 19)
@pytest.mark.parametrize("options", ["size=4m", "size=64k", "ro,size=1m"])
def test_a_small_a_full_and_a_read_only_disk_are_refused(
    settings: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In 4 MB the tensors alone would fit."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a disk here")
    try:
        if options == "size=64k":
            with pytest.raises(OSError, match="No space left"):
                (tmp_path / "filler").write_bytes(b"x" * 100_000)
        if options.startswith("ro"):
            monkeypatch.setattr(
                pretrain, "build_train_state", lambda *_, **__: pytest.fail("built")
            )
        monkeypatch.setattr(pretrain, "train_step_async", lambda *_: pytest.fail("a step was made"))
        with pytest.raises(StorageError):
            train(tmp_path / "run", settings)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def train_by_command(rank: int, settings: str, outs: list[Path]) -> None:
    """Run `megatoken train` as a foreign launcher does."""
    for out in outs:
        with open(f"{out}.{rank}", "w") as errors, contextlib.redirect_stderr(errors):
            code = main(f"train {TINY} {settings} --out {out}".split())
            errors.write(f"{code}\n")


@pytest.mark.fault(7, 19)
def test_what_only_rank_0_meets_is_the_same_error_on_all(settings: str, tmp_path: Path):
    outs = [tmp_path / "not-a-run", tmp_path / "run"]
    for out in outs:
        (out / "machine.json").mkdir(parents=True)  # cannot be replaced by a file
    (outs[1] / "provenance.json").write_text('{"megatoken": "0"}')
    run_ranks(train_by_command, settings, outs, nprocs=2)
    for out, code in zip(outs, (ExitCode.CONFIG, ExitCode.STORAGE), strict=True):
        first, second = (Path(f"{out}.{rank}").read_text().splitlines() for rank in (0, 1))
        assert first[-1] == str(int(code))
        assert second == [f"[rank 1] {first[-2]}", first[-1]]

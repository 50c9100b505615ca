import errno
import os
from pathlib import Path

import pytest

from megatoken.system.atomic_write import replace_file, sync_file, sync_folder


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, durable: bool):
    replace_file(tmp_path / "a.json", "é\n", durable=durable)
    replace_file(tmp_path / "a.json", b"\x00\r\n", durable=durable)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"\x00\r\n"


def test_a_failed_replacement_keeps_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_file(tmp_path / "a", "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "a", "new", durable=True)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_file_system_without_folder_sync_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fail)
    sync_folder(tmp_path)
    (tmp_path / "a").write_text("a")
    with pytest.raises(OSError, match="Invalid"):
        sync_file(tmp_path / "a")

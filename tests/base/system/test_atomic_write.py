import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatoken.base.system.atomic_write import replace_file, sync_file, sync_folder


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, durable: bool):
    replace_file(tmp_path / "a.json", "é\n", durable=durable)
    replace_file(tmp_path / "a.json", b"\x00\r\n", durable=durable)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"\x00\r\n"


def test_a_failed_sync_keeps_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file system need not sync folders."""
    path = tmp_path / "a"
    replace_file(path, "old")
    for error in (errno.ENOSPC, errno.EINVAL):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(error, "failed")))
        with pytest.raises(OSError, match="failed"):
            replace_file(path, "new", durable=True)
        with pytest.raises(OSError, match="failed"):
            sync_file(path)
        assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a", "old")]
    sync_folder(tmp_path)

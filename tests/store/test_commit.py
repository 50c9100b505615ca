import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megatoken.base.errors import StorageError
from megatoken.store import commit as protocol
from megatoken.store.commit import commit, find_newest, list_steps, prune, remove_leftovers
from megatoken.store.manifest import hash_file, verify
from tests.flip import flip_bit

ROOT = Path(__file__).parents[2]


def commit_small(root: Path, step: int, **options: Any) -> Path:
    contents = {
        "weights.bin": bytes([step % 251]) * 5000,
        "tokenizer/vocab.json": b'{"a": %d}' % step,
    }
    writers = {name: partial(Path.write_bytes, data=data) for name, data in contents.items()}
    return commit(root, step, writers, meta={"tokens": step * 100}, **options)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest_step(root: Path) -> tuple[int | None, list[str]]:
    """Return the newest valid step, and the errors of the checkpoints that were skipped."""
    errors = []
    found = find_newest(root, lambda folder, error: errors.append(f"{folder.name}: {error}"))
    return found and found[1].step, errors


def test_commit_writes_every_file_and_its_hash(tmp_path: Path):
    folder = commit_small(tmp_path / "run/checkpoints", 7)
    assert folder == tmp_path / "run/checkpoints/step-00000007"
    assert list_names(folder.parent) == ["step-00000007"]
    written = json.loads((folder / "manifest.json").read_text())
    assert written.pop("xxh3")
    contents = {"weights.bin": b"\x07" * 5000, "tokenizer/vocab.json": b'{"a": 7}'}
    files = {
        name: {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        for name, data in contents.items()
    }
    assert written == {"format": 1, "step": 7, "meta": {"tokens": 700}, "files": files}
    assert verify(folder).meta == {"tokens": 700}


def test_list_steps_ignores_other_names(tmp_path: Path):
    assert list_steps(tmp_path / "nothing") == []
    for step in (30, 5, 123456789):
        commit_small(tmp_path, step)
    others = "step-10 step-00000040.bak xstep-00000040 .tmp-step-00000040-ab step-000000050"
    for name in others.split():
        shutil.copytree(tmp_path / "step-00000005", tmp_path / name)
    (tmp_path / "step-00000060").touch()
    (tmp_path / "step-00000070").symlink_to(tmp_path / "step-00000005")
    assert list_steps(tmp_path) == [5, 30, 123456789]


def test_commit_keeps_a_valid_checkpoint_and_replaces_a_damaged_one(tmp_path: Path):
    folder = commit_small(tmp_path, 3)
    inode = folder.stat().st_ino
    assert commit_small(tmp_path, 3) == folder
    assert folder.stat().st_ino == inode
    flip_bit(folder / "weights.bin", 9)
    commit_small(tmp_path, 3)
    assert folder.stat().st_ino != inode
    assert verify(folder).step == 3
    assert list_names(tmp_path) == ["step-00000003"]
    for path in folder.glob("*.*"):
        path.unlink()
    commit_small(tmp_path, 3)
    assert verify(folder).step == 3


def test_prune_keeps_the_newest_the_multiples_and_what_is_being_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folders = [commit_small(tmp_path, step) for step in (5, 10, 15, 20, 25, 30)]
    assert prune(tmp_path, keep_last=2, keep_every=20, keep=[10]) == [folders[0], folders[2]]
    assert list_steps(tmp_path) == [10, 20, 25, 30]
    assert prune(tmp_path, keep_last=2, keep_every=20) == [folders[1]]
    monkeypatch.setattr("megatoken.store.manifest.hash_file", pytest.fail)  # of an earlier start
    prune(tmp_path, keep_last=0, keep_every=0, verified={})
    assert list_names(tmp_path) == ["step-00000030"]


@pytest.mark.fault(4)
def test_prune_counts_valid_checkpoints_only(tmp_path: Path):
    folders = [commit_small(tmp_path, step) for step in (1, 2, 3, 4, 5)]
    flip_bit(folders[4] / "weights.bin", 3)
    (folders[3] / "manifest.json").unlink()
    shutil.rmtree(folders[1])
    for n_valid in (1, 0):
        prune(tmp_path, keep_last=1, keep_every=0)
        assert list_steps(tmp_path) == [3, 4, 5]
        assert newest_step(tmp_path)[0] == (3 if n_valid else None)
        flip_bit(folders[2] / "weights.bin", 8)


@pytest.mark.parametrize(("name", "bit"), [("weights.bin", 3), ("manifest.json", 99)])
def test_prune_keeps_an_older_checkpoint_when_the_newest_was_changed_after_it_was_written(
    tmp_path: Path, name: str, bit: int
):
    folders = [commit_small(tmp_path, step) for step in (1, 2, 3)]
    verified = {folder: verify(folder).files for folder in folders}
    flip_bit(folders[2] / name, bit)
    os.utime(folders[2] / name, (2e9, 2e9))  # within one tick of the clock of file times
    prune(tmp_path, keep_last=1, keep_every=0, verified=verified)
    assert list_steps(tmp_path) == [2, 3]
    assert newest_step(tmp_path)[0] == 2


def test_remove_leftovers_removes_the_drafts_of_killed_runs(tmp_path: Path):
    commit_small(tmp_path, 1)
    (tmp_path / ".tmp-step-00000002-ab/tokenizer").mkdir(parents=True)
    for name in (".tmp-step-00000002-ab/tokenizer/x", ".tmp-file", "step-00000002"):
        (tmp_path / name).touch()
    for name in ("step-00000001", "nothing"):
        (tmp_path / f".tmp-{name}").symlink_to(tmp_path / name)
    remove_leftovers(tmp_path)
    commit_small(tmp_path, 2)  # a file is in the way
    assert list_names(tmp_path) == ["step-00000001", "step-00000002"]
    assert newest_step(tmp_path) == (2, [])
    remove_leftovers(tmp_path / "nothing")


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.EIO, "Input/output error", "/somewhere"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_failing_writer_leaves_only_earlier_checkpoints(tmp_path: Path, failure: Exception):
    def fail(path):
        path.write_bytes(b"half")
        raise failure

    commit_small(tmp_path, 1)
    with pytest.raises(StorageError) as caught:
        commit(tmp_path, 2, {"a": fail}, meta={})
    assert caught.value.__cause__ is failure
    with pytest.raises(StorageError):
        commit_small(tmp_path, 2, needed_bytes=2**50)
    assert list_names(tmp_path) == ["step-00000001"]


@pytest.mark.fault(20)
def test_a_checkpoint_is_not_committed_unless_every_fsync_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The fsyncs are of the parent, 2 files, the manifest, 2 folders, and the root."""
    fsync, left = os.fsync, [7]

    def fail_at_the_end(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_at_the_end)
    commit_small(tmp_path, 2)
    assert left == [0]
    for n_good in range(7):
        left[0] = n_good
        with pytest.raises(StorageError):
            commit_small(tmp_path, 3)
        assert list_names(tmp_path) == ["step-00000002"]


@pytest.mark.fault(17)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("failing", ["write", "fsync", "read"])
def test_a_file_is_written_again_when_its_error_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, failing: str
):
    written, errors = [], [OSError(number, os.strerror(number)) for _ in range(2)]

    def fail(call):
        if call == failing and errors:
            raise errors.pop()

    def write(path):
        written.append(path.exists())
        path.write_bytes(b"half" if errors else b"whole")
        fail("write")

    monkeypatch.setattr(protocol, "sync_file", lambda path, *_: fail("fsync"))
    monkeypatch.setattr(protocol, "hash_file", lambda path, _: (fail("read"), hash_file(path))[1])
    folder = commit(tmp_path, 1, {"a": write}, meta={})
    assert written == [False, False, False]  # each time from its beginning
    assert (folder / "a").read_bytes() == b"whole"
    assert verify(folder).step == 1


@pytest.mark.fault(23)
def test_checkpoints_removed_by_others_do_not_stop_a_save_or_a_removal(tmp_path: Path):
    root = tmp_path / "checkpoints"

    def remove_all(path):
        shutil.rmtree(root)
        path.write_bytes(b"x")

    folders = [commit_small(root, step) for step in (1, 2, 3, 4)]
    rules = {"keep_last": 1, "keep_every": 0}
    rules["verified"] = {folder: verify(folder).files for folder in folders}
    shutil.rmtree(folders[3])
    assert prune(root, **rules) == folders[:2]
    assert list_steps(root) == [3]
    with pytest.raises(StorageError):
        commit(root, 5, {"a": remove_all}, meta={})
    assert prune(root, **rules) == []
    assert verify(commit_small(root, 6)).step == 6


@pytest.mark.fault(54)
def test_reading_while_another_thread_commits_and_prunes(tmp_path: Path):
    commit_small(tmp_path, 1)
    steps, written = [1], [1]

    def write():
        while written[-1] < 25 or len(steps) < 6:
            written.append(written[-1] + 1)
            commit_small(tmp_path, written[-1])
            prune(tmp_path, keep_last=1, keep_every=0)

    with ThreadPoolExecutor(1) as threads:
        writer = threads.submit(write)
        while not writer.done():
            step, errors = newest_step(tmp_path)
            assert (step is None, errors) == (False, [])
            steps.append(step or 0)
    writer.result()
    assert steps == sorted(steps)
    assert newest_step(tmp_path) == (written[-1], [])


@pytest.mark.long
@pytest.mark.fault(3, 4)
def test_kills_and_errors_at_system_calls_and_a_power_cut_lose_nothing():
    """A sample of the exhaustive pass in tests/soak."""
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", os.devnull, "true"], check=False).returncode:
        pytest.skip("strace is not installed or may not trace")
    program = [sys.executable, "-m", "tests.soak.commit_soak", "--sample", "18", "--seed", "3"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    soaked = json.loads(done.stdout.splitlines()[-1])
    assert (soaked["failures"], soaked["tried"]) == ([], 18)
    assert soaked["points"] > 600
    power_loss = soaked["power_loss"]
    assert (power_loss.pop("files"), power_loss.pop("folders")) == (4, 2)
    assert all(power_loss.values())

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import xxhash

from megatoken.checkpoint import manifest, store
from megatoken.errors import Exit, Fault

SOAK = Path(__file__).parents[1] / "soak" / "commit_soak.py"


def commit(root: Path, step: int, **changes: object) -> Path:
    contents = {"weights.bin": bytes([step % 251]) * 5000, "tokenizer/vocab.json": b'{"a": %d}' % step}
    writers = {name: partial(Path.write_bytes, data=data) for name, data in contents.items()}
    return store.commit(root, step, writers, meta={"tokens": step * 100}, **changes)  # type: ignore[arg-type]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(root: Path) -> tuple[int | None, list[str]]:
    told: list[str] = []
    found = store.newest_valid(root, lambda folder, fault: told.append(f"{folder.name}: {fault}"))
    return (found[1].step if found else None), told


def test_a_commit_is_a_folder_with_every_file_and_its_hash(tmp_path: Path) -> None:
    folder = commit(tmp_path / "run" / "checkpoints", 7)
    assert folder == tmp_path / "run" / "checkpoints" / "step-00000007"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-00000007"]
    written = json.loads((folder / "manifest.json").read_text())
    assert list(written) == ["format", "step", "meta", "files", "xxh3"]
    assert (written["format"], written["step"], written["meta"]) == (1, 7, {"tokens": 700})
    assert written["files"] == {
        "weights.bin": {"bytes": 5000, "xxh3_128": xxhash.xxh3_128_hexdigest(b"\x07" * 5000)},
        "tokenizer/vocab.json": {"bytes": 8, "xxh3_128": xxhash.xxh3_128_hexdigest(b'{"a": 7}')},
    }
    found = store.verify(folder)
    assert (found.step, found.meta) == (7, {"tokens": 700})
    assert found.files["weights.bin"] == manifest.Stored(5000, xxhash.xxh3_128_hexdigest(b"\x07" * 5000))
    assert newest(folder.parent) == (7, [])


def test_only_committed_names_count(tmp_path: Path) -> None:
    assert store.steps(tmp_path / "nothing") == []
    for step in (30, 5, 123456789):
        commit(tmp_path, step)
    for name in ("step-10", "step-00000040.bak", "xstep-00000040", ".tmp-step-00000040-ab", "step-000000050"):
        shutil.copytree(tmp_path / "step-00000005", tmp_path / name)
    (tmp_path / "step-00000060").write_text("a file")
    (tmp_path / "step-00000070").symlink_to(tmp_path / "step-00000005")
    assert store.steps(tmp_path) == [5, 30, 123456789]


def test_a_valid_checkpoint_is_left_as_it_is_and_an_invalid_one_is_replaced(tmp_path: Path) -> None:
    folder = commit(tmp_path, 3)
    inode = folder.stat().st_ino
    assert commit(tmp_path, 3) == folder
    assert folder.stat().st_ino == inode
    flip(folder / "weights.bin", 9)
    commit(tmp_path, 3)
    assert folder.stat().st_ino != inode
    assert store.verify(folder).step == 3
    assert listing(tmp_path) == ["step-00000003"]
    shutil.rmtree(folder)
    folder.mkdir()
    commit(tmp_path, 3)
    assert store.verify(folder).step == 3


def test_files_are_as_readable_as_the_folder(tmp_path: Path) -> None:
    def private(path: Path) -> None:
        path.write_bytes(b"x")
        path.chmod(0o600)

    folder = store.commit(tmp_path, 1, {"a": private}, meta={})
    assert (folder / "a").stat().st_mode & 0o777 == (folder / "manifest.json").stat().st_mode & 0o777


def test_every_flipped_bit_is_found_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    folder = commit(tmp_path, 20)
    choose = random.Random(4)
    for name in ("weights.bin", "tokenizer/vocab.json", "manifest.json"):
        bits = range((folder / name).stat().st_size * 8)
        for bit in choose.sample(bits, 70 if len(bits) > 70 else len(bits)):
            flip(folder / name, bit)
            step, told = newest(tmp_path)
            assert step == 10
            assert len(told) == 1
            assert str(folder / name) in told[0]
            flip(folder / name, bit)
            assert newest(tmp_path) == (20, [])


def test_prune_keeps_the_last_the_multiples_and_whatever_it_needs(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20, 25, 30):
        commit(tmp_path, step)
    gone = store.prune(tmp_path, keep_last=2, keep_every=20)
    assert [folder.name for folder in gone] == ["step-00000005", "step-00000010", "step-00000015"]
    assert store.steps(tmp_path) == [20, 25, 30]
    assert store.prune(tmp_path, keep_last=2, keep_every=20) == []
    store.prune(tmp_path, keep_last=0, keep_every=0)
    assert store.steps(tmp_path) == [30]
    assert listing(tmp_path) == ["step-00000030"]


def test_prune_counts_only_what_verifies(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        commit(tmp_path, step)
    flip(tmp_path / "step-00000005" / "weights.bin", 3)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "step-00000002")
    store.prune(tmp_path, keep_last=1, keep_every=0)
    assert store.steps(tmp_path) == [3, 4, 5]
    assert newest(tmp_path)[0] == 3
    for folder in tmp_path.glob("step-*/weights.bin"):
        flip(folder, 8)
    store.prune(tmp_path, keep_last=1, keep_every=0)
    assert store.steps(tmp_path) == [3, 4, 5]


def test_prune_hashes_nothing_twice(tmp_path: Path) -> None:
    for step in range(1, 7):
        commit(tmp_path, step)
    path = tmp_path / "step-00000006" / "weights.bin"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # for prune to notice, it would have to read
    store.prune(tmp_path, keep_last=2, keep_every=0)
    assert store.steps(tmp_path) == [5, 6]
    os.utime(path)
    commit(tmp_path, 4)
    store.prune(tmp_path, keep_last=1, keep_every=0)
    assert store.steps(tmp_path) == [5, 6]


def test_sweep_removes_what_killed_runs_left(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    (tmp_path / ".tmp-step-00000002-ab" / "tokenizer").mkdir(parents=True)
    (tmp_path / ".tmp-step-00000002-ab" / "tokenizer" / "x").write_text("x")
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "step-00000001")
    assert [path.name for path in store.sweep(tmp_path)] == [".tmp-link", ".tmp-step-00000002-ab"]
    assert listing(tmp_path) == ["step-00000001"]
    assert newest(tmp_path) == (1, [])
    assert store.sweep(tmp_path / "nothing") == []


def test_lack_of_space_is_foreseen(tmp_path: Path) -> None:
    with pytest.raises(
        Fault, match=r"no room for .* step 9: 1,125,899,906,842,624 bytes needed, [\d,]+ free"
    ) as caught:
        commit(tmp_path, 9, needed_bytes=2**50)
    assert caught.value.code == Exit.STORAGE
    assert str(tmp_path) in str(caught.value)
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error", "/somewhere"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_failing_writer_leaves_nothing_and_earlier_checkpoints(tmp_path: Path, failure: Exception) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise failure

    commit(tmp_path, 1)
    with pytest.raises(Fault, match=r"step 2 was not saved: .*, 10 bytes needed, [\d,]+ free — /") as caught:
        store.commit(tmp_path, 2, {"a": partial(Path.write_bytes, data=b"a"), "b": fail}, meta={}, needed_bytes=10)
    assert caught.value.code == Exit.STORAGE
    assert caught.value.__cause__ is failure
    assert listing(tmp_path) == ["step-00000001"]


def test_other_failures_pass_through_and_leave_nothing(tmp_path: Path) -> None:
    def interrupt(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    def two_files(path: Path) -> None:
        path.write_bytes(b"a")
        path.with_name("b").write_bytes(b"b")

    with pytest.raises(KeyboardInterrupt):
        store.commit(tmp_path, 2, {"a": interrupt}, meta={})
    with pytest.raises(ValueError, match="made other files than those named"):
        store.commit(tmp_path, 2, {"a": two_files}, meta={})
    with pytest.raises(ValueError, match="Out of range float"):
        store.commit(tmp_path, 2, {}, meta={"loss": float("nan")})
    assert listing(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("may not mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_and_a_read_only_disk(small_disk: Path) -> None:
    commit(small_disk, 1)
    big = {"big": partial(Path.write_bytes, data=b"x" * 100_000)}
    with pytest.raises(Fault, match=r"No space left on device, 0 bytes needed, [\d,]+ free") as caught:
        store.commit(small_disk, 2, big, meta={})
    assert caught.value.code == Exit.STORAGE
    assert listing(small_disk) == ["step-00000001"]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(Fault, match="Read-only file system") as caught:
        commit(small_disk, 3)
    assert caught.value.code == Exit.STORAGE
    assert newest(small_disk) == (1, [])


def test_a_reader_beside_a_writer_that_prunes_gets_whole_checkpoints(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    ended = threading.Event()

    def write() -> None:
        for step in range(2, 60):
            commit(tmp_path, step)
            store.prune(tmp_path, keep_last=1, keep_every=0)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads, last = 0, 0
    while not ended.is_set():
        step, told = newest(tmp_path)
        assert told == []
        assert step is not None
        assert step >= last
        reads, last = reads + 1, step
    writer.join()
    assert reads > 5
    assert newest(tmp_path) == (59, [])


def test_the_protocol_needs_no_torch() -> None:
    code = "import sys, megatoken.checkpoint.store, megatoken.train.journal, megatoken.train.guard; "
    code += "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def soaked() -> dict[str, object]:
    """A sample of the exhaustive pass in tests/soak."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    if subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let strace trace")
    done = subprocess.run(
        [sys.executable, str(SOAK), "--sample", "18", "--flips", "100", "--seed", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(report, dict)
    return report


def test_kills_and_failures_at_system_calls_lose_nothing(soaked: dict[str, object]) -> None:
    assert soaked["failures"] == []
    assert soaked["tried"] == 18
    assert isinstance(soaked["points"], int)
    assert soaked["points"] > 300
    assert soaked["bit_flips"] == {"flips": 100, "found_named_and_passed_over": 100}


def test_a_power_cut_would_lose_nothing(soaked: dict[str, object]) -> None:
    assert soaked["power_loss"] == {
        "files": 4,
        "files_synced_before_rename": 4,
        "files_written_after_sync": 0,
        "folders": 2,
        "folders_synced_before_rename": 2,
        "manifest_synced_last_of_files": True,
        "folder_synced_after_manifest": True,
        "parent_synced_after_rename": True,
    }


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    code = (
        "import os, sys; from pathlib import Path; from megatoken.checkpoint import store\n"
        "def die(path): path.write_bytes(b'half'); os.kill(os.getpid(), 9)\n"
        "store.commit(Path(sys.argv[1]), 2, {'a': die}, meta={})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert newest(tmp_path) == (1, [])
    swept = store.sweep(tmp_path)
    assert len(swept) == 1
    assert listing(tmp_path) == ["step-00000001"]

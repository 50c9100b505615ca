"""The copy of a run at an address has complete checkpoints only, whenever an upload ends."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatoken.base.console import Console
from megatoken.base.errors import CheckpointError, ConfigError, StorageError
from megatoken.convert.hf.load import refuse_missing_path
from megatoken.store import objects
from megatoken.store.commit import list_steps, prune
from megatoken.store.live_mirror import Mirror
from megatoken.store.manifest import DamagedError, verify
from megatoken.store.mirror import (
    allow_rewind,
    check_owner,
    fetch_model,
    fetch_run,
    list_mirrored,
    update_mirror,
    verify_mirror,
)
from megatoken.store.objects import ObjectStore
from megatoken.store.run_folder import IDENTITY
from tests.store.test_commit import commit_small

KEEP = {"keep_last": 1, "keep_every": 0}


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty address in memory, or a local S3 server's where a test asks for it."""
    if getattr(request, "param", "memory") == "s3":
        yield request.getfixturevalue("s3") + "/run"
    else:
        yield f"memory://{uuid.uuid4().hex}/run"
        fsspec.filesystem("memory").store.clear()


def save(run: Path, step: int) -> Path:
    """Save a small checkpoint, and the run's small files of that step."""
    run.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "machine.json", "metrics.jsonl", "provenance.json"):
        (run / name).write_text(f"{name} of step {step}\n")
    return commit_small(run / "checkpoints", step)


def save_and_mirror(run: Path, address: str, *steps: int, **rules: Any) -> dict[str, Any]:
    """Return the result of the last upload."""
    for step in steps:
        save(run, step)
        result = update_mirror(run, address, **(KEEP | rules))
    return result


def open_mirror(run: Path, address: str, in_use: set[int], events: list[Any]) -> Mirror:
    """events: gets the values of each event."""

    def log(what, **values):
        events.append(values)

    return Mirror(run, address, lambda: KEEP, in_use, Console(quiet=True), log)


def test_only_complete_checkpoints_count_for_a_removal(address: str, tmp_path: Path):
    run, store = tmp_path / "run", ObjectStore(address)
    save_and_mirror(run, address, 10, 20, keep_last=2)
    store.remove("checkpoints/step-00000020/weights.bin")
    save_and_mirror(run, address, 30, keep_last=2)
    assert list_mirrored(store) == [10, 20, 30]
    store.write("checkpoints/step-00000030/manifest.json", b"{}")
    assert update_mirror(run, address, **KEEP)["uploaded"] == ["step-00000030"]
    assert list_mirrored(store) == [30]


@pytest.mark.parametrize("address", ["memory", "s3"], indirect=True)
def test_a_run_comes_back_from_its_copy(address: str, tmp_path: Path):
    run, other = tmp_path / "run", tmp_path / "other-machine/run"
    assert fetch_run(run, address, pytest.fail) is None
    result = save_and_mirror(run, address, 10)
    assert (result["uploaded"], result["bytes"]) == (["step-00000010"], 5000 + len('{"a": 10}'))
    assert update_mirror(run, address, **KEEP)["uploaded"] == []
    assert fetch_run(other, address, pytest.fail) == other / "checkpoints/step-00000010"
    for path in filter(Path.is_file, run.rglob("*")):
        assert (other / path.relative_to(run)).read_bytes() == path.read_bytes()
    assert fetch_run(other, address, pytest.fail) is None  # it has one
    save_and_mirror(other, address, 20)
    assert verify_mirror(ObjectStore(address)) == (1, [])
    for use in (partial(fetch_run, warn=pytest.fail), partial(update_mirror, **KEEP)):
        with pytest.raises(ConfigError):
            use(run, address)


def test_a_model_is_fetched_by_one_process_and_only_the_newest_stays(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    for step in (10, 20):
        save_and_mirror(tmp_path / "run", address, step, keep_last=2)
        with ThreadPoolExecutor(4) as threads:
            (folder,) = set(threads.map(fetch_model, 4 * [address], 4 * [pytest.fail]))
        assert folder.name == f"step-{step:08d}"
        assert list_steps(folder.parent) == [step]
    assert fetch_model(f"{address}/checkpoints/step-00000010", pytest.fail).name == "step-00000010"
    with pytest.raises(CheckpointError):
        fetch_model(address + "/other", pytest.fail)
    refuse_missing_path(address)


def test_a_run_that_went_back_takes_its_copy_along(address: str, tmp_path: Path):
    """A run is extended from before its decay; later checkpoints go once its newest is uploaded."""
    run = tmp_path / "run"
    save_and_mirror(run, address, 10, 20, 30)
    allow_rewind(run)
    for step in (20, 30):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    assert update_mirror(run, address, **KEEP)["uploaded"] == ["step-00000010"]
    assert list_mirrored(ObjectStore(address)) == [10]
    assert "rewound" not in (run / IDENTITY).read_text()


def test_removal_follows_the_rules_of_the_run_folder(address: str, tmp_path: Path):
    store, rules = ObjectStore(address), {"keep_last": 2, "keep_every": 40}
    for step in range(10, 130, 10):
        save(tmp_path, step)
        prune(tmp_path / "checkpoints", **rules)
        if step not in (30, 40):  # an upload that was interrupted
            update_mirror(tmp_path, address, best=20, **rules)
    assert list_steps(tmp_path / "checkpoints") == [40, 80, 110, 120]
    assert list_mirrored(store) == [20, 40, 80, 110, 120]
    assert len({name.split("/")[1] for name in store.list("checkpoints")}) == 5


# The second is of the right size.
DAMAGED = """\
{"weights.bin": null}
{"tokenizer/vocab.json": "123456789"}
{"weights.bin": "x"}
{"manifest.json": "{}"}
{"manifest.json": ""}
"""


@pytest.mark.parametrize("row", DAMAGED.splitlines())
def test_damage_there_is_named_and_the_one_before_is_used(row: str, address: str, tmp_path: Path):
    run, store, warnings = tmp_path / "run", ObjectStore(address), []
    save_and_mirror(run, address, 10, 20, keep_last=2)

    def damage(step):
        for name, content in json.loads(row).items():
            path = f"checkpoints/step-{step:08d}/{name}"
            store.remove(path) if content is None else store.write(path, content.encode())

    damage(20)
    folder = fetch_run(tmp_path / "new", address, warnings.append)
    assert folder == tmp_path / "new/checkpoints/step-00000010"
    (warning,) = warnings
    assert f"{address}/checkpoints/step-00000020/" in warning
    checked, errors = verify_mirror(store)
    assert (checked, len(errors)) == (2, 1)
    damage(10)
    with pytest.raises(CheckpointError):
        fetch_run(tmp_path / "newest", address, warnings.append)


class Killed(BaseException):
    """Raised in a call of the store, in place of the end of the process."""


def test_an_upload_that_ends_at_any_moment_leaves_a_whole_checkpoint(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Interrupt the upload in each change of the store, which is then half done."""
    run, call = tmp_path / "run", ObjectStore._call
    monkeypatch.setattr(objects, "THREADS", 1)
    save_and_mirror(run, address, 10)

    def count(self, verb, name, function, *args, **options):
        nonlocal left
        if verb not in ("write", "remove") or (left := left - 1) >= 0:
            return call(self, verb, name, function, *args, **options)
        if verb == "remove":
            for path in self._fs.find(args[0])[:1]:
                self._fs.rm_file(path)
        else:
            source, target = args if function == self._fs.put_file else args[::-1]
            content = source if isinstance(source, bytes) else Path(source).read_bytes()
            self._fs.pipe_file(target, content[: len(content) // 2])
        raise Killed

    # Small files, files of the checkpoint, its manifest, removals of the one before.
    moments = 4 + 2 + 1 + 2
    for moment in range(moments + 1):
        step, left = 20 + 10 * moment, moment
        save(run, step)
        ends = pytest.raises(Killed) if moment < moments else nullcontext()
        with monkeypatch.context() as patch, ends:
            patch.setattr(ObjectStore, "_call", count)
            update_mirror(run, address, **KEEP)
        found = fetch_run(tmp_path / f"new-{step}", address, lambda _line: None)
        assert verify(found).step in (step - 10, step)
        update_mirror(run, address, **KEEP)
        assert list_mirrored(ObjectStore(address)) == [step]
        shutil.rmtree(run / "checkpoints" / f"step-{step - 10:08d}")


def test_uploads_follow_one_another_in_a_process(tmp_path: Path):
    run, address = tmp_path / "run", f"file://{tmp_path}/mirror"
    save(run, 20)
    in_use, events = set(), []
    mirror = open_mirror(run, address, in_use, events)
    mirror({"kind": "start"})
    assert in_use == {20}
    mirror({"kind": "save"})  # another is wanted
    assert [mirror.report(wait=True), mirror.report(wait=True)] == [True, True]
    assert [event["uploaded"] for event in events] == [["step-00000020"]]
    assert in_use == set()
    assert not mirror.report()
    assert list_mirrored(ObjectStore(address)) == [20]


def test_failures_of_an_upload_are_told(tmp_path: Path, s3: str):
    events = []
    mirror = open_mirror(tmp_path, "s3://no-such-bucket/run", set(), events)
    mirror({"kind": "finish"})
    assert events == []  # there is nothing to upload
    folder = save(tmp_path, 10)
    mirror.start()
    assert not mirror.report(wait=True)
    assert "s3://no-such-bucket/run" in events[0]["message"]
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in json.dumps(events)
    (folder / "weights.bin").write_bytes(b"x")
    with pytest.raises(DamagedError):
        update_mirror(tmp_path, f"{s3}/run", **KEEP)
    assert list_mirrored(ObjectStore(f"{s3}/run")) == []


def test_what_a_store_changes_is_noticed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, call = tmp_path / "run", ObjectStore._call
    save(run, 10)

    def corrupt(self, verb, name, *args, **options):
        result = call(self, verb, name, *args, **options)
        if verb == "write" and name.endswith("weights.bin"):
            self._fs.store[args[2]].getbuffer()[7] ^= 1
        return result

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "_call", corrupt)
        with pytest.raises(StorageError):
            update_mirror(run, address, **KEEP)
    assert list_mirrored(ObjectStore(address)) == []
    update_mirror(run, address, **KEEP)
    assert list_mirrored(ObjectStore(address)) == [10]


def test_one_copy_is_of_one_run(address: str, tmp_path: Path):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    one.mkdir()
    check_owner(one, ObjectStore(address))
    save(two, 10)
    check_owner(two, ObjectStore(address))  # of a run that was lost before its first checkpoint
    assert (two / IDENTITY).read_bytes() == (one / IDENTITY).read_bytes()
    update_mirror(two, address, **KEEP)
    save(three, 30)
    for use in (partial(update_mirror, **KEEP), partial(fetch_run, warn=pytest.fail)):
        with pytest.raises(ConfigError):
            use(three, address)
    assert list_mirrored(ObjectStore(address)) == [10]

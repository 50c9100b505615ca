import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.checkpoint import manifest, store
from megatoken.errors import Exit, Fault


def commit(root: Path, step: int, **changes: object) -> Path:
    contents = {"weights.bin": bytes([step % 251]) * 5000, "tokenizer/vocab.json": b'{"a": %d}' % step}
    writers = {name: partial(Path.write_bytes, data=data) for name, data in contents.items()}
    return store.commit(root, step, writers, meta={"tokens": step * 100}, **changes)  # type: ignore[arg-type]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def refused(folder: Path) -> str:
    with pytest.raises(Fault) as caught:
        store.verify(folder)
    assert caught.value.code == Exit.CHECKPOINT
    assert "\n" not in str(caught.value)
    return str(caught.value)


def newest(root: Path) -> tuple[int | None, list[str]]:
    told: list[str] = []
    found = store.newest_valid(root, lambda folder, fault: told.append(f"{folder.name}: {fault}"))
    return (found[1].step if found else None), told


def reseal(folder: Path, change: dict[str, object]) -> None:
    """Forge a manifest: other content, right hash."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["xxh3"]
    body = json.dumps(content | change, indent=1).removesuffix("\n}").encode()
    seal = f',\n "xxh3": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'
    (folder / "manifest.json").write_bytes(body + seal.encode())


def test_a_wrong_hash_is_reported_with_both(tmp_path: Path) -> None:
    folder = commit(tmp_path, 20)
    flip(folder / "weights.bin", 0)
    actual = xxhash.xxh3_128_hexdigest(b"\x15" + b"\x14" * 4999)
    expected = xxhash.xxh3_128_hexdigest(b"\x14" * 5000)
    assert refused(folder) == (
        f"checkpoint is damaged: its xxh3-128 is {actual}, expected {expected} — {folder / 'weights.bin'} — "
        "an older checkpoint is used where there is one"
    )


def test_truncated_missing_extra_swapped_and_linked_files_are_named(tmp_path: Path) -> None:
    good = commit(tmp_path / "good", 20)
    other = commit(tmp_path / "good", 21)
    bad = tmp_path / "bad" / good.name

    def fresh() -> Path:
        shutil.rmtree(bad, ignore_errors=True)
        return Path(shutil.copytree(good, bad))

    (fresh() / "weights.bin").write_bytes(b"\x14" * 4999)
    assert f"it has 4,999 bytes, expected 5,000 — {bad / 'weights.bin'}" in refused(bad)
    (fresh() / "weights.bin").write_bytes(b"")
    assert "it has 0 bytes, expected 5,000" in refused(bad)
    (fresh() / "tokenizer" / "vocab.json").unlink()
    expected = xxhash.xxh3_128_hexdigest(b'{"a": 20}')
    assert f"it is missing, expected xxh3-128 {expected} — {bad / 'tokenizer' / 'vocab.json'}" in refused(bad)
    (fresh() / "tokenizer" / "more").write_text("")
    assert f"the manifest does not know it — {bad / 'tokenizer' / 'more'}" in refused(bad)
    shutil.copy(other / "weights.bin", fresh() / "weights.bin")
    assert str(bad / "weights.bin") in refused(bad)
    shutil.copy(other / "manifest.json", fresh() / "manifest.json")
    assert "it belongs to step 21, not to this folder" in refused(bad)
    (fresh() / "manifest.json").unlink()
    assert "it is missing, so this was never committed" in refused(bad)
    (fresh() / "manifest.json").write_bytes((good / "manifest.json").read_bytes()[:-1])
    assert "does not end with its own hash" in refused(bad)
    (fresh() / "weights.bin").unlink()
    (bad / "weights.bin").symlink_to(good / "weights.bin")
    assert "it is a link or a device" in refused(bad)
    (fresh() / "tokenizer" / "vocab.json").unlink()
    (bad / "tokenizer").rmdir()
    (bad / "tokenizer").symlink_to(good / "tokenizer")
    assert "it is a link or a device" in refused(bad)
    os.mkfifo(fresh() / "weights.bin.fifo")
    assert "it is a link or a device" in refused(bad)
    assert "no checkpoint here" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "a/../../b",
        "a//b",
        "./a",
        "",
        "a\\b",
        "C:x",
        "a\0b",
        "manifest.json",
        "a/",
        "x" * 1001,
    ],
)
def test_names_never_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a name for a file"):
        store.commit(tmp_path / "root", 1, {name: lambda path: None}, meta={})
    assert not (tmp_path / "root").exists()
    folder = commit(tmp_path, 1)
    (tmp_path / "outside").write_bytes(b"x")
    reseal(folder, {"files": {name: {"bytes": 1, "xxh3_128": xxhash.xxh3_128_hexdigest(b"x")}}})
    assert "it names a file outside the checkpoint" in refused(folder)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=20))
def test_any_accepted_name_stays_inside(name: str) -> None:
    if manifest.is_contained(name):
        resolved = Path(os.path.normpath(Path("/root/folder") / name))
        assert resolved.is_relative_to("/root/folder")
        assert resolved.relative_to("/root/folder").as_posix() == name


def test_another_format_is_refused_with_both_versions_and_never_overwritten(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    folder = commit(tmp_path, 20)
    reseal(folder, {"format": 2})
    before = (folder / "manifest.json").read_bytes()
    message = refused(folder)
    assert message.startswith(f"checkpoint has format 2, this megatoken reads format 1 — {folder} — ")
    with pytest.raises(store.OtherFormat):
        newest(tmp_path)
    with pytest.raises(store.OtherFormat):
        commit(tmp_path, 20)
    assert store.prune(tmp_path, keep_last=1, keep_every=0) == []
    assert (folder / "manifest.json").read_bytes() == before
    reseal(folder, {"format": 0})
    assert "format 0" in refused(folder)


def test_json_bombs_and_malformed_manifests_are_refused(tmp_path: Path) -> None:
    folder = commit(tmp_path, 1)
    path = folder / "manifest.json"

    def sealed(body: bytes) -> bytes:
        return body + b',\n "xxh3": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'

    path.write_bytes(b"[" * 17 * 2**20)
    assert "larger than 4,194,304 bytes" in refused(folder)
    path.write_bytes(sealed(b'{"format": ' + b"[" * 100_000))
    assert "it is not JSON (RecursionError)" in refused(folder)
    path.write_bytes(sealed(b'{"format": ' + b"9" * 100_000))
    assert "it is not JSON (ValueError)" in refused(folder)
    path.write_bytes(b"")
    assert "does not end with its own hash" in refused(folder)
    for change in ({"step": "1"}, {"meta": None}, {"files": []}):
        shutil.rmtree(folder)
        reseal(commit(tmp_path, 1), change)
        assert "missing or of the wrong type" in refused(folder)
    for entry in (None, {"bytes": -1, "xxh3_128": ""}, {"bytes": 5000}, {"bytes": "5000", "xxh3_128": ""}):
        shutil.rmtree(folder)
        reseal(commit(tmp_path, 1), {"files": {"weights.bin": entry}})
        assert "bytes or xxh3_128 of 'weights.bin'" in refused(folder)

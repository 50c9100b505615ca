import json
import os
import shutil
from pathlib import Path

import pytest
import xxhash

from megatoken.checkpoint.commit import prune, step_folder
from megatoken.checkpoint.manifest import MANIFEST, verify
from megatoken.errors import CheckpointError, ExitCode
from tests.checkpoint.test_commit import commit_small, flip_bit, newest_step
from tests.soak.flip_soak import soak, write_runs


def verify_error(folder: Path) -> str:
    """The message of the error that `verify` raises."""
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    assert caught.value.code == ExitCode.CHECKPOINT
    assert "\n" not in str(caught.value)
    return str(caught.value)


def forge_manifest(folder: Path, change: dict[str, object]) -> None:
    """Change a manifest's content and give it the right hash."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["xxh3"]
    body = json.dumps(content | change, indent=1).removesuffix("\n}").encode()
    seal = f',\n "xxh3": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'
    (folder / "manifest.json").write_bytes(body + seal.encode())


def test_a_wrong_hash_is_reported_with_the_expected_one(tmp_path: Path) -> None:
    folder = commit_small(tmp_path, 20)
    flip_bit(folder / "weights.bin", 0)
    actual = xxhash.xxh3_128_hexdigest(b"\x15" + b"\x14" * 4999)
    expected = xxhash.xxh3_128_hexdigest(b"\x14" * 5000)
    assert verify_error(folder) == (
        f"checkpoint is damaged: its xxh3-128 is {actual}, expected {expected} — {folder / 'weights.bin'} — "
        "an older checkpoint is used where there is one"
    )


@pytest.mark.fault(24)
def test_every_flipped_bit_in_checkpoints_and_data_is_found_and_named(tmp_path: Path) -> None:
    """A hundredth of `make soak`."""
    answer = soak(tmp_path, flips=90, clean=9, seed=1)
    assert answer["clean"] == {"loads": 9, "false_alarms": 0}
    assert answer["whole"] == answer["sharded"] == answer["data"] == {"flips": 30, "found": 30}


@pytest.mark.fault(25)
def test_every_file_cut_emptied_lengthened_missing_or_swapped_is_named(tmp_path: Path) -> None:
    for root in write_runs(tmp_path).values():
        newest, older = step_folder(root, 2), step_folder(root, 1)
        names = [*verify(newest).files, MANIFEST]
        contents = {name: (newest / name).read_bytes() for name in names}
        for name, other in zip(names, [*names[1:], names[0]], strict=True):
            data, before = contents[name], (older / name).read_bytes()
            for damage in (
                data[:-1],
                data[: len(data) // 2],
                b"",
                data + b"\0",
                contents[other],
                before,
                None,
            ):
                if damage == data:  # config.yaml and tokenizer are the same in both
                    continue
                (newest / name).unlink() if damage is None else (newest / name).write_bytes(damage)
                step, errors = newest_step(root)
                assert (step, len(errors), str(newest / name) in errors[0]) == (1, 1, True)
                (newest / name).write_bytes(data)
        for name in ("more", "tokenizer/more", "model-00009-of-00010.safetensors"):
            (newest / name).write_bytes(b"")
            step, errors = newest_step(root)
            assert (step, len(errors), str(newest / name) in errors[0]) == (1, 1, True)
            (newest / name).unlink()
        assert newest_step(root) == (2, [])


def test_truncated_missing_extra_swapped_and_linked_files_are_reported(tmp_path: Path) -> None:
    good = commit_small(tmp_path / "good", 20)
    other = commit_small(tmp_path / "good", 21)
    bad = tmp_path / "bad" / good.name

    def fresh() -> Path:
        shutil.rmtree(bad, ignore_errors=True)
        return Path(shutil.copytree(good, bad))

    (fresh() / "weights.bin").write_bytes(b"\x14" * 4999)
    assert f"it has 4,999 bytes, expected 5,000 — {bad / 'weights.bin'}" in verify_error(bad)
    (fresh() / "weights.bin").write_bytes(b"")
    assert "it has 0 bytes, expected 5,000" in verify_error(bad)
    (fresh() / "tokenizer" / "vocab.json").unlink()
    assert f"it is missing — {bad / 'tokenizer' / 'vocab.json'}" in verify_error(bad)
    (fresh() / "tokenizer" / "more").write_text("")
    assert f"it is not in the manifest — {bad / 'tokenizer' / 'more'}" in verify_error(bad)
    shutil.copy(other / "weights.bin", fresh() / "weights.bin")
    assert str(bad / "weights.bin") in verify_error(bad)
    shutil.copy(other / "manifest.json", fresh() / "manifest.json")
    assert "it belongs to step 21, not to this folder" in verify_error(bad)
    (fresh() / "manifest.json").unlink()
    assert "it is missing, so this was never committed" in verify_error(bad)
    (fresh() / "manifest.json").write_bytes((good / "manifest.json").read_bytes()[:-1])
    assert "does not end with its own hash" in verify_error(bad)
    (fresh() / "weights.bin").unlink()
    os.mkfifo(bad / "weights.bin")
    assert f"it is a link or a device, not a file — {bad / 'weights.bin'}" in verify_error(bad)
    for name, target in (
        ("weights.bin", "nowhere"),
        ("weights.bin", good / "weights.bin"),
        ("tokenizer", good),
    ):
        (fresh() / name).rename(tmp_path / f"moved {name} {target}".replace("/", ""))
        (bad / name).symlink_to(target)
        assert f"it is a link or a device, not a file — {bad / name}" in verify_error(bad)
    assert "no checkpoint here" in verify_error(tmp_path / "nowhere")


def test_a_manifest_that_names_files_outside_is_damaged(tmp_path: Path) -> None:
    folder = commit_small(tmp_path, 1)
    (tmp_path / "outside").write_bytes(b"x")
    for name in ("../outside", str(tmp_path / "outside"), "manifest.json", "", "a\0b"):
        content = {name: {"bytes": 1, "xxh3_128": xxhash.xxh3_128_hexdigest(b"x")}}
        forge_manifest(folder, {"files": content})
        assert "checkpoint is damaged" in verify_error(folder)


@pytest.mark.fault(26)
def test_another_format_is_refused_and_never_overwritten(tmp_path: Path) -> None:
    commit_small(tmp_path, 10)
    folder = commit_small(tmp_path, 20)
    forge_manifest(folder, {"format": 2})
    before = (folder / "manifest.json").read_bytes()
    message = verify_error(folder)
    assert message.startswith(
        f"checkpoint has format 2, this megatoken reads format 1 — {folder} — "
    )
    with pytest.raises(CheckpointError, match="checkpoint has format 2"):
        newest_step(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint has format 2"):
        commit_small(tmp_path, 20)
    assert prune(tmp_path, keep_last=1, keep_every=0) == []
    assert (folder / "manifest.json").read_bytes() == before
    forge_manifest(folder, {"format": 0})
    assert "format 0" in verify_error(folder)


def test_malformed_manifests_are_damaged(tmp_path: Path) -> None:
    folder = commit_small(tmp_path, 1)
    path = folder / "manifest.json"
    body = b'{"format": ' + b"9" * 100_000
    path.write_bytes(body + b',\n "xxh3": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n')
    assert "it is malformed: ValueError" in verify_error(folder)
    path.write_bytes(b"")
    assert "does not end with its own hash" in verify_error(folder)
    entries = [None, {"bytes": 5000}, {"bytes": "many", "xxh3_128": ""}]
    for change in (
        {"step": "x"},
        {"meta": None},
        {"files": []},
        *({"files": {"weights.bin": it}} for it in entries),
    ):
        shutil.rmtree(folder)
        forge_manifest(commit_small(tmp_path, 1), change)
        assert "it is malformed: " in verify_error(folder)
    shutil.rmtree(folder)
    forge_manifest(
        commit_small(tmp_path, 1), {"files": {"weights.bin": {"bytes": -1, "xxh3_128": ""}}}
    )
    assert "checkpoint is damaged" in verify_error(folder)

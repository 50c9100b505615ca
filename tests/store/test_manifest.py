import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import xxhash

from megatoken.base.errors import CheckpointError
from megatoken.base.system.sealed_json import seal
from megatoken.store.commit import prune, step_folder
from megatoken.store.manifest import MANIFEST, DamagedError, verify
from tests.soak.flip_soak import soak, write_runs
from tests.store.test_commit import commit_small, newest_step


def forge_manifest(folder: Path, change: dict[str, object]) -> None:
    """Change a manifest's content and give it the right hash."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["xxh3"]
    body = json.dumps(content | change, indent=1).removesuffix("\n}").encode()
    (folder / "manifest.json").write_bytes(seal(body, bits=128, indent=" "))


@pytest.mark.long
@pytest.mark.fault(24)
def test_every_flipped_bit_in_checkpoints_and_data_is_found_and_named(tmp_path: Path):
    """A hundredth of `make soak`."""
    result = soak(tmp_path, flips=90, clean=9, seed=1)
    assert result["clean"] == {"loads": 9, "false_alarms": 0}
    assert result["whole"] == result["sharded"] == result["data"] == {"flips": 30, "found": 30}


@pytest.mark.long
@pytest.mark.fault(25)
def test_every_file_cut_emptied_lengthened_missing_or_swapped_is_named(tmp_path: Path):
    for root in write_runs(tmp_path).values():
        newest, older = step_folder(root, 2), step_folder(root, 1)

        def assert_named(path, root=root):
            step, errors = newest_step(root)
            assert (step, len(errors), str(path) in errors[0]) == (1, 1, True)

        contents = {
            name: (newest / name).read_bytes() for name in [*verify(newest).files, MANIFEST]
        }
        names = list(contents)
        for name, other in zip(names, names[1:] + names[:1], strict=True):
            path, data = newest / name, contents[name]
            damages = [data[:-1], data[: len(data) // 2], b"", data + b"\0", contents[other], None]
            for damage in (*damages, (older / name).read_bytes()):
                if damage == data:  # config.yaml and tokenizer are the same in both
                    continue
                path.unlink() if damage is None else path.write_bytes(damage)
                assert_named(path)
                path.write_bytes(data)
        for name in ("more", "tokenizer/more", "model-00009-of-00010.safetensors"):
            (newest / name).touch()
            assert_named(newest / name)
            (newest / name).unlink()
        assert newest_step(root) == (2, [])


def test_links_devices_and_manifests_of_other_steps_are_damage(tmp_path: Path):
    good, other = (commit_small(tmp_path / "good", step) for step in (20, 21))
    bad = tmp_path / "bad" / good.name
    for name, target in (
        ("weights.bin", None),
        ("weights.bin", "nowhere"),
        ("weights.bin", good / "weights.bin"),
        ("tokenizer", good / "tokenizer"),
    ):
        shutil.copytree(good, bad)
        (bad / name).rename(bad.parent / "moved")
        os.mkfifo(bad / name) if target is None else (bad / name).symlink_to(target)
        with pytest.raises(DamagedError):
            verify(bad)
        shutil.rmtree(bad.parent)
    with pytest.raises(DamagedError):
        verify(bad)  # nowhere
    shutil.copytree(other, bad)
    with pytest.raises(DamagedError):
        verify(bad)


# ENTRY: of a file that is outside.
MALFORMED = r"""
{"step": "x"}
{"meta": null}
{"files": []}
{"files": {"weights.bin": null}}
{"files": {"weights.bin": {"bytes": 5000}}}
{"files": {"weights.bin": {"bytes": "many", "xxh3_128": "HASH"}}}
{"files": {"weights.bin": {"bytes": -1, "xxh3_128": "HASH"}}}
{"files": {"../outside": ENTRY}}
{"files": {"FOLDER/outside": ENTRY}}
{"files": {"manifest.json": ENTRY}}
{"files": {"": ENTRY}}
{"files": {"a\u0000b": ENTRY}}
"""


def test_manifests_that_are_malformed_or_name_files_outside_are_damaged(tmp_path: Path):
    folder = commit_small(tmp_path, 1)
    (tmp_path / "outside").write_bytes(b"x")
    rows = MALFORMED.replace("ENTRY", '{"bytes": 1, "xxh3_128": "HASH"}')
    rows = rows.replace("HASH", xxhash.xxh3_128_hexdigest(b"x")).replace("FOLDER", str(tmp_path))
    for row in rows.strip().splitlines():
        forge_manifest(folder, json.loads(row))
        with pytest.raises(DamagedError):
            verify(folder)


@pytest.mark.fault(26)
def test_another_format_is_refused_and_never_overwritten(tmp_path: Path):
    commit_small(tmp_path, 10)
    folder = commit_small(tmp_path, 20)
    forge_manifest(folder, {"format": 2})
    before = (folder / "manifest.json").read_bytes()
    for use in (
        partial(verify, folder),
        partial(newest_step, tmp_path),
        partial(commit_small, tmp_path, 20),
    ):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert type(caught.value) is CheckpointError
    assert prune(tmp_path, keep_last=1, keep_every=0) == []
    assert (folder / "manifest.json").read_bytes() == before

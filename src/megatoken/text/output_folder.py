"""The output folder of a preparation: its lock, its progress, and the finished dataset.

`progress.json` records how much is durably written, so that a killed preparation can resume. The
manifest is written last; then `progress.json` is removed.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatoken.base.errors import DataError
from megatoken.base.system.atomic_write import MALFORMED, read_json, replace_file, storage_errors
from megatoken.base.system.file_lock import LOCK, OWNER, lock_folder
from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import (
    INPUTS_NAME,
    MANIFEST_NAME,
    PROGRESS_NAME,
    SPLITS,
    Manifest,
    read_manifest,
    write_manifest,
)
from megatoken.text.corpus_reader import ReadPosition
from megatoken.text.sources import Source

_ANOTHER_OUT = "choose another --out or delete the folder"


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    """Summary of a prepared dataset."""

    tokens: int  # train and val
    documents: int
    shards: int
    seconds: float  # spent in this call
    train_tokens: int
    val_tokens: int
    tokenizer: dict[str, Any]  # name, vocab_size, eot, fingerprint
    counts: dict[str, int]  # from the manifest: empty, replaced and skipped documents, ...
    bytes: dict[str, dict[str, int]]  # per split: `Tokenizer.measure_text`
    skipped_files: dict[str, int]  # in the source, by extension or reason
    resumed: bool  # an earlier call was interrupted
    unchanged: bool  # the dataset existed already


@dataclass
class ResumeState:
    """Content of `progress.json`. Everything before `position` in the corpus is durably written."""

    recipe: dict[str, Any]  # everything that decides the bytes of the result
    listing: str  # digest of the inputs with their modification times
    position: ReadPosition = ReadPosition()
    counts: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


def describe_source(source: Source) -> dict[str, Any]:
    """Return the entries of `ResumeState.recipe` that identify the input files."""
    return {
        "source": source.name,
        "files": len(source.files),
        "bytes": source.size_bytes,
        "inputs": source.digest(times=False),
    }


@contextmanager
def hold_lock(out: Path) -> Iterator[None]:
    """Create the folder, lock it, and remove temporary files of a killed preparation.

    Raises StorageError if another process holds the lock.
    """
    with lock_folder(out, "preparation"):
        with storage_errors(out):
            for path in (*out.glob(".*.tmp"), *out.glob("tokenizer/.*.tmp")):
                path.unlink()
        try:
            yield
        finally:
            with suppress(OSError):
                (out / LOCK).unlink()


def find_finished(out: Path, recipe: dict[str, Any], source: Source) -> Manifest | None:
    """Return the manifest if the folder holds a finished dataset, else None.

    Raises DataError if the dataset was made with other settings, or if its inputs have changed.
    """
    if not (out / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(out)
    _check_recipe(out, manifest.source, recipe)
    with suppress(OSError):
        listing = (out / INPUTS_NAME).read_text().strip()
        if listing != source.digest(times=True):
            raise DataError("an input changed after it was prepared", out, _ANOTHER_OUT)
    load_dataset(out)  # checks headers and sizes of the shards
    for name in (PROGRESS_NAME, LOCK, OWNER):  # left if killed after writing the manifest
        with suppress(OSError):
            (out / name).unlink()
    return manifest


def start_or_resume(out: Path, new: ResumeState) -> tuple[ResumeState, bool]:
    """Return the state to start from, and whether it resumes an interrupted preparation.

    Raises DataError if `out` holds unrelated data, or tokens made with other settings or from
    inputs that have changed since.
    """
    saved = _load_state(out)
    if saved and any(saved.tokens.values()):
        _check_recipe(out, saved.recipe, new.recipe)
        if saved.listing != new.listing:
            raise DataError("an input changed since this preparation began", out, _ANOTHER_OUT)
    if saved and (saved.recipe, saved.listing) == (new.recipe, new.listing):
        return saved, True
    if saved:  # another recipe that has not written any tokens
        shutil.rmtree(out / "tokenizer", ignore_errors=True)
        for path in out.glob("*.marks"):
            path.unlink()
    elif any([*out.glob("*.bin"), *out.glob("*.npy"), *out.glob("tokenizer")]):
        raise DataError("the output folder holds other data", out, _ANOTHER_OUT)
    with storage_errors(out):
        save_state(out, new)
    return new, False


def save_state(out: Path, state: ResumeState) -> None:
    """Write `progress.json` durably. Raises OSError."""
    replace_file(out / PROGRESS_NAME, json.dumps(vars(state)), durable=True)


def finish_dataset(out: Path, manifest: Manifest, state: ResumeState) -> None:
    """Write the manifest and remove `progress.json`. Raises OSError."""
    replace_file(out / INPUTS_NAME, state.listing + "\n", durable=True)
    write_manifest(out, manifest)
    (out / PROGRESS_NAME).unlink()


def summarize(
    manifest: Manifest,
    started: float,
    source: Source,
    *,
    resumed: bool = False,
    unchanged: bool = False,
) -> PrepareResult:
    """Return the result of a preparation that began at `started` (time.monotonic)."""
    train, val = (manifest.tokens(split) for split in SPLITS)
    return PrepareResult(
        tokens=train + val,
        documents=sum(manifest.documents.values()),
        shards=len(manifest.shards),
        seconds=time.monotonic() - started,
        train_tokens=train,
        val_tokens=val,
        tokenizer=manifest.tokenizer,
        counts=manifest.source["counts"],
        bytes=manifest.bytes,
        skipped_files=dict(source.skipped),
        resumed=resumed,
        unchanged=unchanged,
    )


def _check_recipe(out: Path, saved: dict[str, Any], recipe: dict[str, Any]) -> None:
    for key, value in recipe.items():
        if saved.get(key) != value:
            what = f"this folder was prepared with {key} {saved.get(key)}, now it is {value}"
            raise DataError(what, out, _ANOTHER_OUT)


def _load_state(out: Path) -> ResumeState | None:
    path = out / PROGRESS_NAME
    if not path.exists():
        return None
    try:
        row = read_json(path)
        row["position"] = ReadPosition(*row["position"])
        row["counts"] = Counter(row["counts"])
        return ResumeState(**row)
    except (OSError, *MALFORMED) as error:
        raise DataError(f"cannot read the progress: {error!s:.200}", path, _ANOTHER_OUT) from error

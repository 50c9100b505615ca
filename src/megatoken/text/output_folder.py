"""The output folder of a preparation: its lock, its progress, and the finished dataset.

`progress.json` records how much is durably written, so that a killed preparation can resume. The
manifest is written last; then `progress.json` is removed.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.atomic_write import MALFORMED, read_json, replace_file, storage_errors
from megatoken.base.system.file_lock import LOCK, OWNER, lock_folder
from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import (
    INPUTS_NAME,
    MANIFEST_NAME,
    PROGRESS_NAME,
    SPLITS,
    Manifest,
    hash_bytes,
    read_manifest,
    write_manifest,
)
from megatoken.text.corpus_reader import ReadPosition
from megatoken.text.documents import Invalid, token_dtype
from megatoken.text.shard_writer import ShardWriter
from megatoken.text.sources import Source
from megatoken.text.tokenizer import Tokenizer

MAX_SHARD_TOKENS = 2**31 - 1  # llm.c stores the count as an int32
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
    skipped_files: dict[str, int] = field(default_factory=dict)  # by extension or reason
    resumed: bool = False  # an earlier call was interrupted
    unchanged: bool = False  # the dataset existed already


@dataclass
class ResumeState:
    """Content of `progress.json`. Everything before `position` in the corpus is durably written."""

    recipe: dict[str, Any]  # everything that decides the bytes of the result
    listing: str  # digest of the inputs with their modification times
    position: ReadPosition = ReadPosition()
    counts: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


@dataclass
class DatasetWriter:
    """Writes the tokenizer and the splits of a dataset, starting where `state` ends."""

    out: Path
    state: ResumeState
    tokenizer: Tokenizer
    shard_tokens: int

    def __post_init__(self) -> None:
        self.files_beside: dict[str, str] = {}  # hash by name
        self.tokenizer.vocabulary.save(self.out / "tokenizer")
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        shape = self.dtype, self.shard_tokens, self.tokenizer.fingerprint
        self.splits = {
            split: ShardWriter(self.out, split, *shape, self.state.tokens[split])
            for split in SPLITS
        }

    def write_beside(self, name: str, data: bytes) -> None:
        """Durably write a file whose hash the manifest records. Raises OSError."""
        replace_file(self.out / name, data, durable=True)
        self.files_beside[name] = hash_bytes(data)

    def save(self) -> None:
        """Write all tokens and the state durably. Raises OSError."""
        for split, writer in self.splits.items():
            writer.sync()
            self.state.tokens[split] = writer.tokens
        _save_state(self.out, self.state)

    def finish(self, documents: dict[str, int], source: dict[str, Any], **sizes: Any) -> Manifest:
        """Close the last shards and return the manifest. source: added to the recipe."""
        return Manifest(
            tokenizer=self.tokenizer.vocabulary.describe(),
            dtype=self.dtype,
            documents=documents,
            shards=tuple(shard for writer in self.splits.values() for shard in writer.finish()),
            source=self.state.recipe | source,
            **sizes,
        )

    def close(self) -> None:
        """Close the shard files."""
        for writer in self.splits.values():
            writer.close()


def make_dataset(
    out: Path, source: Source, recipe: dict[str, Any], write: Callable[[ResumeState], Manifest]
) -> PrepareResult:
    """Return the dataset in `out`; if it is not finished, `write` it, starting from a state.

    recipe: what decides the bytes of the result, besides the source. Raises ConfigError for a bad
    setting, DataError if `out` holds something else, and StorageError if the disk fails.
    """
    started = time.monotonic()
    for name, is_valid in {
        "val_fraction": 0 <= recipe["val_fraction"] < 1,
        "shard_tokens": 1 <= recipe["shard_tokens"] <= MAX_SHARD_TOKENS,
        "invalid": recipe["invalid"] in get_args(Invalid),
    }.items():
        if not is_valid:
            raise ConfigError(f"{name} is out of range", name, "see megatoken prepare --help")
    recipe = {
        "source": source.name,
        "files": len(source.files),
        "bytes": source.size_bytes,
        "inputs": source.digest(times=False),
    } | recipe
    is_resumed = False
    finished = _find_finished(out, recipe, source)  # before the lock: it may be read-only
    if finished:
        manifest = finished
    else:
        with hold_lock(out), storage_errors(out):
            new = ResumeState(recipe, source.digest(times=True))
            state, is_resumed = _start_or_resume(out, new)
            manifest = write(state)
            replace_file(out / INPUTS_NAME, state.listing + "\n", durable=True)
            write_manifest(out, manifest)
            (out / PROGRESS_NAME).unlink()
    return summarize(
        manifest,
        started=started,
        shards=len([*out.rglob("*.bin")]),  # also those of parts
        skipped_files=dict(source.skipped),
        resumed=is_resumed,
        unchanged=bool(finished),
    )


def summarize(manifest: Manifest, *, started: float, **values: Any) -> PrepareResult:
    """Return the summary of a dataset. values: fields that its manifest does not have."""
    train, val = (manifest.tokens(split) for split in SPLITS)
    return PrepareResult(
        tokens=train + val,
        documents=sum(manifest.documents.values()),
        seconds=time.monotonic() - started,
        train_tokens=train,
        val_tokens=val,
        tokenizer=manifest.tokenizer,
        counts=manifest.source["counts"],
        bytes=manifest.bytes,
        **values,
    )


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


def _find_finished(out: Path, recipe: dict[str, Any], source: Source) -> Manifest | None:
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
    dataset = load_dataset(out)
    for file in (*dataset.train.files, *dataset.val.files):
        _ = file.opened  # checks its header and size
    for name in (PROGRESS_NAME, LOCK, OWNER):  # left if killed after writing the manifest
        with suppress(OSError):
            (out / name).unlink()
    return manifest


def _start_or_resume(out: Path, new: ResumeState) -> tuple[ResumeState, bool]:
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
    _save_state(out, new)
    return new, False


def _save_state(out: Path, state: ResumeState) -> None:
    """Write `progress.json` durably. Raises OSError."""
    replace_file(out / PROGRESS_NAME, json.dumps(vars(state)), durable=True)


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

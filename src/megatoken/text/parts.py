"""Prepare a corpus in parts, on any number of machines, and join them.

A part is a dataset of consecutive files of the corpus. The division depends only on the names and
sizes of the files, so the result does not depend on which machine prepares which parts, or when.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatoken.base.errors import DataError
from megatoken.base.system.atomic_write import storage_errors
from megatoken.data.shard_format import (
    MANIFEST_NAME,
    SPLITS,
    Manifest,
    Part,
    hash_bytes,
    read_manifest,
    write_manifest,
)
from megatoken.text.documents import PrepareOptions
from megatoken.text.output_folder import PrepareResult, hold_lock, summarize
from megatoken.text.prepare import CorpusPart, OnProgress, sample
from megatoken.text.sources import File, Source
from megatoken.text.tokenizer import load_tokenizer

PART_BYTES = 10**9  # of input files, at least
MOST_PARTS = 512
OF_ONE_PART = ("part", "files", "bytes", "inputs", "counts")  # keys of `Manifest.source`


def divide(corpus: Source) -> list[tuple[str, Source, CorpusPart]]:
    """Return the name, the files and the number of each part.

    Parts have about PART_BYTES, or more if there would be over MOST_PARTS.
    """
    least = max(PART_BYTES, corpus.size_bytes / MOST_PARTS)
    groups: list[list[File]] = [[]]
    size = 0
    for file in corpus.files:
        if size >= least:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [
        (
            name_part(number),
            replace(corpus, files=tuple(files), skipped={}),
            CorpusPart(number, len(groups), corpus),
        )
        for number, files in enumerate(groups, start=1)
    ]


def name_part(number: int) -> str:
    """Return the name of a part's folder."""
    return f"part-{number:05d}"


def train_tokenizer(
    corpus: Source, out: Path, spec: str, text_key: str, on_progress: OnProgress
) -> None:
    """Train bpe:N on a sample of the corpus, and save it where `join_parts` does."""
    options = PrepareOptions(text_key=text_key)
    trained = load_tokenizer(spec, lambda: sample(corpus, options, on_progress))
    with hold_lock(out), storage_errors(out):
        trained.vocabulary.save(out / "tokenizer")


def join_parts(folder: Path, out: Path | str) -> PrepareResult:
    """Write the manifest and the tokenizer of a dataset whose parts are in `folder`.

    Reads only the manifests of the parts and the tokenizer of the first. out: where the parts are,
    for messages. Raises DataError if a part is missing or was prepared with other settings, or if
    a split is empty, and StorageError.
    """
    started = time.monotonic()
    folders = sorted(path.parent for path in folder.glob(f"part-*/{MANIFEST_NAME}"))
    made = {path.name: read_manifest(path) for path in folders}
    made = {name: manifest for name, manifest in made.items() if "parts" in manifest.source}
    if not made:
        fix = "run megatoken prepare SOURCE --part I/N --out OUT on each of N machines"
        raise DataError("no parts here", str(out), fix)
    total = max(manifest.source["parts"] for manifest in made.values())
    if (folder / MANIFEST_NAME).exists() and read_manifest(folder).shards:
        raise DataError("the folder holds another dataset", str(out), "choose another --out")
    names = list(map(name_part, range(1, total + 1)))
    for number, name in enumerate(names, start=1):
        fix = f"run megatoken prepare SOURCE --part {number}/{total} --out {out}"
        if name not in made:
            raise DataError(f"{name} of {total:,} is not finished", str(out), fix)
        first, other = (_describe(made[each]) for each in (names[0], name))
        for key in first:
            if first[key] != other.get(key):
                what = f"{name} has {key} {other.get(key)}, {names[0]} has {first[key]}"
                fix = f"delete {name}, then {fix}"
                if key == "corpus":
                    what = f"the source changed between {names[0]} and {name}"
                    fix = "delete the parts of the earlier one, and prepare them again"
                raise DataError(what, str(out), fix)
    manifest = _join(folder, {name: made[name] for name in names})
    for split in SPLITS if manifest.source["val_fraction"] else SPLITS[:1]:
        if not manifest.tokens(split):
            fix = "name validation files by --val, or prepare it without --part"
            raise DataError(f"no document is in {split}", str(out), fix)
    with hold_lock(folder), storage_errors(folder):
        load_tokenizer(str(folder / names[0])).vocabulary.save(folder / "tokenizer")
        write_manifest(folder, manifest)
    shards = sum(len(made[name].shards) for name in names)
    return summarize(manifest, started=started, shards=shards)


def _describe(manifest: Manifest) -> dict[str, Any]:
    """Return the part of `Manifest.source` that all parts have in common."""
    return {key: each for key, each in manifest.source.items() if key not in OF_ONE_PART}


def _join(folder: Path, made: dict[str, Manifest]) -> Manifest:
    """Return the manifest of all parts. made: those of the parts, by name."""
    manifests = list(made.values())
    source = _describe(manifests[0])
    source |= {key: sum(each.source[key] for each in manifests) for key in ("files", "bytes")}
    source |= {
        "inputs": source.pop("corpus"),
        "counts": _add(each.source["counts"] for each in manifests),
    }
    parts = (
        Part(
            name=name,
            tokens={split: manifest.tokens(split) for split in SPLITS},
            hash=hash_bytes((folder / name / MANIFEST_NAME).read_bytes()),
        )
        for name, manifest in made.items()
    )
    return replace(
        manifests[0],
        documents=_add(each.documents for each in manifests),
        shards=(),
        source=source,
        bytes={split: _add(each.bytes[split] for each in manifests) for split in SPLITS},
        parts=tuple(parts),
    )


def _add(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    rows = list(counts)
    return {key: sum(row[key] for row in rows) for key in rows[0]}

"""Text that outgrows one machine: parts of a corpus prepared anywhere, then put together to the same bytes.

In: a corpus and a number of parts, later the finished parts. Out: the files of one part, later its tokens in order. A
part is a stretch of whole files with about an equal share of the bytes; it is prepared like any corpus, into a folder
of its own below the dataset's. Documents never span files and fall to train or val by their own hash, so the streams of
the parts, one after another, are the stream of the whole. Absent: starting processes (any engine does), and splitting
a file: one huge file is one part.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.data.shards import HEADER_BYTES, MANIFEST_NAME, Manifest, hash_blocks, read_manifest
from megatoken.data.sources import Source
from megatoken.errors import Exit, Fault

FOLDER = "parts"
_NAME = re.compile(r"(\d+)-of-(\d+)")


def name_part(number: int, of: int) -> Path:
    """Folder of a part, counted from 1, below the dataset's."""
    return Path(FOLDER) / f"{number:05d}-of-{of:05d}"


def take_part(corpus: Source, number: int, of: int) -> Source:
    """The files that begin in the `number`-th (from 1) of `of` equal stretches of the corpus; perhaps none."""
    total = max(1, corpus.size_bytes)
    starts = accumulate((file.size for file in corpus.files), initial=0)
    stretches = (min(start * of // total, of - 1) + 1 for start in starts)
    files = (file for file, stretch in zip(corpus.files, stretches, strict=False) if stretch == number)
    return replace(corpus, files=tuple(files))


def list_parts(out: Path) -> dict[Path, int]:
    """Folders of parts that were begun, in order, and of how many each is one."""
    named = {path: _NAME.fullmatch(path.name) for path in sorted((out / FOLDER).glob("*"))}
    return {path: int(match[2]) for path, match in named.items() if match}


def find_parts(out: Path) -> list[tuple[Path, Manifest]]:
    """All parts in order, where any was begun. Fault(Exit.DATA) unless every one of them is there and finished."""
    named = list_parts(out)
    if not named:
        return []
    counts = sorted(set(named.values()))
    if len(counts) > 1:
        what = f"parts of several divisions: {', '.join(map(str, counts))}"
        raise Fault(Exit.DATA, what, str(out / FOLDER), "delete those of all but one")
    of = counts[0]
    folders = [out / name_part(number, of) for number in range(1, of + 1)]
    missing = [str(n) for n, folder in enumerate(folders, start=1) if not (folder / MANIFEST_NAME).exists()]
    if missing:
        fix = f"prepare each with --part K/{of}, or delete the folder to prepare everything here"
        raise Fault(Exit.DATA, f"parts {', '.join(missing)} of {of} are not finished", str(out / FOLDER), fix)
    return [(folder, read_manifest(folder)) for folder in folders]


def read_part(folder: Path, manifest: Manifest, split: str) -> Iterator[NDArray[Any]]:
    """Ids of a part's split, a shard at a time. Fault(Exit.DATA) when one is not what was written."""
    for shard in manifest.shards:
        if shard.split == split:
            path = folder / shard.file
            try:
                ids = np.fromfile(path, dtype=np.dtype(manifest.dtype).newbyteorder("<"), offset=HEADER_BYTES)
            except OSError as error:
                what = f"cannot read: {error.strerror or error}"
                raise Fault(Exit.DATA, what, str(path), "prepare this part again") from error
            if len(ids) != shard.tokens or tuple(hash_blocks(ids.data)) != shard.blocks:
                fix = f"delete {folder} and prepare this part again"
                raise Fault(Exit.DATA, "a shard of this part is damaged", str(path), fix)
            yield ids

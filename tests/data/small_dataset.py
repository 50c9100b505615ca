"""Small prepared datasets, written with the functions of data/shard_format.py."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatoken.data.dataloader import DataLoader
from megatoken.data.shard_format import (
    SPLITS,
    Manifest,
    Part,
    Shard,
    hash_blocks,
    hash_bytes,
    make_header,
    read_manifest,
    write_manifest,
)
from megatoken.text.prepare import Progress

TOKENIZER = {"name": "bpe:500", "vocab_size": 500, "eot": 0, "fingerprint": "5a" * 32}


def write_dataset(
    folder: Path, sizes: dict[str, list[int]], dtype: str = "uint16", seed: int = 0
) -> dict[str, np.ndarray]:
    """Write shards of `sizes` tokens per split and a manifest; return each split's ids, joined."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shards, ids = [], {}
    for split, counts in sizes.items():
        parts = [rng.integers(0, TOKENIZER["vocab_size"], count).astype(dtype) for count in counts]
        ids[split] = np.concatenate([*parts, np.empty(0, dtype)])
        for number, part in enumerate(parts):
            header = make_header(len(part), dtype, TOKENIZER["fingerprint"])
            file = f"{split}_{number:06d}.bin"
            (folder / file).write_bytes(header + part.tobytes())
            hashes = hash_blocks(part).tobytes()
            shard = Shard(file=file, split=split, tokens=len(part), hash=hash_bytes(hashes))
            (folder / shard.hashes_file).write_bytes(hashes)
            shards.append(shard)
    documents = {split: len(counts) for split, counts in sizes.items()}
    source = {"files": 1, "policy": "replace"}
    contents = {"dtype": dtype, "documents": documents, "shards": tuple(shards), "source": source}
    write_manifest(folder, Manifest(tokenizer=TOKENIZER, **contents))
    return ids


def join_parts(folder: Path, names: Sequence[str]) -> None:
    """Write the manifest of a dataset whose parts are the datasets in folders below."""
    manifests = [read_manifest(folder / name) for name in names]
    parts = tuple(
        Part(
            name=name,
            tokens={split: manifest.tokens(split) for split in SPLITS},
            hash=hash_bytes((folder / name / "manifest.json").read_bytes()),
        )
        for name, manifest in zip(names, manifests, strict=True)
    )
    write_manifest(folder, replace(manifests[0], shards=(), parts=parts))


def write_external(path: Path, ids: np.ndarray) -> None:
    """Write one shard as llm.c (.bin, by dtype) or build-nanogpt (.npy) does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, ids)
    else:
        path.write_bytes(make_header(len(ids), str(ids.dtype), "") + ids.tobytes())


def list_windows(loader: DataLoader, step: int) -> np.ndarray:
    """Return the window numbers of a step, for all ranks."""
    return loader._order.windows(*loader._entries(step))


def stop_after(number: int) -> Callable[[Progress], None]:
    """Return a callback that interrupts a preparation like Ctrl-C after `count` chunks."""
    chunks_done = itertools.count(1)

    def interrupt(progress):
        if progress.stage == "tokens" and next(chunks_done) == number:
            raise KeyboardInterrupt

    return interrupt

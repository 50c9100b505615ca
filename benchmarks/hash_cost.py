"""Measure what hashing adds to saving and loading a checkpoint.

    python -m benchmarks.hash_cost --rounds 15

A GPT of 42 million parameters with its AdamW state, about 500 MB, is saved by `AsyncSave` and
loaded by `verify` and `restore_state`, from the page cache (warm) and from the disk (cold). The
same calls without hashing are interleaved. Prints one JSON line: median seconds with hashes, and
the median over rounds of 1 - without / with. The time of writes varies by more than that, so
`waits` reports the share of a save's time that is spent waiting for a hash after the file is
durable.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.store import commit, manifest
from megatoken.store.commit import discard
from megatoken.store.load import restore_state
from megatoken.store.manifest import read_manifest, verify
from megatoken.store.save import AsyncSave
from megatoken.train.state import Position
from tests.tiny_model import tiny_state

MODEL = ModelConfig(n_layer=12, n_head=8, d_model=512, d_ff=2048, vocab_size=8192, seq_len=256)


class NoHash:
    """Replaces xxh3_128 by a hash that computes nothing."""

    def update(self, block: memoryview) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def drop_pages(folder: Path) -> None:
    """Drop these files from the page cache."""
    os.sync()
    for path in folder.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def share_of_hashes(
    rounds: int, call: Callable[[bool], object], prepare: Callable[[], object]
) -> dict[str, float]:
    """Time a call with and without hashing, interleaved, each first in half of the rounds."""
    pairs = []
    for index in range(rounds):
        seconds = {}
        for is_hashing in (index % 2 == 0, index % 2 == 1):
            prepare()
            seconds[is_hashing] = seconds_of(lambda is_hashing=is_hashing: call(is_hashing))  # type: ignore[misc]
        pairs.append((seconds[True], seconds[False]))
    shares = sorted(1 - without / hashed for hashed, without in pairs)
    return {
        "seconds": round(statistics.median(hashed for hashed, _ in pairs), 4),
        "share": round(statistics.median(shares), 4),
        "share_quartiles": [
            round(share, 4) for share in (shares[rounds // 4], shares[-1 - rounds // 4])
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; a temporary one by default"
    )
    options = parser.parse_args()
    state = tiny_state(model_config=MODEL)
    state.position = Position(step=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        (root / "tokenizer").mkdir()
        (root / "config.yaml").touch()
        (root / "checkpoints").mkdir()

        waits: list[float] = []

        def save(is_hashing: bool) -> Path:
            config, tokenizer = root / "config.yaml", root / "tokenizer"
            ends: dict[str, dict[Path, float]] = {"hash_file": {}, "sync_file": {}}

            def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
                def run(path: Path, *rest: object) -> object:
                    result = call(path, *rest)
                    ends[name][path] = time.perf_counter()
                    return result

                return run

            with pytest.MonkeyPatch.context() as patch:
                for name in ends:
                    patch.setattr(commit, name, timed(name, getattr(commit, name)))
                if not is_hashing:
                    patch.setattr(commit, "hash_file", lambda *_: "")
                start = time.perf_counter()
                folder = AsyncSave(
                    root / "checkpoints", state, config=config, tokenizer=tokenizer, meta={}
                ).finish()
                seconds = time.perf_counter() - start
            late = [
                max(0.0, end - ends["sync_file"][path]) for path, end in ends["hash_file"].items()
            ]
            if is_hashing:
                waits.append(sum(late) / seconds)
            return folder

        def load(is_hashing: bool) -> None:
            with pytest.MonkeyPatch.context() as patch:
                verified = verify(folder, hashes=lambda name: not name.endswith(".safetensors"))
                if not is_hashing:
                    patch.setattr(manifest, "xxhash", SimpleNamespace(xxh3_128=NoHash))
                    verified = replace(
                        verified, files={name: replace(e, xxh3_128="") for name, e in files.items()}
                    )
                restore_state(folder, verified, state)

        saves = share_of_hashes(
            options.rounds, save, lambda: discard(root / "checkpoints" / "step-00000001")
        )
        discard(root / "checkpoints" / "step-00000001")
        folder = save(True)
        files = read_manifest(folder).files
        result = {
            "soak": "hash-cost",
            "bytes": sum(entry.bytes for entry in files.values()),
            "rounds": options.rounds,
            "threads": torch.get_num_threads(),
            "save": saves
            | {"waits": round(statistics.median(waits), 4), "longest_wait": round(max(waits), 4)},
            "load_warm": share_of_hashes(options.rounds, load, lambda: None),
            "load_cold": share_of_hashes(options.rounds, load, lambda: drop_pages(folder)),
        }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

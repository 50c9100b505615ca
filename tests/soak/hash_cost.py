"""What hashing adds to a save and to a load of a checkpoint, which do the same without it in turns.

    python -m tests.soak.hash_cost --rounds 15

A GPT of 42 million parameters with its AdamW state, about 500 MB, on this disk: saved by `save_state`, loaded by
`verify` and `restore_state` into a built state, from the page cache (warm) and from the disk (cold: its pages are
dropped first). Prints one JSON line: medians of seconds with hashes, and of the share of them that hashing takes, which
is the median over rounds of 1 - without / with.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatoken.checkpoint import commit, manifest
from megatoken.checkpoint.commit import discard
from megatoken.checkpoint.load import restore_state
from megatoken.checkpoint.manifest import CheckpointManifest, read_manifest, verify
from megatoken.checkpoint.save import save_state
from megatoken.config.model_config import ModelConfig
from tests.tiny_model import tiny_state

MODEL = ModelConfig(n_layer=12, n_head=8, d_model=512, d_ff=2048, vocab_size=8192, seq_len=256)


def drop_pages(folder: Path) -> None:
    """Forget what the page cache holds of these files."""
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


def share_of_hashes(rounds: int, call: Callable[[bool], object], prepare: Callable[[], object]) -> dict[str, float]:
    """call: takes whether to hash. The two take turns, and turns in being the first."""
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
        "share_quartiles": [round(share, 4) for share in (shares[rounds // 4], shares[-1 - rounds // 4])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    options = parser.parse_args()
    state = tiny_state(model_config=MODEL)
    state.step = 1
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        (root / "tokenizer").mkdir()
        (root / "config.yaml").touch()
        (root / "checkpoints").mkdir()

        def save(is_hashing: bool) -> Path:
            with pytest.MonkeyPatch.context() as patch:
                if not is_hashing:
                    patch.setattr(commit, "hash_file", lambda _: "")
                config, tokenizer = root / "config.yaml", root / "tokenizer"
                return save_state(root / "checkpoints", state, config=config, tokenizer=tokenizer, meta={})

        def load(is_hashing: bool) -> None:
            restore_state(folder, read_whole(is_hashing), state)

        def read_whole(is_hashing: bool) -> CheckpointManifest:
            if is_hashing:
                return verify(folder)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(manifest, "hash_file", lambda path: files[path.name].xxh3_128)
                return verify(folder)

        saves = share_of_hashes(options.rounds, save, lambda: discard(root / "checkpoints" / "step-00000001"))
        discard(root / "checkpoints" / "step-00000001")
        folder = save(True)
        files = read_manifest(folder).files
        answer = {
            "soak": "hash-cost",
            "bytes": sum(entry.bytes for entry in files.values()),
            "rounds": options.rounds,
            "threads": torch.get_num_threads(),
            "save": saves,
            "load_warm": share_of_hashes(options.rounds, load, lambda: None),
            "load_cold": share_of_hashes(options.rounds, load, lambda: drop_pages(folder)),
        }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

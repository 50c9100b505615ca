"""Tokens/s of the loader on one core, from the page cache: `python tests/soak/loader_bench.py`.

Writes shards of random ids to a temporary folder, reads one epoch (with the checks of first touch) and part of
the next (without), for several sequence lengths, and ends in one JSON line.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from megatoken.data.dataset import open_dataset
from megatoken.data.loader import Loader
from megatoken.data.shards import Manifest, Shard, hash_block, hash_blocks, make_header, write_manifest


def write_dataset(folder: Path, n_shards: int, shard_tokens: int) -> None:
    """Shards of random uint16 ids below GPT-2's vocabulary, with their manifest."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(n_shards):
        header = make_header(shard_tokens, "uint16", "ab" * 32)
        ids = rng.integers(0, 50257, shard_tokens, dtype=np.uint16)
        name = f"train_{number:06d}.bin"
        (folder / name).write_bytes(header + ids.tobytes())
        rows.append(
            Shard(
                file=name, split="train", tokens=shard_tokens, blocks=tuple(hash_blocks(ids)), header=hash_block(header)
            )
        )
    tokenizer = {"name": "gpt2", "vocab_size": 50257, "eot": 50256, "fingerprint": "ab" * 32}
    manifest = Manifest(tokenizer=tokenizer, dtype="uint16", documents={"train": 1}, shards=tuple(rows), source={})
    write_manifest(folder, manifest)


def measure(folder: Path, seq_len: int, batch_tokens: int, repeats: int, budget_tokens: int) -> dict[str, float]:
    """Tokens/s of the first epoch (checks included) and of the next, median and extremes of `repeats`."""
    loader = Loader(open_dataset(folder).train, seq_len=seq_len, batch_seqs=batch_tokens // seq_len, seed=0)
    steps = int(loader.steps_per_epoch)
    began = time.perf_counter()
    for step in range(steps):
        loader.batch(step)
    first = steps * batch_tokens / (time.perf_counter() - began)
    speeds = []
    for repeat in range(repeats):
        count = max(1, min(steps, budget_tokens // batch_tokens))
        began = time.perf_counter()
        for step in range(count):
            loader.batch((repeat + 1) * steps + step)
        speeds.append(count * batch_tokens / (time.perf_counter() - began))
    return {
        "seq_len": seq_len,
        "batch_tokens": batch_tokens,
        "first_epoch": round(first),
        "median": round(statistics.median(speeds)),
        "min": round(min(speeds)),
        "max": round(max(speeds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--shard-tokens", type=int, default=25_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-tokens", type=int, default=50_000_000, help="tokens read a repeat")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder, options.shards, options.shard_tokens)
        rows = []
        for seq_len, batch_tokens in [
            (64, 1 << 19),
            (128, 1 << 19),
            (256, 1 << 19),
            (1024, 1 << 19),
            (64, 1 << 13),
            (256, 1 << 13),
            (1024, 1 << 13),
        ]:
            row = measure(folder, seq_len, batch_tokens, options.repeats, options.budget_tokens)
            print(row, flush=True)
            rows.append(row)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": 1, "numpy": np.__version__}
    print(
        json.dumps(
            {
                "benchmark": "loader",
                "unit": "tokens per second on one core",
                "shards": options.shards,
                "shard_tokens": options.shard_tokens,
                "repeats": options.repeats,
                "rows": rows,
                "machine": machine,
            }
        )
    )


if __name__ == "__main__":
    main()

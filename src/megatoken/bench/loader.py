"""bench loader: tokens/s of the loader on one core, from the page cache.

In: how many shards of which size. Out: for several lengths and batch sizes the speed of a first epoch, in which every
block is hashed and its ids are checked as it is touched, and of later ones, which only gather. The shards hold random
ids and live in a temporary folder. Absent: a disk that is slower than memory, several processes, the device.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.console import Console
from megatoken.data.dataset import open_dataset
from megatoken.data.loader import Loader
from megatoken.data.shards import Manifest, Shard, hash_block, hash_blocks, make_header, write_manifest
from megatoken.errors import Exit, Fault
from megatoken.presets import GPT2_VOCABULARY
from megatoken.timing import take_turns

# seq_len, batch_tokens: GPT-2's half a million tokens a step, and what a small model takes.
SIZES = ((64, 1 << 19), (128, 1 << 19), (256, 1 << 19), (1024, 1 << 19), (64, 1 << 13), (256, 1 << 13), (1024, 1 << 13))
FINGERPRINT = "ab" * 32  # of no tokenizer: nobody will read these ids


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Write the shards, time every size on one core. Raises Fault(CONFIG) when an epoch is less than one batch."""
    tokens, largest = options.shards * options.shard_tokens, max(batch_tokens for _, batch_tokens in SIZES)
    if tokens <= largest:
        what = f"{options.shards} shards of {options.shard_tokens:,} tokens hold less than a batch of {largest:,}"
        fix = f"give at least {largest // options.shards + 1}"
        raise Fault(Exit.CONFIG, what, "--shard-tokens", fix)
    with tempfile.TemporaryDirectory() as name, use_one_core():
        folder = Path(name)
        write_shards(folder, options.shards, options.shard_tokens)
        console.say(f"{tokens / 1e6:.4g} million tokens in {options.shards} shards; million tokens/s on one core")
        rows = measure(folder, SIZES, options.repeats, console)
    return {
        "unit": "tokens per second on one core",
        "shards": options.shards,
        "shard_tokens": options.shard_tokens,
        "rows": rows,
    }


def write_shards(folder: Path, n_shards: int, shard_tokens: int) -> None:
    """Shards of random uint16 ids below GPT-2's vocabulary, with their manifest: a dataset folder."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(n_shards):
        header = make_header(shard_tokens, "uint16", FINGERPRINT)
        ids = rng.integers(0, GPT2_VOCABULARY, shard_tokens, dtype=np.uint16)
        name = f"train_{number:06d}.bin"
        (folder / name).write_bytes(header + ids.tobytes())
        blocks = tuple(hash_blocks(ids))
        rows.append(Shard(file=name, split="train", tokens=shard_tokens, blocks=blocks, header=hash_block(header)))
    tokenizer = {
        "name": "gpt2",
        "vocab_size": GPT2_VOCABULARY,
        "eot": GPT2_VOCABULARY - 1,
        "fingerprint": FINGERPRINT,
    }
    manifest = Manifest(tokenizer=tokenizer, dtype="uint16", documents={"train": 1}, shards=tuple(rows), source={})
    write_manifest(folder, manifest)


def measure(folder: Path, sizes: Sequence[tuple[int, int]], repeats: int, console: Console) -> list[dict[str, Any]]:
    """One row for each (seq_len, batch_tokens) of `sizes`, printed as it comes."""
    console.say(f"{'seq_len':>7} {'batch':>8} {'first epoch':>12} {'later':>9} {'quartiles':>20}")
    rows = []
    for seq_len, batch_tokens in sizes:
        rates = measure_size(folder, seq_len, batch_tokens, repeats)
        first, later = rates["first_epoch"]["median"] / 1e6, rates["later_epochs"]
        quartiles = f"{later['low'] / 1e6:,.1f} to {later['high'] / 1e6:,.1f}"
        console.say(f"{seq_len:>7} {batch_tokens:>8} {first:>12,.1f} {later['median'] / 1e6:>9,.1f} {quartiles:>20}")
        rows.append({"seq_len": seq_len, "batch_tokens": batch_tokens, "tokens_per_second": rates})
    return rows


def measure_size(folder: Path, seq_len: int, batch_tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Tokens/s of the whole batches of a first epoch and of later ones, which take turns.

    Opening the dataset anew is what makes an epoch a first one; it counts.
    """
    seen = _open_loader(folder, seq_len, batch_tokens)
    steps = int(seen.steps_per_epoch)
    _read(seen, 0, math.ceil(seen.steps_per_epoch))  # touches every block
    epochs = count(1)
    turns = take_turns(
        {
            "first_epoch": lambda: _read(_open_loader(folder, seq_len, batch_tokens), 0, steps),
            "later_epochs": lambda: _read(seen, next(epochs) * (steps + 1), steps),
        },
        repeats=repeats,
    )
    return {name: timing.rate(steps * batch_tokens) for name, timing in turns.items()}


def _open_loader(folder: Path, seq_len: int, batch_tokens: int) -> Loader:
    return Loader(open_dataset(folder).train, seq_len=seq_len, batch_seqs=batch_tokens // seq_len, seed=0)


def _read(loader: Loader, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        loader.batch(step)


@contextmanager
def use_one_core() -> Iterator[None]:
    """Keep this thread on one core where the system allows it; the record counts the cores of before."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

"""`loader`, `scale` and `prepare`: how fast tokens are read, and how fast text becomes tokens."""

import argparse
import json
import resource
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatoken.base.config.presets import GPT2_VOCABULARY
from megatoken.base.config.schema import DataOrder
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, NumericsError
from megatoken.base.markdown_table import show_rows
from megatoken.base.system.machine import cpu_count
from megatoken.base.system.timing import time_interleaved
from megatoken.data.dataloader import DataLoader
from megatoken.data.dataset import Tokens, load_dataset
from megatoken.data.shard_format import (
    HEADER_BYTES,
    MANIFEST_NAME,
    Manifest,
    Part,
    Shard,
    hash_blocks,
    hash_bytes,
    make_header,
    write_manifest,
)
from megatoken.data.window_order import SPAN_TOKENS
from megatoken.text.gpt2_vocab import find_local_merges
from megatoken.text.output_folder import MAX_SHARD_TOKENS
from megatoken.text.parts import MOST_PARTS
from megatoken.text.prepare import prepare
from megatoken.text.sources import find_source
from megatoken.text.tokenizer import load_tokenizer

# seq_len, batch_tokens: GPT-2's batch of half a million tokens, and a small model's.
SIZES = (
    (64, 1 << 19),
    (128, 1 << 19),
    (256, 1 << 19),
    (1024, 1 << 19),
    (64, 1 << 13),
    (256, 1 << 13),
    (1024, 1 << 13),
)
FINGERPRINT = "ab" * 32  # belongs to no tokenizer, because the ids are random
FALLBACK = "bpe:4096"
SPARSE_SHARD = 100_000_000  # tokens
MIDDLE = 5_000_000  # a step in the middle of an epoch
TRAIN_DOCUMENTS = 2000  # for a vocabulary trained here
COMPARED_DOCUMENTS = 200  # all encoders must produce the same ids


def run_loader(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Measure tokens/s of the loader on one core, from the page cache.

    The first epoch checks every block; later ones do not. Raises ConfigError if an epoch is less
    than a batch.
    """
    tokens, largest = (
        options.shards * options.shard_tokens,
        max(batch_tokens for _, batch_tokens in SIZES),
    )
    if options.shard_tokens > MAX_SHARD_TOKENS:
        raise ConfigError(
            f"--shard-tokens is {options.shard_tokens:,}", "", f"give {MAX_SHARD_TOKENS:,} or less"
        )
    if tokens <= largest:
        what = f"{options.shards} shards of {options.shard_tokens:,} tokens hold less than a batch of {largest:,}"
        raise ConfigError(what, "--shard-tokens", f"give at least {largest // options.shards + 1}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        write_shards(Path(name), options.shards, options.shard_tokens)
        for seq_len, batch_tokens in SIZES:
            console.step(f"measuring {seq_len} x {batch_tokens // seq_len}")
            rates = time_epochs(Path(name), seq_len, batch_tokens, options.repeats)
            rows.append(
                {"seq_len": seq_len, "batch_tokens": batch_tokens, "tokens_per_second": rates}
            )
    console.close()
    console.print(f"{tokens / 1e6:.4g} million tokens in {options.shards} shards, read on one core")
    heads = {"seq_len": "seq_len", "batch_tokens": "batch tokens"}
    heads |= {"first_epoch": "first epoch, tokens/s", "later_epochs": "later epochs, tokens/s"}
    show_rows(heads, [row | row["tokens_per_second"] for row in rows], console)
    sizes = {"shards": options.shards, "shard_tokens": options.shard_tokens}
    yield {"unit": "tokens per second on one core", **sizes, "rows": rows}


def write_shards(folder: Path, n_shards: int, shard_tokens: int) -> None:
    """Write a dataset of random uint16 ids from GPT-2's vocabulary."""
    rng, shards = np.random.default_rng(0), []
    for number in range(n_shards):
        header = make_header(shard_tokens, "uint16", FINGERPRINT)
        ids = rng.integers(0, GPT2_VOCABULARY, shard_tokens, dtype=np.uint16)
        name = f"train_{number:06d}.bin"
        (folder / name).write_bytes(header + ids.tobytes())
        hashes = hash_blocks(ids).tobytes()
        shard = Shard(file=name, split="train", tokens=shard_tokens, hash=hash_bytes(hashes))
        (folder / shard.hashes_file).write_bytes(hashes)
        shards.append(shard)
    write_manifest(folder, make_manifest(shards=tuple(shards)))


def make_manifest(**rows: Any) -> Manifest:
    """Return the manifest of shards or parts made here."""
    tokenizer = {
        "name": "gpt2",
        "vocab_size": GPT2_VOCABULARY,
        "eot": GPT2_VOCABULARY - 1,
        "fingerprint": FINGERPRINT,
    }
    return Manifest(
        tokenizer=tokenizer,
        dtype="uint16",
        documents={"train": 1},
        source={},
        **{"shards": (), **rows},
    )


def run_scale(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Measure what opening and reading a very large dataset costs, on sparse files.

    For each order and number of ranks: the bytes that a rank reads over those it uses, its system
    calls and its CPU time, after the batches in which the spans of the first ones are met. Needs
    Linux, whose /proc/self/io counts reads.
    """
    n_shards = -(-int(options.tokens) // SPARSE_SHARD)
    with tempfile.TemporaryDirectory() as name:
        console.step(f"writing {n_shards:,} shards")
        write_sparse(Path(name), n_shards)
        reads, cpu, memory = count_reads(), time.process_time(), read_memory()
        dataset = load_dataset(name)
        assert dataset.fingerprint
        opening = {
            "read_calls": count_reads()[1] - reads[1],
            "bytes": count_reads()[0] - reads[0],
            "cpu_seconds": time.process_time() - cpu,
            "memory_bytes": read_memory() - memory,
        }
        rows = [
            measure_rank(dataset.train, order, ranks, batch, console)
            for order in ("shuffled", "spans")
            for ranks, batch in ((1, 512), (8, 512), (1024, 4096))
        ]
    console.close()
    console.print(f"{n_shards:,} shards of {SPARSE_SHARD:,} tokens; opening them: {opening}")
    heads = {"order": "order", "ranks": "ranks", "batch": "batch", "ratio": "read / used"}
    heads |= {"read_calls": "read calls a batch", "cpu_ms": "CPU ms a batch"}
    show_rows(heads, rows, console)
    yield {"shards": n_shards, "shard_tokens": SPARSE_SHARD, "opening": opening, "rows": rows}


def measure_rank(
    tokens: Tokens, order: DataOrder, ranks: int, batch: int, console: Console
) -> dict[str, Any]:
    """Return what the batches of a rank in the middle cost."""
    console.step(f"reading in order {order} as one of {ranks}")
    tokens.set_vocab_size(tokens.vocab_size)  # forgets what was read
    loader = DataLoader(tokens, 1024, batch, 0, ranks // 2, ranks, order=order)
    first, count = MIDDLE, SPAN_TOKENS // 1024 if order == "spans" else 20
    for step in range(first, first + count):
        used = loader.rows(step).nbytes * count
    reads, cpu = count_reads(), time.process_time()
    for step in range(first + count, first + 2 * count):
        loader.rows(step)
    n_bytes, calls = (after - before for before, after in zip(reads, count_reads(), strict=True))
    return {
        "order": order,
        "ranks": ranks,
        "batch": batch,
        "ratio": n_bytes / used,
        "read_calls": calls / count,
        "cpu_ms": 1e3 * (time.process_time() - cpu) / count,
    }


def write_sparse(folder: Path, n_shards: int) -> None:
    """Write a dataset in parts whose shards are holes and share one file of hashes."""
    header = make_header(SPARSE_SHARD, "uint16", FINGERPRINT)
    hashes = hash_blocks(bytes(2 * SPARSE_SHARD)).tobytes()
    parts = []
    per_part = -(-n_shards // MOST_PARTS)
    for number in range(0, n_shards, per_part):
        part, shards = folder / f"part-{number // per_part + 1:05d}", []
        part.mkdir()
        shared = part / "hashes"
        shared.write_bytes(hashes)
        for index in range(min(per_part, n_shards - number)):
            shard = Shard(
                file=f"train_{index:06d}.bin",
                split="train",
                tokens=SPARSE_SHARD,
                hash=hash_bytes(hashes),
            )
            with (part / shard.file).open("wb") as file:
                file.write(header)
                file.truncate(HEADER_BYTES + 2 * SPARSE_SHARD)
            (part / shard.hashes_file).hardlink_to(shared)
            shards.append(shard)
        write_manifest(part, make_manifest(shards=tuple(shards)))
        tokens = {"train": len(shards) * SPARSE_SHARD, "val": 0}
        digest = hash_bytes((part / MANIFEST_NAME).read_bytes())
        parts.append(Part(name=part.name, tokens=tokens, hash=digest))
    write_manifest(folder, make_manifest(parts=tuple(parts)))


def count_reads() -> tuple[int, int]:
    """Return the bytes and calls with which this process has read."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"]), int(rows["syscr"])


def read_memory() -> int:
    """Return the bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def time_epochs(
    folder: Path, seq_len: int, batch_tokens: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Measure tokens/s of a first epoch, which opens the dataset, interleaved with later ones."""

    def open_loader() -> DataLoader:
        return DataLoader(
            load_dataset(folder).train, seq_len=seq_len, batch_size=batch_tokens // seq_len, seed=0
        )

    def read(loader: DataLoader, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            loader.rows(step)

    warm, epochs = open_loader(), count(1)
    steps = warm.n_windows // warm.batch_size
    read(warm, 0, steps + 1)  # touches every block
    timings = time_interleaved(
        {
            "first_epoch": lambda: read(open_loader(), 0, steps),
            "later_epochs": lambda: read(warm, next(epochs) * (steps + 1), steps),
        },
        repeats=repeats,
    )
    return {name: timing.rate(steps * batch_tokens) for name, timing in timings.items()}


def run_prepare(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Measure MB/s of `prepare` and of the `tokenizers` library on the same documents.

    ratio: prepare's median over the library's. Raises NumericsError if the ids differ.
    """
    documents = list(make_documents(options.megabytes * 10**6))
    spec = options.tokenizer or ("gpt2" if find_local_merges() is not None else FALLBACK)
    tokenizer = load_tokenizer(spec, lambda: iter(documents[:TRAIN_DOCUMENTS]))
    bare = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    bare.encode_special_tokens = True
    for text in documents[:COMPARED_DOCUMENTS]:
        if bare.encode(text, add_special_tokens=False).ids != tokenizer.encode(text).tolist():
            raise NumericsError(
                f"tokenizers gives other ids than {tokenizer.name}", "--tokenizer", "choose another"
            )
    megabytes, numbers = sum(len(text.encode()) for text in documents) / 1e6, count()
    console.print(f"{megabytes:.3g} MB in {len(documents):,} documents, tokenizer {tokenizer.name}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_jsonl(folder / "corpus.jsonl", documents)
        tokenizer.vocabulary.save(folder / "tokenizer")

        def prepare_again() -> None:
            prepare(
                str(folder / "corpus.jsonl"),
                folder / f"out{next(numbers)}",
                tokenizer=str(folder / "tokenizer"),
            )

        timings = time_interleaved(
            {"prepare": prepare_again, "tokenizers": lambda: bare.encode_batch_fast(documents)},
            repeats=options.repeats,
        )
    rates = {name: timing.rate(megabytes) for name, timing in timings.items()}
    print_rates(rates, "MB/s", console)
    about = {"source": "python, shuffled", "tokenizer": tokenizer.name, "megabytes": megabytes}
    about |= {"documents": len(documents), "workers": cpu_count(), "megabytes_per_second": rates}
    yield {
        **about,
        "ratio": {"tokenizers": rates["prepare"]["median"] / rates["tokenizers"]["median"]},
    }


def make_documents(total_bytes: int) -> Iterator[str]:
    """Yield documents of 4 kB on average: shuffled lines of the standard library and new words.
    Always the same.
    """
    files = find_source("python", Path(sysconfig.get_paths()["stdlib"])).files
    lines = [
        line
        for file in files
        for line in Path(file.path).read_text("utf-8", "replace").splitlines()
        if line
    ]
    rng, made = np.random.default_rng(0), 0
    while made < total_bytes:
        chosen = rng.integers(len(lines), size=int(rng.integers(20, 180)))
        word = "".join(map(chr, rng.integers(ord("a"), ord("z") + 1, size=9)))
        text = "\n".join(lines[index] for index in chosen) + f"\n{word} was here — {made}.\n"
        made += len(text)
        yield text


def write_jsonl(path: Path, documents: Iterable[str]) -> None:
    """Write one {"text": ...} per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)


def print_rates(rates: Mapping[str, Mapping[str, float]], unit: str, console: Console) -> None:
    """Print the median and quartiles of each rate."""
    for name, rate in rates.items():
        spread = f"({rate['low']:.2f} to {rate['high']:.2f})"
        console.print(f"{name:<18} {rate['median']:8.2f} {unit} {spread}")

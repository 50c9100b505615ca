"""`loader` and `prepare`: how fast tokens are read, and how fast text becomes tokens."""

import argparse
import json
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatoken.base.config.presets import GPT2_VOCABULARY
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, NumericsError
from megatoken.base.markdown_table import show_rows
from megatoken.base.system.machine import cpu_count
from megatoken.base.system.timing import time_interleaved
from megatoken.data.dataloader import DataLoader
from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import (
    Manifest,
    Shard,
    hash_blocks,
    hash_bytes,
    make_header,
    write_manifest,
)
from megatoken.text.gpt2_vocab import find_local_merges
from megatoken.text.output_folder import MAX_SHARD_TOKENS
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
    tokenizer = {
        "name": "gpt2",
        "vocab_size": GPT2_VOCABULARY,
        "eot": GPT2_VOCABULARY - 1,
        "fingerprint": FINGERPRINT,
    }
    write_manifest(
        folder,
        Manifest(
            tokenizer=tokenizer,
            dtype="uint16",
            documents={"train": 1},
            shards=tuple(shards),
            source={},
        ),
    )


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

"""bench prepare: MB/s from a text file to shards, beside bare batch encoding of the same documents in memory.

In: megabytes of text, made from Python's standard library or the user's own, and a tokenizer. Out: the speed of
`prepare` (reading, tokenizing, sorting, hashing, writing, syncing, processes started anew), of `tokenizers`, and of
`tiktoken` where it is installed and the vocabulary is GPT-2's; the ids of all are compared first. Their memory and
what they do with the ids is left out of theirs. Absent: training a vocabulary, which is done before anything is timed.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatoken.console import Console
from megatoken.data.blocks import sample_texts
from megatoken.data.documents import Rules
from megatoken.data.gpt2_vocabulary import Merges, byte_characters, find_local_merges
from megatoken.data.prepare import prepare
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import EOT, Tokenizer, load_tokenizer
from megatoken.errors import Exit, Fault
from megatoken.hardware import cpu_count
from megatoken.timing import take_turns

Encode = Callable[[list[str]], list[list[int]]]

FALLBACK = "bpe:4096"
TAUGHT = 2000  # documents teach a vocabulary of our own
COMPARED = 200  # documents whose ids must be the same for every contender


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Gather text, then time the contenders. Raises Fault(DATA) for a source without text."""
    wanted_bytes = options.megabytes * 10**6
    if options.source:
        documents = read_documents(options.source, wanted_bytes)
    else:
        documents = list(make_documents(wanted_bytes))
    spec = options.tokenizer or choose_tokenizer(console)
    with tempfile.TemporaryDirectory() as folder:
        answer = measure(Path(folder), documents, spec, options.repeats, console)
    return {"source": options.source or "python, shuffled", **answer}


def choose_tokenizer(console: Console) -> str:
    """gpt2 if its vocabulary is on this machine; otherwise a BPE that is trained here, and says so."""
    if find_local_merges() is not None:
        return "gpt2"
    console.say(f"GPT-2's vocabulary is not on this machine: {FALLBACK}, trained on the text, takes its place")
    return FALLBACK


def make_documents(total_bytes: int) -> Iterator[str]:
    """English-like text: lines of the standard library, shuffled, with fresh words mixed in as real corpora have.

    Documents of 4 kB on average, always the same ones.
    """
    files = find_source("python").files
    lines = [line for file in files for line in Path(file.path).read_text("utf-8", "replace").splitlines() if line]
    draw = np.random.default_rng(0)
    made = 0
    while made < total_bytes:
        chosen = draw.integers(len(lines), size=int(draw.integers(20, 180)))
        fresh = "".join(map(chr, draw.integers(ord("a"), ord("z") + 1, size=9)))
        text = "\n".join(lines[at] for at in chosen) + f"\n{fresh} was here — {made}.\n"
        made += len(text)
        yield text


def read_documents(source: str, limit_bytes: int) -> list[str]:
    """Documents of what `prepare` would accept as a source: all, or about `limit_bytes` spread evenly over it.

    Raises Fault(DATA) when there is nothing, or nothing but white space.
    """
    documents = list(sample_texts(find_source(source), Rules(), limit_bytes))
    if not documents:
        raise Fault(Exit.DATA, "no text in this source", source, "name another file or folder with --source")
    return documents


def write_jsonl(path: Path, documents: Iterable[str]) -> None:
    """One {"text": ...} a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)


def measure(folder: Path, documents: list[str], spec: str, repeats: int, console: Console) -> dict[str, Any]:
    """MB/s of text of every contender, in turns, working in the empty `folder`. Raises Fault(NUMERICS) if ids differ.

    `ratio`: prepare's median over each other's.
    """
    corpus = folder / "corpus.jsonl"
    write_jsonl(corpus, documents)
    tokenizer = load_tokenizer(spec, lambda: iter(documents[:TAUGHT]))
    if spec.startswith("bpe:"):  # or every turn would train it again
        spec = str(folder / "tokenizer")
        tokenizer.save(Path(spec))
    contenders = find_contenders(tokenizer)
    compare_ids(tokenizer, contenders, documents[:COMPARED])
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    names = ", ".join(("prepare", *contenders))
    console.say(f"{megabytes:.3g} MB in {len(documents):,} documents, tokenizer {tokenizer.name}: {names} take turns")
    numbers = count()
    turns = take_turns(
        {"prepare": lambda: prepare(str(corpus), folder / f"out{next(numbers)}", tokenizer=spec)}
        | {name: partial(encode, documents) for name, encode in contenders.items()},
        repeats=repeats,
    )
    rates = {name: timing.rate(megabytes) for name, timing in turns.items()}
    ratio = {name: rates["prepare"]["median"] / rates[name]["median"] for name in contenders}
    for name, rate in rates.items():
        beside = f"   prepare is {ratio[name]:.2f} times as fast" if name in ratio else ""
        console.say(f"{name:<10} {rate['median']:8.2f} MB/s ({rate['low']:.2f} to {rate['high']:.2f}){beside}")
    return {
        "tokenizer": tokenizer.name,
        "megabytes": megabytes,
        "documents": len(documents),
        "workers": cpu_count(),
        "megabytes_per_second": rates,
        "ratio": ratio,
    }


def find_contenders(tokenizer: Tokenizer) -> dict[str, Encode]:
    """The bare batch calls of other libraries, on all cores, for the same vocabulary."""
    bare = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    bare.encode_special_tokens = True
    contenders: dict[str, Encode] = {
        "tokenizers": lambda texts: [row.ids for row in bare.encode_batch_fast(texts, add_special_tokens=False)]
    }
    merges = find_local_merges() if tokenizer.name == "gpt2" else None
    if merges is not None and (tiktoken := build_tiktoken(merges)) is not None:
        contenders["tiktoken"] = tiktoken
    return contenders


def build_tiktoken(merges: Merges) -> Encode | None:
    """tiktoken's GPT-2 from merges at hand, because its own way begins with a download; None if not installed."""
    try:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError:
        return None
    characters = byte_characters()
    byte_of = {character: byte for byte, character in enumerate(characters)}
    spelled = [*sorted(characters), *(left + right for left, right in merges)]
    ranks = {bytes(byte_of[character] for character in token): rank for rank, token in enumerate(spelled)}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)})
    workers = cpu_count()
    return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=workers)


def compare_ids(tokenizer: Tokenizer, contenders: dict[str, Encode], documents: list[str]) -> None:
    """Raise Fault(NUMERICS) unless every contender gives the tokenizer's ids: a race needs one road."""
    expected = [ids.tolist() for ids in tokenizer.encode_batch(documents)]
    for name, encode in contenders.items():
        for number, (wanted, found) in enumerate(zip(expected, encode(documents), strict=True)):
            if wanted != found:
                what = f"{name} gives other ids than {tokenizer.name} here"
                raise Fault(Exit.NUMERICS, what, f"document {number}", "choose another --tokenizer or --source")

"""Prepare random files in random forms, and compare the shards with a second reader."""

import contextlib
import csv
import gzip
import io
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import xxhash
from pyarrow import parquet

from megatoken.cli.main import main
from megatoken.data import corpus_reader, documents
from megatoken.data.prepare import Progress, prepare
from megatoken.data.shard_format import HEADER_BYTES, Manifest, read_manifest
from megatoken.data.tokenizer import load_saved_tokenizer
from tests.data.corpus_reference import name_split, read_documents

WORDS = "the cat sat naïve 中文 🎈 x1 (y) don't é \u0301 <|end <|endoftext| 3.14 {} [] \\ \\n '"
WORDS = [*WORDS.split(" "), "\n", "\r\n", "\r", "\t", "  ", '"', ",", ";"]
WORDS += ["\ufeff", "\xa0", "\x0b\x0c", "\x00", "\x85", "\u2028"]
SPLITS = [
    "train",
    "Training",
    "valid",
    "val",
    "VALIDATION",
    "dev",
    "eval",
    "heldout",
    "test",
    "Testing",
]
STEMS = [
    "a",
    "b-{}",
    "wiki_{}",
    "{}-00000-of-00001",
    "fineweb_{}_000001",
    "x.{}",
    "{}",
    "{}2",
    "a{}b",
    "My {}",
]
LONGER = (".none", ".jl", "lines.txt", "row.json")  # a row alone is recognized by its suffix only
# How rows are written, and the suffix.
JSON_FORMS = [".jsonl", ".json", ".ndjson", "array.json", "row.json", ".jl", ".none", "lines.txt"]
SUFFIXES = [*JSON_FORMS, *[".txt", ".md", ".csv", ".TSV", ".parquet", ".pq"]]
TYPES = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.string_view())
OTHERS = {
    "README.md": b"# Card",
    "code.py": b"x = 1\n",
    "b.bin": b"\0\1",
    ".hidden.txt": b"no",
    "n": b"no\n",
}


@dataclass
class Corpus:
    """A random corpus: how it is written and prepared."""

    seed: int
    kind: str  # text or chats
    key: str
    options: dict[str, Any]  # of `prepare`
    chunk: int
    source: str = ""

    @property
    def skips(self) -> bool:
        """Whether unusable rows and documents are skipped."""
        return bool(self.options["invalid"] == "skip")


class Writer:
    """Writes files of random documents into a folder."""

    def __init__(self, draw: random.Random, folder: Path, corpus: Corpus) -> None:
        self.draw = draw
        self.folder = folder
        self.corpus = corpus
        self.bad_rows = corpus.skips

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def make_text(self) -> str:
        draw = self.draw
        length = draw.choice((0, 1, 3, 30, 30, 300) if self.chance(0.96) else (5000,))
        words = WORDS if self.chance(0.5) else WORDS[:10]
        text = draw.choice(("", " ")).join(draw.choices(words, k=length))
        return f"{draw.randrange(100)} {text}" if self.chance(0.8) else text

    def make_row(self) -> dict[str, Any]:
        draw = self.draw
        if self.corpus.kind == "chats":
            turns = [("user", "assistant")] * draw.randint(1, 3)
            roles = [
                *(["system"] if self.chance(0.3) else []),
                *(r for turn in turns for r in turn),
            ]
            value: Any = [
                {"role": r, "content": self.make_text()[:900].strip() or "x"} for r in roles
            ]
        else:
            value = self.make_text()
        row = {self.corpus.key: value}
        for key in draw.sample(["id", "url", "title"], draw.randint(0, 2)):
            extra = {key: draw.choice(["x", 'a "b"', "c;d", "é\n", ""])}
            row = row | extra if self.chance(0.5) else extra | row
        return row

    def write(self, name: str, form: str) -> None:
        """Write a file of `form`, one of SUFFIXES."""
        draw = self.draw
        form = form.lower()
        count = draw.choice((0, 1, 2, 5, 30) if form not in LONGER else (2, 5))
        if form in (".txt", ".md"):
            texts = [self.make_text() for _ in range(count)]
            data = ("<|endoftext|>" if form == ".txt" else "\n\n").join(texts).encode()
            data = data.replace(b"\0", b"").replace(
                b"cat", b"c\xffat" if self.chance(0.1) else b"cat"
            )
            if data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):  # not JSON lines
                data = b"- " + data
        else:
            keys = list(self.make_row()) if form in (".csv", ".tsv", ".parquet", ".pq") else []
            rows = [self.make_row() for _ in range(count)]
            if keys:
                rows = [{key: row.get(key, "") for key in keys} for row in rows]
            if self.bad_rows and form in (".parquet", ".pq") and len(rows) > 1:
                rows[1][self.corpus.key] = None
            data = self.pack_rows(form, rows, keys)
        if form not in (".parquet", ".pq") and self.chance(0.2):
            data = b"\xef\xbb\xbf" + data
        packing = (
            ""
            if form in (".parquet", ".pq")
            else draw.choice(("", "", "", ".gz", ".zst", ".gzip", ".zstd"))
        )
        path = self.folder / f"{name}{re.sub('[a-z]+(?=[.])|.none', '', form)}{packing}"
        if path.exists() or path.parent.is_file():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = [data[: len(data) // 2], data[len(data) // 2 :]] if self.chance(0.2) else [data]
        if packing.startswith(".gz"):
            data = b"".join(map(gzip.compress, parts))
        elif packing:
            data = b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in parts)
        path.write_bytes(data)

    def pack_rows(self, form: str, rows: list[dict[str, Any]], keys: list[str]) -> bytes:
        draw = self.draw
        end = draw.choice(("\n", "\r\n"))
        if form in (".parquet", ".pq"):
            table = pyarrow.Table.from_pylist(
                rows, pyarrow.schema([(key, draw.choice(TYPES)) for key in keys])
            )
            stream = io.BytesIO()
            codec = draw.choice(("none", "snappy", "zstd", "gzip"))
            parquet.write_table(
                table, stream, compression=codec, row_group_size=draw.choice((1, 7, 1000))
            )
            return stream.getvalue()
        if form in (".csv", ".tsv"):
            text = io.StringIO()
            delimiter = "\t" if form == ".tsv" else draw.choice(",,;" if len(keys) > 1 else ",")
            quoting = draw.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
            table = csv.DictWriter(
                text, keys, delimiter=delimiter, lineterminator=end, quoting=quoting
            )
            table.writeheader()
            for row in rows:
                table.writerow({key: value.replace("\0", "") for key, value in row.items()})
                if self.bad_rows and self.chance(0.1):
                    text.write(
                        draw.choice(('"he said "yes" to it"', '"open', "a,b;c\td,e;f\tg" * 9)) + end
                    )
            return text.getvalue().encode()
        if form == "row.json":
            return json.dumps(rows[0], indent=1).encode()
        if form == "array.json":
            return json.dumps(
                rows, indent=draw.choice((None, 1)), ensure_ascii=self.chance(0.5)
            ).encode()
        lines = [json.dumps(row, ensure_ascii=self.chance(0.5)) for row in rows]
        if self.bad_rows and len(lines) > 2:
            bad = draw.choice(
                ("{", '{"txt": 1}', "3", "null", "[]", f'{{"{self.corpus.key}": null}}', '"x"')
            )
            lines.insert(draw.randrange(2, len(lines)), bad)
        lines = [line for each in lines for line in ([each, ""] if self.chance(0.1) else [each])]
        return (end.join(lines) + draw.choice(("", end))).encode()


def write_corpus(seed: int, folder: Path) -> Corpus:
    """Write a random corpus into a new folder."""
    draw = random.Random(seed)
    kind = draw.choice(("text", "text", "text", "chats"))
    options: dict[str, Any] = {
        "val_fraction": draw.choice((0, 0.01, 0.3, 0.9)),
        "invalid": draw.choice(("replace", "skip")),
        "shard_tokens": draw.choice((700, 10**8)),
        "tokenizer": draw.choice(("bytes", "bytes", "bpe:300")) if kind == "text" else "bytes",
    }
    key = draw.choice(("text", "text", "body")) if kind == "text" else "messages"
    options |= {"text_key": key} if kind == "text" else {"context": 20_000}
    chunk = draw.choice((9000, 20_000, 1 << 20)) if options["invalid"] == "replace" else 1 << 20
    corpus = Corpus(seed, kind, key, options, chunk)
    writer = Writer(draw, folder, corpus)
    folder.mkdir(parents=True)
    names = draw.choice(
        ([""], ["train", "test"], ["", "validation"], SPLITS, ["", "contest", "latest"])
    )
    nested = draw.choice(([""], ["", "data/"], ["{}/"], ["{}/", "x/", "part-{}/"]))
    forms = SUFFIXES if kind == "text" else JSON_FORMS
    if writer.chance(0.5):
        forms = [draw.choice(forms)]
    for _ in range(draw.choice((1, 2, 4, 7))):
        name = f"{draw.choice(nested)}{draw.choice(STEMS)}".format(*draw.choices(names, k=2))
        writer.write(name.strip("/") or "a", draw.choice(forms))
    files = [path for path in folder.rglob("*") if path.is_file()]
    corpus.source = draw.choice([str(draw.choice(files)), f"{folder}/**/*", *[str(folder)] * 8])
    for name, data in OTHERS.items():
        if kind == "text" and writer.chance(0.1) and corpus.source == str(folder):
            (folder / name).write_bytes(data)
    if writer.chance(0.1):
        options["val"] = str(draw.choice(files))
    return corpus


def read_expected(corpus: Corpus) -> dict[str, list[str]]:
    """Return the documents of each split by the second reader. Raises ValueError for bad input."""
    folder, val = Path(corpus.source.removesuffix("/**/*")), corpus.options.get("val")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in OTHERS]
    paths = paths or [folder]
    is_pattern = corpus.source.endswith("*")
    start = os.path.commonpath([path.parent for path in paths]) if is_pattern else folder
    names = {path: path.relative_to(start).as_posix() for path in paths}
    splits = {path: name_split(name) for path, name in names.items() if str(path) != val}
    train = [path for path, split in splits.items() if split in ("", "train")] or [*splits]
    held_out = [path for path in splits if path not in train and splits[path] == "val"]
    held_out = [Path(val)] if val else held_out
    expected: dict[str, list[str]] = {"train": [], "val": []}
    for path in [*sorted(train, key=names.__getitem__), *sorted(held_out, key=names.get)]:
        for raw in read_documents(path, corpus.key):
            text = None if raw is None else re.sub("[\ud800-\udfff]", "\ufffd", raw)
            if corpus.skips and (text is None or raw != text):
                continue
            if text is None:
                raise ValueError("a row without text")
            if text.strip():
                is_val = path in held_out or (not held_out and is_hashed_to_val(text, corpus))
                expected["val" if is_val else "train"].append(text)
    if not expected["train"] and not held_out:
        expected = {"train": expected["val"], "val": []}
    if not expected["train"]:
        raise ValueError("no text to train on")
    return expected


def is_hashed_to_val(text: str, corpus: Corpus) -> bool:
    start = text[:4096].encode()[:4096]
    return (
        corpus.kind == "text"
        and xxhash.xxh3_64_intdigest(start) < corpus.options["val_fraction"] * 2**64
    )


def read_ids(out: Path, manifest: Manifest, split: str, suffix: str, dtype: str) -> np.ndarray:
    """Return the ids or marks of a split."""
    files = [out / shard.file for shard in manifest.shards if shard.split == split]
    skip = HEADER_BYTES if suffix == ".bin" else 0
    data = b"".join(file.with_suffix(suffix).read_bytes()[skip:] for file in files)
    return np.frombuffer(data, dtype)


def read_prepared(out: Path, corpus: Corpus) -> dict[str, list[str]]:
    """Decode the shards into the documents, or conversations, of each split."""
    manifest = read_manifest(out)
    tokenizer = load_saved_tokenizer(out / "tokenizer")
    ids = {
        split: read_ids(out, manifest, split, ".bin", manifest.dtype) for split in ("train", "val")
    }
    documents = {}
    if corpus.kind == "chats":
        for split in ids:
            marks = read_ids(out, manifest, split, ".marks", "uint8")
            kept = ids[split][marks & 4 == 0]
            starts = np.flatnonzero(marks[marks & 4 == 0] & 2)
            documents[split] = [tokenizer.decode(part) for part in np.split(kept, starts)[1:]]
        return documents
    tail = manifest.source["counts"]["val_from_tail_tokens"]
    if tail:  # undo what `prepare` moved
        ids["train"] = np.concatenate([ids["train"], ids["val"][len(ids["val"]) - tail :]])
        ids["val"] = ids["val"][: max(0, len(ids["val"]) - tail - 1)]
    for split, row in ids.items():
        ends = np.flatnonzero(row == tokenizer.eot)
        parts = np.split(row, ends) if len(row) else []
        documents[split] = [tokenizer.decode(part[part != tokenizer.eot]) for part in parts]
    assert tail or manifest.documents == {split: len(documents[split]) for split in documents}
    return documents


def stop_after(number: int) -> Callable[[Progress], None]:
    """Return a callback that interrupts a preparation after so many chunks."""
    left = iter([None] * number)

    def interrupt(progress: Progress) -> None:
        if progress.stage == "tokens" and next(left, progress):
            raise KeyboardInterrupt

    return interrupt


def check(seed: int, folder: Path) -> str:
    """Prepare a random corpus; return how that ended. Raises AssertionError if it is wrong."""
    corpus = write_corpus(seed, folder / "corpus")
    out = folder / "out"
    try:
        expected = read_expected(corpus)
    except ValueError:
        expected = {}
    words = ["prepare", corpus.source, "--out", str(out), "--workers", "1"]
    for name, value in corpus.options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(output):
        for module in (corpus_reader, documents):
            patch.setattr(module, "CHUNK_BYTES", corpus.chunk)
        if corpus.kind == "text" and expected and seed % 4 == 0:
            with contextlib.suppress(KeyboardInterrupt):
                prepare(corpus.source, out, **corpus.options, workers=1, on_progress=stop_after(2))
        with contextlib.redirect_stdout(output):
            code = main(words)
    assert "Traceback" not in output.getvalue(), output.getvalue()
    assert (code == 0) == bool(expected), f"exit code {code}: {output.getvalue()}"
    if not expected:
        assert code in (2, 3), f"exit code {code}: {output.getvalue()}"
        return "refused"
    documents_read = read_prepared(out, corpus)
    if corpus.kind == "chats":
        counts = {split: Counter(texts) for split, texts in documents_read.items()}
        wanted = {split: Counter(texts) for split, texts in expected.items()}
        if not expected["val"]:  # rows with equal prompts share a split
            counts = {"train": counts["train"] + counts["val"], "val": Counter()}
        assert counts == wanted
    else:
        assert documents_read == expected
    return corpus.kind

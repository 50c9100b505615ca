"""Prepare random files in random forms, and compare the shards with a second reader."""

import contextlib
import csv
import io
import json
import os
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import xxhash
from pyarrow import parquet

from megatoken.cli.main import main
from megatoken.data.dataset import load_dataset
from megatoken.text import prepare as preparation
from megatoken.text.chat_dataset import open_rows
from megatoken.text.documents import PrepareOptions
from megatoken.text.prepare import prepare
from megatoken.text.tokenizer import open_tokenizer
from tests.data.small_dataset import stop_after
from tests.tables import read_table
from tests.text.corpus_reference import name_split, read_documents
from tests.text.test_documents import pack, write

WORDS = "the~cat~sat~naïve~中文~🎈~x1~(y)~don't~é~\u0301~<|end~<|endoftext|~3.14~{}~[]~\\~\\n~'"
WORDS += '~\n~\r\n~\r~\t~  ~"~,~;~\ufeff~\xa0~\x0b\x0c~\x00~\x85~\u2028'
SPLITS = "train,Training,valid,val,VALIDATION,dev,eval,heldout,test,Testing"
NAMES = ("", "train,test", ",validation", SPLITS, ",contest,latest")
FOLDERS = ("", ",data/", "{}/", "{}/,x/,part-{}/")
STEMS = "a,b-{},wiki_{},{}-00000-of-00001,fineweb_{}_000001,x.{},{},{}2,a{}b,My {}"
LONGER = (".none", ".jl", "lines.txt", "row.json")  # a row alone is recognized by its suffix only
# How rows are written, and the suffix.
JSON_FORMS = ".jsonl .json .ndjson array.json row.json .jl .none lines.txt"
FORMS = JSON_FORMS + " .txt .md .csv .TSV .parquet .pq"
PARQUET = (".parquet", ".pq")
TYPES = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.string_view())
OTHERS = read_table("""
README.md # Card
code.py x = 1
b.bin \0\1
.hidden.txt no
n no
""")
BAD_LINES = '{|{"txt": 1}|3|null|[]|{"KEY": null}|"x"'
BAD_TABLE_ROWS = ('"he said "yes" to it"', '"open', "a,b;c\td,e;f\tg" * 9)


class Corpus:
    """Random files in a new folder, and how they are prepared."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = draw = random.Random(seed)
        self.folder = folder
        self.kind = draw.choice(("text", "text", "text", "chats"))
        self.skips = self.chance(0.5)  # unusable rows and documents
        is_text = self.kind == "text"
        self.key = draw.choice(("text", "text", "body")) if is_text else "messages"
        self.options = {  # of `prepare`
            "val_fraction": draw.choice((0, 0.01, 0.3, 0.9)),
            "invalid": "skip" if self.skips else "replace",
            "shard_tokens": draw.choice((700, 10**8)),
            "tokenizer": draw.choice(("bytes", "bytes", "bpe:300")) if is_text else "bytes",
        }
        self.options |= {"text_key": self.key} if is_text else {"context": 20_000}
        self.chunk = 1 << 20 if self.skips else draw.choice((9000, 20_000, 1 << 20))
        folder.mkdir(parents=True)
        names, folders = draw.choice(NAMES).split(","), draw.choice(FOLDERS).split(",")
        forms = (FORMS if is_text else JSON_FORMS).lower().split()
        forms = [draw.choice(forms)] if self.chance(0.5) else forms
        for _ in range(draw.choice((1, 2, 4, 7))):
            name = draw.choice(folders) + draw.choice(STEMS.split(","))
            name = name.format(*draw.choices(names, k=2)).strip("/")
            self.write(name or "a", draw.choice(forms))
        files = [str(path) for path in folder.rglob("*") if path.is_file()]
        self.source = draw.choice([draw.choice(files), f"{folder}/**/*", *[str(folder)] * 8])
        for name, text in OTHERS.items():
            if is_text and self.chance(0.1) and self.source == str(folder):
                (folder / name).write_text(text)
        if self.chance(0.1):
            self.options["val"] = draw.choice(files)

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def make_text(self) -> str:
        draw = self.draw
        length = draw.choice((0, 1, 3, 30, 30, 300)) if self.chance(0.96) else 5000
        words = WORDS.split("~")[: draw.choice((10, None))]
        text = draw.choice(("", " ")).join(draw.choices(words, k=length))
        return f"{draw.randrange(100)} {text}" if self.chance(0.8) else text

    def make_row(self) -> dict[str, Any]:
        draw = self.draw
        value = self.make_text()
        if self.kind == "chats":
            roles = ["system"] * self.chance(0.3) + ["user", "assistant"] * draw.randint(1, 3)
            contents = [self.make_text()[:900].strip() or "x" for _ in roles]
            value = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        row = {self.key: value}
        for key in draw.sample(["id", "url", "title"], draw.randint(0, 2)):
            extra = {key: draw.choice(["x", 'a "b"', "c;d", "é\n", ""])}
            row = row | extra if self.chance(0.5) else extra | row
        return row

    def write(self, name: str, form: str) -> None:
        """Write a file of `form`, one of FORMS."""
        draw = self.draw
        count = draw.choice((2, 5) if form in LONGER else (0, 1, 2, 5, 30))
        if form in (".txt", ".md"):
            text = ("<|endoftext|>" if form == ".txt" else "\n\n").join(
                self.make_text() for _ in range(count)
            )
            text = text.replace("\0", "").replace("cat", draw.choice(["cat"] * 9 + ["c\udcffat"]))
            if text.removeprefix("\ufeff").lstrip().startswith("{"):  # not JSON lines
                text = f"- {text}"
            data = text.encode(errors="surrogateescape")
        else:
            data = self.pack_rows(form, [self.make_row() for _ in range(count)])
        packing = ""
        if form not in PARQUET:
            data = b"\xef\xbb\xbf" * self.chance(0.2) + data
            packing = draw.choice(("", "", "", ".gz", ".zst", ".gzip", ".zstd"))
        path = self.folder / f"{name}{re.sub('[a-z]+(?=[.])|.none', '', form)}{packing}"
        if path.exists() or path.parent.is_file():
            return
        middle = len(data) // 2 * self.chance(0.2)
        parts = [pack(part, packing) for part in (data[:middle], data[middle:])]
        write(path, b"".join(parts))

    def pack_rows(self, form: str, rows: list[dict[str, Any]]) -> bytes:
        if form in (".csv", ".tsv", *PARQUET):
            keys = [*self.make_row()]
            rows = [{key: row.get(key, "") for key in keys} for row in rows]
            return self.pack_table(form, rows, keys)
        draw, as_ascii = self.draw, self.chance(0.5)
        if form == "row.json":
            return json.dumps(rows[0], indent=1).encode()
        if form == "array.json":
            return json.dumps(rows, indent=draw.choice((None, 1)), ensure_ascii=as_ascii).encode()
        lines = [json.dumps(row, ensure_ascii=as_ascii) + "\n" * self.chance(0.1) for row in rows]
        if self.skips and len(lines) > 2:
            bad = draw.choice(BAD_LINES.split("|")).replace("KEY", self.key)
            lines.insert(draw.randrange(2, len(lines)), bad)
        text = "\n".join(lines) + draw.choice(("", "\n"))
        return text.replace("\n", draw.choice(("\n", "\r\n"))).encode()

    def pack_table(self, form: str, rows: list[dict[str, Any]], keys: list[str]) -> bytes:
        draw, end = self.draw, self.draw.choice(("\n", "\r\n"))
        if form in PARQUET:
            if self.skips and len(rows) > 1:
                rows[1][self.key] = None
            schema = pyarrow.schema([(key, draw.choice(TYPES)) for key in keys])
            stream = io.BytesIO()
            table = pyarrow.Table.from_pylist(rows, schema)
            codec, size = draw.choice(("none", "snappy", "zstd", "gzip")), draw.choice((1, 7, 1000))
            parquet.write_table(table, stream, compression=codec, row_group_size=size)
            return stream.getvalue()
        text = io.StringIO()
        delimiter = "\t" if form == ".tsv" else draw.choice(",,;" if len(keys) > 1 else ",")
        quoting = draw.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
        table = csv.DictWriter(text, keys, delimiter=delimiter, lineterminator=end, quoting=quoting)
        table.writeheader()
        for row in rows:
            table.writerow({key: value.replace("\0", "") for key, value in row.items()})
            if self.skips and self.chance(0.1):
                text.write(draw.choice(BAD_TABLE_ROWS) + end)
        return text.getvalue().encode()


def read_expected(corpus: Corpus) -> dict[str, list[str]]:
    """Return the documents of each split by the second reader. Raises ValueError for bad input."""
    folder, val = Path(corpus.source.removesuffix("/**/*")), corpus.options.get("val")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in OTHERS]
    paths = paths or [folder]
    is_pattern = corpus.source.endswith("*")
    start = os.path.commonpath([path.parent for path in paths]) if is_pattern else folder
    names = sorted((path.relative_to(start).as_posix(), path) for path in paths)
    splits = {path: name_split(name) for name, path in names if str(path) != val}
    train = [path for path, split in splits.items() if split in ("", "train")] or [*splits]
    held_out = [path for path in splits if path not in train and splits[path] == "val"]
    held_out = [Path(val)] if val else held_out
    expected = {"train": [], "val": []}
    for path in train + held_out:
        for raw in read_documents(path, corpus.key):
            text = raw and re.sub("[\ud800-\udfff]", "\ufffd", raw)
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
    start = xxhash.xxh3_64_intdigest(text.encode()[:4096])
    return corpus.kind == "text" and start < corpus.options["val_fraction"] * 2**64


def read_prepared(out: Path, corpus: Corpus) -> dict[str, list[str]]:
    """Decode the shards into the documents, or conversations, of each split."""
    dataset, documents = load_dataset(out), {}
    tokenizer, manifest = open_tokenizer(dataset.vocabulary), dataset.manifest
    if corpus.kind == "chats":
        for split in ("train", "val"):
            rows = open_rows(dataset, split)
            ids, labels = rows.read(np.arange(len(rows)))
            starts = np.flatnonzero(labels[labels < 4] & 2)
            documents[split] = [*map(tokenizer.decode, np.split(ids[labels < 4], starts)[1:])]
        return documents
    train, val = (tokens.read(0, len(tokens)) for tokens in (dataset.train, dataset.val))
    tail = manifest.source["counts"]["val_from_tail_tokens"]
    if tail:  # undo what `prepare` moved
        train = np.concatenate([train, val[len(val) - tail :]])
        val = val[: max(0, len(val) - tail - 1)]
    for split, ids in {"train": train, "val": val}.items():
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot)) if len(ids) else []
        documents[split] = [tokenizer.decode(part[part != tokenizer.eot]) for part in parts]
    assert tail or manifest.documents == {split: len(texts) for split, texts in documents.items()}
    return documents


def check(seed: int, folder: Path) -> str:
    """Prepare a random corpus; return how that ended. Raises AssertionError if it is wrong."""
    corpus, out = Corpus(seed, folder / "corpus"), folder / "out"
    try:
        expected = read_expected(corpus)
    except ValueError:
        expected = {}
    words = ["prepare", corpus.source, "--out", str(out), "--workers", "1"]
    for name, value in corpus.options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(output):
        options = partial(PrepareOptions, chunk_bytes=corpus.chunk)
        patch.setattr(preparation, "PrepareOptions", options)
        if corpus.kind == "text" and expected and seed % 4 == 0:
            with contextlib.suppress(KeyboardInterrupt):
                prepare(corpus.source, out, **corpus.options, workers=1, on_progress=stop_after(3))
        with contextlib.redirect_stdout(output):
            code = main(words)
    printed = output.getvalue()
    assert "Traceback" not in printed, printed
    assert code in ((0,) if expected else (2, 3)), f"exit code {code}: {printed}"
    if not expected:
        return "refused"
    found = read_prepared(out, corpus)
    if corpus.kind == "chats":  # in any order
        found, expected = (
            {split: sorted(texts) for split, texts in each.items()} for each in (found, expected)
        )
        if not expected["val"]:  # rows with equal prompts share a split
            found = {"train": sorted(found["train"] + found["val"]), "val": []}
    assert found == expected
    return corpus.kind

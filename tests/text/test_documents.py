"""Pieces and documents: every policy with its exact counts, and cuts that change no id."""

import csv
import gzip
import io
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatoken.base.errors import ConfigError, DataError
from megatoken.text import corpus_reader as reader
from megatoken.text.corpus_reader import Chunk, ReadPosition, read_chunks, sample_texts
from megatoken.text.documents import (
    PrepareOptions,
    encode_segments,
    find_split_point,
    read_documents,
)
from megatoken.text.sources import HUB, Source, find_source
from megatoken.text.text_files import ParquetRows
from megatoken.text.tokenizer import Tokenizer, load_tokenizer

PROSE = "It was the best of times, it didn't hurt.\n\n  Élan — 中文字符 x 12 y\t\n"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return load_tokenizer("bpe:300", lambda: iter([PROSE * 20]))


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read_all(source: str | Path | Source, **options: Any) -> tuple[list[str], dict[str, int]]:
    """Texts of all whole documents, and the counts."""
    source = source if isinstance(source, Source) else find_source(str(source))
    texts, counts = [], Counter()
    chosen = PrepareOptions(**options)
    is_open = False
    for chunk in read_chunks(source, chosen, ReadPosition()):
        counts.update(chunk.counts)
        for segment in chunk.segments:
            found = list(read_documents(segment, chosen, counts))
            assert is_open == bool(segment.split)
            if is_open:
                texts[-1] += found.pop(0)
            texts += found
            is_open = not segment.ends
    assert not is_open
    return texts, {name: count for name, count in counts.items() if count}


def refuse(source: str | Path | Source, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_all(source, **options)
    return str(caught.value)


def resume_everywhere(source: Source, options: PrepareOptions) -> list[Chunk]:
    """Return the chunks of a source, which are the same from the end of any other on."""
    chunks = list(read_chunks(source, options, ReadPosition()))
    assert chunks[-1].done_bytes == source.size_bytes
    for number, chunk in enumerate(chunks[:-1], 1):
        assert list(read_chunks(source, options, chunk.next)) == chunks[number:]
    return chunks


def list_names(spec: str | Path, **options: Any) -> list[str]:
    return [file.name for file in find_source(str(spec), **options).files]


# --- one file of each format
# -----------------------------------------------------------------------------------


@pytest.mark.fault(37, 38)
def test_text_files_are_documents_and_the_separator_parts_them(tmp_path: Path):
    text = "one<|endoftext|>two\r\n<|endoftext|><|endoftext|>\n <|endoftext|>"
    write(tmp_path / "a.txt", f"<|endoftext|>{text}")
    write(tmp_path / "b.md", "three<|endoftext|>still three")
    write(tmp_path / "deep/c.TXT", "")
    write(tmp_path / "deep/d.txt", "\ufeff four \n")
    write(tmp_path / "picture.png", b"\x89PNG\0")
    write(tmp_path / ".hidden.txt", "no")
    write(tmp_path / "binary.txt", b"text\0text")
    far = "x" * 9000 + "\0"  # a NUL far from the beginning is a character
    write(tmp_path / "far.txt", far)
    texts = ["one", "two\r\n", "three<|endoftext|>still three", " four \n", far]
    assert read_all(tmp_path) == (texts, {"empty": 4, "binary_files": 1})


def pack(data: bytes, suffix: str) -> bytes:
    if suffix.startswith(".gz"):
        return gzip.compress(data)
    return pyarrow.compress(data, "zstd", asbytes=True) if suffix.startswith(".zst") else data


def write_rows(path: Path, form: str, rows: list[dict[str, Any]]) -> None:
    """Write rows as "array", "lines", "parquet" or with a delimiter, compressed as the name of the file says."""
    if form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
        return
    text = io.StringIO()
    if form == "array":
        json.dump(rows, text, indent=1)
    elif form == "lines":
        text.writelines(json.dumps(row) + "\n\n" for row in rows)
    else:
        writer = csv.DictWriter(text, [*rows[0]], delimiter=form)
        writer.writeheader()
        writer.writerows(rows)
    write(path, pack(text.getvalue().encode(), path.suffix))


FORMS = {
    "lines": "a.jsonl a.ndjson.gz a.jsonl.zst a.json a.json.gz",
    "array": "b.json b.json.gz b.json.zst b.jsonl",
    ",": "a.csv a.csv.zst",
    "\t": "a.tsv a.TSV.gz",
    "parquet": "a.parquet",
}


NAMES = {name: form for form, names in FORMS.items() for name in names.split()}


@pytest.mark.parametrize("name", NAMES)
def test_rows_give_one_document_each(tmp_path: Path, name: str):
    texts = ["one", 'tw\u00f6 "[2]"\r\n, {x}\t]', *(f"row {number} é" * 9 for number in range(30))]
    rows = [{"id": number, "text": text} for number, text in enumerate([*texts, "", "last"])]
    write_rows(tmp_path / name, NAMES[name], rows)
    source, expected = find_source(str(tmp_path)), ([*texts, "last"], {"empty": 1})
    assert read_all(source) == expected
    assert read_all(source, chunk_bytes=50) == expected
    resume_everywhere(source, PrepareOptions(chunk_bytes=50))
    place = ":1" if NAMES[name] == "lines" else ", row 1"
    assert f"{tmp_path / name}{place} " in refuse(source, text_key="body")


@pytest.mark.parametrize("dtype", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_bytes_of_parquet_are_text(tmp_path: Path, dtype: pyarrow.DataType):
    values = pyarrow.array([b"one \xe9", "é".encode()]).cast(dtype, safe=False)
    parquet.write_table(pyarrow.table({"day": [1.5, 2], "text": values}), tmp_path / "a.parquet")
    assert read_all(tmp_path) == (["one \ufffd", "é"], {"replaced": 1})
    assert read_all(tmp_path, invalid="skip") == (["é"], {"skipped": 1})


def test_rows_of_parquet_are_read_from_any_row_on(tmp_path: Path):
    draw, path = random.Random(0), tmp_path / "a.parquet"
    texts = [f"{number} " * draw.randrange(300) for number in range(200)]
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=30)
    rows = ParquetRows(find_source(str(path)).files[0], "text")
    for _ in range(300):
        first, end = sorted(draw.choices(range(201), k=2))
        assert [row["text"].decode() for row in rows.read(first, end)] == texts[first:end]


# --- bytes that are no text
# --------------------------------------------------------------------------------------


@pytest.mark.fault(37)
@pytest.mark.parametrize(
    ("name", "data", "texts", "line"),
    [
        (
            "a.txt",
            b"fine\n<|endoftext|>\nb\xffad \xe2\x82 x<|endoftext|>good",
            ["fine\n", "\nb\ufffdad \ufffd x", "good"],
            3,
        ),
        (
            "a.jsonl",
            b'{"text": "a\xff"}\n{"text": "b\\ud800"}\n{"text": "c\\ud83d\\ude00"}',
            ["a\ufffd", "b\ufffd", "c😀"],
            1,
        ),
    ],
)
def test_invalid_utf8_is_replaced_skipped_or_refused(
    tmp_path: Path, name: str, data: bytes, texts: list[str], line: int
):
    path = write(tmp_path / name, data)
    valid = [text for text in texts if "\ufffd" not in text]
    n_invalid = len(texts) - len(valid)
    assert read_all(path) == (texts, {"replaced": n_invalid})
    assert read_all(path, invalid="skip") == (valid, {"skipped": n_invalid})
    assert f"{path}:{line}" in refuse(path, invalid="fail")


# --- long documents
# ------------------------------------------------------------------------------------------------


PARTS = "a|Zebra| b|\n|  |\r\n|é|\u3000|\xa0|中文|'s|12|<"
TEXTS = st.lists(
    st.sampled_from([part.encode() for part in (*PARTS.split("|"), "<|endoftext|>")])
    | st.binary(max_size=3),
    max_size=60,
).map(b"".join)


@given(
    data=TEXTS,
    size=st.integers(20, 60),
    form=st.sampled_from(["a.txt", "a.md", "a.txt.gz", "a.txt.zst"]),
)
@settings(deadline=None, max_examples=150)
def test_blocks_change_no_text_and_no_id(
    bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int, form: str
):
    data = data.replace(b"\0", b"0")
    path = write(tmp_path_factory.mktemp("corpus") / form, pack(data, Path(form).suffix))
    source = find_source(str(path))
    choices = [
        {"split_points": split_points, "invalid": invalid}
        for split_points in ("words", "anywhere", "nowhere")
        for invalid in ("replace", "skip")
    ]
    expected = [read_all(source, **choice) for choice in choices]
    options, ids, seams = PrepareOptions(chunk_bytes=size, **choices[0]), [], 0
    for choice, (texts, counts) in zip(choices, expected, strict=True):
        found, found_counts = read_all(source, chunk_bytes=size, **choice)
        found_counts.pop("seams", 0)
        if "skipped" not in counts:  # invalid bytes of a long document are replaced
            assert found == texts
            if "replaced" not in counts:  # counted once a part here
                assert found_counts == counts
    for chunk in resume_everywhere(source, options):
        encoded = encode_segments(chunk.segments, options, bpe)
        ids += encoded.train.tolist()
        seams += chunk.counts.get("seams", 0) + encoded.counts.get("seams", 0)
    if not seams:
        texts, _ = expected[0]
        assert ids == [id for text in texts for id in (bpe.eot, *bpe.encode(text).tolist())]


def test_invalid_bytes_of_a_long_document(tmp_path: Path):
    options = {"split_points": "words", "chunk_bytes": 40}
    prose = PROSE * 9
    data = f"one<|endoftext|>{prose}\udcff{prose}<|endoftext|>two\udcff"
    path = write(tmp_path / "a.txt", data.encode(errors="surrogateescape"))
    expected = (["one", f"{prose}\ufffd{prose}"], {"replaced": 1, "skipped": 1})
    assert read_all(path, invalid="skip", **options) == expected
    message = refuse(path, invalid="fail", **options)
    assert f"{path}:{1 + prose.count(chr(10))}" in message


# How a text may be cut, the text with ^ where it is, and whether that is between words.
SEAMS = (
    "words~alpha beta^ gam~True",
    "anywhere~alpha beta ga^m~True",
    "nowhere~alpha beta^ gam~False",
    "words~alphabe^t~False",
    "anywhere~zé^é~True",
    "words~字\u3000 ^字~False",  # not between two white spaces
    "words~字^\n字~True",
    "anywhere~abc^<|endof~True",
    "anywhere~<<^<<~True",
)


@pytest.mark.parametrize("row", SEAMS)
def test_seams(row: str):
    split_points, text, is_between_words = row.split("~")
    before, after = text.encode().split(b"^")
    found = find_split_point(before + after, split_points)
    assert found == (len(before), is_between_words == "True")


# --- split and sample
# --------------------------------------------------------------------------------------------


def test_a_sample_is_bounded_even_and_repeatable(tmp_path: Path):
    for number in range(4):
        lines = (f"{number} line {line}\n" for line in range(2000))
        write(tmp_path / f"{number}.txt", "".join(lines))
    for number in range(50):
        write(tmp_path / f"small{number}.txt", f"small {number}\n")
    write(tmp_path / "z.jsonl", '{"text": "json"}\nbroken\n' * 500)

    def sample(path, count):
        options = PrepareOptions(chunk_bytes=1000)
        return "".join(sample_texts(find_source(str(path)), options, count))

    text = sample(tmp_path, 20_000)
    assert text == sample(tmp_path, 20_000)
    assert 12_000 < len(text) < 24_000
    assert all(f"{number} line" in text for number in range(4))
    assert sample(tmp_path / "1.txt", 10**6) == (tmp_path / "1.txt").read_text()


# --- what a source is
# ----------------------------------------------------------------------------------------------


def test_folders_and_patterns_are_sorted_and_leave_the_output_out(tmp_path: Path):
    for name in ("b.txt", "a/z.txt", "a/b.md", "out/x.txt", "c.py"):
        write(tmp_path / name, name)
    assert list_names(tmp_path, exclude=tmp_path / "out") == ["a/b.md", "a/z.txt", "b.txt"]
    assert list_names(f"{tmp_path}/**/*.txt") == ["a/z.txt", "b.txt", "out/x.txt"]
    source = find_source(str(tmp_path))
    assert source.digest(times=True) != source.digest(times=False)


def test_folders_skip_cards_and_count_what_they_skip(tmp_path: Path):
    snapshot, elsewhere = tmp_path / "snapshot", tmp_path / "elsewhere"
    write(snapshot / "data/train.jsonl", '{"text": "one"}')
    for name in ("README.md", "dataset_infos.json", "a.pdf", "b.pdf", "LICENSE"):
        write(snapshot / name, name)
    write(elsewhere / "b.txt", "two")
    (snapshot / "linked").symlink_to(elsewhere)  # a folder
    (snapshot / "linked2").symlink_to(snapshot / "linked")
    (elsewhere / "loop").symlink_to(snapshot)
    (snapshot / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert list_names(snapshot) == ["data/train.jsonl", "linked/b.txt"]
    counts = {".pdf": 2, "README.md": 1, "dataset_infos.json": 1, "no extension": 1}
    assert find_source(str(snapshot)).skipped == counts
    assert read_all(snapshot / "README.md") == (["README.md"], {})


def test_a_corpus_with_the_name_of_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "python/a.txt", "text")
    with pytest.raises(ConfigError):
        find_source("python")
    assert list_names("./python") == ["a.txt"]
    write(tmp_path / "b.py", "x = 1")
    assert list_names("python", root=tmp_path) == ["b.py"]


def test_python_is_always_there():
    names = list_names("python")
    assert {"ast.py", "json/decoder.py", "argparse.py", "_pydecimal.py"} < {*names}
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]
    assert not [name for name in names if name.startswith(("encodings/", "pydoc_data/"))]
    assert not {"html/entities.py", "stringprep.py", "locale.py", "keyword.py"} & {*names}  # tables


def test_tables_are_left_out_of_the_corpus_python(tmp_path: Path):
    code = "def area(side):\n    return side * side\n" * 4
    docstring = '"""Tables."""\n' + '    """Docstring."""\n' * 20
    strings = "names = {\n" + "    'eacute': 'small e, acute accent',\n" * 3 + "}\n"
    numbers = "ids = [\n" + "    0x0041, -1, (2.5, None),\n" * 3 + "]\n"
    kept = {"code": code, "docstring": docstring, "empty": "", "long_code": code * 2 + strings}
    others = {"strings": strings, "numbers": numbers, "mixed": code + strings}
    for name, text in (kept | others).items():
        write(tmp_path / f"{name}.py", text)
    assert list_names("python", root=tmp_path) == [f"{name}.py" for name in kept]


BAD_ROWS = ("{", '{"txt": 1}', '{"text": null}', "3", "[" * 100_000)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("a.jsonl", f'{{"text": "one"}}\n\n{row}\n{{"text": "two"}}\n') for row in BAD_ROWS),
        ("a.json", '[{"text": "one"}, {"text": ""}, [1], {"text": "two"}]'),
        ("a.csv", 'text,n\none,1\n"",2\na,b,3\ntwo,4'),
        ("a.csv", 'text,n\none,1\n"",2\n"he said "yes" to it",3\n"two",4'),
        ("a.csv", 'text,n\none,1\n\n"",2\n\n"open,3\ntwo,4'),
        ("a.tsv", "n\ttext\n1\tone\n2\t\n3\n4\ttwo"),
    ],
)
def test_bad_rows_are_refused_or_skipped(tmp_path: Path, name: str, content: str):
    path = write(tmp_path / name, content)
    place = f"{path}:3" if name == "a.jsonl" else f"{path}, row 3"
    assert place in refuse(path)
    texts, counts = read_all(path, invalid="skip")
    assert (texts, counts["skipped"]) == (["one", "two"], 1)


BAD_FILES = {
    "header.csv": b'"text\na\nb',
    "element.json": b'[{"text": "a"}, {"text": 01}]',
    "end.json": b'[{"text": "a"}',
    "two.json": b'[{"text": "a"}]\n[2]',
    "long.jsonl": b'{"text": "one"}\n' + b"x" * 5000,
    "cut.txt.gz": pack(PROSE.encode() * 999, ".gz")[:100],
    "cut.txt.zst": pack(PROSE.encode() * 999, ".zst")[:50],
    "cut.parquet": b"PAR1 no PAR1",
    **{f"utf16-{name}": pack('text\n"a"'.encode("utf-16"), Path(name).suffix) for name in NAMES},
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(reader, "LARGEST_ROW", 512)
    path = write(tmp_path / name, BAD_FILES[name])
    for invalid in ("replace", "skip"):
        assert str(path) in refuse(path, invalid=invalid, chunk_bytes=64)


@pytest.mark.fault(39)
def test_a_file_that_changes_is_refused(tmp_path: Path):
    source = find_source(str(write(tmp_path / "a.txt", "text")))
    write(tmp_path / "a.txt", "longer text")
    refuse(source)


def test_what_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    os.mkfifo("pipe")
    for spec in ("nowhere", "*.nothing", ".", "pipe", "fineweb"):
        with pytest.raises(DataError):
            find_source(spec)
    for name in ("tinyshakespeare", "python", "tinystories"):
        with pytest.raises(DataError):
            find_source(name, root=tmp_path)
    for spec in ("s3://bucket/a.txt", "gs://bucket/*.txt", ""):
        with pytest.raises(ConfigError):
            find_source(spec)


def test_named_corpora_are_read_from_a_local_copy(tmp_path: Path):
    write(tmp_path / "input.txt", "First Citizen:")
    assert read_all(find_source("tinyshakespeare", root=tmp_path)) == (["First Citizen:"], {})
    for name, (_, pattern) in HUB.items():
        path = tmp_path / name / pattern.replace("*", "a")
        write(path.parent / "validation-00000.txt", "not read")
        parquet.write_table(pyarrow.table({"text": [name]}), path)
        assert read_all(find_source(name, root=tmp_path / name)) == ([name], {})

"""Pieces and documents: every policy with its exact counts, and cuts that change no id."""

import csv
import gzip
import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatoken.data import corpus_reader as reader
from megatoken.data import documents
from megatoken.data.corpus_reader import ReadPosition, read_chunks, sample_texts
from megatoken.data.documents import (
    PrepareOptions,
    choose_split,
    encode_segments,
    find_split_point,
    read_documents,
)
from megatoken.data.sources import HUB, Source, find_source
from megatoken.data.tokenizer import SplitPoints, Tokenizer, load_tokenizer
from megatoken.errors import ConfigError, DataError

PROSE = "It was the best of times, it didn't hurt.\n\n  Élan — 中文字符 x 12 y\t\n"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return load_tokenizer("bpe:300", lambda: iter([PROSE * 20]))


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read_all(source: Source, **options: Any) -> tuple[list[str], dict[str, int]]:
    """Texts of all whole documents, and the counts."""
    texts: list[str] = []
    counts: Counter[str] = Counter()
    chosen = PrepareOptions(**options)
    goes_on = False
    for chunk in read_chunks(source, chosen, ReadPosition()):
        counts.update(chunk.counts)
        for segment in chunk.segments:
            found = list(read_documents(segment, chosen, counts))
            assert goes_on == bool(segment.split)
            if goes_on:
                texts[-1] += found.pop(0)
            texts += found
            goes_on = not segment.ends
    assert not goes_on
    return texts, {name: count for name, count in counts.items() if count}


def refuse(source: str | Path | Source, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read_all(source if isinstance(source, Source) else find_source(str(source)), **options)
    return caught.value


# --- one file of each format
# -----------------------------------------------------------------------------------


@pytest.mark.fault(37)
def test_text_files_are_documents_and_the_separator_parts_them(tmp_path: Path):
    write(tmp_path / "a.txt", "one<|endoftext|>two\r\n<|endoftext|>")
    write(tmp_path / "b.md", "three<|endoftext|>still three")
    write(tmp_path / "deep" / "c.TXT", "")
    write(tmp_path / "deep" / "d.txt", "\ufeff four \n")
    write(tmp_path / "picture.png", b"\x89PNG\0")
    write(tmp_path / ".hidden.txt", "no")
    texts, counts = read_all(find_source(str(tmp_path)))
    assert texts == ["one", "two\r\n", "three<|endoftext|>still three", " four \n"]
    assert counts == {"empty": 1}


@pytest.mark.fault(38)
def test_empty_documents_between_separators_are_counted(tmp_path: Path):
    path = write(
        tmp_path / "a.txt", "<|endoftext|>one<|endoftext|><|endoftext|>\n <|endoftext|>two"
    )
    assert read_all(find_source(str(path))) == (["one", "two"], {"empty": 3})


def pack(data: bytes, compression: str) -> bytes:
    if compression == ".gz":
        return gzip.compress(data)
    return pyarrow.compress(data, "zstd", asbytes=True) if compression == ".zst" else data


def write_rows(path: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows as "array", "lines", "csv", "tsv" or "parquet", compressed as the name of the file says."""
    text = (
        json.dumps(rows, indent=1)
        if form == "array"
        else "".join(json.dumps(row) + "\n\n" for row in rows)
    )
    if form in ("csv", "tsv"):
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, list(rows[0]), delimiter="," if form == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        text = buffer.getvalue()
    if form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
        return path
    return write(path, pack(text.encode(), path.suffix))


FORMS = {
    **dict.fromkeys(("a.jsonl", "a.ndjson.gz", "a.jsonl.zst", "a.json", "a.json.gz"), "lines"),
    **dict.fromkeys(("b.json", "b.json.gz", "b.json.zst", "b.jsonl"), "array"),
    **dict.fromkeys(("a.csv", "a.csv.zst"), "csv"),
    **dict.fromkeys(("a.tsv", "a.TSV.gz"), "tsv"),
    "a.parquet": "parquet",
}


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_rows_give_one_document_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
):
    texts = [
        "one",
        'tw\u00f6 "[2]"\r\n, {x}\t]',
        "",
        *(f"row {number} é" * 9 for number in range(30)),
    ]
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    source = find_source(str(write_rows(tmp_path / name, form, rows).parent))
    expected = [text for text in texts if text]
    assert read_all(source) == (expected, {"empty": 1})
    shrink(monkeypatch, 50)
    assert read_all(source) == (expected, {"empty": 1})
    options = PrepareOptions()
    chunks = list(read_chunks(source, options, ReadPosition()))
    assert chunks[-1].done_bytes == source.size_bytes
    for number, chunk in enumerate(chunks[:-1]):
        assert list(read_chunks(source, options, chunk.next)) == chunks[number + 1 :]
    assert f"{tmp_path / name}{':1' if form == 'lines' else ', row 1'} " in str(
        refuse(source, text_key="body")
    )


@pytest.mark.parametrize("dtype", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_bytes_of_parquet_are_text(tmp_path: Path, dtype: pyarrow.DataType):
    values = pyarrow.array([b"one \xe9", "é".encode()]).cast(dtype, safe=False)
    parquet.write_table(pyarrow.table({"day": [1.5, 2], "text": values}), tmp_path / "a.parquet")
    assert read_all(find_source(str(tmp_path))) == (["one \ufffd", "é"], {"replaced": 1})
    assert read_all(find_source(str(tmp_path)), invalid="skip") == (["é"], {"skipped": 1})


# --- bytes that are no text
# --------------------------------------------------------------------------------------


@pytest.mark.fault(37)
def test_invalid_utf8_is_replaced_skipped_or_refused(tmp_path: Path):
    path = write(tmp_path / "a.txt", b"fine\n<|endoftext|>\nb\xffad \xe2\x82 x<|endoftext|>good")
    source = find_source(str(path))
    assert read_all(source) == (["fine\n", "\nb\ufffdad \ufffd x", "good"], {"replaced": 1})
    assert read_all(source, invalid="skip") == (["fine\n", "good"], {"skipped": 1})
    assert f"{path}:3" in str(refuse(source, invalid="fail"))


@pytest.mark.fault(37)
def test_invalid_utf8_in_jsonl(tmp_path: Path):
    lines = [b'{"text": "a\xff"}', b'{"text": "b\\ud800"}', b'{"text": "c\\ud83d\\ude00"}']
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    source = find_source(str(path))
    assert read_all(source) == (["a\ufffd", "b\ufffd", "c😀"], {"replaced": 2})
    assert read_all(source, invalid="skip") == (["c😀"], {"skipped": 2})
    assert f"{path}:1" in str(refuse(source, invalid="fail"))


@pytest.mark.fault(37)
def test_binary_files_are_skipped(tmp_path: Path):
    write(tmp_path / "a.txt", b"text\0text")
    write(tmp_path / "b.txt", "text")
    write(tmp_path / "c.txt", b"x" * 9000 + b"\0")  # a NUL far from the beginning is a character
    texts, counts = read_all(find_source(str(tmp_path)))
    assert texts == ["text", "x" * 9000 + "\0"]
    assert counts == {"binary_files": 1}


# --- long documents
# ------------------------------------------------------------------------------------------------


def shrink(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (reader, documents):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)


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
    for split_points in ("words", "anywhere", "nowhere"):
        for invalid in ("replace", "skip"):
            expected = read_all(source, split_points=split_points, invalid=invalid)
            with pytest.MonkeyPatch.context() as patch:
                shrink(patch, size)
                texts, counts = read_all(source, split_points=split_points, invalid=invalid)
                counts.pop("seams", 0)
                if "skipped" not in expected[1]:  # invalid bytes of a long document are replaced
                    assert texts == expected[0]
                    if "replaced" not in counts:  # counted once a part here
                        assert counts == expected[1]
                options = PrepareOptions(split_points="words", invalid="replace")
                ids: list[int] = []
                seams = 0
                for chunk in read_chunks(source, options, ReadPosition()):
                    encoded = encode_segments(chunk.segments, options, bpe)
                    ids += encoded.train.tolist()
                    seams += chunk.counts.get("seams", 0) + encoded.counts.get("seams", 0)
            if not seams:
                assert ids == [
                    id
                    for text in read_all(source)[0]
                    for id in (bpe.eot, *bpe.encode(text).tolist())
                ]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_reading_goes_on_at_every_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    shrink(monkeypatch, 50)
    write(tmp_path / name, pack(PROSE.encode() * 9, Path(name).suffix))
    write(tmp_path / "z.txt", "last")
    source, options = find_source(str(tmp_path)), PrepareOptions(split_points="words")
    whole = list(read_chunks(source, options, ReadPosition()))
    assert len(whole) > 5
    assert whole[-1].done_bytes == source.size_bytes
    assert whole[-1].next == ReadPosition(2)
    for number, chunk in enumerate(whole[:-1]):
        assert list(read_chunks(source, options, chunk.next)) == whole[number + 1 :]


def test_invalid_bytes_of_a_long_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch, 40)
    prose = PROSE * 9
    path = write(
        tmp_path / "a.txt",
        b"one<|endoftext|>%b\xff%b<|endoftext|>two\xff" % ((prose.encode(),) * 2),
    )
    texts, counts = read_all(find_source(str(path)), invalid="skip", split_points="words")
    assert (texts, counts) == (["one", f"{prose}\ufffd{prose}"], {"replaced": 1, "skipped": 1})
    message = str(refuse(path, invalid="fail", split_points="words"))
    assert f"{path}:{1 + prose.count(chr(10))}" in message


@pytest.mark.parametrize(
    ("data", "split_points", "expected"),
    [
        (b"alpha beta gam", "words", (10, True)),
        (b"alpha beta gam", "anywhere", (13, True)),
        (b"alpha beta gam", "nowhere", (10, False)),
        (b"alphabet", "words", (7, False)),
        ("zéé".encode(), "anywhere", (3, True)),
        ("字\u3000 字".encode(), "words", (7, False)),  # not between two white spaces
        ("字\n字".encode(), "words", (3, True)),
        (b"abc<|endof", "anywhere", (3, True)),
        (b"<<<<", "anywhere", (2, True)),
    ],
)
def test_seams(data: bytes, split_points: SplitPoints, expected: tuple[int, bool]):
    assert find_split_point(data, split_points) == expected


# --- split and sample
# --------------------------------------------------------------------------------------------


def test_the_split_depends_on_the_beginning_alone():
    beginnings = [f"document {number} " + "é" * 3000 for number in range(2000)]
    sides = [choose_split(text, 0.1) for text in beginnings]
    assert sides == [choose_split(text + "more", 0.1) for text in beginnings]
    assert 150 < sides.count("val") < 250
    assert {choose_split(text, 0.0) for text in beginnings} == {"train"}


def test_a_sample_is_bounded_even_and_repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch, 1000)
    for number in range(4):
        write(
            tmp_path / f"{number}.txt", "".join(f"{number} line {line}\n" for line in range(2000))
        )
    for number in range(50):
        write(tmp_path / f"small{number}.txt", f"small {number}\n")
    write(tmp_path / "z.jsonl", '{"text": "json"}\nbroken\n' * 500)
    source = find_source(str(tmp_path))
    texts = list(sample_texts(source, PrepareOptions(), 20_000))
    assert texts == list(sample_texts(source, PrepareOptions(), 20_000))
    assert 12_000 < sum(map(len, texts)) < 24_000
    assert all(any(f"{number} line" in text for text in texts) for number in range(4))
    assert (
        "".join(sample_texts(find_source(f"{tmp_path}/1.txt"), PrepareOptions(), 10**6))
        == (tmp_path / "1.txt").read_text()
    )


# --- what a source is
# ----------------------------------------------------------------------------------------------


def test_folders_and_patterns_are_sorted_and_leave_the_output_out(tmp_path: Path):
    for name in ("b.txt", "a/z.txt", "a/b.md", "out/x.txt", "c.py"):
        write(tmp_path / name, name)
    source = find_source(str(tmp_path), exclude=tmp_path / "out")
    assert [file.name for file in source.files] == ["a/b.md", "a/z.txt", "b.txt"]
    pattern = find_source(f"{tmp_path}/**/*.txt")
    assert [file.name for file in pattern.files] == ["a/z.txt", "b.txt", "out/x.txt"]
    assert source.digest(times=True) != source.digest(times=False)


def test_folders_skip_cards_and_count_what_they_skip(tmp_path: Path):
    snapshot = tmp_path / "snapshot"
    write(snapshot / "data" / "train.jsonl", '{"text": "one"}')
    write(snapshot / "README.md", "# Dataset card")
    write(snapshot / "dataset_infos.json", "{}")
    for name in ("a.pdf", "b.pdf", "LICENSE"):
        write(snapshot / name, "x")
    write(tmp_path / "elsewhere" / "b.txt", "two")
    (snapshot / "linked").symlink_to(tmp_path / "elsewhere")  # a folder
    (snapshot / "linked2").symlink_to(snapshot / "linked")
    (tmp_path / "elsewhere" / "loop").symlink_to(snapshot)
    (snapshot / "gone.txt").symlink_to(tmp_path / "nowhere")
    source = find_source(str(snapshot))
    assert [file.name for file in source.files] == ["data/train.jsonl", "linked/b.txt"]
    counts = {".pdf": 2, "README.md": 1, "dataset_infos.json": 1, "no extension": 1}
    assert source.skipped == counts
    assert read_all(find_source(f"{snapshot}/README.md")) == (["# Dataset card"], {})


def test_a_corpus_with_the_name_of_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "python" / "a.txt", "text")
    with pytest.raises(ConfigError):
        find_source("python")
    assert [file.name for file in find_source("./python").files] == ["a.txt"]
    write(tmp_path / "b.py", "x = 1")
    assert [file.name for file in find_source("python", root=tmp_path).files] == ["b.py"]


def test_python_is_always_there():
    names = [file.name for file in find_source("python").files]
    assert {"ast.py", "json/decoder.py", "argparse.py", "_pydecimal.py"} < {*names}
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]
    assert not [name for name in names if name.startswith(("encodings/", "pydoc_data/"))]
    assert not {"html/entities.py", "stringprep.py", "locale.py", "keyword.py"} & {*names}  # tables
    assert len(names) > 300


def test_tables_are_left_out_of_the_corpus_python(tmp_path: Path):
    code = "def area(side):\n    return side * side\n" * 4
    docstring = '"""Tables."""\n' + '    """Docstring."""\n' * 20
    strings = "names = {\n" + "    'eacute': 'small e, acute accent',\n" * 3 + "}\n"
    numbers = "ids = [\n" + "    0x0041, -1, (2.5, None),\n" * 3 + "]\n"
    files = {"code": code, "docstring": docstring, "strings": strings, "numbers": numbers}
    files |= {"mixed": code + strings, "long_code": code * 2 + strings, "empty": ""}
    for name, text in files.items():
        write(tmp_path / f"{name}.py", text)
    names = [file.name for file in find_source("python", root=tmp_path).files]
    assert names == ["code.py", "docstring.py", "empty.py", "long_code.py"]


@pytest.mark.parametrize(
    ("name", "start", "row", "end"),
    [
        *(
            ("a.jsonl", '{"text": "one"}\n\n', row, '\n{"text": "two"}\n')
            for row in ("{", '{"txt": 1}', '{"text": null}', "3", "[" * 100_000)
        ),
        ("a.json", '[{"text": "one"}, {"text": ""}', ", [1]", ', {"text": "two"}]'),
        ("a.csv", 'text,n\none,1\n"",2\n', "a,b,3\n", "two,4"),
        ("a.csv", 'text,n\none,1\n"",2\n', '"he said "yes" to it",3\n', '"two",4'),
        ("a.csv", 'text,n\none,1\n\n"",2\n\n', '"open,3\n', "two,4"),
        ("a.tsv", "n\ttext\n1\tone\n2\t\n", "3\n", "4\ttwo"),
    ],
)
def test_bad_rows_are_refused_or_skipped(tmp_path: Path, name: str, start: str, row: str, end: str):
    path = write(tmp_path / name, start + row + end)
    place = f"{path}:3" if name == "a.jsonl" else f"{path}, row 3"
    assert place in str(refuse(path))
    texts, counts = read_all(find_source(str(path)), invalid="skip")
    assert (texts, counts["skipped"]) == (["one", "two"], 1)


BAD_FILES: dict[str, bytes] = {
    "header.csv": b'"text\na\nb',
    "element.json": b'[{"text": "a"}, {"text": 01}]',
    "end.json": b'[{"text": "a"}',
    "two.json": b'[{"text": "a"}]\n[2]',
    "long.jsonl": b'{"text": "one"}\n' + b"x" * 5000,
    "cut.txt.gz": gzip.compress(PROSE.encode() * 999)[:100],
    "cut.txt.zst": pyarrow.compress(PROSE.encode() * 999, "zstd", asbytes=True)[:50],
    "cut.parquet": b"PAR1 no PAR1",
    **{f"utf16-{name}": pack('text\n"a"'.encode("utf-16"), Path(name).suffix) for name in FORMS},
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    shrink(monkeypatch, 64)
    monkeypatch.setattr(reader, "LARGEST_ROW", 512)
    path = write(tmp_path / name, BAD_FILES[name])
    for invalid in ("replace", "skip"):
        assert str(path) in str(refuse(path, invalid=invalid))


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
        path.parent.mkdir(parents=True)
        parquet.write_table(pyarrow.table({"text": [name]}), path)
        write(path.parent / "validation-00000.txt", "not read")
        assert read_all(find_source(name, root=tmp_path / name)) == ([name], {})

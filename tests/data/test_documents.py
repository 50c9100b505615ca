"""Pieces and documents: every policy with its exact counts, and cuts that change no id."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatoken.data import blocks, documents
from megatoken.data.blocks import Cursor, read_blocks, sample_texts
from megatoken.data.documents import Rules, choose_split, encode_pieces, find_seam, read_documents
from megatoken.data.sources import NAMES, Source, classify, find_source
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import Exit, Fault

PROSE = "It was the best of times, it didn't hurt.\n\n  Élan — 中文字符 x 12 y\t\n"


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return load_tokenizer("bpe:300", lambda: iter([PROSE * 20]))


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read_all(source: Source, **rules: Any) -> tuple[list[str], dict[str, int]]:
    """Texts of all whole documents, and the counts."""
    texts: list[str] = []
    counts: Counter[str] = Counter()
    settled = Rules(**rules)
    is_open = False
    for block in read_blocks(source, settled, Cursor()):
        counts.update(block.counts)
        for piece in block.pieces:
            for document in read_documents(piece, settled, counts):
                assert document.begins != is_open
                texts.append(document.text) if document.begins else texts.append(texts.pop() + document.text)
                counts["replaced"] += document.replaced
                is_open = not document.ends
    assert not is_open
    return texts, {name: count for name, count in counts.items() if count}


def refuse(source: str | Path | Source, **rules: Any) -> Fault:
    with pytest.raises(Fault) as caught:
        read_all(source if isinstance(source, Source) else find_source(str(source)), **rules)
    assert caught.value.code == Exit.DATA
    return caught.value


# --- one file of each kind -------------------------------------------------------------------------------------


def test_text_files_are_documents_and_the_separator_parts_them(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one<|endoftext|>two\r\n<|endoftext|>")
    write(tmp_path / "b.md", "three<|endoftext|>still three")
    write(tmp_path / "deep" / "c.TXT", "")
    write(tmp_path / "deep" / "d.txt", "\ufeff four \n")
    write(tmp_path / "picture.png", b"\x89PNG\0")
    write(tmp_path / ".hidden.txt", "no")
    texts, counts = read_all(find_source(str(tmp_path)))
    assert texts == ["one", "two\r\n", "three<|endoftext|>still three", " four \n"]
    assert counts == {"empty": 1}


def test_empty_documents_between_separators_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "<|endoftext|>one<|endoftext|><|endoftext|>\n <|endoftext|>two")
    assert read_all(find_source(str(path))) == (["one", "two"], {"empty": 3})


def pack(data: bytes, compression: str) -> bytes:
    if compression == ".gz":
        return gzip.compress(data)
    return pyarrow.compress(data, "zstd", asbytes=True) if compression == ".zst" else data


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_jsonl_gives_one_document_a_line(tmp_path: Path, compression: str) -> None:
    rows = ['{"text": "one", "id": 1}', "", '{"id": 2, "text": "tw\\u00f6\\n"}', '{"text": ""}', "  "]
    write(tmp_path / f"a.jsonl{compression}", pack("\n".join(rows).encode(), compression))
    assert read_all(find_source(str(tmp_path))) == (["one", "twö\n"], {"empty": 1})


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_parquet_gives_one_document_a_row(tmp_path: Path, kind: pyarrow.DataType) -> None:
    values = [f"row {number} é" for number in range(700)]
    table = pyarrow.table({"id": range(700), "body": pyarrow.array([v.encode() for v in values]).cast(kind)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    source = find_source(str(tmp_path))
    assert read_all(source, text_key="body") == (values, {})
    resumed = next(read_blocks(source, Rules(text_key="body"), Cursor(0, 650, 651)))
    assert [piece.data.decode() for piece in resumed.pieces] == values[650:]
    assert "no column 'text' (there are: id, body)" in str(refuse(source))


def test_parquet_without_text_in_a_row(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"]}), tmp_path / "a.parquet")
    assert "a.parquet, row 2" in str(refuse(tmp_path))
    assert read_all(find_source(str(tmp_path)), invalid="skip") == (["one", "three"], {"skipped": 1})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "must be a JSON object"),
        ('{"txt": "x"}', "no key 'text' (it has: txt)"),
        ('{"text": null}', "'text' is null, not a string"),
        ('{"text": 5}', "'text' is 5, not a string"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n\n' + line + '\n{"text": "two"}\n')
    fault = str(refuse(path))
    assert f"{path}:3" in fault
    assert reason in fault
    assert read_all(find_source(str(path)), invalid="skip") == (["one", "two"], {"skipped": 1})


# --- bytes that are no text --------------------------------------------------------------------------------------


def test_invalid_utf8_is_replaced_skipped_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"fine\n<|endoftext|>\nb\xffad \xe2\x82 x<|endoftext|>good")
    source = find_source(str(path))
    assert read_all(source) == (["fine\n", "\nb\ufffdad \ufffd x", "good"], {"replaced": 1})
    assert read_all(source, invalid="skip") == (["fine\n", "good"], {"skipped": 1})
    fault = str(refuse(source, invalid="fail"))
    assert f"{path}:3" in fault
    assert "0xff" in fault


def test_invalid_utf8_in_jsonl(tmp_path: Path) -> None:
    lines = [b'{"text": "a\xff"}', b'{"text": "b\\ud800"}', b'{"text": "c\\ud83d\\ude00"}']
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    source = find_source(str(path))
    assert read_all(source) == (["a\ufffd", "b\ufffd", "c😀"], {"replaced": 2})
    assert read_all(source, invalid="skip") == (["c😀"], {"skipped": 2})
    assert f"{path}:1" in str(refuse(source, invalid="fail"))


def test_binary_files_are_skipped_in_folders_and_refused_by_name(tmp_path: Path) -> None:
    binary = write(tmp_path / "a.txt", b"text\0text")
    write(tmp_path / "b.txt", "text")
    write(tmp_path / "c.txt", b"x" * 9000 + b"\0")  # a NUL far from the beginning is a character
    texts, counts = read_all(find_source(str(tmp_path)))
    assert texts == ["text", "x" * 9000 + "\0"]
    assert counts == {"binary_files": 1}
    assert "binary file" in str(refuse(binary))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.parquet"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    whole = pack(PROSE.encode() * 999, Path(name).suffix) if name != "a.parquet" else b"PAR1 no PAR1"
    path = write(tmp_path / name, whole[: len(whole) // 2])
    fault = str(refuse(path))
    assert str(path) in fault
    assert "cannot read" in fault


def test_a_file_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text")
    source = find_source(str(path))
    write(path, "longer text")
    assert "changed while" in str(refuse(source))


# --- long documents ------------------------------------------------------------------------------------------------


def shrink(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (blocks, documents):
        monkeypatch.setattr(module, "BLOCK_BYTES", size)


TEXTS = st.lists(
    st.sampled_from(
        ["a", "Zebra", " b", "\n", "  ", "\r\n", "é", "\u3000", "\xa0", "中文", "'s", "12", "<", "<|endoftext|>"]
    )
    | st.binary(max_size=3),
    max_size=60,
).map(lambda parts: b"".join(part.encode() if isinstance(part, str) else part for part in parts))


@given(data=TEXTS, size=st.integers(20, 60), form=st.sampled_from(["a.txt", "a.md", "a.txt.gz", "a.txt.zst"]))
@settings(deadline=None, max_examples=150)
def test_blocks_change_no_text_and_no_id(
    words: Tokenizer, tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int, form: str
) -> None:
    data = data.replace(b"\0", b"0")
    path = write(tmp_path_factory.mktemp("corpus") / form, pack(data, Path(form).suffix))
    source = find_source(str(path))
    for cuts in ("words", "anywhere", "nowhere"):
        for invalid in ("replace", "skip"):
            expected = read_all(source, cuts=cuts, invalid=invalid)
            with pytest.MonkeyPatch.context() as patch:
                shrink(patch, size)
                texts, counts = read_all(source, cuts=cuts, invalid=invalid)
                counts.pop("seams", 0)
                assert texts == expected[0]
                if "replaced" not in counts:  # counted once a part here
                    assert counts == expected[1]
                rules = Rules(cuts="words", invalid="replace")
                read = list(read_blocks(source, rules, Cursor()))
                pieces = [piece for block in read for piece in block.pieces]
                # A long document's cuts are counted where they are made, those of a long piece where it is read.
                counted = Counter({"seams": sum(block.counts.get("seams", 0) for block in read)})
                parts = [document for piece in pieces for document in read_documents(piece, rules, counted)]
            if not counted["seams"]:
                assert encode(parts, words) == [words.encode(text).tolist() for text in read_all(source)[0]]


def encode(parts: list[documents.Document], tokenizer: Tokenizer) -> list[list[int]]:
    ids: list[list[int]] = []
    for part in parts:
        if part.begins:
            ids.append([])
        ids[-1] += tokenizer.encode(part.text).tolist()
    return ids


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_reading_goes_on_at_every_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shrink(monkeypatch, 50)
    text = PROSE * 9 if "txt" in name else "".join(json.dumps({"text": PROSE}) + "\n" for _ in range(9))
    write(tmp_path / name, pack(text.encode(), Path(name).suffix))
    write(tmp_path / "z.txt", "last")
    source, rules = find_source(str(tmp_path)), Rules(cuts="words")
    whole = list(read_blocks(source, rules, Cursor()))
    assert len(whole) > 5
    assert whole[-1].done_bytes == source.size_bytes
    for number, block in enumerate(whole):
        assert list(read_blocks(source, rules, block.cursor)) == whole[number + 1 :]


def test_a_long_document_is_skipped_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, 40)
    bad = PROSE.encode() * 9 + b"\xff" + PROSE.encode() * 9
    path = write(tmp_path / "a.txt", b"one<|endoftext|>" + bad + b"<|endoftext|>two\xff<|endoftext|>three")
    texts, counts = read_all(find_source(str(path)), invalid="skip", cuts="words")
    assert (texts, counts) == (["one", "three"], {"skipped": 2})
    fault = str(refuse(path, invalid="fail", cuts="words"))
    assert f"{path}:{1 + 9 * PROSE.count(chr(10))}" in fault


def test_a_replaced_document_in_many_parts_counts_once(words: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one \xff two three \xff four")
    rules = Rules(cuts="words")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, 12)
        blocks = list(read_blocks(find_source(str(path)), rules, Cursor()))
        first, *rest = (encode_pieces(block.pieces, rules, words) for block in blocks)
    assert (first.counts, first.open, first.open_replaced) == ({"train": 1, "replaced": 1}, "train", True)
    assert [part.open for part in rest][-1] == ""
    assert any(part.carried_replaced for part in rest)
    assert all(part.counts.get("replaced", 0) == 0 for part in rest)


@pytest.mark.parametrize(
    ("data", "cuts", "expected"),
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
def test_seams(data: bytes, cuts: documents.Cuts, expected: tuple[int, bool]) -> None:
    assert find_seam(data, cuts) == expected


def test_a_cut_document_gives_the_ids_of_the_whole(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PROSE * 50
    piece = documents.Piece("a.parquet", 1, "rows", True, True, text.encode())
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)
    encoded = encode_pieces([piece], Rules(cuts="words"), words)
    assert encoded.train.tolist() == [words.eot, *words.encode(text).tolist()]
    assert encoded.counts == {"train": 1, "seams": 0}


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, 64)
    monkeypatch.setattr(blocks, "LINE_BYTES", 512)
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n' + "x" * 5000)
    assert f"{path}:2" in str(refuse(path))


# --- split and sample --------------------------------------------------------------------------------------------


def test_the_split_depends_on_the_beginning_alone() -> None:
    beginnings = [f"document {number} " + "é" * 3000 for number in range(2000)]
    sides = [choose_split(text, 0.1) for text in beginnings]
    assert sides == [choose_split(text + "more", 0.1) for text in beginnings]
    assert 150 < sides.count("val") < 250
    assert {choose_split(text, 0.0) for text in beginnings} == {"train"}


def test_a_sample_is_bounded_even_and_repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, 1000)
    for number in range(4):
        write(tmp_path / f"{number}.txt", "".join(f"{number} line {line}\n" for line in range(2000)))
    for number in range(50):
        write(tmp_path / f"small{number}.txt", f"small {number}\n")
    write(tmp_path / "z.jsonl", '{"text": "json"}\nbroken\n' * 500)
    source = find_source(str(tmp_path))
    texts = list(sample_texts(source, Rules(), 20_000))
    assert texts == list(sample_texts(source, Rules(), 20_000))
    assert 12_000 < sum(map(len, texts)) < 24_000
    assert all(any(f"{number} line" in text for text in texts) for number in range(4))
    assert (
        "".join(sample_texts(find_source(str(tmp_path / "1.txt")), Rules(), 10**6)) == (tmp_path / "1.txt").read_text()
    )


# --- what a source is ----------------------------------------------------------------------------------------------


def test_names_decide_the_form() -> None:
    assert classify("a.TXT.gz") == ("separated", "gz")
    assert classify("a.jsonl.zst") == ("lines", "zst")
    assert classify("a.parquet") == ("rows", "")
    assert classify("README") == ("whole", "")


def test_folders_and_patterns_are_sorted_and_leave_the_output_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.md", "out/x.txt", "c.csv"):
        write(tmp_path / name, name)
    source = find_source(str(tmp_path), exclude=tmp_path / "out")
    assert [file.name for file in source.files] == ["a/b.md", "a/z.txt", "b.txt"]
    pattern = find_source(f"{tmp_path}/**/*.txt")
    assert [file.name for file in pattern.files] == ["a/z.txt", "b.txt", "out/x.txt"]
    assert source.digest(times=True) != source.digest(times=False)


@pytest.mark.parametrize("spec", ["nowhere", "*.nothing", "."])
def test_nothing_to_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec in str(refuse(spec))


@pytest.mark.parametrize("name", ["train_000.bin", "shard.npy"])
def test_shards_are_not_prepared_again(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"\0" * 2000)
    write(tmp_path / "a.txt", "text")
    for spec in (path, tmp_path):
        assert "token shards already" in str(refuse(spec))


def test_python_is_always_there() -> None:
    names = [file.name for file in find_source("python").files]
    assert "ast.py" in names
    assert "json/decoder.py" in names
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]
    assert len(names) > 300


@pytest.mark.parametrize("name", ["tinystories", "fineweb", "fineweb-edu"])
def test_named_corpora_are_read_from_a_local_copy(tmp_path: Path, name: str) -> None:
    folder = tmp_path / ("data" if name == "tinystories" else "sample/10BT")
    folder.mkdir(parents=True)
    for file in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"):
        parquet.write_table(pyarrow.table({"text": [f"story of {file}"]}), folder / file)
    if name == "tinystories":
        write(folder / "validation-00000-of-00001.parquet", "not read")
    texts, _ = read_all(find_source(name, root=tmp_path))
    assert texts == ["story of train-00000-of-00002.parquet", "story of train-00001-of-00002.parquet"]
    with pytest.raises(Fault, match="copy the files of dataset"):
        find_source(name, root=tmp_path / "data" / "nothing")


def test_tinyshakespeare_comes_from_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "input.txt", "First Citizen:")
    assert read_all(find_source("tinyshakespeare", root=tmp_path)) == (["First Citizen:"], {})
    with pytest.raises(Fault, match="no such file"):
        find_source("tinyshakespeare", root=tmp_path / "elsewhere")
    assert "tinyshakespeare" in NAMES


def test_the_hub_out_of_reach_is_one_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Fault, match=r"cannot reach the Hugging Face hub.*give its folder with --root") as caught:
        find_source("fineweb")
    assert caught.value.code == Exit.DATA

"""Ids equal to tiktoken's and tokenizers' own; vocabularies found, checked, trained, saved and refused."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.data import bpe_cache, gpt2_vocab
from megatoken.data.shard_format import DESCRIPTION_NAME
from megatoken.data.sources import download
from megatoken.data.tokenizer import Tokenizer, load_saved_tokenizer, load_tokenizer
from megatoken.errors import DataError, ExitCode, MegatokenError

DATA = Path(__file__).parents[2].parent / "shared" / "data"
VOCAB = DATA / "tiktoken" / gpt2_vocab.TIKTOKEN_VOCAB
needs_gpt2 = pytest.mark.skipif(
    not VOCAB.exists(), reason="needs GPT-2's vocabulary in ../shared/data/tiktoken"
)

PROSE = (
    "The cat sat on the mat; it didn't purr.\r\nIl était une fois — 123 chats,\n\n\tpas 4.  " * 40
)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(VOCAB.parent))
        return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return load_tokenizer("bpe:400", lambda: iter([PROSE]))


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any vocabulary and without internet; gives the folder of its caches."""
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", "MEGATOKEN_CACHE", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(gpt2_vocab, "VOCAB_URL", (tmp_path / "nowhere").as_uri())
    return tmp_path


@functools.cache
def library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    inner.encode_special_tokens = True
    return inner


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """What `tokenizers` itself says, without our word cache."""
    ids: list[int] = library(tokenizer).encode(text, add_special_tokens=False).ids
    return ids


# --- ids
# ---------------------------------------------------------------------------------------------------------


@needs_gpt2
def test_gpt2_gives_the_published_ids(gpt2: Tokenizer):
    assert gpt2.encode("Hello world, GPT-2!").tolist() == [15496, 995, 11, 402, 11571, 12, 17, 0]
    assert (gpt2.vocab_size, gpt2.eot, gpt2.name, gpt2.split_points) == (
        50257,
        50256,
        "gpt2",
        "words",
    )
    assert gpt2.encode("").tolist() == []


@needs_gpt2
@pytest.mark.parametrize(
    "name", ["tinyshakespeare.txt", "wikitext2_valid.txt", "hellaswag_val_sample.jsonl"]
)
def test_gpt2_gives_the_ids_of_tiktoken_on_real_text(
    gpt2: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
):
    text = (DATA / name).read_text(encoding="utf-8")
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    if name == "tinyshakespeare.txt":
        assert len(ids) == 338_025
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCAB.parent))
    oracle = pytest.importorskip("tiktoken").get_encoding("gpt2")
    assert ids.tolist() == oracle.encode_ordinary(text)


@needs_gpt2
def test_every_character_splits_words_as_tokenizers_does(gpt2: Tokenizer):
    inner = library(gpt2)
    everything = [chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000]
    texts = [f"a{c}b 1{c}2 .{c}! {c}s'{c}  {c} \n{c}{c}'s" for c in everything]
    expected = [
        encoding.ids for encoding in inner.encode_batch_fast(texts, add_special_tokens=False)
    ]
    assert [gpt2.encode(text).tolist() for text in texts] == expected


TRICKY = (
    st.text(st.sampled_from("aZ é中9²'\"-_\t\n\r \xa0\u2028\x1c\x00’stlve<|endoftext|>"))
    | st.text()
)


@given(text=TRICKY)
@settings(deadline=None, max_examples=300)
def test_words_change_no_id(small: Tokenizer, text: str):
    assert small.encode(text).tolist() == whole(small, text)
    assert small.decode(small.encode(text)) == text


def test_a_full_cache_changes_no_id(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe_cache, "CACHE_WORDS", 3)
    tokenizer = load_tokenizer("bpe:400", lambda: iter([PROSE]))
    assert tokenizer.encode(PROSE).tolist() == whole(tokenizer, PROSE)


@given(text=TRICKY)
@settings(deadline=None, max_examples=100)
def test_bytes_are_bytes(text: str):
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(text).tolist() == list(text.encode()) == whole(tokenizer, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).dtype == np.int64  # torch has few uses for unsigned ones


def test_half_a_character_decodes_to_a_replacement():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([97, 195, 169, 256, 195]) == "aé<|endoftext|>\ufffd"
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.split_points) == (257, 256, "anywhere")


def test_end_of_text_in_a_document_is_text(small: Tokenizer):
    assert small.eot not in small.encode("one<|endoftext|>two")
    assert small.decode([small.eot]) == "<|endoftext|>"


# --- a BPE of one's own
# --------------------------------------------------------------------------------------


def test_trained_bpe_is_the_same_every_time(small: Tokenizer):
    again = load_tokenizer("bpe:400", lambda: iter([PROSE]))
    assert again.fingerprint == small.fingerprint
    assert (small.vocab_size, small.eot) == (308, 307)  # the text has no more merges to give
    assert len(small.encode(PROSE)) < 0.5 * len(PROSE.encode())


def test_trained_bpe_has_the_size_asked_for_when_the_corpus_gives_it():
    words = (f"{a}{b}{c} " for a in "abcdef" for b in "ghijkl" for c in "mnopqr")
    text = "".join(word * 3 for word in words)
    tokenizer = load_tokenizer("bpe:300", lambda: iter([text]))
    assert (tokenizer.vocab_size, tokenizer.eot) == (300, 299)


@pytest.mark.parametrize(
    "spec", ["bpe:256", "bpe:0", "bpe:", "bpe:-5", "bpe:many", "gtp2", "nothing/here.json"]
)
def test_meaningless_specs_are_config_errors(spec: str):
    with pytest.raises(MegatokenError) as caught:
        load_tokenizer(spec, lambda: iter(["text"]))
    assert caught.value.code == ExitCode.CONFIG


# --- files
# ---------------------------------------------------------------------------------------------------


def test_saved_tokenizers_come_back(small: Tokenizer, tmp_path: Path):
    for tokenizer in (small, load_tokenizer("bytes")):
        tokenizer.save(tmp_path)
        for back in (
            load_saved_tokenizer(tmp_path),
            load_tokenizer(str(tmp_path)),
            Tokenizer(tokenizer.to_json(), tokenizer.name, tokenizer.eot),
        ):
            assert back.describe() == tokenizer.describe()
            assert back.split_points == tokenizer.split_points
            assert back.encode(PROSE).tolist() == tokenizer.encode(PROSE).tolist()
        assert load_tokenizer(f"{tmp_path}/tokenizer.json").fingerprint == tokenizer.fingerprint


def word_level(*names: str) -> tokenizers.Tokenizer:
    vocabulary = {"hello": 0, "world": 1, "?": 2} | {name: 3 + at for at, name in enumerate(names)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return inner


def test_any_tokenizer_json_works(tmp_path: Path):
    inner = word_level("</s>", "<|end_of_text|>")
    inner.enable_truncation(1)
    inner.save(f"{tmp_path}/tokenizer.json")
    tokenizer = load_tokenizer(f"{tmp_path}/tokenizer.json")
    assert tokenizer.encode("hello brave world").tolist() == [0, 2, 1]
    assert (tokenizer.eot, tokenizer.vocab_size, tokenizer.split_points) == (4, 5, "nowhere")


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path):
    word_level().save(f"{tmp_path}/tokenizer.json")
    with pytest.raises(DataError):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 99]}')
    assert load_tokenizer(str(tmp_path)).eot == 2


# --- where GPT-2's vocabulary comes from
# -------------------------------------------------------------------------


@needs_gpt2
@pytest.mark.parametrize("origin", ["tiktoken", "ours", "download"])
def test_gpt2_is_found_or_downloaded(bare_machine: Path, gpt2: Tokenizer, origin: str):
    place = {
        "tiktoken": bare_machine / "TIKTOKEN_CACHE_DIR" / VOCAB.name,
        "ours": bare_machine / "MEGATOKEN_CACHE" / "vocab.bpe",
        "download": bare_machine / "nowhere",
    }[origin]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(VOCAB.read_bytes())
    assert load_tokenizer("gpt2").fingerprint == gpt2.fingerprint
    assert (bare_machine / "MEGATOKEN_CACHE" / "vocab.bpe").exists() == (
        origin in ("ours", "download")
    )


def test_without_gpt2s_vocabulary_a_wrong_file_is_not_used(bare_machine: Path):
    fake = bare_machine / "TIKTOKEN_CACHE_DIR" / gpt2_vocab.TIKTOKEN_VOCAB
    fake.parent.mkdir()
    fake.write_text("#version: 0.2\na b\n")  # a wrong sha256 is passed over
    with pytest.raises(MegatokenError) as caught:
        load_tokenizer("gpt2")
    assert caught.value.code == ExitCode.DATA


def test_the_older_pair_of_files_gives_the_same_ids(tmp_path: Path):
    trained = load_tokenizer("bpe:300", lambda: iter(["the cat sat on the mat. " * 50]))
    model = json.loads(trained.to_json())["model"]
    (tmp_path / "vocab.json").write_text(
        json.dumps({**model["vocab"], "<|endoftext|>": trained.eot})
    )
    lines = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    pair = load_tokenizer(str(tmp_path))
    assert pair.shares_ids(trained)
    assert pair.encode("the mat, the cat").tolist() == trained.encode("the mat, the cat").tolist()
    text = (tmp_path / "vocab.json").read_text()
    (tmp_path / "vocab.json").write_text(text.replace('"~"', '"</w>"'))  # not byte-level
    with pytest.raises(DataError):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.json").write_text(text)
    (tmp_path / "merges.txt").write_text("no such\n")
    with pytest.raises(DataError):
        load_tokenizer(str(tmp_path))


def test_begin_of_text_is_what_the_post_processor_adds():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}))
    special = [("<s>", 1), ("</s>", 2)]
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=special
    )
    assert Tokenizer(inner, "a", eot=2).bos_ids == [1]
    empty = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0}))
    assert Tokenizer(empty, "empty", eot=0).bos_ids == []
    with pytest.raises(DataError):
        Tokenizer(empty, "empty", eot=0).encode("cats")


def test_bytes_with_a_prefix_space_are_those_of_tokenizers():
    content = json.loads(load_tokenizer("bytes").to_json())
    content["pre_tokenizer"]["add_prefix_space"] = True
    ids = tokenizers.Tokenizer.from_str(json.dumps(content)).encode("ab").ids
    assert (
        Tokenizer(json.dumps(content), "prefix", 256).encode("ab").tolist() == ids == [32, 97, 98]
    )


@pytest.mark.fault(32)
def test_a_changed_or_missing_tokenizer_is_refused(small: Tokenizer, tmp_path: Path):
    small.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    saved = path.read_bytes()
    description = (tmp_path / DESCRIPTION_NAME).read_text()
    for changed in (saved.replace(b'"a"', b'"zz"'), saved[:-1], saved + b" "):
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            load_saved_tokenizer(tmp_path)
    path.write_bytes(saved)
    for old, new in (('"eot": 307', '"eot": 308'), ("308", "309"), ('"xxh3', '"x')):
        (tmp_path / DESCRIPTION_NAME).write_text(description.replace(old, new))
        with pytest.raises(DataError):
            load_saved_tokenizer(tmp_path)
    path.unlink()
    with pytest.raises(DataError):
        load_saved_tokenizer(tmp_path)


def test_a_huge_id_makes_no_table(tmp_path: Path):
    content = json.loads(load_tokenizer("bytes").to_json())
    content["model"]["vocab"]["zzz"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError):
        load_tokenizer(str(tmp_path))


def test_a_download_with_another_hash_is_not_kept(tmp_path: Path):
    (tmp_path / "page").write_text("<html>log in first</html>")
    with pytest.raises(DataError):
        download((tmp_path / "page").as_uri(), tmp_path / "target", "00")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("spec", ["bytes", "gpt2"])
def test_bytes_of_tokens_join_to_the_text(spec: str, real_data: Path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(real_data / "tiktoken"))
    tokenizer = load_tokenizer(spec)
    ids = tokenizer.encode("é 東京 \U0001f600\n").tolist()
    assert b"".join(map(tokenizer.decode_bytes, ids)) == "é 東京 \U0001f600\n".encode()
    assert tokenizer.decode_bytes(tokenizer.eot) == b"<|endoftext|>"

"""Ids equal to tiktoken's and tokenizers' own; vocabularies found, checked, trained, saved and refused."""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.base.errors import DataError, ExitCode, MegatokenError
from megatoken.data.shard_format import DESCRIPTION_NAME
from megatoken.text import bpe_cache, gpt2_vocab
from megatoken.text.sources import download
from megatoken.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[2].parent / "shared/data"
VOCAB = DATA / "tiktoken" / gpt2_vocab.TIKTOKEN_VOCAB
needs_gpt2 = pytest.mark.skipif(
    not VOCAB.exists(), reason="needs GPT-2's vocabulary in ../shared/data/tiktoken"
)

PROSE = (
    "The cat sat on the mat; it didn't purr.\r\nIl était une fois — 123 chats,\n\n\tpas 4.  " * 40
)


BYTES = load_tokenizer("bytes")


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
        monkeypatch.setenv(name, f"{tmp_path}/{name}")
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gpt2_vocab, "VOCAB_URL", (tmp_path / "nowhere").as_uri())
    return tmp_path


def assert_library_ids(tokenizer: Tokenizer, text: str) -> None:
    """Compare with `tokenizers` itself, which has no word cache."""
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64  # torch has few uses for unsigned ones
    assert ids.tolist() == library(tokenizer).encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


@functools.cache
def library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    inner.encode_special_tokens = True
    return inner


# --- ids
# ---------------------------------------------------------------------------------------------------------


@needs_gpt2
def test_gpt2_gives_the_ids_of_tiktoken_on_real_text(
    gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCAB.parent))
    oracle = pytest.importorskip("tiktoken").get_encoding("gpt2")
    for name in ("tinyshakespeare.txt", "wikitext2_valid.txt", "hellaswag_val_sample.jsonl"):
        text = (DATA / name).read_text(encoding="utf-8")
        ids = gpt2.encode(text)
        assert ids.tolist() == oracle.encode_ordinary(text)
        assert gpt2.decode(ids) == text


@needs_gpt2
def test_every_character_splits_words_as_tokenizers_does(gpt2: Tokenizer):
    everything = [chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000]
    texts = [f"a{c}b 1{c}2 .{c}! {c}s'{c}  {c} \n{c}{c}'s" for c in everything]
    expected = library(gpt2).encode_batch_fast(texts, add_special_tokens=False)
    assert [gpt2.encode(text).tolist() for text in texts] == [each.ids for each in expected]


TRICKY = (
    st.text(st.sampled_from("aZ é中9²'\"-_\t\n\r \xa0\u2028\x1c\x00’stlve<|endoftext|>"))
    | st.text()
)


@given(text=TRICKY)
@settings(deadline=None, max_examples=300)
def test_ids_are_those_of_tokenizers(small: Tokenizer, text: str):
    assert_library_ids(small, text)
    assert_library_ids(BYTES, text)
    assert BYTES.encode(text).tolist() == list(text.encode())


def test_a_full_cache_changes_no_id(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe_cache, "CACHE_WORDS", 3)
    assert_library_ids(load_tokenizer("bpe:400", lambda: iter([PROSE])), PROSE)


# --- a BPE of one's own
# --------------------------------------------------------------------------------------


def test_trained_bpe_is_the_same_every_time(small: Tokenizer):
    again = load_tokenizer("bpe:400", lambda: iter([PROSE]))
    assert again.fingerprint == small.fingerprint
    assert (small.vocab_size, small.eot) == (308, 307)  # the text has no more merges to give
    assert len(small.encode(PROSE)) < 0.5 * len(PROSE.encode())
    text = "".join(f"{a}{b}{c} " * 3 for a in "abcdef" for b in "ghijkl" for c in "mnopqr")
    full = load_tokenizer("bpe:300", lambda: iter([text]))
    assert (full.vocab_size, full.eot) == (300, 299)


def test_meaningless_specs_are_config_errors():
    for spec in ("bpe:256", "bpe:0", "bpe:", "bpe:-5", "bpe:many", "gtp2", "nothing/here.json"):
        with pytest.raises(MegatokenError) as caught:
            load_tokenizer(spec, lambda: iter(["text"]))
        assert caught.value.code == ExitCode.CONFIG


# --- files
# ---------------------------------------------------------------------------------------------------


def test_saved_tokenizers_come_back(small: Tokenizer, tmp_path: Path):
    for tokenizer in (small, BYTES):
        tokenizer.vocabulary.save(tmp_path)
        for back in (
            load_tokenizer(str(tmp_path)),
            Tokenizer(tokenizer.to_json(), tokenizer.name, tokenizer.eot),
        ):
            assert back.vocabulary.describe() == tokenizer.vocabulary.describe()
            assert back.split_points == tokenizer.split_points
            assert back.encode(PROSE).tolist() == tokenizer.encode(PROSE).tolist()
        assert load_tokenizer(f"{tmp_path}/tokenizer.json").fingerprint == tokenizer.fingerprint


def word_level(*names: str) -> tokenizers.Tokenizer:
    vocabulary = {"hello": 0, "world": 1, "?": 2} | {name: 3 + at for at, name in enumerate(names)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return inner


def test_any_tokenizer_json_works(tmp_path: Path):
    path, folder = f"{tmp_path}/tokenizer.json", str(tmp_path)
    inner = word_level("</s>", "<|end_of_text|>")
    inner.enable_truncation(1)
    inner.save(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hello brave world").tolist() == [0, 2, 1]
    assert (tokenizer.eot, tokenizer.vocab_size, tokenizer.split_points) == (4, 5, "nowhere")
    word_level().save(path)  # without end-of-text
    with pytest.raises(DataError):
        load_tokenizer(folder)
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 99]}')
    assert load_tokenizer(folder).eot == 2
    content = BYTES.to_json().replace('"vocab":{', '"vocab":{"zzz":2147483648,')
    Path(path).write_text(content)
    with pytest.raises(DataError):  # and makes no table of that size
        load_tokenizer(folder)


# --- where GPT-2's vocabulary comes from
# -------------------------------------------------------------------------


@needs_gpt2
@pytest.mark.parametrize(
    "place", [f"TIKTOKEN_CACHE_DIR/{VOCAB.name}", "MEGATOKEN_CACHE/vocab.bpe", "nowhere"]
)
def test_gpt2_is_found_or_downloaded(bare_machine: Path, gpt2: Tokenizer, place: str):
    (bare_machine / place).write_bytes(VOCAB.read_bytes())
    assert load_tokenizer("gpt2").fingerprint == gpt2.fingerprint
    ours = bare_machine / "MEGATOKEN_CACHE/vocab.bpe"
    assert ours.exists() == (not place.startswith("TIKTOKEN"))


def test_without_gpt2s_vocabulary_a_wrong_file_is_not_used(bare_machine: Path):
    fake = bare_machine / "TIKTOKEN_CACHE_DIR" / VOCAB.name
    fake.write_text("#version: 0.2\na b\n")  # a wrong sha256 is passed over
    with pytest.raises(MegatokenError) as caught:
        load_tokenizer("gpt2")
    assert caught.value.code == ExitCode.DATA


@contextmanager
def refused(path: Path, old: str, new: str) -> Iterator[None]:
    """Expect a DataError while a text in a file is replaced."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(DataError):
        yield
    path.write_text(text)


def test_the_older_pair_of_files_gives_the_same_ids(small: Tokenizer, tmp_path: Path):
    model = json.loads(small.to_json())["model"]
    vocabulary, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocabulary.write_text(json.dumps({**model["vocab"], "<|endoftext|>": small.eot}))
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    merges.write_text("\n".join(["#version: 0.2", *lines, ""]))
    pair = load_tokenizer(str(tmp_path))
    assert pair.vocabulary.shares_ids(small.vocabulary)
    assert pair.encode(PROSE).tolist() == small.encode(PROSE).tolist()
    # Not byte-level, or a merge of unknown parts.
    for path, old, new in ((vocabulary, '"~"', '"</w>"'), (merges, lines[0], "no such")):
        with refused(path, old, new):
            load_tokenizer(str(tmp_path))


def test_begin_of_text_is_what_the_post_processor_adds():
    inner, special = word_level("<s>", "</s>"), [("<s>", 3), ("</s>", 4)]
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=special
    )
    assert Tokenizer(inner, "a", eot=4).bos_ids == [3]
    empty = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0})), "empty", 0)
    assert empty.bos_ids == []
    with pytest.raises(DataError):
        empty.encode("cats")


def test_bytes_with_a_prefix_space_are_those_of_tokenizers():
    content = BYTES.to_json().replace('"add_prefix_space":false', '"add_prefix_space":true')
    ids = tokenizers.Tokenizer.from_str(content).encode("ab").ids
    assert Tokenizer(content, "prefix", 256).encode("ab").tolist() == ids == [32, 97, 98]


@pytest.mark.fault(32)
def test_a_changed_or_missing_tokenizer_is_refused(small: Tokenizer, tmp_path: Path):
    small.vocabulary.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    changes = {'"a"': '"zz"', "}}": "}", '{"version"': ' {"version"'}
    for old, new in changes.items():
        with refused(path, old, new):
            load_tokenizer(str(tmp_path))
    for old, new in {'"eot": 307': '"eot": 308', "308": "309", '"xxh3': '"x'}.items():
        with refused(tmp_path / DESCRIPTION_NAME, old, new):
            load_tokenizer(str(tmp_path))
    path.unlink()
    with pytest.raises(DataError):
        load_tokenizer(str(tmp_path))


def test_a_download_with_another_hash_is_not_kept(tmp_path: Path):
    (tmp_path / "page").write_text("<html>log in first</html>")
    with pytest.raises(DataError):
        download((tmp_path / "page").as_uri(), tmp_path / "target", "00")
    assert not (tmp_path / "target").exists()


@needs_gpt2
def test_bytes_of_tokens_join_to_the_text(gpt2: Tokenizer):
    text = "é 東京 \U0001f600\n"
    assert BYTES.decode([97, 195, 169, 256, 195]) == "aé<|endoftext|>\ufffd"
    for tokenizer in (BYTES, gpt2):
        assert b"".join(map(tokenizer.decode_bytes, tokenizer.encode(text))) == text.encode()
        assert tokenizer.decode_bytes(tokenizer.eot) == b"<|endoftext|>"

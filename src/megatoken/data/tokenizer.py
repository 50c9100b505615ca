"""Convert text to token ids and back: GPT-2's BPE, bytes, a trained BPE, or any tokenizer.json.

Hugging Face's `tokenizers` defines the ids; for tokenizers that split text like GPT-2, `BpeCache`
computes the same ids faster. Special tokens spelled in a text are encoded as plain text, so no
document can contain a real end-of-text token.
"""

import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray

from megatoken.data import byte_bpe
from megatoken.data.bpe_cache import BpeCache
from megatoken.data.byte_bpe import EOT, byte_vocabulary, split_merge
from megatoken.data.gpt2_vocab import find_gpt2_merges
from megatoken.data.shard_format import DESCRIPTION_NAME, RESTORE
from megatoken.data.tiktoken_pickle import BOS, read_tiktoken
from megatoken.errors import ConfigError, DataError, MegatokenError
from megatoken.system.atomic_write import (
    read_json,
    read_object,
    read_small_file,
    replace_file,
    storage_errors,
)

EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", BOS)
TIKTOKEN_NAME = "tokenizer.pkl"
# A model's files with its chat templates and the names of its special tokens; later ones win.
CHAT_TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_FILES = ("chat_template.json", "special_tokens_map.json", TOKENIZER_CONFIG, CHAT_TEMPLATE_NAME)
LARGEST_VOCABULARY = 1 << 24  # ids; some tables have a row for each id
LARGEST_FILE = 64 << 20  # bytes of a tokenizer.json; 256k ids take 33 MB
LARGEST_TRAINED = 1_000_000  # ids; the trainer holds all of them in memory

_SECRET = secrets.token_hex(8)

Ids = NDArray[np.uint32]
Ints = NDArray[np.int64]
CountBytes = Callable[[Ints, Ints], float]  # of text in inputs and targets
SplitPoints = Literal["anywhere", "words", "nowhere"]


class Tokenizer:
    """A vocabulary and its encoding rules, identified by `fingerprint`.

    vocab_size: highest id + 1. eot: id of the token between documents. end_ids: ids that end a
    generation, if the model's files name them. chat_files: content of the CHAT_FILES saved with the
    tokenizer, by name; empty without a chat template. split_points: where a long text can be split
    without changing an id.
    """

    def __init__(self, inner: tokenizers.Tokenizer | str, name: str, eot: int) -> None:
        """Wrap `inner`, a `tokenizers` tokenizer or the content of its tokenizer.json.

        Raises DataError if `eot` is outside the vocabulary or the vocabulary is too large.
        """
        self._inner = tokenizers.Tokenizer.from_str(inner) if isinstance(inner, str) else inner
        self._inner.encode_special_tokens = True  # special tokens in text are plain text
        self._inner.no_truncation()
        self._inner.no_padding()
        if getattr(self._inner.model, "dropout", None):
            self._inner.model.dropout = None  # dropout would make merges random
        self.name = name
        self.eot = eot
        self.end_ids: tuple[int, ...] = ()
        self.chat_files: dict[str, str] = {}
        ids = self._inner.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max(ids, default=-1)
        if not 0 <= eot < self.vocab_size <= LARGEST_VOCABULARY:
            what = f"end of text {eot} or vocabulary of {self.vocab_size:,} ids is out of range"
            raise DataError(what, name, "use the tokenizer.json of the model")
        self._content: dict[str, Any] = json.loads(self._inner.to_str())
        self.split_points: SplitPoints = "nowhere"
        self._encode: Callable[[str], Ids] = self._encode_text
        if not _splits_like_gpt2(self._content):
            return
        self.split_points = "words"
        self._encode = BpeCache(self._inner).encode
        model = self._content["model"]
        if model["vocab"] == byte_vocabulary() and not model["merges"]:
            self.split_points = "anywhere"
            self._encode = _encode_bytes

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 hex of everything that affects encoding or decoding.

        It is the same for all versions of `tokenizers`.
        """
        keys = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
        decisive: dict[str, Any] = {key: self._content.get(key) for key in keys}
        model = decisive["model"]
        if "merges" in model:
            merges = [split_merge(merge) for merge in model["merges"]]
            decisive["model"] = {**model, "merges": merges}
        text = json.dumps(_drop_defaults(decisive), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def bos_ids(self) -> list[int]:
        """Ids that Hugging Face adds before every text, such as LLaMA's begin-of-text."""
        with suppress(DataError), _data_errors("", self.name, ""):
            encoding = self._inner.encode("a")
            mask = encoding.special_tokens_mask
            if 0 in mask:
                return list(encoding.ids[: mask.index(0)])
        return []

    @property
    def drops_unknown(self) -> bool:
        """Whether encoding drops text outside the vocabulary.

        A BPE does if it has no unk token and lacks tokens for some of the 256 bytes.
        """
        model = self._content["model"]
        if model["type"] != "BPE" or model.get("unk_token"):
            return False
        pre_tokenizers = [self._content["normalizer"], self._content["pre_tokenizer"]]
        if "ByteLevel" in json.dumps(pre_tokenizers):
            return not model["vocab"].keys() >= set(byte_bpe.byte_characters())
        bytes_as_text = {f"<0x{byte:02X}>" for byte in range(256)}
        return not (model.get("byte_fallback") and model["vocab"].keys() >= bytes_as_text)

    def count_bytes(self, inputs_BT: Ints, targets_BT: Ints) -> int:
        """Return the number of bytes of text in the targets >= 0, without special tokens.

        inputs_BT: needed because the text of a token can depend on the token before it.
        """
        if self.byte_lengths is not None:
            return int(self.byte_lengths[targets_BT[targets_BT >= 0]].sum())
        total = 0
        for inputs, targets in zip(inputs_BT, targets_BT, strict=True):
            ids = np.append(inputs[:1], targets[targets >= 0])  # text depends on the previous id
            documents = np.split(ids, np.flatnonzero(ids == self.eot))
            total += sum(map(self._count_decoded, documents)) - self._count_decoded(ids[:1])
        return total

    def measure_text(self, text: str, ids: Ints) -> dict[str, int]:
        """Return the bytes of `text`, of its ids `decoded`, and of characters `lost` by decoding."""
        size = len(text.encode())
        decoded = text
        lengths = self.byte_lengths
        is_bytes = self.split_points == "anywhere"
        if not is_bytes and (lengths is None or lengths[ids].sum() != size):
            decoded = self._inner.decode(ids.tolist(), skip_special_tokens=True)
        lost = "" if decoded == text else "".join((Counter(text) - Counter(decoded)).elements())
        return {"text": size, "decoded": len(decoded.encode()), "lost": len(lost.encode())}

    @cached_property
    def byte_lengths(self) -> Ints | None:
        """Bytes of text per id, (vocab_size,), or None if the tokenizer is not byte-level."""
        if "ByteLevel" not in json.dumps(self._content["decoder"]):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, id in self._inner.get_vocab(with_added_tokens=True).items():
            lengths[id] = len(token)
        for token in self._content["added_tokens"]:
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return lengths

    def _count_decoded(self, ids: Ints) -> int:
        text = self._inner.decode(ids.tolist(), skip_special_tokens=True)
        return len(text.replace("\ufffd", "?").encode())  # part of a character is 1 byte

    def shares_ids(self, other: "Tokenizer") -> bool:
        """Return whether both tokenizers have the same tokens with the same ids."""
        return bool(self._inner.get_vocab() == other._inner.get_vocab())

    def extends(self, other: "Tokenizer") -> bool:
        """Return whether this vocabulary is `other`'s plus tokens with higher ids."""
        ours = self._inner.get_vocab()
        theirs = other._inner.get_vocab()
        added = ours.keys() - theirs.keys()
        return theirs.items() <= ours.items() and all(ours[t] >= other.vocab_size for t in added)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The id of each special token, by its text. `encode` never returns these ids."""
        added = self._content["added_tokens"]
        return {token["content"]: token["id"] for token in added if token["special"]}

    def add_special_tokens(self, tokens: Sequence[str], name: str) -> "Tokenizer":
        """Return a copy called `name` in which `tokens` are special. New tokens get the next ids.

        Raises DataError if one of them is an ordinary token or the vocabulary has gaps.
        """
        inner = tokenizers.Tokenizer.from_str(self.to_json())
        missing = [token for token in tokens if token not in self.special_ids]
        inner.add_special_tokens(
            [tokenizers.AddedToken(token, special=True, normalized=False) for token in missing]
        )
        expected = list(range(self.vocab_size, self.vocab_size + len(missing)))
        if [inner.token_to_id(token) for token in missing] != expected:
            what = f"cannot add special tokens {', '.join(missing)}"
            raise DataError(what, self.name, "use another tokenizer")
        return Tokenizer(inner, name, self.eot)

    def encode(self, text: str) -> Ints:
        """Return the ids (n,) of `text`.

        Adds no special tokens; those spelled in `text` are encoded as plain text.
        """
        return self._encode(text).astype(np.int64)  # torch cannot index with unsigned integers

    @cached_property
    def control_names(self) -> dict[str, str]:
        """For each special token, the name that stands for it in `encode_control`."""
        return {token: name_control(id) for token, id in self.special_ids.items()}

    def encode_control(self, text: str) -> tokenizers.Encoding:
        """Encode text in which special tokens are given by their `control_names`.

        The ids are those that Hugging Face gives text with special tokens, but special tokens
        spelled in `text` are plain text. Raises DataError for text that cannot be encoded.
        """
        with _data_errors("the tokenizer cannot encode the text", self.name, "use another one"):
            return self._control_inner.encode(text, add_special_tokens=False)

    @cached_property
    def _control_inner(self) -> tokenizers.Tokenizer:
        """The tokenizer with its special tokens renamed to `control_names`."""
        names = self.control_names
        content = json.loads(self.to_json())
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): id for token, id in model["vocab"].items()}
        else:  # Unigram's
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    def start_ids(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the begin-of-text ids (if any) and the prompt; if both are empty, end-of-text."""
        return [*self.bos_ids, *prompt_ids] or [self.eot]

    def decode_after(self, context: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that `ids` add to `context`.

        Decoding only `ids` can give another text, because some decoders drop a leading space.
        """
        return self.decode([*context, *ids])[len(self.decode(context)) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including special tokens; invalid UTF-8 becomes U+FFFD."""
        with _data_errors("the tokenizer cannot decode", self.name, "use another tokenizer"):
            return str(self._inner.decode([int(id) for id in ids], skip_special_tokens=False))

    def decode_bytes(self, id: int) -> bytes:
        """Return the bytes of a token, which can be a part of a character."""
        if self.byte_lengths is not None:
            with suppress(ValueError):  # a special token with other characters
                token = self._inner.id_to_token(id) or ""
                return bytes(map(byte_bpe.byte_characters().index, token))
        return self.decode([id]).encode()

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return str(self._inner.to_str())

    def describe(self) -> dict[str, Any]:
        """Return the tokenizer's entry in the manifest, also saved in megatoken_tokenizer.json."""
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "eot": self.eot,
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: Path) -> None:
        """Durably write tokenizer.json, the CHAT_FILES and, last, megatoken_tokenizer.json.

        Raises StorageError if the folder cannot be written.
        """
        content = self.to_json().encode()
        row = self.describe() | {"xxh3_128": xxhash.xxh3_128_hexdigest(content)}
        with storage_errors(folder, what="cannot save the tokenizer"):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / "tokenizer.json", content, durable=True)
            for name, text in self.chat_files.items():
                replace_file(folder / name, text, durable=True)
            replace_file(folder / DESCRIPTION_NAME, json.dumps(row, indent=1) + "\n", durable=True)

    def _encode_text(self, text: str) -> Ids:
        what = f"the tokenizer cannot encode {text[:40]!r}"
        with _data_errors(what, self.name, "give it an unk_token, or use another tokenizer"):
            # The batch call keeps no offsets, so it takes half the time and 3/4 of the memory.
            encoding = self._inner.encode_batch_fast([text], add_special_tokens=False)[0]
            return np.array(encoding.ids, dtype=np.uint32)


def name_control(id: int) -> str:
    """Return the name of the special token with this id. It is random, so no text contains it."""
    return f"\ue000{_SECRET}:{id}\ue001"


def _encode_bytes(text: str) -> Ids:
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


def load_tokenizer(spec: str, texts: Callable[[], Iterator[str]] | None = None) -> Tokenizer:
    """Return the tokenizer that `spec` names: gpt2, bytes, bpe:N, a tokenizer.json or its folder.

    A tokenizer.pkl of nanochat is read as well.

    texts: a function that returns the text to train bpe:N on. Raises ConfigError for an unknown
    spec, and DataError for a file that is missing or cannot be used.
    """
    if spec == "gpt2":
        return _wrap(byte_bpe.build_bpe(find_gpt2_merges(), 50_257), "gpt2")
    if spec == "bytes":
        return _wrap(byte_bpe.assemble(byte_vocabulary(), []), "bytes")
    if spec.startswith("bpe:"):
        vocab_size = parse_bpe(spec)
        if texts is None:
            raise ConfigError(f"{spec} is not trained", "tokenizer", "name the folder it is in")
        return _wrap(byte_bpe.train_bpe(vocab_size, texts()), spec)
    path = Path(spec)
    if path.is_file():
        return _load_file(path, path.name)
    if not path.is_dir():
        raise ConfigError(f"no tokenizer {spec}", "tokenizer", "use gpt2, bytes, bpe:N or a file")
    if (path / DESCRIPTION_NAME).exists():
        return load_saved_tokenizer(path)
    if (path / "tokenizer").is_dir():  # a dataset or run
        return load_tokenizer(str(path / "tokenizer"))
    if (path / "vocab.json").exists() and not (path / "tokenizer.json").exists():
        return _load_vocabulary(path)
    pickle = path / TIKTOKEN_NAME
    return _load_file(pickle if pickle.is_file() else path / "tokenizer.json", path.name)


def load_saved_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that `save` wrote to `folder`.

    Raises DataError if it is missing or damaged.
    """
    path = folder / "tokenizer.json"
    with _data_errors("tokenizer is missing or damaged", path, RESTORE):
        row = read_json(folder / DESCRIPTION_NAME)
        digest = row.pop("xxh3_128")
        content = read_small_file(path, LARGEST_FILE)
        if digest != xxhash.xxh3_128_hexdigest(content):
            raise ValueError("its hash differs")
        tokenizer = Tokenizer(content.decode(), row["name"], row["eot"])
        if row != tokenizer.describe():
            raise ValueError(f"{DESCRIPTION_NAME} does not describe it")
        tokenizer.chat_files = _read_chat_files(folder)
        return tokenizer


def parse_bpe(spec: str) -> int:
    """Return the N of "bpe:N". Raises ConfigError unless it is from 257 to LARGEST_TRAINED."""
    digits = spec.removeprefix("bpe:").replace("_", "")
    if not re.fullmatch("[0-9]{1,9}", digits) or not 257 <= int(digits) <= LARGEST_TRAINED:
        fix = f"write bpe:N, with N from 257 to {LARGEST_TRAINED:,}"
        raise ConfigError(f"not a vocabulary size: {spec}", "tokenizer", fix)
    return int(digits)


def _wrap(inner: tokenizers.Tokenizer, name: str) -> Tokenizer:
    return Tokenizer(inner, name, inner.get_vocab()[EOT])


def _load_vocabulary(folder: Path) -> Tokenizer:
    """Load a BPE in GPT-2's older format: vocab.json (token to id) and merges.txt (best first)."""
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    with _data_errors("not a byte-level BPE", folder, "copy its files again"):
        vocabulary, merges = tokenizers.models.BPE.read_file(*files)
        return _wrap(byte_bpe.assemble(vocabulary, merges), folder.name)


def _load_file(path: Path, name: str) -> Tokenizer:
    inner = _read_inner(path)
    ends = read_end_ids(path.parent, inner.get_vocab_size())
    named = [id for id in map(inner.token_to_id, EOT_NAMES) if id is not None]
    candidates = [id for id in named if id in ends] + named + list(ends)
    if not candidates:
        fix = f"add one of {', '.join(EOT_NAMES)}, or eos_token_id in config.json"
        raise DataError("tokenizer has no end-of-text token", path, fix)
    tokenizer = Tokenizer(inner, name, candidates[0])
    tokenizer.chat_files = _read_chat_files(path.parent)
    return tokenizer


def _read_chat_files(folder: Path) -> dict[str, str]:
    """Return the content of a folder's CHAT_FILES by name, or {} if none has a chat template."""
    files = {}
    for name in CHAT_FILES:
        with suppress(OSError, ValueError):
            files[name] = read_small_file(folder / name).decode()
    in_json = re.search(r'"chat_template":\s*["\[]', "".join(files.values()))
    has_template = CHAT_TEMPLATE_NAME in files or in_json
    return files if has_template else {}


def read_end_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the eos ids in a folder's config.json and generation_config.json.

    Ids outside the vocabulary are left out.
    """
    ends: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        value = read_object(folder / name).get("eos_token_id")
        ends += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(id for id in ends if type(id) is int and 0 <= id < vocab_size))


def _read_inner(path: Path) -> tokenizers.Tokenizer:
    with _data_errors("not a tokenizer.json", path, "use the one of a Hugging Face model"):
        content = read_small_file(path, LARGEST_FILE)
        if path.suffix == ".pkl":
            return read_tiktoken(content)
        return tokenizers.Tokenizer.from_str(content.decode())


@contextmanager
def _data_errors(what: str, where: str | Path, fix: str) -> Iterator[None]:
    """Convert what `tokenizers` raises, including Rust panics (BaseException), to DataError."""
    try:
        yield
    except MegatokenError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {error!s:.200}", where, fix) from error


def _drop_defaults(value: Any) -> Any:
    """Remove null and false values, which only some versions of `tokenizers` write."""
    if isinstance(value, dict):
        items = value.items()
        return {key: _drop_defaults(item) for key, item in items if item not in (None, False)}
    return [_drop_defaults(item) for item in value] if isinstance(value, list) else value


def _splits_like_gpt2(content: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json encodes each of GPT-2's words separately."""
    model = content["model"]
    splitter = content["pre_tokenizer"] or {}
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        model["type"] == "BPE"
        and not any(model.get(option) for option in options)
        and content["normalizer"] is None
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True)
        and not splitter["add_prefix_space"]
        and all(token["special"] for token in content["added_tokens"])
    )

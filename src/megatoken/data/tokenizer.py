"""Text to token ids and back: GPT-2's vocabulary, plain bytes, a trained BPE, any tokenizer.json.

The ids are those of Hugging Face's `tokenizers`, which also trains, decodes and saves; where the pre-tokenizer is
GPT-2's, `BpeCache` gives the same ids faster. Special tokens in text are plain text: a document cannot end itself.
"""

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatoken.data.bpe_cache import BpeCache
from megatoken.data.gpt2_vocab import Merges, byte_characters, find_gpt2_merges
from megatoken.data.shard_format import DESCRIPTION_NAME
from megatoken.errors import ConfigError, DataError, MegatokenError
from megatoken.suggest import suggest
from megatoken.system.atomic_write import (
    MALFORMED,
    read_json,
    read_object,
    read_small_file,
    replace_file,
    storage_errors,
)

EOT = "<|endoftext|>"
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>")
LARGEST_VOCABULARY = 1 << 24  # tables have a row for each id, used or not
LARGEST_FILE = 64 << 20  # bytes of a tokenizer.json; that of 256k ids has 33 MB
LONGEST_TRAINED_WORD = 1024  # bytes
LARGEST_TRAINED = (
    1_000_000  # the trainer takes memory for all of them at once, or aborts the process
)

Ids = NDArray[np.uint32]
SplitPoints = Literal["anywhere", "words", "nowhere"]


class Tokenizer:
    """A vocabulary with its rules; two are the same when their `fingerprint` is.

    vocab_size: one more than the highest id. eot: id of the token between documents. split_points: where a long text
    may be split without changing an id.
    """

    def __init__(self, inner: tokenizers.Tokenizer | str, name: str, eot: int) -> None:
        """inner: a `tokenizers` tokenizer or the content of its tokenizer.json."""
        self._inner = tokenizers.Tokenizer.from_str(inner) if isinstance(inner, str) else inner
        self._inner.encode_special_tokens = (
            True  # "<|endoftext|>" inside a document is text like any other
        )
        self._inner.no_truncation()
        self._inner.no_padding()
        if getattr(self._inner.model, "dropout", None):
            self._inner.model.dropout = None  # random merges, which would give other ids each time
        self.name, self.eot = name, eot
        self.end_ids: tuple[
            int, ...
        ] = ()  # that end a generation, where the model's own files name them
        self.vocab_size = 1 + max(
            self._inner.get_vocab(with_added_tokens=True).values(), default=-1
        )
        if not 0 <= eot < self.vocab_size:
            what = f"end of text {eot} is none of the tokenizer's {self.vocab_size:,} ids"
            raise DataError(what, name, "restore the tokenizer's files")
        if self.vocab_size > LARGEST_VOCABULARY:
            what = f"a token has id {self.vocab_size - 1:,}, ids below {LARGEST_VOCABULARY:,} are supported"
            raise DataError(what, name, "is it the tokenizer.json of this model?")
        content = json.loads(self._inner.to_str())
        self.split_points: SplitPoints = "nowhere"
        self._encode: Callable[[str], Ids] = self._encode_whole
        is_gpt2 = _splits_like_gpt2(content)
        if (
            is_gpt2
            and content["model"]["vocab"] == _byte_vocabulary()
            and not content["model"]["merges"]
        ):
            self.split_points = "anywhere"
            self._encode = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        elif is_gpt2:
            self.split_points, self._encode = "words", BpeCache(self._inner).encode

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:8]})"

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex of what decides ids and text, whichever version of the library wrote the tokenizer.json."""
        content = json.loads(self._inner.to_str())
        if "merges" in content["model"]:
            content["model"]["merges"] = [_pair(merge) for merge in content["model"]["merges"]]
        keys = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
        decisive = _drop_defaults({key: content.get(key) for key in keys})
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    @cached_property
    def bos_ids(self) -> list[int]:
        """Ids that Hugging Face puts before every text, such as LLaMA's begin-of-text; `encode` adds none."""
        for text in (
            "a",
            *itertools.islice(self._inner.get_vocab(), 1000),
        ):  # the first that has an id
            with contextlib.suppress(DataError, LookupError), _rust_errors("", self.name, ""):
                plain, special = (
                    self._inner.encode(text, add_special_tokens=added).ids
                    for added in (False, True)
                )
                return special[: special.index(plain[0])]
        return []

    @property
    def drops_unknown(self) -> bool:
        """Whether characters outside the vocabulary vanish from a text: a BPE without unk and without all bytes."""
        content = json.loads(self._inner.to_str())
        model, splitter = (
            content["model"],
            json.dumps([content["normalizer"], content["pre_tokenizer"]]),
        )
        if model["type"] != "BPE" or model.get("unk_token"):
            return False
        alphabet = (
            [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else [""]
        )
        return not set(byte_characters() if "ByteLevel" in splitter else alphabet) <= set(
            model["vocab"]
        )

    def count_bytes(self, inputs_BT: NDArray[np.int64], targets_BT: NDArray[np.int64]) -> int:
        """Count the bytes of text in the targets, those not below 0, of rows; special tokens are not text."""
        if self._byte_lengths is not None:
            return int(self._byte_lengths[targets_BT[targets_BT >= 0]].sum())
        total = 0
        for inputs, targets in zip(inputs_BT, targets_BT, strict=True):
            ids = np.append(
                inputs[:1], targets[targets >= 0]
            )  # the first tells whether the row begins a document
            documents = np.split(ids, np.flatnonzero(ids == self.eot))
            total += sum(map(self._count_decoded, documents)) - self._count_decoded(ids[:1])
        return total

    def measure_tokens(self, text: str) -> NDArray[np.int64]:
        """Return how many bytes of `text` each of its ids stands for, whatever normalizer and decoder make of them."""
        sizes = np.cumsum([0, *(len(character.encode()) for character in text)])
        starts = [start for start, _ in self._inner.encode(text, add_special_tokens=False).offsets]
        return np.diff(
            sizes[[0, *starts[1:], -1]] if starts else []
        )  # the last of several ids gets their character

    @cached_property
    def _byte_lengths(self) -> NDArray[np.int64] | None:
        """Bytes of text (vocab_size,) of each id where every character of a token is a byte; special tokens have 0."""
        content = json.loads(self._inner.to_str())
        if "ByteLevel" not in json.dumps(content["decoder"]):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, id in self._inner.get_vocab(with_added_tokens=True).items():
            lengths[id] = len(token)
        for token in content["added_tokens"]:
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return lengths

    def _count_decoded(self, ids: NDArray[np.int64]) -> int:
        text = self._inner.decode(ids.tolist(), skip_special_tokens=True)
        return len(text.replace("\ufffd", "?").encode())  # each byte of an incomplete character

    def shares_ids(self, other: "Tokenizer") -> bool:
        """Whether every token has the same id in both, so that a model of one can read text of the other."""
        return bool(self._inner.get_vocab() == other._inner.get_vocab())

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the tokens that no text is encoded to, such as end-of-text and those of a chat template."""
        return {
            token["content"]: token["id"]
            for token in json.loads(self.to_json())["added_tokens"]
            if token["special"]
        }

    def add_special_tokens(self, tokens: Sequence[str], name: str) -> "Tokenizer":
        """A tokenizer called `name` in which `tokens` are special too: those it lacks get the ids after the last one.

        Raises DataError where one of them is text that this vocabulary encodes.
        """
        inner, missing = (
            tokenizers.Tokenizer.from_str(self.to_json()),
            [t for t in tokens if t not in self.special_ids],
        )
        inner.add_special_tokens(
            [tokenizers.AddedToken(token, special=True, normalized=False) for token in missing]
        )
        if [inner.token_to_id(token) for token in missing] != [
            self.vocab_size + n for n in range(len(missing))
        ]:
            what = f"{', '.join(missing)} cannot be added as special tokens: the vocabulary has gaps or knows them as text"
            raise DataError(what, self.name, "use another tokenizer")
        return Tokenizer(inner, name, self.eot)

    def count_tokens_within(self, text: str, characters: int) -> int:
        """How many of the text's first tokens lie in its first `characters`, whole."""
        ends = [end for _, end in self._inner.encode(text, add_special_tokens=False).offsets]
        return next((n for n, end in enumerate(ends) if end > characters), len(ends))

    def extends(self, other: "Tokenizer") -> bool:
        """Whether every token of `other` has the same id here, and those that are only here are behind its last one."""
        ours, theirs = self._inner.get_vocab(), other._inner.get_vocab()
        added = ours.keys() - theirs.keys()
        return bool(
            theirs.items() <= ours.items()
            and all(ours[token] >= other.vocab_size for token in added)
        )

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of `text`, nothing added; special tokens in it are plain text."""
        return self._encode(text).astype(np.int64)  # torch indexes with no unsigned integers

    def start_ids(self, prompt_ids: Sequence[int]) -> list[int]:
        """Ids for a model to continue: begin-of-text, then the prompt, as in transformers; end-of-text if empty."""
        return [*self.bos_ids, *prompt_ids] or [self.eot]

    def decode_after(self, context: Sequence[int], ids: Sequence[int]) -> str:
        """The text that `ids` add behind `context`: some decoders drop the space before the first word of a text."""
        return self.decode([*context, *ids])[len(self.decode(context)) :]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        with _rust_errors("the tokenizer cannot decode", self.name, "use another tokenizer"):
            return str(self._inner.decode([int(id) for id in ids], skip_special_tokens=False))

    def to_json(self) -> str:
        """The content of its tokenizer.json."""
        return str(self._inner.to_str())

    def describe(self) -> dict[str, Any]:
        """The entry in the manifest; with the hash of tokenizer.json it is the content of megatoken_tokenizer.json."""
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "eot": self.eot,
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: Path) -> None:
        """Write tokenizer.json (any `tokenizers` program reads it) and megatoken_tokenizer.json, durably.

        Raises StorageError when the folder cannot be written.
        """
        fix = "free some space or choose a folder you can write to"
        with storage_errors(folder, what="cannot save the tokenizer", fix=fix):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(
                folder / "tokenizer.json", content := self.to_json().encode(), durable=True
            )
            row = self.describe() | {"xxh3_128": xxhash.xxh3_128_hexdigest(content)}
            description = json.dumps(row, indent=1) + "\n"
            replace_file(
                folder / DESCRIPTION_NAME, description, durable=True
            )  # last: without it nothing was saved

    def _encode_whole(self, text: str) -> Ids:
        # The batch call keeps no offsets: half the time, three quarters of the memory.
        what, fix = (
            f"the tokenizer cannot encode {text[:40]!r}",
            "give it an unk_token, or use another tokenizer",
        )
        with _rust_errors(what, self.name, fix):
            return np.array(
                self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids,
                dtype=np.uint32,
            )


def load_tokenizer(spec: str, texts: Callable[[], Iterator[str]] | None = None) -> Tokenizer:
    """The tokenizer `spec`: gpt2, bytes, bpe:N trained on `texts()`, a tokenizer.json, or a folder with one.

    Raises ConfigError for an unknown spec, DataError for a file that is missing or wrong.
    """
    if spec == "gpt2":
        return _build_bpe("gpt2", find_gpt2_merges(), 50_257)
    if spec == "bytes":
        return _assemble("bytes", _byte_vocabulary(), [])
    if spec.startswith("bpe:"):
        vocab_size = parse_bpe(spec)
        if texts is None:
            fix = "name the folder it was saved to, or prepare a corpus with it"
            raise ConfigError(f"{spec} must be trained and there is no text here", "tokenizer", fix)
        return _train_bpe(spec, vocab_size, texts())
    path = Path(spec)
    if path.is_file():
        return _load_file(path, path.name)
    if path.is_dir():
        if (path / DESCRIPTION_NAME).exists():
            return load_saved_tokenizer(path)
        if (path / "tokenizer").is_dir():  # of a dataset or a run
            return load_tokenizer(str(path / "tokenizer"))
        if (path / "tokenizer.json").exists():
            return _load_file(path / "tokenizer.json", path.name)
        if (path / "vocab.json").exists() and (path / "merges.txt").exists():
            return _load_vocabulary(path)
        raise DataError(
            "folder holds no tokenizer.json",
            spec,
            "name a tokenizer.json or a folder that holds one",
        )
    bpe = re.fullmatch(r"bpe\W?(\d+)", spec.lower())
    near = f"bpe:{bpe[1]}" if bpe else suggest(spec, ("gpt2", "bytes", "bpe:N"))
    fix = f"{f'did you mean {near}? ' if near else ''}give one of gpt2, bytes, bpe:N, FILE"
    raise ConfigError(f"no tokenizer or file called {spec!r}", "tokenizer", fix)


def load_saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote to `folder`. Raises DataError when it is missing, damaged or changed since."""
    path = folder / DESCRIPTION_NAME
    try:
        row = read_json(path)
        name, eot, expected = str(row["name"]), int(row["eot"]), str(row["fingerprint"])
        actual = xxhash.xxh3_128_hexdigest(read_small_file(folder / "tokenizer.json", LARGEST_FILE))
    except (OSError, *MALFORMED) as error:
        fix = "copy the folder again or prepare the dataset again"
        raise DataError(f"cannot read the tokenizer's description: {error}", path, fix) from error
    if row.get("xxh3_128", actual) != actual:  # older ones have no hash
        what = f"tokenizer has changed since it was saved: xxh3-128 {actual}, expected {row['xxh3_128']!s:.40}"
        raise DataError(
            what, folder / "tokenizer.json", "restore the file, or prepare the dataset again"
        )
    tokenizer = Tokenizer(_read_inner(folder / "tokenizer.json"), name, eot)
    if tokenizer.fingerprint != expected:
        what = f"tokenizer has changed since it was saved: sha256 {tokenizer.fingerprint}, expected {expected}"
        fix = "restore the file, or prepare the dataset again with the new tokenizer"
        raise DataError(what, folder / "tokenizer.json", fix)
    if row | {"xxh3_128": actual} != tokenizer.describe() | {"xxh3_128": actual}:
        what = "the tokenizer's description is damaged"
        raise DataError(what, path, "copy the folder again or prepare the dataset again")
    return tokenizer


def parse_bpe(spec: str) -> int:
    """The N of "bpe:N". Raises ConfigError unless it is a whole number from 257 to LARGEST_TRAINED."""
    digits = spec.removeprefix("bpe:").replace("_", "")
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 257 <= int(digits) <= LARGEST_TRAINED:
        near = (
            f"did you mean bpe:{digits[:-1]}000? " if re.fullmatch(r"\d{1,3}[kK]", digits) else ""
        )
        fix = f"{near}N is the vocabulary size: at least 257 (256 bytes and <|endoftext|>), at most {LARGEST_TRAINED:,}"
        raise ConfigError(f"not a vocabulary size: {spec!r}", "tokenizer", fix)
    return int(digits)


def _build_bpe(name: str, merges: Merges, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: 256 bytes in GPT-2's order, one id per merge, <|endoftext|> last."""
    vocabulary = {character: id for id, character in enumerate(sorted(byte_characters()))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    vocabulary[EOT] = vocab_size - 1
    return _assemble(name, vocabulary, merges)


def _byte_vocabulary() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())} | {EOT: 256}


def _assemble(name: str, vocabulary: dict[str, int], merges: Merges) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(EOT, special=True, normalized=False)])
    return Tokenizer(inner, name, vocabulary[EOT])


def _train_bpe(name: str, vocab_size: int, texts: Iterator[str]) -> Tokenizer:
    """Train a BPE. Deterministic: the trainer breaks ties by id, whatever the number of threads.

    The trainer takes quadratic time in the length of a word, so longer ones, as in DNA, are split for it.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    long_words = pre_tokenizers.Split(tokenizers.Regex(f".{{{LONGEST_TRAINED_WORD}}}"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), long_words]
    )
    merged_size = vocab_size - 1  # the last id is <|endoftext|>
    trainer = trainers.BpeTrainer(
        vocab_size=merged_size,
        min_frequency=2,
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    merges = [_pair(merge) for merge in json.loads(inner.to_str())["model"]["merges"]]
    # A corpus with fewer merges gives a smaller vocabulary: unused ids would only cost memory.
    return _build_bpe(name, merges, min(vocab_size, 257 + len(merges)))


def _load_vocabulary(folder: Path) -> Tokenizer:
    """GPT-2's older pair of files: vocab.json (token to id) and merges.txt (one merge a line, best first)."""
    fix = "copy them again from the model's repository"
    with _rust_errors("vocab.json and merges.txt make no byte-level BPE", folder, fix):
        vocabulary = read_json(folder / "vocab.json")
        lines = read_small_file(folder / "merges.txt").decode().splitlines()
        pairs = (line.partition(" ")[::2] for line in lines)
        merges = [(left, right) for left, right in pairs if right and left != "#version:"]
        return _assemble(folder.name, vocabulary, merges)


def _load_file(path: Path, name: str) -> Tokenizer:
    inner = _read_inner(path)
    ends = read_end_ids(path.parent, inner.get_vocab_size())
    named = [id for id in map(inner.token_to_id, EOT_NAMES) if id is not None]
    if not (found := [*sorted(named, key=lambda id: id not in ends), *ends]):
        what = f"tokenizer has no end-of-text token (looked for {', '.join(EOT_NAMES)})"
        raise DataError(
            what, path, "add one of these to its added_tokens, or eos_token_id to config.json"
        )
    return Tokenizer(inner, name, found[0])


def read_end_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids below `vocab_size` that end a generation by a folder's config.json and generation_config.json."""
    ends: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        found = read_object(folder / name).get("eos_token_id")
        ends += found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(id for id in ends if type(id) is int and 0 <= id < vocab_size))


def _read_inner(path: Path) -> tokenizers.Tokenizer:
    try:
        content = read_small_file(path, LARGEST_FILE)
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer: {error.strerror}", path, "check name and permissions"
        ) from error
    with _rust_errors("not a tokenizer.json", path, "give the one of a Hugging Face model"):
        return tokenizers.Tokenizer.from_str(content.decode())


@contextlib.contextmanager
def _rust_errors(what: str, where: str | Path, fix: str) -> Iterator[None]:
    """Turn what `tokenizers` raises into a DataError: bare Exceptions, and panics, which are BaseExceptions."""
    try:
        yield
    except MegatokenError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {error!s:.200}", where, fix) from error


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _drop_defaults(value: Any) -> Any:
    """Without nulls and falses, which some versions of the library write and others leave out."""
    if isinstance(value, dict):
        return {
            key: _drop_defaults(item) for key, item in value.items() if item not in (None, False)
        }
    return [_drop_defaults(item) for item in value] if isinstance(value, list) else value


def _splits_like_gpt2(content: dict[str, Any]) -> bool:
    """Whether the ids of a text are those of GPT-2's words: its pre-tokenizer, and nothing that looks across words."""
    model, splitter = content["model"], content["pre_tokenizer"] or {}
    return (
        model["type"] == "BPE"
        and not any(
            model.get(part)
            for part in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        )
        and content["normalizer"] is None
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True)
        and not splitter["add_prefix_space"]
        and all(token["special"] for token in content["added_tokens"])
    )

"""Text to token ids and back: GPT-2's vocabulary, plain bytes, a BPE of one's own, any tokenizer.json.

In: a name or a file. Out: `Tokenizer`. The ids are those of Hugging Face's `tokenizers`, which also trains,
decodes and saves; where the pre-tokenizer is GPT-2's, words are split here and remembered, which is faster
and gives the same ids. Deliberately absent: special tokens found in text (a document cannot end itself),
BOS/EOS, padding, truncation.
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatoken.data.gpt2_vocabulary import Merges, byte_characters, find_gpt2_merges
from megatoken.data.words import WordCache
from megatoken.errors import Exit, Fault

EOT = "<|endoftext|>"
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>")
SPECS = ("gpt2", "bytes", "bpe:N", "FILE")

Ids = NDArray[np.uint32]


class Tokenizer:
    """A vocabulary with its rules. `name` is for people; `fingerprint` decides whether two are the same.

    vocab_size: one more than the highest id. eot: id of the token written between documents.
    """

    def __init__(self, inner: tokenizers.Tokenizer, name: str, eot: int) -> None:
        self._inner = inner
        self._inner.encode_special_tokens = True  # "<|endoftext|>" inside a document is text like any other
        self._inner.no_truncation()
        self._inner.no_padding()
        self.name = name
        self.eot = eot
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        content = json.loads(inner.to_str())
        self.cuts: Literal["anywhere", "words", "nowhere"] = "nowhere"  # where a long text may be cut, ids unchanged
        self._encode: Callable[[str], Ids] = self._encode_whole
        if _is_bytes(content):
            self.cuts, self._encode = "anywhere", _encode_bytes
        elif _splits_like_gpt2(content):
            self.cuts, self._encode = "words", WordCache(inner).encode

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:8]})"

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of what decides ids and text; the same in every process and for every way of writing it."""
        content = json.loads(self._inner.to_str())
        if "merges" in content["model"]:
            content["model"]["merges"] = [_pair(merge) for merge in content["model"]["merges"]]
        parts = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
        decisive = _drop_defaults({part: content.get(part) for part in parts})
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    @cached_property
    def opening(self) -> list[int]:
        """Ids that Hugging Face's programs put before every text unasked, as LLaMA's begin-of-text; never ours."""
        plain, dressed = (self._inner.encode("a", add_special_tokens=added).ids for added in (False, True))
        return dressed[: dressed.index(plain[0])]

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """Bytes of text (vocab_size,) that each id stands for; special tokens are no text and have none."""
        content = json.loads(self._inner.to_str())
        by_bytes = "ByteLevel" in json.dumps(content["decoder"])  # every character of a token is a byte
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, id in self._inner.get_vocab(with_added_tokens=True).items():
            is_byte = re.fullmatch(r"<0x[0-9A-F]{2}>", token)  # SentencePiece's way of writing one
            lengths[id] = len(token) if by_bytes else 1 if is_byte else len(token.replace("\u2581", " ").encode())
        for token in content["added_tokens"]:
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return lengths

    def shares_ids(self, other: "Tokenizer") -> bool:
        """Whether every token has the same id in both: a model of one can go on with text of the other."""
        return bool(self._inner.get_vocab() == other._inner.get_vocab())

    def encode(self, text: str) -> Ids:
        """Ids of `text`, uint32, nothing added; special tokens in it are plain text."""
        return self._encode(text)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Ids of each text."""
        return [self._encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._inner.decode([int(id) for id in ids], skip_special_tokens=False))

    def to_json(self) -> str:
        """The content of its tokenizer.json."""
        return str(self._inner.to_str())

    def describe(self) -> dict[str, Any]:
        """name, vocab_size, eot, fingerprint: the manifest's row and the content of megatoken_tokenizer.json."""
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "eot": self.eot,
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json (any `tokenizers` program reads it) and megatoken_tokenizer.json, durably.

        Fault(Exit.STORAGE) when the folder cannot be written.
        """
        texts = {
            "tokenizer.json": self.to_json(),
            "megatoken_tokenizer.json": json.dumps(self.describe(), indent=1) + "\n",
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                with (folder / name).open("w", encoding="utf-8", newline="\n") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            fix = "free some space or choose a folder you can write to"
            raise Fault(Exit.STORAGE, f"cannot save the tokenizer: {error.strerror}", str(folder), fix) from error

    def _encode_whole(self, text: str) -> Ids:
        # The batch call keeps no offsets: half the time, three quarters of the memory.
        return np.array(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)


def load_tokenizer(spec: str, texts: Callable[[], Iterator[str]] | None = None) -> Tokenizer:
    """The tokenizer called `spec`: gpt2, bytes, bpe:N trained on `texts()`, a tokenizer.json, or a folder with one.

    Fault(Exit.CONFIG) for a spec that means nothing, Fault(Exit.DATA) for a file that is missing or wrong.
    """
    if spec == "gpt2":
        return _build_bpe("gpt2", find_gpt2_merges(), 50_257)
    if spec == "bytes":
        return _build_bytes()
    if spec.startswith("bpe:"):
        vocab_size = parse_bpe(spec)
        if texts is None:
            fix = "name the folder it was saved to, or prepare a corpus with it"
            raise Fault(Exit.CONFIG, f"{spec} must be trained and there is no text here", "tokenizer", fix)
        return _train_bpe(spec, vocab_size, texts())
    path = Path(spec)
    if path.is_file():
        return _load_file(path, path.name)
    if path.is_dir():
        return _load_folder(path)
    near = difflib.get_close_matches(spec, SPECS[:2], 1)
    fix = f"did you mean {near[0]}?" if near else f"give one of {', '.join(SPECS)}"
    raise Fault(Exit.CONFIG, f"no tokenizer or file called {spec!r}", "tokenizer", fix)


def load_saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote to `folder`.

    Fault(Exit.DATA) when a file is missing, damaged, or no longer the one that was saved (both hashes named).
    """
    path = folder / "megatoken_tokenizer.json"
    try:
        row = json.loads(path.read_bytes())
        name, eot, expected = str(row["name"]), int(row["eot"]), str(row["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "copy the folder again or prepare the dataset again"
        raise Fault(Exit.DATA, f"cannot read the tokenizer's description: {error}", str(path), fix) from error
    tokenizer = Tokenizer(_read_inner(folder / "tokenizer.json"), name, eot)
    if tokenizer.fingerprint != expected:
        what = f"tokenizer has changed since it was saved: sha256 {tokenizer.fingerprint}, expected {expected}"
        fix = "restore the file, or prepare the dataset again with the new tokenizer"
        raise Fault(Exit.DATA, what, str(folder / "tokenizer.json"), fix)
    return tokenizer


def read_tokenizer(text: str, name: str, eot: int) -> Tokenizer:
    """The tokenizer whose `to_json` gave `text`."""
    return Tokenizer(tokenizers.Tokenizer.from_str(text), name, eot)


def parse_bpe(spec: str) -> int:
    """The N of "bpe:N". Fault(Exit.CONFIG) unless it is a whole number from 257 on."""
    digits = spec.removeprefix("bpe:").replace("_", "")
    if not re.fullmatch(r"[0-9]{1,9}", digits) or int(digits) < 257:
        fix = "N is the vocabulary size: at least 257 (256 bytes and <|endoftext|>), for example bpe:4096"
        raise Fault(Exit.CONFIG, f"not a vocabulary size: {spec!r}", "tokenizer", fix)
    return int(digits)


def _encode_bytes(text: str) -> Ids:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)


def _build_bpe(name: str, merges: Merges, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: 256 bytes in GPT-2's order, one id a merge, <|endoftext|> last.

    When the merges are fewer, the ids between them and <|endoftext|> are never used.
    """
    vocabulary = {character: id for id, character in enumerate(sorted(byte_characters()))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    vocabulary[EOT] = vocab_size - 1
    return _assemble(name, vocabulary, merges)


def _build_bytes() -> Tokenizer:
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())} | {EOT: 256}
    return _assemble("bytes", vocabulary, [])


def _assemble(name: str, vocabulary: dict[str, int], merges: Merges) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(EOT, special=True, normalized=False)])
    return Tokenizer(inner, name, vocabulary[EOT])


def _train_bpe(name: str, vocab_size: int, texts: Iterator[str]) -> Tokenizer:
    """The same texts give the same merges: the trainer breaks ties by id, whatever the number of threads."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # the last id is <|endoftext|>
        min_frequency=2,
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer=trainer)
    merges = [_pair(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]
    # A corpus with fewer merges gives a smaller vocabulary: ids that nothing uses would only cost memory.
    return _build_bpe(name, merges, min(vocab_size, 257 + len(merges)))


def _load_folder(folder: Path) -> Tokenizer:
    if (folder / "megatoken_tokenizer.json").exists():
        return load_saved_tokenizer(folder)
    if (folder / "tokenizer.json").exists():
        return _load_file(folder / "tokenizer.json", folder.name)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return _load_vocabulary(folder)
    what = "folder holds no tokenizer.json"
    raise Fault(Exit.DATA, what, str(folder), "name a tokenizer.json or a folder that holds one")


def _load_vocabulary(folder: Path) -> Tokenizer:
    """GPT-2's older pair of files: vocab.json (token to id) and merges.txt (one merge a line, best first)."""
    try:
        vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
        merges = [
            (left, right) for left, _, right in (line.partition(" ") for line in lines) if right and left != "#version:"
        ]
        return _assemble(folder.name, vocabulary, merges)
    except Exception as error:  # the Rust side raises bare Exceptions
        what = f"vocab.json and merges.txt make no byte-level BPE: {error!r}"
        raise Fault(Exit.DATA, what, str(folder), "copy them again from the model's repository") from error


def _load_file(path: Path, name: str) -> Tokenizer:
    inner = _read_inner(path)
    eot = next((id for id in map(inner.token_to_id, EOT_NAMES) if id is not None), None)
    if eot is None:
        what = f"tokenizer has no end-of-text token (looked for {', '.join(EOT_NAMES)})"
        raise Fault(Exit.DATA, what, str(path), "add one of these to its added_tokens")
    return Tokenizer(inner, name, eot)


def _read_inner(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot read the tokenizer: {error.strerror}"
        raise Fault(Exit.DATA, what, str(path), "check its name and permissions") from error
    except Exception as error:  # the Rust side raises bare Exceptions
        what = f"not a tokenizer.json: {error}"
        raise Fault(Exit.DATA, what, str(path), "give the tokenizer.json of a Hugging Face model") from error


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _drop_defaults(value: Any) -> Any:
    """Without nulls and falses, which versions of the library write or leave out."""
    if isinstance(value, dict):
        return {key: _drop_defaults(item) for key, item in value.items() if item not in (None, False)}
    return [_drop_defaults(item) for item in value] if isinstance(value, list) else value


def _is_bytes(content: dict[str, Any]) -> bool:
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())} | {EOT: 256}
    return content["model"].get("vocab") == vocabulary and not content["model"].get("merges")


def _splits_like_gpt2(content: dict[str, Any]) -> bool:
    """Whether ids depend on nothing but GPT-2's words: its pre-tokenizer and nothing that looks across them."""
    model, splitter = content["model"], content["pre_tokenizer"] or {}
    return (
        model["type"] == "BPE"
        and not any(model.get(part) for part in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and content["normalizer"] is None
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True)
        and not splitter["add_prefix_space"]
        and all(token["special"] for token in content["added_tokens"])
    )

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers

from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.atomic_write import MALFORMED, read_object, read_small_file
from megatoken.data.shard_format import DESCRIPTION_NAME, RESTORE
from megatoken.data.vocabulary import (
    LARGEST_FILE,
    TOKENIZER_FILE,
    Ints,
    Vocabulary,
    read_vocabulary,
    tokenizer_errors,
)
from megatoken.text import byte_bpe
from megatoken.text.bpe_cache import BpeCache, Ids
from megatoken.text.byte_bpe import EOT, byte_vocabulary, split_merge
from megatoken.text.file_kinds import find_foreign
from megatoken.text.gpt2_vocab import find_gpt2_merges
from megatoken.text.tiktoken_pickle import BOS, read_tiktoken

EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", BOS)
TIKTOKEN_NAME = "tokenizer.pkl"
# A model's files with its chat templates and special tokens; later ones win.
CHAT_TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKEN_IDS = "generation_config.json"  # in `Tokenizer.files`, only with eos_token_id, bos_token_id
CHAT_FILES = ("chat_template.json", "special_tokens_map.json", TOKENIZER_CONFIG, CHAT_TEMPLATE_NAME)
NAMED_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
LARGEST_VOCABULARY = 1 << 24  # ids; some tables have a row for each id
LARGEST_TRAINED = 1_000_000  # ids; the trainer holds all of them in memory

_SECRET = secrets.token_hex(8)

SplitPoints = Literal["anywhere", "words", "nowhere"]


class Tokenizer:
    """A vocabulary and its encoding rules, identified by `fingerprint`.

    vocab_size: highest id + 1. eot: id of the token between documents. files: content of the
    CHAT_FILES and TOKEN_IDS that the model has, by name. settings: what they hold, as one object.
    named_tokens: the text of each special token that they name, such as bos_token. split_points:
    where a long text can be split without changing an id.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer | str,
        name: str,
        eot: int | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap `inner`, a `tokenizers` tokenizer or the content of its tokenizer.json.

        eot: None to find it among the EOT_NAMES and the ends that `files` name. Raises DataError if
        there is none or the vocabulary is too large.
        """
        self._inner = tokenizers.Tokenizer.from_str(inner) if isinstance(inner, str) else inner
        self._inner.encode_special_tokens = True  # special tokens in text are plain text
        self._inner.no_truncation()
        self._inner.no_padding()
        if getattr(self._inner.model, "dropout", None):
            self._inner.model.dropout = None  # dropout would make merges random
        self.name = name
        self.files = dict(files or {})
        self.settings, self.named_tokens = _read_settings(self.files)
        ids = self._inner.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max(ids, default=-1)
        if self.vocab_size > LARGEST_VOCABULARY:
            what = f"vocabulary of {self.vocab_size:,} ids"
            raise DataError(what, name, "use the tokenizer.json of the model")
        self._content: dict[str, Any] = json.loads(self._inner.to_str())
        self.eot = self._find_eot() if eot is None else range(self.vocab_size)[eot]
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
    def vocabulary(self) -> Vocabulary:
        """What training knows of the tokenizer, with its files."""
        files = {TOKENIZER_FILE: self.to_json()} | self.files
        return Vocabulary(self.name, self.vocab_size, self.eot, self.fingerprint, files)

    @cached_property
    def templates(self) -> dict[str, str]:
        """The chat templates in `files` by name; the one for all conversations is `default`."""
        templates = self.settings.get("chat_template")
        if isinstance(templates, list):
            return {row["name"]: row["template"] for row in templates}
        return {"default": templates} if templates else {}

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: the eos_token_id and eos_token that `files` name, if any."""
        return self._list_ids("eos")

    @property
    def bos(self) -> int:
        """The begin-of-text id that texts get or `files` name; end-of-text if there is none."""
        return [*self.bos_ids, *self._list_ids("bos")[::-1], self.eot][0]

    def _list_ids(self, kind: str) -> tuple[int, ...]:
        """Return the ids of a special token that `files` name, those given as ids first."""
        ids = self.settings.get(f"{kind}_token_id")
        token = self._inner.token_to_id(self.named_tokens.get(f"{kind}_token", ""))
        ids = [*(ids if isinstance(ids, list) else [ids]), token]
        ids = [id for id in ids if type(id) is int and 0 <= id < self.vocab_size]
        return tuple(dict.fromkeys(ids))

    def _find_eot(self) -> int:
        ids = [id for id in map(self._inner.token_to_id, EOT_NAMES) if id is not None]
        special = {*ids} & {*self.special_ids.values()}
        ids += self.end_ids
        if not ids:
            fix = f"add one of {', '.join(EOT_NAMES)}, or eos_token in {TOKENIZER_CONFIG}"
            raise DataError("tokenizer has no end-of-text token", self.name, fix)
        return max(ids, key=lambda id: 2 * (id in special) + (id in self.end_ids))

    @cached_property
    def bos_ids(self) -> list[int]:
        """Ids that Hugging Face adds before every text, such as LLaMA's begin-of-text."""
        with suppress(DataError), tokenizer_errors("", self.name, ""):
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

    def measure_text(self, text: str, ids: Ints) -> dict[str, int]:
        """Return the sizes in bytes of `text`, its ids `decoded`, and characters `lost` by that."""
        size = len(text.encode())
        decoded = text
        lengths = self.vocabulary.byte_lengths
        is_bytes = self.split_points == "anywhere"
        if not is_bytes and (lengths is None or lengths[ids].sum() != size):
            decoded = self._inner.decode(ids.tolist(), skip_special_tokens=True)
        lost = "" if decoded == text else "".join((Counter(text) - Counter(decoded)).elements())
        return {"text": size, "decoded": len(decoded.encode()), "lost": len(lost.encode())}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The id of each special token, by its text. `encode` never returns these ids."""
        added = self._content["added_tokens"]
        return {token["content"]: token["id"] for token in added if token["special"]}

    def add_special_tokens(self, tokens: Sequence[str], name: str) -> "Tokenizer":
        """Return a copy called `name` in which `tokens` are special; new ones get the next ids.

        Raises DataError if one of them is an ordinary token or the vocabulary has gaps.
        """
        inner = tokenizers.Tokenizer.from_str(self.to_json())
        missing = [token for token in tokens if token not in self.special_ids]
        inner.add_special_tokens(missing)
        expected = list(range(self.vocab_size, self.vocab_size + len(missing)))
        if [inner.token_to_id(token) for token in missing] != expected:
            what = f"cannot add special tokens {', '.join(missing)}"
            raise DataError(what, self.name, "use another tokenizer")
        return Tokenizer(inner, name, self.eot, self.files)

    def with_files(self, files: Mapping[str, str]) -> "Tokenizer":
        """Return the tokenizer with other `files`."""
        return Tokenizer(self._inner, self.name, self.eot, files)

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
        with tokenizer_errors("the tokenizer cannot encode the text", self.name, "use another one"):
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
        with tokenizer_errors("the tokenizer cannot decode", self.name, "use another tokenizer"):
            return str(self._inner.decode([int(id) for id in ids], skip_special_tokens=False))

    def decode_bytes(self, id: int) -> bytes:
        """Return the bytes of a token, which can be a part of a character."""
        if self.vocabulary.byte_lengths is not None:
            with suppress(ValueError):  # a special token with other characters
                token = self._inner.id_to_token(id) or ""
                return bytes(map(byte_bpe.byte_characters().index, token))
        return self.decode([id]).encode()

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return str(self._inner.to_str())

    def _encode_text(self, text: str) -> Ids:
        what = f"the tokenizer cannot encode {text[:40]!r}"
        with tokenizer_errors(what, self.name, "give it an unk_token, or use another tokenizer"):
            # The batch call keeps no offsets, so it takes half the time and 3/4 of the memory.
            encoding = self._inner.encode_batch_fast([text], add_special_tokens=False)[0]
            return np.array(encoding.ids, dtype=np.uint32)


def name_control(id: int) -> str:
    """Return the name of the special token with this id. It is random, so no text contains it."""
    return f"\ue000{_SECRET}:{id}\ue001"


def _encode_bytes(text: str) -> Ids:
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


def load_tokenizer(spec: str, texts: Callable[[], Iterator[str]] | None = None) -> Tokenizer:
    """Return the tokenizer that `spec` names: gpt2, bytes, bpe:N, a file or the folder it is in.

    A file is a tokenizer.json, GPT-2's vocab.json with merges.txt, or nanochat's tokenizer.pkl. The
    model's files next to it name chat templates and special tokens.

    texts: a function that returns the text to train bpe:N on. Raises ConfigError for an unknown
    spec, and DataError for a file that is missing or cannot be used.
    """
    if spec == "gpt2":
        return Tokenizer(byte_bpe.build_bpe(find_gpt2_merges(), 50_257), "gpt2")
    if spec == "bytes":
        return Tokenizer(byte_bpe.assemble(byte_vocabulary(), []), "bytes")
    if spec.startswith("bpe:"):
        vocab_size = parse_bpe(spec)
        if texts is None:
            raise ConfigError(f"{spec} is not trained", "tokenizer", "name the folder it is in")
        return Tokenizer(byte_bpe.train_bpe(vocab_size, texts()), spec)
    path = Path(spec)
    if not path.exists():
        raise ConfigError(f"no tokenizer {spec}", "tokenizer", "use gpt2, bytes, bpe:N or a file")
    if (path / DESCRIPTION_NAME).exists():
        return open_tokenizer(read_vocabulary(path))
    if (path / "tokenizer").is_dir():  # a dataset or run
        return load_tokenizer(str(path / "tokenizer"))
    file = path if path.is_file() else find_vocabulary(path)
    for each in [file] if file else path.iterdir():
        if error := find_foreign(each):
            raise error
    return _load_file(file or path / "tokenizer.json", path.name)


def find_vocabulary(folder: Path) -> Path | None:
    """Return the file with the vocabulary of a model or tokenizer folder, or None."""
    for names in (("tokenizer.json",), ("vocab.json", "merges.txt"), (TIKTOKEN_NAME,)):
        if all((folder / name).is_file() for name in names):
            return folder / names[0]
    return None


@cache
def open_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary. Raises DataError if its files give another one."""
    files = dict(vocabulary.files)
    with tokenizer_errors("the tokenizer cannot be used", vocabulary.name, RESTORE):
        tokenizer = Tokenizer(files.pop(TOKENIZER_FILE), vocabulary.name, vocabulary.eot, files)
        if tokenizer.vocabulary.describe() != vocabulary.describe():
            raise ValueError(f"{DESCRIPTION_NAME} does not describe it")
        return tokenizer


def parse_bpe(spec: str) -> int:
    """Return the N of "bpe:N". Raises ConfigError unless it is from 257 to LARGEST_TRAINED."""
    digits = spec.removeprefix("bpe:").replace("_", "")
    if not re.fullmatch("[0-9]{1,9}", digits) or not 257 <= int(digits) <= LARGEST_TRAINED:
        fix = f"write bpe:N, with N from 257 to {LARGEST_TRAINED:,}"
        raise ConfigError(f"not a vocabulary size: {spec}", "tokenizer", fix)
    return int(digits)


def _load_file(path: Path, name: str) -> Tokenizer:
    with tokenizer_errors(f"cannot read {path.name}", path, "use a tokenizer.json of Hugging Face"):
        files = _read_files(path.parent)
        if path.name == "vocab.json":
            return Tokenizer(_read_vocabulary(path, files), name, files=files)
        content = read_small_file(path, LARGEST_FILE)
        inner = read_tiktoken(content) if path.suffix == ".pkl" else content.decode()
        return Tokenizer(inner, name, files=files)


def _read_vocabulary(path: Path, files: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Read a BPE in GPT-2's older format: vocab.json (token to id) and merges.txt (best first).

    Its special tokens are those that `files` name and the EOT_NAMES, or else <|endoftext|>.
    """
    paths = str(path), str(path.with_name("merges.txt"))
    vocabulary, merges = tokenizers.models.BPE.read_file(*paths)
    if not vocabulary.keys() >= {*byte_bpe.byte_characters()}:
        raise ValueError("not a byte-level BPE, because bytes have no token")
    _, named = _read_settings(files)
    special = [token for token in (*named.values(), *EOT_NAMES) if token in vocabulary]
    return byte_bpe.assemble(vocabulary, merges, special or [EOT])


def _read_files(folder: Path) -> dict[str, str]:
    """Return the `Tokenizer.files` of a folder.

    NAMED_TEMPLATES become a list in TOKENIZER_CONFIG, and the ids in config.json and
    generation_config.json become TOKEN_IDS.
    """
    present = [name for name in CHAT_FILES if (folder / name).is_file()]
    files = {name: read_small_file(folder / name).decode() for name in present}
    named = {
        path.stem: read_small_file(path).decode()
        for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    }
    if named:
        if CHAT_TEMPLATE_NAME in files:
            named = {"default": files.pop(CHAT_TEMPLATE_NAME), **named}
        rows = [{"name": name, "template": text} for name, text in named.items()]
        settings = read_object(folder / TOKENIZER_CONFIG) | {"chat_template": rows}
        files[TOKENIZER_CONFIG] = json.dumps(settings, indent=2, ensure_ascii=False)
    ids = {"bos_token_id": list[int](), "eos_token_id": list[int]()}
    for name, (key, values) in product((TOKEN_IDS, "config.json"), ids.items()):
        value = read_object(folder / name).get(key, [])
        values += value if isinstance(value, list) else [value]
    return files | ({TOKEN_IDS: json.dumps(ids)} if any(ids.values()) else {})


def _read_settings(files: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the `settings` and `named_tokens` of a tokenizer with these files."""
    settings: dict[str, Any] = {}
    for name in (*CHAT_FILES, TOKEN_IDS):
        with suppress(*MALFORMED):
            is_text = name == CHAT_TEMPLATE_NAME
            settings |= {"chat_template": files[name]} if is_text else json.loads(files[name])
    tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, dict | str)
    }
    return settings, tokens


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

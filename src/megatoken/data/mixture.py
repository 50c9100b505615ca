"""What a run trains on: one dataset, or several of one tokenizer, each with its share of every batch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatoken.data.chat_dataset import OBJECTIVE_DATA
from megatoken.data.dataset import Dataset, Tokens, load_dataset
from megatoken.data.remote import Report, no_report
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError, DataError

_WEIGHTED = re.compile(r"(?P<path>.+):(?P<weight>\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)")
_SMALLEST_SHARE = 1e-9


@dataclass(frozen=True, slots=True)
class Part:
    """A dataset of a mixture and its share of the sequences."""

    dataset: Dataset
    share: float

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.dataset.path)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Datasets of one tokenizer. train: the training tokens of all parts, end to end."""

    parts: tuple[Part, ...]
    train: Tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all parts. Raises DataError as `Dataset.tokenizer`."""
        return self.parts[0].dataset.tokenizer

    @property
    def fingerprint(self) -> str:
        """That of the dataset; of several a hash of theirs and their shares."""
        if len(self.parts) == 1:
            return self.parts[0].dataset.fingerprint
        text = "".join(f"{part.share!r} {part.dataset.fingerprint}\n" for part in self.parts)
        return str(xxhash.xxh3_128_hexdigest(text.encode()))

    @property
    def n_val(self) -> int:
        """Held-out tokens of all parts."""
        return sum(len(part.dataset.val) for part in self.parts)

    def set_vocab_size(self, vocab_size: int) -> None:
        """Set the vocabulary that all ids are checked against."""
        self.train.set_vocab_size(vocab_size)
        for part in self.parts:
            part.dataset.set_vocab_size(vocab_size)

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return self.parts[0].name
        return ", ".join(f"{part.name} ({part.share:.3g})" for part in self.parts)


def load_mixture(
    spec: str, *, external_tokenizer: str = "gpt2", report: Report = no_report
) -> Mixture:
    """Open the datasets of `spec`: the path of one, or `PATH:WEIGHT,PATH:WEIGHT,...`.

    external_tokenizer, report: as of `load_dataset`. Raises ConfigError for an empty one and weights that cannot be,
    DataError as `load_dataset` and for datasets of different tokenizers.
    """
    if not spec:
        fix = "set data.path=FOLDER; `megatoken prepare SOURCE --out FOLDER` makes one"
        raise ConfigError("no dataset given", "data.path", fix)
    named = list(_parse_spec(spec))
    datasets = [
        load_dataset(path, external_tokenizer=external_tokenizer, report=report)
        for path, _ in named
    ]
    total = sum(weight for _, weight in named)
    parts = tuple(
        Part(dataset, weight / total) for dataset, (_, weight) in zip(datasets, named, strict=True)
    )
    if len(parts) == 1:
        return Mixture(parts, datasets[0].train)
    for part in parts:
        if part.share < _SMALLEST_SHARE:
            raise ConfigError(
                f"data.path: the weight of {part.name} is next to nothing", spec, "leave it out"
            )
        _check_same_tokenizer(parts[0], part)
    shards = [
        file for dataset in datasets for file in dataset.shards if file.shard.split == "train"
    ]
    return Mixture(parts, Tokens(shards, datasets[0].manifest.dtype, datasets[0].vocab_size))


def _parse_spec(spec: str) -> Iterator[tuple[str, float]]:
    """The path and weight of each dataset."""
    items = [item.strip() for item in spec.split(",")]
    matches = [_WEIGHTED.fullmatch(item) for item in items]
    if len(items) == 1 or not any(matches) or Path(spec).exists():
        yield spec, 1.0
        return
    seen = set[str]()
    for item, match in zip(items, matches, strict=True):
        if match is None:
            raise ConfigError(
                f"data.path: {item!r} has no weight above 0",
                spec,
                "write PATH:WEIGHT,PATH:WEIGHT,...",
            )
        if match["path"] in seen:
            raise ConfigError(
                f"data.path: {match['path']} is named twice", spec, "give it one weight"
            )
        seen.add(match["path"])
        yield match["path"], float(match["weight"])


def _check_same_tokenizer(first: Part, other: Part) -> None:
    ours, theirs = (part.dataset.manifest for part in (first, other))
    facts = [(m.tokenizer["fingerprint"] or m.tokenizer["name"], m.dtype) for m in (ours, theirs)]
    if (
        facts[0] != facts[1]
    ):  # one tokenizer may have two names: bpe:4096, and the file that it was saved as
        names = [
            f"{m.tokenizer['name']} ({m.tokenizer['fingerprint'][:8] or m.dtype})"
            for m in (ours, theirs)
        ]
        what = f"datasets of different tokenizers: {first.name} of {names[0]}, {other.name} of {names[1]}"
        raise DataError(
            what,
            "data.path",
            f"prepare one of them again, with --tokenizer {first.name} for {other.name}",
        )


def count_rows(dataset: Mixture, objective: str) -> int:
    """Pairs or prompts to train on, of a dataset of the objective's kind. Raises ConfigError for several."""
    if len(dataset.parts) > 1:
        raise ConfigError(
            f"objective.name={objective} reads one dataset",
            "data.path",
            "prepare the rows together",
        )
    (part,) = dataset.parts
    n_rows = len(part.dataset.train) // (int(part.dataset.manifest.source["seq_len"]) + 1)
    return n_rows // 2 if OBJECTIVE_DATA[objective] == "preference" else n_rows

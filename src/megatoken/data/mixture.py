"""Open a run's data: one dataset, or a weighted mixture of several with the same tokenizer."""

import re
from dataclasses import dataclass
from pathlib import Path

from megatoken.base.errors import ConfigError, DataError
from megatoken.data.dataset import ALL, Dataset, Report, Tokens, load_dataset, no_report
from megatoken.data.shard_format import hash_bytes
from megatoken.data.vocabulary import Vocabulary

_WEIGHTED = re.compile(r"(?P<path>.+):(?P<weight>\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)")
_SMALLEST_SHARE = 1e-9
SCANNED_TOKENS = 1 << 24  # to search for end-of-text in shards that do not record documents


@dataclass(frozen=True)
class Component:
    """A dataset in a mixture, and its share of the training sequences, 0 to 1."""

    dataset: Dataset
    share: float

    @property
    def name(self) -> str:
        """The path or address of the dataset."""
        return self.dataset.where


@dataclass(frozen=True)
class Mixture:
    """Datasets with the same tokenizer. train: all training tokens, end to end."""

    components: tuple[Component, ...]
    train: Tokens

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of all components. Raises DataError as `Dataset.vocabulary` does."""
        return self.components[0].dataset.vocabulary

    @property
    def fingerprint(self) -> str:
        """The fingerprint that identifies the data.

        For one dataset, it is that of the dataset; for several, a hash of their fingerprints and
        shares.
        """
        if len(self.components) == 1:
            return self.components[0].dataset.fingerprint
        text = "".join(f"{each.share!r} {each.dataset.fingerprint}\n" for each in self.components)
        return hash_bytes(text.encode())

    @property
    def n_val(self) -> int:
        """Number of held-out tokens in all components."""
        return sum(len(each.dataset.val) for each in self.components)

    def set_vocab_size(self, vocab_size: int) -> None:
        """Set the vocabulary size that all ids are checked against."""
        self.train.set_vocab_size(vocab_size)
        for component in self.components:
            component.dataset.set_vocab_size(vocab_size)

    def __str__(self) -> str:
        if len(self.components) == 1:
            return self.components[0].name
        return ", ".join(f"{each.name} ({each.share:.3g})" for each in self.components)


def load_mixture(
    spec: str, *, external_tokenizer: str = "gpt2", cache: str = ALL, report: Report = no_report
) -> Mixture:
    """Open the datasets of `spec`: a path, or `PATH:WEIGHT,PATH:WEIGHT,...`.

    external_tokenizer, cache, report: as in `load_dataset`. Raises ConfigError for an unusable spec, and
    DataError if `load_dataset` does or if the datasets have different tokenizers.
    """
    if not spec:
        fix = "set data.path=FOLDER; `megatoken prepare SOURCE --out FOLDER` makes one"
        raise ConfigError("no dataset given", "data.path", fix)
    weights = _parse_spec(spec)
    datasets = [
        load_dataset(path, external_tokenizer=external_tokenizer, cache=cache, report=report)
        for path in weights
    ]
    total = sum(weights.values())
    components = tuple(
        Component(dataset, weight / total)
        for dataset, weight in zip(datasets, weights.values(), strict=True)
    )
    if len(components) == 1:
        return Mixture(components, datasets[0].train)
    for component in components:
        if component.share < _SMALLEST_SHARE:
            what = f"the weight of {component.name} is almost 0"
            raise ConfigError(what, "data.path", "leave it out")
        if _identify(component) != _identify(components[0]):
            what = f"{component.name} and {components[0].name} have different tokenizers"
            fix = f"prepare one again, with --tokenizer {components[0].dataset.path}"
            raise DataError(what, "data.path", fix)
    shards = [each for dataset in datasets for each in dataset.train.lists]
    return Mixture(components, Tokens(shards, datasets[0].manifest.dtype, datasets[0].vocab_size))


def _parse_spec(spec: str) -> dict[str, float]:
    """Return the weight of each path."""
    items = [item.strip() for item in spec.split(",")]
    matches = [_WEIGHTED.fullmatch(item) for item in items]
    paths = [re.sub(r"(?<=.):[^:/]*$", "", item) for item in items]
    is_one = len(items) == 1 and not matches[0]
    is_one &= paths == items or not Path(paths[0]).exists()
    if is_one or Path(spec).exists():
        return {spec: 1.0}
    weights = {match["path"]: float(match["weight"]) for match in matches if match}
    if len(weights) < len(items):
        fix = f"such as {','.join(f'{path}:{1 / len(items):.2g}' for path in paths)}"
        what = f"not a mixture: {spec}; each dataset needs one weight"
        raise ConfigError(what, "data.path", fix)
    return weights


def _identify(component: Component) -> tuple[str, str]:
    """Return the tokenizer's identity and the token dtype, which all components must share.

    The identity is the tokenizer's fingerprint or, if none is recorded, its name.
    """
    manifest = component.dataset.manifest
    return manifest.tokenizer["fingerprint"] or manifest.tokenizer["name"], manifest.dtype


def find_document_start(dataset: Mixture) -> int:
    """Return the id of the end-of-text token, which separates documents.

    Raises ConfigError if the training split is a single document. Shards written by other programs
    do not record their number of documents and may separate them by another token, so their first
    tokens must include an end-of-text token.
    """
    eot = dataset.vocabulary.eot
    counts = [each.dataset.manifest.documents.get("train", 0) for each in dataset.components]
    if 0 in counts:
        n_scanned = min(len(dataset.train), SCANNED_TOKENS)
        has_documents = bool((dataset.train.read(0, n_scanned) == eot).any())
    else:
        has_documents = max(counts) > 1
    if not has_documents:
        what = "data.document_mask has no effect: the training split is one document"
        fix = "leave it out, or prepare the text as several documents"
        raise ConfigError(what, "data.document_mask", fix)
    return eot

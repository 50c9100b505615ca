"""Losses, speeds and scores that other people published, from a table (base/published.toml)."""

import re
from dataclasses import dataclass

from megatoken.base.system.table import read_table

_TABLE = read_table(__file__)
CONTEXT = 1024  # of every rung
SOURCES: dict[str, str] = _TABLE["sources"]


def shorten_source(source: str) -> str:
    """Return the title of a source, a key of SOURCES, up to its first colon or comma."""
    return re.split("[:,]", SOURCES[source])[0]


@dataclass(frozen=True, kw_only=True)
class PublishedRung:
    """The speed of GPT-2 124M after one more optimization.

    device: a name in GPUS, or a laptop. micro_batch: sequences of CONTEXT tokens per step and GPU.
    """

    source: str
    name: str
    device: str
    gpus: int = 1
    micro_batch: int
    tokens_per_second: float = 0.0
    step_milliseconds: float = 0.0
    memory_mib: float | None = None

    @property
    def batch_tokens(self) -> int:
        """Tokens per step of all GPUs."""
        return CONTEXT * self.micro_batch * self.gpus

    @property
    def rate(self) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens_per_second or 1000 * self.batch_tokens / self.step_milliseconds


@dataclass(frozen=True, kw_only=True)
class PublishedScore:
    """HellaSwag scores, named as in inference/tasks.py, and validation loss in nats."""

    model: str
    source: str
    parameters: int
    acc: float | None = None
    acc_norm: float | None = None
    acc_token_mean: float | None = None
    val_loss: float | None = None

    @property
    def title(self) -> str:
        """The model and, in short, who published its scores."""
        return f"{self.model}, published: {shorten_source(self.source)}"


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """The losses of a training run in nats per token, one per step.

    settings: changes to the recipe `shakespeare`. tolerance: the largest difference in nats that
    a replay may have. needs: hardware or weights that a replay needs. has_documents: whether an
    end-of-text token precedes each paragraph.
    """

    name: str
    title: str
    source: str
    hardware: str
    precision: str
    settings: list[str]
    losses: list[float]
    tolerance: float
    needs: str
    has_documents: bool = False
    note: str = ""


LADDER = [PublishedRung(**row) for row in _TABLE["ladder"]]
SCORES = [PublishedScore(**row) for row in _TABLE["scores"]]
# Models whose scores are in SCORES, and where the hub has their weights.
MODELS: dict[str, dict[str, str]] = _TABLE["models"]
RUNS = {row["name"]: PublishedRun(**row) for row in _TABLE["runs"]}

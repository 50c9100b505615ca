"""Typed batches of the objectives, and the interfaces between them and the trainer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatoken.config.schema import Config
from megatoken.console import Console
from megatoken.data.dataloader import Batch
from megatoken.data.mixture import Mixture
from megatoken.distributed.comm import Comm
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.model.gpt import GPT
from megatoken.objectives.answer_scores import AnswerScorer
from megatoken.system.device import Device

Poll = Callable[[], None]  # called between batches; raises StopRequested on all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch(Batch):
    """Sampled answers: the targets are their tokens.

    The other tensors are measured before the step, (B, T) each, and 0 outside the answers:
    log-probabilities under the sampling and the reference model, advantages, and PPO's values and
    returns.
    """

    log_probs_BT: Tensor
    advantages_BT: Tensor
    reference_BT: Tensor | None = None
    values_BT: Tensor | None = None
    returns_BT: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceBatch(Batch):
    """Pairs of a chosen and a rejected answer: ids and targets are (B, 2, T), chosen first.

    reference_B2: for DPO, each answer's summed log-probability under the reference model.
    """

    reference_B2: Tensor | None = None


class BatchSource(Protocol):
    """Gives this process's share of each batch. metrics: values to log with the latest batch."""

    metrics: dict[str, float]

    def get(self, number: int) -> Batch:
        """Return the batch of this number, on the device."""

    def close(self) -> None:
        """Stop background work."""


class Policy(Protocol):
    """The model in training, for sampling and measuring."""

    step: int
    comm: Comm

    @property
    def dims(self) -> ParallelDims: ...

    def full_model(self, device: Device) -> GPT:
        """Return the full model on every rank, in the device's precision."""

    def gather_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the full fp32 weights on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The parts of a training run that a batch source may use.

    log_event: add an event (its name, a message, more values) to the metrics log.
    """

    config: Config
    out: Path
    dataset: Mixture
    policy: Policy
    device: Device
    scorer: AnswerScorer
    console: Console
    log_event: Callable[..., Any]

    @property
    def comm(self) -> Comm:
        return self.policy.comm

    @property
    def local_batch_size(self) -> int:
        """Number of sequences of a global batch that this data-parallel rank trains on."""
        return self.config.batch_seqs // self.policy.dims.dp_size

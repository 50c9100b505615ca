"""Typed batches of the objectives, and the interfaces between them and the trainer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatoken.base.config.schema import Config
from megatoken.base.console import Console
from megatoken.base.system.device import Device
from megatoken.data.dataloader import Batch
from megatoken.data.mixture import Mixture
from megatoken.distributed.comm import Comm
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.model.gpt import GPT
from megatoken.posttrain.answer_scores import AnswerScorer

Poll = Callable[[], None]  # called between batches; raises StopRequested on all ranks


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(Batch):
    """Sampled answers, whose tokens are the targets.

    The other tensors are computed before the step, each (B, T) and 0 outside the answers:
    log-probabilities under the model that sampled them and under the reference model, advantages,
    and for PPO values and returns.
    """

    log_probs_BT: Tensor
    advantages_BT: Tensor
    reference_BT: Tensor | None = None
    values_BT: Tensor | None = None
    returns_BT: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(Batch):
    """Pairs of answers: ids and targets are (B, 2, T), with the chosen answer first.

    For KTO, they are (B, 1, T): rated answers. reference_B2: for DPO and KTO, each answer's summed
    log-probability under the reference model. is_good_B, kl_B: for KTO, whether the answer is
    desirable, and the estimate of the KL divergence from the reference model.
    """

    reference_B2: Tensor | None = None
    is_good_B: Tensor | None = None
    kl_B: Tensor | None = None


class BatchSource(Protocol):
    """Provides this process's share of each batch. metrics: values to log for the latest batch."""

    metrics: dict[str, float]

    def get(self, number: int) -> Batch:
        """Return batch `number`, on the device."""

    def close(self) -> None:
        """Stop background work."""


class Policy(Protocol):
    """The model being trained, for sampling answers and computing log-probabilities."""

    step: int
    comm: Comm

    @property
    def dims(self) -> ParallelDims: ...

    def full_model(self, device: Device) -> GPT:
        """Return the unsharded model on every rank, in the device's precision."""

    def gather_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield (name, tensor) of the unsharded fp32 weights on rank 0; nothing on other ranks."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What a batch source needs from a training run.

    log_event: adds an event to the metrics log; takes its name, a message and other values to log.
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
        """Number of sequences in this data-parallel rank's share of a global batch."""
        return self.config.batch_seqs // self.policy.dims.dp_size

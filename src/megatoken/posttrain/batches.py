"""The batches of the objectives, and what their sources have in common."""

from dataclasses import dataclass

from torch import Tensor

from megatoken.base.system.device import Device
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.model.gpt import GPT
from megatoken.posttrain.answer_scores import AnswerScorer
from megatoken.train.objective import Poll
from megatoken.train.run import Run
from megatoken.train.state import TrainState, gather_model

SHOWN = {  # values that are printed before the loss of a step, and their names
    "reward": "reward",
    "groups_without_difference": "no difference",
    "accuracy": "in order",
    "stopped": "stopped",
}


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(Batch):
    """Sampled completions, whose tokens are the targets.

    The other tensors are computed before the step, each (B, T) and 0 outside the completions:
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


class RowBatches:
    """Batches of rows, measured by the objective's own values. metrics: of the latest batch."""

    def __init__(self, run: Run) -> None:
        self.metrics: dict[str, float] = {}
        self.run = run
        self.scorer = AnswerScorer(run.device, run.step_config)

    def measure(self, poll: Poll) -> dict[str, float]:
        """Return values of the held-out rows, with `loss`."""
        raise NotImplementedError

    def validate(self, poll: Poll) -> tuple[dict[str, float], str]:
        """Return `measure` and its text."""
        row = self.measure(poll)
        values = [
            f"{SHOWN.get(name, name).replace('_', ' ')} {value:.4g}" for name, value in row.items()
        ]
        return row, f"held out: {', '.join(values)}"

    @property
    def comm(self) -> Comm:
        return self.run.state.comm

    @property
    def local_size(self) -> int:
        """Number of sequences in this data-parallel rank's share of a global batch."""
        return self.run.config.batch_seqs // self.run.state.dims.dp_size

    def close(self) -> None:
        """Do nothing, as there is no background work."""


def full_model(state: TrainState, device: Device) -> GPT:
    """Return an unsharded model for sampling and evaluation, in the device's precision.

    All ranks must call it, and all get the model. If the model is sharded, they get a gathered
    copy, which later updates do not change. Its forward uses no collectives, so ranks may call it
    different numbers of times.
    """
    if state.dims.is_unsharded:
        return state.compute.model
    model = gather_model(state, device.dtype, on_all=True)
    assert model is not None
    return model

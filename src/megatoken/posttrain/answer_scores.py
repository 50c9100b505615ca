"""Log-probabilities and values of answers, computed inside a loss or without gradients.

A row is a prompt and its answer. The targets are the answer's tokens. Unlike in pre-training, the
inputs include the last token, whose value a reward model needs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatoken.base.system.device import Device
from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.model.loss import cap_logits, product_dtype
from megatoken.model.memory import LOSS_CHUNK
from megatoken.posttrain.value_head import predict_values
from megatoken.train.state import StepConfig
from megatoken.train.step import fit_rows

MAX_SAVED_LOGITS = 1 << 24  # per micro-batch; if there are more, the backward recomputes them


def answer_log_probs(
    model: GPT, hidden_BTC: Tensor, batch: Batch, *, loss_chunk: int, temperature: float = 1.0
) -> Tensor:
    """Return the log-probabilities (B, T) of the targets, with gradients."""
    targets = batch.targets_BT
    saves_logits = targets.numel() * model.config.padded_vocab_size <= MAX_SAVED_LOGITS
    return token_log_probs(
        hidden_BTC,
        model.lm_head_weight,
        targets,
        vocab_size=model.config.vocab_size,
        softcap=model.config.logit_softcap,
        temperature=temperature,
        # torch computes this loss, so at most its chunk.
        chunk=0 if saves_logits else min(loss_chunk, LOSS_CHUNK["cuda"]),
    )


def token_log_probs(
    hidden_BTC: Tensor,
    lm_head_VC: Tensor,
    targets_BT: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """Return the targets' log-probabilities (B, T) in nats, fp32; 0 where a target is below 0.

    Differentiable. Logits are computed only for positions with a target.

    chunk: how many rows of logits to hold in memory at once; they are recomputed in the backward.
        With 0, all logits are computed in one piece and saved for the backward.
    """
    dtype = product_dtype(hidden_BTC)
    targets_N = targets_BT.flatten()
    index_N = torch.nonzero(targets_N >= 0)[:, 0]
    hidden_NC = hidden_BTC.flatten(0, 1)[index_N]
    targets = targets_N[index_N]

    def score(h_NC: Tensor, t_N: Tensor) -> Tensor:
        logits_NV = F.linear(h_NC.to(dtype), lm_head_VC.to(dtype)).float()[:, :vocab_size]
        return -F.cross_entropy(cap_logits(logits_NV, softcap) / temperature, t_N, reduction="none")

    with torch.autocast(hidden_BTC.device.type, enabled=False):
        if chunk == 0:
            scores = score(hidden_NC, targets)
        else:
            chunks = zip(torch.split(hidden_NC, chunk), torch.split(targets, chunk), strict=True)
            parts = [checkpoint(score, h_NC, t_N, use_reentrant=False) for h_NC, t_N in chunks]
            scores = torch.cat(parts)
        return scores.new_zeros(targets_N.shape).index_put((index_N,), scores).view_as(targets_BT)


def take_last(values_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the value (B,) at the last token of each row.

    If the last token was cut off, return the value at the last input instead.
    """
    positions = torch.arange(targets_BT.shape[1], device=targets_BT.device)
    ends = torch.where(targets_BT >= 0, positions, -1).amax(1) + 1
    return values_BT.gather(1, ends.clamp(max=targets_BT.shape[1] - 1)[:, None])[:, 0]


@dataclass(frozen=True)
class AnswerScorer:
    """Computes scores of rows with a full model, in micro-batches, without gradients or dropout.

    Unless steps are deterministic, a micro-batch holds more of shorter rows. The number of its rows
    then depends on the number of processes.
    """

    device: Device
    steps: StepConfig

    def log_probs(self, model: GPT, batch: Batch, temperature: float = 1.0) -> Tensor:
        """Return the log-probabilities (B, T) of the targets at a sampling temperature."""

        def score(rows: Batch, hidden_BTC: Tensor) -> Tensor:
            return answer_log_probs(
                model, hidden_BTC, rows, loss_chunk=self.steps.loss_chunk, temperature=temperature
            )

        return self._measure(model, batch, score)

    def values(self, model: GPT, batch: Batch) -> Tensor:
        """Return the value head's output (B, T) for every input token."""
        return self._measure(model, batch, lambda _, hidden_BTC: predict_values(model, hidden_BTC))

    @torch.no_grad()
    def _measure(
        self, model: GPT, batch: Batch, score: Callable[[Batch, Tensor], Tensor]
    ) -> Tensor:
        size = self.steps.micro_batch
        if not self.steps.deterministic:
            size = fit_rows(size, len(batch), batch.inputs_BT.shape[1], model.config.seq_len)
        was_training = model.training
        model.eval()
        parts = []
        try:
            for rows in batch.split(size):
                with self.device.autocast(model.tokens.weight.dtype):
                    parts.append(score(rows, model(rows.inputs_BT)))
        finally:
            model.train(was_training)
        return torch.cat(parts)

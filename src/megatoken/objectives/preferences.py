"""Batches of preferences: pairs of a chosen and a rejected answer to the same prompt.

A pair counts as one sequence of the batch. For DPO, a pair also has the summed log-probability of
each answer under the reference model, which is the model that the run starts from. These
log-probabilities are computed once per run.

For KTO, a pair is a rated answer and, for the estimate of the KL divergence, the answer to another
prompt. The seed chooses the other prompt: the next one in the order of the first epoch.

Shapes: N pairs of the split, B pairs of this process, T tokens.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from megatoken.data.chat_dataset import open_rows
from megatoken.data.dataloader import Batch
from megatoken.data.window_order import CachedOrder, ShuffledOrder
from megatoken.errors import DataError
from megatoken.model.gpt import GPT
from megatoken.objectives.batches import Learner, Poll, PreferenceBatch
from megatoken.objectives.objective import Objective
from megatoken.objectives.reference import load_reference

MEASURED_PAIRS = 32  # per forward in validation and for the reference


class Row(NamedTuple):
    """A conversation: its ids, and whether each belongs to the answer.

    is_good: for KTO, whether the answer is desirable.
    """

    ids: Sequence[int]
    is_answer: Sequence[bool]
    is_good: bool = True


Pair = tuple[Row, Row]  # chosen and rejected; for KTO, the rated and the mismatched answer


def read_pairs(learner: Learner, split: str) -> list[Pair]:
    """Return the (chosen, rejected) pairs of a split."""
    rows = open_rows(learner.dataset.parts[0].dataset, split)
    sequences = [Row(*rows.sequence(row)) for row in range(len(rows))]
    return list(zip(sequences[::2], sequences[1::2], strict=True))


def read_rated(learner: Learner, split: str) -> list[Pair]:
    """Return the rated answers of a split, each with a mismatched one (KTO)."""
    rows = open_rows(learner.dataset.parts[0].dataset, split)
    rated = [Row(*rows.sequence(row), rows.is_desirable(row)) for row in range(len(rows))]
    order = ShuffledOrder(len(rated), learner.config.seed).windows(0, len(rated)).tolist()
    mismatched = dict(zip(order, [*order[1:], *order[:1]], strict=True))
    limit = rows.seq_len + 1
    return [(row, mismatch(row, rated[mismatched[n]], limit)) for n, row in enumerate(rated)]


def mismatch(row: Row, other: Row, limit: int) -> Row:
    """Return the prompt of `row` with the answer of `other`, cut to `limit` tokens."""
    start, other_start = row.is_answer.index(True), other.is_answer.index(True)
    return Row(
        [*row.ids[:start], *other.ids[other_start:]][:limit],
        [*row.is_answer[:start], *other.is_answer[other_start:]][:limit],
    )


class PairBatches:
    """Batches of pairs. They are stateless: any batch can be requested at any time."""

    def __init__(
        self,
        learner: Learner,
        objective: Objective,
        pairs: Sequence[Pair],
        held_out: Sequence[Pair],
    ) -> None:
        """Load the reference log-probabilities, or compute them.

        Raises DataError if there are fewer training pairs than a batch needs.
        """
        self.metrics: dict[str, float] = {}
        self._learner = learner
        self._objective = objective
        self._pairs = pairs
        self._held_out = held_out
        batch_seqs = learner.config.batch_seqs
        if len(pairs) < batch_seqs:
            what = f"the training split has {len(pairs):,} pairs, a batch needs {batch_seqs:,}"
            raise DataError(what, "data.path", "lower budget.batch_tokens, or prepare more")
        self._order = CachedOrder(ShuffledOrder(len(pairs), learner.config.seed), len(pairs))
        self._reference_N2: dict[str, Tensor] = {}  # by split
        if learner.config.objective.name in ("dpo", "kto"):
            self._reference_N2 = load_reference(learner, self._measure_reference)

    def get(self, number: int) -> PreferenceBatch:
        """Return this process's share of batch `number`."""
        learner = self._learner
        size = learner.local_batch_size
        first = number * learner.config.batch_seqs + learner.policy.dims.dp_rank * size
        rows = self._order.windows(first, size).tolist()
        batch = self._build(self._pairs, rows, self._reference_N2.get("train"))
        if batch.is_good_B is None:
            return batch
        ratios = self._compare_mismatched(learner.policy.full_model(learner.device), batch)
        return keep_rated(batch, itertools.chain(*learner.comm.gather(ratios)))

    @torch.no_grad()
    def validate(self, poll: Poll) -> dict[str, float]:
        """Return the means over the held-out pairs: `loss`, and the objective's other values."""
        comm = self._learner.comm
        model = self._learner.policy.full_model(self._learner.device)
        was_training = model.training
        model.eval()
        totals: defaultdict[str, float] = defaultdict(float)
        step = MEASURED_PAIRS * comm.dist_env.world_size
        for first in range(0, len(self._held_out), step):
            poll()
            start = first + comm.dist_env.rank * MEASURED_PAIRS
            rows = range(start, min(start + MEASURED_PAIRS, len(self._held_out)))
            if rows:
                batch = self._build(self._held_out, rows, self._reference_N2.get("val"))
                if batch.is_good_B is not None:
                    batch = keep_rated(batch, self._compare_mismatched(model, batch))
                for name, value in self._sums(model, batch).items():
                    totals[name] += value.item()
        model.train(was_training)
        parts = comm.gather(dict(totals))
        names = max(parts, key=len)
        return {
            name: sum(part.get(name, 0.0) for part in parts) / len(self._held_out) for name in names
        }

    def close(self) -> None:
        """Do nothing, as there is no background work."""

    def _sums(self, model: GPT, batch: PreferenceBatch) -> dict[str, Tensor]:
        def forward(rows: Batch, _: Tensor | None) -> Tensor:
            hidden_BTC: Tensor = model(rows.inputs_BT)
            return hidden_BTC

        device = self._learner.device
        with device.autocast(model.tokens.weight.dtype):
            return self._objective.sums(model, forward, batch, None)

    def _build(
        self, pairs: Sequence[Pair], rows: Sequence[int], reference_N2: Tensor | None
    ) -> PreferenceBatch:
        batch = build_pairs([pairs[row] for row in rows], self._learner.config.model.seq_len)
        reference_B2 = None if reference_N2 is None else reference_N2[list(rows)]
        is_good = torch.tensor([pairs[row][0].is_good for row in rows])
        pairs_batch = PreferenceBatch(
            batch.inputs_BT,
            batch.targets_BT,
            reference_B2=reference_B2,
            is_good_B=is_good if self._learner.config.objective.name == "kto" else None,
        )
        return pairs_batch.to(self._learner.device.torch_device)

    def _compare_mismatched(self, model: GPT, batch: PreferenceBatch) -> list[float]:
        """Return log p / p_reference of each mismatched answer."""
        assert batch.reference_B2 is not None
        rows = Batch(batch.inputs_BT[:, 1], batch.targets_BT[:, 1])
        log_probs_B = self._learner.scorer.log_probs(model, rows).sum(1)
        ratios: list[float] = (log_probs_B - batch.reference_B2[:, 1]).tolist()
        return ratios

    def _measure_reference(self, model: GPT) -> dict[str, Tensor]:
        """Return the summed log-probabilities (N, 2) of chosen and rejected answers, by split.

        The ranks divide the pairs, and each gets the full result.
        """
        return {
            "train": self._sum_log_probs(model, self._pairs),
            "val": self._sum_log_probs(model, self._held_out),
        }

    def _sum_log_probs(self, model: GPT, pairs: Sequence[Pair]) -> Tensor:
        learner = self._learner
        dist_env = learner.comm.dist_env
        sums_by_start = {}
        start = dist_env.rank * MEASURED_PAIRS
        for first in range(start, len(pairs), dist_env.world_size * MEASURED_PAIRS):
            batch = self._build(pairs, range(first, min(first + MEASURED_PAIRS, len(pairs))), None)
            rows = Batch(batch.inputs_BT.flatten(0, 1), batch.targets_BT.flatten(0, 1))
            log_probs_BT = learner.scorer.log_probs(model, rows)
            sums_by_start[first] = log_probs_BT.sum(1).view(-1, 2).cpu()
        for part in learner.comm.gather(sums_by_start):
            sums_by_start |= part
        ordered = [sums_by_start[first] for first in sorted(sums_by_start)]
        return torch.cat([torch.zeros(0, 2), *ordered])


def keep_rated(batch: PreferenceBatch, ratios: Iterable[float]) -> PreferenceBatch:
    """Return a batch of KTO's rated answers only, with an estimate of the KL divergence.

    The estimate is the mean of `ratios`, log p / p_reference of the mismatched answers, or 0 if it
    is negative.
    """
    kl_B = torch.full((len(batch),), max(fmean(ratios), 0.0), device=batch.inputs_BT.device)
    return replace(
        batch, inputs_BT=batch.inputs_BT[:, :1], targets_BT=batch.targets_BT[:, :1], kl_B=kl_B
    )


def build_pairs(pairs: Sequence[Pair], seq_len: int) -> Batch:
    """Return a batch of ids and targets (B, 2, T); no row may exceed seq_len + 1 tokens."""
    shape = len(pairs), 2, max(len(row.ids) for pair in pairs for row in pair)
    inputs = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, -1, dtype=torch.int64)
    for number, pair in enumerate(pairs):
        for side, row in enumerate(pair):
            ids = torch.tensor(list(row.ids))
            is_answer = torch.tensor(list(row.is_answer))
            inputs[number, side, : len(ids)] = ids
            targets[number, side, : len(ids) - 1] = torch.where(is_answer, ids, -1)[1:]
    return Batch(inputs[:, :, :seq_len], targets[:, :, :seq_len])

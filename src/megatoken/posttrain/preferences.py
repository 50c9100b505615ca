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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from megatoken.base.errors import DataError
from megatoken.data.dataloader import Batch
from megatoken.data.window_order import CachedOrder, ShuffledOrder
from megatoken.model.gpt import GPT
from megatoken.posttrain.batches import PreferenceBatch, RowBatches, full_model
from megatoken.posttrain.losses import PreferenceLoss, flatten_pairs
from megatoken.posttrain.reference import load_reference
from megatoken.text.chat_dataset import open_rows
from megatoken.train.objective import Poll
from megatoken.train.run import Run

MEASURED_PAIRS = 32  # per forward in validation and for the reference


class EncodedConversation(NamedTuple):
    """A conversation: its ids, and whether each belongs to the answer.

    is_good: for KTO, whether the answer is desirable.
    """

    ids: Sequence[int]
    is_answer: Sequence[bool]
    is_good: bool = True


# Chosen and rejected; for KTO, the rated and the mismatched answer.
PreferencePair = tuple[EncodedConversation, EncodedConversation]


def read_pairs(run: Run, split: str) -> list[PreferencePair]:
    """Return the (chosen, rejected) pairs of a split or, for KTO, (rated, mismatched) pairs."""
    rows = open_rows(run.data.dataset.components[0].dataset, split)
    read = [
        EncodedConversation(*rows.sequence(row), rows.is_desirable(row)) for row in range(len(rows))
    ]
    if run.config.objective.name != "kto":
        return list(zip(read[::2], read[1::2], strict=True))
    order = ShuffledOrder(len(read), run.config.seed).windows(0, len(read)).tolist()
    mismatched = dict(zip(order, [*order[1:], *order[:1]], strict=True))
    limit = rows.seq_len + 1
    return [(row, mismatch(row, read[mismatched[n]], limit)) for n, row in enumerate(read)]


def mismatch(
    row: EncodedConversation, other: EncodedConversation, limit: int
) -> EncodedConversation:
    """Return the prompt of `row` with the answer of `other`, cut to `limit` tokens."""
    start, other_start = row.is_answer.index(True), other.is_answer.index(True)
    return EncodedConversation(
        [*row.ids[:start], *other.ids[other_start:]][:limit],
        [*row.is_answer[:start], *other.is_answer[other_start:]][:limit],
    )


class PairBatches(RowBatches):
    """Batches of pairs. They are stateless: any batch can be requested at any time."""

    def __init__(self, run: Run, pairs: Mapping[str, Sequence[PreferencePair]]) -> None:
        """Load the reference log-probabilities, or compute them. pairs: by split, train and val.

        Raises DataError if there are fewer training pairs than a batch needs.
        """
        super().__init__(run)
        self._pairs = pairs
        batch_seqs = run.config.batch_seqs
        n_pairs = len(pairs["train"])
        if n_pairs < batch_seqs:
            what = f"the training split has {n_pairs:,} pairs, a batch needs {batch_seqs:,}"
            raise DataError(what, "data.path", "lower budget.batch_tokens, or prepare more")
        self._order = CachedOrder(ShuffledOrder(n_pairs, run.config.seed), n_pairs)
        self._reference_N2: dict[str, Tensor] = {}  # by split
        if run.config.objective.name in ("dpo", "kto"):
            self._reference_N2 = load_reference(run, self._measure_reference)

    def get(self, number: int) -> PreferenceBatch:
        """Return this process's share of batch `number`."""
        run = self.run
        batch_seqs = run.config.batch_seqs
        rows = self._order.windows(number * batch_seqs, batch_seqs).tolist()
        first = run.state.dims.dp_rank * self.local_size
        # Padded as the global batch, because rounding depends on the shape.
        length = max(len(row.ids) for index in rows for row in self._pairs["train"][index])
        batch = self._build("train", rows[first : first + self.local_size], length)
        if batch.is_good_B is None:
            return batch
        ratios = self._compare_mismatched(full_model(run.state, run.device), batch)
        return keep_rated(batch, itertools.chain(*self.comm.gather(ratios)))

    @torch.no_grad()
    def measure(self, poll: Poll) -> dict[str, float]:
        """Return the means over the held-out pairs: `loss`, and the objective's other values."""
        model = full_model(self.run.state, self.run.device)
        was_training = model.training
        model.eval()
        totals: defaultdict[str, float] = defaultdict(float)
        n_pairs = len(self._pairs["val"])
        for rows in self._divide(n_pairs):
            poll()
            if rows:
                batch = self._build("val", rows)
                if batch.is_good_B is not None:
                    batch = keep_rated(batch, self._compare_mismatched(model, batch))
                for name, value in self._sums(model, batch).items():
                    totals[name] += value.item()
        model.train(was_training)
        parts = self.comm.gather(dict(totals))
        names = max(parts, key=len)
        return {name: sum(part.get(name, 0.0) for part in parts) / n_pairs for name in names}

    def _divide(self, count: int) -> Iterator[range]:
        """Yield ranges of this rank's share of `count` pairs. Ranks get equally many; some are empty."""
        dist_env = self.comm.dist_env
        for first in range(0, count, MEASURED_PAIRS * dist_env.world_size):
            start = first + dist_env.rank * MEASURED_PAIRS
            yield range(start, min(start + MEASURED_PAIRS, count))

    def _sums(self, model: GPT, batch: PreferenceBatch) -> dict[str, Tensor]:
        steps = self.run.step_config
        assert isinstance(steps.loss, PreferenceLoss)
        with self.run.device.autocast(model.tokens.weight.dtype):
            hidden_BTC = model(flatten_pairs(batch).inputs_BT)
            return steps.loss.sums_of(model, hidden_BTC, batch, steps.loss_chunk)

    def _build(self, split: str, rows: Sequence[int], length: int = 0) -> PreferenceBatch:
        pairs = [self._pairs[split][row] for row in rows]
        batch = build_pairs(pairs, self.run.config.model.seq_len, length)
        if split in self._reference_N2:
            batch = replace(batch, reference_B2=self._reference_N2[split][list(rows)])
        if self.run.config.objective.name == "kto":
            batch = replace(batch, is_good_B=torch.tensor([row.is_good for row, _ in pairs]))
        return batch.to(self.run.device.torch_device)

    def _compare_mismatched(self, model: GPT, batch: PreferenceBatch) -> list[float]:
        """Return log p / p_reference of each mismatched answer."""
        assert batch.reference_B2 is not None
        rows = Batch(batch.inputs_BT[:, 1], batch.targets_BT[:, 1])
        log_probs_B = self.scorer.log_probs(model, rows).sum(1)
        ratios: list[float] = (log_probs_B - batch.reference_B2[:, 1]).tolist()
        return ratios

    def _measure_reference(self, model: GPT) -> dict[str, Tensor]:
        """Return the summed log-probabilities (N, 2) of chosen and rejected answers, by split.

        The ranks divide the pairs, and each gets the full result.
        """
        sums_N2 = {}
        for split, pairs in self._pairs.items():
            sums_by_start = {}
            for rows in filter(None, self._divide(len(pairs))):
                batch = flatten_pairs(self._build(split, rows))
                log_probs_BT = self.scorer.log_probs(model, batch)
                sums_by_start[rows.start] = log_probs_BT.sum(1).view(-1, 2).cpu()
            for others in self.comm.gather(sums_by_start):
                sums_by_start |= others
            ordered = [sums_by_start[start] for start in sorted(sums_by_start)]
            sums_N2[split] = torch.cat([torch.zeros(0, 2), *ordered])
        return sums_N2


def keep_rated(batch: PreferenceBatch, ratios: Iterable[float]) -> PreferenceBatch:
    """Return a batch of KTO's rated answers only, with an estimate of the KL divergence.

    The estimate is the mean of `ratios`, log p / p_reference of the mismatched answers, or 0 if it
    is negative.
    """
    kl_B = torch.full((len(batch),), max(fmean(ratios), 0.0), device=batch.inputs_BT.device)
    return replace(
        batch, inputs_BT=batch.inputs_BT[:, :1], targets_BT=batch.targets_BT[:, :1], kl_B=kl_B
    )


def build_pairs(pairs: Sequence[PreferencePair], seq_len: int, length: int = 0) -> PreferenceBatch:
    """Return a batch of ids and targets (B, 2, T); no row may exceed seq_len + 1 tokens.

    length: the rows' length after padding; by default that of the longest.
    """
    shape = len(pairs), 2, length or max(len(row.ids) for pair in pairs for row in pair)
    inputs = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, -1, dtype=torch.int64)
    for number, pair in enumerate(pairs):
        for side, row in enumerate(pair):
            ids = torch.tensor(row.ids)
            is_answer = torch.tensor(row.is_answer)
            inputs[number, side, : len(ids)] = ids
            targets[number, side, : len(ids) - 1] = torch.where(is_answer, ids, -1)[1:]
    return PreferenceBatch(inputs[:, :, :seq_len], targets[:, :, :seq_len])

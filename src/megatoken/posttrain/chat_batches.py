"""Batches of conversations packed into rows (text/chat_dataset.py), trained on the labeled tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from megatoken.data.dataloader import Batch, DataLoader, latest_start, spread
from megatoken.data.dataset import Dataset
from megatoken.data.vocabulary import Ids
from megatoken.text.chat_dataset import START, TRAINED, Labels, open_rows
from megatoken.train.objective import TextBatches


@dataclass(eq=False, kw_only=True)
class ChatLoader(DataLoader):
    """Makes batches of rows. labels (n_tokens,): of each token."""

    labels: Labels
    shared_tokens: ClassVar[int] = 0

    def batch(self, step: int) -> Batch:
        labels = self.labels[self.find_tokens(step)[:, None] + np.arange(self.seq_len + 1)]
        return make_batch(self.rows(step), labels)


class ChatBatches(TextBatches):
    """Batches of rows, validated by the cross-entropy of held-out rows."""

    def hold_out(
        self, dataset: Dataset, limit_tokens: int
    ) -> tuple[int, Callable[[int, int], Batch]]:
        rows = open_rows(dataset, "val")
        chosen = min(len(rows), max(1, limit_tokens // rows.seq_len))

        def read(first: int, count: int) -> Batch:
            return make_batch(*rows.read(spread(first, count, chosen, len(rows))))

        return chosen, read


def make_batch(rows: Ids, labels: Labels) -> Batch:
    """Make a batch on the CPU from rows of conversations and their labels, both (n, T + 1)."""
    ids = rows.astype(np.int64)
    targets = np.where(labels[:, 1:] & TRAINED, ids[:, 1:], -1)
    starts = latest_start(labels[:, :-1] & START > 0)
    return Batch(
        torch.from_numpy(np.ascontiguousarray(ids[:, :-1])),
        torch.from_numpy(targets),
        torch.from_numpy(starts) if starts.any() else None,
    )

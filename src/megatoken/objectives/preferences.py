"""Batches of preferences: pairs of a chosen and a rejected answer to the same prompt, two rows each.

A pair counts as one sequence of the batch. For DPO every pair brings the log-probabilities of both answers under the
reference, the model that the run starts from, computed once.

Shapes: N pairs of the split, B pairs of this process; T tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatoken.data.dataloader import Batch
from megatoken.data.window_order import CachedOrder, ShuffledOrder
from megatoken.errors import DataError
from megatoken.model.gpt import GPT
from megatoken.objectives.answer_scores import build_objective, measure_answers
from megatoken.objectives.reference import load_reference
from megatoken.train.run_context import RunContext
from megatoken.train.state import with_whole_model

HELD_OUT_PAIRS = 32  # that a process measures at once


class Row(NamedTuple):
    """Ids of a conversation and whether each belongs to the answer."""

    ids: Sequence[int]
    trained: Sequence[bool]


class PairBatches:
    """The batch of a number, without state: any number, any number of times."""

    def __init__(
        self, run: RunContext, pairs: Sequence[tuple[Row, Row]], held_out: Sequence[tuple[Row, Row]]
    ) -> None:
        """Raises DataError where the split holds less than one batch, as `load_reference`."""
        self._run, self._pairs, self._held_out = run, pairs, held_out
        self.metrics: dict[str, float] = {}  # none beside those of the objective
        if len(pairs) < run.config.batch_seqs:
            what = f"the training split holds {len(pairs):,} pairs, a batch is {run.config.batch_seqs:,}"
            raise DataError(what, "data.path", "lower budget.batch_tokens, or prepare more")
        self._order = CachedOrder(ShuffledOrder(len(pairs), run.config.seed), len(pairs))
        self._reference: Tensor | None = None
        self._held_out_reference: Tensor | None = None
        if run.config.objective.name == "dpo":
            tensors = load_reference(run, self._measure_reference)
            self._reference, self._held_out_reference = tensors["train"], tensors["val"]

    def get(self, number: int) -> Batch:
        """This process's pairs of a batch."""
        run = self._run
        own = run.config.batch_seqs // run.state.dims.dp_size
        first = number * run.config.batch_seqs + run.state.dims.dp_rank * own
        return self._build(self._pairs, self._order.windows(first, own).tolist(), self._reference)

    @torch.no_grad()
    def validate(self, poll: Callable[[], None]) -> dict[str, float]:
        """Means over the held-out pairs: `loss`, and what the objective measures. Ranks take turns."""
        run, comm, totals = self._run, self._run.comm, dict[str, Tensor]()
        state = with_whole_model(run.state, run.device)
        objective = build_objective(run.config.objective)
        assert objective is not None
        step = HELD_OUT_PAIRS * comm.dist_env.world_size
        model = state.compute_model
        was_training = model.training
        model.eval()
        for first in range(0, len(self._held_out), step):
            poll()
            start = first + comm.dist_env.rank * HELD_OUT_PAIRS
            index = range(start, min(start + HELD_OUT_PAIRS, len(self._held_out)))
            if index:
                batch = self._build(self._held_out, index, self._held_out_reference)
                for name, value in objective.sums(
                    state, run.step_config, run.device, batch, None
                ).items():
                    totals[name] = totals.get(name, 0) + value.double().cpu()
        model.train(was_training)
        parts = comm.gather({name: float(total) for name, total in totals.items()})
        names = next(part for part in parts if part)
        return {
            name: sum(part.get(name, 0.0) for part in parts) / len(self._held_out) for name in names
        }

    def close(self) -> None:
        """Nothing is open."""

    def _build(
        self, pairs: Sequence[tuple[Row, Row]], index: Sequence[int], reference: Tensor | None
    ) -> Batch:
        device = self._run.device.torch_device
        batch = build_pairs([pairs[i] for i in index], self._run.model_config.seq_len)
        values = {} if reference is None else {"reference": reference[list(index)].to(device)}
        return Batch(batch.inputs_BT.to(device), batch.targets_BT.to(device), values=values)

    def _measure_reference(self, model: GPT) -> dict[str, Tensor]:
        """Summed log-probabilities (N, 2) of both splits' answers; each rank measures its share."""
        return {
            "train": self._sum_log_probs(model, self._pairs),
            "val": self._sum_log_probs(model, self._held_out),
        }

    def _sum_log_probs(self, model: GPT, pairs: Sequence[tuple[Row, Row]]) -> Tensor:
        run, dist_env = self._run, self._run.comm.dist_env
        sums = {}
        for first in range(
            dist_env.rank * HELD_OUT_PAIRS, len(pairs), dist_env.world_size * HELD_OUT_PAIRS
        ):
            batch = self._build(pairs, range(first, min(first + HELD_OUT_PAIRS, len(pairs))), None)
            rows = Batch(batch.inputs_BT.flatten(0, 1), batch.targets_BT.flatten(0, 1))
            log_probs = measure_answers(model, run.step_config, run.device, rows)
            sums[first] = log_probs.sum(1).view(-1, 2).cpu()
        found = {first: part for own in run.comm.gather(sums) for first, part in own.items()}
        return torch.cat([torch.zeros(0, 2), *(found[first] for first in sorted(found))])


def build_pairs(pairs: Sequence[tuple[Row, Row]], seq_len: int) -> Batch:
    """(B, 2, T) ids and targets; the targets are the tokens of the answers. A row has up to seq_len + 1 tokens."""
    shape = len(pairs), 2, max(len(row.ids) for pair in pairs for row in pair)
    inputs, targets = (
        torch.zeros(shape, dtype=torch.int64),
        torch.full(shape, -1, dtype=torch.int64),
    )
    for number, pair in enumerate(pairs):
        for side, row in enumerate(pair):
            ids, trained = torch.tensor(list(row.ids)), torch.tensor(list(row.trained))
            inputs[number, side, : len(ids)] = ids
            targets[number, side, : len(ids) - 1] = torch.where(trained, ids, -1)[1:]
    return Batch(inputs[:, :, :seq_len], targets[:, :, :seq_len])

"""The tokens of a step do not depend on processes, micro-batches, or how often a run was resumed."""

from pathlib import Path

import numpy as np
import pytest

from megatoken.data.dataloader import DataLoader
from megatoken.data.dataset import load_dataset
from tests.data.small_dataset import write_dataset

STEPS, BATCH, SEQ_LEN = 8, 12, 16


@pytest.mark.fault(40, 41)
@pytest.mark.parametrize("chains", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_token_order_after_any_chain_of_resumes(chains: int, tmp_path: Path) -> None:
    """Each start has another number of ranks and another micro-batch, and may repeat lost steps."""
    write_dataset(tmp_path, {"train": [797, 30, 600]})  # an epoch ends within a batch
    tokens = load_dataset(tmp_path).train
    alone = DataLoader(tokens, seq_len=SEQ_LEN, batch_size=BATCH, seed=7)
    assert alone.n_windows < STEPS * BATCH
    expected = [alone.rows(step) for step in range(STEPS)]
    loaders = {
        world: [
            DataLoader(
                tokens, seq_len=SEQ_LEN, batch_size=BATCH, seed=7, dp_rank=rank, dp_size=world
            )
            for rank in range(world)
        ]
        for world in (1, 2, 3, 4)
    }
    rng, starts = np.random.default_rng(0), 0
    for _ in range(chains):
        saved, history = 0, {}
        while saved < STEPS:
            starts += 1
            ranks = loaders[int(rng.integers(1, 5))]
            share = BATCH // len(ranks)
            micro_batch = int(rng.choice([size for size in (1, 2, 4) if share % size == 0]))
            stopped = int(rng.integers(saved + 1, STEPS + 1))
            for step in range(saved, stopped):
                micro_batches = [
                    loader.rows(step)[first : first + micro_batch]
                    for loader in ranks
                    for first in range(0, share, micro_batch)
                ]
                history[step] = np.concatenate(micro_batches)
            saved = int(
                rng.integers(saved, stopped + 1)
            )  # steps after the newest checkpoint are lost and done again
        assert all(np.array_equal(history[step], expected[step]) for step in range(STEPS))
    assert starts > 3 * chains

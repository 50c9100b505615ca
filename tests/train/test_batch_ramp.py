"""A batch ramp: the curve is the same on any number of processes, resumed, and with skips."""

from pathlib import Path

import numpy as np
import pytest

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.errors import ConfigError
from megatoken.data.dataloader import DataLoader
from megatoken.data.dataset import load_dataset
from tests.data.small_dataset import list_windows
from tests.tiny_run import read_column, write_shards
from tests.train.faulty_run import Job, final_bits, run_jobs

RAMP = (
    "budget.batch_tokens=192 budget.batch_start=48 budget.batch_ramp=1000 optim.warmup=300tok "
    "machine.micro_batch=2"
)
# 3, 6, 9 sequences of 16: a third of 1,000 tokens each, in whole batches
SIZES = [48] * 7 + [96] * 4 + [144]


def test_tokens_and_warm_up_follow_the_sizes_and_skipped_batches_leave_theirs_out(
    data: str, tmp_path: Path
):
    jobs = [
        Job(name="alone", settings=RAMP),
        Job(name="skips", settings=RAMP, fault="nan", rank=0, batches=(4, 8), stop=5),
        Job(name="without", settings=RAMP, skipped=(4, 8)),
    ]
    run_jobs(0, jobs, data, tmp_path)
    tokens = read_column(tmp_path / "alone", "tokens")
    assert tokens == {step: sum(SIZES[:step]) for step in range(1, 13)}
    rates = read_column(tmp_path / "alone", "lr")
    for step in range(1, 8):
        assert rates[step] == pytest.approx(1e-2 * min(1.0, tokens[step] / 300))
    assert final_bits(tmp_path / "skips") == final_bits(tmp_path / "without")
    sizes = [size for batch, size in enumerate([*SIZES, 144, 192]) if batch not in (4, 8)]
    tokens = {step: sum(sizes[:step]) for step in range(1, 13)}
    assert read_column(tmp_path / "skips", "tokens") == tokens


def test_windows_follow_each_other_and_divide_among_ranks(tmp_path: Path):
    write_shards(tmp_path)
    tokens = load_dataset(tmp_path / "train_0.npy", external_tokenizer="bytes").train
    fixed = {"seq_len": 16, "seed": 3, "batch_size": 12}
    ramp = BatchRamp(48, 192, 1000)
    flat, ramped = (DataLoader(tokens, **fixed, ramp=each) for each in (None, ramp))
    entries = np.concatenate([list_windows(flat, step) for step in range(5)])
    windows = [list_windows(ramped, step) for step in range(12)]
    assert [len(each) * 16 for each in windows] == SIZES
    assert np.array_equal(np.concatenate(windows[:10]), entries[: sum(SIZES[:10]) // 16])
    with pytest.raises(ConfigError):
        DataLoader(tokens, **fixed, ramp=ramp, dp_size=2)

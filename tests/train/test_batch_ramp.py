"""A batch that grows: the same curve on any number of processes, resumed, and without the batches that are skipped."""

from pathlib import Path

import pytest

from megatoken.config.batch_ramp import BatchRamp
from megatoken.data.dataloader import DataLoader
from megatoken.data.dataset import load_dataset
from megatoken.errors import ConfigError
from tests.data.small_dataset import list_windows
from tests.tiny_run import read_column, read_losses, write_shards
from tests.train.faulty_run import Job, final_bits, run_jobs

RAMP = (
    "budget.batch_tokens=192 budget.batch_start=48 budget.batch_ramp=1000 optim.warmup=300tok "
    "machine.micro_batch=2"
)
# 3, 6, 9 sequences of 16: a third of 1,000 tokens each, in whole batches
SIZES = [48] * 7 + [96] * 4 + [144]


@pytest.fixture(scope="module")
def runs(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    alone = [
        Job(name="alone", settings=RAMP),
        Job(name="whole", settings=f"{RAMP} machine.micro_batch=12"),
        Job(name="skips", settings=RAMP, fault="nan", rank=0, batches=(4, 8), stop=5),
        Job(name="without", settings=RAMP, skipped=(4, 8)),
    ]
    for nproc, jobs in ((1, alone), (3, [Job(name="three", settings=RAMP)])):
        assert {answer["code"] for answer in run_jobs(jobs, data, folder, nproc).values()} == {0}
    return folder


def test_batches_are_the_same_for_any_layout(runs: Path):
    for other in ("whole", "three"):
        losses = read_losses(runs / "alone")
        assert read_losses(runs / other) == pytest.approx(losses, rel=1e-5)
        assert read_column(runs / other, "lr") == read_column(runs / "alone", "lr")


def test_tokens_and_warm_up_follow_the_sizes(runs: Path):
    tokens = {step: sum(SIZES[:step]) for step in range(1, 13)}
    assert read_column(runs / "alone", "tokens") == tokens
    rates = read_column(runs / "alone", "lr")
    for step in range(1, 8):
        assert rates[step] == pytest.approx(1e-2 * min(1.0, tokens[step] / 300))


def test_skipped_batches_leave_their_own_sizes_out(runs: Path):
    assert final_bits(runs / "skips") == final_bits(runs / "without")
    sizes = [size for batch, size in enumerate([*SIZES, 144, 192]) if batch not in (4, 8)]
    tokens = {step: sum(sizes[:step]) for step in range(1, 13)}
    assert read_column(runs / "skips", "tokens") == tokens


def test_windows_follow_each_other_and_divide_among_ranks(tmp_path: Path):
    write_shards(tmp_path)
    tokens = load_dataset(tmp_path / "train_0.npy", external_tokenizer="bytes").train
    fixed = {"seq_len": 16, "seed": 3}
    flat = DataLoader(tokens, batch_size=12, **fixed)
    ramped = DataLoader(tokens, batch_size=12, ramp=BatchRamp(48, 192, 1000), **fixed)
    entries = [window for step in range(5) for window in list_windows(flat, step)]
    assert [len(list_windows(ramped, step)) * 16 for step in range(12)] == SIZES
    assert [window for step in range(10) for window in list_windows(ramped, step)] == entries[
        : sum(SIZES[:10]) // 16
    ]
    with pytest.raises(ConfigError):
        DataLoader(tokens, batch_size=12, ramp=BatchRamp(48, 192, 1000), dp_size=2, **fixed)

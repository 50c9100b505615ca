"""A batch that grows: the same curve on any number of processes, resumed, and without the batches that are skipped."""

from pathlib import Path

import pytest

from megatoken.config.batch_ramp import BatchRamp
from megatoken.data.dataloader import DataLoader
from megatoken.data.dataset import load_dataset
from megatoken.errors import ConfigError
from megatoken.system.metrics_log import read_metrics
from tests.train.faulty_run import Job, final_bits, run_jobs, write_recipe

RAMP = (
    "budget.batch_start=48",
    "budget.batch_ramp=1000",
    "optim.warmup=300tok",
    "machine.micro_batch=2",
)
SIZES = (
    [48] * 7 + [96] * 4 + [144]
)  # 3, 6, 9 sequences of 16: a third of 1,000 tokens each, in whole batches


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    recipe = write_recipe(folder)
    alone = [
        Job(name="alone", words=RAMP),
        Job(name="whole", words=(*RAMP, "machine.micro_batch=12")),
    ]
    alone.append(Job(name="skips", words=RAMP, fault="nan", rank=0, batches=(4, 8), stop=5))
    alone.append(Job(name="without", words=RAMP, skipped=(4, 8)))
    for nproc, jobs in ((1, alone), (3, [Job(name="three", words=RAMP)])):
        assert {answer["code"] for answer in run_jobs(jobs, recipe, folder, nproc).values()} == {0}
    return folder


def test_batches_are_the_same_for_any_layout(runs: Path) -> None:
    losses = {name: final_bits(runs / name)["losses"] for name in ("alone", "whole", "three")}
    for other in ("whole", "three"):
        assert [loss for _, loss, _ in losses[other]] == pytest.approx(
            [loss for _, loss, _ in losses["alone"]], 1e-5
        )
        assert [lr for _, _, lr in losses[other]] == [lr for _, _, lr in losses["alone"]]


def test_tokens_and_warm_up_follow_the_sizes(runs: Path) -> None:
    rows = [row for row in read_metrics(runs / "alone") if row["kind"] == "train"]
    done = [sum(SIZES[:step]) for step in range(1, 13)]
    assert [row["tokens"] for row in rows] == done
    assert [row["lr"] for row in rows[:7]] == pytest.approx(
        [1e-2 * min(1.0, tokens / 300) for tokens in done[:7]]
    )


def test_skipped_batches_leave_their_own_sizes_out(runs: Path) -> None:
    assert final_bits(runs / "skips") == final_bits(runs / "without")
    tokens = [row["tokens"] for row in read_metrics(runs / "skips") if row["kind"] == "train"]
    sizes = [size for batch, size in enumerate([*SIZES, 144, 192]) if batch not in (4, 8)]
    assert tokens == [sum(sizes[:step]) for step in range(1, 13)]


def test_windows_follow_each_other_and_divide_among_ranks(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    tokens = load_dataset(tmp_path / "train_0.npy", external_tokenizer="bytes").train
    fixed = {"seq_len": 16, "seed": 3}
    flat = DataLoader(tokens, batch_size=12, **fixed)
    ramped = DataLoader(tokens, batch_size=12, ramp=BatchRamp(48, 192, 1000), **fixed)
    entries = [window for step in range(5) for window in flat.windows(step)]
    assert [len(ramped.windows(step)) * 16 for step in range(12)] == SIZES
    assert [window for step in range(10) for window in ramped.windows(step)] == entries[
        : sum(SIZES[:10]) // 16
    ]
    with pytest.raises(
        ConfigError, match=r"a batch of 3 sequences .* among 2 processes — budget\.batch_start"
    ):
        DataLoader(tokens, batch_size=12, ramp=BatchRamp(48, 192, 1000), dp_size=2, **fixed)

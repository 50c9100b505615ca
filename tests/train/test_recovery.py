"""Bad batches leave no trace, repeated ones rewind the run, and differing or slow ranks are named."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatoken.data.dataloader import batch_of_step
from megatoken.distributed.replica_check import checksum, find_divergence
from megatoken.distributed.stragglers import find_stragglers
from megatoken.errors import ExitCode
from megatoken.train.spikes import MIN_STEPS, RecentSteps
from tests.tiny_run import read_events
from tests.train.faulty_run import Job, count_false_alarms, final_bits, run_jobs

LAYOUTS = {
    "1-fused": "machine.adamw=fused",
    "1-loop": "machine.adamw=loop",
    "3-late": "",
    "3-zero3-loop": "machine.sharding=zero3 machine.adamw=loop",
}
BAD = (4, 7)  # batches
GOOD = {"code": 0, "error": ""}


def test_batches_go_in_order_without_those_that_are_skipped():
    rng = random.Random(0)
    for _ in range(50):
        skipped = sorted(rng.sample(range(40), rng.randrange(30)))
        left = [number for number in range(80) if number not in skipped]
        assert [batch_of_step(step, skipped) for step in range(40)] == left[:40]


@pytest.fixture(scope="module")
def runs(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of most runs. Those of several processes share them, because they start slowly."""
    folder = tmp_path_factory.mktemp("runs")
    jobs: dict[int, list[Job]] = {1: [], 3: []}
    for name, settings in LAYOUTS.items():
        nproc = int(name[0])
        bad: dict[str, Any] = {"fault": "nan", "rank": nproc - 1, "batches": BAD}
        jobs[nproc] += [
            Job(name=name, settings=settings, late=name.endswith("late"), **bad),
            Job(name=f"{name}-without", settings=settings, skipped=BAD),
        ]
    jobs[1].append(
        Job(name="resumed", settings=LAYOUTS["1-fused"], fault="nan", rank=0, batches=BAD, stop=5)
    )
    flip: dict[str, Any] = {"fault": "flip", "rank": 2, "batches": (8,), "skipped": BAD}
    exponent = 8 * (4 * 5 + 3) + 6  # weight 5 of the first norm: 1.0 becomes infinity
    jobs[3] += [
        Job(name="flipped", tensor=3, bit=1000, **flip),
        Job(name="infinite", tensor=2, bit=exponent, **flip),
        Job(
            name="slow",
            settings="budget.steps=17 machine.micro_batch=4",
            fault="slow_compute",
            rank=1,
            batches=(0,),
            window=16,
        ),
    ]
    for nproc in jobs:
        answers = run_jobs(jobs[nproc], data, folder, nproc)
        assert answers == {job.name: GOOD for job in jobs[nproc]}
    return folder


@pytest.mark.fault(44)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_batch_is_skipped_as_if_it_had_not_been_in_the_data(layout: str, runs: Path):
    bits = final_bits(runs / layout)
    assert bits == final_bits(runs / f"{layout}-without")
    assert (bits["step"], bits["skipped_batches"]) == (12, [4, 7])
    rows = read_events(runs / layout, "batch skipped")
    skips = [(row["step"], row["batch"], row["loss"]) for row in rows]
    assert skips == [(5, 4, "nan"), (7, 7, "nan")]
    assert read_events(runs / f"{layout}-without", "batch skipped") == []


def test_a_resumed_run_knows_the_skipped_batches_and_the_recent_steps(runs: Path):
    assert final_bits(runs / "resumed") == final_bits(runs / "1-fused-without")
    assert [row["batch"] for row in read_events(runs / "resumed", "batch skipped")] == [4, 7]


@pytest.mark.fault(46)
@pytest.mark.parametrize(("name", "step"), [("flipped", 10), ("infinite", 7)])
def test_a_replica_that_differs_is_named_and_the_run_ends_with_the_same_bits(
    name: str, step: int, runs: Path
):
    """Found before a save, or when an infinite weight makes the next batch bad: none is skipped."""
    assert final_bits(runs / name) == final_bits(runs / "3-late-without")
    (row,) = read_events(runs / name, "replicas differ")
    assert (row["step"], row["ranks"]) == (step, [2])
    assert len(read_events(runs / name, "rewind")) == 1
    assert read_events(runs / name, "batch skipped") == []


@pytest.mark.fault(49)
def test_a_slow_rank_is_named(runs: Path):
    (row,) = [row for row in read_events(runs / "slow", "slow rank") if row["phase"] == "compute"]
    assert (row["step"], row["rank"]) == (16, 1)


@pytest.mark.fault(45)
def test_a_spike_is_reported_or_skipped(data: str, tmp_path: Path):
    settings = "budget.steps=68 optim.warmup=0 optim.lr=1e-3 machine.micro_batch=12 save.every=0"
    skip = f"{settings} optim.spike=skip"
    spike: dict[str, Any] = {"fault": "spike", "rank": 0, "batches": (66,)}
    jobs = [
        Job(name="warn", settings=settings, **spike),
        Job(name="skip", settings=skip, **spike),
        Job(name="without", settings=skip, skipped=(66,)),
    ]
    assert run_jobs(jobs, data, tmp_path, 1) == {job.name: GOOD for job in jobs}
    for name, what, expected in (
        ("warn", "spike", [(67, 66)]),
        ("skip", "batch skipped", [(67, 66)]),
        ("without", "batch skipped", []),
    ):
        rows = read_events(tmp_path / name, what)
        assert [(row["step"], row["batch"]) for row in rows] == expected
    assert final_bits(tmp_path / "skip") == final_bits(tmp_path / "without")


@pytest.mark.fault(44)
def test_bad_batches_in_a_row_lead_back_to_the_checkpoint_and_are_left_out(
    data: str, tmp_path: Path
):
    nan: dict[str, Any] = {"fault": "nan", "rank": 0}
    jobs = [
        Job(name="bad", batches=(7, 8, 9), **nan),
        # From the checkpoint of step 5 to the last bad one.
        Job(name="without", skipped=(5, 6, 7, 8, 9)),
        Job(name="endless", batches=tuple(range(7, 99)), **nan),
        Job(name="no-checkpoint", settings="optim.max_skips=2", batches=(3, 4), **nan),
    ]
    answers = run_jobs(jobs, data, tmp_path, 1)
    codes = [answer["code"] for answer in answers.values()]
    assert codes == [ExitCode.DONE, ExitCode.DONE, ExitCode.NUMERICS, ExitCode.NUMERICS]
    assert final_bits(tmp_path / "bad") == final_bits(tmp_path / "without")
    (row,) = read_events(tmp_path / "bad", "rewind")
    assert "from step 7 to 5, skipping batches 5 to 9" in row["message"]
    assert "step 6, batches 13, 14, 15 — " in answers["endless"]["error"]
    assert len(read_events(tmp_path / "endless", "rewind")) == 2
    assert "step 4, batches 3, 4 — " in answers["no-checkpoint"]["error"]


@pytest.mark.fault(45)
def test_clean_steps_raise_no_alarm():
    """The soak has 100,000 steps."""
    assert count_false_alarms(5_000) == 0


@pytest.mark.fault(45)
@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.3])
def test_gradients_times_1000_are_found(sigma: float):
    found = 0
    for seed in range(30):
        rng, recent = np.random.default_rng(seed), RecentSteps()
        n = int(rng.integers(MIN_STEPS, 300))
        for step, noise in enumerate(rng.standard_normal(n).tolist()):
            recent.values.append((3.0, math.exp(sigma * noise) / math.sqrt(1 + step / 50)))
        found += 1e3 * recent.values[-1][1] > recent.limits()[1]
    assert found == 30


def test_too_few_steps_have_no_limit():
    recent = RecentSteps()
    for _ in range(MIN_STEPS - 1):
        recent.values.append((3.0, 1.0))
    assert recent.limits() == (math.inf, math.inf)
    recent.values.append((0.0, 1.0))
    assert recent.limits() == pytest.approx((4.5, 3.0))
    copy = RecentSteps()
    copy.load(json.loads(json.dumps(list(recent.values))))
    assert copy == recent


@pytest.mark.fault(46)
def test_the_replica_that_differs_is_named_by_the_majority():
    names = ["a", "b", "c"]
    assert find_divergence(names, [(0, [1, 2, 3])] * 3) is None
    found = find_divergence(names, [(0, [1, 2, 3]), (0, [1, 5, 3]), (0, [1, 2, 3])])
    assert found is not None
    assert (found.ranks, found.tensors) == ((1,), ("b",))
    found = find_divergence(
        names, [("x", [1, 2, 3]), ("y", [7, 8, 9]), ("x", [0, 2, 4]), ("y", [7, 8, 9])]
    )
    assert found is not None
    assert (found.ranks, found.tensors) == ((0, 2), ("a", "c"))


@pytest.mark.fault(46)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 129])
def test_one_flipped_bit_changes_the_checksum(dtype: torch.dtype, size: int):
    whole = torch.arange(3 * size + 3).to(dtype)
    tensor = whole[3 : 3 + size]  # at any address
    before = checksum(tensor)
    assert before == checksum(tensor.clone())
    raw = tensor.view(torch.uint8)
    for place in range(0, raw.numel(), 3):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert checksum(tensor) != before
            raw[place] ^= 1 << bit


def test_a_rank_is_slow_if_it_is_in_both_halves_and_by_more_than_noise():
    def report(data: float, *compute: float) -> dict[str, tuple[float, ...]]:
        return {"data": (data, data), "compute": compute}

    usual = report(0.001, 0.1, 0.1)
    assert find_stragglers([usual, usual, usual]) == []
    assert find_stragglers([usual, report(0.001, 0.2, 0.14), usual]) == []
    assert find_stragglers([usual, report(0.004, 0.1, 0.1)]) == []  # 3 ms
    (slow,) = find_stragglers([usual, report(0.001, 0.16, 0.2), usual])
    assert (slow.rank, slow.phase) == (1, "compute")
    assert (slow.ratio, slow.seconds, slow.others) == pytest.approx((2.0, 0.2, 0.1))
    (slow,) = find_stragglers([report(0.05, 0.1, 0.1), usual])
    assert (slow.rank, slow.phase) == (0, "data")

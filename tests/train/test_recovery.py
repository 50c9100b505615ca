"""Bad batches are skipped, several rewind the run, and differing or slow ranks are named."""

import math
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from megatoken.base.errors import ExitCode
from megatoken.distributed.replica_check import checksum, find_divergence
from megatoken.distributed.stragglers import find_stragglers
from megatoken.optim.spikes import DEVIATIONS, MAD_TO_STD, MIN_STEPS, RecentSteps, upper_limit
from tests.ranks import run_ranks
from tests.tiny_run import read_events
from tests.train.faulty_run import Job, final_bits, run_jobs

LAYOUTS = {
    "1-fused": "machine.adamw=fused",
    "1-loop-resumed": "machine.adamw=loop",
    "3-late": "",
    "3-zero3-loop": "machine.sharding=zero3 machine.adamw=loop",
}
BAD = (4, 7)  # batches
NAN = {"fault": "nan", "rank": 0}


@pytest.fixture(scope="module")
def runs(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of most runs. Those of several processes share them, because they start slowly."""
    folder = tmp_path_factory.mktemp("runs")
    flip = {"fault": "flip", "rank": 2, "batches": (8,), "skipped": BAD}
    exponent = 8 * (4 * 5 + 3) + 6  # weight 5 of the first norm: 1.0 becomes infinity
    long = "budget.steps=17 machine.micro_batch=4"
    jobs = {
        "1": [],
        "3": [
            Job(name="flipped", tensor=3, bit=1000, **flip),
            Job(name="infinite", tensor=2, bit=exponent, **flip),
            Job(name="slow", settings=long, fault="slow", rank=1, batches=(0,), window=16),
        ],
    }
    for name, settings in LAYOUTS.items():
        bad = {"fault": "nan", "rank": int(name[0]) - 1, "batches": BAD}
        late, stop = name.endswith("late"), 5 * name.endswith("resumed")
        jobs[name[0]] += [
            Job(name=name, settings=settings, late=late, stop=stop, **bad),
            Job(name=f"{name}-without", settings=settings, skipped=BAD),
        ]
    run_jobs(0, jobs["1"], data, folder)
    run_ranks(run_jobs, jobs["3"], data, folder, nprocs=3)
    return folder


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.fault(46)
@pytest.mark.parametrize(("name", "step"), [("flipped", 10), ("infinite", 7)])
def test_a_replica_that_differs_is_named_and_the_run_ends_with_the_same_bits(
    name: str, step: int, runs: Path
):
    """It is found before a save or by a bad batch after an infinite weight; none is skipped."""
    assert final_bits(runs / name) == final_bits(runs / "3-late-without")
    (row,) = read_events(runs / name, "replicas differ")
    assert (row["step"], row["ranks"]) == (step, [2])
    assert len(read_events(runs / name, "rewind")) == 1
    assert read_events(runs / name, "batch skipped") == []


@pytest.mark.long
@pytest.mark.fault(49)
def test_a_slow_rank_is_named(runs: Path):
    (row,) = [row for row in read_events(runs / "slow", "slow rank") if row["phase"] == "compute"]
    assert (row["step"], row["rank"]) == (16, 1)


@pytest.mark.long
@pytest.mark.fault(45)
def test_a_spike_is_reported_or_skipped(data: str, tmp_path: Path):
    settings = "budget.steps=68 optim.warmup=0 optim.lr=1e-3 machine.micro_batch=12 save.every=0"
    skip = f"{settings} optim.spike=skip"
    spike = {"fault": "spike", "rank": 0, "batches": (66,)}
    jobs = [
        Job(name="spike", settings=settings, **spike),
        Job(name="batch skipped", settings=skip, **spike),
        Job(name="without", settings=skip, skipped=(66,)),
    ]
    run_jobs(0, jobs, data, tmp_path)
    for name in ("spike", "batch skipped"):
        (row,) = read_events(tmp_path / name, name)
        assert (row["step"], row["batch"]) == (67, 66)
    assert read_events(tmp_path / "without", "batch skipped") == []
    assert final_bits(tmp_path / "batch skipped") == final_bits(tmp_path / "without")


@pytest.mark.long
@pytest.mark.fault(44)
def test_bad_batches_in_a_row_lead_back_to_the_checkpoint_and_are_left_out(
    data: str, tmp_path: Path
):
    fails = NAN | {"code": ExitCode.NUMERICS}
    jobs = [
        Job(name="bad", batches=(7, 8, 9), **NAN),
        # From the checkpoint of step 5 to the last bad one.
        Job(name="without", skipped=(5, 6, 7, 8, 9)),
        Job(name="endless", batches=tuple(range(7, 99)), **fails),
        Job(name="no-checkpoint", settings="optim.max_skips=2", batches=(3, 4), **fails),
    ]
    errors = run_jobs(0, jobs, data, tmp_path)
    assert final_bits(tmp_path / "bad") == final_bits(tmp_path / "without")
    (row,) = read_events(tmp_path / "bad", "rewind")
    assert "from step 7 to 5, skipping batches 5 to 9" in row["message"]
    assert "step 6, batches 13, 14, 15 — " in errors[2]
    assert len(read_events(tmp_path / "endless", "rewind")) == 2
    assert "step 4, batches 3, 4 — " in errors[3]


@pytest.mark.fault(45)
def test_clean_steps_raise_no_alarm():
    """Gradient norms are noisy, heavy-tailed, or those of a warm-up."""
    rng, steps = np.random.default_rng(0), np.arange(1600)
    start = steps % 500  # of a run
    warm_up = 1 + 4 * np.exp(-start / 80) + 2 * np.exp(-(((start - 200) / 60) ** 2))
    losses = 3 + 8 * np.exp(-steps / 300) + 0.1 * rng.standard_normal(len(steps))
    for noise, scale in (
        (0.5 * rng.standard_normal(len(steps)), 1.0),
        (0.15 * rng.standard_t(6, len(steps)), 1.0),  # one in 100,000 is 6 times the median
        (0.2 * rng.standard_normal(len(steps)), warm_up),
    ):
        recent = RecentSteps()
        for values in np.stack([losses, scale * np.exp(noise)], 1).tolist():
            assert np.less_equal(values, recent.limits()).all()
            recent = recent.add(*values)


@pytest.mark.fault(45)
@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.3])
def test_gradients_times_1000_are_found(sigma: float):
    for seed in range(30):
        rng, recent = np.random.default_rng(seed), RecentSteps()
        steps = np.arange(rng.integers(MIN_STEPS, 300))
        noise = sigma * rng.standard_normal(len(steps))
        norms = (np.exp(noise) / np.sqrt(1 + steps / 50)).tolist()
        for norm in norms:
            recent = recent.add(3.0, norm)
        assert 1e3 * norms[-1] > recent.limits()[1]


def test_too_few_steps_have_no_limit():
    recent = RecentSteps((MIN_STEPS - 1) * ((3.0, 1.0),))
    assert recent.limits() == (math.inf, math.inf)
    assert recent.add(0.0, 1.0).limits() == pytest.approx((4.5, 3.0))


def test_the_limit_is_measured_in_median_deviations():
    values = [1.0, 16.0, 2.0, 8.0, 2.0]  # logs to base 2: 0, 4, 1, 3, 1, so median and MAD are 1
    assert math.log2(upper_limit(values, 1.5)) == pytest.approx(1 + DEVIATIONS * MAD_TO_STD)
    assert upper_limit([2.0] * 5, 1.5) == pytest.approx(3.0)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.floats(-1e38, 1e38), min_size=1, max_size=128))
def test_only_values_with_logarithms_have_a_limit(values: list[float]):
    limit, median = upper_limit(values, 1.5), sorted(values)[len(values) // 2]
    if min(values) < 0 or median == 0:
        assert limit == math.inf
    else:
        assert limit >= min(1.49 * median, 1e300)


@pytest.mark.fault(46)
def test_the_replica_that_differs_is_named_by_the_majority():
    names, x, y = ["a", "b", "c"], ("x", [1, 2, 3]), ("y", [7, 8, 9])
    assert find_divergence(names, [x, x, x]) is None
    for reports, ranks, tensors in (
        ([x, ("x", [1, 5, 3]), x], (1,), ("b",)),
        ([x, y, ("x", [0, 2, 4]), y], (0, 2), ("a", "c")),
    ):
        found = find_divergence(names, reports)
        assert (found.ranks, found.tensors) == (ranks, tensors)


@pytest.mark.fault(46)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 129])
def test_one_flipped_bit_changes_the_checksum(dtype: torch.dtype, size: int):
    whole = torch.arange(3 * size + 3).to(dtype)
    tensor = whole[3 : 3 + size]  # at any address
    before = checksum(tensor)
    assert before == checksum(tensor.clone())
    raw = tensor.view(torch.uint8)
    for index in range(0, raw.numel(), 3):
        for bit in range(8):
            raw[index] ^= 1 << bit
            assert checksum(tensor) != before
            raw[index] ^= 1 << bit


def test_a_rank_is_slow_if_it_is_in_both_halves_and_by_more_than_noise():
    def find(data, *compute):
        """Report of the second of three ranks; the others are as usual."""
        usual = {"data": (0.001, 0.001), "compute": (0.1, 0.1)}
        return find_stragglers([usual, {"data": (data, data), "compute": compute}, usual])

    for report in ((0.001, 0.1, 0.1), (0.001, 0.2, 0.14), (0.004, 0.1, 0.1)):  # 3 ms
        assert find(*report) == []
    (slow,) = find(0.001, 0.16, 0.2)
    assert (slow.rank, slow.phase) == (1, "compute")
    assert (slow.ratio, slow.seconds, slow.others) == pytest.approx((2.0, 0.2, 0.1))
    (slow,) = find(0.05, 0.1, 0.1)
    assert (slow.rank, slow.phase) == (1, "data")

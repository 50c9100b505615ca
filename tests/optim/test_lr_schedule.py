"""The learning rate at the steps where the schedule changes."""

from bisect import bisect_left
from typing import Any

import pytest

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.config.fields import parse_value
from megatoken.base.config.schema import FIELDS, build_config
from megatoken.optim.lr_schedule import LRSchedule
from megatoken.train.state import build_step_config


def schedule(decay: str, **changes: Any) -> LRSchedule:
    sizes = {"peak_lr": 1.0, "min_lr_ratio": 0.1, "warmup": 10, "total": 110}
    sizes["decay_length"] = 20 if decay.startswith("wsd") else None
    return LRSchedule(decay=decay, **{**sizes, **changes})


# Rates in the middle, late and at the end.
RATES = """\
cosine 0.55 0.122 0.1
linear 0.55 0.19 0.1
wsd 1.0 0.55 0.1
constant 1.0 1.0 1.0
"""


@pytest.mark.parametrize("row", RATES.splitlines())
def test_warmup_middle_and_end(row: str):
    decay, *numbers = row.split()
    middle, late, end = map(float, numbers)
    rates = [schedule(decay).lr(step) for step in (0, 4, 9, 10, 60, 100, 110, 500)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, middle, late, end, end], rel=1e-3)
    assert schedule(decay, warmup=0).lr(0) == 1.0
    assert [schedule("wsd").lr(step) for step in (89, 90)] == [1.0, 1.0]


def test_multi_step_is_that_of_deepseek():
    """arXiv 2401.02954, 2.3: 31.6% of the maximum after 80% of the training, 10% after 90%."""
    length = build_config({"optim.schedule": "multi-step"}).optim.decay_length
    assert str(length) == "0.2dur"
    steps = schedule("multi-step", warmup=0, total=100, decay_length=20)
    rates = [round(steps.lr(s), 3) for s in (0, 79, 80, 89, 90, 99, 500)]
    assert rates == [1.0, 1.0, 0.316, 0.316, 0.1, 0.1, 0.1]
    assert [steps.is_before_decay(s) for s in (80, 81)] == [True, False]
    ramped = schedule("wsd", decay_length=40, total=200, ramp=BatchRamp(1, 2, 20))
    first = next(step for step in range(200) if not ramped.is_before_decay(step))
    assert ramped.lr(first - 1) == 1.0 > ramped.lr(first)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_a_decay_of_its_own_length_ends_before_the_run(decay: str):
    short, usual = schedule(decay, decay_length=40), schedule(decay)
    assert [short.lr(s) for s in (10, 30, 50, 51, 109)] == pytest.approx([1.0, 0.55, 0.1, 0.1, 0.1])
    assert schedule(decay, decay_length=100).lr(37) == usual.lr(37)


def test_gpt3_decays_over_260_of_300_billion_tokens_and_stays_at_a_tenth():
    values = {"optim.lr": 6e-4, "budget.tokens": 300 * 10**9, "budget.batch_tokens": 524288}
    values |= {"model.seq_len": 2048}
    for key, text in (("optim.warmup", "375e6tok"), ("optim.decay", "260e9tok")):
        values[key] = parse_value(FIELDS[key], text)
    ramp = {"budget.batch_start": 32768, "budget.batch_ramp": 4 * 10**9}
    plain, ramped = (
        build_step_config(build_config(values | more), epoch_tokens=10**12) for more in ({}, ramp)
    )
    assert ramped.total_steps > plain.total_steps == 572205
    for config in (plain, ramped):
        rates = []
        for billions in (0.1875, 0.376, 130.375, 260.4, 280, 299.9):
            steps = range(config.total_steps)
            step = bisect_left(steps, billions * 1e9, key=config.tokens_before)
            rates.append(config.schedule.lr(step) / 6e-4)
        assert rates[:3] == pytest.approx([0.5, 1.0, 0.55], rel=0.06)
        assert rates[3:] == pytest.approx([0.1, 0.1, 0.1], rel=1e-6)

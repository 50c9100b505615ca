"""The learning rate at the places that decide."""

import pytest

from megatoken.optim.lr_schedule import LRSchedule


def schedule(decay: str, **changes: float) -> LRSchedule:
    sizes = {"peak_lr": 1.0, "min_lr_ratio": 0.1, "warmup_steps": 10, "decay_steps": 20, "total_steps": 110}
    return LRSchedule(decay=decay, **{**sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "constant"])
def test_linear_warmup(decay: str) -> None:
    assert [schedule(decay).lr(s) for s in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])


@pytest.mark.parametrize(("decay", "middle"), [("cosine", 0.55), ("linear", 0.55), ("wsd", 1.0), ("constant", 1.0)])
def test_halfway(decay: str, middle: float) -> None:
    assert schedule(decay).lr(60) == pytest.approx(middle)


@pytest.mark.parametrize(("decay", "end"), [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)])
def test_end_and_beyond(decay: str, end: float) -> None:
    assert schedule(decay).lr(110) == pytest.approx(end)
    assert schedule(decay).lr(500) == pytest.approx(end)


def test_wsd_decays_only_at_the_end() -> None:
    wsd = schedule("wsd")
    assert [wsd.lr(s) for s in (89, 90, 100)] == pytest.approx([1.0, 1.0, 0.55])


def test_no_warmup() -> None:
    assert schedule("linear", warmup_steps=0).lr(0) == 1.0

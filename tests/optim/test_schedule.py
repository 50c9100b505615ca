"""The learning rate at the places that decide."""

import pytest

from megatoken.optim.schedule import Schedule


def schedule(kind: str, **changes: float) -> Schedule:
    sizes = {"peak": 1.0, "floor": 0.1, "warmup_steps": 10, "decay_steps": 20, "total_steps": 110}
    return Schedule(kind=kind, **{**sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(kind: str) -> None:
    assert [schedule(kind).lr(s) for s in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])


@pytest.mark.parametrize(("kind", "middle"), [("cosine", 0.55), ("linear", 0.55), ("wsd", 1.0), ("constant", 1.0)])
def test_half_way(kind: str, middle: float) -> None:
    assert schedule(kind).lr(60) == pytest.approx(middle)


@pytest.mark.parametrize(("kind", "end"), [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)])
def test_end_and_beyond(kind: str, end: float) -> None:
    assert schedule(kind).lr(110) == pytest.approx(end)
    assert schedule(kind).lr(500) == pytest.approx(end)


def test_wsd_decays_only_at_the_end() -> None:
    wsd = schedule("wsd")
    assert [wsd.lr(s) for s in (89, 90, 100)] == pytest.approx([1.0, 1.0, 0.55])


def test_no_warm_up() -> None:
    assert schedule("linear", warmup_steps=0).lr(0) == 1.0

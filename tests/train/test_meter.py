"""Rates of a step: what they are divided by."""

import time

import pytest

from megatoken.device import Device
from megatoken.model.count import flops_per_token
from megatoken.train.meter import Meter
from tests.tiny import CPU, SHAPE


def make_meter(device: Device) -> Meter:
    return Meter(device=device, shape=SHAPE, batch_tokens=128, total_steps=10)


def test_both_readings_are_model_flops_over_the_peak() -> None:
    peak = 1e9
    device = Device(place=CPU.place, name="x", precision="fp32", peak_flops=peak, peak_source="data sheet")
    meter = make_meter(device)
    meter.start()
    time.sleep(0.01)
    row = meter.read()
    rate = row["tokens_per_second"]
    assert rate == pytest.approx(128 / row["seconds"])
    assert row["mfu"] == pytest.approx(rate * flops_per_token(SHAPE, causal=False) / peak)
    assert row["mfu_causal"] == pytest.approx(rate * flops_per_token(SHAPE, causal=True) / peak)
    d, t, layers = SHAPE.d_model, SHAPE.seq_len, SHAPE.n_layer
    assert row["mfu"] - row["mfu_causal"] == pytest.approx(rate * 6 * layers * d * t / peak)


def test_no_peak_no_utilization() -> None:
    row = make_meter(CPU).read()
    assert (row["mfu"], row["mfu_causal"]) == (None, None)
    assert set(row) == {"seconds", "tokens_per_second", "mfu", "mfu_causal"}


def test_remaining_time_follows_the_smoothed_pace() -> None:
    meter = make_meter(CPU)
    meter.smooth_seconds = 2.0
    assert meter.remaining_seconds(4) == 12.0

"""Rates of a step: what they are divided by."""

from dataclasses import replace

import pytest

from megatoken.model.flops import flops_per_token
from megatoken.system.device import Device
from megatoken.train.throughput import ThroughputMeter
from tests.tiny_model import CPU, TINY_GPT, tiny_step_config


def make_meter(device: Device) -> ThroughputMeter:
    return ThroughputMeter(
        device, TINY_GPT, replace(tiny_step_config(), batch_tokens=128, total_steps=10)
    )


def test_mfu_is_model_flops_over_peak():
    peak = 1e9
    device = Device(
        torch_device=CPU.torch_device,
        name="x",
        precision="fp32",
        peak_flops=peak,
        peak_source="data sheet",
    )
    meter = make_meter(device)
    meter.start()
    row = meter.read(128)
    rate = row["tokens_per_second"]
    assert rate == pytest.approx(128 / row["seconds"])
    assert row["mfu"] == pytest.approx(rate * flops_per_token(TINY_GPT, causal=False) / peak)
    assert row["mfu_causal"] == pytest.approx(rate * flops_per_token(TINY_GPT, causal=True) / peak)
    sparse = replace(meter, is_dense=False).read(128)
    assert sparse["tokens_per_second"]
    assert (sparse["mfu"], sparse["mfu_causal"]) == (None, None)
    d, t, layers = TINY_GPT.d_model, TINY_GPT.seq_len, TINY_GPT.n_layer
    assert row["mfu"] - row["mfu_causal"] == pytest.approx(rate * 6 * layers * d * t / peak)


def test_unknown_peak_has_no_mfu():
    row = make_meter(CPU).read(128)
    assert (row["mfu"], row["mfu_causal"]) == (None, None)
    assert set(row) == {"seconds", "tokens_per_second", "mfu", "mfu_causal"}


def test_remaining_time():
    meter = make_meter(CPU)
    meter.smooth_seconds = 2.0
    assert meter.remaining_seconds(4) == 12.0

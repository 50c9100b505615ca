"""Rates of a step: what they are divided by."""

from dataclasses import replace

import pytest

from megatoken.model.flops import flops_per_token
from megatoken.train.throughput import ThroughputMeter
from tests.tiny_model import CPU, TINY_GPT, tiny_step_config


def test_mfu_is_model_flops_over_peak_and_the_time_left_that_of_the_steps_left():
    step_config = replace(tiny_step_config(), batch_tokens=128, total_steps=10)
    meter = ThroughputMeter(replace(CPU, peak_flops=1e9), TINY_GPT, step_config)
    row = meter.read(128)
    rate = row["tokens_per_second"]
    assert rate == pytest.approx(128 / row["seconds"])
    for key, causal in (("mfu", False), ("mfu_causal", True)):
        assert row[key] == pytest.approx(rate * flops_per_token(TINY_GPT, causal=causal) / 1e9)
    for unknown in (replace(meter, is_dense=False), replace(meter, device=CPU)):
        row = unknown.read(128)
        assert row["tokens_per_second"] > 0
        assert (row["mfu"], row["mfu_causal"]) == (None, None)
    meter.smooth_seconds = 2.0
    assert meter.remaining_seconds(4) == 12.0

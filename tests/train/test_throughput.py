"""MFU and other rates of a step."""

from pathlib import Path

import pytest

from megatoken.base.config.load import load_config
from megatoken.base.system.atomic_write import read_object
from megatoken.model.flops import flops_per_token
from tests.tiny_run import read_rows, train


def test_mfu_is_model_flops_over_peak(data: str, tmp_path: Path):
    train(tmp_path, data)
    peak = read_object(tmp_path / "provenance.json")["peak_flops"]
    config = load_config(f"{tmp_path}/config.yaml")
    for row in read_rows(tmp_path, "train"):
        rate = row["tokens_per_second"]
        assert rate == pytest.approx(config.budget.batch_tokens / row["seconds"])
        for key, causal in (("mfu", False), ("mfu_causal", True)):
            flops = flops_per_token(config.model.resolve(257), causal=causal)
            assert row[key] == pytest.approx(rate * flops / peak)

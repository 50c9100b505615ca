"""Runs side by side: a GPU and a share of the cores for each."""

import pytest
import torch

from megatoken.base.config.schema import MachineConfig
from megatoken.base.system.device import list_gpus
from megatoken.base.system.machine import cpu_count
from megatoken.study.experiment import Slots


def test_slots_share_gpus_and_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for visible, gpus in (("", ["0", "1"]), ("2,GPU-5", ["2", "GPU-5"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert list_gpus("auto") == gpus
        assert Slots(0, gpus).jobs == 2
    assert [Slots(3, gpus).environment(job)["CUDA_VISIBLE_DEVICES"] for job in range(3)] == [
        *gpus,
        "2",
    ]
    assert Slots(0, list_gpus("cpu")).jobs == 1
    assert Slots(2).share_cores(MachineConfig()) == [f"machine.threads={max(1, cpu_count() // 2)}"]
    assert Slots(2).share_cores(MachineConfig(threads=3)) == []

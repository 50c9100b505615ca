"""GPUs by name, and `8xA100-40GB`."""

import pytest

from megatoken.base.errors import ConfigError
from megatoken.base.system.gpus import GPUS, find_gpu, parse_gpus
from megatoken.base.system.peak_flops import PEAK_FLOPS

NUMBERS_AND_NAMES = """\
8xA100-40GB: 8 A100-40GB
8 x a100-40: 8 A100-40GB
a100: 1 A100-80GB
2xNVIDIA H100 80GB HBM3: 2 H100
1024*h200: 1024 H200
4090: 1 RTX-4090
8,16,128 x h100: 8 16 128 H100
"""


def test_numbers_and_names():
    for line in NUMBERS_AND_NAMES.splitlines():
        text, _, words = line.partition(": ")
        *counts, name = words.split()
        assert parse_gpus(text) == ([*map(int, counts)], GPUS[name])
    for text in ["0xA100", "-1xH100", "1.5xH100", "999999xH100", "8,xH100", "8A100", "quux", ""]:
        with pytest.raises(ConfigError):
            parse_gpus(text)


def test_every_gpu_has_a_peak_and_less_memory_than_its_label():
    for gpu in GPUS.values():
        assert gpu.driver in PEAK_FLOPS
        assert find_gpu(gpu.driver) == find_gpu(gpu.name) == gpu
    # 80 GiB and less, more than 80e9 bytes.
    assert GPUS["H100"].memory_bytes == pytest.approx(85.0e9, rel=1e-3)
    assert GPUS["A100-40GB"].memory_bytes == pytest.approx(42.3e9, rel=1e-3)

"""Dense peak FLOP/s of matrix products from vendor data sheets (peak_flops.toml).

PEAK_FLOPS[device name][precision]. Names are exact: a device that is missing is measured
(device.py), like laptop parts (their rate depends on a power limit), vGPU and MIG slices, Apple's
chips, and names that different parts share.
"""

import tomllib
from pathlib import Path

PEAK_FLOPS: dict[str, dict[str, float]] = {
    name: {precision: float(round(rate * 1e12)) for precision, rate in rates.items()}
    for name, rates in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}

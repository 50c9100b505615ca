"""Measure a device's peak FLOP/s, the denominator of MFU, if its data sheet is unknown."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from megatoken.base.system.device import Device
from megatoken.base.system.machine import cpu_count
from megatoken.base.system.measurement_cache import read_measurements, save_measurement
from megatoken.base.system.threads import thread_count
from megatoken.base.system.timing import time_once

PEAKS = "peaks.json"  # in the measurement cache
MEASURED = "matrix products measured here"
PEAK_SIZES = {
    "cpu": (512, 1024, 2048, 4096),
    "mps": (1024, 2048, 4096, 8192),
    "cuda": (2048, 4096, 8192, 16384),
}
PEAK_SECONDS = 3.0  # time to measure a peak on a machine without a cached one
AGAIN_SECONDS = 0.3  # time to measure it again


def with_peak(device: Device) -> Device:
    """Return the device with its peak FLOP/s, from the data sheet or else measured.

    A measurement that ran on a busy machine is too low. So even if a measured peak is cached, it is
    briefly measured again, and the higher value is used.
    """
    if device.peak_flops:
        return device
    seconds = AGAIN_SECONDS if _peak_key(device) in read_measurements(PEAKS) else PEAK_SECONDS
    return replace(
        device, peak_flops=cache_peak(device, measure_peak(device, seconds)), peak_source=MEASURED
    )


def cache_peak(device: Device, flops: float) -> float:
    """Return the higher of `flops` and the cached peak of the device, and cache it."""
    key = _peak_key(device)
    best: float = max(flops, read_measurements(PEAKS).get(key, 0.0))
    save_measurement(PEAKS, key, best)
    return best


def _peak_key(device: Device) -> str:
    """Return the cache key of a peak: everything that its measurement depends on."""
    tf32 = device.precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
    threads = f", {thread_count()} threads" if device.type == "cpu" else ""
    precision = "tf32" if tf32 else device.precision
    return f"{device.name} ({device.type}{threads}), {precision}, torch {torch.__version__}"


def product_calls(left: torch.Tensor, right: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return a function per library that computes `left @ right` into a preallocated result.

    The libraries are torch, and for fp32 on a CPU also numpy, whose BLAS may be faster. numpy is
    left out if torch uses fewer threads than there are cores, because numpy always uses all.
    """
    out = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device=left.device)
    calls: dict[str, Callable[[], object]] = {"torch": lambda: torch.mm(left, right, out=out)}
    if left.device.type == "cpu" and left.dtype == torch.float32 and thread_count() >= cpu_count():
        arrays = (left.numpy(), right.numpy())
        calls["numpy"] = partial(np.matmul, *arrays, out=out.numpy())
    return calls


def measure_peak(device: Device, seconds: float) -> float:
    """Return the highest FLOP/s of square matmuls, over several sizes and all libraries.

    It stops at a size that does not fit in memory. It also stops before a matmul after which it
    would have run for more than `seconds`.
    """
    best = 0.0
    deadline = time.perf_counter() + seconds
    with suppress(torch.OutOfMemoryError):
        for size in PEAK_SIZES[device.type]:
            flops = 2.0 * size**3
            square = random_square(device, size)
            for call in [*product_calls(square, square).values()] * 5:
                if best and time.perf_counter() + flops / best > deadline:
                    return best
                best = max(best, flops / time_once(call, device.synchronize))
    return best


def random_square(device: Device, size: int) -> torch.Tensor:
    """Return a square matrix of random values, because chips clock higher on constant values.

    torch's global generator is not used.
    """
    generator = torch.Generator(device.torch_device).manual_seed(0)
    return torch.randn(
        size, size, dtype=device.dtype, device=device.torch_device, generator=generator
    )

"""What torch can do on this machine: the device, the precision that is fast there, the peak that MFU is against.

In: the `machine` section. Out: a `Device`, chosen once. Absent: anything about the model.
"""

import platform
import re
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from megatoken.config import DEVICE_WORDS, Machine
from megatoken.errors import Exit, Fault
from megatoken.hardware import PEAK_FLOPS, cpu_count, find_compiler, peak_resident_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILE_PAYS_STEPS = 500  # a shorter run would mostly wait for the compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where and how products are computed."""

    place: torch.device
    name: str
    precision: str
    peak_flops: float
    peak_source: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which matrix products run in the chosen precision; nothing for fp32."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.place.type, dtype=self.dtype)

    def peak_memory_bytes(self) -> int:
        """Most memory held so far: allocated on the device, or resident in this process on a CPU."""
        if self.place.type == "cuda":
            return torch.cuda.max_memory_allocated(self.place)
        if self.place.type == "mps":
            return torch.mps.driver_allocated_memory()
        return peak_resident_bytes()

    def synchronize(self) -> None:
        """Wait for everything queued, so that a clock read afterwards tells the truth."""
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)
        elif self.place.type == "mps":
            torch.mps.synchronize()


def open_device(machine: Machine) -> Device:
    """Choose device and precision, set threads and product modes for this process.

    The peak is the data sheet's, 0 for a device that is not in the table. Raises Fault(CONFIG) when the device asked
    for is not there or cannot run the precision.
    """
    torch.set_num_threads(machine.threads or cpu_count())
    device = _find_device(machine.device)
    precision = _choose_precision(device, machine.precision)
    tf32 = device.type == "cuda" and machine.tf32 and torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.use_deterministic_algorithms(machine.deterministic)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()
    peak = PEAK_FLOPS.get(name, {}).get("tf32" if tf32 and precision == "fp32" else precision, 0.0)
    source = "data sheet" if peak else "unknown"
    return Device(place=device, name=name, precision=precision, peak_flops=peak, peak_source=source)


def with_peak(device: Device) -> Device:
    """The device with a peak rate: the data sheet's, else that of matrix products measured now (a second)."""
    if device.peak_flops:
        return device
    measured = _measure_peak(device.place, device.dtype)
    return replace(device, peak_flops=measured, peak_source="matrix products measured here")


def _find_device(wanted: str) -> torch.device:
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if not re.fullmatch(DEVICE_WORDS, wanted):
        raise Fault(Exit.CONFIG, f"unknown device '{wanted}'", "device", "use auto, cpu, cuda, cuda:N or mps")
    device = torch.device(wanted)
    if device.type == "cuda":
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if present <= (device.index or 0):
            fix = "set machine.device=auto or cpu, or install a CUDA build of torch and its driver"
            raise Fault(Exit.CONFIG, f"no CUDA device for '{wanted}': {present} found", "machine.device", fix)
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise Fault(Exit.CONFIG, "no MPS device here", "machine.device", "set machine.device=auto or cpu")
    return device


def fast_precision(kind: str, capability: tuple[int, int] = (0, 0), cpu_features: frozenset[str] = frozenset()) -> str:
    """The precision a device is fast at.

    CUDA by compute capability: bf16 on Ampere (8.0) and newer; fp16 on Volta and Turing (7.x), whose bf16 is
    emulated; fp32 on Pascal and older, whose fp16 arithmetic is slow or absent. CPU: bf16 with AVX512-BF16 or AMX.
    """
    if kind == "cuda":
        return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    if kind == "cpu":
        return "bf16" if cpu_features & {"avx512_bf16", "amx_bf16"} else "fp32"
    return "fp32"


def _choose_precision(device: torch.device, wanted: str) -> str:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if wanted == "auto":
        return fast_precision(device.type, capability, _cpu_features())
    if wanted == "fp16" and device.type == "cpu":
        raise Fault(Exit.CONFIG, "fp16 is not trained on a CPU", "machine.precision", "use auto, bf16 or fp32")
    return wanted


def _cpu_features() -> frozenset[str]:
    checks = {
        "avx512_bf16": getattr(torch.cpu, "_is_avx512_bf16_supported", None),
        "amx_bf16": getattr(torch.cpu, "_is_amx_tile_supported", None),
    }
    return frozenset(name for name, check in checks.items() if check is not None and check())


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product in `dtype`: the best of several runs, after a warm-up."""
    size = 2048 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    for _ in range(8):
        wait()
        begin = time.perf_counter()
        a @ a
        wait()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def wants_compile(machine: Machine, device: Device, total_steps: int) -> tuple[bool, str]:
    """Whether to compile the model, and one line to say when a wish cannot be met (empty otherwise)."""
    if machine.compile == "off" or (machine.compile == "auto" and device.place.type != "cuda"):
        return False, ""
    if machine.compile == "auto" and total_steps < COMPILE_PAYS_STEPS:
        return False, ""
    if device.place.type == "cpu" and not find_compiler():
        return False, "no C++ compiler found: the model runs uncompiled (install g++ to change that)"
    return True, ""

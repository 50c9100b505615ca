"""What torch can do on this machine: the device, the precision that is fast there, the peak that MFU is against.

In: the `machine` section. Out: a `Device`, chosen once; peaks that were measured, kept in peaks.json of the cache.
Absent: anything about the model.
"""

import contextlib
import math
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import torch

from megatoken.config import DEVICE_WORDS, Machine
from megatoken.errors import Exit, Fault
from megatoken.hardware import (
    cpu_count,
    find_compiler,
    find_processor_name,
    free_memory_bytes,
    peak_resident_bytes,
    recall,
    remember,
)
from megatoken.peaks import PEAK_FLOPS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILE_PAYS_STEPS = 500  # a shorter run would mostly wait for the compiler
PEAKS = "peaks.json"  # in the cache
MEASURED = "matrix products measured here"
PEAK_SIZES = {"cpu": (512, 1024, 2048, 4096), "mps": (1024, 2048, 4096, 8192), "cuda": (2048, 4096, 8192, 16384)}
PEAK_SECONDS, AGAIN_SECONDS = 3.0, 1.0  # longest that measuring a peak may take, the first time and later


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

    @property
    def widest(self) -> torch.dtype:
        """For numbers that many are added to."""
        return torch.float32 if self.place.type == "mps" else torch.float64

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

    def memory_bytes(self) -> int:
        """All memory of the device, or what this machine could give now on a CPU; 0 where the system does not tell."""
        if self.place.type == "cuda":
            return int(torch.cuda.get_device_properties(self.place).total_memory)
        return free_memory_bytes() if self.place.type == "cpu" else 0

    def synchronize(self) -> None:
        """Wait for everything queued, so that a clock read afterwards tells the truth."""
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)
        elif self.place.type == "mps":
            torch.mps.synchronize()


def open_device(machine: Machine, *, rank: int = 0, ranks: int = 1) -> Device:
    """Choose device and precision, set threads and product modes for this process.

    rank, ranks: among the processes on this machine, which share its cores and have a CUDA device each.

    The peak is the data sheet's, 0 for a device that is not in the table. Raises Fault(CONFIG) when the device asked
    for is not there or cannot run the precision.
    """
    torch.set_num_threads(machine.threads or max(1, cpu_count() // ranks))
    device = _find_device(machine.device)
    if device.type == "cuda" and ranks > 1:
        device = _find_device(f"cuda:{rank}")
    precision = _choose_precision(device, machine.precision)
    tf32 = device.type == "cuda" and machine.tf32 and torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.use_deterministic_algorithms(machine.deterministic)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else find_processor_name()
    peak = _printed_peak(device, name, "tf32" if tf32 and precision == "fp32" else precision)
    source = "data sheet" if peak else "unknown"
    return Device(place=device, name=name, precision=precision, peak_flops=peak, peak_source=source)


def _printed_peak(device: torch.device, name: str, kind: str) -> float:
    """The data sheet's FLOP/s; 0 if there is none. Apple's chips have one name for their CPU and their GPU."""
    row = PEAK_FLOPS.get(name, {}) if device.type != "cpu" else {}
    fallback = row.get("fp32", 0.0) if kind == "tf32" else 0.0  # what has no TF32 multiplies in plain fp32
    return row.get(kind, fallback)


def with_peak(device: Device) -> Device:
    """The device with a peak rate: the data sheet's, else the best that was ever measured on this machine.

    The first time takes 3 s; later ones look again for one, because a peak measured in a busy minute is too low, and
    an MFU above 100% would be the consequence.
    """
    if device.peak_flops:
        return device
    seconds = AGAIN_SECONDS if _recall_peak(device) else PEAK_SECONDS
    return replace(
        device, peak_flops=remember_peak(device, measure_peak(device, seconds=seconds)), peak_source=MEASURED
    )


def remember_peak(device: Device, flops: float) -> float:
    """Keep a measured peak for this machine if it beats the one kept; return the better."""
    best = max(flops, _recall_peak(device))
    remember(PEAKS, {_peak_key(device): best})
    return best


def _recall_peak(device: Device) -> float:
    """FLOP/s kept for this device, 0 when there is none or what is kept is no rate."""
    kept = recall(PEAKS).get(_peak_key(device))
    return float(kept) if isinstance(kept, int | float) and math.isfinite(kept) and kept > 0 else 0.0


def _peak_key(device: Device) -> str:
    """What a measured peak depends on."""
    tf32 = device.precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
    threads = f", {torch.get_num_threads()} threads" if device.place.type == "cpu" else ""
    kind = "tf32" if tf32 else device.precision
    return f"{device.name} ({device.place.type}{threads}), {kind}, torch {torch.__version__}"


def product_calls(left: torch.Tensor, right: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Calls that multiply (m, k) by (k, n) into one preallocated (m, n), by library.

    On a CPU numpy's own BLAS stands beside torch's for fp32: which is faster depends on the processor. It takes all
    cores whatever torch is told, so it stands aside when torch has fewer.
    """
    out = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device=left.device)
    calls: dict[str, Callable[[], object]] = {"torch": lambda: torch.mm(left, right, out=out)}
    if left.device.type == "cpu" and left.dtype == torch.float32 and torch.get_num_threads() >= cpu_count():
        a, b, c = left.numpy(), right.numpy(), out.numpy()
        calls["numpy"] = lambda: np.matmul(a, b, out=c)
    return calls


def measure_peak(device: Device, sizes: tuple[int, ...] = (), seconds: float = PEAK_SECONDS) -> float:
    """FLOP/s of the fastest square product in the device's precision, by any library, over `sizes`.

    Stops early rather than begin what would end after `seconds` or does not fit in memory.
    """
    best, deadline = 0.0, time.perf_counter() + seconds
    with contextlib.suppress(torch.OutOfMemoryError):
        for size in sizes or PEAK_SIZES[device.place.type]:
            flops = 2.0 * size**3
            # Real noise, since chips clock higher on constants; from its own generator, so that no run's draws change.
            noise = torch.Generator(device.place).manual_seed(0)
            square = torch.randn(size, size, dtype=device.dtype, device=device.place, generator=noise)
            calls = product_calls(square, square)
            for _ in range(5):
                for call in calls.values():
                    if best and time.perf_counter() + flops / best > deadline:
                        return best
                    device.synchronize()
                    began = time.perf_counter()
                    call()
                    device.synchronize()
                    best = max(best, flops / (time.perf_counter() - began))
    return best


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


def wants_compile(machine: Machine, device: Device, total_steps: int) -> tuple[str, str]:
    """(what to compile: off, on, blocks or graphs; one line to say when a wish cannot be met, empty otherwise)."""
    if machine.compile == "auto":
        pays = device.place.type == "cuda" and total_steps >= COMPILE_PAYS_STEPS
        return ("on" if pays else "off"), ""
    if machine.compile == "graphs" and device.place.type != "cuda":
        return "off", "CUDA graphs are for CUDA: the model runs uncompiled (machine.compile=on)"
    if machine.compile != "off" and device.place.type == "cpu" and not find_compiler():
        return "off", "no C++ compiler found: the model runs uncompiled (install g++ to change that)"
    return machine.compile, ""


def misses_triton(device: Device) -> str:
    """Why our own GPU kernels do not run here, "" where they do."""
    if device.place.type != "cuda":
        return f"there is no GPU to run them ({device.place.type})"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip:
        return "they were made for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device.place) < (8, 0):
        return f"{device.name} is older than Ampere"
    return ""

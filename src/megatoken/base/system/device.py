"""Choose the device and precision of a run, and look up its peak FLOP/s, the denominator of MFU."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatoken.base.config.schema import DEVICE_NAMES, MachineConfig
from megatoken.base.errors import ConfigError
from megatoken.base.system.environment import preferred_precision, visible_gpus
from megatoken.base.system.machine import (
    allowed_features,
    cpu_count,
    find_processor_name,
    free_memory_bytes,
    peak_resident_bytes,
)
from megatoken.base.system.peak_flops import PEAK_FLOPS
from megatoken.base.system.threads import set_thread_count, thread_count, use_torch_threads

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of a run, and the precision of its matmuls."""

    torch_device: torch.device
    name: str
    precision: str
    peak_flops: float
    peak_source: str

    @property
    def type(self) -> str:
        """The device type: cpu, cuda or mps."""
        return self.torch_device.type

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def is_ampere(self) -> bool:
        """Whether this is an NVIDIA GPU of the Ampere generation or newer, with TF32 and bf16."""
        return self.type == "cuda" and torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    @property
    def has_fp8(self) -> bool:
        """Whether torch has FP8 matmuls: on NVIDIA GPUs since Ada, and for tests on CPUs."""
        if self.type == "cuda" and not torch.version.hip:
            return torch.cuda.get_device_capability(self.torch_device) >= (8, 9)
        return self.type == "cpu"

    @property
    def widest(self) -> torch.dtype:
        """The widest floating-point dtype of the device, for long sums: fp64, or fp32 on MPS."""
        return torch.float32 if self.type == "mps" else torch.float64

    def autocast(self, weights: torch.dtype = torch.float32) -> AbstractContextManager[object]:
        """Return a context in which matmuls run in the device's precision.

        weights: dtype of the weights. No autocast is needed if it is the device's dtype.
        """
        if weights == self.dtype:
            return nullcontext()
        return torch.autocast(self.type, dtype=self.dtype)

    def peak_memory_bytes(self) -> int:
        """Return the peak memory allocated on the device; on a CPU, the peak resident memory."""
        if self.type == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        if self.type == "mps":
            return torch.mps.driver_allocated_memory()
        return peak_resident_bytes()

    def reset_peak_memory(self) -> None:
        """Free cached memory and reset the peak on CUDA; a process's peak cannot be reset."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def memory_bytes(self, processes: int) -> int:
        """Return the memory that a process can use, or 0 if unknown.

        It is a GPU's total memory, or the machine's free memory divided by `processes`.
        """
        if self.type == "cuda":
            return int(torch.cuda.get_device_properties(self.torch_device).total_memory)
        return free_memory_bytes() // processes if self.type == "cpu" else 0

    def synchronize(self) -> None:
        """Wait for all queued kernels."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
        elif self.type == "mps":
            torch.mps.synchronize()


def open_device(
    machine: MachineConfig, *, local_rank: int = 0, local_world_size: int = 1
) -> Device:
    """Choose the device, and set torch's threads, CUDA device, TF32 and deterministic mode.

    Processes on one machine divide its cores. Raises what `choose_device` raises.
    """
    device = choose_device(machine, local_rank=local_rank, local_world_size=local_world_size)
    set_thread_count(machine.threads or max(1, cpu_count() // local_world_size))
    if device.type == "cuda":
        torch.cuda.set_device(device.torch_device)
        # On Hopper, torch prefers cuDNN's attention, which makes a new plan for every length, so
        # for each decoded token. machine.attention=cudnn still selects it, and `auto` measures it.
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision(
        "high" if _uses_tf32(device.torch_device, machine) else "highest"
    )
    torch.use_deterministic_algorithms(machine.deterministic)
    return device


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore on exit the settings of this process that `open_device` and tuning change."""
    cuda = torch.backends.cuda
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # type: ignore[no-untyped-call]
    before: list[tuple[Callable[[Any], object], Any]] = [
        (set_thread_count, thread_count()),
        (use_torch_threads, torch.get_num_threads()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
        (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled()),  # type: ignore[no-untyped-call]
        (torch.cuda.set_device, index),  # nothing for -1
    ]
    try:
        yield
    finally:
        for restore, value in before:
            restore(value)


def choose_device(
    machine: MachineConfig, *, local_rank: int = 0, local_world_size: int = 1
) -> Device:
    """Choose device and precision without changing torch's settings.

    On CUDA, each local rank gets its own device; for several processes, `auto` does not choose an
    Apple GPU. The result's peak_flops is from the data sheet, or 0 if the device is not in the
    table. Raises ConfigError if the requested device is missing or does not support the requested
    precision.
    """
    device = _find_device(machine.device, local_world_size)
    if device.type == "cuda" and local_world_size > 1:
        # Slurm may show each process its own GPU only (--gpus-per-task=1), as cuda:0.
        index = local_rank if torch.cuda.device_count() > 1 else 0
        device = _find_device(f"cuda:{index}")
    precision = _choose_precision(device, machine.precision)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else find_processor_name()
    rates = PEAK_FLOPS.get(name, {})
    tf32 = rates.get("tf32") if precision == "fp32" and _uses_tf32(device, machine) else None
    peak = tf32 or rates.get(precision, 0.0)
    source = "data sheet" if peak else "unknown"
    return Device(
        torch_device=device, name=name, precision=precision, peak_flops=peak, peak_source=source
    )


def _uses_tf32(device: torch.device, machine: MachineConfig) -> bool:
    return (
        device.type == "cuda"
        and machine.tf32
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@contextmanager
def memory_errors(where: str, fix: str) -> Iterator[None]:
    """Convert out-of-memory errors to ConfigError; let other errors through."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())
        text = text.partition(" Including")[0]  # cut off advice about the allocator
        what = text.partition("DefaultCPUAllocator: ")[2] or text
        what = what.removeprefix("CUDA out of memory. ")
        raise ConfigError(f"out of memory: {what}", where, fix) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory. Except on CUDA, torch's is a RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(
        re.search("DefaultCPUAllocator|MPS backend out of memory", str(error))
    )


def list_gpus(requested: str) -> list[str]:
    """Return the GPUs that `machine.device` allows, named as in CUDA_VISIBLE_DEVICES."""
    n_gpus = torch.cuda.device_count() if requested in ("auto", "cuda") else 0
    return (visible_gpus() or [*map(str, range(n_gpus))])[:n_gpus]


def _find_device(requested: str, processes: int = 1) -> torch.device:
    if requested == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        # Several processes communicate by gloo, which does not support MPS.
        return torch.device(
            "mps" if processes == 1 and torch.backends.mps.is_available() else "cpu"
        )
    if not re.fullmatch(DEVICE_NAMES, requested):
        raise ConfigError(
            f"unknown device '{requested}'", "device", "use auto, cpu, cuda, cuda:N or mps"
        )
    device = torch.device(requested)
    present = {
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }.get(device.type, 1)
    if present <= (device.index or 0):
        fix = "set machine.device=auto or cpu, or install a torch build and a driver for it"
        raise ConfigError(
            f"no {device.type.upper()} device for '{requested}': {present} found",
            "machine.device",
            fix,
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def fast_precision(
    device_type: str, capability: tuple[int, int], cpu_features: frozenset[str]
) -> str:
    """Return the lowest precision in which a device is fast: bf16, fp16 or fp32.

    On CUDA it depends on the compute capability: bf16 on Ampere (8.0) and newer; fp16 on Volta and
    Turing (7.x), whose bf16 is emulated; fp32 on Pascal and older, whose fp16 is slow or absent. On
    a CPU it is bf16 with AVX512-BF16 or AMX, else fp32.
    """
    if device_type == "cuda":
        if capability >= (8, 0):
            return "bf16"
        return "fp16" if capability >= (7, 0) else "fp32"
    return "bf16" if cpu_features & {"avx512_bf16", "amx_bf16"} else "fp32"


def _choose_precision(device: torch.device, precision: str) -> str:
    if precision == "auto" and (preferred := preferred_precision()):
        if preferred not in DTYPES:
            what = f"unknown precision {preferred!r}"
            raise ConfigError(
                what, "MEGATOKEN_PRECISION", f"set it to one of {', '.join(DTYPES)}, or unset it"
            )
        precision = preferred
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError(
            "fp16 is not trained on a CPU", "machine.precision", "use auto, bf16 or fp32"
        )
    if precision != "auto":
        return precision
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    features: dict[str, Any] = (
        getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    )
    available = allowed_features(name for name, has in features.items() if has is True)
    return fast_precision(device.type, capability, available)

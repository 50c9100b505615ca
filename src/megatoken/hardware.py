"""What is this machine: caches, cores, memory. The only module that reads the environment."""

import os
import platform
import shutil
from pathlib import Path


def huggingface_cache() -> Path:
    """Folder in which huggingface_hub keeps downloaded repositories (HF_HUB_CACHE, HF_HOME)."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"


def tiktoken_caches() -> list[Path]:
    """Folders in which tiktoken keeps vocabularies, in the order in which it looks."""
    named = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.environ.get("DATA_GYM_CACHE_DIR")]
    temporary = Path(os.environ.get("TMPDIR") or "/tmp") / "data-gym-cache"
    return [Path(folder) for folder in named if folder] + [temporary]


def megatoken_cache() -> Path:
    """Folder for what megatoken downloads or measures once per machine (MEGATOKEN_CACHE)."""
    own = os.environ.get("MEGATOKEN_CACHE")
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(root) / "megatoken"


def cpu_count() -> int:
    """Processors this process may use (affinity and cgroup aware on Linux)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far; 0 where the system does not tell (Windows)."""
    try:
        import resource  # absent on Windows
    except ImportError:
        return 0
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if platform.system() == "Darwin" else kilobytes * 1024


def find_compiler() -> str:
    """Path of the C++ compiler that torch.compile would call on a CPU; empty when there is none."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), ""
    )


# Dense matrix-product peaks in FLOP/s from vendor data sheets, by exact device name as the driver reports it.
# Sparse figures are halved; "tf32" is the rate of fp32 products with TF32 allowed. A device that is not here has no
# peak: the rate measured on it is used instead and said so.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "Tesla P100-PCIE-16GB": {"fp32": 9.3e12, "fp16": 18.7e12},
    "Tesla P100-SXM2-16GB": {"fp32": 10.6e12, "fp16": 21.2e12},
    "Tesla V100-SXM2-16GB": {"fp32": 15.7e12, "fp16": 125e12},
    "Tesla V100-SXM2-32GB": {"fp32": 15.7e12, "fp16": 125e12},
    "Tesla V100-PCIE-16GB": {"fp32": 14e12, "fp16": 112e12},
    "Tesla V100-PCIE-32GB": {"fp32": 14e12, "fp16": 112e12},
    "Tesla T4": {"fp32": 8.1e12, "fp16": 65e12},
    "NVIDIA A10": {"fp32": 31.2e12, "tf32": 62.5e12, "fp16": 125e12, "bf16": 125e12},
    "NVIDIA A100-SXM4-40GB": {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    "NVIDIA A100-SXM4-80GB": {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    "NVIDIA A100-PCIE-40GB": {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    "NVIDIA A100 80GB PCIe": {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    "NVIDIA L4": {"fp32": 30.3e12, "tf32": 60e12, "fp16": 121e12, "bf16": 121e12},
    "NVIDIA L40S": {"fp32": 91.6e12, "tf32": 183e12, "fp16": 362e12, "bf16": 362e12},
    "NVIDIA H100 80GB HBM3": {"fp32": 67e12, "tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12},
    "NVIDIA H100 PCIe": {"fp32": 51e12, "tf32": 378e12, "fp16": 756e12, "bf16": 756e12},
    "NVIDIA H100 NVL": {"fp32": 60e12, "tf32": 417.5e12, "fp16": 835e12, "bf16": 835e12},
    "NVIDIA H200": {"fp32": 67e12, "tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12},
    "NVIDIA B200": {"fp32": 80e12, "tf32": 1125e12, "fp16": 2250e12, "bf16": 2250e12},
    "NVIDIA GeForce RTX 3090": {"fp32": 35.6e12, "tf32": 35.6e12, "fp16": 71e12, "bf16": 71e12},
    "NVIDIA GeForce RTX 4090": {"fp32": 82.6e12, "tf32": 82.6e12, "fp16": 165.2e12, "bf16": 165.2e12},
}


def rest_idle_threads() -> None:
    """Let threads of a parallel region soon sleep instead of spinning while they wait; call before torch is loaded.

    GNU's runtime spins for milliseconds, which loses a time slice at every region when another program wants a core:
    on two busy cores a small model trained 2 to 8 times faster with a short spin, on idle ones as fast (LOG.md).
    A choice made in the environment stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}  # the second, GNU's, decides there

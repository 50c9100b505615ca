"""`megatoken doctor`: check that this machine can train."""

import os
import platform
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console, format_memory
from megatoken.base.errors import ExitCode, MegatokenError, install_extras
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.machine import cpu_count, find_compiler, free_memory_bytes
from megatoken.cli import Result

HELP = "check that this machine can train, with a remedy for each problem"
EXAMPLE = "megatoken doctor"
JOIN_SECONDS = 30.0  # limit for two ranks to connect and sum on a busy machine
MIN_DISK = 5e9  # bytes that a run of GPT-2 124M takes
EXTRAS = {  # packages of each extra for users in pyproject.toml
    "data": "pyarrow",
    "plot": "matplotlib",
    "hf": "transformers",
    "serve": "starlette uvicorn pydantic",
    "gguf": "gguf",
    "sweep": "optuna",
    "shell": "shtab",
    "s3": "s3fs obstore",
    "sinks": "tensorboard wandb mlflow trackio",
    "eval": "datasets lm_eval accelerate",
}
AMX_REMEDY = "AMX needs g++ 11 and Linux 5.16 or newer; report a failed self-test"
NETWORK_REMEDY = "set GLOO_SOCKET_IFNAME=lo (lo0 on macOS), or repair the host name's address"


class Finding(NamedTuple):
    """The result of a check.

    `lacking` means that runs work, but more slowly or without some features; `bad` means that they
    fail.
    """

    state: Literal["good", "lacking", "bad"]
    found: str
    remedy: str = ""


def run(options: Namespace, console: Console) -> Result:
    data = []
    for name, check in CHECKS.items():
        finding = run_check(check, options.folder)
        text = f"{finding.found}{finding.remedy and f' — {finding.remedy}'}"
        console.print(f"{finding.state:<8} {name:<11} {text}")
        data.append({"name": name, **finding._asdict()})
    is_bad = any(finding["state"] == "bad" for finding in data)
    return Result(ExitCode.CONFIG if is_bad else ExitCode.DONE, {"findings": data})


def run_check(check: Callable[[Path], Finding], folder: Path) -> Finding:
    """Run a check on the machine and `folder`; turn an exception into a bad finding."""
    try:
        return check(folder)
    except MegatokenError as error:
        return Finding("bad", str(error))
    except Exception as error:  # drivers and libraries may raise anything
        return Finding("bad", f"{type(error).__name__}: {error}", "see the system's message")


def check_versions(_: Path) -> Finding:
    return Finding("good", f"Python {platform.python_version()}, torch {version('torch')}")


def check_device(_: Path) -> Finding:
    from megatoken.base.system.device import choose_device

    device = choose_device(MachineConfig())
    free = free_memory_bytes()
    memory = f"{format_memory(free)} of memory free" if free else "free memory unknown"
    text = (
        f"{device.name} ({device.torch_device}), {device.precision}, {cpu_count()} cores, {memory}"
    )
    driver = shutil.which("nvidia-smi")
    if device.type == "cpu" and driver:
        return Finding("lacking", f"{text}; found {driver}", "install a CUDA build of torch")
    return Finding("good", text)


def check_compiler(_: Path) -> Finding:
    from megatoken.base.system.device import choose_device
    from megatoken.model.kernels.fused_loss import misses_triton

    device = choose_device(MachineConfig())
    reason = misses_triton(device) if device.type == "cuda" else ""
    if reason:
        return Finding("lacking", f"no compiled kernels: {reason}", "pip install triton")
    if compiler := find_compiler():
        return Finding("good", compiler)
    return Finding("lacking", "no C++ compiler: models run uncompiled", "install g++")


def check_native(_: Path) -> Finding:
    from megatoken.model.native.selection import NO_LIBRARY, find_amx_fault, find_library

    library = find_library()
    if not library:
        return Finding("lacking", "no native kernels for this CPU", NO_LIBRARY)
    text = f"kernels for {library.instruction_set}"
    if fault := find_amx_fault():
        return Finding("lacking", f"{text}; AMX is not used: {fault}", AMX_REMEDY)
    is_tested = library.instruction_set == "amx"
    return Finding("good", f"{text}, which passed their self-test" if is_tested else text)


def check_disk(folder: Path) -> Finding:
    folders = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in folders if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("bad", f"{existing}: {error.strerror}", "choose a writable folder")
    free = shutil.disk_usage(existing).free
    text = f"{format_memory(free)} free at {existing}"
    if free < MIN_DISK:
        return Finding("lacking", text, "free some space, or choose another folder")
    return Finding("good", text)


def check_tokenizer(_: Path) -> Finding:
    if not list_entries("tokenizer"):
        return Finding("lacking", "no tokenizer: text/ was removed", "prepare datasets elsewhere")
    try:
        tokenizer = load_entry("tokenizer", "load")("gpt2")
    except MegatokenError as error:
        reason = str(error).partition(" — ")[0]
        return Finding(
            "lacking", f"no gpt2: {reason}", "use --tokenizer bpe:N, which downloads nothing"
        )
    return Finding("good", f"gpt2, {tokenizer.vocab_size:,} ids")


def check_extras(_: Path) -> Finding:
    absent: dict[str, list[str]] = {}
    for extra, packages in EXTRAS.items():
        if missing := [name for name in packages.split() if find_spec(name) is None]:
            absent[extra] = missing
    text = f"installed: {', '.join(extra for extra in EXTRAS if extra not in absent) or 'none'}"
    if not absent:
        return Finding("good", text)
    names = "; ".join(f"{extra}: {', '.join(missing)}" for extra, missing in absent.items())
    return Finding("lacking", f"{text}; missing: {names}", install_extras(*absent))


def check_collective(_: Path) -> Finding:
    import torch
    from torch.distributed import HashStore, ProcessGroupGloo, is_nccl_available  # type: ignore[attr-defined]

    store = HashStore()

    def sum_ranks(rank: int) -> float:
        group: Any = ProcessGroupGloo(store, rank, 2, timedelta(seconds=JOIN_SECONDS))
        total = torch.tensor(rank + 1.0)
        group.allreduce([total]).wait()
        return float(total)

    try:
        with ThreadPoolExecutor(2) as pool:
            sums = list(pool.map(sum_ranks, range(2)))
    except RuntimeError as error:
        return Finding("bad", f"two ranks cannot connect: {error}", NETWORK_REMEDY)
    assert sums == [3.0, 3.0], sums
    nccl = "; NCCL is available" if is_nccl_available() else ""
    return Finding("good", f"two ranks joined by gloo and summed{nccl}")


CHECKS: dict[str, Callable[[Path], Finding]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        *(check_versions, check_disk, check_extras, check_native, check_tokenizer),
        *(check_device, check_compiler, check_collective),  # these import torch
    )
}

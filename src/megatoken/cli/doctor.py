"""`megatoken doctor`: check that this machine can train."""

import os
import platform
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console, format_quantity
from megatoken.base.errors import ExitCode, MegatokenError
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.environment import python_command
from megatoken.base.system.machine import cpu_count, find_compiler, free_memory_bytes
from megatoken.base.system.process import run_child
from megatoken.cli import Result

HELP = "check that this machine can train, with a remedy for each problem"
EXAMPLE = "megatoken doctor"
MEET_SECONDS = 90.0  # limit for two processes on a busy machine to start, join and sum
MIN_DISK = 5e9  # bytes that a run of GPT-2 124M takes
EXTRAS = {  # a module of each extra; if it is found, the extra is installed
    "data": "pyarrow",
    "plot": "matplotlib",
    "hf": "transformers",
    "serve": "uvicorn",
    "gguf": "gguf",
    "sweep": "optuna",
    "s3": "s3fs",
    "eval": "lm_eval",
}
AMX_REMEDY = "AMX needs g++ 11 and Linux 5.16 or newer; report a failed self-test"
# Two processes join a group and sum rank + 1.
PROGRAM = """
import torch
from megatoken.distributed import comm
from megatoken.distributed.env import read_dist_env
from megatoken.base.errors import PeerError
comm.JOIN_SECONDS = 30
try:
    with comm.join_process_group(read_dist_env(), "cpu") as two:
        total = float(two.sum(torch.tensor(two.dist_env.rank + 1.0)))
except PeerError as error:
    sys.exit(str(error))
sys.exit(0 if total == 3.0 else f"1 + 2 is {total}")
"""
LAUNCH = "from megatoken.distributed.local_launch import launch; sys.exit(launch(sys.argv[1:], 2))"


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
    import torch

    return Finding("good", f"Python {platform.python_version()}, torch {torch.__version__}")


def check_device(_: Path) -> Finding:
    from megatoken.base.system.device import choose_device

    device = choose_device(MachineConfig())
    free = free_memory_bytes()
    memory = f"{format_quantity(free, 'B')} of memory free" if free else "free memory unknown"
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
    compiler = find_compiler()
    if compiler:
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
    text = f"{format_quantity(free, 'B')} free at {existing}"
    if free < MIN_DISK:
        return Finding("lacking", text, "free some space, or choose another folder")
    return Finding("good", text)


def check_tokenizer(_: Path) -> Finding:
    if not list_entries("tokenizer"):
        return Finding("lacking", "no tokenizer: text/ was removed", "prepare datasets elsewhere")
    try:
        tokenizer = load_entry("tokenizer", "load")("gpt2")
        return Finding("good", f"gpt2, {tokenizer.vocab_size:,} ids")
    except MegatokenError as error:
        remedy = "go online once, or use --tokenizer bpe:N or bytes"
        return Finding("lacking", str(error).partition(" — ")[0], remedy)


def check_extras(_: Path) -> Finding:
    missing = [name for name, module in EXTRAS.items() if find_spec(module) is None]
    found = ", ".join(name for name in EXTRAS if name not in missing)
    if missing:
        remedy = f'pip install -e ".[{",".join(missing)}]" in the checkout'
        return Finding("lacking", f"with {found}; without {', '.join(missing)}", remedy)
    return Finding("good", found)


def check_collective(_: Path) -> Finding:
    import torch

    command = [*python_command(LAUNCH), *python_command(PROGRAM)]
    lines: list[str] = []
    try:
        exit_code = run_child(command, on_line=lines.append, timeout=MEET_SECONDS)
    except TimeoutError:
        text = f"two processes did not meet in {MEET_SECONDS:.0f} s"
        return Finding("bad", text, "check the load of the machine")
    if exit_code:
        remedy = "check the host name and the firewall, or set GLOO_SOCKET_IFNAME=lo (lo0 on macOS)"
        return Finding("bad", "".join(lines[-1:]).strip(), remedy)
    nccl = "; NCCL is available" if torch.distributed.is_nccl_available() else ""
    return Finding("good", f"two processes joined by gloo and summed{nccl}")


CHECKS: dict[str, Callable[[Path], Finding]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        *(check_versions, check_device, check_compiler, check_native),
        *(check_disk, check_tokenizer, check_extras, check_collective),
    )
}

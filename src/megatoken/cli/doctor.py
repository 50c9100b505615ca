"""`megatoken doctor`: checks of this machine, each with a remedy."""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from megatoken.config.schema import MachineConfig
from megatoken.console import format_quantity
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import MegatokenError
from megatoken.native.library import NO_LIBRARY, find_library
from megatoken.system.device import choose_device, misses_triton
from megatoken.system.environment import python_command
from megatoken.system.machine import cpu_count, find_compiler, free_memory_bytes
from megatoken.system.process import run_child

MEET_SECONDS = 90.0  # for two processes to start on a busy machine, to join and to sum
MIN_DISK = 5e9  # bytes: less does not hold a GPT-2 124M run
MIN_TORCH = (2, 11)

# Each of two processes joins a group and sums rank + 1 over it.
PROGRAM = """
import torch
from megatoken.distributed import comm
from megatoken.distributed.env import read_dist_env
from megatoken.errors import PeerError
comm.JOIN_SECONDS = 30
try:
    with comm.join_process_group(read_dist_env(), "cpu") as two:
        total = float(two.sum(torch.tensor(two.dist_env.rank + 1.0)))
except PeerError as error:
    sys.exit(str(error))
sys.exit(0 if total == 3.0 else f"1 + 2 is {total}")
"""
LAUNCH = "from megatoken.launch.local import launch; sys.exit(launch(sys.argv[1:], 2))"

# good; lacking: a run works, slower or with less; bad: a run would fail. Then what was found, and the remedy.
Result = tuple[str, str, str]


def run_checks(folder: Path) -> list[dict[str, str]]:
    """The findings of all checks, for runs in `folder`, by name; an exception in one is a finding."""
    findings = []
    for name, check in CHECKS.items():
        try:
            state, found, remedy = check(folder)
        except MegatokenError as error:  # names its remedy
            what, *rest = str(error).rsplit(" — ", 1)
            state, found, remedy = "bad", what, *(rest or [""])
        except Exception as error:  # drivers and libraries may raise anything
            state, found, remedy = (
                "bad",
                f"{type(error).__name__}: {error}",
                "unexpected: this is the system's message",
            )
        findings.append(
            {
                "name": name,
                "state": state,
                "found": found,
                "remedy": "" if state == "good" else remedy,
            }
        )
    return findings


def check_versions(_: Path) -> Result:
    outdated = tuple(int(number) for number in torch.__version__.split(".")[:2]) < MIN_TORCH
    found = f"Python {platform.python_version()}, torch {torch.__version__}"
    return (
        "bad" if outdated else "good",
        found,
        f"install torch {'.'.join(map(str, MIN_TORCH))} or newer",
    )


def check_device(_: Path) -> Result:
    device = choose_device(MachineConfig())
    found = f"{device.name} ({device.torch_device}), {device.precision}, {cpu_count()} processors, "
    found += f"{format_quantity(free_memory_bytes(), 'B')} of memory free"
    if device.type == "cpu" and (driver := shutil.which("nvidia-smi")):
        remedy = "this torch is a CPU build, or older than the driver: install a CUDA build"
        return "lacking", f"{found}; found {driver}", remedy
    return "good", found, ""


def check_compiler(_: Path) -> Result:
    device = choose_device(MachineConfig())
    if device.type == "cuda" and (reason := misses_triton(device)):
        return "lacking", f"plain PyTorch: {reason}", "pip install triton"
    if compiler := find_compiler():
        return "good", compiler, ""
    return (
        "lacking",
        "no C++ compiler: models run uncompiled",
        "install g++ to use machine.compile=on",
    )


def check_native(_: Path) -> Result:
    if library := find_library():
        return "good", f"kernels for {library.instruction_set}", ""
    return "lacking", "no native kernels for this processor, which train faster on it", NO_LIBRARY


def check_disk(folder: Path) -> Result:
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError as error:
        return "bad", f"{existing}: {error.strerror}", "choose a folder you can write"
    free = shutil.disk_usage(existing).free
    found, remedy = (
        f"{format_quantity(free, 'B')} free at {existing}",
        "free some space, or choose another folder",
    )
    return "lacking" if free < MIN_DISK else "good", found, remedy


def check_tokenizer(_: Path) -> Result:
    try:
        return "good", f"gpt2, {load_tokenizer('gpt2').vocab_size:,} ids", ""
    except MegatokenError as error:
        return "lacking", str(error), "go online once, or use --tokenizer bpe:N or bytes"


def check_collective(_: Path) -> Result:
    command = [*python_command(LAUNCH), *python_command(PROGRAM)]
    lines: list[str] = []
    try:
        exit_code = run_child(command, on_line=lines.append, timeout=MEET_SECONDS)
    except TimeoutError:
        return (
            "bad",
            f"two processes did not meet in {MEET_SECONDS:.0f} s",
            "check that the machine is not overloaded",
        )
    if exit_code:
        remedy = "check that this host's name resolves and no firewall blocks loopback, or set GLOO_SOCKET_IFNAME=lo"
        return "bad", "".join(lines[-1:]).strip(), remedy
    nccl = "; NCCL is available" if torch.distributed.is_nccl_available() else ""
    return "good", f"two processes joined by gloo and summed{nccl}", ""


CHECKS: dict[str, Callable[[Path], Result]] = {
    "versions": check_versions,
    "device": check_device,
    "compiler": check_compiler,
    "native": check_native,
    "disk": check_disk,
    "tokenizer": check_tokenizer,
    "collective": check_collective,
}

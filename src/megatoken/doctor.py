"""What a machine needs to train, checked one by one: each finding with its likely cause and remedy.

In: nothing, or a folder to train in. Out: findings, in the order in which a run would meet them. Absent: fixing them.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatoken.config import Machine
from megatoken.console import format_quantity
from megatoken.data.tokenizer import load_tokenizer
from megatoken.device import misses_triton, open_device
from megatoken.errors import Fault
from megatoken.hardware import cpu_count, find_compiler, free_memory_bytes, given_environment
from megatoken.parallel.launch import find_free_port
from megatoken.parallel.topology import PORT, Topology, read_topology

COLLECTIVE_SECONDS = 30  # for two processes that have started to meet and sum
START_SECONDS = 90  # for Python and torch to start on a busy machine
LITTLE_DISK, LITTLE_MEMORY = 5e9, 2e9  # bytes: less does not hold a GPT-2 124M run
SANE_YEAR = 2024
OLDEST_TORCH = (2, 11)

# What two processes say to each other: they sum their ranks + 1. Printed: how long it took.
TALK = """
import sys, time, torch
from megatoken.parallel import ranks
from megatoken.parallel.topology import read_topology
ranks.JOIN_SECONDS, began = int(sys.argv[1]), time.monotonic()
try:
    with ranks.join(read_topology(), "cpu") as two:
        total = float(two.sum(torch.tensor(two.topology.rank + 1.0)))
        took = time.monotonic() - began
except ranks.Fault as fault:
    sys.exit(str(fault))
print(f"{took:.1f}" if total == 3.0 else sys.exit(f"1 + 2 is {total}"))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. state: good, lacking (a run works, slower or with less) or bad (a run would fail)."""

    name: str
    state: Literal["good", "lacking", "bad"]
    found: str
    remedy: str = ""


def examine(folder: Path) -> list[Finding]:
    """All checks; one that breaks is a finding itself."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("versions", check_versions),
        ("device", check_device),
        ("kernels", check_kernels),
        ("compiler", check_compiler),
        ("memory", check_memory),
        ("disk", lambda: check_disk(folder)),
        ("tokenizer", check_tokenizer),
        ("clock", check_clock),
        ("launcher", check_launcher),
        ("port", check_port),
        ("collective", check_collective),
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(check())
        except Fault as fault:
            found, _, remedy = str(fault).rpartition(" — ")
            findings.append(Finding(name=name, state="bad", found=found, remedy=remedy))
        except Exception as wrong:  # whatever a machine may answer
            found, remedy = f"{type(wrong).__name__}: {wrong}", "not foreseen: the words are the system's own"
            findings.append(Finding(name=name, state="bad", found=found, remedy=remedy))
    return findings


def check_versions() -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    found = f"Python {python}, torch {torch.__version__}"
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        return Finding(name="versions", state="bad", found=found, remedy="install torch 2.11 or newer")
    return Finding(name="versions", state="good", found=found)


def check_device() -> Finding:
    device = open_device(Machine())
    found = f"{device.name} ({device.place}), {device.precision}, {cpu_count()} processors"
    if device.place.type == "cpu" and (driver := shutil.which("nvidia-smi")):
        remedy = "this torch is a CPU build, or older than the driver: install a CUDA build"
        return Finding(name="device", state="lacking", found=f"{found}; {driver} is there", remedy=remedy)
    return Finding(name="device", state="good", found=found)


def check_kernels() -> Finding:
    device = open_device(Machine())
    missing = misses_triton(device)
    if missing and device.place.type == "cuda":
        return Finding(name="kernels", state="lacking", found=f"plain PyTorch: {missing}", remedy="pip install triton")
    return Finding(name="kernels", state="good", found="plain PyTorch on this device" if missing else "ours, by Triton")


def check_compiler() -> Finding:
    if compiler := find_compiler():
        return Finding(name="compiler", state="good", found=compiler)
    remedy = "install g++ to use machine.compile=on"
    return Finding(name="compiler", state="lacking", found="no C++ compiler: models run uncompiled", remedy=remedy)


def check_memory() -> Finding:
    free = free_memory_bytes()
    found = f"{format_quantity(free, 'B')} free" if free else "unknown"
    if 0 < free < LITTLE_MEMORY:
        return Finding(
            name="memory", state="lacking", found=found, remedy="close other programs, or train a small model"
        )
    return Finding(name="memory", state="good", found=found)


def check_disk(folder: Path) -> Finding:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{format_quantity(free, 'B')} free at {existing}"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError as wrong:
        remedy = "choose a folder you can write"
        return Finding(name="disk", state="bad", found=f"{existing}: {wrong.strerror}", remedy=remedy)
    if free < LITTLE_DISK:
        return Finding(name="disk", state="lacking", found=found, remedy="free some space, or choose another folder")
    return Finding(name="disk", state="good", found=found)


def check_tokenizer() -> Finding:
    try:
        return Finding(name="tokenizer", state="good", found=f"gpt2, {load_tokenizer('gpt2').vocab_size:,} ids")
    except Fault as fault:
        remedy = "go online once, or use --tokenizer bpe:N or bytes"
        return Finding(name="tokenizer", state="lacking", found=str(fault), remedy=remedy)


def check_clock() -> Finding:
    began, wall = time.monotonic(), time.time()
    time.sleep(0.05)
    drift = abs((time.time() - wall) - (time.monotonic() - began))
    found = time.strftime("%Y-%m-%d %H:%M:%S %z")
    if time.gmtime().tm_year < SANE_YEAR or drift > 0.5:
        return Finding(name="clock", state="lacking", found=found, remedy="set the clock: logs and Slurm limits use it")
    return Finding(name="clock", state="good", found=found)


def check_launcher() -> Finding:
    topology = read_topology()
    if topology.world_size == 1:
        return Finding(name="launcher", state="good", found="one process; --nproc N, torchrun or srun make more")
    found = f"rank {topology.rank} of {topology.world_size}, meeting at {topology.address}:{topology.port}"
    return Finding(name="launcher", state="good", found=found)


def check_port() -> Finding:
    with socket.socket() as listener:
        try:
            listener.bind(("0.0.0.0", PORT))
        except OSError as wrong:
            remedy = f"another run has it: set MASTER_PORT, or stop it (ss -ltnp 'sport = :{PORT}')"
            return Finding(name="port", state="lacking", found=f"{PORT}: {wrong.strerror}", remedy=remedy)
    return Finding(name="port", state="good", found=f"{PORT} is free")


def check_collective() -> Finding:
    """Two processes of this machine sum a number."""
    port, deadline = find_free_port(), time.monotonic() + START_SECONDS + COLLECTIVE_SECONDS
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TALK, str(COLLECTIVE_SECONDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=given_environment()
            | Topology(rank=rank, world_size=2, local_rank=rank, local_world_size=2, port=port).variables(),
        )
        for rank in range(2)
    ]
    took = ""
    try:
        for process in processes:
            took, said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            if process.returncode:
                last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
                remedy = "see that this host's own name resolves, and that no firewall is on the loopback device: "
                remedy += "GLOO_SOCKET_IFNAME=lo names it"
                return Finding(name="collective", state="bad", found=last, remedy=remedy)
    except subprocess.TimeoutExpired:
        found = f"two processes said nothing in {START_SECONDS + COLLECTIVE_SECONDS:.0f} s"
        remedy = "a machine too busy to start Python, or one that stops programs: try `python -c 'import torch'`"
        return Finding(name="collective", state="bad", found=found, remedy=remedy)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                process.communicate()
    nccl = "; NCCL is there" if torch.distributed.is_nccl_available() else ""
    found = f"two processes met by gloo and summed in {took.strip()} s{nccl}"
    return Finding(name="collective", state="good", found=found)

"""Peak table, processor name, cache and process settings."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from megatoken.base.system import machine
from megatoken.base.system.environment import python_command
from megatoken.base.system.machine import (
    cpu_count,
    free_memory_bytes,
    peak_resident_bytes,
    read_load,
)
from megatoken.base.system.measurement_cache import read_measurements, save_measurement
from megatoken.base.system.peak_flops import PEAK_FLOPS
from tests.tables import read_table

# As the data sheets print them, in TFLOP/s.
DATA_SHEETS = """\
Tesla V100-SXM2-32GB, fp16, 125
NVIDIA GeForce RTX 3090, bf16, 71.2
NVIDIA GeForce RTX 4090, bf16, 165.2
NVIDIA A100-SXM4-80GB, tf32, 156
NVIDIA H100 80GB HBM3, bf16, 989.4
NVIDIA H100 PCIe, tf32, 378
NVIDIA B200, bf16, 2250
AMD Instinct MI300X, bf16, 1307.4
"""


def test_peaks_are_the_dense_ones_of_the_data_sheets():
    for line in DATA_SHEETS.splitlines():
        name, precision, tera = line.split(", ")
        assert PEAK_FLOPS[name][precision] == pytest.approx(float(tera) * 1e12, rel=1e-9), name
    for name, row in PEAK_FLOPS.items():
        assert row["fp32"] <= row.get("tf32", row["fp32"]) <= row.get("bf16", row["fp32"]), name
        # Neither sparse nor in another unit.
        assert 1e12 < row["fp32"] <= max(row.values()) < 3e15, name


def save_measurements(names: str) -> None:
    for name in names:
        save_measurement("x.json", name, ord(name))


def test_processes_merge_their_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    assert read_measurements("x.json") == {}
    names = ["abcdefghij", "klmnopqrst"]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(save_measurements, names))
    assert read_measurements("x.json") == {name: ord(name) for name in "".join(names)}
    (tmp_path / "cache/x.json").write_text("[1")
    assert read_measurements("x.json") == {}
    monkeypatch.setenv("MEGATOKEN_CACHE", "/dev/null/no")
    save_measurement("x.json", "a", 1)  # not writable: no error


def test_variables_of_the_user_win():
    code = (
        "import os, megatoken.base.system.environment as e; e.keep_freed_memory = lambda: print('keeps');"
        "e.prepare_process(); print(os.environ.get('GOMP_SPINCOUNT'))"
    )

    def run(**variables):
        environment = {"PATH": "/usr/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        command = [sys.executable, "-c", code]
        return subprocess.check_output(command, text=True, env=environment | variables).split()

    assert run() == ["keeps", "5000"]
    assert run(GOMP_SPINCOUNT="7", MALLOC_MMAP_MAX_="9") == ["7"]
    assert run(OMP_WAIT_POLICY="active") == ["keeps", "None"]


# Files and their lines; a process's own groups are in "names".
CGROUPS = {
    "version 2": """
names 0::/job/step
job/cpu.max 250000 100000
job/step/cpu.max max 100000
job/memory.max 50000000
job/memory.current 45000000
job/memory.stat anon 7; inactive_file 1000000
job/step/memory.max max
job/step/memory.current 45000000
job/step/memory.stat anon 7; inactive_file 1000000
""",
    # A container: names of the host, of which only the topmost folder exists.
    "version 1": """
names 4:memory:/docker/1f; 1:cpu,cpuacct:/docker/1f; 0::/docker/1f
cpu/cpu.cfs_quota_us 250000
cpu/cpu.cfs_period_us 100000
memory/memory.limit_in_bytes 50000000
memory/memory.usage_in_bytes 45000000
memory/memory.stat inactive_file 0; total_inactive_file 1000000
""",
    "no limit": """
names 4:memory:/; 1:cpu,cpuacct:/
cpu/cpu.cfs_quota_us -1
cpu/cpu.cfs_period_us 100000
""",
}


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="needs Linux")
@pytest.mark.parametrize("version", CGROUPS)
def test_limits_of_cgroups_hold(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, content in read_table(CGROUPS[version]).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content.replace("; ", "\n") + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "CGROUP_NAMES", tmp_path / "names")
    if version == "no limit":
        assert cpu_count() == 64
        assert free_memory_bytes() > 6_000_000
    else:
        assert (cpu_count(), free_memory_bytes()) == (2, 6_000_000)


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_the_peak_of_a_process_is_not_its_parents():
    code = "from megatoken.base.system.machine import peak_resident_bytes; print(peak_resident_bytes())"
    held = bytearray(b"x") * (400 << 20)
    peak = int(subprocess.check_output(python_command(code)))
    assert peak_resident_bytes() > len(held)
    assert 1 << 20 < peak < 200 << 20


def test_loads_are_shares(monkeypatch: pytest.MonkeyPatch):
    lines = "NVIDIA H100 80GB HBM3, 97, 20480, 81920\\nTesla T4, [N/A], 0, 15360\\n"
    monkeypatch.setattr(machine, "GPU_LOAD", ["printf", lines])
    names, shares, _ = zip(*read_load(), strict=True)
    assert names == ("CPU", "memory", "GPU 0, NVIDIA H100 80GB HBM3", "GPU 0 memory")
    assert shares[2:] == (0.97, 0.25)
    assert 0 <= shares[0] <= 1
    assert 0 < shares[1] < 1


def test_the_commit_of_a_checkout_is_found():
    root = Path(machine.__file__).parents[4]
    if not (root / ".git").exists():
        pytest.skip("the package is not from a git checkout")
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    assert machine.find_commit() == subprocess.check_output(command, text=True).strip()

"""What a machine is called, and what its vendor promises."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megatoken import hardware
from megatoken.hardware import find_processor_name, recall, remember
from megatoken.peaks import PEAK_FLOPS


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [  # figures as the data sheets print them
        ("Tesla P100-PCIE-16GB", "fp16", 18.7),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8),
        ("NVIDIA GeForce RTX 3090", "bf16", 71.2),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.6),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.4),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "tf32", 378),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("Apple M1", "fp32", 2.62),
        ("Apple M2", "fp32", 3.58),
    ],
)
def test_peaks_are_the_printed_dense_ones(name: str, precision: str, tera: float) -> None:
    assert PEAK_FLOPS[name][precision] == pytest.approx(tera * 1e12, rel=1e-9)


@pytest.mark.parametrize("name", PEAK_FLOPS)
def test_rows_hang_together(name: str) -> None:
    row = PEAK_FLOPS[name]
    assert "fp32" in row
    assert set(row) <= {"fp32", "tf32", "fp16", "bf16"}
    assert ("tf32" not in row) or ("bf16" in row)  # both came with Ampere and CDNA 3
    assert ("fp16" in row) != name.startswith("Apple")
    assert row["fp32"] <= row.get("tf32", row["fp32"]) <= row.get("bf16", row["fp32"])
    assert 1e12 < row["fp32"] <= max(row.values()) < 3e15  # a sparse figure or a wrong unit would show


def test_names_are_exact_and_differ_in_more_than_case() -> None:
    assert len({name.casefold() for name in PEAK_FLOPS}) == len(PEAK_FLOPS)
    assert all(name == " ".join(name.split()) for name in PEAK_FLOPS)
    for stranger in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "H100", "nvidia h200"):
        assert stranger not in PEAK_FLOPS


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="another way than this system's")
def test_processor_is_named_by_the_system() -> None:
    assert find_processor_name()
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    assert find_processor_name() in models or not models


def test_a_mac_is_asked_for_its_brand(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="Apple M2 Pro\n")

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(hardware.subprocess, "run", answer)
    assert find_processor_name() == "Apple M2 Pro"
    assert asked == [["sysctl", "-n", "machdep.cpu.brand_string"]]


def test_a_mac_without_sysctl_still_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(hardware.subprocess, "run", fail)
    assert find_processor_name()


def test_what_is_measured_is_remembered_beside_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / "cache"))
    assert recall("x.json") == {}
    remember("x.json", {"a": 1})
    remember("x.json", {"b": 2})
    assert recall("x.json") == {"a": 1, "b": 2}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["x.json"]
    (tmp_path / "cache" / "x.json").write_text("[1")
    assert recall("x.json") == {}
    monkeypatch.setenv("MEGATOKEN_CACHE", "/dev/null/no")
    remember("x.json", {"a": 1})  # nowhere to keep it: no fault


def ask(program: str, **environment: str) -> list[str]:
    code = f"from megatoken.hardware import *; import os; prepare_process(); {program}"
    environment |= {"PATH": "/usr/bin"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return said.stdout.split("\n")


def test_a_choice_made_in_the_environment_stands() -> None:
    program = "print(os.environ.get('GOMP_SPINCOUNT')); print(dict(describe_settings())['malloc'])"
    assert ask(program)[0] == "5000"
    assert ask(program, GOMP_SPINCOUNT="7")[0] == "7"
    assert ask(program, OMP_WAIT_POLICY="active")[0] == "None"
    assert ask(program, MALLOC_MMAP_MAX_="9")[1] == "as the system has it"
    if platform.libc_ver()[0] == "glibc":
        assert ask(program)[1] == "keeps what is freed"


def test_programs_that_are_not_ours_see_the_environment_as_given() -> None:
    assert ask("print('GOMP_SPINCOUNT' in given_environment(), 'GOMP_SPINCOUNT' in os.environ)")[0] == "False True"

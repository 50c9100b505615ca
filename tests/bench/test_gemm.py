"""Matrix products: what is measured and what is said of it, never how fast it is."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from megatoken.bench import gemm
from megatoken.cli import main
from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import MEASURED, open_device, product_calls, with_peak
from megatoken.errors import Exit, Fault
from tests.tiny import CPU, SHAPE

KEYS = {"name", "dtype", "library", "m", "k", "n", "flops_per_second"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def options(tmp_path: Path, **values: object) -> argparse.Namespace:
    given = {"device": "cpu", "dtypes": "fp32", "largest": 128, "tokens": 0, "repeats": 2, "out": tmp_path}
    return argparse.Namespace(**(given | values))


def test_squares_of_every_size_dtype_and_library(tmp_path: Path) -> None:
    answer = gemm.run(options(tmp_path, dtypes="bf16,fp32"), Console(to_stderr=True))
    assert answer["device"] == open_device(Machine(device="cpu")).name
    seen = [(row["dtype"], row["library"], row["m"], row["k"], row["n"]) for row in answer["rows"]]
    ways = [("bf16", ["torch"]), ("fp32", ["torch", "numpy"])]
    assert seen == [(d, library, s, s, s) for d, libraries in ways for s in (64, 128) for library in libraries]
    for row in answer["rows"]:
        assert set(row) == KEYS
        rate = row["flops_per_second"]
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]
        assert rate["repeats"] == 2
    for dtype in ("bf16", "fp32"):
        fastest = max(row["flops_per_second"]["high"] for row in answer["rows"] if row["dtype"] == dtype)
        assert answer["peak"][dtype] == pytest.approx(fastest)  # of two repeats, `high` is the better


def test_step_products_have_the_shapes_of_the_model() -> None:
    rows, _ = gemm.measure_products(CPU, "fp32", 64, 8, 1, Console(to_stderr=True), shape=SHAPE)
    d, f, v = SHAPE.d_model, SHAPE.d_ff, SHAPE.padded_vocab_size
    layers = {"qkv": (d, 3 * d), "proj": (d, d), "up": (d, f), "down": (f, d), "head": (d, v)}
    expected = {"square 64": (64, 64, 64)}
    for name, (inputs, outputs) in layers.items():
        expected[f"{name} forward"] = (8, inputs, outputs)
        expected[f"{name} input gradient"] = (8, outputs, inputs)
        expected[f"{name} weight gradient"] = (outputs, 8, inputs)
    assert {row["name"]: (row["m"], row["k"], row["n"]) for row in rows} == expected


@pytest.mark.parametrize(("left", "right"), [("plain", "plain"), ("plain", "turned"), ("turned", "plain")])
def test_libraries_compute_the_same_product(left: str, right: str) -> None:
    a = torch.randn(5, 7) if left == "plain" else torch.randn(7, 5).T
    b = torch.randn(7, 3) if right == "plain" else torch.randn(3, 7).T
    calls = product_calls(a, b)
    assert list(calls) == ["torch", "numpy"]
    for call in calls.values():
        torch.testing.assert_close(torch.as_tensor(call()), a.double() @ b.double(), check_dtype=False)


def test_numpy_stands_aside_when_torch_may_not_use_every_core() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = ["torch", "numpy"] if threads == 1 else ["torch"]
        assert list(product_calls(torch.ones(2, 2), torch.ones(2, 2))) == expected
    finally:
        torch.set_num_threads(threads)
    assert list(product_calls(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16())) == ["torch"]


def test_the_better_peak_is_kept_and_used(tmp_path: Path, own_cache: Path) -> None:
    answer = gemm.run(options(tmp_path), Console(to_stderr=True))
    device = open_device(Machine(device="cpu", precision="fp32"))
    assert list(json.loads((own_cache / "peaks.json").read_text()).values()) == [answer["peak"]["fp32"]]
    assert with_peak(device).peak_flops >= answer["peak"]["fp32"]  # larger products may be faster still
    assert with_peak(device).peak_source == MEASURED


def test_command_writes_record_and_picture_and_ends_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = ["bench", "gemm", "--device", "cpu", "--dtypes", "fp32", "--largest", "64", "--tokens", "0"]
    assert main([*words, "--repeats", "1", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out.splitlines()
    answer = json.loads(printed[-1])
    assert [row["m"] for row in answer["rows"]] == [64, 64]
    assert json.loads((tmp_path / "out" / "gemm.json").read_text())["answer"] == answer
    assert (tmp_path / "out" / "gemm.png").read_bytes()[:4] == b"\x89PNG"
    assert any(line.startswith("square 64") and "64x64 @ 64x64" in line for line in printed)


def test_without_matplotlib_it_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    answer = gemm.run(options(tmp_path, largest=64), Console())
    assert len(answer["rows"]) == 2
    assert "not drawn: pictures need matplotlib, which is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtypes": "fp8"}, r"unknown dtype 'fp8' — --dtypes"),
        ({"dtypes": "tf32"}, r"no TF32 on .* — --dtypes — use fp32"),
        ({"dtypes": "fp16"}, r"fp16 is not trained on a CPU"),
        ({"largest": 63}, r"63 is smaller than the smallest square — --largest — give 64 or more"),
        ({"tokens": -1}, r"-1 tokens — --tokens"),
    ],
)
def test_wrong_input(tmp_path: Path, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(Fault, match=message) as fault:
        gemm.run(options(tmp_path, **wrong), Console(to_stderr=True))
    assert fault.value.code == Exit.CONFIG

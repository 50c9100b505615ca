"""bench parts: the parts are a whole step, no more and no less, and the sums are sums."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken.bench.dissect import UPDATE_BYTES, Part, list_parts, read_kernels
from megatoken.bench.loader import write_shards
from megatoken.bench.parts import measure, subtract, write_trace
from megatoken.bench.workload import Workload, build_workload
from megatoken.cli import main
from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import open_device, remember_peak
from megatoken.errors import Exit, Fault
from megatoken.model.count import count_matmul_parameters, flops_per_token
from megatoken.model.gpt import use_kernels
from megatoken.model.kernels import Kernels
from megatoken.presets import PRESETS
from megatoken.timing import Timing
from tests.tiny import CPU, SHAPE

TOKENS = 4 * SHAPE.seq_len
PEAKED = replace(CPU, peak_flops=1e9, peak_source="data sheet")
FORMS = [
    Kernels(),
    Kernels(attention="explicit"),
    Kernels(linear="numpy", attention="blocked"),
    Kernels(linear="onednn"),
]


def build(precision: str = "fp32") -> Workload:
    """A step whose forms are fixed, whatever is fastest on this machine."""
    fixed = {"precision": precision, "linear": "torch", "attention": "flash", "mixed": "autocast"}
    machine = Machine(device="cpu", **fixed)  # type: ignore[arg-type]
    return build_workload(SHAPE, machine, batch_seqs=4, micro_batch=4)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shards(tmp_path, 1, 1000)
    return tmp_path


@pytest.mark.parametrize("kernels", FORMS, ids=str)
def test_products_add_up_to_the_published_count(kernels: Kernels, shards: Path) -> None:
    workload = build()
    use_kernels(workload.state.working, kernels)
    assert read_kernels(workload) == kernels
    parts = list(list_parts(workload, shards))
    sums = Counter[str]()
    for part in parts:
        sums[part.group] += part.calls * part.flops
        assert (part.flops > 0) != (part.moved_bytes > 0), part.name
        assert part.bound == ("compute" if part.group in ("products", "attention") else "memory")
    assert sums["products"] == 6 * count_matmul_parameters(SHAPE) * TOKENS
    assert sums["attention"] == 6 * SHAPE.n_layer * SHAPE.d_model * SHAPE.seq_len * TOKENS
    assert sum(sums.values()) == flops_per_token(SHAPE, causal=True) * TOKENS
    assert len({part.name for part in parts}) == len(parts)


def find(workload: Workload, shards: Path) -> dict[str, Part]:
    return {part.name: part for part in list_parts(workload, shards)}


def test_every_part_is_there_as_often_as_in_a_step(shards: Path) -> None:
    parts = find(build(), shards)
    kinds = ("forward", "input gradient", "weight gradient")
    expected = {f"{name} {kind}": 2 for name in ("qkv", "out", "up", "down") for kind in kinds}
    expected |= {f"head {kind}": 1 for kind in kinds} | {"loss without products": 1}
    expected |= {"attention forward": 2, "attention backward": 2, "GELU forward": 2, "GELU backward": 2}
    expected |= {"norm forward": 5, "norm backward": 5, "residual add": 4, "residual gradients": 4}
    expected |= {"embedding forward": 1, "embedding backward": 1, "clip and optimizer": 1, "loading a batch": 1}
    assert {name: part.calls for name, part in parts.items()} == expected
    d = TOKENS * SHAPE.d_model * 4  # bytes of a row of the stream a token, fp32
    assert parts["norm backward"].moved_bytes == parts["residual add"].moved_bytes == 3 * d
    assert parts["GELU forward"].moved_bytes == 2 * 2 * d  # the MLP is twice as wide
    assert parts["loss without products"].moved_bytes == 2 * TOKENS * 97 * 4
    assert parts["clip and optimizer"].moved_bytes == UPDATE_BYTES * sum(
        p.numel() for p in build().state.model.parameters()
    )
    assert parts["loading a batch"].moved_bytes == 18 * TOKENS


def test_calls_compute_what_the_step_does(shards: Path) -> None:
    workload = build()
    parts = find(workload, shards)
    linear = workload.state.working.blocks[0].mlp.up  # type: ignore[union-attr]
    y = parts["up forward"].call()
    assert isinstance(y, torch.Tensor)
    assert y.shape == (4, SHAPE.seq_len, SHAPE.d_ff)
    (dx,) = parts["up input gradient"].call()  # type: ignore[misc]
    assert dx.shape == (4, SHAPE.seq_len, SHAPE.d_model)
    dw, db = parts["up weight gradient"].call()  # type: ignore[misc]
    assert (dw.shape, db.shape) == (linear.weight.shape, linear.bias.shape)  # type: ignore[union-attr]
    inputs, targets = parts["loading a batch"].call()  # type: ignore[misc]
    assert inputs.shape == (4, SHAPE.seq_len)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_forms_in_python_make_both_gradients_at_once(shards: Path) -> None:
    workload = build()
    use_kernels(workload.state.working, Kernels(linear="numpy"))
    names = [name for name in find(workload, shards) if name.startswith("up")]
    assert names == ["up forward", "up gradients"]


def test_measuring_trains_no_nonsense(shards: Path) -> None:
    """The weights that parts update are updated at a rate of 0, and no gradient is left for the next step."""
    workload = build()
    before = [p.detach().clone() for p in workload.state.model.parameters()]
    for part in list_parts(workload, shards):
        part.call()
    assert all(torch.equal(old, new) for old, new in zip(before, workload.state.model.parameters(), strict=True))
    assert all(p.grad is None for p in workload.state.model.parameters())
    assert workload.step().loss == build().step().loss


def test_masters_are_a_part(shards: Path) -> None:
    workload = build("bf16")
    workload.state.hold_masters(torch.bfloat16)
    parts = find(workload, shards)
    assert parts["masters"].group == "optimizer"
    parts["masters"].call()
    assert all(p.grad is None for p in workload.state.model.parameters())
    assert parts["GELU forward"].moved_bytes == 2 * TOKENS * SHAPE.d_ff * 2  # two bytes a number
    assert sum(part.calls * part.flops for part in parts.values()) == flops_per_token(SHAPE, causal=True) * TOKENS


def test_sums_are_sums(capsys: pytest.CaptureFixture[str]) -> None:
    answer = measure(build(), PEAKED, 3, Console(), largest_copy=1 << 16)
    rows = answer["parts"]
    total = sum(row["calls"] * row["seconds"]["median"] for row in rows)
    floor = sum(row["calls"] * row["floor_seconds"] for row in rows)
    step = answer["step_seconds"]
    assert answer["parts_seconds"] == pytest.approx(total)
    assert answer["overhead_seconds"] == pytest.approx(step["median"] - total)
    assert answer["floor_tokens_per_second"] == pytest.approx(TOKENS / floor)
    assert answer["tokens_per_second"]["median"] == pytest.approx(TOKENS / step["median"])
    for row in rows:
        if row["bound"] == "compute":
            assert row["floor_seconds"] == row["flops"] / 1e9
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        assert row["seconds"]["repeats"] == step["repeats"] == 3
    assert answer["bandwidth"] == answer["bandwidth_by_bytes"][str(1 << 16)]
    update = next(row for row in rows if row["name"] == "clip and optimizer")
    assert update["floor_seconds"] == update["moved_bytes"] / answer["bandwidth"]
    lines = capsys.readouterr().out.splitlines()
    assert {line.count("|") for line in lines if line.startswith("| ")} == {9, 6}  # two Markdown tables
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][-3:] == [
        "sum of parts",
        "overhead",
        "whole step",
    ]


def test_what_is_contained_is_taken_off_round_by_round() -> None:
    whole, inside = Timing((5.0, 9.0, 4.0)), [Timing((1.0, 2.0, 3.0)), Timing((1.0, 1.0, 2.0))]
    assert subtract(whole, inside) == Timing((3.0, 6.0, 0.0))
    assert subtract(whole, []) == whole


def test_a_trace_opens_in_the_usual_viewers(tmp_path: Path) -> None:
    workload = build()
    events = json.loads(write_trace(workload, tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in events)
    assert workload.state.step == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(Fault, match="cannot write trace") as caught:
        write_trace(workload, tmp_path / "file" / "trace.json")
    assert caught.value.code == Exit.STORAGE


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PRESETS, "tiny", SHAPE)
    device = open_device(Machine(device="cpu"))
    remember_peak(device, 1e12)
    words = ["bench", "parts", "--device", "cpu", "--preset", "tiny", "--repeats", "1", "--out", str(tmp_path)]
    assert main([*words, "--batch-tokens", "32", "--seq-len", "8", "--trace"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    known = {"device": device.name, "precision": device.precision, "preset": "tiny", "batch_tokens": 32, "seq_len": 8}
    assert known.items() <= answer.items()
    assert answer["peak_flops"] == 1e12
    assert json.loads((tmp_path / "parts.json").read_text())["answer"] == answer
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert main([*words, "--batch-tokens", "30", "--seq-len", "8"]) == Exit.CONFIG
    said = "30 tokens are not whole sequences of 8 — --batch-tokens — give a multiple of 8, or another --seq-len"
    assert capsys.readouterr().err == f"error: {said}\n"

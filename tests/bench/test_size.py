"""bench size: which sizes there are, what is skipped and why, what a row says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken.bench import size
from megatoken.bench.memory import choose_copy, estimate_step_bytes, list_copies, read_speeds
from megatoken.bench.size import Case, choose_cases, draw, list_cases, measure
from megatoken.cli import main
from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import open_device, remember_peak
from megatoken.errors import Exit, Fault
from megatoken.model.count import count_parameters, flops_per_token, state_bytes
from megatoken.presets import PRESETS
from megatoken.timing import Timing
from megatoken.train.state import LOSS_CHUNK
from tests.tiny import CPU, SHAPE

QUIET = Console(to_stderr=True)
MACHINE = Machine(device="cpu", precision="fp32")
PEAKED = replace(CPU, peak_flops=1e12, peak_source="data sheet")
CASES = [
    Case(name="a", sweep="models", shape=SHAPE, step_tokens=32),
    Case(name="b", sweep="contexts", shape=replace(SHAPE, seq_len=8), step_tokens=32),
    Case(name="c", sweep="models", shape=replace(SHAPE, n_layer=4), step_tokens=32),
]


def test_a_cpu_climbs_a_ladder_to_gpt2() -> None:
    cases = list_cases("cpu")
    models = [case for case in cases if case.sweep == "models"]
    assert [case.name for case in models] == ["128x4", "256x6", "384x6", "512x8", "gpt2-124m"]
    assert {(case.step_tokens, case.shape.seq_len, case.shape.d_head) for case in models} == {(1024, 256, 64)}
    assert models[-1].shape == replace(PRESETS["gpt2-124m"], seq_len=256)
    contexts = [case for case in cases if case.sweep == "contexts"]
    assert [(case.name, case.seqs) for case in contexts] == [
        ("128x4@256", 8),
        ("128x4@512", 4),
        ("128x4@1024", 2),
        ("128x4@2048", 1),
    ]
    held = [estimate_step_bytes(case.shape, case.step_tokens, chunk=LOSS_CHUNK["cpu"]) for case in cases]
    assert held == sorted(held)


def test_a_gpu_takes_the_presets() -> None:
    cases = list_cases("cuda")
    assert [case.name for case in cases if case.sweep == "models"] == [n for n in PRESETS if n.startswith("gpt2-")]
    assert {case.step_tokens for case in cases} == {8192}
    assert {case.shape.n_layer for case in cases if case.sweep == "contexts"} == {12}


def test_steps_are_whole_sequences() -> None:
    cases = list_cases("cpu", 1000)
    assert {case.step_tokens for case in cases if case.sweep == "models"} == {768}
    assert {case.step_tokens for case in cases if case.sweep == "contexts"} == {2048}
    assert {(case.step_tokens, case.shape.seq_len) for case in list_cases("cpu", 10)[:1]} == {(10, 10)}
    assert {case.step_tokens for case in list_cases("cpu", 5000) if case.sweep == "contexts"} == {4096}


def test_names_choose() -> None:
    cases = list_cases("cpu")
    assert [c.name for c in choose_cases(cases, ["256x6", "contexts"])] == [
        c.name for c in cases if c.sweep == "contexts" or c.name == "256x6"
    ]
    with pytest.raises(Fault, match="there is no size '99x9' here — --only — use some of models,contexts,") as caught:
        choose_cases(cases, ["99x9"])
    assert caught.value.code == Exit.CONFIG


def test_rows_say_what_a_token_costs() -> None:
    rows = measure(CASES, MACHINE, PEAKED, math.inf, 2, QUIET)
    for case, row in zip(CASES, rows, strict=True):
        assert (row["name"], row["sweep"], row["batch_tokens"], row["skipped"]) == (case.name, case.sweep, 32, None)
        assert row["parameters"] == count_parameters(case.shape)
        assert row["flops_per_token"] == flops_per_token(case.shape, causal=False)
        assert row["flops_per_token_causal"] == flops_per_token(case.shape, causal=True)
        rate = row["tokens_per_second"]
        assert rate["repeats"] == 2
        assert row["mfu"] == rate["median"] * row["flops_per_token"] / 1e12
        assert row["seconds_per_token"] == pytest.approx(1 / rate["median"])
        assert row["peak_memory_bytes"] > 1e6


def test_what_would_swap_is_skipped() -> None:
    allowed = estimate_step_bytes(SHAPE, 32, chunk=LOSS_CHUNK["cpu"])
    rows = measure(CASES, MACHINE, PEAKED, allowed, 1, QUIET)
    assert [bool(row["skipped"]) for row in rows] == [False, False, True]
    assert rows[2]["skipped"].startswith("would hold about ")
    assert (rows[2]["tokens_per_second"], rows[2]["mfu"]) == (None, None)
    assert rows[2]["parameters"] == count_parameters(CASES[2].shape)


def test_after_out_of_memory_the_sweep_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"a": None, "b": {"tokens_per_second": {"median": 1.0}}}

    def run_out(case: Case, *_: object) -> dict[str, object] | None:
        return found[case.name] and {**dict.fromkeys(("mfu", "mfu_causal")), "peak_memory_bytes": 1, **SPEED}

    monkeypatch.setattr(size, "measure_case", run_out)
    rows = measure(CASES, MACHINE, PEAKED, math.inf, 1, QUIET)
    assert [row["skipped"] for row in rows] == ["out of memory", None, "a ran out of memory"]


SPEED = {"tokens_per_second": {"median": 1.0, "low": 1.0, "high": 1.0, "repeats": 1}, "seconds_per_token": 1.0}


def test_a_picture_of_one_sweep_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = measure(CASES[:1], MACHINE, CPU, math.inf, 1, QUIET)
    assert draw(rows, 0.0, "tiny", tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / "cache"))
    remember_peak(open_device(Machine(device="cpu")), 1e12)
    words = ["bench", "size", "--device", "cpu", "--only", "128x4", "--batch-tokens", "16", "--repeats", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    answer = json.loads(last)
    assert [(row["name"], row["seq_len"], row["batch_tokens"]) for row in answer["rows"]] == [("128x4", 16, 16)]
    assert answer["rows"][0]["parameters"] == 50257 * 128 + 16 * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128
    assert any(line.startswith("| size ") for line in lines)
    assert json.loads((tmp_path / "size.json").read_text())["answer"] == answer
    assert (tmp_path / "size.png").read_bytes()[1:4] == b"PNG"


def test_an_estimate_holds_state_activations_and_logits() -> None:
    shape = replace(SHAPE, vocab_size=128)
    weights = state_bytes(shape) * 4 / 3  # and the gradient
    per_layer = 8 * 32 + 2 * 64 + 2 * 16 / 2
    assert estimate_step_bytes(shape, 100, chunk=0) == weights + 4 * (2 * 100 * per_layer + 2 * 100 * 128)
    assert estimate_step_bytes(shape, 100, chunk=10) == weights + 4 * (2 * 100 * per_layer + 2 * 10 * 128)
    gated = replace(shape, mlp="swiglu")
    more = (state_bytes(gated) - state_bytes(shape)) * 4 / 3 + 4 * 2 * 100 * 2 * 64
    assert estimate_step_bytes(gated, 100, chunk=0) - estimate_step_bytes(shape, 100, chunk=0) == pytest.approx(more)


def test_copies_are_judged_by_their_size() -> None:
    assert [choose_copy(moved, 1 << 20) for moved in (1, 1 << 16, (1 << 17) - 1, 1 << 30)] == [
        1 << 14,
        1 << 16,
        1 << 16,
        1 << 20,
    ]
    sizes = [1 << 16, 1 << 14, 1 << 16]
    calls = list_copies(CPU, sizes)
    assert list(calls) == [f"{kind} of {size}" for size in (1 << 14, 1 << 16) for kind in ("copy", "change")]
    before = [call() for call in calls.values()]
    assert [x.nbytes for x in before if isinstance(x, torch.Tensor)] == [1 << 13, 1 << 13, 1 << 15, 1 << 15]
    times = {"copy of 16384": 1.0, "change of 16384": 2.0, "copy of 65536": 4.0, "change of 65536": 2.0}
    speeds = read_speeds({name: Timing((seconds, 9.0)) for name, seconds in times.items()}, sizes)
    assert list(speeds.items()) == [(1 << 14, 32768.0), (1 << 16, 32768.0)]
    times["change of 16384"] = 0.25
    speeds = read_speeds({name: Timing((seconds, 9.0)) for name, seconds in times.items()}, sizes)
    assert list(speeds.items()) == [(1 << 14, 65536.0), (1 << 16, 32768.0)]

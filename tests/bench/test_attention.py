"""bench attention: forms agree, FLOPs are counted, what does not fit says so."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatoken.bench import attention
from megatoken.bench.attention import count_flops, estimate_bytes, list_forms, measure_forms
from megatoken.cli import main
from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import open_device
from megatoken.errors import Exit, Fault
from megatoken.model.kernels import ATTENTION, flash_attention
from tests.tiny import CPU, SHAPE

QUIET = Console(to_stderr=True)


@pytest.mark.parametrize(("precision", "least", "most"), [("fp32", 0.0, 1e-5), ("bf16", 1e-4, 0.05)])
def test_forms_agree_with_the_formula(precision: str, least: float, most: float) -> None:
    device = open_device(Machine(device="cpu", precision=precision))  # type: ignore[arg-type]
    rows = measure_forms(device, SHAPE, 2, 256, math.inf, 1, QUIET)
    assert [(row["seq_len"], row["form"]) for row in rows] == [
        (T, form) for T in (64, 128, 256) for form in list_forms(CPU)
    ]
    for row in rows:
        assert row["dtype"] == precision
        assert row["skipped"] is None
        assert least <= row["difference"] <= most, row
        assert row["extra_memory_bytes"] is None  # a CPU does not count what it allocates
        rate, seconds = row["flops_per_second"], row["seconds"]
        assert rate["median"] == pytest.approx(count_flops(SHAPE, 2, row["seq_len"]) / seconds["median"])
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
    if precision == "fp32":
        assert {row["difference"] for row in rows if row["form"] == "explicit"} == {0.0}


def test_a_wrong_form_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION, "wrong", lambda q, k, v, dropout: flash_attention(q, k, v * 1.01, dropout))
    row = measure_forms(CPU, SHAPE, 1, 64, math.inf, 1, QUIET)[-1]
    assert (row["form"], row["difference"]) == ("wrong", pytest.approx(0.01, rel=0.1))


def test_only_the_triangle_counts() -> None:
    # 2 products forward and 5 backward of 3 sequences, 2 heads, 64 x 64 x 16, 2 FLOPs each, half of it
    assert count_flops(SHAPE, 3, 64) == 7 * 2 * 3 * 2 * 64 * 64 * 16 / 2


def test_what_would_not_fit_is_skipped() -> None:
    allowed = estimate_bytes("blocked", 1, SHAPE, 256, 4)
    rows = measure_forms(CPU, SHAPE, 1, 256, allowed, 1, QUIET)
    skipped = {(row["seq_len"], row["form"]): row["skipped"] for row in rows if row["skipped"]}
    assert list(skipped) == [(256, "explicit")]
    assert skipped[256, "explicit"] == "would hold 2.49 MB, more than the 786.4 kB allowed"
    empty = next(row for row in rows if row["skipped"])
    assert [empty[key] for key in ("seconds", "flops_per_second", "difference")] == [None] * 3
    rest = [row for row in rows if row["seq_len"] == 256 and not row["skipped"]]
    assert [(row["form"], row["difference"]) for row in rest] == [("flash", None), ("blocked", None)]


def test_a_form_that_runs_out_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run_out(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        tried.append(q.shape[-2])
        if q.shape[-2] >= 128:
            raise torch.OutOfMemoryError("too much")
        return flash_attention(q, k, v, dropout)

    monkeypatch.setitem(ATTENTION, "greedy", run_out)
    rows = measure_forms(CPU, SHAPE, 1, 256, math.inf, 1, QUIET)
    ends = [row["skipped"] for row in rows if row["form"] == "greedy"]
    assert ends == [None, "out of memory at 128 tokens", "out of memory at 128 tokens"]
    assert tried.count(128) == 1
    assert 256 not in tried


def test_the_command_leaves_a_record_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = ["bench", "attention", "--device", "cpu", "--longest", "100", "--repeats", "1", "--out", str(tmp_path)]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["n_head"], answer["d_head"], answer["seqs"]) == (12, 64, 1)
    assert {row["seq_len"] for row in answer["rows"]} == {64}
    assert json.loads((tmp_path / "attention.json").read_text())["answer"] == answer
    assert (tmp_path / "attention.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--longest", "32"], "32 is shorter than the first length — --longest — give 64 or more"),
        (["--memory", "-1"], "-1 GB of memory — --memory — give a size, or 0 for most of it"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--device", "cpu", *words]) == Exit.CONFIG
    assert capsys.readouterr().err == f"error: {said}\n"


def test_memory_allowed_is_given_in_gigabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"device": "cpu", "longest": 64, "memory": 1e-6, "preset": "gpt2-124m", "seqs": 1, "repeats": 1}
    with pytest.raises(Fault, match=r"every form was skipped: nothing was measured — --memory"):
        attention.run(argparse.Namespace(**given, out=tmp_path), Console())
    assert capsys.readouterr().out.splitlines()[-1].endswith("more than the 1 kB allowed")


def test_a_form_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.\nand more")

    monkeypatch.setitem(ATTENTION, "none", refuse)
    rows = [row for row in measure_forms(CPU, SHAPE, 1, 128, math.inf, 1, QUIET) if row["form"] == "none"]
    assert [row["skipped"] for row in rows] == ["No available kernel. Aborting execution at 64 tokens"] * 2

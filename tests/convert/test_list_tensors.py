"""describe --tensors: the tensors of every kind of model by the names, shapes and dtypes of its file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from megatoken.convert.llmc import write_llmc
from megatoken.convert.load_pretrained import read_model_config
from megatoken.errors import ExitCode
from megatoken.model.gpt import GPT
from tests.convert.models import BYTES, NANOGPT, TINY_GPT, byte_tokenizer, draw_model, save_run
from tests.convert.test_recipes_nanogpt import model_args, to_nanogpt

NUMBERS = BYTES * 32 + 24 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
PADDED = 384  # rows of our own embedding


def list_tensors(
    name: str | Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype by name; their numbers and sum are checked, and the table against them."""
    assert main(["describe", str(name), "--tensors", "--json"]) == ExitCode.DONE
    answer = json.loads(capsys.readouterr().out)
    counts = [torch.Size(row["shape"]).numel() for row in answer["tensors"]]
    assert [row["parameters"] for row in answer["tensors"]] == counts
    assert answer["parameters"] == sum(counts)
    assert main(["describe", str(name), "--tensors"]) == ExitCode.DONE
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"{sum(counts):,} parameters in {len(counts)} tensors"
    assert [line.split()[0] for line in lines] == [row["name"] for row in answer["tensors"]]
    return {row["name"]: (row["shape"], row["dtype"]) for row in answer["tensors"]}


def own_names(model: GPT) -> set[str]:
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_files_of_other_programs(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, full = draw_model(), {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    write_hf(tmp_path, model, byte_tokenizer(), dtype)
    found = list_tensors(tmp_path, capsys)
    assert found["transformer.h.1.attn.c_attn.weight"] == ([32, 96], full)  # Conv1D: transposed
    write_llmc(tmp_path / "model.bin", model, dtype)
    found = list_tensors(tmp_path / "model.bin", capsys)
    assert list(found)[:3] == ["tokens.weight", "positions.weight", "blocks.0.norm1.weight"]
    assert found["tokens.weight"] == ([BYTES, 32], full)
    assert found.keys() == own_names(model)


def test_sizes_are_read_without_weights(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    write_hf(tmp_path / "hf", draw_model(), byte_tokenizer(), "fp32")
    (tmp_path / "hf" / "model.safetensors").unlink()
    weights = max(
        save_run(tmp_path / "run", draw_model()).iterdir(), key=lambda p: p.stat().st_size
    )
    weights.write_bytes(bytes(weights.stat().st_size))
    for name in ("hf", "run"):
        assert read_model_config(tmp_path / name) == TINY_GPT


def test_nanogpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = draw_model(NANOGPT)
    torch.save(
        {"model": to_nanogpt(model), "model_args": model_args(model, BYTES)}, tmp_path / "ckpt.pt"
    )
    for name in (tmp_path, tmp_path / "ckpt.pt"):
        found = list_tensors(name, capsys)
        assert found["transformer.h.0.mlp.c_fc.weight"] == ([128, 32], "float32")


def test_runs_checkpoints_presets_and_recipes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = draw_model()
    checkpoint = save_run(tmp_path, model)
    expected = {name: (list(value.shape), "float32") for name, value in model.named_parameters()}
    for name in (tmp_path, checkpoint):
        assert list_tensors(name, capsys) == expected
    assert expected["tokens.weight"] == ([PADDED, 32], "float32")
    names: dict[str, Any] = list_tensors("gpt2-124m", capsys)
    assert (len(names), names["tokens.weight"], names["positions.weight"][0]) == (
        148,
        ([50304, 768], "float32"),
        [1024, 768],
    )
    recipe = "model: {n_layer: 1, n_head: 2, d_model: 32, seq_len: 24, vocab_size: 257}\n"
    (tmp_path / "own.yaml").write_text(recipe + "budget: {steps: 1, batch_tokens: 240}\n")
    names = list_tensors(tmp_path / "own.yaml", capsys)
    assert names == {
        name: value for name, value in expected.items() if not name.startswith("blocks.1.")
    }
    assert main(["describe", str(checkpoint), "--tensors", "model.n_layer=3"]) == ExitCode.CONFIG
    assert "model.n_layer=3" in capsys.readouterr().err


def test_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", "none.bin"):
        assert main(["describe", str(tmp_path / name), "--tensors"]) == ExitCode.CHECKPOINT
        assert capsys.readouterr().err.startswith("error: ")
    (tmp_path / "model.safetensors").write_bytes(b"12345678{}")
    assert main(["describe", str(tmp_path), "--tensors"]) == ExitCode.CHECKPOINT

"""`describe --tensors` lists the names, shapes and dtypes of every kind of model file."""

from pathlib import Path

import torch

from megatoken.base.errors import ExitCode
from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from megatoken.convert.llmc import write_llmc
from megatoken.store.pretrained import read_architecture
from tests.conftest import Ask
from tests.convert.models import BYTES, TINY_GPT, byte_tokenizer, draw_model, save_run
from tests.convert.test_recipes_nanogpt import save_nanogpt

RECIPE = """
model: {n_layer: 1, n_head: 2, d_model: 32, seq_len: 24, vocab_size: 257}
budget: {steps: 1, batch_tokens: 240}
"""


def list_tensors(name: str | Path, ask: Ask) -> dict[str, tuple[list[int], str]]:
    """Return shape and dtype by name, after checking the counts."""
    result = ask(f"describe {name} --tensors")
    counts = [torch.Size(row["shape"]).numel() for row in result["tensors"]]
    assert [row["parameters"] for row in result["tensors"]] == counts
    assert result["parameters"] == sum(counts)
    return {row["name"]: (row["shape"], row["dtype"]) for row in result["tensors"]}


def test_files_of_other_programs(tmp_path: Path, ask: Ask):
    model = draw_model()
    write_hf(tmp_path, model, byte_tokenizer(), "bf16")
    tensors = list_tensors(tmp_path, ask)
    assert tensors["transformer.h.1.attn.c_attn.weight"] == ([32, 96], "bfloat16")  # transposed
    write_llmc(tmp_path / "model.bin", model, "fp32")
    tensors = list_tensors(tmp_path / "model.bin", ask)
    assert list(tensors)[:3] == ["tokens.weight", "positions.weight", "blocks.0.norm1.weight"]
    assert tensors["tokens.weight"] == ([BYTES, 32], "float32")
    assert tensors.keys() == dict(model.named_parameters()).keys()
    save_nanogpt(tmp_path / "ckpt.pt", model)
    tensors = list_tensors(tmp_path / "ckpt.pt", ask)
    assert tensors["transformer.h.0.mlp.c_fc.weight"] == ([128, 32], "float32")


def test_sizes_are_read_without_weights(tmp_path: Path):
    (tmp_path / "hf").mkdir()
    write_hf(tmp_path / "hf", draw_model(), byte_tokenizer(), "fp32")
    (tmp_path / "hf/model.safetensors").unlink()
    weights = save_run(tmp_path / "run", draw_model()) / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    for name in ("hf", "run"):
        assert read_architecture(tmp_path / name) == TINY_GPT


def test_runs_checkpoints_presets_and_recipes(tmp_path: Path, ask: Ask):
    model = draw_model()
    checkpoint = save_run(tmp_path, model)
    expected = {name: (list(value.shape), "float32") for name, value in model.named_parameters()}
    for name in (tmp_path, checkpoint):
        assert list_tensors(name, ask) == expected
    assert list_tensors("gpt2-124m", ask)["tokens.weight"] == ([50304, 768], "float32")
    (tmp_path / "own.yaml").write_text(RECIPE)
    assert list_tensors(tmp_path / "own.yaml", ask) == {
        name: value for name, value in expected.items() if not name.startswith("blocks.1.")
    }
    assert main(f"describe {checkpoint} --tensors model.n_layer=3".split()) == ExitCode.CONFIG

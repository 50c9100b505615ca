"""llm.c's checkpoints are written and read byte for byte; damaged ones are refused."""

import os
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.convert.export import export
from megatoken.convert.llmc import read_llmc, write_llmc, write_tokenizer
from megatoken.text.load_pretrained import load_pretrained
from tests.convert.models import (
    BYTES,
    TINY_GPT,
    assert_same_weights,
    byte_tokenizer,
    draw_model,
    save_llmc,
)

PADDED = 384


def test_bytes_are_those_of_the_format(tmp_path: Path):
    model = draw_model()
    write_llmc(tmp_path / "m.bin", model, "fp32")
    raw = (tmp_path / "m.bin").read_bytes()
    assert struct.unpack("<8i", raw[:32]) == (20240326, 3, 24, BYTES, 2, 2, 32, PADDED)
    assert not any(raw[32:1024])
    rows = torch.from_numpy(np.frombuffer(raw[1024:], "<f4").copy()).view(-1, 32)
    state = model.state_dict()
    assert torch.equal(rows[:BYTES], state["tokens.weight"][:BYTES])
    assert not rows[BYTES:PADDED].any()  # our padding rows are not written
    norms = [state[name] for name in ("blocks.0.norm1.weight", "blocks.1.norm1.weight")]
    assert torch.equal(rows[PADDED + 24 :][:2], torch.stack(norms))
    assert torch.equal(rows[-1], state["norm.bias"])
    assert rows.numel() == sum(map(torch.numel, state.values()))


@pytest.mark.parametrize(("dtype", "version"), [("fp32", 3), ("bf16", 5)])
def test_written_and_read_back_equal(tmp_path: Path, dtype: str, version: int):
    model, path = draw_model(), tmp_path / "m.bin"
    write_llmc(path, model, dtype)
    again = read_llmc(path)
    assert again.config == TINY_GPT
    assert struct.unpack("<2i", path.read_bytes()[:8]) == (20240326, version)
    if dtype == "bf16":
        model.bfloat16().float()
    assert_same_weights(again, model)
    assert not again.tokens.weight[BYTES:].any()


def test_export_of_a_loaded_model_leaves_it_unchanged(tmp_path: Path):
    path = save_llmc(tmp_path / "first", draw_model(replace(TINY_GPT, vocab_size=300)))
    loaded = load_pretrained(path)
    with pytest.warns(UserWarning, match="43 ids"):
        answer = export(loaded, "llmc", tmp_path / "second", "bf16")
    assert (answer["verified"], answer["ids_left_out"], answer["source"]) == (True, 43, str(path))
    assert loaded.model.config.vocab_size == 300
    assert torch.equal(loaded.model.norm.bias, load_pretrained(path).model.norm.bias)  # not rounded
    again = load_pretrained(tmp_path / "second/model.bin")
    assert again.model.config == TINY_GPT
    assert again.tokenizer.vocabulary.shares_ids(byte_tokenizer().vocabulary)


def test_tokenizer_file(tmp_path: Path):
    write_tokenizer(tmp_path / "t.bin", byte_tokenizer())
    raw = (tmp_path / "t.bin").read_bytes()
    assert struct.unpack("<4i", raw[:16]) == (20240328, 2, BYTES, 256)
    assert raw[1024:1028] == b"\x01\x00\x01\x01"
    assert raw.endswith(b"\x01\xff\x0d<|endoftext|>")


# Words of the header or a weight: magic number, version, heads, padded vocabulary, a NaN.
WRONG = {0: 20240520, 1: 2, 5: 5, 7: 200, 400: 0x7FC00000}


def test_damaged_files_and_others_tokenizers_are_refused(tmp_path: Path):
    path = save_llmc(tmp_path, draw_model())
    raw = path.read_bytes()
    changed = [
        raw[: 4 * place] + struct.pack("<i", word) + raw[4 * place + 4 :]
        for place, word in WRONG.items()
    ]
    for content in (raw[:-1], raw[:20], *changed):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            load_pretrained(path)
    save_llmc(tmp_path, draw_model(replace(TINY_GPT, vocab_size=200)))
    for _ in range(2):
        with pytest.raises(CheckpointError):
            load_pretrained(path)
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError):  # only GPT-2 can be written
        write_llmc(path, draw_model(replace(TINY_GPT, d_ff=64)), "fp32")


MAIN = r"""
#define TESTING
#include "train_gpt2.c"
int main(int argc, char **argv) {
    GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    int B = 2, T = 8, inputs[16], targets[16];
    for (int i = 0; i < 16; i++) { inputs[i] = i * 13 % 257; targets[i] = (i * 13 + 13) % 257; }
    gpt2_forward(&model, inputs, targets, B, T);
    printf("loss %.7f\n", model.mean_loss);
    Tokenizer tokenizer;
    tokenizer_init(&tokenizer, argv[2]);
    printf("eot %d token %s\n", tokenizer.eot_token, tokenizer_decode(&tokenizer, 'A'));
    return 0;
}
"""


def test_llmc_itself_reads_the_file_and_computes_the_same_loss(tmp_path: Path):
    """Build llm.c's CPU program from the sources in LLMC_CHECKOUT."""
    checkout = os.environ.get("LLMC_CHECKOUT")
    if not checkout or not shutil.which("gcc"):
        pytest.skip("LLMC_CHECKOUT names no checkout of karpathy/llm.c, or there is no gcc")
    model = draw_model()
    name = save_llmc(tmp_path, model)
    write_tokenizer(tmp_path / "t.bin", byte_tokenizer())
    (tmp_path / "reader.c").write_text(MAIN)
    reader = tmp_path / "reader"
    build = f"gcc -O1 -w -I{checkout} -o {reader} {reader}.c -lm"
    subprocess.run(build.split(), check=True)
    printed = subprocess.check_output([reader, name, tmp_path / "t.bin"], text=True)
    assert "eot 256 token A" in printed
    loss = float(printed.partition("loss ")[2].split()[0])
    ids = torch.arange(17) * 13 % 257
    expected = model.loss(ids[:-1].view(2, 8), ids[1:].view(2, 8)).item()
    assert loss == pytest.approx(expected, rel=1e-5)

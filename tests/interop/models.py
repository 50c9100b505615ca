"""Small models in which nothing can be mixed up unseen: every parameter, biases and norms too, is drawn."""

from dataclasses import replace
from pathlib import Path

import torch

from megatoken.checkpoint.save import save_state
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.interop.llmc_checkpoint import write_checkpoint
from megatoken.model.gpt import GPT, initialize
from megatoken.presets import Shape
from megatoken.train.state import build_state
from tests.tiny import CPU, tiny_run

BYTES = 257  # ids of the tokenizer of bytes: not a multiple of anything that kernels like
SHAPE = Shape(n_layer=2, n_head=2, d_model=32, d_ff=128, vocab_size=BYTES, seq_len=24)
NANOGPT = replace(SHAPE, mlp="gelu-erf")
_LLAMA = replace(
    SHAPE, n_head=4, n_kv_head=2, d_ff=96, norm="rmsnorm", norm_eps=1e-6, positions="rotary", mlp="swiglu", bias=False
)
FAMILIES = {
    "gpt2": SHAPE,
    "nanogpt": replace(NANOGPT, bias=False),
    "gpt2-untied": replace(SHAPE, tied=False, norm_eps=1e-6),
    "llama-tied": replace(_LLAMA, rope_theta=500.0, rope_factor=8.0, rope_context=12),  # scaled as LLaMA 3.1 is
    "llama-untied": replace(_LLAMA, n_kv_head=1, tied=False),
    "llama-biased": replace(_LLAMA, n_kv_head=0, bias=True),
}
# Nothing is measured first: a test of other things must not wait for it.
UNCHOSEN = [
    "machine.device=cpu",
    "machine.precision=fp32",
    "machine.linear=torch",
    "machine.attention=explicit",
    "machine.threads=1",
    "log.plots=false",
]


def draw_model(shape: Shape = SHAPE, seed: int = 0) -> GPT:
    """A model with drawn weights, and with padding rows that would win every choice if anybody looked at them."""
    model = GPT(shape)
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for weight in (model.tokens.weight, model.unembedding):
            weight[shape.vocab_size :] = 100.0
    return model.eval()


def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def save_llmc(folder: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """A model as llm.c keeps it, its tokenizer beside it: something with weights that has a name."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(folder)
    write_checkpoint(folder / "model.bin", model, "fp32")
    return folder / "model.bin"


def save_run(folder: Path, model: GPT) -> Path:
    """A checkpoint of a run that never was: the model, its shape, the tokenizer of bytes."""
    byte_tokenizer().save(folder / "tokenizer")
    (folder / "config.yaml").touch()
    state = build_state(model, tiny_run(), CPU)
    return save_state(
        folder / "checkpoints", state, config=folder / "config.yaml", tokenizer=folder / "tokenizer", meta={}
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())

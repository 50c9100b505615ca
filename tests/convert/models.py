"""Small models with random values in every parameter, including biases and norms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import yaml
from tokenizers import decoders, models, normalizers, processors

from megatoken.base.config.load import ResolvedConfig
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import flatten
from megatoken.convert.llmc import write_llmc
from megatoken.model.gpt import GPT
from megatoken.store.save import AsyncSave
from megatoken.text.chat_template import add_control_tokens, find_template
from megatoken.text.tokenizer import Tokenizer, load_tokenizer
from megatoken.train.state import TrainState, build_state
from tests.tiny_model import CPU, TINY_LLAMA, tiny_config

BYTES = 257  # ids of the byte tokenizer, not a multiple of any tile size
TINY_GPT = ModelConfig(n_layer=2, n_head=2, d_model=32, d_ff=128, vocab_size=BYTES, seq_len=24)
NANOGPT = replace(TINY_GPT, mlp="gelu-erf")
LLAMA = replace(
    TINY_LLAMA, n_layer=3, n_head=4, n_kv_head=2, vocab_size=BYTES, seq_len=24, norm_eps=1e-6
)
_TABLE = """
gpt2: {}
nanogpt: {mlp: gelu-erf, bias: false}
gpt2-untied: {tie_embeddings: false, norm_eps: 1.0e-6}
llama-tied: {rope_theta: 500.0, rope_factor: 8.0, rope_context: 12}  # scaled as LLaMA 3.1 is
llama-untied: {n_kv_head: 1, tie_embeddings: false}
llama-biased: {n_kv_head: 0, bias: true}
qwen3-tied: {qk_norm: true, rope_theta: 1.0e+6, rope_factor: 8.0, rope_context: 12}
qwen3-untied: {qk_norm: true, tie_embeddings: false, zero_init: true}
qwen3-wide:
  qk_norm: true
  head_dim: 16
  <<:
    - &windows {window: 5, window_pattern: LSS}
    - &yarn {rope_scaling: yarn, rope_factor: 4.0, rope_high: 32.0, rope_context: 400, rope_theta: 1.0e+4}
llama-attention-bias: {bias: true, bias_in: attention, head_dim: 4}
llama-mlp-bias: {bias: true, bias_in: mlp, rope_factor: 4.0, rope_scaling: linear}
llama-yarn: {<<: *yarn, rope_attention: 1.3}
llama-geglu: {mlp: geglu}
qwen2: {bias: true, bias_in: qkv}
qwen2-windows: {bias: true, bias_in: qkv, <<: *windows}
mistral: {head_dim: 16, window: 5, window_pattern: SSS}
smollm3: {nope_interval: 2, rope_theta: 2.0e+6, <<: *windows}
olmo2: {norm_position: post, qk_norm: true, qk_norm_over: width, norm_eps: 1.0e-5}
gemma3: &gemma
  head_dim: 16
  norm_position: both
  mlp: geglu
  qk_norm: true
  embedding_scale: true
  logit_softcap: 3.0
  window: 5
  window_pattern: SLS
  rope_local_theta: 100.0
gemma3-scaled:
  <<: *gemma
  window_pattern: LSS
  rope_local_theta: 1.0e+4
  rope_factor: 8.0
  rope_scaling: linear
  bias: true
  bias_in: attention
"""
FAMILIES = {
    name: replace(TINY_GPT if "gpt" in name else LLAMA, **changes)
    for name, changes in yaml.safe_load(_TABLE).items()
}


def draw_model(model_config: ModelConfig = TINY_GPT) -> GPT:
    """Return a random model whose padding rows would win every argmax if they were used."""
    model = GPT(model_config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for weight in (model.tokens.weight, model.lm_head_weight):
            weight[model_config.vocab_size :] = 100.0
    return model.eval()


def assert_same_weights(model: GPT, expected: GPT) -> None:
    """Compare weights bit for bit, those of embeddings without padding."""
    theirs = expected.state_dict()
    for name, tensor in model.state_dict().items():
        rows = BYTES if name in ("tokens.weight", "head.weight") else len(tensor)
        wanted = theirs.get(name, torch.zeros_like(tensor))  # transformers' GPT-2 has biases
        assert torch.equal(tensor[:rows], wanted[:rows]), name


def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


TEMPLATE = find_template(add_control_tokens(byte_tokenizer()))


def draw_chat_model(seq_len: int = 128, family: str = "llama-untied") -> GPT:
    size = TEMPLATE.tokenizer.vocab_size
    return draw_model(replace(FAMILIES[family], vocab_size=size, seq_len=seq_len))


def llama_tokenizer() -> Tokenizer:
    """Return a tokenizer like LLaMA's: U+2581 begins words, <s> a text; decoding drops a space."""
    special = ["<unk>", "<s>", "</s>"]
    words = ["\u2581the", "\u2581king", "\u2581their"]
    merges = {(word[:end], word[end]): 0 for word in words for end in range(1, len(word))}
    parts = [part for pair in merges for part in (*pair, "".join(pair))]
    tokens = dict.fromkeys([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *parts])
    vocabulary = {token: id for id, token in enumerate(tokens)}
    model = models.BPE(vocabulary, [*merges], unk_token="<unk>", byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    replace_spaces = normalizers.Replace(" ", "\u2581")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace_spaces])
    restore_spaces, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    steps = [restore_spaces, decoders.ByteFallback(), decoders.Fuse(), strip]
    inner.decoder = decoders.Sequence(steps)
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens(special)
    return Tokenizer(inner, "llama", 2)


def save_llmc(folder: Path, model: GPT) -> Path:
    """Write a model as llm.c's model.bin, next to its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().vocabulary.save(folder)
    write_llmc(folder / "model.bin", model, "fp32")
    return folder / "model.bin"


def save_run(folder: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Write a checkpoint as a run would."""
    return begin_save(folder, build_state(model, tiny_config(), CPU), tokenizer).finish()


def begin_save(
    folder: Path, state: TrainState, tokenizer: Tokenizer | None = None, **meta: Any
) -> AsyncSave:
    config, files = folder / "config.yaml", folder / "tokenizer"
    (tokenizer or byte_tokenizer()).vocabulary.save(files)
    config.touch()
    return AsyncSave(folder / "checkpoints", state, config=config, tokenizer=files, meta=meta)


def translated_values(resolved: ResolvedConfig) -> dict[str, str]:
    """Return the settings of a translated recipe, without those of defaults and presets."""
    origins, values = resolved.origins, flatten(resolved.config)
    own = [key for key in values if not origins[key].startswith(("default", "preset"))]
    return {key: str(values[key]) for key in own}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max())

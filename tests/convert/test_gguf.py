"""GGUF exports hold the model's values, tokens and template; llama.cpp computes the same logits."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.cli.main import main
from megatoken.convert.export import export
from megatoken.convert.gguf import GELU_TOLERANCE
from megatoken.convert.hf.export import TOLERANCE
from megatoken.convert.hf.families import choose_family
from megatoken.model.gpt import GPT
from megatoken.text.chat_template import add_control_tokens, find_template
from megatoken.text.load_pretrained import LoadedModel
from megatoken.text.tokenizer import Tokenizer
from tests.convert.models import FAMILIES, byte_tokenizer, draw_model, llama_tokenizer, save_run
from tests.tables import read_table

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {  # llama.cpp's names
    "gpt2": """
token_embd.weight transformer.wte.weight
position_embd.weight transformer.wpe.weight
blk.1.attn_norm.bias transformer.h.1.ln_1.bias
blk.1.attn_qkv.weight transformer.h.1.attn.c_attn.weight
blk.0.ffn_down.weight transformer.h.0.mlp.c_proj.weight
output_norm.weight transformer.ln_f.weight
""",
    "llama": """
blk.0.attn_v.weight model.layers.0.self_attn.v_proj.weight
blk.1.attn_output.weight model.layers.1.self_attn.o_proj.weight
blk.1.ffn_gate.weight model.layers.1.mlp.gate_proj.weight
blk.1.ffn_norm.weight model.layers.1.post_attention_layernorm.weight
""",
    "qwen3": """
blk.0.attn_q.weight model.layers.0.self_attn.q_proj.weight
blk.0.attn_k_norm.weight model.layers.0.self_attn.k_norm.weight
output.weight lm_head.weight
""",
    "gemma3_text": """
blk.1.attn_norm.weight model.layers.1.input_layernorm.weight
blk.1.post_attention_norm.weight model.layers.1.post_attention_layernorm.weight
blk.1.ffn_norm.weight model.layers.1.pre_feedforward_layernorm.weight
blk.1.post_ffw_norm.weight model.layers.1.post_feedforward_layernorm.weight
""",
}


# Models that llama.cpp lacks, and relatives that it has.
LACKING = (
    *("nanogpt", "llama-geglu"),  # activations
    *("qwen3-tied", "gemma3-scaled"),  # LLaMA 3's rotary scaling, biases
    *("mistral", "qwen2-windows", "qwen3-wide", "smollm3"),  # windows
    "olmo2",  # tied
)
RELATIVES = {
    "qwen3-yarn": replace(FAMILIES["qwen3-wide"], window=0),
    "smollm3-4": replace(FAMILIES["smollm3"], window=0, nope_interval=4, n_layer=5),
    "olmo2-untied": replace(FAMILIES["olmo2"], tie_embeddings=False),
    "gemma3-linear": replace(FAMILIES["gemma3-scaled"], bias=False),
}
SUPPORTED = {name: FAMILIES[name] for name in FAMILIES if name not in LACKING} | RELATIVES


def write(
    folder: Path, model: GPT, tokenizer: Tokenizer | None = None, dtype: str = "fp32"
) -> dict[str, Any]:
    loaded = LoadedModel(model, tokenizer or byte_tokenizer(), "it")
    return export(loaded, "gguf", folder / "out", dtype)


def list_tensors(file: Path) -> list[Any]:
    return list(gguf.GGUFReader(file).tensors)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors = list_tensors(folder / "out/model.gguf")
    return {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in tensors}


def read_fields(folder: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(folder / "out/model.gguf").fields
    return {name: field.contents() for name, field in fields.items()}


@pytest.mark.parametrize("family", ["gpt2", "llama-untied", "llama-tied", "qwen3-untied", "gemma3"])
def test_tensors_read_back(family: str, tmp_path: Path):
    model = draw_model(FAMILIES[family])
    write(tmp_path, model)
    written = read_tensors(tmp_path)
    kind = choose_family(model.config)
    views = kind.view_params(dict(model.named_parameters()), model.config)
    for name, hf_name in read_table(NAMES[kind.model_type]).items():
        is_transposed = hf_name.endswith(("c_attn.weight", "c_proj.weight"))
        view = views[hf_name].T if is_transposed else views[hf_name]
        assert np.array_equal(written[name], view.numpy()), name
    assert len(written) == len(views) + (model.config.rope_factor != 1)


def test_pairs_of_query_channels_become_neighbors(tmp_path: Path):
    """In one file, which the command writes."""
    model = draw_model(FAMILIES["llama-tied"])
    save_run(tmp_path / "run", model)
    words = f"export {tmp_path}/run --to gguf --quantize f16 --out {tmp_path}/it.gguf"
    assert main(words.split()) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "it.gguf"}
    written = {each.name: each.data for each in list_tensors(tmp_path / "it.gguf")}
    q, k, _ = model.blocks[0].attention.qkv.weight.detach().half().split(model.config.qkv_rows)
    order = [head * 8 + channel for head in range(4) for channel in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert np.array_equal(written["blk.0.attn_q.weight"], q[order].numpy())
    assert np.array_equal(written["blk.0.attn_k.weight"], k[order[:16]].numpy())
    # Turns of each pair within rope_context, 12 tokens: slower than once divides by the factor, 8.
    assert written["rope_freqs.weight"][-1] == 8
    assert 1 < written["rope_freqs.weight"][0] < 8


LLAMA_FIELDS = """
general.architecture llama
general.file_type 0
llama.context_length 24
llama.embedding_length 32
llama.block_count 3
llama.feed_forward_length 96
llama.attention.head_count 4
llama.attention.head_count_kv 1
llama.attention.key_length 8
llama.attention.layer_norm_rms_epsilon 9.999999974752427e-07
llama.rope.freq_base 100.0
llama.vocab_size 257
tokenizer.ggml.model gpt2
tokenizer.ggml.pre gpt-2
tokenizer.ggml.eos_token_id 256
tokenizer.ggml.add_bos_token False
"""
GEMMA_FIELDS = """
general.architecture gemma3
gemma3.attention.sliding_window 5
gemma3.attention.sliding_window_pattern [False, True, True]
gemma3.rope.freq_base_swa 10000.0
gemma3.rope.scaling.type linear
gemma3.rope.scaling.factor 8.0
gemma3.final_logit_softcapping 3.0
"""


@pytest.mark.parametrize(
    ("model_config", "table"),
    [(FAMILIES["llama-untied"], LLAMA_FIELDS), (RELATIVES["gemma3-linear"], GEMMA_FIELDS)],
)
def test_metadata(model_config: ModelConfig, table: str, tmp_path: Path):
    write(tmp_path, draw_model(model_config))
    fields, expected = read_fields(tmp_path), read_table(table)
    assert {name: str(fields[name]) for name in expected} == expected
    assert fields["tokenizer.ggml.tokens"][ord(" ")] == "Ġ"
    assert "tokenizer.chat_template" not in fields


def test_a_chat_model_has_its_template_and_ends(tmp_path: Path):
    tokenizer = add_control_tokens(byte_tokenizer())
    template = find_template(tokenizer)
    write(tmp_path, draw_model(replace(FAMILIES["gpt2"], vocab_size=259)), tokenizer)
    fields = read_fields(tmp_path)
    ends = [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")]
    assert ends == [*template.stop_ids] == [258, 256]
    assert [*fields["tokenizer.ggml.token_type"][-3:]] == [gguf.TokenType.CONTROL] * 3
    unmarked = re.sub("{% (end)?generation %}", "", template.jinja)
    assert fields["tokenizer.chat_template"] == unmarked
    modelfile = (tmp_path / "out/Modelfile").read_text()
    assert modelfile.startswith("FROM ./model.gguf\nTEMPLATE")
    assert re.findall("^PARAMETER (.*)$", modelfile, re.M) == [
        'stop "<|im_end|>"',
        'stop "<|endoftext|>"',
    ]


def test_a_sentencepiece_vocabulary_has_scores_in_the_order_of_merges(tmp_path: Path):
    tokenizer = llama_tokenizer()
    model = draw_model(replace(FAMILIES["llama-untied"], vocab_size=tokenizer.vocab_size))
    write(tmp_path, model, tokenizer)
    fields = read_fields(tmp_path)
    names = ("model", "add_space_prefix", "add_bos_token", "bos_token_id")
    assert [fields[f"tokenizer.ggml.{name}"] for name in names] == ["llama", True, True, 1]
    scores, types = (
        dict(zip(fields["tokenizer.ggml.tokens"], fields[f"tokenizer.ggml.{name}"], strict=True))
        for name in ("scores", "token_type")
    )
    assert [scores[token] for token in ("▁t", "▁th", "▁the", "▁k")] == [0, -1, -2, -3]
    assert (types["<unk>"], types["<s>"], types["<0x0A>"], types["▁the"]) == (2, 3, 6, 1)


@pytest.mark.parametrize(
    ("dtype", "error"), [("fp16", 1e-3), ("bf16", 1e-2), ("q8_0", 1e-2), ("q4_0", 0.15)]
)
def test_quantization(dtype: str, error: float, tmp_path: Path):
    model = draw_model(FAMILIES["qwen3-untied"])
    write(tmp_path, model, dtype=dtype)
    tensors = list_tensors(tmp_path / "out/model.gguf")
    types = {each.name: each.tensor_type.name for each in tensors}
    assert types["blk.0.attn_v.weight"] == {"fp16": "F16"}.get(dtype, dtype.upper())
    assert types["blk.0.attn_norm.weight"] == "F32"
    expected = model.blocks[0].mlp.up.weight.detach().numpy()
    found = read_tensors(tmp_path)["blk.0.ffn_up.weight"]
    assert 0 < np.abs(found - expected).max() < error * np.abs(expected).max()


def with_splitter(splitter: Any, **model: Any) -> Tokenizer:
    content = json.loads(byte_tokenizer().to_json())
    content["model"] |= model
    inner = tokenizers.Tokenizer.from_str(json.dumps(content))
    inner.pre_tokenizer = splitter
    return Tokenizer(inner, "it", 256)


def published_splitter(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior, invert=invert)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


# Patterns in the tokenizer.json of published models.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = {
    "llama-bpe": (published_splitter(CL100K), {"ignore_merges": True}),
    "dbrx": (published_splitter(CL100K, "removed", invert=True), {}),
    "qwen2": (published_splitter(CL100K.replace("{1,3}", "")), {}),
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
        {},
    ),
}


def test_the_pre_tokenizer_is_recognized_or_refused(tmp_path: Path):
    model = draw_model(FAMILIES["gpt2"])
    for name, (splitter, options) in SPLITTERS.items():
        write(tmp_path / name, model, with_splitter(splitter, **options))
        assert read_fields(tmp_path / name)["tokenizer.ggml.pre"] == name
    tokenizer = with_splitter(published_splitter(CL100K.replace("{1,3}", "{1,2}")))
    with pytest.raises(ConfigError):
        write(tmp_path, model, tokenizer)


def test_what_llama_cpp_lacks_is_refused(tmp_path: Path):
    for family in LACKING:
        with pytest.raises(ConfigError):
            write(tmp_path, draw_model(FAMILIES[family]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", SUPPORTED)
def test_llama_cpp_has_the_same_logits(family: str, tmp_path: Path):
    pytest.importorskip("llama_cpp")
    config = replace(SUPPORTED[family], seq_len=64)
    answer = write(tmp_path, draw_model(config))
    tolerance = GELU_TOLERANCE if config.mlp in ("gelu", "geglu") else TOLERANCE
    assert answer["max_relative_difference"] <= tolerance


def test_llama_cpp_has_the_same_ids(tmp_path: Path):
    pytest.importorskip("llama_cpp")
    for tokenizer in (byte_tokenizer(), llama_tokenizer(), add_control_tokens(byte_tokenizer())):
        config = replace(FAMILIES["llama-untied"], vocab_size=tokenizer.vocab_size)
        assert write(tmp_path / tokenizer.name, draw_model(config), tokenizer)["verified"]
    answer = write(tmp_path, draw_model(config), tokenizer, "q8_0")
    assert TOLERANCE < answer["max_relative_difference"] < 0.1


def test_wrong_logits_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr("megatoken.convert.gguf.ROTATE_NEIGHBORS", ())
    with pytest.raises(CheckpointError):
        write(tmp_path, draw_model(FAMILIES["llama-untied"]))
    assert list(tmp_path.iterdir()) == []

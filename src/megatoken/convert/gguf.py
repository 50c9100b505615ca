"""Write a model and its tokenizer as a GGUF file, and compare llama.cpp's logits with megatoken's.

The `gguf` package supplies the keys, the tensor names and the quantization.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError, ConfigError, import_extra
from megatoken.base.system.table import read_table
from megatoken.convert.hf.chat_files import GGUF, describe_gguf
from megatoken.convert.hf.export import (
    CHECK_TEXT,
    TOLERANCE,
    compute_check_logits,
    measure_difference,
    named_views,
)
from megatoken.convert.hf.families import choose_family
from megatoken.model.gpt import GPT
from megatoken.model.rope import rope_inv_freq
from megatoken.text.byte_bpe import EOT, split_merge
from megatoken.text.chat_template import drop_generation_tags, find_stop_ids, template_of
from megatoken.text.tokenizer import Tokenizer

GELU_TOLERANCE = 5e-3  # llama.cpp's GELU is a table of fp16 values
TABLE = read_table(__file__)
ROTATE_NEIGHBORS = ("llama", "smollm3")  # whose rotary pairs are channels 2i and 2i + 1
FIX = "use --to hf"
F32 = 0  # of ggml's types; llama.cpp caches keys and values in fp16 by default
SPACE = "\u2581"
PROBE = "'tis I'LL we've 12345 x=y+z9;  naïve camelCase\n\n \t—東京/\n 'S\r\n (a)!!\n  "


def write_gguf(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> None:
    """Write a GGUF file with the weights, the tokenizer and the chat template.

    A chat model also gets ollama's Modelfile and a README. dtype: of the matrices, fp32, fp16, bf16
    or a quantization of `gguf.quants`; norms, biases and learned positions stay fp32, and rows that
    do not divide into a quantization's blocks become fp16. Raises ConfigError for an architecture
    or a tokenizer that llama.cpp does not support, and if `gguf` is not installed.
    """
    gguf = import_extra("gguf", "gguf")
    model_type = choose_family(model.config).model_type
    supported = TABLE["architectures"][model_type]
    name = supported["name"]
    for feature, value in _list_features(model.config).items():
        if value not in supported[feature]:
            what = f"llama.cpp has no {model_type} with {feature}={value}"
            raise ConfigError(what, "--to gguf", FIX)
    kinds = gguf.GGMLQuantizationType
    kind = kinds[dtype.upper().replace("FP", "F")]
    writer = gguf.GGUFWriter(folder / GGUF, name)
    _write_metadata(writer, model.config)
    file_type = "ALL_F32" if dtype == "fp32" else f"MOSTLY_{kind.name}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write_tokenizer(writer, tokenizer, gguf.TokenType)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], model.config.n_layer)
    for hf_name, tensor in _list_tensors(model, name):
        stored = kinds.F32
        if tensor.ndim > 1 and "wpe" not in hf_name:
            has_blocks = tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            stored = kind if has_blocks else kinds.F16
        values = gguf.quants.quantize(tensor.float().contiguous().numpy(), stored)
        writer.add_tensor(names.get_name(hf_name, (".weight", ".bias")), values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    template = template_of(tokenizer)
    for file, text in describe_gguf(template).items() if template else ():
        (folder / file).write_text(text, encoding="utf-8")


def _list_features(config: ModelConfig) -> dict[str, Any]:
    """Return the features of a model that not all of llama.cpp's architectures support."""
    scaling: str | None = config.rope_scaling if config.rope_factor != 1 else None
    if scaling == "yarn" and (config.rope_low, config.rope_high) != (1, 32):
        scaling = "yarn, but between other turns than 1 and 32"
    return {
        "mlp": config.mlp,
        "bias": config.bias,
        "tie_embeddings": config.tie_embeddings,
        "window": 0 < config.window < config.seq_len,
        "rope_scaling": scaling,
        "nope_interval": config.nope_interval,
    }


def _write_metadata(writer: Any, config: ModelConfig) -> None:
    for key, field in TABLE["metadata"].items():
        getattr(writer, f"add_{key}")(getattr(config, field))
    if config.rope_factor != 1 and config.rope_scaling != "llama3":
        writer.add_string(f"{writer.arch}.rope.scaling.type", config.rope_scaling)
        writer.add_rope_scaling_factor(config.rope_factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope_context)
        if config.rope_attention:  # llama.cpp multiplies by YaRN's own factor
            own = 1 + 0.1 * math.log(config.rope_factor)
            writer.add_rope_scaling_attn_factors(config.rope_attention / own)
    if config.window:
        writer.add_sliding_window(config.window)
        writer.add_sliding_window_pattern([window > 0 for window in config.windows])
        writer.add_rope_freq_base_swa(config.rope_local_theta or config.rope_theta)
    if config.logit_softcap:
        writer.add_final_logit_softcapping(config.logit_softcap)


def _list_tensors(model: GPT, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its name in transformers. name: llama.cpp's architecture."""
    config = model.config
    family = replace(choose_family(config), conv1d=())
    for hf_name, view in named_views(model, family).items():
        if name in ROTATE_NEIGHBORS and re.search(r"\.[qk]_proj\.", hf_name):
            halves = view.reshape(-1, 2, config.d_head // 2, *view.shape[1:])
            yield hf_name, halves.transpose(1, 2).flatten(0, 2)
        else:
            yield hf_name, view
    if config.rope_factor != 1 and config.rope_scaling == "llama3":
        cpu = torch.device("cpu")
        unscaled = rope_inv_freq(replace(config, rope_factor=1.0), cpu)
        yield "rope_freqs.weight", unscaled / rope_inv_freq(config, cpu)


def _write_tokenizer(writer: Any, tokenizer: Tokenizer, kinds: Any) -> None:
    """Write tokens, merges or scores, special ids and the chat template."""
    content = json.loads(tokenizer.to_json())
    model = content["model"]
    is_spm = bool(model.get("byte_fallback"))  # LLaMA 2, Gemma
    words = _split_words(tokenizer)
    writer.add_tokenizer_pre(_find_pre_tokenizer(words, model, tokenizer.name))
    tokens = [f"[PAD{id}]" for id in range(tokenizer.vocab_size)]
    types = [kinds.UNUSED] * len(tokens)
    for token, id in model["vocab"].items():
        is_byte = is_spm and re.fullmatch("<0x..>", token)
        tokens[id], types[id] = token, kinds.BYTE if is_byte else kinds.NORMAL
    for added in content["added_tokens"]:
        id, token = added["id"], added["content"]
        tokens[id], types[id] = token, kinds.CONTROL if added["special"] else kinds.USER_DEFINED
        if is_spm and token == model["unk_token"]:
            types[id] = kinds.UNKNOWN
            writer.add_unk_token_id(id)
    writer.add_tokenizer_model("llama" if is_spm else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [split_merge(merge) for merge in model["merges"]]
    if is_spm:
        ranks = {left + right: -rank for rank, (left, right) in reversed([*enumerate(merges)])}
        writer.add_token_scores([float(ranks.get(token, 0)) for token in tokens])
        writer.add_add_space_prefix(words[0].startswith(SPACE))
    else:
        # llama.cpp requires a merge; this one never applies.
        writer.add_token_merges([" ".join(merge) for merge in merges or [(EOT, EOT)]])
    writer.add_add_bos_token(bool(tokenizer.bos_ids))
    ids = {"pad": tokenizer.eot, "bos": tokenizer.bos}
    ids |= zip(("eos", "eot", "eom"), find_stop_ids(tokenizer), strict=False)
    for kind, id in ids.items():
        getattr(writer, f"add_{kind}_token_id")(id)
    template = template_of(tokenizer)
    if template:
        texts = tokenizer.templates or {"default": drop_generation_tags(template)}
        rows = [{"name": name, "template": text} for name, text in texts.items()]
        writer.add_chat_template(rows)


def _split_words(tokenizer: Tokenizer) -> list[str]:
    """Return PROBE as the vocabulary sees it: normalized and split into words."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    text = inner.normalizer.normalize_str(PROBE) if inner.normalizer else PROBE
    split = inner.pre_tokenizer
    return [word for word, _ in split.pre_tokenize_str(text)] if split else [text]


def _find_pre_tokenizer(words: list[str], model: dict[str, Any], name: str) -> str:
    """Return llama.cpp's name for how a tokenizer splits PROBE into words.

    model: this section of the tokenizer.json. name: the tokenizer's, for the error. Raises
    ConfigError if llama.cpp has no such tokenizer.
    """
    spaced = PROBE.replace(" ", SPACE)
    is_bpe = model["type"] == "BPE"
    if is_bpe and model["byte_fallback"] and "".join(words) in (spaced, SPACE + spaced):
        return "default"
    for pre, row in TABLE["pre_tokenizers"].items():
        splits = [Split(Regex(pattern), "isolated") for pattern in row["patterns"]]
        split = Sequence([*splits, ByteLevel(False, use_regex=False)])
        is_same = words == [word for word, _ in split.pre_tokenize_str(PROBE)]
        if is_same and is_bpe and row["skips_merges"] == model["ignore_merges"]:
            return str(pre)
    what = f"llama.cpp does not support the normalizer or pre-tokenizer of {name} ({model['type']})"
    raise ConfigError(what, "--to gguf", FIX)


def compare_llama(path: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> float | None:
    """Return the largest difference between llama.cpp's logits and megatoken's.

    The difference is relative to the largest logit; it is None if llama-cpp-python is not
    installed. Raises CheckpointError if llama.cpp cannot load the file or gives other token ids,
    and for fp32 if the difference exceeds TOLERANCE, or GELU_TOLERANCE in a model with a GELU.
    """
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    ids, logits = compute_check_logits(model)
    count = ids.shape[1]
    options = {"n_ctx": count, "logits_all": True, "type_k": F32, "type_v": F32, "verbose": False}
    try:
        llama = Llama(str(path), **options)
    except ValueError as error:
        raise CheckpointError(f"llama.cpp cannot load the export: {error}", path, FIX) from error
    llama.eval(ids[0].tolist())
    difference = measure_difference(torch.from_numpy(llama.scores[:count]), logits[0])
    tolerance = GELU_TOLERANCE if model.config.mlp in ("gelu", "geglu") else TOLERANCE
    is_equal = difference <= tolerance or dtype != "fp32"
    for text in (CHECK_TEXT, PROBE):
        found_ids = llama.tokenize(text.encode(), add_bos=False)
        is_equal &= found_ids == tokenizer.encode(text).tolist()
    if not is_equal:
        what = f"llama.cpp has other token ids, or logits that differ by {difference:.1e}"
        raise CheckpointError(what, path, "report this bug")
    return difference

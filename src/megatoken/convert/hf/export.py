"""Write a model as a transformers folder, and compare transformers' logits with megatoken's."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatoken.base.errors import CheckpointError, DataError
from megatoken.convert.hf.chat_files import describe_chat
from megatoken.convert.hf.families import Family, choose_family
from megatoken.convert.hf.load import CONFIG, WEIGHTS
from megatoken.model.gpt import GPT, INIT_STD
from megatoken.text.chat_template import Message, drop_generation_tags, find_stop_ids, template_of
from megatoken.text.tokenizer import CHAT_FILES, TOKEN_IDS, TOKENIZER_CONFIG, Tokenizer

TOLERANCE = 2e-5  # as a share of the largest logit; the order of fp32 sums differs
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECK_SEQS = 2
CHECK_TOKENS = 64
CHECK_CHAT = tuple(
    Message(role, f"{role}: ja, 3 tokens — or\nfour.")
    for role in ("system", "user", "assistant", "user")
)
CHECK_TEXT = "Two tokenizers\nmust agree, même là où il y a 3 accents — and spaces.  "


def write_hf(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files.

    A chat model also gets its chat template and a README. If the template is the model's own, the
    files that hold it and its special tokens are written unchanged. The weights are written in
    `dtype` (fp32 or bf16) without the rows that pad the vocabulary. The model's weights are rounded
    like those in the file. Raises ConfigError for an architecture that transformers lacks.
    """
    family = choose_family(model.config)
    torch_dtype = DTYPES[dtype]
    tensors = {}
    for name, view in named_views(model, family).items():
        offset = family.get_norm_offset(name)
        tensor = (view - offset).to(torch_dtype)
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        view.copy_(tensor).add_(offset)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    stop_ids = list(find_stop_ids(tokenizer))
    special_ids = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0],
    }
    eot = tokenizer.decode([tokenizer.eot])
    bos = tokenizer.decode([tokenizer.bos])
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"eos_token": eot, "unk_token": eot, **tokenizer.named_tokens, "bos_token": bos},
        "model_max_length": model.config.seq_len,
        "clean_up_tokenization_spaces": False,
    }
    template = template_of(tokenizer)
    if template:
        if template.stop_ids[0] in stop_ids:
            tokenizer_config["eos_token"] = tokenizer.decode(template.stop_ids[:1])
        tokenizer_config.setdefault("pad_token", eot)
        tokenizer_config["chat_template"] = drop_generation_tags(template)
    contents: dict[str, dict[str, Any]] = {
        CONFIG: {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **family.write_config(model.config),
            **special_ids,
            "initializer_range": INIT_STD,
            "use_cache": True,
            "dtype": str(torch_dtype).removeprefix("torch."),
        },
        TOKEN_IDS: {**special_ids, "pad_token_id": tokenizer.eot},
        TOKENIZER_CONFIG: tokenizer_config,
    }
    files = {
        name: json.dumps(row, indent=2, ensure_ascii=False) + "\n" for name, row in contents.items()
    }
    if tokenizer.templates:
        files |= {name: text for name, text in tokenizer.files.items() if name in CHAT_FILES}
    files |= describe_chat(template) if template else {}
    for name, text in (files | {"tokenizer.json": tokenizer.to_json()}).items():
        (folder / name).write_bytes(text.encode())
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors makes the file private


def named_views(model: GPT, family: Family) -> dict[str, torch.Tensor]:
    """Return views of the parameters, by the names that transformers uses.

    transformers' GPT-2 requires biases, so missing ones are zeros.
    """
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    if family.model_type == "gpt2" and not model.config.bias:
        with torch.device("meta"):
            biased = GPT(replace(model.config, bias=True))
        for name, param in biased.named_parameters():
            params.setdefault(name, torch.zeros(param.shape))
    return family.view_params(params, model.config)


@torch.no_grad()
def compute_check_logits(model: GPT) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (CHECK_SEQS, CHECK_TOKENS), and the logits that an export should give.

    The sequences are shorter if the model's context is.
    """
    shape = (CHECK_SEQS, min(model.config.seq_len, CHECK_TOKENS))
    ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return ids, model.eval().logits(ids)


def measure_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest expected logit."""
    return float((logits - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


@torch.no_grad()
def compare_logits(folder: Path, model: GPT, tokenizer: Tokenizer) -> float | None:
    """Return the largest difference between transformers' fp32 logits and megatoken's.

    The difference is relative to the largest logit; it is None if transformers is not installed.
    Raises CheckpointError if transformers cannot load the folder, if the difference exceeds
    TOLERANCE, or if the tokenizers give different ids.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        return None
    logging.disable_progress_bar()
    try:
        hf_model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        hf_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        what = f"transformers cannot load the export: {error}"
        raise CheckpointError(what, folder, "update transformers") from error
    ids, logits = compute_check_logits(model)
    difference = measure_difference(hf_model(ids).logits, logits)
    hf_ids = hf_tokenizer(CHECK_TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    is_equal = difference <= TOLERANCE and hf_ids == tokenizer.encode(CHECK_TEXT).tolist()
    template = template_of(tokenizer)
    if template:
        try:
            chat, expected = CHECK_CHAT, template.encode(CHECK_CHAT, reply=True)[0]
        except DataError:  # some templates have no system message
            chat, expected = CHECK_CHAT[1:], template.encode(CHECK_CHAT[1:], reply=True)[0]
        rows = [{"role": message.role, "content": message.content} for message in chat]
        hf_ids = hf_tokenizer.apply_chat_template(
            rows, add_generation_prompt=True, return_dict=False
        )
        is_equal &= hf_ids == expected
    if not is_equal:
        what = f"transformers has other token ids, or logits that differ by {difference:.1e}"
        raise CheckpointError(what, folder, "report this bug")
    return difference

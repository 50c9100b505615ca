"""Writes a model as a folder of transformers, and compares its logits there with ours."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatoken.convert.hf.chat_files import describe_chat, drop_marks
from megatoken.convert.hf.families import choose_family
from megatoken.convert.hf.load import CONFIG, WEIGHTS
from megatoken.data.chat_template import Message, find_stop_ids, template_of
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import CheckpointError
from megatoken.model.gpt import GPT, INIT_STD

TOLERANCE = 2e-5  # of the largest logit: fp32 products in another order
CHECK_SEQS, CHECK_TOKENS = 2, 64
CHECK_CHAT = tuple(
    Message(role, f"{role}: ja, 3 tokens — or\nfour.")
    for role in ("system", "user", "assistant", "user")
)
CHECK_TEXT = "Two tokenizers\nmust agree, même là où il y a 3 accents — and spaces.  "


def write_hf(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> None:
    """Write config.json, generation_config.json, model.safetensors (without padding rows) and the tokenizer's files.

    With a chat template also that, its stop tokens as ends of text, ollama's Modelfile and a README. dtype: of the
    weights, fp32 or bf16. Raises ConfigError for an architecture that no model of transformers has.
    """
    family = choose_family(model.config)
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    if family.model_type == "gpt2":  # it always has biases
        with torch.device("meta"):
            biased = GPT(replace(model.config, bias=True))
        params = {
            name: params.get(name, torch.zeros(param.shape))
            for name, param in biased.named_parameters()
        }
    views = family.view_params(params, model.config)
    tensors = {
        name: view.to(torch_dtype).clone(memory_format=torch.contiguous_format)
        for name, view in views.items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    bos = next(
        iter(tokenizer.bos_ids), tokenizer.eot
    )  # end-of-text separates documents: it begins and ends them
    template = template_of(tokenizer)
    ends = find_stop_ids(tokenizer)
    special_ids: dict[str, Any] = {
        "bos_token_id": bos,
        "eos_token_id": list(ends) if len(ends) > 1 else ends[0],
    }
    special_tokens = dict.fromkeys(
        ("bos_token", "eos_token", "unk_token"), tokenizer.decode([tokenizer.eot])
    )
    special_tokens["bos_token"] = tokenizer.decode([bos])
    if template:
        special_tokens["eos_token"] = tokenizer.decode(template.stop_ids[:1])
        special_tokens["pad_token"] = tokenizer.decode([tokenizer.eot])
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
        "generation_config.json": {**special_ids, "pad_token_id": tokenizer.eot},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special_tokens,
            "model_max_length": model.config.seq_len,
            "clean_up_tokenization_spaces": False,
            **({"chat_template": drop_marks(template)} if template else {}),
        },
        "special_tokens_map.json": special_tokens,
    }
    for name, content in contents.items():
        (folder / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    for name, text in describe_chat(template, family.model_type).items() if template else ():
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copymode(
        folder / CONFIG, folder / WEIGHTS
    )  # safetensors makes it readable by the owner only


def compare_logits(folder: Path, model: GPT, tokenizer: Tokenizer) -> float | None:
    """The largest difference between logits in transformers and ours, as a share of the largest logit.

    Both compute in fp32 on the same random ids. None when transformers is not installed. Raises CheckpointError when
    it cannot load the folder, when the difference exceeds TOLERANCE, or when the tokenizers differ.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
        from transformers.utils import logging
    except ImportError:
        return None
    logging.disable_progress_bar()
    try:
        exported = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        hf_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (
        OSError,
        ValueError,
    ) as error:  # its words for files and architectures that it does not take
        what = f"transformers {__version__} cannot load what was written: {' '.join(str(error).split()):.200}"
        raise CheckpointError(
            what, str(folder), "nothing is kept: update transformers and export again"
        ) from error
    shape = (CHECK_SEQS, min(model.config.seq_len, CHECK_TOKENS))
    ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = model.eval().logits(ids), exported(ids).logits
    fix = "this is a bug of the export, nothing was written: report it"
    largest = float(expected.abs().max()) or 1.0  # 0 where all logits are
    difference = float((found - expected).abs().max()) / largest
    if not difference <= TOLERANCE:
        what = f"logits differ in transformers by {difference:.1e} of the largest, more than {TOLERANCE:.0e}"
        raise CheckpointError(what, str(folder), fix)
    found_ids = hf_tokenizer(CHECK_TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    if found_ids != tokenizer.encode(CHECK_TEXT).tolist():
        raise CheckpointError("transformers tokenizes a text differently", str(folder), fix)
    if template := template_of(tokenizer):
        rows = [{"role": message.role, "content": message.content} for message in CHECK_CHAT]
        found_ids = hf_tokenizer.apply_chat_template(
            rows, add_generation_prompt=True, return_dict=False
        )
        if found_ids != template.encode(CHECK_CHAT, reply=True)[0]:
            raise CheckpointError(
                "transformers writes a conversation differently", str(folder), fix
            )
    return difference

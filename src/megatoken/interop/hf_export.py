"""A model into a folder that Hugging Face's transformers loads as its own, and the proof that it computes the same.

In: a model and its tokenizer. Out: config.json, generation_config.json, model.safetensors and the tokenizer's files.
Only ids that mean something leave: the rows that pad the vocabulary stay here. Absent: choosing, renaming (export.py).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import Exit, Fault
from megatoken.interop.hf import CONFIG, WEIGHTS
from megatoken.interop.hf_families import family_of
from megatoken.model.gpt import GPT, INIT_STD

TOLERANCE = 2e-5  # of the largest logit: fp32 products in another order
PROOF_SEQS, PROOF_TOKENS = 2, 64


def write_hf(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> None:
    """Fill a folder with a model and its tokenizer. dtype: of the weights, fp32 or bf16.

    Raises Fault(CONFIG) for a mix of switches that no model of transformers has.
    """
    family = family_of(model.shape)
    word, kind = {"fp32": ("float32", torch.float32), "bf16": ("bfloat16", torch.bfloat16)}[dtype]
    parameters = dict(model.named_parameters())
    tensors = {name: place.take(parameters).to(kind) for name, place in family.list_places(model.shape).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eot)  # what stands between documents begins a text
    texts: dict[str, Any] = {
        CONFIG: {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **family.write(model.shape),
            **ids,
            "initializer_range": INIT_STD,
            "use_cache": True,
            "dtype": word,
        },
        "generation_config.json": {**ids, "pad_token_id": tokenizer.eot},
        **describe_tokenizer(tokenizer, model.shape.seq_len),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors lets nobody else read


def describe_tokenizer(tokenizer: Tokenizer, seq_len: int) -> dict[str, Any]:
    """How transformers is to call the tokenizer that tokenizer.json holds: the content of two files by name."""
    eot = tokenizer.decode([tokenizer.eot])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eot,
        "eos_token": eot,
        "unk_token": eot,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer_config.json": config,
        "special_tokens_map.json": dict.fromkeys(("bos_token", "eos_token", "unk_token"), eot),
    }


def prove_equal(folder: Path, model: GPT, tokenizer: Tokenizer) -> float | None:
    """The largest difference of logits, as a share of the largest logit, between the folder in transformers and ours.

    Both compute in fp32 on the same ids, drawn evenly over the vocabulary. None where transformers is not installed.
    Raises Fault(CHECKPOINT) when the two differ, or when their tokenizers do.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        return None
    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    shape = model.shape
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (PROOF_SEQS, min(shape.seq_len, PROOF_TOKENS)), generator=draw)
    was_training = model.training
    with torch.inference_mode():
        expected = model.eval().logits(model(ids))
        found = theirs(ids).logits
    model.train(was_training)
    again = "this is a fault of the export, nothing was written: report it"
    if found.shape != expected.shape:
        what = f"transformers gives logits of {tuple(found.shape)}, we of {tuple(expected.shape)}"
        raise Fault(Exit.CHECKPOINT, what, str(folder), again)
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        what = f"logits differ in transformers by {difference:.1e} of the largest, more than {TOLERANCE:.0e}"
        raise Fault(Exit.CHECKPOINT, what, str(folder), again)
    text = "Two tokenizers\nmust agree, même là où il y a 3 accents — and spaces.  "
    again_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if again_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] != tokenizer.encode(text).tolist():
        raise Fault(Exit.CHECKPOINT, "transformers tokenizes a text differently", str(folder), again)
    return difference

"""A plain scorer to test against (every choice by itself, full logits, as the rules are written), and small models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatoken.config.model_config import ModelConfig
from megatoken.data.tokenizer import Tokenizer
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.eval.tasks import Example, Prompt
from megatoken.model.gpt import GPT
from megatoken.system.device import Device

CPU = Device(
    torch_device=torch.device("cpu"),
    name="cpu",
    precision="fp32",
    peak_flops=0.0,
    peak_source="unknown",
)
SINGLE = Comm(DistEnv())


def make_model(vocab_size: int = 257, seq_len: int = 256, n_layer: int = 2, **fields: Any) -> GPT:
    """A model with weights large enough that choices differ clearly."""
    config = ModelConfig(
        n_layer=n_layer,
        n_head=2,
        d_model=16,
        d_ff=32,
        vocab_size=vocab_size,
        seq_len=seq_len,
        **fields,
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    return model


def harness_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """lm-evaluation-harness: trailing spaces move to the continuation, which is what the context's ids leave over."""
    context, continuation = prompt
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation, context = context[-spaces:] + continuation, context[:-spaces]
    ids, prefix = (
        tokenizer.encode(context + continuation).tolist(),
        tokenizer.encode(context).tolist(),
    )
    return prefix, ids[len(prefix) :]


def separate_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """build-nanogpt, llm.c: context and ending tokenized separately."""
    return tokenizer.encode(prompt[0]).tolist(), tokenizer.encode(prompt[1]).tolist()


@torch.no_grad()
def log_probabilities(model: GPT, context: list[int], continuation: list[int]) -> torch.Tensor:
    """Of each id of the continuation, in fp32."""
    ids = torch.tensor((context + continuation)[-(model.config.seq_len + 1) :])
    log_p = torch.log_softmax(model.logits(ids[None, :-1])[0].float(), -1)
    return log_p[-len(continuation) :].gather(1, ids[-len(continuation) :, None])[:, 0]


def predict(model: GPT, tokenizer: Tokenizer, example: Example) -> tuple[int, int, int]:
    """Predictions by sum, by sum per character, and by mean per token of the raw text."""
    model.eval()
    sums = np.array(
        [float(log_probabilities(model, *harness_ids(p, tokenizer)).sum()) for p in example.prompts]
    )
    raw = [
        log_probabilities(model, *separate_ids(prompt, tokenizer)) for prompt in example.raw_prompts
    ]
    means = [float(-log_p.mean()) for log_p in raw]
    return (
        int(sums.argmax()),
        int((sums / np.array(example.lengths)).argmax()),
        int(np.argmin(means)),
    )


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path

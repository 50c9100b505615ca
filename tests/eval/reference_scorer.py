"""Small models, and a reference scorer that computes every choice by itself from full logits."""

from typing import Any

import numpy as np
import torch

from megatoken.config.model_config import ModelConfig
from megatoken.data.tokenizer import Tokenizer
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.eval.tasks import Example, Prompt
from megatoken.model.gpt import GPT
from tests.tiny_model import CPU as CPU

SINGLE = Comm(DistEnv())


def make_model(vocab_size: int = 257, seq_len: int = 256, n_layer: int = 2, **fields: Any) -> GPT:
    """Return a model with weights so large that choices differ clearly."""
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len, "n_layer": n_layer}
    model = GPT(ModelConfig(n_head=2, d_model=16, d_ff=32, **sizes, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    return model


def harness_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Encode as lm-evaluation-harness: trailing spaces of the context move to the continuation."""
    context, continuation = prompt
    prefix = tokenizer.encode(context.rstrip()).tolist()
    ids = tokenizer.encode(context + continuation).tolist()
    return prefix, ids[len(prefix) :]


def separate_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Encode context and ending separately, as build-nanogpt and llm.c do."""
    return tokenizer.encode(prompt[0]).tolist(), tokenizer.encode(prompt[1]).tolist()


@torch.no_grad()
def log_probabilities(model: GPT, context: list[int], continuation: list[int]) -> torch.Tensor:
    """Return the fp32 log-probability of each id of the continuation."""
    ids = torch.tensor((context + continuation)[-(model.config.seq_len + 1) :])
    log_p = torch.log_softmax(model.logits(ids[None, :-1])[0].float(), -1)
    return log_p[-len(continuation) :].gather(1, ids[-len(continuation) :, None])[:, 0]


def predict(model: GPT, tokenizer: Tokenizer, example: Example) -> tuple[int, int, int]:
    """Return the choices by sum, by sum per character, and by mean per token of the raw text."""
    model.eval()
    joint = [log_probabilities(model, *harness_ids(p, tokenizer)) for p in example.prompts]
    raw = [log_probabilities(model, *separate_ids(p, tokenizer)) for p in example.raw_prompts]
    sums = np.array([float(log_p.sum()) for log_p in joint])
    per_character = sums / np.array(example.lengths)
    means = [float(log_p.mean()) for log_p in raw]
    return int(sums.argmax()), int(per_character.argmax()), int(np.argmax(means))

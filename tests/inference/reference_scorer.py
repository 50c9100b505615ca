"""Small models, and a reference scorer that computes every choice by itself from full logits."""

from typing import Any

import numpy as np
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.inference.tasks import Example, Prompt
from megatoken.model.gpt import GPT
from megatoken.text.tokenizer import Tokenizer
from tests.tiny_model import CPU as CPU
from tests.tiny_model import enlarge

SINGLE = Comm(DistEnv())


def make_model(vocab_size: int = 257, seq_len: int = 256, n_layer: int = 2, **fields: Any) -> GPT:
    """Return a model with weights so large that choices differ clearly.

    Ids that pad the vocabulary would be the likeliest if they were used.
    """
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len, "n_layer": n_layer}
    model = enlarge(GPT(ModelConfig(n_head=2, d_model=16, d_ff=32, **sizes, **fields)), 5.0)
    model.lm_head_weight.data[vocab_size:] = 100.0
    return model


def harness_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Encode as lm-evaluation-harness: trailing spaces of the context move to the continuation."""
    context, continuation = prompt
    prefix = tokenizer.encode(context.rstrip()).tolist()
    ids = tokenizer.encode(context + continuation).tolist()
    return prefix, ids[len(prefix) :]


@torch.no_grad()
def log_probabilities(model: GPT, context: list[int], continuation: list[int]) -> torch.Tensor:
    """Return the fp32 log-probability of each id of the continuation."""
    ids = torch.tensor((context + continuation)[-(model.config.seq_len + 1) :])
    log_p = torch.log_softmax(model.logits(ids[None, :-1])[0].float(), -1)
    return log_p[-len(continuation) :].gather(1, ids[-len(continuation) :, None])[:, 0]


def predict(model: GPT, tokenizer: Tokenizer, example: Example) -> tuple[int, int, int]:
    """Return the choices by sum, by sum per character, and by mean per token of the raw text.

    Raw contexts and endings are encoded separately, as by build-nanogpt and llm.c.
    """
    model.eval()
    joint = (harness_ids(prompt, tokenizer) for prompt in example.prompts)
    sums = np.array([float(log_probabilities(model, *ids).sum()) for ids in joint])
    raw = ([tokenizer.encode(text).tolist() for text in prompt] for prompt in example.raw_prompts)
    means = [float(log_probabilities(model, *ids).mean()) for ids in raw]
    scores = (sums, sums / np.array(example.lengths), means)
    by_sum, by_character, by_token = (int(np.argmax(values)) for values in scores)
    return by_sum, by_character, by_token

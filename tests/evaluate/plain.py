"""The scorer's plain twin: every choice by itself, whole logits, as the rules are written down. No tree, no batch."""

from pathlib import Path

import numpy as np
import torch

from megatoken.data.tokenizer import Tokenizer
from megatoken.device import Device
from megatoken.evaluate.tasks import Example, Prompt
from megatoken.model.gpt import GPT
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.topology import Topology

CPU = Device(place=torch.device("cpu"), name="cpu", precision="fp32", peak_flops=0.0, peak_source="unknown")
ALONE = Ranks(Topology())


def harness_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """lm-evaluation-harness: trailing spaces move to the continuation, which is what the context's ids leave over."""
    context, continuation = prompt
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation, context = context[-spaces:] + continuation, context[:-spaces]
    whole, first = tokenizer.encode(context + continuation).tolist(), tokenizer.encode(context).tolist()
    return first, whole[len(first) :]


def apart_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """build-nanogpt, llm.c: context and ending by themselves."""
    return tokenizer.encode(prompt[0]).tolist(), tokenizer.encode(prompt[1]).tolist()


@torch.no_grad()
def log_probabilities(model: GPT, context: list[int], continuation: list[int]) -> torch.Tensor:
    """Of each id of the continuation, in fp32."""
    ids = torch.tensor((context + continuation)[-(model.shape.seq_len + 1) :])
    log_p = torch.log_softmax(model.logits(model(ids[None, :-1]))[0].float(), -1)
    return log_p[-len(continuation) :].gather(1, ids[-len(continuation) :, None])[:, 0]


def choose(model: GPT, tokenizer: Tokenizer, example: Example) -> tuple[int, int, int]:
    """Choices by sum, by sum over characters, and by mean over tokens of the raw text."""
    model.eval()
    sums = np.array([float(log_probabilities(model, *harness_ids(p, tokenizer)).sum()) for p in example.prompts])
    raw = [log_probabilities(model, *apart_ids(prompt, tokenizer)) for prompt in example.raw]
    means = [float(-log_p.mean()) for log_p in raw]
    return int(sums.argmax()), int((sums / np.array(example.lengths)).argmax()), int(np.argmin(means))


def write_lines(path: Path, rows: list[object]) -> Path:
    import json

    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path

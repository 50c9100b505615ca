"""Decoding on CUDA builds no cuDNN plan per token."""

import torch

from megatoken.config.presets import PRESETS
from megatoken.config.schema import MachineConfig
from megatoken.model.gpt import GPT
from megatoken.sampling.choose import Sampling
from megatoken.sampling.generate import generate_ids
from megatoken.system.device import open_device
from tests.nullgpu import counters
from tests.nullgpu.models import shrink

TOKENS = 64


def test_tokens_need_no_plans():
    device = open_device(MachineConfig(device="cuda"))
    model = GPT(shrink(PRESETS["gpt2-124m"], 2), seed=None).to(torch.device("cuda"), torch.bfloat16)
    counters.reset()
    (ids,) = generate_ids(model, list(range(16)), Sampling(TOKENS, 0.0), device=device)
    counts = counters.read()
    assert len(ids) == TOKENS
    assert counts.find("[cudnn plan]") == 0
    assert counts.find("cublasSgemm", "softmax") == 0

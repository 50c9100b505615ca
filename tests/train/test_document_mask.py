"""Masked documents have the losses of each document alone, on any layout and resumed."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.data.dataloader import separate_documents, to_batch
from megatoken.model.gpt import set_attention
from megatoken.model.native.selection import find_library
from megatoken.train.state import TrainState
from megatoken.train.step import forward_backward
from megatoken.train.val_loss import validation_loss
from tests.tiny_model import (
    CPU,
    TINY_GEMMA,
    TINY_GPT,
    TINY_LLAMA,
    TINY_MODERN,
    TINY_OLMO,
    tiny_state,
    tiny_step_config,
)
from tests.train.test_val_loss import SINGLE

EOT, T = 96, 16  # of the tiny models


def make_windows() -> np.ndarray:
    """Windows of T + 1 tokens with documents of any length, some of which begin at the edges."""
    rows = np.random.default_rng(0).integers(0, EOT, (8, T + 1))
    rows[np.random.default_rng(1).random(rows.shape) < 0.15] = EOT
    rows[0], rows[1, 0], rows[2, [-1, -2]], rows[3, 5:7] = rows[0] % EOT, EOT, EOT, EOT
    return rows.astype(np.uint16)


def split_documents(rows: np.ndarray) -> list[np.ndarray]:
    """Each document of each window alone (1, its tokens and the target of the last one)."""
    pieces = []
    for row in rows:
        edges = [0, *(index for index in range(1, T) if row[index] == EOT), T]
        pieces += [row[None, first : end + 1] for first, end in pairwise(edges)]
    return pieces


def large_state(model_config: ModelConfig) -> TrainState:
    """With matrices so large that attention changes the loss."""
    state = tiny_state(model_config=model_config)
    with torch.no_grad():
        for param in state.model.parameters():
            param.mul_(5.0 if param.dim() > 1 else 1.0)
    return state


@pytest.mark.parametrize("attention", ["explicit", "flash", "blocked", "native"])
@pytest.mark.parametrize("model_config", [TINY_GPT, TINY_LLAMA, TINY_MODERN, TINY_GEMMA, TINY_OLMO])
def test_documents_of_a_window_are_trained_as_if_alone(model_config: ModelConfig, attention: str):
    if attention == "native" and model_config.window:
        pytest.skip("native attention has no windows")
    if attention == "native" and find_library() is None:
        pytest.skip("the native kernels are not compiled")
    rows = make_windows()
    alone = large_state(model_config).model
    expected = torch.zeros(())
    for batch in map(to_batch, split_documents(rows)):
        loss = alone.loss(batch.inputs_BT, batch.targets_BT)
        expected = expected + loss * batch.targets_BT.numel() / (len(rows) * T)
    expected.backward()
    batch = separate_documents(to_batch(rows), EOT)
    for micro_batch in (8, 2, 1):
        state = large_state(model_config)
        set_attention(state.model, attention)
        loss = forward_backward(state, tiny_step_config(micro_batch), CPU, batch)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for (name, found), param in zip(
            state.model.named_parameters(), alone.parameters(), strict=True
        ):
            torch.testing.assert_close(found.grad, param.grad, rtol=1e-5, atol=1e-6, msg=name)
    halves = [separate_documents(to_batch(half), EOT) for half in (rows[:5], rows[5:])]
    options = {"chunk": 8, "comm": SINGLE, "count_bytes": lambda *_: 0}
    validated = validation_loss(state.model, halves, CPU, **options)
    assert validated["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert validated["target_tokens"] == len(rows) * T
    unmasked = forward_backward(large_state(model_config), tiny_step_config(), CPU, to_batch(rows))
    assert abs(unmasked.item() - expected.item()) > 1e-4

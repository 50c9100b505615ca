"""Any split of a batch gives the same optimizer step, and bad numbers never reach the weights."""

import copy
import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import OptimConfig
from megatoken.base.errors import NumericsError
from megatoken.data.dataloader import Batch
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.model.gpt import GPT, set_activation_checkpointing
from megatoken.optim.optimizer import build_optimizer
from megatoken.train.state import Position
from megatoken.train.step import (
    fit_rows,
    forward_backward,
    train_step,
    train_step_async,
    wait_for_steps,
)
from tests.tiny_model import (
    CPU,
    TINY_GPT,
    TINY_LLAMA,
    tiny_batch,
    tiny_rows,
    tiny_state,
    tiny_step_config,
)


def gradients_of(model: GPT) -> dict[str, Any]:
    return {name: param.grad for name, param in model.named_parameters()}


def gradients(
    micro_batch: int, chunk: int = 1024, recompute: str = "none", **options: Any
) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients of a batch. options: of tiny_state."""
    state = tiny_state(**options)
    set_activation_checkpointing(state.model, recompute)
    step_config = tiny_step_config(micro_batch, machine__loss_chunk=chunk)
    loss = forward_backward(state, step_config, CPU, tiny_batch())
    return loss.item(), gradients_of(state.model)


def test_micro_batches_of_shorter_rows_have_more_of_them():
    for rows, row_tokens, size in (
        (512, 256, 16),  # of the context's length
        (512, 24, 128),  # 170 rows have the tokens of 16 of 256
        (96, 24, 128),  # all in one
        (512, 257, 8),  # a pair of completions: more than the context
        (512, 512, 8),
        (24, 60, 32),
    ):
        assert fit_rows(16, rows, row_tokens, 256) == size


@pytest.mark.parametrize(("deterministic", "sizes"), [(False, [8] * 4), (True, [2] * 16)])
def test_short_rows_share_a_micro_batch_unless_deterministic(deterministic: bool, sizes: list[int]):
    state, rows = tiny_state(), []
    forward = state.compute.forward
    state.compute = replace(
        state.compute,
        forward=lambda ids, **options: rows.append(len(ids)) or forward(ids, **options),
    )
    step_config = tiny_step_config(2, machine__deterministic=deterministic)
    ids = torch.zeros(32, 4, dtype=torch.int64)
    forward_backward(state, step_config, CPU, Batch(ids, ids))
    assert rows == sizes


@pytest.mark.parametrize(("micro_batch", "chunk"), [(8, 0), (1, 0), (2, 5), (3, 1024), (4, 5)])
def test_a_step_in_any_pieces_equals_plain_torch(micro_batch: int, chunk: int):
    state = tiny_state()
    twin = copy.deepcopy(state.model)
    inputs, targets = tiny_rows()
    loss = torch.nn.functional.cross_entropy(twin.logits(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    found_loss, found = gradients(micro_batch, chunk)
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(found, gradients_of(twin), rtol=1e-5, atol=1e-7)
    step_config = tiny_step_config(micro_batch, optim__grad_clip=0.5, machine__loss_chunk=chunk)
    report = train_step(state, step_config, CPU, tiny_batch())
    lr = step_config.schedule.lr(0)
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    build_optimizer(twin, OptimConfig(lr=lr)).step()
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert (report.lr, report.step, state.step) == (lr, 1, 1)
    torch.testing.assert_close(state.model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("implementation", "clip"), [("foreach", 0.05), ("fused", 0.0), ("fused", 0.05)]
)
def test_adamw_implementations_agree(implementation: str, clip: float):
    states = [tiny_state(implementation=name) for name in (implementation, "loop")]
    assert [state.skips_bad_on_device for state in states] == [implementation == "fused", False]
    for state in states:
        for step in range(4):
            train_step(state, tiny_step_config(optim__grad_clip=clip), CPU, tiny_batch(step))
    weights = [state.model.state_dict() for state in states]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_bad_step_and_all_after_it_leave_the_weights_until_it_is_read(name: Any):
    optim = OptimConfig(name=name, cautious_decay=name == "muon")
    state, alone = tiny_state(optim=optim), tiny_state(optim=optim)
    step_config, pending = tiny_step_config(), []
    bias = state.model.norm.bias.detach()
    for step in range(5):
        kept = bias.clone()
        if step == 2:
            bias[0] = float("nan")
        pending.append(train_step_async(state, step_config, CPU, tiny_batch(step)))
        if step == 2:
            bias.copy_(kept)
    for step in range(2):
        train_step(alone, step_config, CPU, tiny_batch(step))
    assert [report.step for report in wait_for_steps(state, pending[:2])] == [1, 2]
    assert state.step == 5
    metrics = wait_for_steps(state, pending)
    assert [(report.step, report.bad) for report in metrics] == [(1, False), (2, False), (3, True)]
    assert math.isnan(metrics[-1].loss)
    assert state.step == 2
    for each in (state, alone):
        train_step(each, step_config, CPU, tiny_batch(7))  # the next one counts again
    found, expected = (
        {"model": each.model.state_dict(), "optimizer": each.optimizer.state_dict()}
        for each in (state, alone)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["fused", "loop"])
def test_a_step_without_gradient_ends_the_run_and_leaves_the_weights(implementation: str):
    state, step_config = tiny_state(implementation=implementation), tiny_step_config()
    train_step(state, step_config, CPU, tiny_batch())
    weights = copy.deepcopy(state.model.state_dict())
    # Reaches no weight but the output layer's.
    state.compute = replace(
        state.compute, forward=lambda ids: torch.zeros(*ids.shape, TINY_GPT.d_model)
    )
    with pytest.raises(NumericsError, match=r"gradient is 0 — step 2"):
        train_step(state, step_config, CPU, tiny_batch())
    assert state.step == 1
    torch.testing.assert_close(state.model.state_dict(), weights, rtol=0, atol=0)


def test_gradients_of_earlier_micro_batches_survive_in_the_memory_of_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch,
):
    state, marked = tiny_state(), []

    def mark():
        """Zero gradients, as the graphs of the next step overwrite their memory."""
        marked.append([p.grad.zero_() for p in state.model.parameters() if p.grad is not None])

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
    state.compute = replace(state.compute, cuda_graphs=True)
    for step in (1, 2):
        forward_backward(state, tiny_step_config(2), CPU, tiny_batch())
        found, expected = gradients_of(state.model), gradients(8)[1]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        state.optimizer.zero_grad()
        assert marked == step * [[]]  # once a step, when no gradient is left


def kept_bytes(recompute: str, model_config: ModelConfig) -> int:
    """Return the bytes that the forward keeps for the backward."""
    state = tiny_state(model_config=model_config)
    set_activation_checkpointing(state.model, recompute)
    parameters = {p.untyped_storage().data_ptr() for p in state.model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = state.compute.forward(tiny_rows()[0])
    assert hidden.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("model_config", [TINY_GPT, TINY_LLAMA])
def test_activation_checkpointing_saves_memory_and_keeps_gradients(model_config: ModelConfig):
    """Recomputation repeats the dropout masks."""
    plain, gelu, block = (kept_bytes(what, model_config) for what in ("none", "gelu", "block"))
    wide = model_config.n_layer * 8 * 16 * model_config.d_ff * 4
    assert gelu <= plain - wide + 4096  # of each layer the MLP's wide output, fp32
    assert block < plain / 3
    options = {"dropout": 0.3, "model_config": model_config}
    expected = gradients(4, **options)
    for recompute in ("gelu", "block"):
        found = gradients(4, recompute=recompute, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_dropout_does_not_depend_on_micro_batch_or_processes(micro_batch: int):
    """Compare six sequences at once with two processes' shares in micro-batches."""
    whole, shared = tiny_state(dropout=0.3), tiny_state(dropout=0.3)
    rows = [half[:6] for half in tiny_rows()]
    expected = forward_backward(whole, tiny_step_config(6), CPU, Batch(*rows))
    loss = 0.0
    for rank in range(2):
        shared.sharded = replace(shared.sharded, dims=ParallelDims(dp_replicate=2, rank=rank))
        batch = Batch(*(half.chunk(2)[rank] for half in rows))
        loss += float(forward_backward(shared, tiny_step_config(micro_batch), CPU, batch)) / 2
    assert loss == pytest.approx(float(expected), rel=1e-6)
    found = {name: grad / 2 for name, grad in gradients_of(shared.model).items()}
    torch.testing.assert_close(found, gradients_of(whole.model), rtol=1e-5, atol=1e-7)


def test_every_step_and_seed_drops_other_values():
    def loss(dropout, seed, step):
        state = tiny_state(dropout=dropout)
        state.position = Position(step=step)
        return forward_backward(state, tiny_step_config(seed=seed), CPU, tiny_batch()).item()

    draws = [(0.3, 1, 0), (0.3, 1, 0), (0.3, 1, 1), (0.3, 2, 0), (0.0, 1, 0)]
    first, again, *others = [loss(*draw) for draw in draws]
    assert first == again
    assert len({first, *others}) == 4


def test_only_weights_that_train_are_copied_in_a_step():
    state = tiny_state(model_config=replace(TINY_GPT, lora_rank=2))
    state.enable_master_weights(deepcopy(state.model).bfloat16())
    copies = dict(state.compute.model.named_parameters())
    writes = {name: low._version for name, low in copies.items()}
    train_step(state, tiny_step_config(), CPU, tiny_batch())
    for name, param in state.model.named_parameters():
        assert (copies[name]._version > writes[name]) == (".lora." in name), name
        assert torch.equal(copies[name], param.to(torch.bfloat16))
